/* Members of a job whose agents stand at once, as where the file server hangs that all of them use: one after the other
 * rests, as long as those that are heard can elect one of them. Their clock of leases stands, but where a test moves
 * it: how late a thread looks at it changes nothing. */
#include "orchestrator/voter.h"

#include "orchestrator/link.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/signals.h"
#include "os/socket.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

enum { COUNT = 3 };

/* Far beyond what any of it takes: a machine may be slow. */
static const uint64_t LIMIT_NS = 120000000000u;
static const uint64_t SECOND_NS = 1000000000u;
static const uint64_t HOUR_NS = 3600000000000u;
#define KEY "a key that all of them have....."

/* ---- a clock that stands ---- */

static _Atomic uint64_t boot_ns; /* 0: it goes on */

static int clock_that_may_stand(clockid_t clock, struct timespec *out) {
  int result = even_os_real.clock_gettime(clock, out);
  uint64_t now_ns = atomic_load(&boot_ns);
  if (clock == CLOCK_BOOTTIME && now_ns != 0) {
    out->tv_sec = (time_t)(now_ns / SECOND_NS);
    out->tv_nsec = (long)(now_ns % SECOND_NS);
  }
  return result;
}

/* ---- the members ---- */

typedef struct group {
  even_voter_member members[COUNT];
  even_voter *voters[COUNT];
} group;

static even_voter_view look(const group *all, size_t i) {
  even_voter_view view;
  even_voter_look(all->voters[i], &view);
  return view;
}

static void await(bool (*done)(const group *), const group *all) {
  const uint64_t until = even_clock_ns() + LIMIT_NS;
  while (!done(all)) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
  }
}

static bool first_leads(const group *all) {
  bool known = true;
  for (size_t i = 0; i < COUNT; i++) {
    known = known && look(all, i).newest.generation == 1;
  }
  return known && look(all, 0).acts && look(all, 0).settled;
}

static int open_group(void **state) {
  static group all;
  int listeners[COUNT];
  all = (group){.voters = {NULL}};
  *state = &all;
  even_link_leaders_change(true);
  atomic_store(&boot_ns, 0);
  even_os.clock_gettime = clock_that_may_stand;
  for (size_t i = 0; i < COUNT; i++) {
    int port = 0;
    assert_int_equal(even_listener_open("127.0.0.1", &port, &listeners[i]), EVEN_OK);
    all.members[i].id = i + 1;
    (void)snprintf(all.members[i].address, sizeof all.members[i].address, "127.0.0.1:%d", port);
  }
  for (size_t i = 0; i < COUNT; i++) {
    const even_voter_params params = {.size = sizeof params,
                                      .key = KEY,
                                      .self = all.members[i].id,
                                      .listener = listeners[i],
                                      .members = all.members,
                                      .count = COUNT,
                                      .first = 1};
    assert_int_equal(even_voter_open(&params, &all.voters[i]), EVEN_OK);
  }
  assert_int_equal(even_voter_want(all.voters[0], all.members, COUNT), EVEN_OK);
  await(first_leads, &all);
  return 0;
}

static int close_group(void **state) {
  group *all = *state;
  for (size_t i = 0; i < COUNT; i++) {
    even_voter_close(all->voters[i], false);
  }
  even_os.clock_gettime = even_os_real.clock_gettime;
  return 0;
}

/* The agents named stand from now on. */
static uint64_t stand(const group *all, size_t first, size_t last) {
  const uint64_t begun_ns = even_clock_boot_ns();
  atomic_store(&boot_ns, begun_ns);
  for (size_t i = first; i <= last; i++) {
    even_voter_turns(all->voters[i], true);
  }
  return begun_ns;
}

/* Of the usual silence: 26 s, and a quarter second less for each that rests later (test_voter_watch.c). */
static void let_pass(uint64_t begun_ns, unsigned after) {
  atomic_store(&boot_ns, begun_ns + 26 * SECOND_NS - after * SECOND_NS / 4 + 1);
}

/* The one that rests; both others have seen that it hears nobody. */
static bool is_missed(const group *all, size_t rests) {
  bool missed = true;
  for (size_t i = 0; i < COUNT; i++) {
    const even_voter_view view = look(all, i);
    missed = missed && (i == rests || (view.missing_ns != 0 && !view.missing_closed));
  }
  return missed && strcmp(look(all, 0).missing, all->members[rests].address) == 0;
}

static bool second_is_missed(const group *all) {
  return is_missed(all, 1);
}

static bool third_is_missed(const group *all) {
  return is_missed(all, 2);
}

static bool misses_none(const group *all) {
  return look(all, 0).missing_ns == 0 && first_leads(all);
}

/* What it asked later is answered. */
static void await_lease(const group *all, size_t i) {
  const uint64_t until = even_clock_ns() + LIMIT_NS;
  const uint64_t asked_ns = atomic_fetch_add(&boot_ns, SECOND_NS) + SECOND_NS;
  while (look(all, i).answered_ns < asked_ns) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
  }
}

/* The second rests as soon as it may, and by then neither of the others; when their turns have lasted as long it is not
 * heard any more, and there is nobody who could elect another leader. */
static void the_leader_leads_on_and_one_alone_rests(void **state) {
  const group *all = *state;
  const uint64_t begun_ns = stand(all, 0, COUNT - 1);
  let_pass(begun_ns, 2);
  await(second_is_missed, all);
  atomic_store(&boot_ns, begun_ns + HOUR_NS);
  await_lease(all, 0); /* by the third, which votes still */
  assert_int_equal(look(all, 2).newest.generation, 1);
  assert_true(second_is_missed(all));
  for (size_t i = 0; i < COUNT; i++) {
    even_voter_turns(all->voters[i], false);
  }
  await(misses_none, all); /* those that stood take part again */
}

/* In the order of the log, whichever of them it is. */
static void of_two_that_stand_the_one_that_does_not_lead_rests(void **state) {
  const group *all = *state;
  const uint64_t begun_ns = stand(all, 0, 0);
  even_voter_turns(all->voters[2], true); /* at once: the clock stands */
  let_pass(begun_ns, 1);
  await(third_is_missed, all);
  atomic_store(&boot_ns, begun_ns + HOUR_NS);
  await_lease(all, 0);
  assert_int_equal(look(all, 1).newest.generation, 1);
}

int main(void) {
  struct sigaction before;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(the_leader_leads_on_and_one_alone_rests, open_group, close_group),
      cmocka_unit_test_setup_teardown(of_two_that_stand_the_one_that_does_not_lead_rests, open_group, close_group),
  };
  if (even_signals_pipe_ignore(&before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
