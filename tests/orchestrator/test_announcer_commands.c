/* Commands that say whether a machine's end is announced: by their exit code and what they print, however they end, or
 * do not. */
#include "announcer_scene.h"
#include "os/calls.h"
#include "support/clock_ahead.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const uint64_t SECOND_NS = 1000000000u;

static void a_command_says_by_its_exit_code(void **state) {
  announcer_scene *at = *state;
  int before = open_descriptors();
  static const char *const none[] = {"exec:exit 1", "exec:exit 22", "exec:echo false"};
  for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
    assert_int_equal(announcer_scene_ask_place(at, none[i]), EVEN_OK);
    announcer_scene_until_ended(at, 4); /* one more than what is told after */
    even_announcer_close(at->announcer);
  }
  assert_int_equal(announcer_scene_ask_place(at, "exec:echo 42"), EVEN_OK);
  assert_true(announcer_scene_is_due(at));
  assert_true(at->seconds <= 42);
  assert_string_equal(at->what, "exec announces the machine's end (exit code 0)");
  even_announcer_close(at->announcer);
  assert_int_equal(announcer_scene_ask_place(at, "exec:true"), EVEN_OK);
  assert_true(announcer_scene_is_due(at));
  assert_true(at->seconds > 76 && at->seconds < 78);
  assert_int_equal(at->tellings, 0);
  even_announcer_close(at->announcer);
  at->announcer = NULL;
  assert_int_equal(open_descriptors(), before);
}

static void a_command_that_cannot_be_run_is_told_once(void **state) {
  announcer_scene *at = *state;
  assert_int_equal(announcer_scene_ask_place(at, "exec:/no/such/program"), EVEN_OK);
  announcer_scene_until_told(at, 1);
  assert_non_null(strstr(at->told,
                         "exec cannot be asked whether this machine ends soon: the command ended with code "
                         "127: "));
  announcer_scene_until_ended(at, 6);
  assert_int_equal(at->tellings, 1);
}

/* A word of its own is no answer: `grep` with a file that is not there. */
static void other_exit_codes_are_told_once(void **state) {
  announcer_scene *at = *state;
  assert_int_equal(announcer_scene_ask_place(at, "exec:echo no such file >&2; exit 2"), EVEN_OK);
  announcer_scene_until_told(at, 1);
  assert_non_null(strstr(at->told, "the command ended with code 2: no such file"));
  announcer_scene_until_ended(at, 6);
  assert_int_equal(at->tellings, 1);
}

/* What stands there is the ranks'. */
static void a_command_has_no_input(void **state) {
  announcer_scene *at = *state;
  int ends[2];
  int before = dup(0);
  assert_int_equal(pipe(ends), 0);
  assert_true(before >= 0 && dup2(ends[0], 0) == 0);
  assert_int_equal(announcer_scene_ask_place(at, "exec:cat"), EVEN_OK);
  bool due = announcer_scene_is_due(at);
  assert_int_equal(dup2(before, 0), 0);
  (void)close(before);
  (void)close(ends[0]);
  (void)close(ends[1]);
  assert_true(due);
}

/* The guardian ends it, and what it has started, where nobody else can. */
static void its_session_is_told_from_its_beginning_to_its_end(void **state) {
  announcer_scene *at = *state;
  assert_int_equal(announcer_scene_ask_place(at, "exec:sleep 600"), EVEN_OK);
  even_announcer_tick(at->announcer);
  assert_true(at->session > 1);
  assert_int_equal(even_announcer_session(at->announcer), at->session);
  even_announcer_close(at->announcer);
  assert_int_equal(at->session, 0);
  assert_int_equal(announcer_scene_ask_place(at, "exec:exit 1"), EVEN_OK);
  for (int i = 0; i < ANNOUNCER_SCENE_TURNS && at->ended == 0; i++) {
    assert_int_equal(even_loop_turn(&at->loop, 1), EVEN_OK);
    if (at->ended == 0 && even_announcer_session(at->announcer) == 0) {
      even_announcer_tick(at->announcer);
    }
    announcer_scene_reap(at);
  }
  assert_int_equal(at->ended, 1);
  assert_int_equal(at->session, 0);
}

