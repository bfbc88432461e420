/* What became of the others is read from the history: who went on, how soon, who took the place, what went wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/database.h"
#include "monitor/survival.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Ranks 0, 1 and 2 are processes 100, 101 and 102; a step ends each 10 (ns). */
enum { RANKS = 3, FIRST_PID = 100, BEGAN = 1000, STEP = 10 };

typedef struct made {
  char folder[64];
  even_database *database;
  even_history *history;
} made;

static char *path_of(const made *run, const char *ending) {
  static char path[96];
  (void)snprintf(path, sizeof path, "%s/run.db%s", run->folder, ending);
  return path;
}

static void note(made *run, int attempt, int rank, int event, int64_t value, uint64_t at_ns, const char *words) {
  even_state_event row = {.attempt = attempt, .rank = rank, .event = event, .value = value, .at_ns = at_ns};
  (void)snprintf(row.words, sizeof row.words, "%s", words);
  assert_int_equal(even_database_event(run->database, &row), EVEN_OK);
}

static void make_step(made *run, int attempt, int rank, uint32_t step, uint64_t end_ns) {
  const even_step_record row = {.step = step, .end_ns = end_ns, .duration_ns = STEP, .busy_ns = 1};
  assert_int_equal(even_database_step(run->database, attempt, rank, &row), EVEN_OK);
}

/* All ranks have made the steps 0 … 9 of the attempt; the last ended at BEGAN + 100. */
static void begin_attempt(made *run, int attempt, uint64_t at_ns) {
  for (int rank = 0; rank < RANKS; rank++) {
    note(run, attempt, rank, EVEN_EVENT_RANK_STARTED, FIRST_PID + 10 * attempt + rank, at_ns, "cpu");
  }
  for (uint32_t step = 0; step < 10; step++) {
    for (int rank = 0; rank < RANKS; rank++) {
      make_step(run, attempt, rank, step, at_ns + (step + 1) * STEP);
    }
  }
}

static int begin(void **state) {
  made *run = calloc(1, sizeof *run);
  assert_non_null(run);
  (void)snprintf(run->folder, sizeof run->folder, "/tmp/evenstep-test-XXXXXX");
  assert_non_null(mkdtemp(run->folder));
  const even_database_limits limits = {.step_rows = INT64_MAX, .ranks = RANKS};
  assert_int_equal(even_database_create(path_of(run, ""), &limits, &run->database), EVEN_OK);
  assert_int_equal(even_database_meta(run->database, "format", "evenstep-run-1"), EVEN_OK);
  assert_int_equal(even_database_meta(run->database, "ranks", "3"), EVEN_OK);
  begin_attempt(run, 0, BEGAN);
  *state = run;
  return 0;
}

static int end(void **state) {
  made *run = *state;
  even_history_close(run->history);
  even_database_close(run->database);
  (void)unlink(path_of(run, ""));
  (void)unlink(path_of(run, "-wal"));
  (void)unlink(path_of(run, "-shm"));
  assert_int_equal(rmdir(run->folder), 0);
  free(run);
  return 0;
}

/* What is found of the faults; the words of what is wrong. */
static const char *find(made *run, even_survival *faults, size_t count, bool gaps) {
  static char wrong[EVEN_SURVIVAL_WORDS];
  assert_int_equal(even_database_commit(run->database), EVEN_OK);
  assert_int_equal(even_history_open(run->folder, &run->history), EVEN_OK);
  assert_int_equal(even_survival_find(run->history, faults, count, gaps, wrong), EVEN_OK);
  return wrong;
}

/* Rank 1 is killed at BEGAN + 105; the others agree at + 107 and end the step at + 115, rank 2 a little later. */
static void lose_one(made *run) {
  note(run, 0, 1, EVEN_EVENT_RANK_ENDED, 0, BEGAN + 106, "killed");
  note(run, 0, 0, EVEN_EVENT_GENERATION, 1, BEGAN + 107, "generation 1: ranks 0 and 2 go on without rank 1 after 1 ms");
  for (uint32_t step = 10; step < 20; step++) {
    make_step(run, 0, 0, step, BEGAN + 15 + step * STEP);
    make_step(run, 0, 2, step, BEGAN + 16 + step * STEP);
  }
}

