/* Members of a job with real connections over loopback: who leads, who succeeds, who may act. */
#include "orchestrator/voter.h"

#include "base/json_reader.h"
#include "orchestrator/link.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/signals.h"
#include "os/socket.h"
#include "support/clock_ahead.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { MOST = 7 };

/* Far beyond what any of it takes: a machine may be slow. */
static const uint64_t LIMIT_NS = 120000000000u;
#define KEY "a key that all of them have....."

typedef struct cluster {
  char folder[40]; /* "": they keep their logs in memory */
  even_voter_member members[MOST];
  int listeners[MOST];
  even_voter *voters[MOST]; /* NULL: it is dead, or has not begun */
  int silence_ms;           /* 0: the usual */
  size_t count;
} cluster;

static void name_member(cluster *all, size_t i, uint64_t id) {
  int port = 0;
  assert_int_equal(even_listener_open("127.0.0.1", &port, &all->listeners[i]), EVEN_OK);
  all->members[i].id = id;
  (void)snprintf(all->members[i].address, sizeof all->members[i].address, "127.0.0.1:%d", port);
}

typedef enum beginning { FIRST, WAITS, JOINS, RETURNS } beginning;

static void begin(cluster *all, size_t i, size_t known, beginning how) {
  even_voter_params params = {.size = sizeof params,
                              .key = KEY,
                              .self = all->members[i].id,
                              .listener = all->listeners[i],
                              .members = all->members,
                              .count = known,
                              .first = 1,
                              .joins = how == JOINS,
                              .waits = how == WAITS,
                              .returns = how == RETURNS,
                              .folder = all->folder[0] == '\0' ? NULL : all->folder,
                              .silence_ms = all->silence_ms};
  assert_int_equal(even_voter_open(&params, &all->voters[i]), EVEN_OK);
}

static void open_some(cluster *all, size_t count) {
  all->count = count;
  for (size_t i = 0; i < count; i++) {
    name_member(all, i, i + 1);
  }
  for (size_t i = 0; i < count; i++) {
    begin(all, i, count, FIRST);
  }
}

static void open_group(cluster *all, size_t count) {
  memset(all, 0, sizeof *all);
  open_some(all, count);
}

static void end(cluster *all, size_t i) {
  even_voter_close(all->voters[i], false);
  all->voters[i] = NULL;
}

static void close_group(cluster *all) {
  for (size_t i = 0; i < all->count; i++) {
    end(all, i);
  }
}

static even_voter_view look(const cluster *all, size_t i) {
  even_voter_view view;
  even_voter_look(all->voters[i], &view);
  return view;
}

/* Waits until all that live know of `generation` or a newer one and that generation's leader acts: its place. */
static size_t await_leader(const cluster *all, uint64_t generation) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  while (even_clock_ns() < until) {
    size_t leader = MOST;
    size_t acting = 0;
    bool known = true;
    for (size_t i = 0; i < all->count; i++) {
      if (all->voters[i] != NULL) {
        even_voter_view view = look(all, i);
        known = known && view.newest.generation >= generation;
        if (view.acts) {
          acting++;
          leader = i;
        }
      }
    }
    if (known && acting == 1) {
      return leader;
    }
    even_clock_sleep_ns(5000000);
  }
  for (size_t i = 0; i < all->count; i++) {
    const even_voter_view view = all->voters[i] == NULL ? (even_voter_view){.port = 0} : look(all, i);
    print_error("member %zu: generation %llu, acts %d, quorum %d, voters %u\n", i + 1,
                (unsigned long long)view.newest.generation, view.acts, view.quorum, view.voters);
  }
  fail_msg("nobody leads generation %llu", (unsigned long long)generation);
  return MOST;
}

static void await_voters(const cluster *all, size_t i, unsigned voters) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  while (look(all, i).voters != voters) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
  }
}

/* ---- one that would join ---- */

