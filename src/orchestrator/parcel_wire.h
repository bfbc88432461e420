/* What agents say to one another of a parcel, as JSON. */
#ifndef EVEN_ORCHESTRATOR_PARCEL_WIRE_H
#define EVEN_ORCHESTRATOR_PARCEL_WIRE_H

#include "orchestrator/parcel.h"

typedef struct even_parcel_note {
  even_message_kind kind;
  even_parcel parcel; /* from and to; of an offer all */
  uint64_t id;        /* by which its sender knows it, 1 … 2^63-1 */
  bool back;          /* it goes to the parcel's sender, else to its receiver */
  uint64_t at;        /* PIECE: where it belongs; TAKE: what was taken so far */
  bool last;          /* PIECE: the last one, with */
  uint64_t sum;       /* the XXH3 of all */
  even_error why;     /* END: status EVEN_OK: it was taken, whole */
  int host;           /* GONE */
} even_parcel_note;

/* Whether all of it went into `out` is for even_text_status to say. */
void even_parcel_note_write(const even_parcel_note *note, even_text *out);
/* `count`: of hosts. EVEN_ERR_INPUT where it is not whole, or a number is beyond its range. */
even_status even_parcel_note_read(const even_message *message, int count, even_parcel_note *out) EVEN_MUST_USE;

#endif
