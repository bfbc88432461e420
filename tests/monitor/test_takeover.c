/* A history whose writer was killed goes on in the next one's hands: each record of the ranks is in it once, in the
 * state, too. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/history.h"
#include "monitor/monitored.h"
#include "monitor/parts.h"
#include "os/calls.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LIVES = 12, STEPS_A_LIFE = 60 };
static const uint64_t BEGAN_NS = UINT64_C(50000000000);

/* Two monitored runs whose ranks write the same. */
typedef struct pair {
  monitored *killed;
  monitored *whole;
} pair;

static void begin_at(monitored *made) {
  made->ranks.now_ns = BEGAN_NS;
}

static int set_up(void **state) {
  pair *made = calloc(1, sizeof *made);
  if (made == NULL || monitored_set_up((void **)&made->killed) != 0 || monitored_set_up((void **)&made->whole) != 0) {
    return -1;
  }
  begin_at(made->killed);
  begin_at(made->whole);
  *state = made;
  return 0;
}

static int tear_down(void **state) {
  pair *made = *state;
  int failed = monitored_tear_down((void **)&made->killed);
  failed |= monitored_tear_down((void **)&made->whole);
  free(made);
  return failed;
}

static void take_over(monitored *made, int attempt) {
  monitored_kill(made);
  monitored_begin(made, true, attempt);
}

static void write_one(monitored *made) {
  const uint32_t shares[2] = {12, 4};
  if (made->ranks.step % 7 == 3) {
    feed_scalar(&made->ranks, 0, made->ranks.step, "accuracy of the model over the whole validation set", 0.5);
    feed_event(&made->ranks, 1, EVEN_EVENT_MESSAGE, made->ranks.step, "of rank 1");
  }
  if (made->ranks.step % 50 == 10) { /* of a kind that is seldom */
    const even_span_record saved = {.step = made->ranks.step,
                                    .span = EVEN_SPAN_CHECKPOINT,
                                    .start_ns = made->ranks.now_ns,
                                    .duration_ns = 1000,
                                    .bytes = 77};
    even_telemetry_span(made->ranks.writers[0], &saved);
  }
  feed_step(&made->ranks, shares);
}

static void write_many(pair *made, int steps) {
  for (int i = 0; i < steps; i++) {
    write_one(made->killed);
    write_one(made->whole);
  }
}

/* The rows of a query over a table that one history has and the other has not. */
static void expect_same_rows(const pair *made, const char *columns, const char *table, const char *where) {
  char query[1200];
  char other[160];
  (void)snprintf(other, sizeof other, "%s", monitored_path(made->whole, "run.db"));
  sqlite3 *connection = NULL;
  sqlite3_stmt *row = NULL;
  assert_int_equal(sqlite3_open(monitored_path(made->killed, "run.db"), &connection), SQLITE_OK);
  (void)snprintf(query, sizeof query, "ATTACH '%s' AS whole", other);
  assert_int_equal(sqlite3_exec(connection, query, NULL, NULL, NULL), SQLITE_OK);
  (void)snprintf(query, sizeof query,
                 "SELECT (SELECT count(*) FROM main.%s WHERE %s), (SELECT count(*) FROM whole.%s WHERE %s),"
                 " (SELECT count(*) FROM (SELECT %s FROM main.%s WHERE %s EXCEPT SELECT %s FROM whole.%s WHERE %s)),"
                 " (SELECT count(*) FROM (SELECT %s FROM whole.%s WHERE %s EXCEPT SELECT %s FROM main.%s WHERE %s))",
                 table, where, table, where, columns, table, where, columns, table, where, columns, table, where,
                 columns, table, where);
  assert_int_equal(sqlite3_prepare_v2(connection, query, -1, &row, NULL), SQLITE_OK);
  assert_int_equal(sqlite3_step(row), SQLITE_ROW);
  long long counts[4];
  for (int i = 0; i < 4; i++) {
    counts[i] = sqlite3_column_int64(row, i);
  }
  if (counts[0] != counts[1] || counts[2] != 0 || counts[3] != 0 || counts[1] == 0) {
    fail_msg("%s: %lld rows, %lld without a kill; %lld are not in that, %lld are missing", table, counts[0], counts[1],
             counts[2], counts[3]);
  }
  assert_int_equal(sqlite3_finalize(row), SQLITE_OK);
  assert_int_equal(sqlite3_close(connection), SQLITE_OK);
}

