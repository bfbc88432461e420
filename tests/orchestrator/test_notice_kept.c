/* Notice that comes while no ranks run. */
#include "orchestrator/job.h"
#include "orchestrator/job_attempt.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>

/* It comes once: the next attempt's ranks are asked. */
static void notice_while_an_attempt_ends_is_kept(void **state) {
  static const struct {
    int number;
    double seconds;
    int kept;
  } cases[] = {{SIGUSR1, 60, SIGUSR1}, {SIGUSR1, 0, 0}, {SIGUSR2, 60, 0}};
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const even_agent_params params = {.notice_seconds = cases[i].seconds};
    even_job job = {.params = &params, .stage = EVEN_JOB_RUNS}; /* all have ended */
    assert_int_equal(even_signals_open(&job.signals), EVEN_OK);
    assert_int_equal(raise(cases[i].number), 0);
    even_job_signals_ready(&job, job.signals.fd);
    assert_int_equal(job.own_notice.signal, cases[i].kept);
    assert_int_equal(job.own_notice.at_ns != 0, cases[i].kept != 0);
    even_signals_close(&job.signals);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(notice_while_an_attempt_ends_is_kept)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
