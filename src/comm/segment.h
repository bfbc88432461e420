/* What a group's shared segment looks like: a header, then for each rank its
 * control block, its flight record, its waits, its slots for small messages, its staging and its arena. */
#ifndef EVEN_COMM_SEGMENT_H
#define EVEN_COMM_SEGMENT_H

#include <evenstep/comm.h>
#include <evenstep/flight.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define EVEN_COMM_MAGIC 0x6d6d6f636e657665u /* "evencomm", read as bytes */
#define EVEN_COMM_VERSION 14u
#define EVEN_COMM_MAX_RANKS 4096
#define EVEN_COMM_RECORD_ONLY UINT64_MAX /* in place of arena_bytes: a board, which moves no data */
/* Messages up to this size go through the slots, with one synchronisation. */
#define EVEN_COMM_SLOT_BYTES ((size_t)8192)
#define EVEN_COMM_LINE ((size_t)64) /* bytes of a cache line: parts that two ranks write begin on one */
#define EVEN_COMM_CPU_WORDS 16      /* CPUs 0 … 1023 */

typedef enum even_call_kind {
  EVEN_CALL_OPEN = 1,
  EVEN_CALL_ALL_REDUCE,
  EVEN_CALL_REDUCE_SCATTER,
  EVEN_CALL_ALL_GATHER,
  EVEN_CALL_BROADCAST,
  EVEN_CALL_BARRIER,
  EVEN_CALL_ALL_TO_ALL,
  EVEN_CALL_REDUCE, /* this one and those that follow: between GPUs alone */
  EVEN_CALL_GATHER,
  EVEN_CALL_SCATTER
} even_call_kind;
#define EVEN_CALL_BYTES 0xffffu /* as dtype: bytes of any */

typedef struct even_comm_call even_comm_call;
/* "all_reduce of 100 F32 elements, SUM" into `text` (call.c). */
void even_call_describe(const even_comm_call *call, char *text, size_t bytes);
/* " of F32", or "" where they are not said (called.h). */
void even_call_describe_elements(uint32_t elements, char *text, size_t bytes);
/* Whether two ranks called different things; the divisions among the ranks, and the elements of an all-to-all, are not
 * compared. */
bool even_call_differs(const even_comm_call *a, const even_comm_call *b);
/* What to do then. */
#define EVEN_CALL_DIFFERS_FIX \
  "all ranks must make the same calls in the same order: look for a branch that depends on the rank or on the data"

/* Why a group ended; the low bits name a rank: the lost one, the late one, the one that stands still, the one that
 * found the mismatch, the one that waited for any of the others. */
#define EVEN_GROUP_WHOLE 0u
#define EVEN_GROUP_REVOKED 0x10000000u
#define EVEN_GROUP_LOST 0x20000000u
#define EVEN_GROUP_TIMEOUT 0x30000000u
#define EVEN_GROUP_MISMATCH 0x40000000u
#define EVEN_GROUP_ALL_LATE 0x50000000u
#define EVEN_GROUP_STOPPED 0x60000000u
#define EVEN_GROUP_TOLD 0x70000000u /* the header's words say why */
#define EVEN_GROUP_CAUSE(state) ((state) & 0xf0000000u)
#define EVEN_GROUP_RANK(state) ((int)((state) & 0x0fffffffu))

/* One collective call, as its rank announces it. */
struct even_comm_call {
  uint32_t kind; /* even_call_kind */
  uint32_t dtype;
  uint32_t op;
  int32_t root;
  uint64_t count;
  uint64_t piece_bytes;  /* of rank 0: how large a staged piece is in this call, with EVEN_PIECES_CHAINED and _TIMED;
                            over UCX: which way it goes */
  uint64_t arena_offset; /* where in the arena the data lies, EVEN_NOT_IN_ARENA where elsewhere */
  uint64_t signature;    /* of all but piece_bytes and arena_offset, and of all counts */
};
#define EVEN_NOT_IN_ARENA UINT64_MAX

/* A rank's words, written by that rank alone but for what its peers have seen of it. The first line is what they poll.
 */
typedef struct even_comm_control {
  _Alignas(128) _Atomic uint32_t sequence;   /* stages that this rank has reached: only ever grows, modulo 2^32 */
  _Atomic uint32_t left;                     /* 1 once the rank has closed the group */
  _Atomic uint64_t signature[2];             /* of the call under way, by the parity of the call */
  _Alignas(64) even_comm_call call[2];       /* the same in full */
  _Alignas(64) _Atomic uint32_t chain_added; /* chain.c: pieces to which this rank has added its data, modulo 2^32 */
  _Atomic uint32_t chain_taken;              /* and whose sums it has taken */
  _Atomic uint32_t in_place[2];              /* all_reduce.c: where the rank's result of a piece lies, by its parity */
  _Alignas(128) _Atomic uint32_t message_bell; /* the futex of those in this process who wait for messages */
  _Atomic uint32_t message_sleepers;
  _Alignas(128) _Atomic uint32_t process; /* 0: nobody has come yet */
  _Atomic uint32_t expected;              /* the process that will come, as far as the segment's maker knows; else 0 */
  _Atomic uint64_t start_time; /* of the process, as in /proc/PID/stat: tells it from a later one; 0: not said yet */
  uint64_t cpus[EVEN_COMM_CPU_WORDS]; /* which this rank may use */
  _Atomic uint32_t node_and_one; /* the NUMA node on which its part of the segment lies, and 1; 0: none was chosen */
  /* by its peers (peers.c): */
  _Alignas(64) _Atomic uint64_t looked_ns; /* when one of them last looked how it is; 0: at once again */
  _Atomic uint64_t stands_since_ns;        /* since when they see it stopped; 0: it goes on */
  _Atomic uint64_t stands_at_cpu_ns;       /* its CPU time then: one that is stopped and let go in turns does grow */
} even_comm_control;

