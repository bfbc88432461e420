/* The beginning and the end of a collective over UCX: every rank tells every other which call it makes. */
#include "comm/called.h"
#include "comm/ucx/group.h"

#include "base/fail.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

#define HEADER_BYTES offsetof(even_ucx_block, data)
/* How long one who names both sides of a mismatch waits for the other's words. */
#define LOOK_NS ((uint64_t)10 * 1000000u)

/* FNV-1a over 64-bit words (Fowler, Noll, Vo). */
static uint64_t mix(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x100000001b3u;
}

static even_status check_open(even_ucx_group *group) {
  char doing[128];
  even_call_describe(&group->call, doing, sizeof doing);
  (void)pthread_mutex_lock(&group->lock);
  even_status status = EVEN_OK;
  if (group->has_left) {
    status = even_fail(EVEN_ERR_STATE, "rank %d has left the group", group->peers[group->rank].number);
  } else if (group->ended && group->refuses) {
    (void)even_fail(group->end.status, "the group is unusable since an earlier failure: %.460s", group->end.what);
    status = even_error_fix("close the group and open a new one");
  } else if (group->ended) {
    status = even_ucx_failure(group, doing);
  }
  (void)pthread_mutex_unlock(&group->lock);
  return status;
}

even_status even_ucx_call_begin(even_ucx_group *group, even_call_kind kind, uint32_t dtype, uint32_t op, int root,
                                size_t count, const size_t *counts) {
  if (atomic_flag_test_and_set_explicit(&group->busy, memory_order_acquire)) {
    (void)even_fail(EVEN_ERR_STATE, "two threads called into one group at the same time");
    return even_error_fix("let one thread at a time call into a group, or give each thread a group of its own");
  }
  uint64_t hash = 0xcbf29ce484222325u;
  for (int rank = 0; counts != NULL && rank < group->ranks; rank++) {
    hash = mix(hash, counts[rank]);
  }
  even_waits_call();
  group->waits_since = 0;
  group->call =
      (even_comm_call){.kind = kind, .dtype = dtype, .op = op, .root = root, .count = count, .signature = hash};
  even_called_take((const even_comm_base *)(const void *)group, &group->call);
  even_status status = check_open(group);
  if (status != EVEN_OK) {
    return even_ucx_call_end(group, status);
  }
  even_flight_begin(&group->flight, &group->call, ++group->call_count);
  return EVEN_OK;
}

uint64_t even_ucx_call_tag(const even_ucx_group *group, int sender, uint64_t step) {
  uint64_t steps = (uint64_t)1 << EVEN_UCX_STEP_BITS;
  return even_ucx_tag(EVEN_UCX_CALL, sender, (group->call_count % steps) << EVEN_UCX_STEP_BITS | step % steps);
}

/* The other finds the same, or hears of it, and says where it made its call. */
void even_ucx_await_site(even_ucx_group *group, int rank) {
  uint64_t began = even_clock_ns();
  uint64_t waited = 0;
  uint32_t polls = 0;
  while (!even_flight_has_said(&group->flight, rank, group->call_count) && group->peers[rank].failed == 0 &&
         waited < EVEN_FLIGHT_PATIENCE_NS) {
    even_ucx_rest(group, &polls, LOOK_NS);
    waited = even_clock_ns() - began;
  }
}

static even_status name_both(even_ucx_group *group, int rank) {
  char own[128];
  char other[128];
  char own_site[EVEN_FLIGHT_SITE_BYTES];
  char other_site[EVEN_FLIGHT_SITE_BYTES];
  char name[128];
  even_call_describe(&group->call, own, sizeof own);
  even_call_describe(&group->arrived[rank].call, other, sizeof other);
  own_site[0] = other_site[0] = '\0';
  if (group->whole.ranks == 0) {
    even_flight_site_of(&group->flight, group->rank, group->call_count, own_site, sizeof own_site);
    even_flight_site_of(&group->flight, rank, group->call_count, other_site, sizeof other_site);
  }
  even_ucx_name(group, rank, name, sizeof name);
  (void)even_fail(EVEN_ERR_MISMATCH, "rank %d called %s%s, but %s called %s%s%s (call %llu of the group)",
                  group->peers[group->rank].number, own, own_site, name, other,
                  strcmp(own, other) == 0 ? ", divided otherwise among the ranks" : "", other_site,
                  (unsigned long long)group->call_count);
  (void)even_error_place(group->peers[rank].number, NULL);
  return even_error_fix(EVEN_CALL_DIFFERS_FIX);
}

