/* What an agent leaves of a job in which something could not be started. */
#include "orchestrator/outlast.h"

#include "orchestrator/place.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 2, NOBODY = 4194303 };

typedef struct left {
  even_legacy legacy;
  even_custody keeps; /* of who starts agents */
  even_custody own;   /* the agent's */
  even_agent_params params;
  even_job_rank ranks[RANKS];
  size_t order[RANKS];
  struct even_job_place places[RANKS];
  even_job job;
} left;

static void open_left(left *out) {
  int child = -1;
  memset(out, 0, sizeof *out);
  assert_int_equal(even_legacy_open(&out->legacy), EVEN_OK);
  even_custody_open(&out->keeps);
  even_custody_open(&out->own);
  assert_int_equal(even_custody_begin(&out->keeps, &child), EVEN_OK);
  even_custody_join(&out->own, child);
  out->legacy.custody = &out->own;
  out->params.legacy = &out->legacy;
  even_job *job = &out->job;
  job->params = &out->params;
  job->count = job->local = RANKS;
  job->ranks = out->ranks;
  job->order = out->order;
  job->places = out->places;
  job->stage = EVEN_JOB_RUNS;
  job->guardian = (even_guardian){.pid = -1, .pipe = -1};
  memset(job->id, 'a', sizeof job->id - 1);
  assert_int_equal(even_loop_open(&job->loop), EVEN_OK);
  assert_int_equal(even_legacy_leave(&out->legacy, job), EVEN_OK);
  assert_int_equal(even_outlast_open(job), EVEN_OK);
  assert_non_null(job->outlast);
}

static void close_left(left *it) {
  even_outlast_close(&it->job);
  even_loop_close(&it->job.loop);
  even_custody_close(&it->own);
  even_custody_close(&it->keeps);
  even_legacy_close(&it->legacy);
}

/* The others train on meanwhile. */
static void a_place_whose_next_process_is_due_later_takes_nobody_along(void **state) {
  (void)state;
  left it;
  open_left(&it);
  it.ranks[0] = (even_job_rank){.pid = NOBODY, .alive = true};
  it.places[1].outside = true;
  even_outlast_settle(&it.job);
  assert_false(even_legacy_is_whole(&it.legacy)); /* a process is being started there, perhaps */
  it.places[1].again_ns = 1;
  even_outlast_settle(&it.job);
  assert_true(even_legacy_is_whole(&it.legacy));
  close_left(&it);
}

static bool guardian_is_kept(left *it) {
  bool any = false;
  even_custody_hear(&it->keeps);
  for (size_t i = 0; i < it->keeps.count; i++) {
    any = any || it->keeps.items[i].kind == EVEN_OUTLAST_GUARDIAN;
  }
  return any;
}

static void a_guardian_that_could_not_be_replaced_comes_later(void **state) {
  (void)state;
  left it;
  int ends[2];
  open_left(&it);
  assert_int_equal(pipe(ends), 0);
  it.job.guardian = (even_guardian){.pid = NOBODY, .pipe = ends[1]};
  even_outlast_guarded(&it.job);
  assert_true(guardian_is_kept(&it));
  it.job.guardian = (even_guardian){.pid = -1, .pipe = -1};
  even_outlast_guarded(&it.job);
  assert_false(guardian_is_kept(&it));
  assert_int_equal(even_job_guard_rank(&it.job, NOBODY), EVEN_OK);
  assert_true(it.job.guardian.pid > 0);
  assert_true(guardian_is_kept(&it));
  even_guardian_stop(&it.job.guardian);
  assert_int_equal(close(ends[0]) + close(ends[1]), 0);
  close_left(&it);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_place_whose_next_process_is_due_later_takes_nobody_along),
      cmocka_unit_test(a_guardian_that_could_not_be_replaced_comes_later),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