typedef struct guest {
  bool answered;
  bool over;
  char address[64];
  json_int_t port;
} guest;

static void greet(void *context, even_link *link) {
  (void)context;
  assert_int_equal(even_link_send(link, EVEN_MESSAGE_GREET, "{\"joins\":true}", NULL, 0), EVEN_OK);
}

static even_status hear(void *context, even_link *link, const even_message *message) {
  guest *own = context;
  json_t *content = NULL;
  (void)link;
  if (message->kind != EVEN_MESSAGE_LEADER) {
    assert_int_equal(message->kind, EVEN_MESSAGE_MEMBER);
    return EVEN_OK;
  }
  assert_int_equal(even_json_parse("who leads", message->json, message->json_bytes, &content), EVEN_OK);
  (void)snprintf(own->address, sizeof own->address, "%s", even_json_text(content, "address"));
  own->port = json_integer_value(json_object_get(content, "port"));
  assert_int_equal(json_integer_value(json_object_get(content, "silence_ms")), even_socket_silence());
  own->answered = true;
  json_decref(content);
  return EVEN_OK;
}

/* A member hangs up where the greeting does not come in time, by a machine that is slow. */
static void hear_end(void *context, even_link *link) {
  (void)link;
  ((guest *)context)->over = true;
}

static void ask_once(int port, guest *own) {
  const even_link_calls calls = {.context = own, .ready = greet, .message = hear, .ended = hear_end};
  even_loop loop = {.fd = -1};
  even_link link = {.fd = -1};
  int fd = -1;
  *own = (guest){.over = false};
  assert_int_equal(even_loop_open(&loop), EVEN_OK);
  assert_int_equal(even_socket_connect("127.0.0.1", port, 60000, &fd), EVEN_OK);
  assert_int_equal(even_link_open(&link, &loop, fd, false, (const unsigned char *)KEY, &calls), EVEN_OK);
  while (!own->answered && !own->over) {
    assert_int_equal(even_loop_turn(&loop, 20), EVEN_OK);
    even_link_tick(&link, false);
  }
  even_link_close(&link);
  even_loop_close(&loop);
}

/* Asks a member where the leader is. */
static guest ask(const cluster *all, size_t i) {
  guest own = {.answered = false};
  uint64_t until = even_clock_ns() + LIMIT_NS;
  while (!own.answered) {
    assert_true(even_clock_ns() < until);
    ask_once((int)strtol(strrchr(all->members[i].address, ':') + 1, NULL, 10), &own);
  }
  return own;
}

static void await_answered(const cluster *all, size_t i, uint64_t since_ns) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  while (look(all, i).answered_ns <= since_ns) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
  }
}

static void the_first_leads_and_another_succeeds_it(void **state) {
  cluster all;
  (void)state;
  open_group(&all, 3);
  assert_int_equal(await_leader(&all, 1), 0);
  assert_int_equal(look(&all, 2).newest.generation, 1);
  assert_int_equal(look(&all, 2).newest.leader, 1);
  assert_int_equal(look(&all, 2).voters, 3);
  assert_string_equal(ask(&all, 2).address, ""); /* it has not said where it takes hosts */
  uint64_t killed = even_clock_ns();
  end(&all, 0);
  size_t next = await_leader(&all, 2);
  print_message("another one leads after %.1f s\n", (double)(even_clock_ns() - killed) * 1e-9);
  assert_int_equal(look(&all, 3 - next).newest.leader, all.members[next].id);
  assert_string_equal(look(&all, 3 - next).address, "127.0.0.1");
  even_voter_announce(all.voters[next], 4711);
  uint64_t until = even_clock_ns() + LIMIT_NS;
  while (look(&all, 3 - next).port != 4711) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
  }
  assert_int_equal(ask(&all, 3 - next).port, 4711);
  assert_string_equal(ask(&all, next).address, "127.0.0.1");
  /* of two, one alone votes: the other's end costs nothing */
  const even_voter_member left[] = {all.members[1], all.members[2]};
  assert_int_equal(even_voter_want(all.voters[next], left, 2), EVEN_OK);
  await_voters(&all, next, 1);
  end(&all, 3 - next);
  await_answered(&all, next, even_clock_boot_ns());
  assert_int_equal(look(&all, next).newest.generation, 2);
  close_group(&all);
}