static void the_others_go_on(void **state) {
  made *run = *state;
  even_survival fault = {.pid = FIRST_PID + 1, .at_ns = BEGAN + 105};
  lose_one(run);
  assert_string_equal(find(run, &fault, 1, false), "");
  assert_int_equal(fault.outcome, EVEN_SURVIVAL_WENT_ON);
  assert_true(fault.trained);
  assert_int_equal(fault.others, 2);
  assert_int_equal(fault.again_ns, BEGAN + 107);
  assert_int_equal(fault.stepped_ns, BEGAN + 116);
  assert_int_equal(fault.joined_ns, 0);
}

/* The step under way when the link of rank 1's host was cut ended on all. */
static void a_step_that_ended_before_the_loss_was_known_does_not_count(void **state) {
  made *run = *state;
  even_survival fault = {.pid = FIRST_PID + 1, .at_ns = BEGAN + 95};
  lose_one(run);
  assert_string_equal(find(run, &fault, 1, false), "");
  assert_int_equal(fault.again_ns, BEGAN + 107);
  assert_int_equal(fault.stepped_ns, BEGAN + 116);
}

/* Rank 2 was stopped before, and rank 1 too, and both were let go: what others lose later is not by that. */
static void a_loss_is_by_the_fault_of_whom_the_others_went_on_without(void **state) {
  made *run = *state;
  even_survival faults[3] = {{.pid = FIRST_PID + 2, .at_ns = BEGAN + 45},
                             {.pid = FIRST_PID + 1, .at_ns = BEGAN + 55},
                             {.pid = FIRST_PID + 1, .at_ns = BEGAN + 105}};
  lose_one(run);
  note(run, 0, 0, EVEN_EVENT_RANK_ENDED, 0, BEGAN + 300, "");
  note(run, 0, 2, EVEN_EVENT_RANK_ENDED, 0, BEGAN + 300, "");
  assert_string_equal(find(run, faults, 3, false), "");
  for (int i = 0; i < 3; i++) {
    assert_int_equal(faults[i].outcome, EVEN_SURVIVAL_WENT_ON);
    assert_int_equal(faults[i].again_ns, i == 2 ? BEGAN + 107 : 0);
  }
  assert_int_equal(faults[0].stepped_ns, BEGAN + 50);
}

/* Rank 1 dies while rank 3, a spare, joins: the generation in which it does is the first without rank 1. */
static void a_loss_may_come_with_another_rank_that_joins(void **state) {
  made *run = *state;
  even_survival fault = {.pid = FIRST_PID + 1, .at_ns = BEGAN + 105};
  note(run, 0, 3, EVEN_EVENT_RANK_STARTED, 500, BEGAN, "cpu");
  note(run, 0, 1, EVEN_EVENT_RANK_ENDED, 0, BEGAN + 106, "killed");
  note(run, 0, 0, EVEN_EVENT_GENERATION, 2, BEGAN + 107,
       "generation 2: rank 3 joins ranks 0 and 2 without rank 1 after 1 ms");
  for (uint32_t step = 10; step < 20; step++) {
    make_step(run, 0, 0, step, BEGAN + 15 + step * STEP);
    make_step(run, 0, 2, step, BEGAN + 16 + step * STEP);
    make_step(run, 0, 3, step, BEGAN + 17 + step * STEP);
  }
  note(run, 0, 0, EVEN_EVENT_GENERATION, 3, BEGAN + 300, "generation 3: ranks 0 and 2 go on without rank 1 after 1 ms");
  assert_string_equal(find(run, &fault, 1, false), "");
  assert_int_equal(fault.outcome, EVEN_SURVIVAL_WENT_ON);
  assert_int_equal(fault.again_ns, BEGAN + 107);
  assert_int_equal(fault.stepped_ns, BEGAN + 116);
  assert_int_equal(fault.joined_ns, BEGAN + 117);
}

