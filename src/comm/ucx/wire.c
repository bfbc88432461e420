/* Moving data with UCX, and waiting for it: every wait looks for the group's end, for peers that are gone, and at the
 * clock. */
#include "comm/ucx/group.h"

#include "base/fail.h"
#include "os/clock.h"
#include "os/readable.h"

#include <stdio.h>
#include <string.h>

/* About twice what sleeping and being woken takes on a virtual machine. */
#define WORTH_POLLING_NS ((uint64_t)100 * 1000u)
/* How long a failed call gives others to take what is on its way to them before it cuts the connections. */
#define ABANDON_GENTLY_NS ((uint64_t)50 * 1000000u)
#define ABANDON_FORCED_NS ((uint64_t)2000 * 1000000u)

static const even_ucx_call plainly = {0};

static void keep(even_ucx_group *group, even_ucx_transfer *transfer, int peer, void *request) {
  transfer->peer = peer;
  transfer->request = request;
  if (even_ucx_is_error(request)) {
    if (group->peers[peer].failed == 0) {
      group->peers[peer].failed = even_ucx_error_of(request);
    }
  }
}

void even_ucx_send(even_ucx_group *group, even_ucx_transfer *transfer, int peer, uint64_t tag, const void *data,
                   size_t bytes) {
  void *endpoint = group->peers[peer].endpoint;
  if (endpoint == NULL) { /* cut: the group has ended */
    keep(group, transfer, peer, (void *)(intptr_t)EVEN_UCX_CANCELLED);
    return;
  }
  keep(group, transfer, peer, group->api->tag_send(endpoint, data, bytes, tag, &plainly));
}

void even_ucx_receive(even_ucx_group *group, even_ucx_transfer *transfer, int peer, uint64_t tag, void *data,
                      size_t bytes) {
  keep(group, transfer, peer, group->api->tag_receive(group->worker, data, bytes, tag, UINT64_MAX, &plainly));
}

bool even_ucx_settled(even_ucx_group *group, even_ucx_transfer *transfer) {
  if (transfer->request == NULL) {
    return true;
  }
  if (even_ucx_is_error(transfer->request)) {
    return false; /* it never began: the wait finds that the peer has failed */
  }
  signed char status = group->api->request_status(transfer->request);
  if (status == EVEN_UCX_UNDER_WAY) {
    return false;
  }
  if (status < 0 && status != EVEN_UCX_CANCELLED && group->peers[transfer->peer].failed == 0) {
    group->peers[transfer->peer].failed = status;
  }
  group->api->request_free(transfer->request);
  transfer->request = status < 0 ? (void *)(intptr_t)status : NULL;
  return status >= 0;
}

bool even_ucx_move(even_ucx_group *group) {
  bool moved = false;
  while (group->api->worker_progress(group->worker) != 0) {
    moved = true;
  }
  moved = even_ucx_hear(group) || moved;
  moved = even_ucx_messages_move(group) || moved;
  if (moved && group->sleepers > 0) {
    (void)group->api->worker_signal(group->worker); /* one of them may wait for just that */
  }
  return moved;
}

static void sleep_unlocked(even_ucx_group *group, uint64_t limit_ns) {
  if (group->api->worker_arm(group->worker) != 0) {
    return; /* something came meanwhile, or it cannot be slept */
  }
  group->sleepers++;
  (void)pthread_mutex_unlock(&group->lock);
  even_readable_wait(group->descriptor, limit_ns < EVEN_COMM_LOOK_NS ? limit_ns : EVEN_COMM_LOOK_NS);
  (void)pthread_mutex_lock(&group->lock);
  group->sleepers--;
}

