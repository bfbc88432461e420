/* Waits over the network that are one another's cause. Who has waited for a while asks those for whom it waits what
 * they wait in themselves, in the group in which it does. Their answers say up to where they have come in that group:
 * whoever has sent what is waited for, wherever it is on its way, is not taken for one that has not. What they know of
 * others comes with them. With the group's lock held. */
#include "comm/ucx/messages.h"

#include "base/fail.h"

#include <stdio.h>
#include <string.h>

/* The ranks of larger groups ask less often, so that those who answer can. */
#define ASKING_RANKS 32u
/* Who has not answered is not asked again, but after so long: for want of memory an answer may not have been sent. */
#define LOST_NS ((uint64_t)10000 * 1000000u)
#define WORD_BYTES offsetof(even_ucx_notice, waits)

/* ---- asking and answering ---- */

static void ask(even_ucx_group *group, int peer, uint64_t now_ns) {
  even_ucx_notice notice;
  uint64_t *asked_ns = &group->peers[peer].waits_asked_ns;
  if (*asked_ns != 0 && now_ns < *asked_ns + LOST_NS) {
    return;
  }
  *asked_ns = now_ns;
  memset(&notice, 0, sizeof notice);
  notice.word = EVEN_UCX_ASKS_WAITS;
  notice.sender = group->rank;
  notice.process = even_waits_process();
  const even_error kept = *even_error_last();
  (void)even_ucx_post(group, peer, &notice, WORD_BYTES + sizeof notice.process);
  (void)even_error_restore(&kept);
}

/* Nothing begins in this group meanwhile: what is said of this process, and up to where it has come here, holds of one
 * moment. */
void even_ucx_answer_waits(even_ucx_group *group, const even_ucx_notice *question) {
  even_far_waits known[EVEN_FAR_WAITS];
  const even_error kept = *even_error_last();
  size_t count = even_waits_answer(group->peers[question->sender].waits_turn++, known);
  group->peers[question->sender].waits.process = question->process;
  for (size_t i = 0; i < count; i++) {
    even_ucx_notice notice;
    memset(&notice, 0, sizeof notice);
    notice.word = EVEN_UCX_WAITS;
    notice.sender = group->rank;
    notice.waits.own = i == 0;
    notice.waits.answer = (even_circle_answer){.process = known[0].process,
                                               .change = known[0].change,
                                               .calls = group->met,
                                               .steps = group->steps,
                                               .sent = group->peers[question->sender].sent};
    notice.waits.of = known[i];
    bool whole = known[i].change != 0;
    (void)even_ucx_post(group, question->sender, &notice,
                        WORD_BYTES + (whole ? sizeof notice.waits : offsetof(even_ucx_waits, of.waited_ns)));
  }
  (void)even_error_restore(&kept);
}

void even_ucx_take_waits(even_ucx_group *group, const even_ucx_notice *notice) {
  const even_ucx_waits *waits = &notice->waits;
  if (waits->own != 0) {
    group->peers[notice->sender].waits = waits->answer;
    group->peers[notice->sender].waits_asked_ns = 0;
  }
  if (waits->of.change != 0) {
    even_waits_hear(&waits->of);
  }
}

void even_ucx_take_crossed(const even_ucx_notice *notice) {
  even_circle_found found = {.members = notice->crossed.members};
  even_ucx_end_words_read(&notice->crossed.words, &found.why);
  even_waits_hear_found(&found);
}

/* ---- a circle ---- */

void even_ucx_pass_on(even_ucx_group *group) {
  even_circle_found found;
  even_ucx_notice notice;
  uint64_t number = even_waits_found(group->passed, &found);
  if (number == group->passed) {
    return;
  }
  group->passed = number;
  const even_error kept = *even_error_last();
  memset(&notice, 0, sizeof notice);
  notice.word = EVEN_UCX_CROSSED;
  notice.sender = group->rank;
  notice.crossed.members = found.members;
  even_ucx_end_words_write(&notice.crossed.words, &found.why);
  for (int rank = 0; rank < group->ranks; rank++) {
    uint64_t change = 0;
    uint64_t process = group->peers[rank].waits.process;
    if (rank != group->rank && process != 0 && even_circle_has(&found.members, process, &change)) {
      (void)even_ucx_post(group, rank, &notice, WORD_BYTES + sizeof notice.crossed);
    }
  }
  (void)even_error_restore(&kept);
}

/* ---- telling ---- */

static bool is_due(const even_ucx_group *group, const even_ucx_waiting *waiting, uint64_t now_ns) {
  unsigned ranks = (unsigned)group->ranks;
  uint64_t pause = ranks > ASKING_RANKS ? EVEN_WAITS_TOLD_NS * ranks / ASKING_RANKS : EVEN_WAITS_TOLD_NS;
  return now_ns - waiting->asked_ns >= pause;
}

/* `lacks`: it has not sent what is waited for, by what it last said. */
static void need(const even_ucx_group *group, even_wait_words *words, int peer, bool lacks) {
  const even_circle_answer *said = &group->peers[peer].waits;
  even_circle_need(&words->needs, lacks ? said->process : 0, lacks ? said->change : 0);
}

