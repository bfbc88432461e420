/* The engine between hosts: closing a group over a transport, the small questions about it, and the table of its calls.
 */
#include "comm/ucx/reduce.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/thread.h"

#include <stdio.h>
#include <string.h>

/* ---- closing ---- */

/* A child that inherited the group by fork must not touch UCX, nor the lock. */
static bool is_inherited(const even_ucx_group *group) {
  return group->process != even_own_process();
}

static bool begin_leaving(even_comm *comm) {
  even_ucx_group *group = even_ucx_of(comm);
  /* Not in a child that inherited the group by fork. */
  if (group->has_left || group->messages == NULL || is_inherited(group)) {
    return false;
  }
  even_watcher_remove(&group->watch);
  (void)pthread_mutex_lock(&group->lock);
  even_ucx_pass_on(group);
  group->has_left = true;
  (void)pthread_mutex_unlock(&group->lock);
  even_ucx_messages_stop(group);
  (void)pthread_mutex_lock(&group->lock);
  even_ucx_goodbye_begin(group);
  (void)pthread_mutex_unlock(&group->lock);
  return true;
}

static bool stays_leaving(even_comm *comm, uint64_t stayed_ns, bool *moved) {
  even_ucx_group *group = even_ucx_of(comm);
  (void)pthread_mutex_lock(&group->lock);
  bool stays = even_ucx_goodbye_stays(group, stayed_ns, moved);
  (void)pthread_mutex_unlock(&group->lock);
  return stays;
}

static void leave_group(even_comm *comm) {
  even_ucx_group *group = even_ucx_of(comm);
  if (begin_leaving(comm)) {
    (void)pthread_mutex_lock(&group->lock);
    even_ucx_goodbye_wait(group);
    (void)pthread_mutex_unlock(&group->lock);
  }
}

/* Whether nothing uses the group's memory any more. */
static bool stop(even_ucx_group *group) {
  size_t notices = group->notices == NULL ? 0 : 2 * (size_t)group->ranks;
  group->deaf = true;
  if (group->link == NULL) {
    return true;
  }
  even_ucx_transfer hearing = {.request = group->incoming_request, .peer = group->rank};
  even_ucx_abandon(group, &hearing, 1);
  group->incoming_request = NULL;
  even_ucx_abandon(group, group->notices, notices);
  even_ucx_letters_abandon(group);
  even_ucx_messages_hear_no_more(group);
  for (int rank = 0; rank < group->ranks; rank++) {
    even_ucx_cut(group, rank);
  }
  return group->transport->stop(group);
}

void even_ucx_lose_transport(even_ucx_group *group) {
  (void)pthread_mutex_lock(&group->lock);
  even_ucx_end_here(group); /* of a call under way */
  (void)pthread_mutex_unlock(&group->lock);
  leave_group((even_comm *)(void *)group);
  (void)pthread_mutex_lock(&group->lock);
  (void)stop(group);
  (void)pthread_mutex_unlock(&group->lock);
}

static void close_group(even_comm *comm) {
  even_ucx_group *group = even_ucx_of(comm);
  leave_group(comm);
  even_waits_close(comm);
  if (!is_inherited(group)) {
    if (!stop(group)) {
      return;
    }
    even_ucx_messages_free(group);
    even_ucx_letters_free(group);
    (void)pthread_mutex_destroy(&group->lock); /* in a child another thread may hold it */
  }
  even_board_close(&group->board);
  even_free(group->peers);
  even_free(group->notices);
  even_free(group->transfers);
  even_free(group->lengths);
  even_free(group->sources);
  even_free(group->waits);
  even_free(group->asked);
  even_free(group->outgoing);
  even_free(group->arrived);
  even_free(group->staging);
  even_ways_end(&group->reduce_ways);
  for (int move = 0; move < EVEN_UCX_MOVES; move++) {
    even_ways_end(&group->move_ways[move]);
  }
  even_ways_end(&group->fit.ways);
  even_free(group->fit.ends);
  even_free(group->fit.times);
  even_free(group->fit.cuts);
  even_free(group->legs.each);
  even_free(group->arena);
  even_free(group);
}

/* ---- the rest of the table ---- */

