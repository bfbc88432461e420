/* One synchronisation of all ranks, by numbers that only grow: each rank counts the stages it has reached in a word of
 * its own, and waits until every peer's word is as far. Nothing is reset, so nothing can be reset too early. */
#include "base/fail.h"
#include "comm/group.h"
#include "comm/watcher.h"
#include "os/clock.h"
#include "os/futex.h"

#include <stdio.h>
#include <string.h>

/* About twice what sleeping and being woken takes on a virtual machine. */
#define WORTH_POLLING_NS ((uint64_t)100 * 1000u)
/* Longer than any rank takes for a piece that stays in the caches. */
#define A_STRANGERS_TURN_NS ((uint64_t)1000 * 1000u)
#define LONG_ENOUGH_NS ((uint64_t)1000 * 1000u) /* of yielding */
#define SHORTEST_REST 64u
#define LONGEST_REST 4096u

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

/* The first rank from `from` on that has not reached the stage; `ranks` where all have. In a chain: whom it is that
 * this rank waits for. */
static int first_missing(const even_comm *comm, int from) {
  if (comm->chain.under_way) {
    return even_chain_missing(comm);
  }
  int rank = from;
  while (rank < comm->ranks) {
    uint32_t reached = atomic_load(&comm->controls[rank].sequence);
    if ((int32_t)(reached - comm->stage) < 0) {
      break;
    }
    rank++;
  }
  return rank;
}

void even_group_wake(even_comm *comm) {
  (void)atomic_fetch_add(&comm->header->bell, 1u);
  even_futex_wake_all(&comm->header->bell);
}

void even_group_alarm(even_comm *comm) {
  even_group_wake(comm);
  for (int rank = 0; rank < comm->ranks; rank++) {
    even_message_bell_ring(comm, rank);
  }
}

void even_group_end(even_comm *comm, uint32_t state) {
  uint32_t whole = EVEN_GROUP_WHOLE;
  (void)atomic_compare_exchange_strong(&comm->header->state, &whole, state);
  even_group_alarm(comm);
}

void even_group_end_told(even_comm *comm, const even_error *why) {
  even_comm_end_words *told = &comm->header->told;
  if (atomic_load(&comm->header->state) == EVEN_GROUP_WHOLE && atomic_exchange(&told->taken, 1u) == 0) {
    even_comm_end_words_write(told, why);
    even_group_end(comm, EVEN_GROUP_TOLD);
  }
}

static even_status cause_late(const even_comm *comm, int late, const char *within) {
  int number = even_comm_number(comm, late);
  char doing[EVEN_WAITS_TEXT];
  even_waits_describe(comm, late, doing, sizeof doing);
  (void)even_fail(EVEN_ERR_TIMEOUT, "Timed out: rank %d did not come %s%s", number, within, doing);
  (void)even_error_place(number, NULL);
  return even_error_fix("see what rank %d is doing (a stack dump), or raise the timeout", number);
}

static even_status cause_stopped(const even_comm *comm, int rank) {
  uint32_t process = even_peers_process(comm, rank);
  int number = even_comm_number(comm, rank);
  if (rank == comm->rank) {
    (void)even_fail(EVEN_ERR_PEER_LOST,
                    "rank %d (this one, process %u) was stopped, and the others that waited for it have given up",
                    number, process);
  } else {
    (void)even_fail(EVEN_ERR_PEER_LOST, "rank %d (process %u) was stopped (SIGSTOP, SIGTSTP) and stands still", number,
                    process);
  }
  (void)even_error_place(number, NULL);
  return even_error_fix(
      "see who stopped process %u; EVENSTEP_STOP_GRACE (even_comm_set_stop_grace) says how many seconds a rank may "
      "stand still while others wait",
      process);
}

static even_status cause_lost(const even_comm *comm, int rank) {
  bool left = atomic_load(&comm->controls[rank].left) != 0;
  int number = even_comm_number(comm, rank);
  (void)even_fail(EVEN_ERR_PEER_LOST, "rank %d (process %u) %s", number, even_peers_process(comm, rank),
                  left ? "left the group" : "died or came to its end");
  (void)even_error_place(number, NULL);
  return even_error_fix(
      "the end of rank %d's own output says why; under `evenstep run` the job restarts from its last checkpoint",
      number);
}

static even_status cause_told(const even_comm *comm) {
  even_error why;
  even_comm_end_words_read(&comm->header->told, &why);
  return even_error_restore(&why);
}