static even_status mismatch(even_ucx_group *group, int rank) {
  even_flight_say(&group->flight);
  (void)pthread_mutex_lock(&group->lock);
  even_ucx_report(group, false);
  if (group->whole.ranks == 0) { /* else the larger group names them */
    even_ucx_await_site(group, rank);
  }
  even_status status = EVEN_OK;
  if (group->ended && group->end.status != EVEN_ERR_MISMATCH) { /* something else came first */
    status = even_ucx_call_failure(group);
  } else {
    status = name_both(group, rank);
    const even_error why = *even_error_last();
    even_ucx_end(group); /* others may wait for one who has found nothing */
    (void)even_error_restore(&why);
  }
  (void)pthread_mutex_unlock(&group->lock);
  return status;
}

even_status even_ucx_call_meet(even_ucx_group *group, size_t bytes, const size_t *each) {
  size_t count = 0;
  (void)pthread_mutex_lock(&group->lock);
  for (int step = 1; step < group->ranks; step++) {
    int from = (group->rank + group->ranks - step) % group->ranks;
    even_ucx_receive(group, &group->transfers[count++], from, even_ucx_call_tag(group, from, 0), &group->arrived[from],
                     sizeof group->arrived[from]);
  }
  group->met = group->call_count;
  group->steps = 0;
  for (int step = 1; step < group->ranks; step++) {
    int to = (group->rank + step) % group->ranks;
    even_ucx_block *block = &group->outgoing[each == NULL ? group->rank : to];
    block->call = group->call;
    even_ucx_send(group, &group->transfers[count++], to, even_ucx_call_tag(group, group->rank, 0), block,
                  HEADER_BYTES + (each == NULL ? bytes : each[to]));
  }
  (void)pthread_mutex_unlock(&group->lock);
  group->meets = true;
  even_status status = even_ucx_wait(group, group->transfers, count);
  group->meets = false;
  EVEN_TRY(status);
  for (int rank = 0; rank < group->ranks; rank++) {
    const even_comm_call *other = &group->arrived[rank].call;
    if (rank != group->rank && (even_call_differs(&group->call, other) || group->call.signature != other->signature)) {
      return mismatch(group, rank);
    }
  }
  return EVEN_OK;
}

/* Nothing that is under way to or from a lost rank comes to its end by itself. */
static void cut_lost(even_ucx_group *group) {
  bool lost = group->ended && group->end.status == EVEN_ERR_PEER_LOST && group->transport->takes_back;
  for (int rank = 0; lost && rank < group->ranks; rank++) {
    if (rank != group->rank && group->peers[rank].number == group->end.rank) {
      even_ucx_cut(group, rank);
    }
  }
}

even_status even_ucx_call_end(even_ucx_group *group, even_status status) {
  even_flight_end(&group->flight, status);
  if (status != EVEN_OK) {
    const even_error why = *even_error_last();
    (void)pthread_mutex_lock(&group->lock);
    if (!group->has_left) {
      even_ucx_end(group); /* this rank's own trouble: the others wait for it */
    }
    cut_lost(group);
    even_ucx_abandon(group, group->transfers, (size_t)group->ranks * EVEN_UCX_TRANSFERS);
    (void)pthread_mutex_unlock(&group->lock);
    (void)even_error_restore(&why);
    group->refuses = group->refuses || group->ended;
  }
  atomic_flag_clear_explicit(&group->busy, memory_order_release);
  return status;
}
