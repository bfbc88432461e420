/* The layout of the rings in shared memory, known to writer and reader alone.
 *
 * segment: header, then for each rank a ring; ring: the next ticket, the totals of the rank's calls, then the slots. */
#ifndef EVEN_TELEMETRY_RING_H
#define EVEN_TELEMETRY_RING_H

#include "os/shared_memory.h"

#include <evenstep/telemetry.h>
#include <stdatomic.h>

#define EVEN_RING_MAGIC UINT64_C(0x314c45544e455645) /* "EVENTEL1", little-endian */

enum { EVEN_RING_VERSION = 4, EVEN_RING_PAYLOAD_WORDS = 7, EVEN_RING_DEFAULT_RECORDS = 8192, EVEN_RING_TOTALS = 7 };

typedef struct even_ring_header {
  uint64_t magic;
  uint32_t version;
  uint32_t slot_bytes;
  uint32_t ranks;
  uint32_t records;       /* a ring; a power of two */
  _Atomic uint32_t calls; /* not 0: a record is wanted for each call */
  _Atomic uint32_t ends;  /* not 0: the ranks shall save their state after the step under way, and end */
  uint8_t unused[96];
} even_ring_header;

/* One cache line. sequence: 0 never written; 2t + 1 while the record with ticket t is written, 2t + 2 when it is whole.
 * The payload is atomic too, so that a reader that races with a writer is defined (and thrown away). */
typedef struct even_ring_slot {
  _Atomic uint64_t sequence;
  _Atomic uint64_t payload[EVEN_RING_PAYLOAD_WORDS];
} even_ring_slot;

/* The ticket has two lines for itself: processors fetch lines in pairs. The totals, too: only their rank writes them,
 * and the reader looks once a second. */
typedef struct even_ring {
  _Atomic uint64_t next_ticket;
  uint8_t unused[120];
  _Atomic uint64_t totals[EVEN_RING_TOTALS]; /* as even_call_totals */
  _Atomic uint64_t steps;                    /* done, by the last step record */
  _Atomic uint64_t activity;                 /* as EVEN_RING_STEPPED_BIT below says */
  _Atomic uint64_t source; /* of copies (copy.h): how far the ring they are from was taken, 0: no copies */
  uint8_t unused_too[48];
  even_ring_slot slots[];
} even_ring;

/* even_activity in the low byte; whether its process has made a step; a bit for each activity that it has ended; how
 * often one was entered. */
enum { EVEN_RING_STEPPED_BIT = 8, EVEN_RING_ENDED_SHIFT = 16, EVEN_RING_ENTERED_SHIFT = 32 };

_Static_assert(sizeof(even_ring_header) == 128, "header");
_Static_assert(sizeof(even_ring_slot) == 64, "a slot is a cache line");
_Static_assert(sizeof(even_ring) == 256, "ring");
_Static_assert(sizeof(even_call_totals) == EVEN_RING_TOTALS * sizeof(uint64_t), "totals");

/* Maps a duplicate of `fd` and checks that it is a segment of this version and of the right size. *facts is a copy:
 * later damage to the header cannot lead outside the mapping. */
even_status even_ring_map(int fd, even_shared_memory *memory, even_ring_header *facts) EVEN_MUST_USE;
even_ring *even_ring_of_rank(const even_shared_memory *memory, const even_ring_header *facts, uint32_t rank);

#endif