/* One loss of several, said in other words. */
static void those_of_a_host_are_lost_together(void **state) {
  static const char *const words[] = {
      "generation 1: rank 0 goes on without ranks 1 and 2 after 1 ms",
      "generation 1: rank 0 goes on without host rank-10 (ranks 1 and 2) after 1 ms",
      "generation 1: rank 0 goes on without ranks 12, 21, 1 and 2 after 0 ms",
      "generation 1: rank 0 goes on without ranks 12, 21, …",
  };
  made *run = *state;
  for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
    uint64_t at = BEGAN + 200 + 100 * i;
    note(run, 0, 0, EVEN_EVENT_GENERATION, 1, at, words[i]);
    even_survival faults[3] = {{.pid = FIRST_PID, .at_ns = at - 5},
                               {.pid = FIRST_PID + 1, .at_ns = at - 5},
                               {.pid = FIRST_PID + 2, .at_ns = at - 5}};
    make_step(run, 0, 0, 10 + (uint32_t)i, at + 1);
    make_step(run, 0, 1, 10 + (uint32_t)i, at + 1);
    assert_string_equal(find(run, faults, 3, false), "");
    bool cut = strstr(words[i], "…") != NULL;
    assert_int_equal(faults[0].again_ns, cut ? at : 0);
    assert_int_equal(faults[1].again_ns, at);
    assert_int_equal(faults[2].again_ns, at);
    even_history_close(run->history);
  }
  run->history = NULL;
}

/* A spare, rank 3, was there all the time; then a new process comes to rank 1's place. */
static void others_take_the_places(void **state) {
  made *run = *state;
  even_survival faults[2] = {{.pid = FIRST_PID + 1, .at_ns = BEGAN + 105},
                             {.pid = FIRST_PID + 2, .at_ns = BEGAN + 301}};
  note(run, 0, 3, EVEN_EVENT_RANK_STARTED, 500, BEGAN, "cpu");
  lose_one(run);
  note(run, 0, 0, EVEN_EVENT_GENERATION, 2, BEGAN + 220, "generation 2: rank 3 joins ranks 0 and 2 after 1 ms");
  for (uint32_t step = 20; step < 25; step++) {
    make_step(run, 0, 0, step, BEGAN + 30 + step * STEP);
    make_step(run, 0, 2, step, BEGAN + 30 + step * STEP);
    make_step(run, 0, 3, step, BEGAN + 31 + step * STEP);
  }
  note(run, 0, 2, EVEN_EVENT_RANK_ENDED, 0, BEGAN + 302, "killed");
  note(run, 0, 1, EVEN_EVENT_RANK_STARTED, 600, BEGAN + 303, "cpu");
  note(run, 0, 0, EVEN_EVENT_GENERATION, 3, BEGAN + 304, "generation 3: ranks 0 and 3 go on without rank 2 after 1 ms");
  for (uint32_t step = 25; step < 30; step++) {
    make_step(run, 0, 0, step, BEGAN + 60 + step * STEP);
    make_step(run, 0, 3, step, BEGAN + 60 + step * STEP);
    if (step >= 28) {
      make_step(run, 0, 1, step, BEGAN + 60 + step * STEP);
    }
  }
  assert_string_equal(find(run, faults, 2, false), "");
  assert_int_equal(faults[0].joined_ns, BEGAN + 231);
  assert_int_equal(faults[1].outcome, EVEN_SURVIVAL_WENT_ON);
  assert_int_equal(faults[1].others, 2); /* rank 0, and the spare in its place */
  assert_int_equal(faults[1].again_ns, BEGAN + 304);
  assert_int_equal(faults[1].joined_ns, BEGAN + 340);
}

