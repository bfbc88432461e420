/* The flight record of a group: the last collectives that each rank began, in memory that the ranks of a host share. It
 * costs a few nanoseconds a call, and is read when something went wrong: by the ranks themselves, whose errors say what
 * each rank reached, and by whoever holds the descriptor of that memory. Between hosts ranks tell one another their
 * last call when the group ends, or when one of them waits for long: of ranks of other hosts no more is known. */
#ifndef EVENSTEP_FLIGHT_H
#define EVENSTEP_FLIGHT_H

#include <evenstep/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EVEN_FLIGHT_CALLS 16      /* of each rank are kept */
#define EVEN_FLIGHT_CALL_BYTES 96 /* of their words, with the NUL */
#define EVEN_FLIGHT_SITE_BYTES 192

typedef enum even_flight_state {
  EVEN_FLIGHT_BEGUN = 1,
  EVEN_FLIGHT_DONE = 2,
  EVEN_FLIGHT_FAILED = 3
} even_flight_state;

typedef struct even_flight_call {
  uint64_t number;   /* of the collective in its group, from 1, which is its opening; the same on all ranks */
  uint64_t began_ns; /* even_clock_ns, some milliseconds coarse */
  uint64_t ended_ns; /* 0: not yet */
  even_flight_state state;
  char call[EVEN_FLIGHT_CALL_BYTES]; /* "all_reduce of 1000 F32 elements with SUM" */
  char site[EVEN_FLIGHT_SITE_BYTES]; /* where in the caller's program, as far as it was said; else "" */
} even_flight_call;

/* The last collectives of `rank`, oldest first, up to `limit`; returns how many. Those that change meanwhile are left
 * out. Any thread, also after a failure; 0 where the engine keeps no record. */
EVEN_PUBLIC size_t even_comm_flight(const even_comm *comm, int rank, even_flight_call *out, size_t limit);

/* Says where in the caller's program the calls that follow are made ("train.c:41"; up to EVEN_FLIGHT_SITE_BYTES - 1
 * bytes, copied; NULL: not known). A few calls' sites are kept. On the thread of the collectives. */
EVEN_PUBLIC void even_comm_set_site(even_comm *comm, const char *text);

/* Asked when a collective fails, or has waited for a second and all other threads of the process that call wait, too,
 * on its thread, for where in the caller's program it was called (of a message, when it has been waited for as long):
 * costs nothing before. Writes a NUL-terminated text; false where it does not know (what even_comm_set_site said counts
 * then). Peers that name both sides of a mismatch wait for the answer, 2 s at most. It must not call into the group.
 * NULL: nobody is asked. */
typedef bool even_comm_site_call(void *context, char *text, size_t bytes);
EVEN_PUBLIC void even_comm_ask_site(even_comm *comm, even_comm_site_call *call, void *context);

/* Told once a call, on its thread, when a collective has waited for `seconds` (<= 0, INFINITY: never): one line that
 * says for whom, what that one waits in, where it is in another group of ours, and what each rank reached last. It must
 * not call into the group. NULL: nobody is told. On the thread of the collectives. */
typedef void even_comm_stall_call(void *context, const char *words);
EVEN_PUBLIC void even_comm_on_stall(even_comm *comm, double seconds, even_comm_stall_call *call, void *context);

/* ---- for others than the ranks: over the group's descriptor ---- */
typedef struct even_flight even_flight;

/* Maps a group's segment for reading its record; the descriptor is duplicated. Keeps the memory, however its ranks end.
 * Errors: EVEN_ERR_INPUT where it is no group's segment, EVEN_ERR_UNSUPPORTED for another version's. */
EVEN_PUBLIC even_status even_flight_open(int fd, even_flight **out) EVEN_MUST_USE;
/* NULL is allowed. */
EVEN_PUBLIC void even_flight_close(even_flight *flight);
EVEN_PUBLIC int even_flight_ranks(const even_flight *flight);
/* The process of a rank of the group, 0 where it has not come. */
EVEN_PUBLIC long even_flight_process(const even_flight *flight, int rank);
/* As even_comm_flight. */
EVEN_PUBLIC size_t even_flight_read(const even_flight *flight, int rank, even_flight_call *out, size_t limit);
/* What each rank reached, ranks of the same call together: "ranks 0-2 in call 17 (all_reduce of …), rank 3 done with
 * call 16 (barrier)"; cut off where it does not fit. */
EVEN_PUBLIC void even_flight_summary(const even_flight *flight, char *text, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