static void expect_same_history(const pair *made) {
  expect_same_rows(made, "*", "steps", "1");
  expect_same_rows(made, "*", "spans", "1");
  expect_same_rows(made, "*", "events", "event IN ('scalar', 'checkpoint') OR words = 'of rank 1'");
}

static void expect_same_state(const even_state *killed, const even_state *whole) {
  for (int rank = 0; rank < 2; rank++) {
    const even_state_rank *mine = &killed->rank[rank];
    const even_state_rank *theirs = &whole->rank[rank];
    assert_int_equal(mine->steps, theirs->steps);
    assert_int_equal(mine->samples, theirs->samples);
    assert_int_equal(mine->busy_ns, theirs->busy_ns);
    assert_int_equal(mine->wait_ns, theirs->wait_ns);
    assert_memory_equal(mine->span_ns, theirs->span_ns, sizeof mine->span_ns);
    assert_memory_equal(mine->span_bytes, theirs->span_bytes, sizeof mine->span_bytes);
    assert_memory_equal(mine->window_attempt, theirs->window_attempt, sizeof mine->window_attempt);
  }
  assert_int_equal(killed->last_step, whole->last_step);
  assert_int_equal(killed->attempt, whole->attempt);
  assert_int_equal(killed->attempt_steps, whole->attempt_steps);
  assert_int_equal(killed->point_count, whole->point_count);
  assert_int_equal(killed->checkpoints, whole->checkpoints);
  assert_int_equal(killed->lost_records, 0);
  assert_int_equal(whole->lost_records, 0);
}

/* ---- killed for real ---- */

/* Ticks until it is killed, and says so after each; ends with whoever listens. */
static void live(monitored *made, bool continues, int pipe_end, unsigned seed) {
  made->continues = continues;
  if (monitored_open(made, -1) != EVEN_OK) {
    _exit(1);
  }
  even_monitor_attempt(made->monitor, 0);
  for (int rank = 0; rank < 2; rank++) {
    even_monitor_rank_started(made->monitor, rank, MONITORED_PID + rank);
  }
  for (;;) {
    made->monitor->begins = false;
    if (rand_r(&seed) % 3 == 0) {
      made->monitor->committed_ns = 0;
    }
    if (even_monitor_tick(made->monitor) != EVEN_OK) {
      _exit(2);
    }
    ssize_t said = write(pipe_end, ".", 1);
    if (said < 0 && errno != EAGAIN) {
      _exit(3);
    }
  }
}

/* Steps are written while another process reads and writes the history, which is killed after some of its ticks. */
static void one_life(pair *made, bool continues, unsigned *seed) {
  int ends[2];
  char heard[64];
  assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
  assert_int_equal(fcntl(ends[1], F_SETFL, O_NONBLOCK), 0);
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    (void)close(ends[0]);
    live(made->killed, continues, ends[1], *seed);
  }
  assert_int_equal(close(ends[1]), 0);
  int left = STEPS_A_LIFE;
  assert_int_equal(read(ends[0], heard, 1), 1); /* it lives */
  for (int ticks = rand_r(seed) % 8; ticks > 0; ticks--) {
    int burst = rand_r(seed) % 10;
    burst = burst < left ? burst : left;
    write_many(made, burst);
    left -= burst;
    assert_true(read(ends[0], heard, sizeof heard) > 0);
  }
  write_many(made, left);
  assert_int_equal(kill(child, SIGKILL), 0);
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  assert_int_equal(close(ends[0]), 0);
}

