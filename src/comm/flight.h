/* The flight record: who writes it, what failures say of it, and how a rank's last call crosses to other hosts. */
#ifndef EVEN_COMM_FLIGHT_H
#define EVEN_COMM_FLIGHT_H

#include "comm/segment.h"

#include <evenstep/flight.h>
#include <stdatomic.h>

#define EVEN_FLIGHT_SITES 4
#define EVEN_FLIGHT_REACHED 384 /* bytes of even_flight_reached's words */
/* For how long one who names both sides of a mismatch waits for the other to say where it made its call. It does so at
 * once, if it is not stopped, and whom it asks answers. */
#define EVEN_FLIGHT_PATIENCE_NS ((uint64_t)2000 * 1000000u)

/* A collective; a line, written by one at a time. Atomic, so that a reader that races is defined; `number` is 0 while
 * the rest changes. */
typedef struct even_flight_slot {
  _Alignas(64) _Atomic uint64_t number;
  _Atomic uint64_t began_ns;
  _Atomic uint64_t ended_ns;
  _Atomic uint64_t count;
  _Atomic uint64_t what; /* kind, dtype, op, root: 16 bits each */
  _Atomic uint64_t state;
  _Atomic uint64_t site;  /* its number; 0: not known */
  _Atomic uint64_t chain; /* the writer's */
} even_flight_slot;

typedef struct even_flight_site {
  _Atomic uint64_t number; /* 0 while the text changes */
  _Atomic uint64_t text[EVEN_FLIGHT_SITE_BYTES / sizeof(uint64_t)];
} even_flight_site;

typedef struct even_flight_record {
  even_flight_slot slots[EVEN_FLIGHT_CALLS]; /* by the call's number */
  even_flight_site sites[EVEN_FLIGHT_SITES]; /* by the site's number */
  _Atomic uint64_t said;                     /* the number of the failed call of which its rank has said all it knows */
  _Atomic uint32_t last;  /* of a rank of another host: what it reached when the group ended is here */
  _Atomic uint32_t taken; /* of a rank of another host: one who writes what that rank has told */
} even_flight_record;

/* A rank's own side. */
typedef struct even_flight_writer {
  even_flight_record *records; /* of all ranks, `stride` apart; NULL: none are kept */
  size_t stride;
  int rank; /* this one */
  int ranks;
  uint64_t number; /* of the call under way, or of the last */
  bool under_way;
  bool lent;      /* another group's, whose calls are not this one's: it is read, and kept up, for that one's sake */
  uint64_t site;  /* of the calls that follow */
  uint64_t sites; /* said so far */
  uint64_t chain; /* of the calls that follow: 0, or what stands for all calls up to the one that begins */
  even_comm_site_call *ask;
  void *context;
} even_flight_writer;

/* The rank's next call begins, under this number; and ends. */
void even_flight_begin(even_flight_writer *flight, const even_comm_call *call, uint64_t number);
void even_flight_end(even_flight_writer *flight, even_status status);
/* The same of an earlier call, where several are under way; nothing where the record has it no more. */
void even_flight_end_call(even_flight_writer *flight, uint64_t number, even_status status);
/* Where the calls that follow are made (NULL: not known), and who is asked for it when one fails. */
void even_flight_set_site(even_flight_writer *flight, const char *text);
void even_flight_ask_site(even_flight_writer *flight, even_comm_site_call *call, void *context);
/* The call under way fails: asks where it was made, and lets the others know. On the call's thread, without locks: the
 * answer may wait for anything. */
void even_flight_say(even_flight_writer *flight);
/* Nothing is kept from now on, and nothing is left of what was. */
void even_flight_drop(even_flight_writer *flight);

/* Whether `rank` has said all it knows of its call of that number. */
bool even_flight_has_said(const even_flight_writer *flight, int rank, uint64_t number);
/* Where `rank` made its call of this rank's number; waits a moment for its answer. Writes " at SITE", or "". */
void even_flight_hear(const even_flight_writer *flight, int rank, char *text, size_t bytes);
/* The same without waiting. */
void even_flight_site_of(const even_flight_writer *flight, int rank, uint64_t number, char *text, size_t bytes);
/* The last calls of a rank, as even_comm_flight gives them. */
size_t even_flight_calls(const even_flight_writer *flight, int rank, even_flight_call *out, size_t limit);
/* What `rank` called as number `number`; whether that is known. */
bool even_flight_call_of(const even_flight_writer *flight, int rank, uint64_t number, even_comm_call *out);
/* Up to which number `rank` has come; 0: to none, as far as is known. How its call of that number is; 0: not known. */
uint64_t even_flight_last(const even_flight_writer *flight, int rank);
even_flight_state even_flight_state_of(const even_flight_writer *flight, int rank, uint64_t number);
/* What stood for all calls of `rank` up to that number; 0: not known. */
uint64_t even_flight_chain_of(const even_flight_writer *flight, int rank, uint64_t number);
/* "; reached: ranks 0-2 in call 17 (all_reduce of …), rank 3 done with call 16 (barrier)", or "". */
void even_flight_reached(const even_flight_writer *flight, char *text, size_t bytes);

/* ---- what a rank tells other hosts: its last call, in words of a message ---- */

typedef struct even_flight_report {
  int32_t rank;
  uint32_t state;  /* even_flight_state */
  uint64_t number; /* of the call; 0: none yet */
  uint64_t began_ago_ns;
  uint64_t ended_ago_ns;
  uint64_t count;
  uint64_t what;
  uint64_t said;
  char site[EVEN_FLIGHT_SITE_BYTES];
} even_flight_report;

void even_flight_report_make(const even_flight_writer *flight, int rank, even_flight_report *out);
/* Keeps a report of a rank that does not write into this host's memory. */
void even_flight_report_keep(const even_flight_writer *flight, const even_flight_report *report, bool last);
/* Whether what `rank`, of another host, reached when the group ended has come. */
bool even_flight_is_last(const even_flight_writer *flight, int rank);

#endif
