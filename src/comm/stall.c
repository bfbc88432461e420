/* The stall inspector: a rank that waits for long says so once a call, to whoever asked for it. */
#include "comm/group.h"

#include <math.h>
#include <stdio.h>

void even_shared_on_stall(even_comm *comm, double seconds, even_comm_stall_call *call, void *context) {
  bool off = !(seconds > 0) || isinf(seconds);
  comm->stall = (even_stall_inspector){
      .limit_ns = off ? UINT64_MAX : even_comm_limit_ns(seconds), .call = call, .context = context};
}

void even_stall_inspect(even_comm *comm, int missing, uint64_t now_ns) {
  even_stall_inspector *stall = &comm->stall;
  uint64_t waited_ns = now_ns - comm->waits_since;
  if (stall->call == NULL || waited_ns < stall->limit_ns || stall->told == comm->call_count) {
    return;
  }
  char call[128];
  char reached[EVEN_FLIGHT_REACHED];
  char words[1024];
  char doing[EVEN_WAITS_TEXT];
  char more[32] = "";
  int others = 0;
  stall->told = comm->call_count;
  for (int rank = missing + 1; rank < comm->ranks; rank++) {
    others += !even_stage_has_come(comm, rank);
  }
  if (others > 0) {
    (void)snprintf(more, sizeof more, " and %d more", others);
  }
  even_call_describe(&comm->call, call, sizeof call);
  even_waits_describe(comm, missing, doing, sizeof doing);
  even_flight_reached(&comm->flight, reached, sizeof reached);
  (void)snprintf(words, sizeof words, "rank %d has waited %.3g s for rank %d (process %u)%s in %s%s%s",
                 even_comm_number(comm, comm->rank), (double)waited_ns * 1e-9, even_comm_number(comm, missing),
                 atomic_load(&comm->controls[missing].process), more, call, doing, reached);
  stall->call(stall->context, words);
}