void even_ucx_rest(even_ucx_group *group, uint32_t *polls, uint64_t limit_ns) {
  if (even_ucx_move(group)) {
    *polls = 0;
  } else if (*polls < group->patience.polls) {
    ++*polls;
    (void)pthread_mutex_unlock(&group->lock); /* others may want to begin something */
    (void)pthread_mutex_lock(&group->lock);
  } else {
    sleep_unlocked(group, limit_ns);
  }
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
      if (peer->failed != 0 || peer->left) {
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

static even_status wait_locked(even_ucx_group *group, even_ucx_transfer *transfers, size_t count, uint64_t began) {
  uint32_t polls = 0;
  for (;;) {
    bool gone = false;
    const even_ucx_transfer *open = first_open(group, transfers, count, &gone);
    if (open == NULL) {
      return EVEN_OK;
    }
    if (gone && even_ucx_move(group)) {
      continue; /* what it sent before it went */
    }
    if (!group->ended && group->watched != NULL && group->watched(group->watched_context)) {
      (void)even_fail(EVEN_ERR_REVOKED, "the group was revoked");
      even_ucx_end(group);
    }
    if (group->ended) {
      char doing[128];
      even_call_describe(&group->call, doing, sizeof doing);
      return even_ucx_failure(group, doing);
    }
    if (gone) {
      even_ucx_end_lost(group, open->peer);
      continue;
    }
    uint64_t limit = atomic_load_explicit(&group->timeout_ns, memory_order_relaxed);
    uint64_t waited = even_clock_ns() - began;
    if (waited >= limit) {
      end_late(group, open->peer, limit);
      continue;
    }
    even_ucx_rest(group, &polls, limit - waited);
  }
}

even_status even_ucx_wait(even_ucx_group *group, even_ucx_transfer *transfers, size_t count) {
  uint64_t began = even_clock_ns();
  group->waits_since = group->waits_since == 0 ? began : group->waits_since;
  (void)pthread_mutex_lock(&group->lock);
  even_status status = wait_locked(group, transfers, count, group->waits_since);
  uint64_t waited = even_clock_ns() - began;
  learn(&group->patience, waited); /* who moves messages meanwhile reads it, too */
  (void)pthread_mutex_unlock(&group->lock);
  (void)atomic_fetch_add_explicit(&group->wait_ns, waited, memory_order_relaxed);
  return status;
}

/* ---- after a failure ---- */

static bool any_open(even_ucx_group *group, even_ucx_transfer *transfers, size_t count) {
  bool open = false;
  for (size_t i = 0; i < count; i++) {
    open = (!even_ucx_settled(group, &transfers[i]) && !even_ucx_is_error(transfers[i].request)) || open;
  }
  return open;
}

static bool progress_until_settled(even_ucx_group *group, even_ucx_transfer *transfers, size_t count,
                                   uint64_t limit_ns) {
  uint64_t began = even_clock_ns();
  while (any_open(group, transfers, count)) {
    if (even_clock_ns() - began >= limit_ns) {
      return false;
    }
    (void)group->api->worker_progress(group->worker);
  }
  return true;
}

void even_ucx_cut(even_ucx_group *group, int peer) {
  static const even_ucx_call at_once = {.mask = EVEN_UCX_CALL_FLAGS, .flags = EVEN_UCX_CLOSE_AT_ONCE};
  even_ucx_peer *at = &group->peers[peer];
  if (at->endpoint != NULL) {
    void *request = group->api->endpoint_close(at->endpoint, &at_once);
    even_ucx_transfer closing = {.peer = peer, .request = even_ucx_is_error(request) ? NULL : request};
    at->endpoint = NULL;
    at->failed = at->failed == 0 ? EVEN_UCX_CANCELLED : at->failed;
    (void)progress_until_settled(group, &closing, 1, ABANDON_FORCED_NS);
  }
}

void even_ucx_abandon(even_ucx_group *group, even_ucx_transfer *transfers, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (!even_ucx_settled(group, &transfers[i]) && !even_ucx_is_error(transfers[i].request)) {
      group->api->request_cancel(group->worker, transfers[i].request); /* a send goes on, until it is cut */
    }
  }
  if (!progress_until_settled(group, transfers, count, ABANDON_GENTLY_NS)) {
    for (int peer = 0; peer < group->ranks; peer++) {
      even_ucx_cut(group, peer);
    }
    (void)progress_until_settled(group, transfers, count, ABANDON_FORCED_NS);
  }
  memset(transfers, 0, count * sizeof *transfers);
}