/* What rank s sends to rank r, as a stream of bytes in a ring that follows; only s writes `written`, only r `read`. */
typedef struct even_comm_channel {
  _Alignas(128) _Atomic uint64_t written; /* bytes since the group was made */
  _Alignas(128) _Atomic uint64_t read;
} even_comm_channel;

/* Why the group has ended, where that is known from elsewhere: written once, before `state` says that it is there. */
typedef struct even_comm_end_words {
  _Atomic uint32_t taken; /* by who writes it */
  int32_t status;
  int32_t rank; /* as in even_error */
  char what[480];
  char fix[256];
} even_comm_end_words;
void even_comm_end_words_write(even_comm_end_words *words, const even_error *why);
void even_comm_end_words_read(const even_comm_end_words *words, even_error *out);

/* What the receiver of a message tells its sender: it does not fit. One at a time, by whoever finds it free. */
typedef struct even_comm_refusal {
  _Atomic uint32_t state; /* EVEN_REFUSAL_… */
  int32_t from;           /* the receiver */
  uint64_t tag;           /* of the message */
  even_comm_end_words words;
} even_comm_refusal;
#define EVEN_REFUSAL_NONE 0u
#define EVEN_REFUSAL_HELD 1u /* somebody writes or reads it */
#define EVEN_REFUSAL_SAID 2u

/* Of a rank, beside its messages. */
#define EVEN_MESSAGE_SITES 31u
typedef struct even_comm_mail {
  even_comm_refusal refusal;
  char sites[EVEN_MESSAGE_SITES][EVEN_FLIGHT_SITE_BYTES]; /* where it has sent some, written once; numbers from 1 on */
} even_comm_mail;

typedef struct even_comm_header {
  uint64_t magic;
  uint32_t version;
  uint32_t ranks;
  uint64_t arena_bytes;
  uint64_t segment_bytes;
  _Alignas(128) _Atomic uint32_t state;    /* EVEN_GROUP_…; changes once, from whole */
  _Alignas(128) _Atomic uint32_t bell;     /* the futex on which all wait */
  _Atomic uint32_t sleepers;               /* ranks that wait on it, or are about to */
  _Alignas(128) _Atomic uint32_t claim[2]; /* the next piece of a call's work, by the parity of the call */
  _Alignas(64) even_comm_end_words told;
} even_comm_header;

/* Byte offsets in the segment and sizes in it; a function of ranks and arena_bytes alone. */
typedef struct even_comm_layout {
  size_t controls;
  size_t flights; /* rank r's record: at flights + r * flight_stride */
  size_t flight_stride;
  size_t mails; /* rank r's: at mails + r * mail_stride */
  size_t mail_stride;
  size_t pads; /* rank r's waits (waits.h): at pads + r * pad_stride */
  size_t pad_stride;
  size_t slots; /* rank r: at slots + r * slot_stride, two of EVEN_COMM_SLOT_BYTES */
  size_t slot_stride;
  size_t stagings; /* rank r: at stagings + r * staging_stride */
  size_t staging_stride;
  size_t least_piece; /* bytes of a staged piece, and at most; the staging has room for four of these */
  size_t most_piece;
  size_t channels; /* from s to r: at channels + (s * ranks + r) * channel_stride */
  size_t channel_stride;
  size_t ring_bytes; /* a power of two; 0 where there are too many ranks for messages */
  size_t arenas;
  size_t arena_stride;
  size_t total;
} even_comm_layout;

/* Checks the parameters that all ranks share; EVEN_ERR_ARGUMENT, EVEN_ERR_OVERFLOW. */
even_status even_comm_layout_of(const even_comm_params *params, even_comm_layout *out) EVEN_MUST_USE;
/* The same of a segment that has no more than control blocks and flight records (board.h). */
even_status even_comm_layout_of_record(int ranks, even_comm_layout *out) EVEN_MUST_USE;
/* Writes the header into a zeroed segment. */
void even_comm_header_write(even_comm_header *header, const even_comm_params *params, const even_comm_layout *layout);
/* Whether a mapped segment is a group's, of this version, these ranks and this size. */
even_status even_comm_header_check(const even_comm_header *header, size_t mapped_bytes, const even_comm_params *params,
                                   const even_comm_layout *layout) EVEN_MUST_USE;

#endif