/* Whoever is elected by the others gives the log on until it comes to one that can lead. */
static void one_that_cannot_lead_yet_does_not(void **state) {
  cluster all;
  (void)state;
  memset(&all, 0, sizeof all);
  all.count = 5;
  for (size_t i = 0; i < 5; i++) {
    name_member(&all, i, i + 1);
  }
  for (size_t i = 0; i < 5; i++) {
    begin(&all, i, 5, i == 0 ? FIRST : WAITS);
  }
  assert_int_equal(await_leader(&all, 1), 0);
  even_voter_lead(all.voters[4]);
  end(&all, 0);
  assert_int_equal(await_leader(&all, 2), 4);
  close_group(&all);
}

static void await_not_acting(const cluster *all, size_t i) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  while (look(all, i).acts) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
  }
}

static void one_that_comes_later_votes_too(void **state) {
  cluster all;
  (void)state;
  open_group(&all, 3);
  assert_int_equal(await_leader(&all, 1), 0);
  end(&all, 2);
  name_member(&all, 3, 77);
  all.count = 4;
  const even_voter_member now[] = {all.members[0], all.members[1], all.members[3]};
  begin(&all, 3, 4, JOINS);
  assert_int_equal(even_voter_want(all.voters[0], now, 3), EVEN_OK);
  await_voters(&all, 3, 3);
  assert_int_equal(await_leader(&all, 1), 0);
  end(&all, 0);
  size_t next = await_leader(&all, 2);
  assert_true(next == 1 || next == 3);
  close_group(&all);
}

/* However long hosts may be silent, another one leads; a leader acts, and another one waits, for as long as that says.
 */
static void with_any_silence_another_one_succeeds(void **state) {
  static const int silences_ms[] = {EVEN_SOCKET_SHORTEST_SILENCE_MS, 6000};
  (void)state;
  for (size_t i = 0; i < sizeof silences_ms / sizeof silences_ms[0]; i++) {
    cluster all;
    const even_leadership_times times = even_leadership_times_of(silences_ms[i]);
    memset(&all, 0, sizeof all);
    all.silence_ms = silences_ms[i];
    uint64_t opened = even_clock_boot_ns();
    open_some(&all, 3);
    assert_int_equal(await_leader(&all, 1), 0);
    even_voter_view first = look(&all, 0);
    assert_true(!first.acts || first.acts_until_ns == first.answered_ns + times.lease_ns);
    end(&all, 0);
    size_t next = await_leader(&all, 2);
    uint64_t starts = look(&all, next).starts_ns; /* it came to lead the log in this time */
    assert_true(starts >= opened + times.wait_ns && starts <= even_clock_boot_ns() + times.wait_ns);
    close_group(&all);
  }
}

/* The clocks of all three go on alike, and no connection breaks: the leader leads on, once it was answered anew. */
static void who_slept_does_not_act_by_what_was_answered_before(void **state) {
  const uint64_t hour_ns = 3600000000000u;
  cluster all;
  (void)state;
  assert_true(clock_slept_begin());
  open_group(&all, 3);
  for (int sleeps = 0; sleeps < 3; sleeps++) {
    assert_int_equal(await_leader(&all, 1), 0);
    uint64_t asleep = even_clock_boot_ns() + hour_ns / 2;
    clock_slept_add(hour_ns);
    even_voter_view view = look(&all, 0);
    assert_true(!view.acts || view.answered_ns > asleep);
  }
  assert_int_equal(await_leader(&all, 1), 0);
  assert_int_equal(look(&all, 0).newest.generation, 1);
  close_group(&all);
  clock_slept_end();
}

