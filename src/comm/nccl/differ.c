/* Whether ranks of a host make different calls, by what each has written down: no rank waits for another for that. */
#include "comm/nccl/device_comm.h"

#include <stdio.h>
#include <string.h>

typedef enum difference { NONE, UNKNOWN, EARLIER, OTHER } difference;

static difference compare(const even_device_comm *comm, int rank, uint64_t number, even_comm_call *own,
                          even_comm_call *other) {
  const even_flight_writer *flight = &comm->flight;
  if (!even_flight_call_of(flight, comm->rank, number, own) || !even_flight_call_of(flight, rank, number, other)) {
    return UNKNOWN;
  }
  uint64_t own_chain = even_flight_chain_of(flight, comm->rank, number);
  uint64_t other_chain = even_flight_chain_of(flight, rank, number);
  if (even_call_differs(own, other)) {
    return OTHER;
  }
  return own_chain == other_chain || own_chain == 0 || other_chain == 0 ? NONE : EARLIER;
}

static void describe_side(const even_device_comm *comm, int rank, uint64_t number, const even_comm_call *call,
                          char *text, size_t bytes) {
  char words[128];
  char site[EVEN_FLIGHT_SITE_BYTES + 4];
  even_call_describe(call, words, sizeof words);
  even_flight_site_of(&comm->flight, rank, number, site, sizeof site);
  (void)snprintf(text, bytes, "rank %d called %s%s", even_device_number(comm, rank), words, site);
}

static void name_both(const even_device_comm *comm, int rank, uint64_t number, difference how, bool first,
                      const even_comm_call *own, const even_comm_call *other, even_error *why) {
  char own_side[352];
  char other_side[352];
  const char *more = "";
  describe_side(comm, comm->rank, number, own, own_side, sizeof own_side);
  describe_side(comm, rank, number, other, other_side, sizeof other_side);
  if (how == EARLIER) { /* the same words, but not the same calls up to here */
    more = first ? ", divided otherwise among the ranks" : ", but other calls before, which the record has no more";
  }
  *why = (even_error){.status = EVEN_ERR_MISMATCH, .rank = even_device_number(comm, rank)};
  (void)snprintf(why->what, sizeof why->what, "%.270s, but %.270s%s (call %llu of the communicator)", own_side,
                 other_side, more, (unsigned long long)number);
  (void)snprintf(why->fix, sizeof why->fix, "%s", EVEN_CALL_DIFFERS_FIX);
}

/* From the last call that is known to be the same on. */
static bool differs_from(even_device_comm *comm, int rank, even_error *why) {
  uint64_t last = even_flight_last(&comm->flight, rank);
  last = last < comm->call_count ? last : comm->call_count;
  uint64_t begin = last > EVEN_FLIGHT_CALLS ? last - EVEN_FLIGHT_CALLS : 0;
  begin = comm->compared[rank] > begin ? comm->compared[rank] : begin;
  for (uint64_t number = begin + 1; number <= last; number++) {
    even_comm_call own;
    even_comm_call other;
    difference how = compare(comm, rank, number, &own, &other);
    if (how == OTHER || how == EARLIER) {
      name_both(comm, rank, number, how, comm->compared[rank] + 1 == number, &own, &other, why);
      return true;
    }
    comm->compared[rank] = how == NONE ? number : comm->compared[rank];
  }
  return false;
}

bool even_device_find_difference(even_device_comm *comm, even_error *why) {
  for (int rank = 0; comm->flight.records != NULL && rank < comm->ranks; rank++) {
    if (rank != comm->rank && even_board_is_near(&comm->board, rank) && differs_from(comm, rank, why)) {
      return true;
    }
  }
  return false;
}

bool even_device_differs_at(even_device_comm *comm, uint64_t number, even_error *why) {
  bool differs = false;
  atomic_thread_fence(memory_order_seq_cst); /* of two that write theirs and look at once, one sees the other's */
  for (int rank = 0; comm->flight.records != NULL && rank < comm->ranks; rank++) {
    even_comm_call own;
    even_comm_call other;
    if (rank != comm->rank && even_board_is_near(&comm->board, rank)) {
      difference how = compare(comm, rank, number, &own, &other);
      comm->compared[rank] = how == NONE ? number : comm->compared[rank];
      differs = differs || how == OTHER || how == EARLIER;
    }
  }
  return differs && even_device_find_difference(comm, why); /* where it began */
}