static void killed_again_and_again_it_has_each_record_once(void **state) {
  pair *made = *state;
  unsigned seed = 20261201;
  monitored_begin(made->whole, false, 0);
  for (int life = 0; life < LIVES; life++) {
    one_life(made, life > 0, &seed);
  }
  double began = monitored_number(made->killed, "SELECT value FROM meta WHERE key = 'started_ns'");
  monitored_begin(made->killed, true, 0);
  write_many(made, 5);
  monitored_committed(made->killed);
  monitored_committed(made->whole);
  expect_same_state(made->killed->monitor->state, made->whole->monitor->state);
  assert_int_equal(even_monitor_close(made->killed->monitor, 0), EVEN_OK);
  assert_int_equal(even_monitor_close(made->whole->monitor, 0), EVEN_OK);
  expect_same_history(made);
  assert_true(monitored_number(made->killed, "SELECT value FROM meta WHERE key = 'started_ns'") == began);
  assert_true(monitored_number(made->killed, "SELECT count(*) FROM steps WHERE rank = 1") == LIVES * STEPS_A_LIFE + 5);
  assert_true(monitored_number(made->killed,
                               "SELECT count(*) FROM events WHERE words LIKE 'the agent of this run was killed%'") ==
              (double)LIVES);
  assert_true(monitored_number(made->killed, "SELECT count(*) FROM events WHERE event = 'rank_started'") == 2);
  assert_int_equal(access(monitored_path(made->killed, "run-previous.db"), F_OK), -1);
}

/* ---- what is gone on with ---- */

static void what_was_not_committed_comes_again(void **state) {
  pair *made = *state;
  monitored_begin(made->killed, false, 0);
  monitored_begin(made->whole, false, 0);
  write_many(made, 10);
  monitored_committed(made->killed);
  write_many(made, 10);
  assert_int_equal(even_monitor_tick(made->killed->monitor), EVEN_OK); /* read, and lost with its agent */
  take_over(made->killed, 0);
  write_many(made, 10);
  monitored_committed(made->killed);
  take_over(made->killed, 0); /* twice in a row, without a record between */
  take_over(made->killed, 0);
  monitored_committed(made->killed);
  monitored_committed(made->whole);
  expect_same_state(made->killed->monitor->state, made->whole->monitor->state);
  assert_int_equal(even_monitor_close(made->killed->monitor, 0), EVEN_OK);
  assert_int_equal(even_monitor_close(made->whole->monitor, 0), EVEN_OK);
  expect_same_history(made);
  monitored_report_says(made->killed, "Medians over 24 steady steps", true); /* of 30 */
}

/* Another program had the history locked: what waited in the killed agent's memory is in the rings. */
static void what_waited_for_a_lock_comes_again(void **state) {
  pair *made = *state;
  sqlite3 *other = NULL;
  monitored_begin(made->killed, false, 0);
  monitored_begin(made->whole, false, 0);
  write_many(made, 10);
  monitored_committed(made->killed);
  assert_int_equal(sqlite3_open(monitored_path(made->killed, "run.db"), &other), SQLITE_OK);
  assert_int_equal(sqlite3_exec(other, "BEGIN IMMEDIATE", NULL, NULL, NULL), SQLITE_OK);
  write_many(made, 10);
  monitored_committed(made->killed);
  assert_true(monitored_number(made->killed, "SELECT max(step) FROM steps") == 9);
  monitored_kill(made->killed);
  assert_int_equal(sqlite3_close(other), SQLITE_OK);
  monitored_begin(made->killed, true, 0);
  write_many(made, 10);
  assert_int_equal(even_monitor_close(made->killed->monitor, 0), EVEN_OK);
  assert_int_equal(even_monitor_close(made->whole->monitor, 0), EVEN_OK);
  expect_same_history(made);
}