even_status even_group_cause(const even_comm *comm) {
  uint32_t state = atomic_load(&comm->header->state);
  int rank = EVEN_GROUP_RANK(state);
  switch (EVEN_GROUP_CAUSE(state)) {
    case EVEN_GROUP_REVOKED:
      return even_fail(EVEN_ERR_REVOKED, "the group was revoked");
    case EVEN_GROUP_LOST:
      return cause_lost(comm, rank);
    case EVEN_GROUP_STOPPED:
      return cause_stopped(comm, rank);
    case EVEN_GROUP_TOLD:
      return cause_told(comm);
    case EVEN_GROUP_TIMEOUT: /* another's: how long it has waited, its own error says */
      return cause_late(comm, rank, "in time");
    case EVEN_GROUP_ALL_LATE:
      (void)even_fail(EVEN_ERR_TIMEOUT, "Timed out: no rank sent in time what rank %d receives",
                      even_comm_number(comm, rank));
      return even_error_fix("rank %d's own error names the message; see what the other ranks are doing (a stack dump)",
                            even_comm_number(comm, rank));
    default:
      (void)even_fail(EVEN_ERR_MISMATCH, "rank %d found that the ranks make different calls",
                      even_comm_number(comm, rank));
      return even_error_fix("rank %d's own error names both calls", even_comm_number(comm, rank));
  }
}

/* Adds what this rank was in, and what each reached, to the cause that was recorded last. */
static even_status add_place(const even_comm *comm, const char *call) {
  const even_error cause = *even_error_last();
  char reached[EVEN_FLIGHT_REACHED];
  even_flight_reached(&comm->flight, reached, sizeof reached);
  (void)even_fail(cause.status, "%.480s; rank %d was in %s%s", cause.what, even_comm_number(comm, comm->rank), call,
                  reached);
  (void)even_error_place(cause.rank, NULL);
  return cause.fix[0] == '\0' ? cause.status : even_error_fix("%s", cause.fix);
}

/* A message of this rank that was refused comes first: whoever refused it may be gone for that. */
even_status even_group_failure_in(const even_comm *comm, const char *call) {
  if (!even_refusal_stands(comm)) {
    (void)!even_group_cause(comm);
  }
  return add_place(comm, call);
}

even_status even_group_failure(even_comm *comm) {
  char call[128];
  even_flight_say(&comm->flight);
  even_call_describe(&comm->call, call, sizeof call);
  return even_group_failure_in(comm, call);
}

bool even_stage_has_come(const even_comm *comm, int rank) {
  if (comm->chain.under_way) {
    return even_chain_has_done(comm, rank);
  }
  return (int32_t)(atomic_load(&comm->controls[rank].sequence) - comm->stage) >= 0;
}

/* Looks how the ranks are that have not come; one that is gone, or stands still, ends the group. */
static bool look_for_the_lost(even_comm *comm, int from, uint64_t now_ns) {
  for (int rank = comm->chain.under_way ? 0 : from; rank < comm->ranks; rank++) {
    if (even_stage_has_come(comm, rank)) {
      continue;
    }
    even_peer_state state = even_peers_look(comm, rank, now_ns);
    /* It may have come, and then ended, between the two looks. */
    if (state != EVEN_PEER_LIVES && !even_stage_has_come(comm, rank)) {
      return even_peers_end_group(comm, rank, state);
    }
  }
  return false;
}

/* Whoever was sent what does not fit may never come. */
static bool ends_for_refusal(even_comm *comm) {
  if (!even_shared_refused(comm, true)) {
    return false;
  }
  const even_error why = *even_error_last();
  even_group_end_told(comm, &why);
  return !even_group_whole(comm); /* whole: another died that was about to say why */
}

/* Ends the group for a rank that has not come, unless it has ended otherwise meanwhile. */
static even_status time_out(even_comm *comm, int late, uint64_t limit_ns) {
  uint32_t cause = EVEN_GROUP_TIMEOUT | (uint32_t)late;
  even_flight_say(&comm->flight);
  even_group_end(comm, cause);
  if (atomic_load(&comm->header->state) != cause) {
    return even_group_failure(comm);
  }
  char within[64];
  char call[128];
  (void)snprintf(within, sizeof within, "within the timeout of %.3g s", (double)limit_ns * 1e-9);
  even_call_describe(&comm->call, call, sizeof call);
  (void)!cause_late(comm, late, within);
  return add_place(comm, call);
}

/* Sleeps on the group's bell until all have come. */
static even_status sleep_until_all_come(even_comm *comm, int missing, uint64_t began, even_waiting *waiting) {
  uint64_t checked = began;
  for (;;) {
    uint32_t bell = atomic_load(&comm->header->bell);
    missing = first_missing(comm, missing);
    if (missing == comm->ranks) {
      return EVEN_OK;
    }
    if (atomic_load(&comm->header->state) != EVEN_GROUP_WHOLE) {
      return even_group_failure(comm);
    }
    uint64_t now = even_clock_ns();
    if (now - checked >= EVEN_COMM_LOOK_NS || atomic_load(&comm->controls[missing].left) != 0) {
      checked = now;
      if (even_comm_is_over(comm)) {
        even_group_end(comm, EVEN_GROUP_REVOKED);
        continue;
      }
      /* First: who has found the same may have left for it. */
      if (even_waits_in_collective(comm, waiting, now)) {
        continue;
      }
      if (ends_for_refusal(comm) || look_for_the_lost(comm, missing, now)) {
        continue;
      }
      even_stall_inspect(comm, missing, now);
    }
    uint64_t timeout = atomic_load_explicit(&comm->timeout_ns, memory_order_relaxed);
    if (now - comm->waits_since >= timeout) {
      return time_out(comm, missing, timeout);
    }
    uint64_t left = timeout - (now - comm->waits_since);
    even_futex_wait(&comm->header->bell, bell, left < EVEN_COMM_LOOK_NS ? left : EVEN_COMM_LOOK_NS);
  }
}

