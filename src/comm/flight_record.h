/* Inside the flight record: where a call is in it, and reading one that its rank may be writing. */
#ifndef EVEN_COMM_FLIGHT_RECORD_H
#define EVEN_COMM_FLIGHT_RECORD_H

#include "comm/flight.h"

static inline even_flight_record *even_flight_record_of(const even_flight_writer *flight, int rank) {
  return (even_flight_record *)(void *)((unsigned char *)flight->records + (size_t)rank * flight->stride);
}
static inline even_flight_slot *even_flight_slot_of(even_flight_record *record, uint64_t number) {
  return &record->slots[number % EVEN_FLIGHT_CALLS];
}

/* The number of the last call; 0: none yet. */
uint64_t even_flight_last_number(even_flight_record *record);
/* Whether the call is there, and did not change meanwhile. */
bool even_flight_read_call(even_flight_record *record, uint64_t number, even_flight_call *out);

#endif
