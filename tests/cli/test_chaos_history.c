/* Whose history `evenstep chaos` reads: that of the agent that was started last, and no other's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/chaos.h"
#include "monitor/monitored.h"
#include "os/clock.h"

/* It lies there, and the next agent, which has the folder by now, has written none yet. */
static void a_killed_agents_history_is_not_read(void **state) {
  monitored *made = *state;
  even_chaos_job job = {.started_ns = even_clock_ns()};
  even_text_add(&job.folder, made->folder);
  monitored_start(made);
  monitored_steps(made, 3, 8);
  monitored_committed(made);
  even_chaos_read_history(&job);
  assert_non_null(job.history);
  assert_int_equal(even_chaos_last_step(&job), 2);
  monitored_steps(made, 2, 8);
  monitored_committed(made);
  even_chaos_read_history(&job);
  assert_int_equal(even_chaos_last_step(&job), 4);
  even_history_close(job.history);
  job.history = NULL;
  job.started_ns = even_clock_ns(); /* another agent is started */
  even_chaos_read_history(&job);
  assert_null(job.history);
  assert_int_equal(even_chaos_last_step(&job), -1);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_start(made); /* it has its own by now */
  even_chaos_read_history(&job);
  assert_non_null(job.history);
  assert_int_equal(even_chaos_last_step(&job), -1);
  even_history_close(job.history);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  even_text_free(&job.folder);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_killed_agents_history_is_not_read, monitored_set_up, monitored_tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
