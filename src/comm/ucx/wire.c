/* Moving data over the group's transport, and waiting for it: every wait looks for the group's end, for peers that are
 * gone, and at the clock. */
#include "comm/ucx/group.h"

#include "base/fail.h"
#include "os/clock.h"
#include "os/futex.h"

#include <stdio.h>
#include <string.h>

/* About twice what sleeping and being woken takes on a virtual machine. */
#define WORTH_POLLING_NS ((uint64_t)100 * 1000u)
/* How long a failed call gives others to take what is on its way to them before it cuts the connections. */
#define ABANDON_GENTLY_NS ((uint64_t)30 * 1000000u)
#define ABANDON_FORCED_NS ((uint64_t)2000 * 1000000u)
/* How often one who cannot let go of the lock polls before it sleeps, and for how long it does then. */
#define BREATHLESS 64u
#define BREATH_NS ((uint64_t)1000000u)

static void keep(even_ucx_group *group, even_ucx_transfer *transfer, int peer, size_t bytes, void *request) {
  even_ucx_peer *at = &group->peers[peer];
  *transfer = (even_ucx_transfer){.request = request, .peer = peer, .bytes = bytes};
  if (even_ucx_is_error(request)) {
    at->failed = at->failed == 0 ? even_ucx_error_of(request) : at->failed;
  } else if (request != NULL) {
    at->under_way += bytes;
  }
}

void even_ucx_send(even_ucx_group *group, even_ucx_transfer *transfer, int peer, uint64_t tag, const void *data,
                   size_t bytes) {
  void *endpoint = group->peers[peer].endpoint;
  if (endpoint == NULL) { /* cut: the group has ended */
    keep(group, transfer, peer, bytes, (void *)(intptr_t)EVEN_UCX_CANCELLED);
    return;
  }
  keep(group, transfer, peer, bytes, group->transport->send(group, endpoint, data, bytes, tag));
}

void even_ucx_receive(even_ucx_group *group, even_ucx_transfer *transfer, int peer, uint64_t tag, void *data,
                      size_t bytes) {
  keep(group, transfer, peer, bytes, group->transport->receive(group, data, bytes, tag, UINT64_MAX));
}

bool even_ucx_settled(even_ucx_group *group, even_ucx_transfer *transfer) {
  if (transfer->request == NULL) {
    return true;
  }
  if (even_ucx_is_error(transfer->request)) {
    return false; /* it never began: the wait finds that the peer has failed */
  }
  signed char status = group->transport->status(group, transfer->request);
  if (status == EVEN_UCX_UNDER_WAY) {
    return false;
  }
  if (status < 0 && status != EVEN_UCX_CANCELLED && group->peers[transfer->peer].failed == 0) {
    group->peers[transfer->peer].failed = status;
  }
  group->transport->release(group, transfer->request);
  group->peers[transfer->peer].under_way -= transfer->bytes;
  if (transfer->watched) {
    transfer->watched = false;
    even_ucx_legs_settled(group, transfer);
  }
  transfer->request = status < 0 ? (void *)(intptr_t)status : NULL;
  return status >= 0;
}

bool even_ucx_move(even_ucx_group *group) {
  bool moved = false;
  while (group->transport->progress(group)) {
    moved = true;
  }
  moved = even_ucx_hear(group) || moved;
  moved = even_ucx_messages_move(group) || moved;
  even_ucx_letters_settle(group);
  if (moved) {
    even_ucx_wake(group); /* one of them may wait for just that */
  }
  return moved;
}

void even_ucx_wake(even_ucx_group *group) {
  if (group->transport->naps) {
    return;
  }
  if (group->sleepers > (group->listens ? 1 : 0)) {
    (void)atomic_fetch_add(&group->turn, 1u);
    even_futex_wake_all(&group->turn);
  }
  if (group->listens) {
    group->transport->wake(group);
  }
}

/* One thread at a time listens to the transport: to get ready for it takes away what another one was to hear. The
 * others sleep until that one has heard something, and one of them listens after it. Where nothing can be heard in a
 * sleep, each has its own short ones. */
static void sleep_unlocked(even_ucx_group *group, uint64_t limit_ns, uint32_t idle) {
  uint64_t limit = limit_ns < EVEN_COMM_LOOK_NS ? limit_ns : EVEN_COMM_LOOK_NS;
  uint32_t turn = atomic_load(&group->turn);
  bool naps = group->transport->naps;
  bool listens = !naps && !group->listens;
  if ((listens || naps) && !group->transport->arm(group)) {
    return; /* something came meanwhile, or it cannot be slept */
  }
  group->listens = group->listens || listens;
  group->sleepers++;
  (void)pthread_mutex_unlock(&group->lock);
  if (listens || naps) {
    group->transport->sleep(group, limit, idle);
  } else {
    even_futex_wait(&group->turn, turn, limit);
  }
  (void)pthread_mutex_lock(&group->lock);
  group->sleepers--;
  if (listens) {
    group->listens = false;
    even_ucx_wake(group);
  }
}

