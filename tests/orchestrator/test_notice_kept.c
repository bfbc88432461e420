/* Notice that comes while no ranks run. */
#include "orchestrator/aside.h"
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

/* For other places to take part. */
static void it_is_kept_where_the_job_is_opened_anew(void **state) {
  even_aside aside = {.count = 0};
  const even_agent_params params = {.notice_seconds = 60, .aside = &aside};
  even_job job = {.params = &params, .own_notice = {.signal = SIGUSR1, .at_ns = 5}};
  even_job next = {.params = &params};
  (void)state;
  even_elastic_keep(&job);
  assert_true(even_elastic_take(&next));
  assert_int_equal(next.own_notice.signal, SIGUSR1);
  assert_int_equal(next.own_notice.at_ns, 5);
  even_aside_close(&aside);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(notice_while_an_attempt_ends_is_kept),
                                     cmocka_unit_test(it_is_kept_where_the_job_is_opened_anew)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