/* One that is missed, and has not just ended. */
static void await_missing(const cluster *all, size_t i, bool any) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  even_voter_view view = look(all, i);
  while ((view.missing_ns != 0 && !view.missing_closed) != any) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
    view = look(all, i);
  }
}

/* Whoever leads is to keep one other member; on a slow machine another one may come to lead before it has. */
static size_t leave_two(const cluster *all) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  size_t leader = await_leader(all, 2);
  while (look(all, leader).voters != 1) {
    const even_voter_member left[] = {all->members[leader], all->members[(leader + 1) % 3]};
    assert_int_equal(even_voter_want(all->voters[leader], left, 2), EVEN_OK);
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
    leader = await_leader(all, 2);
  }
  return leader;
}

/* Its disk hangs: its thread lives, and so do its connections. The hour passes for all three alike. */
static void one_whose_agent_stands_leads_no_more(void **state) {
  const uint64_t hour_ns = 3600000000000u;
  cluster all;
  (void)state;
  assert_true(clock_slept_begin());
  open_group(&all, 3);
  assert_int_equal(await_leader(&all, 1), 0);
  even_voter_turns(all.voters[0], true);
  even_voter_turns(all.voters[0], false);
  clock_slept_add(hour_ns); /* in no turn: it may start hosts */
  await_answered(&all, 0, even_clock_boot_ns());
  assert_int_equal(await_leader(&all, 1), 0);
  even_voter_turns(all.voters[0], true);
  clock_slept_add(hour_ns);
  even_voter *stands = all.voters[0];
  all.voters[0] = NULL;
  size_t next = await_leader(&all, 2);
  all.voters[0] = stands;
  await_missing(&all, next, true);                      /* as one that stands still, and may come back */
  assert_int_equal(look(&all, 0).newest.generation, 1); /* it takes no part, */
  assert_false(look(&all, 0).acts);
  even_voter_turns(all.voters[0], false);
  assert_int_equal(await_leader(&all, 2), next); /* until that turn is over */
  await_missing(&all, next, false);
  /* of two nobody takes the other one's place: who votes alone leads on */
  next = leave_two(&all);
  uint64_t generation = look(&all, next).newest.generation;
  even_voter_turns(all.voters[next], true);
  clock_slept_add(hour_ns);
  await_answered(&all, next, even_clock_boot_ns());
  assert_int_equal(look(&all, next).newest.generation, generation);
  close_group(&all);
  clock_slept_end();
}

/* As where the file server hangs that all use, and another one rests already: who is left could elect nobody. */
static void one_whose_agent_stands_leads_on_where_no_other_could(void **state) {
  cluster all;
  (void)state;
  assert_true(clock_slept_begin());
  open_group(&all, 3);
  assert_int_equal(await_leader(&all, 1), 0);
  end(&all, 1);
  await_answered(&all, 0, even_clock_boot_ns()); /* what was asked since then: by now its end is known */
  even_voter_turns(all.voters[0], true);
  clock_slept_add(3600000000000u);
  await_answered(&all, 0, even_clock_boot_ns());
  assert_int_equal(look(&all, 0).newest.generation, 1);
  close_group(&all);
  clock_slept_end();
}

static void of_five_two_may_die_one_after_the_other(void **state) {
  cluster all;
  (void)state;
  open_group(&all, 6);
  assert_int_equal(await_leader(&all, 1), 0);
  assert_int_equal(look(&all, 5).voters, 5);
  end(&all, 0);
  size_t second = await_leader(&all, 2);
  assert_true(second < 5); /* the sixth has no vote */
  end(&all, second);
  size_t third = await_leader(&all, 3);
  assert_true(third < 5);
  close_group(&all);
}

/* Where it listens is new, which those that live have to be told. */
static void start_again(cluster *all, size_t i) {
  name_member(all, i, all->members[i].id);
  begin(all, i, all->count, RETURNS);
}

