/* Ranks that wait in torch's init_process_group, on one host, for a rank of another one: what the leader says of it,
 * and what the other agent does. Ranks 0 and 1 are the leader's, 2 and 3 the other's; none has a process. */
#include "orchestrator/openings.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/hangs.h"
#include "os/calls.h"
#include "os/clock.h"

#include "board_sides.h"
#include "support/clock_ahead.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* Turns of half a second; a limit of 1 s, and so 10 s where nothing is known. */
enum { FIRST_PROCESS = 0x7ffffff0, TURNS = 60 };

static int telemetry_fd;

static int begin(void **state) {
  clock_ahead_set(0);
  if (set_up(state) != 0 || even_telemetry_create_segment(RANKS, 64, &telemetry_fd) != EVEN_OK) {
    return -1;
  }
  other.params.telemetry_fd = telemetry_fd;
  other.params.hang_seconds = 1;
  even_text_add(&other.job.run_folder, "/nowhere"); /* no stack can be kept */
  for (int i = HERE; i < RANKS; i++) {
    (void)snprintf(other.each_device[i].name, sizeof other.each_device[i].name, "cpu:%d", i);
    other.ranks[i].pid = FIRST_PROCESS + i;
  }
  if (even_hangs_open(&other.job, &other.job.hangs) != EVEN_OK) {
    return -1;
  }
  even_hangs_begin(other.job.hangs);
  return 0;
}

static int end(void **state) {
  even_hangs_close(other.job.hangs);
  even_text_free(&other.job.run_folder);
  return tear_down(state) + close(telemetry_fd);
}

static even_status hear(const char *json) {
  json_t *content = NULL;
  EVEN_TRY(even_json_parse("a test", json, strlen(json), &content));
  even_status status = even_job_openings_take(&other.job, content, even_clock_ns());
  json_decref(content);
  return status;
}

/* What the leader has to say, to the other; whether it was anything. */
static bool pass(void) {
  even_text text = EVEN_TEXT_EMPTY;
  bool any = even_job_openings_write(&leader.job, even_clock_ns(), &text);
  if (any) {
    assert_int_equal(even_text_status(&text), EVEN_OK);
    assert_int_equal(hear(text.data), EVEN_OK);
  }
  even_text_free(&text);
  return any;
}

static bool turn_until(const char *words) {
  for (int i = 0; i < TURNS && strstr(even_text_string(&other.said), words) == NULL; i++) {
    bool ends = false;
    clock_ahead_add(500000000u);
    (void)pass();
    even_hangs_tick(other.job.hangs, &other.job, &ends);
  }
  return strstr(even_text_string(&other.said), words) != NULL;
}

/* As the ring of the rank says, to its own agent and, forwarded, to the leader. */
static void come(int rank) {
  leader.job.progress.ranks[rank].opening = 1;
  other.job.progress.ranks[rank].opening = rank < HERE ? 0 : 1;
}

static void who_is_missed_on_another_host_is_told_there(void **state) {
  (void)state;
  assert_false(turn_until("hangs")); /* nobody waits */
  come(0);
  come(1);
  come(3);
  assert_true(turn_until("stacks of rank 2"));
  const char *said = even_text_string(&other.said);
  assert_non_null(strstr(said, "rank 2 (cpu:2, process 2147483634) hangs: no progress for 1"));
  assert_non_null(strstr(said, "; 3 ranks wait for it in init_process_group|"));
  assert_null(strstr(said, "rank 3 (cpu:3, process"));
}

static void also_where_no_rank_of_its_own_host_has_come(void **state) {
  (void)state;
  come(0);
  assert_true(turn_until("rank 3 (cpu:3, process 2147483635) hangs"));
  assert_non_null(strstr(even_text_string(&other.said), "; 1 rank waits for it in init_process_group|"));
}

static void nobody_is_missed_who_has_come(void **state) {
  (void)state;
  for (int rank = 0; rank < RANKS; rank++) {
    come(rank);
  }
  leader.job.progress.ranks[0].opened = 1; /* and out of it, a moment before the others */
  assert_false(pass());
}

/* The leader is gone, or those who waited have given up. */
static void what_is_not_said_again_holds_no_longer(void **state) {
  (void)state;
  come(0);
  clock_ahead_add(2000000000u);
  assert_true(pass());
  assert_false(pass()); /* once a second */
  even_job_openings_look(&other.job);
  assert_true(even_job_opening_misses(&other.job, 2));
  leader.job.progress.ranks[0].opened = 1;
  assert_false(turn_until("hangs"));
  assert_false(even_job_opening_misses(&other.job, 2));
}

static void one_that_is_stopped_waits_for_nobody(void **state) {
  (void)state;
  come(0);
  leader.ranks[0].stands = true;
  clock_ahead_add(2000000000u);
  assert_false(pass());
}

static void what_no_leader_says_is_refused(void **state) {
  static const char *const wrong[] = {"{}", "{\"time\":0,\"waiting\":1}", "{\"time\":1,\"waiting\":0}",
                                      "{\"time\":1,\"waiting\":5}", "{\"time\":1.5,\"waiting\":1}"};
  (void)state;
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    assert_int_equal(hear(wrong[i]), EVEN_ERR_INPUT);
  }
  even_error_clear();
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, begin, end)
  const struct CMUnitTest tests[] = {CASE(who_is_missed_on_another_host_is_told_there),
                                     CASE(also_where_no_rank_of_its_own_host_has_come),
                                     CASE(nobody_is_missed_who_has_come),
                                     CASE(what_is_not_said_again_holds_no_longer),
                                     CASE(one_that_is_stopped_waits_for_nobody),
                                     CASE(what_no_leader_says_is_refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