void even_ucx_rest(even_ucx_group *group, uint32_t *polls, uint64_t limit_ns) {
  if (even_ucx_move(group)) {
    *polls = 0;
    return;
  }
  if (*polls < group->patience.polls) {
    (void)pthread_mutex_unlock(&group->lock); /* others may want to begin something */
    (void)pthread_mutex_lock(&group->lock);
  } else {
    sleep_unlocked(group, limit_ns, *polls - group->patience.polls);
  }
  *polls += *polls < UINT32_MAX;
}

/* The next wait polls longer where this one was short, and less where it was long. */
static void learn(even_comm_patience *patience, uint64_t waited) {
  if (waited < WORTH_POLLING_NS) {
    uint32_t more = patience->polls * 2 + 1;
    patience->polls = more < patience->most ? more : patience->most;
  } else {
    uint32_t fewer = patience->polls / 2;
    patience->polls = fewer > patience->least ? fewer : patience->least;
  }
}

/* The first transfer that is not done, of a peer that is gone if there is one. */
static even_ucx_transfer *first_open(even_ucx_group *group, even_ucx_transfer *transfers, size_t count, bool *gone) {
  even_ucx_transfer *open = NULL;
  *gone = false;
  for (size_t i = 0; i < count; i++) {
    if (!even_ucx_settled(group, &transfers[i])) {
      const even_ucx_peer *peer = &group->peers[transfers[i].peer];
      open = open == NULL ? &transfers[i] : open;
      if (peer->failed != 0 || peer->left || peer->gone) {
        *gone = true;
        return &transfers[i];
      }
    }
  }
  return open;
}

static void end_late(even_ucx_group *group, int late, uint64_t limit_ns) {
  char name[128];
  even_ucx_name(group, late, name, sizeof name);
  (void)even_fail(EVEN_ERR_TIMEOUT, "Timed out: %s did not come within the timeout of %.3g s", name,
                  (double)limit_ns * 1e-9);
  (void)even_error_place(group->peers[late].number, NULL);
  (void)even_error_fix("see what %s is doing (a stack dump) and whether its host can be reached, or raise the timeout",
                       name);
  even_ucx_end(group);
}

/* Whether what has been moved is what was meant: a rank that gave up has said so before it used its memory for
 * something else. */
static bool counts(even_ucx_group *group) {
  if (!group->transport->takes_back) {
    (void)even_ucx_hear(group);
  }
  return group->transport->takes_back || !group->ended;
}

/* Whom this rank waits for, one flag a rank. */
static const bool *find_waits(even_ucx_group *group, even_ucx_transfer *transfers, size_t count) {
  memset(group->waits, 0, (size_t)group->ranks * sizeof *group->waits);
  for (size_t i = 0; i < count; i++) {
    group->waits[transfers[i].peer] = group->waits[transfers[i].peer] || transfers[i].request != NULL;
  }
  return group->waits;
}

typedef struct condition {
  even_ucx_until *until; /* NULL: all transfers are done */
  even_ucx_tell *tell;
  const void *context;
} condition;

static void tell_wait(even_ucx_group *group, const even_ucx_transfer *transfers, const condition *when,
                      uint64_t now_ns) {
  if (group->meets) {
    even_ucx_tell_meeting(group, transfers, now_ns);
  } else if (when->tell != NULL) {
    when->tell(group, when->context, now_ns);
  }
}

void even_ucx_look_at_whole(even_ucx_group *group) {
  if (group->whole.look != NULL) {
    (void)pthread_mutex_unlock(&group->lock);
    group->whole.look(group->whole.context);
    (void)pthread_mutex_lock(&group->lock);
  }
}

/* Looks around, as those who wait do at times; whether it did: the lock was let go, then. */
static bool look_around(even_ucx_group *group, even_ucx_transfer *transfers, size_t count, const condition *when,
                        uint64_t now_ns) {
  if (!even_ucx_look_is_due(&group->call_looks, now_ns)) {
    return false;
  }
  even_ucx_end_over(group);
  if (even_ucx_refusal_lasts(group) && even_ucx_refusal_stands(group)) { /* who refused may never come */
    even_ucx_end(group);
  }
  tell_wait(group, transfers, when, now_ns); /* first: who has found the same may have left for it */
  now_ns = even_clock_ns();                  /* the lock was let go: others may have answered since */
  const bool *waits = find_waits(group, transfers, count);
  even_ucx_look(group, &group->call_looks, waits, now_ns);
  even_ucx_stall_inspect(group, waits, now_ns);
  even_ucx_look_at_whole(group);
  return true;
}

static bool is_met(even_ucx_group *group, const condition *when, const even_ucx_transfer *open) {
  return when->until == NULL ? open == NULL : when->until(group, when->context);
}