/* What is summed when the agent is killed goes on being summed, also of a kind that comes again much later. */
static void a_span_that_was_being_summed_is_summed_on(void **state) {
  pair *made = *state;
  monitored *run = made->killed;
  even_span_record part = {
      .step = 0, .span = EVEN_SPAN_COMMUNICATION, .start_ns = BEGAN_NS, .duration_ns = 5, .bytes = 7};
  monitored_begin(run, false, 0);
  even_telemetry_span(run->ranks.writers[0], &part);
  monitored_committed(run);
  take_over(run, 0);
  assert_int_equal(run->monitor->state->rank[0].span_ns[EVEN_SPAN_COMMUNICATION], 5);
  part.start_ns += 100;
  even_telemetry_span(run->ranks.writers[0], &part);
  part.step = 1;
  even_telemetry_span(run->ranks.writers[0], &part);
  monitored_committed(run);
  take_over(run, 0);
  assert_int_equal(run->monitor->state->rank[0].span_ns[EVEN_SPAN_COMMUNICATION], 15);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
  assert_true(monitored_number(run, "SELECT count(*) FROM spans") == 2);
  assert_true(monitored_number(run, "SELECT duration_ns FROM spans WHERE step = 0") == 10);
  assert_true(monitored_number(run, "SELECT start_ns FROM spans WHERE step = 0") == (double)BEGAN_NS);
  assert_true(monitored_number(run, "SELECT count(*) FROM open_spans WHERE step IS NOT NULL") == 0);
}

/* The attempt that runs is no restart; the next one is. */
static void the_attempt_goes_on_and_the_next_is_a_restart(void **state) {
  pair *made = *state;
  monitored *run = made->killed;
  monitored_begin(run, false, 0);
  monitored_steps(run, 3, 8);
  even_monitor_rank_ended(run->monitor, 1, "died");
  even_monitor_attempt(run->monitor, 1);
  run->monitor->begins = false;
  even_monitor_rank_started(run->monitor, 0, 71);
  even_monitor_rank_started(run->monitor, 1, 72);
  monitored_steps(run, 70, 8);
  monitored_committed(run);
  monitored_kill(run);
  run->continues = true;
  assert_int_equal(monitored_open(run, -1), EVEN_OK);
  assert_int_equal(run->monitor->state->attempt, 1);
  assert_int_equal(run->monitor->state->attempt_steps, 70);
  even_monitor_attempt(run->monitor, 1);
  even_monitor_rank_started(run->monitor, 0, 71);
  even_monitor_rank_started(run->monitor, 1, 80); /* another process is in its place by now */
  assert_int_equal(run->monitor->state->attempt_steps, 70);
  monitored_committed(run);
  assert_true(monitored_number(run, "SELECT count(*) FROM events WHERE event = 'attempt'") == 1);
  assert_true(monitored_number(run, "SELECT count(*) FROM events WHERE event = 'rank_started' AND attempt = 1") == 3);
  assert_true(monitored_number(run, "SELECT pid FROM ranks WHERE rank = 1 AND attempt = 1") == 80);
  even_monitor_rank_ended(run->monitor, 0, "died, too");
  assert_true(run->monitor->state->rank[0].pid == 0);
  even_monitor_attempt(run->monitor, 2);
  monitored_committed(run);
  assert_true(monitored_number(run, "SELECT count(*) FROM events WHERE event = 'attempt'") == 2);
  assert_true(monitored_number(run, "SELECT pid FROM ranks WHERE rank = 0 AND attempt = 1 AND ended") == 71);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
}

/* An attempt is in the history before its ranks write. */
static void a_restart_is_known_to_the_next_agent(void **state) {
  pair *made = *state;
  monitored *run = made->killed;
  monitored_begin(run, false, 0);
  monitored_steps(run, 3, 8);
  monitored_committed(run);
  even_monitor_attempt(run->monitor, 1);
  monitored_kill(run); /* at once */
  run->continues = true;
  assert_int_equal(monitored_open(run, -1), EVEN_OK);
  assert_int_equal(run->monitor->state->attempt, 1);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
}

