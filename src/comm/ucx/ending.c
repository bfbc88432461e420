/* How a group over UCX ends: the first to know why tells all others, so that all of them say the same. */
#include "comm/ucx/group.h"

#include "base/fail.h"
#include "os/clock.h"
#include "os/readable.h"

#include <stdio.h>
#include <string.h>

/* How long the word of a group's end may take to be on its way. */
#define NOTICE_NS ((uint64_t)100 * 1000000u)

void even_ucx_name(const even_ucx_group *group, int rank, char *text, size_t bytes) {
  (void)snprintf(text, bytes, "rank %d (process %d on host %s)", group->peers[rank].number, group->peers[rank].process,
                 group->peers[rank].host);
}

/* Sends a notice to all others that can be reached. Their places in `notices` are this notice's own. */
static void tell_all(even_ucx_group *group, const even_ucx_notice *notice, even_ucx_transfer *transfers) {
  uint64_t tag = even_ucx_tag(EVEN_UCX_NOTICE, group->rank, 0);
  for (int rank = 0; rank < group->ranks; rank++) {
    const even_ucx_peer *peer = &group->peers[rank];
    if (rank != group->rank && peer->endpoint != NULL && peer->failed == 0 && !peer->left) {
      even_ucx_send(group, &transfers[rank], rank, tag, notice, sizeof *notice);
    }
  }
}

static bool told(even_ucx_group *group, even_ucx_transfer *transfers) {
  bool all = true;
  for (int rank = 0; rank < group->ranks; rank++) {
    all = (even_ucx_settled(group, &transfers[rank]) || even_ucx_is_error(transfers[rank].request)) && all;
  }
  return all;
}

static void end_with(even_ucx_group *group, const even_error *why) {
  group->ended = true;
  group->end = *why;
  if (group->sleepers > 0) {
    (void)group->api->worker_signal(group->worker);
  }
}

void even_ucx_end(even_ucx_group *group) {
  if (group->ended) {
    return;
  }
  const even_error *why = even_error_last();
  group->ending = (even_ucx_notice){.status = (int32_t)why->status, .sender = group->rank, .rank = why->rank};
  (void)snprintf(group->ending.what, sizeof group->ending.what, "%.*s", (int)sizeof group->ending.what - 1, why->what);
  (void)snprintf(group->ending.fix, sizeof group->ending.fix, "%.*s", (int)sizeof group->ending.fix - 1, why->fix);
  end_with(group, why);
  tell_all(group, &group->ending, group->notices);
  uint64_t began = even_clock_ns();
  while (!told(group, group->notices) && even_clock_ns() - began < NOTICE_NS) {
    (void)group->api->worker_progress(group->worker);
  }
}

void even_ucx_end_lost(even_ucx_group *group, int peer) {
  const even_ucx_peer *at = &group->peers[peer];
  char name[128];
  even_ucx_name(group, peer, name, sizeof name);
  if (at->left) {
    (void)even_fail(EVEN_ERR_PEER_LOST, "%s left the group", name);
  } else {
    (void)even_fail(EVEN_ERR_PEER_LOST, "%s died or cannot be reached any more (UCX: %s)", name,
                    group->api->status_string(at->failed));
  }
  (void)even_error_place(at->number, NULL);
  (void)even_error_fix("the end of rank %d's own output says why; if it lives, see the network to its host",
                       at->number);
  even_ucx_end(group);
}

even_status even_ucx_failure(const even_ucx_group *group, const char *doing) {
  int own = group->peers[group->rank].number;
  (void)even_fail(group->end.status, "%.460s; rank %d was in %s", group->end.what, own, doing);
  (void)even_error_place(group->end.rank, NULL);
  return group->end.fix[0] == '\0' ? group->end.status : even_error_fix("%s", group->end.fix);
}

static void take_notice(even_ucx_group *group) {
  const even_ucx_notice *notice = &group->incoming;
  if (notice->sender < 0 || notice->sender >= group->ranks) {
    return;
  }
  if (notice->status == EVEN_OK) {
    group->peers[notice->sender].left = true;
  } else if (!group->ended) {
    even_error why = {.status = (even_status)notice->status, .rank = notice->rank};
    (void)snprintf(why.what, sizeof why.what, "%.*s", (int)sizeof notice->what - 1, notice->what);
    (void)snprintf(why.fix, sizeof why.fix, "%.*s", (int)sizeof notice->fix - 1, notice->fix);
    end_with(group, &why);
  }
}

bool even_ucx_hear(even_ucx_group *group) {
  static const even_ucx_call plainly = {0};
  bool heard = false;
  for (;;) {
    void *request = group->incoming_request;
    if (request != NULL) {
      if (group->api->request_status(request) == EVEN_UCX_UNDER_WAY) {
        return heard;
      }
      signed char status = group->api->request_status(request);
      group->api->request_free(request);
      group->incoming_request = NULL;
      if (status != 0) {
        return heard; /* cancelled: the group closes */
      }
      take_notice(group);
      heard = true;
    }
    if (group->deaf) {
      return heard;
    }
    request = group->api->tag_receive(group->worker, &group->incoming, sizeof group->incoming,
                                      even_ucx_tag(EVEN_UCX_NOTICE, 0, 0), EVEN_UCX_KIND_MASK, &plainly);
    if (request == NULL) {
      take_notice(group);
      heard = true;
    } else if (even_ucx_is_error(request)) {
      return heard;
    } else {
      group->incoming_request = request;
    }
  }
}

static bool all_gone(const even_ucx_group *group) {
  for (int rank = 0; rank < group->ranks; rank++) {
    const even_ucx_peer *peer = &group->peers[rank];
    if (rank != group->rank && !peer->left && peer->failed == 0) {
      return false;
    }
  }
  return true;
}

void even_ucx_say_goodbye(even_ucx_group *group, uint64_t limit_ns) {
  even_ucx_transfer *transfers = &group->notices[group->ranks];
  uint64_t began = even_clock_ns();
  group->leaving = (even_ucx_notice){.status = EVEN_OK, .sender = group->rank, .rank = -1};
  tell_all(group, &group->leaving, transfers);
  /* A connection that is cut while something unread lies in it takes with it what the other end has not read yet. */
  while (!(told(group, transfers) && (group->ended || all_gone(group))) && even_clock_ns() - began < limit_ns) {
    if (group->api->worker_progress(group->worker) == 0 && !even_ucx_hear(group) &&
        group->api->worker_arm(group->worker) == 0) {
      even_readable_wait(group->descriptor, limit_ns / 10);
    }
  }
}
