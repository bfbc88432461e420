/* How a group over the network ends: the first to know why tells all others, so that all of them say the same. */
#include "comm/ucx/group.h"

#include "base/fail.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

/* How long the word of a group's end may take to be on its way. */
#define NOTICE_NS ((uint64_t)100 * 1000000u)

void even_ucx_name(const even_ucx_group *group, int rank, char *text, size_t bytes) {
  (void)snprintf(text, bytes, "rank %d (process %d on host %s)", group->peers[rank].number, group->peers[rank].process,
                 group->peers[rank].host);
}

/* Sends the end or the leaving to all others that can be reached. Their places in `notices` are this notice's own. */
static void tell_all(even_ucx_group *group, const even_ucx_notice *notice, even_ucx_transfer *transfers) {
  uint64_t tag = even_ucx_tag(EVEN_UCX_NOTICE, group->rank, 0);
  for (int rank = 0; rank < group->ranks; rank++) {
    const even_ucx_peer *peer = &group->peers[rank];
    bool reached = peer->failed == 0 || !group->transport->takes_back; /* a connection that was not cut may still do */
    if (rank != group->rank && peer->endpoint != NULL && reached && !peer->left) {
      even_ucx_send(group, &transfers[rank], rank, tag, notice, offsetof(even_ucx_notice, end) + sizeof notice->end);
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
  group->end = *why;
  group->ended = true;
  even_ucx_report(group, true); /* what it reached: each tells all others */
  even_ucx_wake(group);
}

void even_ucx_end_here(even_ucx_group *group) {
  if (!group->ended) {
    end_with(group, even_error_last());
  }
}

void even_ucx_end(even_ucx_group *group) {
  if (group->ended) {
    return;
  }
  const even_error why = *even_error_last();
  group->ending = (even_ucx_notice){.word = EVEN_UCX_ENDED, .sender = group->rank};
  even_ucx_end_words_write(&group->ending.end, &why);
  end_with(group, &why);
  tell_all(group, &group->ending, group->notices);
  uint64_t began = even_clock_ns();
  uint32_t idle = 0;
  while (!told(group, group->notices) && !even_ucx_is_over(group) && even_clock_ns() - began < NOTICE_NS) {
    even_ucx_breathe(group, &idle);
  }
}

void even_ucx_end_over(even_ucx_group *group) {
  if (!group->ended && even_ucx_is_over(group)) {
    (void)even_fail(EVEN_ERR_REVOKED, "the group was revoked");
    even_ucx_end_here(group);
  }
}

void even_ucx_end_lost(even_ucx_group *group, int peer) {
  const even_ucx_peer *at = &group->peers[peer];
  char name[128];
  even_ucx_name(group, peer, name, sizeof name);
  if (at->left) {
    (void)even_fail(EVEN_ERR_PEER_LOST, "%s left the group", name);
  } else if (at->gone) {
    (void)even_fail(EVEN_ERR_PEER_LOST, "%s died or came to its end", name);
  } else {
    (void)even_fail(EVEN_ERR_PEER_LOST, "%s died or cannot be reached any more (%s: %s)", name,
                    group->transport->library, group->transport->status_text(group, at->failed));
  }
  (void)even_error_place(at->number, NULL);
  (void)even_error_fix("the end of rank %d's own output says why; if it lives, see the network to its host",
                       at->number);
  even_ucx_end(group);
}

void even_ucx_end_stopped(even_ucx_group *group, int peer) {
  const even_ucx_peer *at = &group->peers[peer];
  char name[128];
  even_ucx_name(group, peer, name, sizeof name);
  (void)even_fail(EVEN_ERR_PEER_LOST, "%s was stopped (SIGSTOP, SIGTSTP) and stands still", name);
  (void)even_error_place(at->number, NULL);
  (void)even_error_fix(
      "see who stopped process %d on host %s; EVENSTEP_STOP_GRACE (even_comm_set_stop_grace) says how many seconds a "
      "rank may stand still while others wait",
      at->process, at->host);
  even_ucx_end(group);
}

even_status even_ucx_call_failure(even_ucx_group *group) {
  char doing[128];
  (void)pthread_mutex_unlock(&group->lock);
  even_flight_say(&group->flight);
  (void)pthread_mutex_lock(&group->lock);
  even_ucx_report(group, true);
  even_ucx_await_reports(group);
  even_call_describe(&group->call, doing, sizeof doing);
  return even_ucx_failure(group, doing);
}

void even_ucx_end_silent(even_ucx_group *group, int peer, uint64_t silent_ns) {
  const even_ucx_peer *at = &group->peers[peer];
  char name[128];
  even_ucx_name(group, peer, name, sizeof name);
  (void)even_fail(EVEN_ERR_PEER_LOST,
                  "%s has not answered for %.2g s: it was stopped, or its host stands still or cannot be reached", name,
                  (double)silent_ns * 1e-9);
  (void)even_error_place(at->number, NULL);
  (void)even_error_fix(
      "see process %d on host %s, and the network to it; EVENSTEP_STOP_GRACE (even_comm_set_stop_grace) says how many "
      "seconds a rank may stand still while others wait, one that nobody else can see sixty times as long",
      at->process, at->host);
  even_ucx_end(group);
}

/* A message of this rank that was refused comes first: whoever refused it may be gone for that. */
even_status even_ucx_failure(const even_ucx_group *group, const char *doing) {
  const even_error why = even_ucx_refusal_stands(group) ? *even_error_last() : group->end;
  int own = group->peers[group->rank].number;
  char reached[EVEN_FLIGHT_REACHED];
  even_flight_reached(&group->flight, reached, sizeof reached);
  (void)even_fail(why.status, "%.480s; rank %d was in %s%s", why.what, own, doing, reached);
  (void)even_error_place(why.rank, NULL);
  return why.fix[0] == '\0' ? why.status : even_error_fix("%s", why.fix);
}

/* Another host's number for a status: what is none of them, or none of an end, must not pass for success. */
static even_status status_of(int32_t number) {
  return number > EVEN_OK && number <= EVEN_ERR_INTERRUPTED ? (even_status)number : EVEN_ERR_REVOKED;
}

void even_ucx_end_words_write(even_ucx_end_words *words, const even_error *why) {
  words->status = (int32_t)why->status;
  words->rank = why->rank;
  (void)snprintf(words->what, sizeof words->what, "%.*s", (int)sizeof words->what - 1, why->what);
  (void)snprintf(words->fix, sizeof words->fix, "%.*s", (int)sizeof words->fix - 1, why->fix);
}

void even_ucx_end_words_read(const even_ucx_end_words *words, even_error *out) {
  *out = (even_error){.status = status_of(words->status), .rank = words->rank};
  (void)snprintf(out->what, sizeof out->what, "%.*s", (int)sizeof words->what - 1, words->what);
  (void)snprintf(out->fix, sizeof out->fix, "%.*s", (int)sizeof words->fix - 1, words->fix);
}

static void take_end(even_ucx_group *group, const even_ucx_end_words *words) {
  if (!group->ended) {
    even_error why;
    even_ucx_end_words_read(words, &why);
    end_with(group, &why);
  }
}

static void take_notice(even_ucx_group *group) {
  const even_ucx_notice *notice = &group->incoming;
  if (notice->sender < 0 || notice->sender >= group->ranks) {
    return;
  }
  even_ucx_peer *sender = &group->peers[notice->sender];
  if (sender->asked_ns != 0 && notice->word != EVEN_UCX_REPORTS &&
      notice->word != EVEN_UCX_WAITS) { /* it lives: its answer is on its way */
    sender->asked_ns = even_clock_ns();
  }
  switch (notice->word) {
    case EVEN_UCX_LEFT:
      group->peers[notice->sender].left = true;
      break;
    case EVEN_UCX_ENDED:
      take_end(group, &notice->end);
      break;
    case EVEN_UCX_ASKS:
      even_ucx_answer(group, notice);
      break;
    case EVEN_UCX_REPORTS:
      even_ucx_take_news(group, notice);
      break;
    case EVEN_UCX_RETURNS:
      even_ucx_take_room_back(group, notice);
      break;
    case EVEN_UCX_REFUSES:
    case EVEN_UCX_ACCEPTS:
      even_ucx_take_refusal(group, notice);
      break;
    case EVEN_UCX_ASKS_WAITS:
      even_ucx_answer_waits(group, notice);
      break;
    case EVEN_UCX_WAITS:
      even_ucx_take_waits(group, notice);
      break;
    case EVEN_UCX_CROSSED:
      even_ucx_take_crossed(notice);
      break;
    default:
      break;
  }
}

bool even_ucx_hear(even_ucx_group *group) {
  bool heard = false;
  for (;;) {
    void *request = group->incoming_request;
    if (request != NULL) {
      signed char status = group->transport->status(group, request);
      if (status == EVEN_UCX_UNDER_WAY) {
        return heard;
      }
      group->transport->release(group, request);
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
    request = group->transport->receive(group, &group->incoming, sizeof group->incoming,
                                        even_ucx_tag(EVEN_UCX_NOTICE, 0, 0), EVEN_UCX_KIND_MASK);
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

/* Whether nobody can be hurt by this rank's leaving: all others have left, too, or, of a group that has ended, know of
 * its end. */
static bool all_are_done(const even_ucx_group *group) {
  bool lost = group->ended && group->end.status == EVEN_ERR_PEER_LOST;
  for (int rank = 0; rank < group->ranks; rank++) {
    const even_ucx_peer *peer = &group->peers[rank];
    bool knows = group->ended && (peer->gone || peer->reported || group->ranks > EVEN_UCX_REPORTING_RANKS ||
                                  (lost && peer->number == group->end.rank));
    if (rank != group->rank && !peer->left && peer->failed == 0 && !knows) {
      return false;
    }
  }
  return true;
}

/* Whether all that this rank has told, the word of its leaving with it, has gone. */
static bool all_told(even_ucx_group *group, even_ucx_transfer *leaving) {
  even_ucx_letters_settle(group);
  return told(group, leaving) && group->letters == NULL;
}

/* How long one who leaves stays: for others to leave, too; and for the word of an end to reach them, which may need a
 * connection that is only being made, and so their help. */
#define LEAVING_NS ((uint64_t)100 * 1000000u)
#define TELLING_NS ((uint64_t)2000 * 1000000u)

static bool stays(even_ucx_group *group, even_ucx_transfer *leaving, uint64_t stayed_ns) {
  bool all = all_told(group, leaving);
  bool opened = group->watch.look != NULL; /* else connections are still being made (GREETINGS) */
  return !(opened && even_ucx_is_over(group)) && !(all && all_are_done(group)) &&
         stayed_ns < (all && !group->ended ? LEAVING_NS : TELLING_NS);
}

void even_ucx_goodbye_begin(even_ucx_group *group) {
  group->leaving = (even_ucx_notice){.word = EVEN_UCX_LEFT, .sender = group->rank};
  tell_all(group, &group->leaving, &group->notices[group->ranks]);
}

/* A connection that is cut while something unread lies in it takes with it what the other end has not read yet. */
bool even_ucx_goodbye_stays(even_ucx_group *group, uint64_t stayed_ns, bool *moved) {
  even_ucx_transfer *leaving = &group->notices[group->ranks];
  if (stays(group, leaving, stayed_ns)) {
    *moved = group->transport->progress(group) || even_ucx_hear(group) || *moved;
    return true;
  }
  group->drained =
      all_told(group, leaving) && !group->ended && all_are_done(group) && !even_ucx_messages_are_left(group);
  return false;
}

void even_ucx_goodbye_wait(even_ucx_group *group) {
  uint64_t began = even_clock_ns();
  bool moved = false;
  for (uint32_t idle = 0; even_ucx_goodbye_stays(group, even_clock_ns() - began, &moved); idle++) {
    if (!moved && group->transport->arm(group)) {
      group->transport->sleep(group, LEAVING_NS / 10, idle);
    }
    moved = false;
  }
}