static void a_command_that_takes_too_long_is_ended(void **state) {
  announcer_scene *at = *state;
  uint64_t ahead = 0;
  assert_int_equal(announcer_scene_ask_place(at, "exec:sleep 600"), EVEN_OK);
  for (int i = 0; i < ANNOUNCER_SCENE_TURNS && at->tellings == 0; i++) {
    assert_false(announcer_scene_turn(at));
    ahead += SECOND_NS;
    clock_ahead_set(ahead);
  }
  assert_non_null(strstr(at->told, "the command takes too long"));
}

static int kills_nobody(pid_t pid, int number) {
  (void)pid;
  (void)number;
  return 0;
}

/* The kernel may hold it, whatever it is sent: that is told, no second one is started, and nobody waits for it. */
static void a_command_that_does_not_end_is_told_once(void **state) {
  announcer_scene *at = *state;
  uint64_t ahead = 0;
  assert_int_equal(announcer_scene_ask_place(at, "exec:exec sleep 600"), EVEN_OK);
  even_announcer_tick(at->announcer);
  pid_t first = at->session;
  even_os.kill = kills_nobody;
  for (int i = 0; i < ANNOUNCER_SCENE_TURNS && at->tellings == 0; i++) {
    assert_false(announcer_scene_turn(at));
    ahead += SECOND_NS;
    clock_ahead_set(ahead);
  }
  assert_non_null(strstr(at->told, "the command takes too long, and has not ended since it was killed"));
  assert_int_equal(at->session, first);
  even_announcer_close(at->announcer);
  at->announcer = NULL;
  assert_non_null(strstr(at->told, "does not end, and is left|"));
  assert_int_equal(at->session, first); /* the guardian's now */
  even_os.kill = even_os_real.kill;
  assert_int_equal(kill(first, SIGKILL), 0);
  even_process_wait(first);
}

/* Whoever floods us with output has it thrown away, and its answer counts. */
static void a_command_may_say_much(void **state) {
  announcer_scene *at = *state;
  assert_int_equal(announcer_scene_ask_place(at, "exec:head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >&2"),
                   EVEN_OK);
  assert_true(announcer_scene_is_due(at));
  assert_true(at->seconds > 76 && at->seconds < 78);
}

static void one_that_runs_is_ended_with_the_announcer(void **state) {
  announcer_scene *at = *state;
  int before = open_descriptors();
  assert_int_equal(announcer_scene_ask_place(at, "exec:sleep 600"), EVEN_OK);
  even_announcer_tick(at->announcer);
  assert_true(open_descriptors() > before);
  even_announcer_close(at->announcer);
  at->announcer = NULL;
  assert_int_equal(open_descriptors(), before);
}

/* From the first question to the end; another one is asked after a call that failed. */
static even_status find_end(void *context) {
  announcer_scene *at = context;
  return announcer_scene_finish(at, announcer_scene_ask_place(at, "exec:echo 42"));
}

static void each_call_to_the_kernel_may_fail_for_a_command(void **state) {
  announcer_scene *at = *state;
  int before = open_descriptors();
  assert_true(fault_each_os(find_end, at, EIO) > 10);
  assert_int_equal(open_descriptors(), before);
}

int main(void) {
#define SCENE_TEST(test) cmocka_unit_test_setup_teardown(test, announcer_scene_open, announcer_scene_close)
  const struct CMUnitTest tests[] = {
      SCENE_TEST(a_command_says_by_its_exit_code),
      SCENE_TEST(a_command_that_cannot_be_run_is_told_once),
      SCENE_TEST(other_exit_codes_are_told_once),
      SCENE_TEST(a_command_has_no_input),
      SCENE_TEST(its_session_is_told_from_its_beginning_to_its_end),
      SCENE_TEST(a_command_that_takes_too_long_is_ended),
      SCENE_TEST(a_command_that_does_not_end_is_told_once),
      SCENE_TEST(a_command_may_say_much),
      SCENE_TEST(one_that_runs_is_ended_with_the_announcer),
      SCENE_TEST(each_call_to_the_kernel_may_fail_for_a_command),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
