/* What ranks of a group over UCX tell one another of themselves: when one asks, and when the group has ended. */
#include "comm/ucx/group.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"

#include <string.h>

/* How long a failing call waits for what others reached. They answer at once in a call, and else when their watcher
 * looks. */
#define REPORTS_NS ((uint64_t)50 * 1000000u)

#define WORD_BYTES offsetof(even_ucx_notice, end)

/* Nothing follows a rank's word that it leaves. */
static bool can_be_told(const even_ucx_group *group, int rank) {
  const even_ucx_peer *peer = &group->peers[rank];
  return !group->has_left && rank != group->rank && peer->endpoint != NULL && peer->failed == 0 && !peer->left;
}

bool even_ucx_post(even_ucx_group *group, int peer, const even_ucx_notice *notice, size_t bytes) {
  even_ucx_letter *letter = NULL;
  if (!can_be_told(group, peer) ||
      even_alloc(1, offsetof(even_ucx_letter, notice) + bytes, (void **)&letter) != EVEN_OK) {
    return false;
  }
  memcpy(&letter->notice, notice, bytes);
  even_ucx_send(group, &letter->transfer, peer, even_ucx_tag(EVEN_UCX_NOTICE, group->rank, 0), &letter->notice, bytes);
  letter->next = group->letters;
  group->letters = letter;
  return true;
}

void even_ucx_letters_settle(even_ucx_group *group) {
  even_ucx_letter **at = &group->letters;
  while (*at != NULL) {
    even_ucx_letter *letter = *at;
    if (even_ucx_settled(group, &letter->transfer) || even_ucx_is_error(letter->transfer.request)) {
      *at = letter->next;
      even_free(letter);
    } else {
      at = &letter->next;
    }
  }
}

void even_ucx_letters_abandon(even_ucx_group *group) {
  for (even_ucx_letter *letter = group->letters; letter != NULL; letter = letter->next) {
    even_ucx_abandon(group, &letter->transfer, 1);
  }
}

void even_ucx_letters_free(even_ucx_group *group) {
  while (group->letters != NULL) {
    even_ucx_letter *letter = group->letters;
    group->letters = letter->next;
    even_free(letter);
  }
}

/* What this rank knows of `about`, which may be itself; the calls of that rank, or of `caller` in the larger group. */
static even_ucx_notice news_of(even_ucx_group *group, int about, int caller, bool last) {
  even_ucx_notice notice;
  memset(&notice, 0, sizeof notice);
  notice.word = EVEN_UCX_REPORTS;
  notice.sender = group->rank;
  notice.news.last = last;
  notice.news.about = about;
  bool opened = group->watch.look != NULL; /* before, it cannot be watched: whether it will not be is told then */
  notice.news.unwatched =
      about == group->rank ? opened && !atomic_load(&group->watch.runs) : group->peers[about].unwatched;
  even_flight_report_make(&group->flight, caller, &notice.news.call);
  return notice;
}

static void post_news(even_ucx_group *group, int to, const even_ucx_notice *notice) {
  (void)even_ucx_post(group, to, notice, WORD_BYTES + sizeof notice->news);
}

/* Of all for whom this rank speaks. */
static void post_own_news(even_ucx_group *group, int to, bool last) {
  const int *members = group->whole.ranks == 0 ? &group->rank : group->whole.members;
  int count = group->whole.ranks == 0 ? 1 : group->whole.member_count;
  for (int i = 0; i < count; i++) {
    const even_ucx_notice notice = news_of(group, group->rank, members[i], last);
    post_news(group, to, &notice);
  }
}

void even_ucx_report(even_ucx_group *group, bool last) {
  if (group->ranks > EVEN_UCX_REPORTING_RANKS) {
    return;
  }
  const even_error kept = *even_error_last();
  for (int rank = 0; rank < group->ranks; rank++) {
    post_own_news(group, rank, last);
  }
  (void)even_error_restore(&kept);
}

/* ---- asking ---- */