static bool has_messages(const even_comm *comm) {
  (void)comm;
  return true;
}

static void *arena(even_comm *comm) {
  uintptr_t at = (uintptr_t)even_ucx_of(comm)->arena;
  return (void *)((at + EVEN_UCX_ARENA_ALIGNMENT - 1) / EVEN_UCX_ARENA_ALIGNMENT * EVEN_UCX_ARENA_ALIGNMENT);
}

static void set_timeout(even_comm *comm, double seconds) {
  atomic_store(&even_ucx_of(comm)->timeout_ns, even_comm_limit_ns(seconds));
}

static void set_stop_grace(even_comm *comm, double seconds) {
  atomic_store(&even_ucx_of(comm)->stop_grace_ns,
               even_comm_limit_ns(seconds > 0 ? seconds : EVEN_COMM_STOP_GRACE_SECONDS));
}

static size_t flight(const even_comm *comm, int rank, even_flight_call *out, size_t limit) {
  return even_flight_calls(&((const even_ucx_group *)(const void *)comm)->flight, rank, out, limit);
}

static void set_site(even_comm *comm, const char *text) {
  even_flight_set_site(&even_ucx_of(comm)->flight, text);
}

static void ask_site(even_comm *comm, even_comm_site_call *call, void *context) {
  even_flight_ask_site(&even_ucx_of(comm)->flight, call, context);
}

static uint64_t wait_ns(const even_comm *comm) {
  const even_ucx_group *group = (const even_ucx_group *)(const void *)comm;
  return atomic_load_explicit(&group->wait_ns, memory_order_relaxed);
}

static void end_group(even_comm *comm, const even_error *why) {
  even_ucx_group *group = even_ucx_of(comm);
  (void)pthread_mutex_lock(&group->lock);
  if (!group->has_left) {
    (void)even_error_restore(why);
    even_ucx_end(group);
  }
  (void)pthread_mutex_unlock(&group->lock);
}

static bool has_ended(const even_comm *comm) {
  const even_ucx_group *group = (const even_ucx_group *)(const void *)comm;
  return atomic_load(&group->ended);
}

static void why_ended(const even_comm *comm, even_error *out) {
  even_ucx_group *group = even_ucx_of((even_comm *)(uintptr_t)comm);
  (void)pthread_mutex_lock(&group->lock);
  *out = group->end;
  (void)pthread_mutex_unlock(&group->lock);
}

static void join_whole(even_comm *comm, const even_comm_whole *whole) {
  even_ucx_group *group = even_ucx_of(comm);
  (void)pthread_mutex_lock(&group->lock);
  even_flight_drop(&group->flight);
  group->whole = *whole;
  even_board_keep_flight(whole->board, &group->flight);
  group->flight.lent = true;
  (void)pthread_mutex_unlock(&group->lock);
}

static void place(even_comm *comm, even_wait_place *out) {
  even_ucx_group *group = even_ucx_of(comm);
  out->rank = group->peers[group->rank].number;
  out->flight = &group->flight;
  *out = group->whole.call != NULL ? group->whole.place : *out;
}

static void tell(even_comm *comm) {
  even_ucx_group *group = even_ucx_of(comm);
  (void)pthread_mutex_lock(&group->lock);
  even_ucx_report(group, group->ended);
  (void)even_ucx_move(group);
  (void)pthread_mutex_unlock(&group->lock);
}

/* "; parts by the links' speeds: 50% 50% 0%", where they differ. */
static void describe_parts(const even_ucx_group *group, char *text, size_t bytes) {
  size_t length = strlen(text);
  uint32_t begin = 0;
  if (!group->fit.unequal) {
    return;
  }
  (void)snprintf(text + length, bytes - length, "; parts by the links' speeds:");
  for (int rank = 0; rank < group->ranks; rank++) {
    length = strlen(text);
    (void)snprintf(text + length, bytes - length, " %.3g%%",
                   (double)(group->fit.ends[rank] - begin) * 100 / EVEN_UCX_FIT_WHOLE);
    begin = group->fit.ends[rank];
  }
  even_ways_describe(&group->fit.ways, text, bytes);
}