/* The caller is counted among the sleepers. */
static even_status sleep_for(even_comm *comm, int missing, uint64_t began) {
  even_waiting waiting = {0};
  even_status status = sleep_until_all_come(comm, missing, began, &waiting);
  if (even_waits_end(&waiting)) {
    even_watcher_look();
  }
  return status;
}

/* Polling saves the price of sleeping and being woken, and is wasted where peers are further away than that: the next
 * wait polls longer where this one was short, however it ended, and less where it was long. */
static void learn(even_comm_patience *patience, uint64_t waited) {
  if (waited < WORTH_POLLING_NS) {
    uint32_t more = patience->polls * 2 + 1;
    patience->polls = more < patience->most ? more : patience->most;
  } else {
    uint32_t fewer = patience->polls / 2;
    patience->polls = fewer > patience->least ? fewer : patience->least;
  }
}

/* Where ranks share cores, who waits lets the others of its core go on, which costs less than to sleep and be woken,
 * and keeps the core from falling asleep. A stranger who gets the core in our place keeps it for a turn of the
 * scheduler, where one that is woken gets it back soon: then it is better to sleep, for a while. */
static int yield_to_peers(const even_comm *comm, int missing, even_comm_patience *patience) {
  const uint64_t began = even_clock_ns();
  uint64_t before = began;
  for (uint32_t polls = 0; polls < patience->polls && before - began < LONG_ENOUGH_NS; polls++) {
    even_core_yield();
    missing = first_missing(comm, missing);
    uint64_t now = even_clock_ns();
    if (now - before >= A_STRANGERS_TURN_NS) {
      patience->rest = patience->rest < SHORTEST_REST ? SHORTEST_REST : patience->rest;
      patience->rests = patience->rest;
      patience->rest = patience->rest < LONGEST_REST ? 2 * patience->rest : LONGEST_REST;
      return missing;
    }
    if (missing == comm->ranks) {
      patience->polls = patience->most;
      patience->rest -= patience->rest > 0;
      return missing;
    }
    before = now;
  }
  patience->polls = patience->polls / 2 > patience->least ? patience->polls / 2 : patience->least;
  return missing;
}

static int poll_for_peers(const even_comm *comm, int missing, even_comm_patience *patience) {
  if (patience->rests > 0) {
    patience->rests--;
    return missing;
  }
  if (patience->yields) {
    return yield_to_peers(comm, missing, patience);
  }
  for (uint32_t polls = 0; polls < patience->polls; polls++) {
    missing = first_missing(comm, missing);
    if (missing == comm->ranks) {
      break;
    }
    relax();
  }
  return missing;
}

static even_status wait_for_peers(even_comm *comm, int missing, even_comm_patience *patience) {
  uint64_t began = even_clock_ns();
  if (comm->waits_since == 0) {
    comm->waits_since = began;
  }
  even_status status = EVEN_OK;
  missing = poll_for_peers(comm, missing, patience);
  if (missing < comm->ranks) {
    (void)atomic_fetch_add(&comm->header->sleepers, 1u);
    status = sleep_for(comm, missing, began);
    (void)atomic_fetch_sub(&comm->header->sleepers, 1u);
  }
  uint64_t waited = even_clock_ns() - began;
  if (!patience->yields) {
    learn(patience, waited);
  }
  (void)atomic_fetch_add_explicit(&comm->wait_ns, waited, memory_order_relaxed);
  return status;
}

even_status even_stage_wait(even_comm *comm) {
  int missing = first_missing(comm, 0);
  return missing == comm->ranks ? EVEN_OK : wait_for_peers(comm, missing, &comm->progress);
}

even_status even_stage(even_comm *comm, even_comm_patience *patience) {
  comm->stage++;
  atomic_store(&comm->controls[comm->rank].sequence, comm->stage);
  int missing = first_missing(comm, 0);
  if (missing < comm->ranks) {
    return wait_for_peers(comm, missing, patience);
  }
  /* Of all stores and loads here there is one order (seq_cst): the last to come sees all others, and either sees a
   * sleeper or is seen by it. */
  if (atomic_load(&comm->header->sleepers) != 0) {
    even_group_wake(comm);
  }
  return EVEN_OK;
}