/* Hosts came, and went: the history has ranks that the job has no more, and they may come again. */
static void ranks_that_left_have_their_places(void **state) {
  pair *made = *state;
  monitored *run = made->killed;
  monitored_begin(run, false, 0);
  monitored_steps(run, 3, 8);
  assert_int_equal(even_monitor_ranks(run->monitor, 4, NULL, NULL), EVEN_OK);
  even_monitor_rank_started(run->monitor, 3, 77);
  monitored_committed(run);
  even_monitor_rank_gone(run->monitor, 3);
  assert_int_equal(even_monitor_ranks(run->monitor, 2, NULL, NULL), EVEN_OK);
  monitored_committed(run);
  take_over(run, 0);
  assert_int_equal(run->monitor->state->ranks, 2);
  assert_int_equal(run->monitor->state->room, 4);
  monitored_steps(run, 3, 8);
  monitored_committed(run);
  assert_int_equal(even_monitor_ranks(run->monitor, 6, NULL, NULL), EVEN_OK);
  even_monitor_rank_started(run->monitor, 5, 78);
  monitored_steps(run, 3, 8);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
  assert_true(monitored_number(run, "SELECT count(*) FROM steps WHERE rank = 1") == 9);
  assert_true(monitored_number(run, "SELECT value FROM meta WHERE key = 'ranks'") == 6);
}

/* What the ring could not hold until the next agent came is lost, counted, and said. */
static void what_was_overwritten_is_counted(void **state) {
  pair *made = *state;
  monitored *run = made->killed;
  monitored_begin(run, false, 0);
  monitored_steps(run, 10, 8);
  monitored_committed(run);
  monitored_kill(run);
  for (int step = 0; step < 1100; step++) {
    write_one(run);
  }
  monitored_begin(run, true, 0);
  monitored_steps(run, 1, 8);
  monitored_committed(run);
  uint64_t lost = run->monitor->state->lost_records;
  assert_true(lost > 0);
  take_over(run, 0);
  assert_int_equal(run->monitor->state->lost_records, lost);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
  assert_true(monitored_number(run, "SELECT value FROM meta WHERE key = 'lost_records'") == (double)lost);
  assert_true(monitored_number(run, "SELECT count(*) = count(DISTINCT step) FROM steps WHERE rank = 0") == 1);
}

static void an_end_that_was_written_is_taken_back(void **state) {
  pair *made = *state;
  monitored *run = made->killed;
  even_history *history = NULL;
  monitored_begin(run, false, 0);
  monitored_steps(run, 3, 8);
  assert_int_equal(even_monitor_close(run->monitor, 1), EVEN_OK);
  monitored_begin(run, true, 0);
  assert_int_equal(run->monitor->state->ended_ns, 0);
  assert_int_equal(even_history_open(run->folder, &history), EVEN_OK);
  assert_false(even_history_ended(history));
  even_history_close(history);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
  assert_true(monitored_number(run, "SELECT value FROM meta WHERE key = 'exit_code'") == 0);
}

/* As if nobody had been killed. */
static void old_steps_are_merged_on(void **state) {
  pair *made = *state;
  made->killed->step_rows = made->whole->step_rows = 600;
  monitored_begin(made->killed, false, 0);
  monitored_begin(made->whole, false, 0);
  for (int round = 0; round < 60; round++) {
    write_many(made, 25);
    monitored_committed(made->killed);
    monitored_committed(made->whole);
    if (round % 7 == 6) {
      take_over(made->killed, 0);
    }
  }
  assert_true(monitored_number(made->killed, "SELECT max(steps) FROM steps") > 2);
  assert_true(monitored_number(made->killed, "SELECT count(*) FROM steps") < 600 + 100);
  assert_true(monitored_number(made->killed, "SELECT sum(steps) FROM steps WHERE rank = 0") == 60 * 25);
  assert_int_equal(even_monitor_close(made->killed->monitor, 0), EVEN_OK);
  assert_int_equal(even_monitor_close(made->whole->monitor, 0), EVEN_OK);
  expect_same_history(made);
}

static int seconds_passed;