static void describe(const even_comm *comm, char *text, size_t bytes) {
  const even_ucx_group *group = (const even_ucx_group *)(const void *)comm;
  char transport[256];
  group->transport->describe(group, transport, sizeof transport);
  (void)snprintf(text, bytes,
                 "%s, %d ranks, %s: up to %zu bytes with the words that announce the call; more from each rank to each "
                 "other directly, reduced by the part's owner",
                 transport, group->ranks, group->kernels->name, EVEN_UCX_SMALL_BYTES);
  even_ways_describe(&group->reduce_ways, text, bytes);
  describe_parts(group, text, bytes);
  for (int move = 0; move < EVEN_UCX_MOVES; move++) {
    even_ways_describe(&group->move_ways[move], text, bytes);
  }
}

static even_status follow(even_comm *comm, const even_comm_following *by, size_t *lacking) {
  even_ucx_group *group = even_ucx_of(comm);
  even_ways *const all[] = {&group->reduce_ways, &group->fit.ways, &group->move_ways[EVEN_UCX_ALL_GATHER],
                            &group->move_ways[EVEN_UCX_BROADCAST], &group->move_ways[EVEN_UCX_REDUCE_SCATTER]};
  bool known = by->way == NULL;
  for (size_t i = 0; !known && i < sizeof all / sizeof all[0]; i++) {
    known = even_ways_named(all[i], by->way) >= 0;
  }
  if (!known) {
    return even_fail(EVEN_ERR_NOT_FOUND, "'%s' is no way between hosts", by->way);
  }
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    even_ways_follow(all[i], by->costs, by->shape, by->engine);
    even_ways_force(all[i], by->way == NULL ? -1 : even_ways_named(all[i], by->way));
  }
  *lacking = even_ways_lacking(&group->reduce_ways, even_ucx_choice_bytes(group));
  return EVEN_OK;
}

static void stir(even_comm *comm) {
  even_ucx_group *group = even_ucx_of(comm);
  (void)pthread_mutex_lock(&group->lock);
  if (!group->has_left) {
    even_ucx_wake(group);
  }
  (void)pthread_mutex_unlock(&group->lock);
}

static void revoke_group(even_comm *comm) {
  const even_error why = {.status = EVEN_ERR_REVOKED, .rank = -1, .what = "the group was revoked"};
  end_group(comm, &why);
}

/* A table each, so that a group says what it goes over. */
#define ENGINE(called)                           \
  {                                              \
      .name = (called),                          \
      .all_reduce = even_ucx_all_reduce,         \
      .reduce_scatter = even_ucx_reduce_scatter, \
      .all_gather = even_ucx_all_gather,         \
      .broadcast = even_ucx_broadcast,           \
      .all_to_all = even_ucx_all_to_all,         \
      .barrier = even_ucx_barrier,               \
      .has_messages = has_messages,              \
      .send_begin = even_ucx_send_begin,         \
      .receive_begin = even_ucx_receive_begin,   \
      .request_done = even_ucx_request_done,     \
      .request_wait = even_ucx_request_wait,     \
      .request_free = even_ucx_request_free,     \
      .arena = arena,                            \
      .revoke = revoke_group,                    \
      .refused = even_ucx_refused,               \
      .end = end_group,                          \
      .has_ended = has_ended,                    \
      .why = why_ended,                          \
      .join = join_whole,                        \
      .tell = tell,                              \
      .set_timeout = set_timeout,                \
      .set_stop_grace = set_stop_grace,          \
      .flight = flight,                          \
      .set_site = set_site,                      \
      .ask_site = ask_site,                      \
      .on_stall = even_ucx_on_stall,             \
      .place = place,                            \
      .follow = follow,                          \
      .stir = stir,                              \
      .tell_legs = even_ucx_tell_legs,           \
      .wait_ns = wait_ns,                        \
      .describe = describe,                      \
      .leave = leave_group,                      \
      .leave_begin = begin_leaving,              \
      .leave_stays = stays_leaving,              \
      .close = close_group,                      \
  }

const even_comm_engine even_ucx_engine = ENGINE("ucx");
const even_comm_engine even_ucx_mpi_engine = ENGINE("mpi");
