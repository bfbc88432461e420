/* The flight record in the segment: who writes it, and what failures say of it. */
#ifndef EVEN_COMM_FLIGHT_H
#define EVEN_COMM_FLIGHT_H

#include <evenstep/flight.h>
#include <stdatomic.h>

#define EVEN_FLIGHT_SITES 4
#define EVEN_FLIGHT_REACHED 384 /* bytes of even_flight_reached's words */

/* A collective; a line, written by its rank alone. Atomic, so that a reader that races is defined; `number` is 0 while
 * the rest changes. */
typedef struct even_flight_slot {
  _Alignas(64) _Atomic uint64_t number;
  _Atomic uint64_t began_ns;
  _Atomic uint64_t ended_ns;
  _Atomic uint64_t count;
  _Atomic uint64_t what; /* kind, dtype, op, root: 16 bits each */
  _Atomic uint64_t state;
  _Atomic uint64_t site; /* its number; 0: not known */
} even_flight_slot;

typedef struct even_flight_site {
  _Atomic uint64_t number; /* 0 while the text changes */
  _Atomic uint64_t text[EVEN_FLIGHT_SITE_BYTES / sizeof(uint64_t)];
} even_flight_site;

typedef struct even_flight_record {
  even_flight_slot slots[EVEN_FLIGHT_CALLS]; /* by the call's number */
  even_flight_site sites[EVEN_FLIGHT_SITES]; /* by the site's number */
  _Atomic uint64_t said;                     /* the number of the failed call of which its rank has said all it knows */
} even_flight_record;

/* A rank's own side. */
typedef struct even_flight_writer {
  even_flight_record *records; /* of all ranks, `stride` apart; NULL: none are kept */
  size_t stride;
  bool under_way;
  uint64_t site;  /* of the calls that follow */
  uint64_t sites; /* said so far */
  even_comm_site_call *ask;
  void *context;
} even_flight_writer;

/* The call in comm->call begins, as number comm->call_count; and ends. */
void even_flight_begin(even_comm *comm);
void even_flight_end(even_comm *comm, even_status status);
/* The call under way fails: asks where it was made, and lets the others know. */
void even_flight_say(even_comm *comm);
/* Where `rank` made its call of the same number; waits a moment for its answer. Writes " at SITE", or "". */
void even_flight_hear(const even_comm *comm, int rank, char *text, size_t bytes);
/* "; reached: ranks 0-2 in call 17 (all_reduce of …), rank 3 done with call 16 (barrier)", or "". */
void even_flight_reached(const even_comm *comm, char *text, size_t bytes);

/* For the engine's table. */
size_t even_shared_flight(const even_comm *comm, int rank, even_flight_call *out, size_t limit);
void even_shared_set_site(even_comm *comm, const char *text);
void even_shared_ask_site(even_comm *comm, even_comm_site_call *call, void *context);

#endif