/* Of whom the rank waits for (`group->waits`) as many as are told of, the next ones another time. Of one that waits for
 * any of more than that nothing can be told. */
static void ask_some(even_ucx_group *group, even_ucx_waiting *waiting, bool any, uint64_t now_ns) {
  int late = 0;
  int asked = 0;
  int from = waiting->ask_from < group->ranks ? waiting->ask_from : 0;
  for (int rank = 0; rank < group->ranks; rank++) {
    late += group->waits[rank];
  }
  if (!is_due(group, waiting, now_ns) || (any && late > EVEN_WAITS_WHOM)) {
    return;
  }
  waiting->asked_ns = now_ns;
  for (int i = 0; i < group->ranks && asked < EVEN_WAITS_WHOM; i++) {
    int rank = (from + i) % group->ranks;
    if (group->waits[rank]) {
      ask(group, rank, now_ns);
      asked++;
      waiting->ask_from = rank + 1;
    }
  }
}

/* The lock is let go meanwhile. */
static void tell(even_ucx_group *group, even_ucx_waiting *waiting, even_wait_words *words, const void *message,
                 int late) {
  even_circle_found found;
  (void)pthread_mutex_unlock(&group->lock);
  bool is = even_waits_in_network((even_comm *)(void *)group, &waiting->of, words, message, &found);
  (void)pthread_mutex_lock(&group->lock);
  if (is && !group->ended) {
    found.why.rank = late < 0 ? -1 : group->peers[late].number;
    (void)even_error_restore(&found.why);
    even_ucx_end(group);
  }
}

bool even_ucx_tell_nothing(even_ucx_group *group) {
  bool found = even_waits_end(&group->call_waiting.of);
  if (group->rests) {
    group->rests = false;
    even_waits_go_on();
  }
  return found;
}

void even_ucx_tell_rest(even_ucx_group *group, const _Atomic uint32_t *word, uint32_t seen) {
  (void)even_waits_end(&group->call_waiting.of);
  group->rests = true;
  even_waits_rest(word, seen);
}

/* In the call under way, for what comes from others by these transfers; `step` -1: the word that they have come. */
static void tell_call(even_ucx_group *group, const even_ucx_transfer *transfers, size_t count, int64_t step,
                      uint64_t now_ns) {
  even_ucx_waiting *waiting = &group->call_waiting;
  even_wait_words words = {.since_ns = group->waits_since, .seen_ns = now_ns};
  int late = -1;
  if (group->rests) {
    (void)even_ucx_tell_nothing(group);
  }
  if (group->ended || !even_waits_is_told(&waiting->of, group->waits_since, now_ns)) {
    return;
  }
  memset(group->waits, 0, (size_t)group->ranks * sizeof *group->waits);
  for (size_t i = 0; i < count; i++) {
    int peer = transfers[i].peer;
    if (transfers[i].request == NULL || group->waits[peer]) {
      continue; /* done, or of one that has been counted */
    }
    const even_circle_answer *said = &group->peers[peer].waits;
    group->waits[peer] = true;
    late = late < 0 ? peer : late;
    need(group, &words, peer,
         step < 0 ? even_circle_lacks_call(said, group->call_count)
                  : even_circle_lacks_step(said, group->call_count, (uint64_t)step));
  }
  ask_some(group, waiting, false, now_ns);
  if (late < 0) { /* all of it has come: what this rank sent is on its way */
    (void)even_waits_end(&waiting->of);
    return;
  }
  even_call_describe(group->whole.call != NULL ? group->whole.call : &group->call, words.doing, sizeof words.doing);
  tell(group, waiting, &words, NULL, late);
}

void even_ucx_tell_meeting(even_ucx_group *group, const even_ucx_transfer *receives, uint64_t now_ns) {
  tell_call(group, receives, (size_t)group->ranks - 1, -1, now_ns);
}

void even_ucx_tell_step(even_ucx_group *group, const even_ucx_transfer *transfers, size_t count, uint64_t step,
                        uint64_t now_ns) {
  tell_call(group, transfers, count, (int64_t)step, now_ns);
}

void even_ucx_tell_receive(even_ucx_group *group, even_ucx_request *request, even_ucx_waiting *waiting,
                           const char *doing, uint64_t since_ns, uint64_t now_ns) {
  bool any = request->peer == EVEN_COMM_ANY_RANK;
  even_wait_words words = {.since_ns = since_ns, .seen_ns = now_ns, .message = 1, .needs.any = any};
  if (request->sends || request->matched || request->done) { /* it goes on by itself, or its receiver decides */
    (void)even_waits_end(&waiting->of);
    return;
  }
  if (group->ended || !even_waits_is_told(&waiting->of, since_ns, now_ns)) {
    return;
  }
  for (int rank = 0; rank < group->ranks; rank++) {
    const even_ucx_peer *peer = &group->peers[rank];
    group->waits[rank] = rank == request->peer || (any && rank != group->rank && !peer->left);
    if (group->waits[rank]) {
      need(group, &words, rank, even_circle_lacks_message(&peer->waits, peer->heard));
    }
  }
  ask_some(group, waiting, any, now_ns);
  (void)snprintf(words.doing, sizeof words.doing, "%s", doing);
  tell(group, waiting, &words, request, any ? -1 : request->peer);
}
