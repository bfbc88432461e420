/* What the agents of one job say to one another: messages over a stream of bytes. Pure: bytes in, messages out.
 *
 *   12 bytes: kind, bytes of JSON, bytes of data (32 bits each, little-endian); the JSON; the data.
 *
 * Each kind has limits for both parts, looked at before any memory is taken for them. */
#ifndef EVEN_ORCHESTRATOR_MESSAGE_H
#define EVEN_ORCHESTRATOR_MESSAGE_H

#include "base/text.h"

#include <stdbool.h>
#include <stdint.h>

/* Raised with every change of what follows; agents of two numbers do not work together. */
#define EVEN_MESSAGE_PROTOCOL 20

/* X(name, number, most bytes of JSON, most bytes of data) */
#define EVEN_MESSAGE_LIST(X)                                                                           \
  X(GREET, 1, 4096, 0)             /* to the leader, the first: versions, which host */                \
  X(REFUSE, 2, 4096, 0)            /* either way, the last: what does not fit, and the fix */          \
  X(CHECK, 3, 65536, 0)            /* to a host: what the script needs; it looks whether it has it */  \
  X(FACTS, 4, 4 << 20, 0)          /* to the leader: what it has */                                    \
  X(START, 5, 4 << 20, 0)          /* to a host: an attempt, and all that its ranks get */             \
  X(STARTED, 6, 256, 0)            /* to the leader: a rank's process */                               \
  X(LINE, 7, 64, 65536)            /* to the leader: a line of a rank's output */                      \
  X(ENDED, 8, 512, 65536)          /* to the leader: a rank has ended, how, and its last output */     \
  X(STOPPED, 9, 256, 0)            /* to the leader: somebody stopped a rank, or let it go on */       \
  X(HUNG, 10, 1024, 0)             /* to the leader: a rank hangs, and shall be ended for it */        \
  X(NOTICE, 11, 4096, 0)           /* to the leader: a line for the user */                            \
  X(SIGNAL, 12, 256, 0)            /* to a host: a signal for its ranks, or for one */                 \
  X(SETTLED, 13, 65536, 0)         /* to the leader: nothing of the attempt is left there */           \
  X(RECORDS, 14, 1 << 15, 1 << 20) /* to the leader: telemetry of its ranks, up to which places */     \
  X(BEAT, 15, 0, 64)               /* either way: I live; clocks */                                    \
  X(END, 16, 64, 0)                /* to a host, the last: the job has ended */                        \
  X(FAILED, 17, 4096, 0)           /* to the leader: the host could not do its part of the attempt */  \
  X(HANG, 18, 2048, 0)             /* to the leader: a rank hangs, or goes on: for the history */      \
  X(USAGE, 19, 1 << 17, 0)         /* to the leader: what its ranks' processes take of the host */     \
  X(DRAIN, 24, 1024, 0)            /* to the leader: the host has notice that it must end soon */      \
  X(MEMBER, 30, 0, 64)             /* between voters: who I am, and who leads, as far as I know */     \
  X(RAFT, 31, 0, 1 << 20)          /* between voters: the log of who leads */                          \
  X(MEMBERS, 32, 1 << 18, 0)       /* to a host: who the members are, voters or not, and where */      \
  X(ESTATE, 33, 4 << 20, 0)        /* to a host: what it needs to take the leader's place */           \
  X(VOTES, 34, 4096, 0)            /* to the leader: whether it is the member that it was named */     \
  X(LEADER, 35, 256, 0)            /* of a voter, to who would join: where the leader takes hosts */   \
  X(PARCEL, 40, 1024, 0)           /* to its receiver: a parcel is offered (parcel.h) */               \
  X(PARCEL_TAKE, 41, 256, 0)       /* to its sender: so much of it was taken */                        \
  X(PIECE, 42, 256, 1 << 20)       /* to its receiver: a piece of it */                                \
  X(PARCEL_END, 43, 8192, 0)       /* either way: it has arrived, or does not */                       \
  X(PARCEL_GONE, 44, 64, 0)        /* to a host: another one is lost, and so are its parcels */        \
  X(CHECKPOINT, 45, 32768, 0)      /* to a host: has it this checkpoint? Else it gets it */            \
  X(HOLDS, 46, 32768, 0)           /* to the leader: it has, and where; or not, or cannot */           \
  X(PLACES, 47, 4 << 20, 0)        /* to a host: its part in the attempt that is to follow */          \
  X(PLACED, 48, 4 << 20, 0)        /* to the leader: its devices for it; its processes wait */         \
  X(GENERATION, 50, 65536, 0)      /* to a host: who goes on, and where they meet */                   \
  X(BOARD, 51, 4 << 20, 0)         /* to the leader: what its ranks say of going on */                 \
  X(FILL, 52, 64, 0)               /* to a host: a process takes the place of a lost rank */           \
  X(ADOPT, 53, 1 << 17, 0)         /* to a host: its attempt goes on, under this leader */             \
  X(RUNS, 54, 8 << 20, 0)          /* to the leader: an attempt that outlasted another one */          \
  X(STANDING, 55, 1 << 19, 0)      /* either way: which ranks were stopped, and for how long */        \
  X(OPENING, 56, 256, 0)           /* to a host: ranks wait in torch's init_process_group for all */   \
  X(WAITING, 57, 64, 0)            /* either way: all ranks there wait in collectives, for too long */ \
  X(SEEK, 58, 65536, 0)            /* to a host: which checkpoints has it? Or: send this one back */   \
  X(FOUND, 59, 1 << 18, 0)         /* to the leader: these (bring_give.h); or why it cannot */

typedef enum even_message_kind {
#define EVEN_MESSAGE_ENUM(name, number, json, data) EVEN_MESSAGE_##name = (number),
  EVEN_MESSAGE_LIST(EVEN_MESSAGE_ENUM)
#undef EVEN_MESSAGE_ENUM
} even_message_kind;

enum { EVEN_MESSAGE_HEAD = 12 };

/* Points into the bytes that it was read from. */
typedef struct even_message {
  even_message_kind kind;
  const char *json; /* not NUL-terminated */
  size_t json_bytes;
  const unsigned char *data;
  size_t data_bytes;
} even_message;

/* Looks for the next whole message in `count` bytes. *used: its bytes, 0 while it is not whole; *wanted: how many bytes
 * it takes, as far as that is known. EVEN_ERR_INPUT: no message begins here, or one beyond its limits; nothing that
 * follows can be read any more. */
even_status even_message_next(const unsigned char *bytes, size_t count, even_message *out, size_t *used,
                              size_t *wanted) EVEN_MUST_USE;
/* Appends a message to `out`. EVEN_ERR_OVERFLOW where a part is beyond its limit. */
even_status even_message_add(even_text *out, even_message_kind kind, const char *json, size_t json_bytes,
                             const void *data, size_t data_bytes) EVEN_MUST_USE;
/* The most data that a message of this kind may have. */
size_t even_message_most_data(even_message_kind kind);

#endif