/* Two of three are lost: nobody acts. Both come back: as new members they could not, for one alone can add nobody. */
static void those_that_come_back_are_a_majority_again(void **state) {
  cluster all;
  char path[80];
  (void)state;
  memset(&all, 0, sizeof all);
  (void)snprintf(all.folder, sizeof all.folder, "/tmp/evenstep-voter-XXXXXX");
  assert_non_null(mkdtemp(all.folder));
  open_some(&all, 3);
  assert_int_equal(await_leader(&all, 1), 0);
  end(&all, 1);
  end(&all, 2);
  await_not_acting(&all, 0);
  assert_false(look(&all, 0).quorum);
  start_again(&all, 1);
  start_again(&all, 2);
  for (size_t i = 0; i < 3; i++) {
    assert_int_equal(even_voter_know(all.voters[i], all.members, 3), EVEN_OK);
  }
  assert_int_equal(await_leader(&all, 1), 0);
  assert_int_equal(look(&all, 0).newest.generation, 1);
  /* one that lives is not started beside itself, and one that has kept nothing is none */
  even_voter_params params = {.size = sizeof params,
                              .key = "a key that all of them have.....",
                              .members = all.members,
                              .count = 3,
                              .first = 1,
                              .returns = true,
                              .folder = all.folder};
  for (uint64_t id = 1; id <= 9; id += 8) {
    even_voter *none = NULL;
    int port = 0;
    assert_int_equal(even_listener_open("127.0.0.1", &port, &params.listener), EVEN_OK);
    params.self = id;
    assert_int_equal(even_voter_open(&params, &none), EVEN_ERR_NOT_FOUND);
    assert_null(none);
  }
  (void)snprintf(path, sizeof path, "%s/9", all.folder);
  assert_int_equal(rmdir(path), 0);
  for (size_t i = 0; i < 3; i++) {
    even_voter_close(all.voters[i], true);
  }
  assert_int_equal(rmdir(all.folder), -1); /* it went with the last of them */
}

/* The leader ends the job, and then itself: nobody goes on with it. */
static void after_its_end_nobody_leads_a_job(void **state) {
  cluster all;
  (void)state;
  open_group(&all, 3);
  assert_int_equal(await_leader(&all, 1), 0);
  even_voter_finish(all.voters[0]);
  for (size_t i = 0; i < 3; i++) {
    uint64_t until = even_clock_ns() + LIMIT_NS;
    while (look(&all, i).newest.leader != EVEN_LEADERSHIP_NOBODY) {
      assert_true(even_clock_ns() < until);
      even_clock_sleep_ns(5000000);
    }
    assert_int_equal(look(&all, i).newest.generation, 2);
  }
  end(&all, 0);
  even_clock_sleep_ns(even_leadership_times_of(EVEN_SOCKET_SILENCE_MS).gone_ns +
                      1500000000u); /* the claim is that nothing changes */
  for (size_t i = 1; i < 3; i++) {
    assert_int_equal(look(&all, i).newest.generation, 2);
    assert_false(look(&all, i).acts);
    assert_true(look(&all, i).deserted_ns == 0);
  }
  end(&all, 1);
  for (uint64_t until = even_clock_ns() + LIMIT_NS; look(&all, 2).deserted_ns == 0; even_clock_sleep_ns(5000000)) {
    assert_true(even_clock_ns() < until);
  }
  close_group(&all);
}

/* The leader gives the job to the first of those that it names, which is not the next in turn, and to nobody else; that
 * one dies in that moment: a third one leads once it can, and not the first again, which ends. */
