/* How long a turn of an agent's loop may take, by numbers alone. */
#include "orchestrator/voter_watch.h"

#include "orchestrator/leadership.h"
#include "orchestrator/link.h"
#include "os/socket.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static const uint64_t MS = 1000000u;
static const uint64_t SECOND = 1000000000u;

static void a_turn_that_takes_too_long_counts_until_it_is_over(void **state) {
  even_voter_watch watch = {0};
  const uint64_t begun = 1000 * SECOND;
  (void)state;
  even_socket_silence_set(EVEN_SOCKET_SILENCE_MS);
  even_link_leaders_change(true);
  assert_false(even_voter_watch_stands(&watch, 0, begun)); /* none has begun */
  even_voter_watch_note(&watch, begun);
  assert_false(even_voter_watch_stands(&watch, 0, begun - 1)); /* looked at by a thread that was late */
  assert_false(even_voter_watch_stands(&watch, 0, begun + 26 * SECOND));
  assert_true(even_voter_watch_stands(&watch, 0, begun + 26 * SECOND + 1));
  even_voter_watch_note(&watch, begun + 20 * SECOND); /* the next one */
  assert_false(even_voter_watch_stands(&watch, 0, begun + 40 * SECOND));
  assert_true(even_voter_watch_stands(&watch, 0, begun + 47 * SECOND));
  even_voter_watch_note(&watch, 0);
  assert_false(even_voter_watch_stands(&watch, 0, begun + 3600 * SECOND));
}

/* The others' agents must find the next leader before they give this one up. */
static void another_one_can_lead_before_the_agent_is_given_up(void **state) {
  static const struct {
    int silence_ms;
    uint64_t limit_seconds;
  } cases[] = {{2000, 13}, {4000, 26}, {10000, 20}, {20000, 40}, {60000, 120}};
  (void)state;
  even_link_leaders_change(true);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_voter_watch watch = {0};
    even_socket_silence_set(cases[i].silence_ms);
    const even_leadership_times times = even_leadership_times_of(cases[i].silence_ms);
    const uint64_t limit = cases[i].limit_seconds * SECOND;
    even_voter_watch_note(&watch, SECOND);
    assert_false(even_voter_watch_stands(&watch, 0, SECOND + limit));
    assert_true(even_voter_watch_stands(&watch, 0, SECOND + limit + 1));
    assert_true(limit + times.gone_ns + 2 * times.election_ns <= even_link_silence_ns());
  }
  even_link_leaders_change(false); /* 60 s then, and nobody else could lead */
  even_voter_watch watch = {0};
  even_voter_watch_note(&watch, SECOND);
  assert_false(even_voter_watch_stands(&watch, 0, 121 * SECOND));
  assert_true(even_voter_watch_stands(&watch, 0, 122 * SECOND));
}

/* So long apart that who rests second has heard of the first; and no one sooner than a turn may take. */
static void of_those_that_stand_at_once_one_after_the_other_rests(void **state) {
  static const struct {
    int silence_ms;
    uint64_t apart_ms;
  } cases[] = {{2000, 250}, {4000, 250}, {10000, 625}, {60000, 3750}};
  (void)state;
  even_link_leaders_change(true);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_voter_watch watch = {0};
    even_socket_silence_set(cases[i].silence_ms);
    even_voter_watch_note(&watch, SECOND);
    uint64_t last = SECOND;
    while (!even_voter_watch_stands(&watch, 0, last)) {
      last += MS;
    }
    for (unsigned after = 1; after <= 4; after++) {
      uint64_t due = last - after * cases[i].apart_ms * MS;
      assert_true(even_voter_watch_stands(&watch, after, due));
      assert_false(even_voter_watch_stands(&watch, after, due - MS));
      assert_true(due - SECOND > (uint64_t)cases[i].silence_ms * MS);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_turn_that_takes_too_long_counts_until_it_is_over),
      cmocka_unit_test(another_one_can_lead_before_the_agent_is_given_up),
      cmocka_unit_test(of_those_that_stand_at_once_one_after_the_other_rests),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