static even_status wait_locked(even_ucx_group *group, even_ucx_transfer *transfers, size_t count, const condition *when,
                               uint64_t began) {
  uint32_t polls = 0;
  for (;;) {
    bool gone = false;
    const even_ucx_transfer *open = first_open(group, transfers, count, &gone);
    if (is_met(group, when, open) && counts(group)) {
      return EVEN_OK;
    }
    if (gone && even_ucx_move(group)) {
      continue; /* what it sent before it went */
    }
    if (group->ended) {
      return even_ucx_call_failure(group);
    }
    if (gone) {
      tell_wait(group, transfers, when, even_clock_ns()); /* as when it looks around */
      even_ucx_end_lost(group, open->peer);
      continue;
    }
    uint64_t limit = atomic_load_explicit(&group->timeout_ns, memory_order_relaxed);
    uint64_t now = even_clock_ns();
    uint64_t waited = now - began;
    if (waited >= limit && open != NULL) {
      end_late(group, open->peer, limit);
      continue;
    }
    if (look_around(group, transfers, count, when, now)) {
      open = first_open(group, transfers, count, &gone);
      if (group->ended || is_met(group, when, open)) { /* who stirs wakes only one that sleeps */
        continue;
      }
    }
    even_ucx_rest(group, &polls, waited < limit ? limit - waited : EVEN_COMM_LOOK_NS);
  }
}

static even_status wait_for(even_ucx_group *group, even_ucx_transfer *transfers, size_t count, const condition *when) {
  uint64_t began = even_clock_ns();
  if (group->waits_since == 0) { /* the call's first: of all of its waits together is told some four times a second */
    group->waits_since = began;
    group->call_waiting.of = (even_waiting){.told = false};
  }
  (void)pthread_mutex_lock(&group->lock);
  even_status status = wait_locked(group, transfers, count, when, group->waits_since);
  bool found = even_ucx_tell_nothing(group);
  uint64_t waited = even_clock_ns() - began;
  learn(&group->patience, waited); /* who moves messages meanwhile reads it, too */
  (void)pthread_mutex_unlock(&group->lock);
  if (found) {
    even_watcher_look();
  }
  (void)atomic_fetch_add_explicit(&group->wait_ns, waited, memory_order_relaxed);
  return status;
}

even_status even_ucx_wait(even_ucx_group *group, even_ucx_transfer *transfers, size_t count) {
  const condition when = {.until = NULL};
  return wait_for(group, transfers, count, &when);
}

even_status even_ucx_wait_until(even_ucx_group *group, even_ucx_transfer *transfers, size_t count,
                                even_ucx_until *until, even_ucx_tell *tell, const void *context) {
  const condition when = {.until = until, .tell = tell, .context = context};
  return wait_for(group, transfers, count, &when);
}

/* ---- after a failure ---- */

static bool any_open(even_ucx_group *group, even_ucx_transfer *transfers, size_t count) {
  bool open = false;
  for (size_t i = 0; i < count; i++) {
    open = (!even_ucx_settled(group, &transfers[i]) && !even_ucx_is_error(transfers[i].request)) || open;
  }
  return open;
}

/* One who only polls uses up its turn of a busy core, and then waits for many others' turns. */
void even_ucx_breathe(even_ucx_group *group, uint32_t *idle) {
  if (group->transport->progress(group)) {
    *idle = 0;
  } else if (++*idle > BREATHLESS) {
    if (group->listens) { /* another thread does, and waits for the lock, or would miss what wakes it */
      even_clock_sleep_ns(BREATH_NS);
    } else if (group->transport->arm(group)) {
      group->transport->sleep(group, BREATH_NS, *idle - BREATHLESS);
    }
  }
}

static bool progress_until_settled(even_ucx_group *group, even_ucx_transfer *transfers, size_t count,
                                   uint64_t limit_ns) {
  uint64_t began = even_clock_ns();
  uint32_t idle = 0;
  while (any_open(group, transfers, count)) {
    if (even_clock_ns() - began >= limit_ns) {
      return false;
    }
    even_ucx_breathe(group, &idle);
  }
  return true;
}

void even_ucx_cut(even_ucx_group *group, int peer) {
  even_ucx_peer *at = &group->peers[peer];
  if (at->endpoint != NULL) {
    void *request = group->transport->cut(group, at->endpoint);
    even_ucx_transfer closing = {.peer = peer, .request = even_ucx_is_error(request) ? NULL : request};
    at->endpoint = NULL;
    at->failed = at->failed == 0 ? EVEN_UCX_CANCELLED : at->failed;
    (void)progress_until_settled(group, &closing, 1, ABANDON_FORCED_NS);
  }
}

void even_ucx_abandon(even_ucx_group *group, even_ucx_transfer *transfers, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (!even_ucx_settled(group, &transfers[i]) && !even_ucx_is_error(transfers[i].request)) {
      group->transport->cancel(group, transfers[i].request); /* a send goes on, until it is cut */
    }
  }
  if (!progress_until_settled(group, transfers, count, ABANDON_GENTLY_NS) && group->transport->takes_back) {
    for (int peer = 0; peer < group->ranks; peer++) {
      even_ucx_cut(group, peer);
    }
    (void)progress_until_settled(group, transfers, count, ABANDON_FORCED_NS);
  }
  memset(transfers, 0, count * sizeof *transfers);
}