static void what_was_handed_over_is_not_taken_back(void **state) {
  cluster all;
  const uint64_t nobody = 77;
  const uint64_t heirs[] = {3, 2};
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  memset(&all, 0, sizeof all);
  all.count = 3;
  for (size_t i = 0; i < 3; i++) {
    name_member(&all, i, i + 1);
  }
  for (size_t i = 0; i < 3; i++) {
    begin(&all, i, 3, i == 1 ? WAITS : FIRST);
  }
  assert_int_equal(await_leader(&all, 1), 0);
  assert_int_equal(even_voter_want(all.voters[0], all.members, 3), EVEN_OK);
  while (!look(&all, 0).settled) { /* all are linked */
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(1000000);
  }
  even_voter_hand_over(all.voters[0], &nobody, 1); /* a witness would be named else */
  for (int i = 0; i < 3; i++) {
    await_answered(&all, 0, even_clock_boot_ns());
  }
  assert_int_equal(look(&all, 0).newest.generation, 1);
  even_voter_hand_over(all.voters[0], heirs, 2);
  while (look(&all, 0).newest.generation < 2) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(1000000);
  }
  assert_int_equal(look(&all, 0).newest.leader, 3);
  assert_false(look(&all, 0).acts);
  end(&all, 2);
  even_clock_sleep_ns(even_leadership_times_of(EVEN_SOCKET_SILENCE_MS).gone_ns +
                      2500000000u); /* the claim is that nothing changes */
  assert_int_equal(look(&all, 0).newest.generation, 2);
  even_voter_lead(all.voters[1]);
  assert_int_equal(await_leader(&all, 3), 1);
  assert_int_equal(look(&all, 0).newest.generation, 3);
  close_group(&all);
}

static bool is_called(const cluster *all, size_t i) {
  int fd = -1;
  assert_int_equal(even_socket_accept(all->listeners[i], &fd), EVEN_OK);
  if (fd >= 0) {
    (void)close(fd);
  }
  return fd >= 0;
}

/* Else all of a large job that have lost the voters for a moment were connected with one another from then on. */
static void of_two_without_a_vote_one_calls_the_other_only_where_all_voters_have_ended(void **state) {
  cluster all;
  (void)state;
  memset(&all, 0, sizeof all);
  all.count = MOST;
  all.silence_ms = EVEN_SOCKET_SHORTEST_SILENCE_MS;
  for (size_t i = 0; i < MOST; i++) {
    name_member(&all, i, i + 1);
  }
  begin(&all, 6, MOST, FIRST); /* nobody listens to it, but nobody refuses it */
  even_clock_sleep_ns(even_leadership_times_of(all.silence_ms).gone_ns +
                      1500000000u); /* the claim is that nothing changes */
  assert_true(is_called(&all, 0));
  assert_false(is_called(&all, 5));
  for (size_t i = 0; i < 5; i++) {
    even_listener_close(all.listeners[i]);
  }
  for (uint64_t until = even_clock_ns() + LIMIT_NS; !is_called(&all, 5); even_clock_sleep_ns(5000000)) {
    assert_true(even_clock_ns() < until);
  }
  even_listener_close(all.listeners[5]);
  close_group(&all);
}

int main(void) {
  struct sigaction before;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_first_leads_and_another_succeeds_it),
      cmocka_unit_test(one_that_cannot_lead_yet_does_not),
      cmocka_unit_test(one_that_comes_later_votes_too),
      cmocka_unit_test(with_any_silence_another_one_succeeds),
      cmocka_unit_test(who_slept_does_not_act_by_what_was_answered_before),
      cmocka_unit_test(one_whose_agent_stands_leads_no_more),
      cmocka_unit_test(one_whose_agent_stands_leads_on_where_no_other_could),
      cmocka_unit_test(of_five_two_may_die_one_after_the_other),
      cmocka_unit_test(those_that_come_back_are_a_majority_again),
      cmocka_unit_test(after_its_end_nobody_leads_a_job),
      cmocka_unit_test(what_was_handed_over_is_not_taken_back),
      cmocka_unit_test(of_two_without_a_vote_one_calls_the_other_only_where_all_voters_have_ended),
  };
  if (even_signals_pipe_ignore(&before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