/* Each look at the clock is a second later. */
static int fast_clock(clockid_t clock, struct timespec *out) {
  int result = even_os_real.clock_gettime(clock, out);
  out->tv_sec += ++seconds_passed;
  return result;
}

/* The rows go on; the page begins there. */
static void a_history_too_long_to_read_goes_on_by_itself(void **state) {
  pair *made = *state;
  monitored *run = made->killed;
  monitored_begin(run, false, 0);
  monitored_begin(made->whole, false, 0);
  write_many(made, 300);
  monitored_committed(run);
  double began = monitored_number(run, "SELECT value FROM meta WHERE key = 'started_ns'");
  write_many(made, 10);
  monitored_kill(run);
  run->continues = true;
  even_os.clock_gettime = fast_clock;
  assert_int_equal(monitored_open(run, -1), EVEN_OK);
  even_os = even_os_real;
  assert_int_equal(run->monitor->state->last_step, -1);
  assert_true((double)run->monitor->state->started_ns == began);
  even_monitor_attempt(run->monitor, 0);
  write_many(made, 10);
  monitored_committed(run);
  assert_int_equal(run->monitor->state->rank[1].steps, 20);
  assert_true(monitored_number(run, "SELECT count(*) FROM events WHERE words LIKE '%a page that begins here%'") == 1);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
  assert_int_equal(even_monitor_close(made->whole->monitor, 0), EVEN_OK);
  expect_same_history(made);
}

static void write_call(monitored *made, int rank, uint32_t number) {
  const even_call_record record = {.call = EVEN_RECORDED_ALL_REDUCE,
                                   .ranks = 2,
                                   .member = (uint16_t)rank,
                                   .peer = -1,
                                   .number = number,
                                   .start_ns = BEGAN_NS + number,
                                   .duration_ns = 5,
                                   .bytes = 64};
  even_telemetry_call(made->ranks.writers[rank], &record);
}

/* Places in the timeline are taken in order: the newest calls replace the oldest. */
static void calls_go_on_in_the_places_that_follow(void **state) {
  pair *made = *state;
  monitored *run = made->killed;
  uint32_t number = 0;
  run->calls = 10;
  monitored_begin(run, false, 0);
  for (int round = 0; round < 6; round++) {
    for (int i = 0; i < 4; i++, number++) {
      write_call(run, 0, number);
      write_call(run, 1, number);
    }
    if (round % 2 == 0) {
      monitored_committed(run);
    }
    take_over(run, 0);
    monitored_committed(run);
    uint32_t kept = number < 10 ? number : 10;
    assert_true(monitored_number(run, "SELECT count(*) FROM calls WHERE rank = 1") == kept);
    assert_true(monitored_number(run, "SELECT min(number) FROM calls WHERE rank = 1") == number - kept);
    assert_true(monitored_number(run, "SELECT max(number) FROM calls WHERE rank = 0") == number - 1);
  }
  run->calls = 5; /* as many as another agent keeps */
  take_over(run, 0);
  for (int i = 0; i < 7; i++, number++) {
    write_call(run, 0, number);
  }
  monitored_committed(run);
  assert_true(monitored_number(run, "SELECT count(*) FROM calls") == 5);
  assert_true(monitored_number(run, "SELECT min(number) FROM calls") == number - 5);
  assert_true(monitored_number(run, "SELECT value FROM meta WHERE key = 'calls'") == 5);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      TEST(killed_again_and_again_it_has_each_record_once),
      TEST(what_was_not_committed_comes_again),
      TEST(what_waited_for_a_lock_comes_again),
      TEST(a_span_that_was_being_summed_is_summed_on),
      TEST(the_attempt_goes_on_and_the_next_is_a_restart),
      TEST(a_restart_is_known_to_the_next_agent),
      TEST(ranks_that_left_have_their_places),
      TEST(what_was_overwritten_is_counted),
      TEST(an_end_that_was_written_is_taken_back),
      TEST(old_steps_are_merged_on),
      TEST(a_history_too_long_to_read_goes_on_by_itself),
      TEST(calls_go_on_in_the_places_that_follow),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
