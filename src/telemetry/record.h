/* A record as seven words of payload, and back. */
#ifndef EVEN_TELEMETRY_RECORD_H
#define EVEN_TELEMETRY_RECORD_H

#include "telemetry/ring.h"

#include <stdbool.h>

enum { EVEN_EVENT_WORDS_KEPT = 32 };

void even_record_pack_span(const even_span_record *record, uint64_t words[EVEN_RING_PAYLOAD_WORDS]);
void even_record_pack_step(const even_step_record *record, uint64_t words[EVEN_RING_PAYLOAD_WORDS]);
void even_record_pack_event(const even_event_record *record, uint64_t words[EVEN_RING_PAYLOAD_WORDS]);
/* false: the words are no record. */
bool even_record_unpack(const uint64_t words[EVEN_RING_PAYLOAD_WORDS], even_record *out);

#endif
