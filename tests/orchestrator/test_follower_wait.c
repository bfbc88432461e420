/* How long ranks wait for the next agent of a leader whose agent was killed: by what this host's member of the voters'
 * group hears. The ranks are numbers. */
#include "orchestrator/follower_agent.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/socket.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const uint64_t LIMIT_NS = 120000000000u;
static const uint64_t SECOND = 1000000000u;

/* This host's member is the first of so many, of whom nobody else is there. */
static even_voter *open_voter(size_t count) {
  even_voter_member members[3];
  even_voter *voter = NULL;
  even_voter_params params = {.size = sizeof params, .self = 1, .members = members, .count = count, .first = 1};
  for (size_t i = 0; i < count; i++) {
    int port = 0;
    int listener = -1;
    assert_int_equal(even_listener_open("127.0.0.1", &port, &listener), EVEN_OK);
    members[i].id = i + 1;
    (void)snprintf(members[i].address, sizeof members[i].address, "127.0.0.1:%d", port);
    if (i == 0) {
      params.listener = listener;
    } else {
      even_listener_close(listener);
    }
  }
  assert_int_equal(even_voter_open(&params, &voter), EVEN_OK);
  return voter;
}

static even_follower *waiting(even_voter *voter) {
  static even_follower follower;
  follower = (even_follower){.link = {.fd = -1},
                             .candidate = {.voter = voter, .listener = -1},
                             .start = {.outlast_seconds = 60},
                             .running = true,
                             .telemetry_fd = -1};
  follower.job = (even_job){.params = &follower.params, .follower = &follower, .alive = 2, .stage = EVEN_JOB_RUNS};
  assert_int_equal(even_follower_wait(&follower), EVEN_OK); /* it begins to */
  assert_true(follower.held);
  assert_false(follower.waited);
  return &follower;
}

static bool waits_on(even_follower *follower, uint64_t seconds) {
  follower->heard_ns -= seconds * SECOND;
  assert_int_equal(even_follower_wait(follower), EVEN_OK);
  assert_true(follower->waited == follower->gone);
  return !follower->waited;
}

/* Its ranks are ended before the others, who wait for the leader for 10 s, may begin anew. */
static void who_hears_no_majority_waits_for_as_long_as_the_others(void **state) {
  (void)state;
  even_voter *voter = open_voter(3);
  even_follower *follower = waiting(voter);
  assert_true(waits_on(follower, 8));
  assert_false(waits_on(follower, 3));
  assert_int_equal(follower->wait_until_ns, 0);
  even_voter_close(voter, true);
}

static void who_hears_one_would_hear_of_another_leader(void **state) {
  (void)state;
  const uint64_t until = even_clock_ns() + LIMIT_NS;
  even_voter *voter = open_voter(1);
  even_voter_view view = {.quorum = false};
  while (!view.quorum) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
    even_voter_look(voter, &view);
  }
  even_follower *follower = waiting(voter);
  assert_true(waits_on(follower, 3600));
  assert_true(even_clock_ns() - follower->heard_ns < 3600 * SECOND);
  even_voter_close(voter, true);
}

static void where_nobody_votes_there_is_nothing_to_be_heard(void **state) {
  (void)state;
  assert_true(waits_on(waiting(NULL), 3600));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(who_hears_no_majority_waits_for_as_long_as_the_others),
      cmocka_unit_test(who_hears_one_would_hear_of_another_leader),
      cmocka_unit_test(where_nobody_votes_there_is_nothing_to_be_heard),
  };
  even_socket_silence_set(EVEN_SOCKET_SILENCE_MS);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
