/* A record as seven words of payload, and back; an event of long words as up to three slots, one behind the other. */
#ifndef EVEN_TELEMETRY_RECORD_H
#define EVEN_TELEMETRY_RECORD_H

#include "telemetry/ring.h"

#include <stdbool.h>

enum {
  EVEN_RECORD_WORDS_FIRST = 32, /* bytes of an event's words in its first slot */
  EVEN_RECORD_WORDS_NEXT = 48,  /* in each further one */
  EVEN_RECORD_MOST_SLOTS = 3
};

_Static_assert(EVEN_RECORD_WORDS_FIRST + (EVEN_RECORD_MOST_SLOTS - 1) * EVEN_RECORD_WORDS_NEXT ==
                   EVEN_EVENT_WORDS_BYTES,
               "an event's words fill its slots");

typedef uint64_t even_record_slot[EVEN_RING_PAYLOAD_WORDS];

/* All into zeroed slots. */
void even_record_pack_span(const even_span_record *record, even_record_slot out);
void even_record_pack_step(const even_step_record *record, even_record_slot out);
void even_record_pack_call(const even_call_record *record, even_record_slot out);
void even_record_pack_leg(const even_leg_record *record, even_record_slot out);
/* Returns how many slots it took. */
size_t even_record_pack_event(const even_event_record *record, even_record_slot out[EVEN_RECORD_MOST_SLOTS]);
/* The first slot of a record; *more: how many slots of it follow. false: the words are no such slot. */
bool even_record_unpack(const even_record_slot words, even_record *out, unsigned *more);
/* Slot `number` (1 …) of the event in *out. false: the words are another one's. */
bool even_record_unpack_more(const even_record_slot words, unsigned number, even_record *out);

#endif