void even_ucx_ask(even_ucx_group *group, int peer, bool hosts) {
  even_ucx_notice notice;
  memset(&notice, 0, sizeof notice);
  notice.word = EVEN_UCX_ASKS;
  notice.sender = group->rank;
  notice.hosts = hosts;
  const even_error kept = *even_error_last();
  if (even_ucx_post(group, peer, &notice, WORD_BYTES + sizeof notice.hosts) && group->peers[peer].asked_ns == 0) {
    group->peers[peer].asked_ns = even_clock_ns();
  }
  (void)even_error_restore(&kept);
}

/* What a rank of this group is called in the record. */
static int number_of(const even_ucx_group *group, int rank) {
  return group->whole.ranks == 0 || group->whole.numbers == NULL ? rank : group->whole.numbers[rank];
}

/* Who asks decides for how long a rank may stand still; here it is only seen since when it does. */
static even_ucx_notice neighbour_news(even_ucx_group *group, int rank, uint64_t now_ns) {
  even_ucx_notice notice = news_of(group, rank, number_of(group, rank), false);
  notice.news.gone = even_board_look(&group->board, rank, UINT64_MAX / 2, now_ns) == EVEN_PEER_GONE;
  notice.news.standing_ns = even_board_standing_ns(&group->board, rank, now_ns);
  return notice;
}

void even_ucx_answer(even_ucx_group *group, const even_ucx_notice *notice) {
  const even_error kept = *even_error_last();
  uint64_t now = even_clock_ns();
  for (int rank = 0; notice->hosts != 0 && rank < group->ranks; rank++) {
    if (rank != group->rank && rank != notice->sender && even_board_has(&group->board, rank)) {
      const even_ucx_notice news = neighbour_news(group, rank, now);
      post_news(group, notice->sender, &news);
    }
  }
  post_own_news(group, notice->sender, group->ended);
  (void)even_error_restore(&kept);
}

void even_ucx_take_news(even_ucx_group *group, const even_ucx_notice *notice) {
  const even_ucx_news *news = &notice->news;
  const even_board *board = group->whole.ranks == 0 ? &group->board : group->whole.board;
  if (news->about < 0 || news->about >= group->ranks || news->about == group->rank) {
    return;
  }
  even_ucx_peer *peer = &group->peers[news->about];
  uint64_t now = even_clock_ns();
  if (news->call.rank >= 0 && news->call.rank < board->ranks && !even_board_has(board, news->call.rank)) {
    even_flight_report_keep(&group->flight, &news->call, news->last != 0);
  }
  if (notice->sender == news->about) {
    peer->unwatched = news->unwatched != 0;
    peer->answered_ns = now;
    if (peer->asked_ns != 0 && now - peer->asked_ns > peer->slowest_ns) {
      peer->slowest_ns = now - peer->asked_ns;
    }
    peer->asked_ns = 0;
    peer->reported = peer->reported || news->last != 0;
  } else {
    peer->gone = peer->gone || news->gone != 0;
    peer->standing_ns = news->standing_ns;
    peer->told_ns = now;
  }
}

/* ---- the group has ended ---- */

static bool all_have_reported(const even_ucx_group *group) {
  bool lost = group->end.status == EVEN_ERR_PEER_LOST;
  for (int rank = 0; rank < group->ranks; rank++) {
    const even_ucx_peer *peer = &group->peers[rank];
    if (can_be_told(group, rank) && !peer->reported && !peer->gone && !(lost && peer->number == group->end.rank)) {
      return false;
    }
  }
  return true;
}

void even_ucx_await_reports(even_ucx_group *group) {
  uint64_t began = even_clock_ns();
  uint64_t waited = 0;
  uint32_t polls = 0;
  while (!even_ucx_is_over(group) && group->whole.ranks == 0 && group->ranks <= EVEN_UCX_REPORTING_RANKS &&
         !all_have_reported(group) && waited < REPORTS_NS) {
    even_ucx_rest(group, &polls, REPORTS_NS - waited);
    waited = even_clock_ns() - began;
  }
}