static void the_job_starts_again(void **state) {
  made *run = *state;
  even_survival fault = {.pid = FIRST_PID + 1, .at_ns = BEGAN + 105};
  for (int rank = 0; rank < RANKS; rank++) {
    note(run, 0, rank, EVEN_EVENT_RANK_ENDED, 0, BEGAN + 106, "killed");
  }
  note(run, 1, -1, EVEN_EVENT_ATTEMPT, 1, BEGAN + 200, "restart 1");
  begin_attempt(run, 1, BEGAN + 200);
  assert_string_equal(find(run, &fault, 1, false), "");
  assert_int_equal(fault.outcome, EVEN_SURVIVAL_STARTED_AGAIN);
  assert_int_equal(fault.ended_ns, BEGAN + 200);
  assert_int_equal(fault.stepped_ns, 0);
}

static void a_history_that_ends_tells_nothing(void **state) {
  made *run = *state;
  even_survival faults[2] = {{.pid = FIRST_PID + 1, .at_ns = BEGAN + 105}, {.pid = 4711, .at_ns = BEGAN + 105}};
  assert_string_equal(find(run, faults, 2, false), "");
  assert_int_equal(faults[0].outcome, EVEN_SURVIVAL_UNKNOWN);
  assert_int_equal(faults[1].outcome, EVEN_SURVIVAL_UNKNOWN);
  assert_false(faults[1].trained);
}

static void who_is_lost_beside_the_victim_is_told(void **state) {
  made *run = *state;
  even_survival fault = {.pid = FIRST_PID + 1, .at_ns = BEGAN + 105};
  lose_one(run);
  note(run, 0, 2, EVEN_EVENT_RANK_ENDED, 0, BEGAN + 217, "killed");
  make_step(run, 0, 0, 20, BEGAN + 250);
  assert_non_null(strstr(find(run, &fault, 1, false), "rank 2 (process 102) was lost, to which no fault had come"));
}

static void a_step_that_is_made_twice_or_left_out_is_told(void **state) {
  made *run = *state;
  even_survival fault = {.pid = FIRST_PID + 1, .at_ns = BEGAN + 105};
  lose_one(run);
  make_step(run, 0, 0, 19, BEGAN + 250);
  assert_non_null(strstr(find(run, &fault, 1, true), "rank 0 (process 100) made step 19 after step 19"));
  even_history_close(run->history);
  make_step(run, 0, 2, 22, BEGAN + 250);
  assert_non_null(strstr(find(run, &fault, 1, true), "rank 0"));
}

static void a_gap_is_told_where_all_is_kept(void **state) {
  made *run = *state;
  even_survival fault = {.pid = FIRST_PID + 1, .at_ns = BEGAN + 105};
  lose_one(run);
  make_step(run, 0, 2, 22, BEGAN + 250);
  assert_string_equal(find(run, &fault, 1, true), "");
  even_history_close(run->history);
  assert_non_null(strstr(find(run, &fault, 1, false), "rank 2 (process 102) made step 22 after step 19"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(the_others_go_on, begin, end),
      cmocka_unit_test_setup_teardown(a_step_that_ended_before_the_loss_was_known_does_not_count, begin, end),
      cmocka_unit_test_setup_teardown(a_loss_is_by_the_fault_of_whom_the_others_went_on_without, begin, end),
      cmocka_unit_test_setup_teardown(a_loss_may_come_with_another_rank_that_joins, begin, end),
      cmocka_unit_test_setup_teardown(those_of_a_host_are_lost_together, begin, end),
      cmocka_unit_test_setup_teardown(others_take_the_places, begin, end),
      cmocka_unit_test_setup_teardown(the_job_starts_again, begin, end),
      cmocka_unit_test_setup_teardown(a_history_that_ends_tells_nothing, begin, end),
      cmocka_unit_test_setup_teardown(who_is_lost_beside_the_victim_is_told, begin, end),
      cmocka_unit_test_setup_teardown(a_step_that_is_made_twice_or_left_out_is_told, begin, end),
      cmocka_unit_test_setup_teardown(a_gap_is_told_where_all_is_kept, begin, end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
