/* GPUs of a monitored run, through a made-up NVML: history, page, view, metrics, report (there is no GPU here). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/metrics.h"
#include "monitor/monitored.h"
#include "monitor/parts.h"
#include "monitor/report_run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const gpus[2] = {"", "GPU-00010203"}; /* rank 0 has none */

static void gpus_are_shown_and_their_faults_told(void **state) {
  monitored *made = *state;
  even_text view = EVEN_TEXT_EMPTY;
  monitored_listen(made);
  monitored_put(made, "nvml", "reasons 64\n");
  monitored_put(made, "nvml.xid", "79");
  assert_int_equal(setenv("EVENSTEP_FAKE_NVML_STATE", monitored_path(made, "nvml"), 1), 0);
  made->gpus = gpus;
  made->nvml_library = FAKE_NVML;
  monitored_start(made);
  while (strstr(monitored_heard(), "Xid") == NULL ||
         strstr(monitored_heard(), "heat") == NULL) { /* the watch is a thread of its own */
    (void)usleep(1000);
    assert_int_equal(even_monitor_tick(made->monitor), EVEN_OK);
  }
  assert_non_null(strstr(monitored_heard(), "GPU of rank 1 (cpu:1): Xid 79: the GPU has fallen off the bus|"));
  monitored_steps(made, 20, 8);
  assert_int_equal(even_monitor_view(made->monitor, 300, false, &view), EVEN_OK);
  assert_non_null(strstr(even_text_string(&view), "gpu 87%  1755 MHz  40 C"));
  assert_non_null(
      strstr(even_text_string(&view), "GPU of rank 1 (cpu:1): its clock is held down by heat")); /* it lasts */
  even_text_free(&view);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_int_equal(unsetenv("EVENSTEP_FAKE_NVML_STATE"), 0);
  (void)unlink(monitored_path(made, "nvml"));

  assert_int_equal(monitored_number(made, "SELECT count(*) FROM gpus WHERE rank=0"), 0);
  assert_true(
      monitored_number(made, "SELECT count(*) FROM gpus WHERE rank=1 AND slowed=1 AND memory_bytes=536870912") >= 1);
  assert_int_equal(monitored_number(made, "SELECT count(*) FROM events WHERE event='gpu' AND rank=1 AND value=-1"), 1);
  json_t *data = monitored_page(made);
  json_t *ranks = json_object_get(json_object_get(data, "summary"), "ranks");
  const json_t *gpu = json_object_get(json_array_get(ranks, 1), "gpu");
  assert_true(json_is_null(json_object_get(json_array_get(ranks, 0), "gpu")));
  assert_float_equal(json_number_value(json_object_get(gpu, "utilization")), 0.87, 1e-9);
  assert_float_equal(json_number_value(json_object_get(gpu, "power_watts")), 98.5, 1e-9);
  assert_int_equal(json_integer_value(json_object_get(gpu, "corrected_errors")), 3);
  assert_true(json_is_true(json_object_get(gpu, "slowed")));
  json_decref(data);

  even_report_run run;
  even_text metrics = EVEN_TEXT_EMPTY;
  assert_int_equal(even_report_run_open(made->folder, NULL, &run), EVEN_OK);
  even_monitor_metrics(even_history_state(run.history), 0, &metrics);
  assert_non_null(
      strstr(even_text_string(&metrics), "evenstep_rank_gpu_temperature_celsius{rank=\"1\",device=\"cpu:1\"} 40\n"));
  assert_null(strstr(even_text_string(&metrics), "evenstep_rank_gpu_temperature_celsius{rank=\"0\""));
  assert_non_null(strstr(even_text_string(&metrics), "evenstep_faults_total{kind=\"gpu\"} 2\n"));
  even_text_free(&metrics);
  even_report_run_close(&run);
}

/* Nobody asks NVML, not even for errors that lie there. */
static void gpus_may_go_unwatched(void **state) {
  monitored *made = *state;
  uint64_t every_ns = 0;
  made->gpus = gpus;
  made->nvml_library = FAKE_NVML;
  made->limits.gpu_seconds = (double)INFINITY;
  monitored_start(made);
  assert_null(made->monitor->gpus);
  const even_monitor_rank facts[3] = {{.device = "cpu:0"}, {.device = "cpu:1"}, {.device = "cpu:2"}};
  const char *const more[3] = {"", "GPU-00010203", ""}; /* other ranks: not these either */
  even_monitor_rank_gone(made->monitor, 0);
  even_monitor_rank_gone(made->monitor, 1);
  assert_int_equal(even_monitor_ranks(made->monitor, 3, facts, more), EVEN_OK);
  assert_null(made->monitor->gpus);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_true(even_gpu_watch_every(0, &every_ns) && every_ns == 1000000000u);
  assert_true(even_gpu_watch_every(2.5, &every_ns) && every_ns == 2500000000u);
}

/* What NVML tells of processes: those that are no ranks take the GPU from the rank. */
static void others_on_a_gpu_are_told_apart(void **state) {
  monitored *made = *state;
  even_measure measure;
  char words[96];
  (void)snprintf(words, sizeof words, "user %ld\nused 60\n", (long)getpid());
  monitored_put(made, "nvml", words); /* the rank itself */
  assert_int_equal(setenv("EVENSTEP_FAKE_NVML_STATE", monitored_path(made, "nvml"), 1), 0);
  made->gpus = gpus;
  made->nvml_library = FAKE_NVML;
  monitored_start(made);
  const even_gpu_sample *gpu = &made->monitor->state->rank[1].gpu;
  while (gpu->at_ns == 0) { /* the watch is a thread of its own */
    (void)usleep(1000);
    assert_int_equal(even_monitor_tick(made->monitor), EVEN_OK);
  }
  monitored_steps(made, 20, 8);
  assert_int_equal(gpu->user_count, 1);
  assert_float_equal(gpu->users[0].percent, 60, 1e-9); /* the mean of its samples */
  even_state_measure(made->monitor->state, gpu->at_ns, &measure);
  assert_float_equal(measure.rank[1].gpu_others, 0, 1e-9);
  assert_float_equal(measure.rank[1].gpu_busy, 0.87, 1e-9);
  assert_true(isnan(measure.rank[0].gpu_busy)); /* it has none */
  made->monitor->state->rank[1].gpu.users[1] = (even_gpu_user){.pid = 1, .percent = 45};
  made->monitor->state->rank[1].gpu.user_count = 2;
  even_state_measure(made->monitor->state, gpu->at_ns, &measure);
  assert_float_equal(measure.rank[1].gpu_others, 0.45, 1e-9);
  made->monitor->state->rank[1].gpu.users[0].pid = 2; /* a container: NVML's numbers are the host's */
  even_state_measure(made->monitor->state, gpu->at_ns, &measure);
  assert_true(isnan(measure.rank[1].gpu_others));
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_int_equal(unsetenv("EVENSTEP_FAKE_NVML_STATE"), 0);
  (void)unlink(monitored_path(made, "nvml"));
}

/* By the word of its host's agent, which may say again what lasts. */
static void faults_of_gpus_elsewhere_are_told_alike(void **state) {
  monitored *made = *state;
  even_gpu_news news = {.gpu = 1, .fault = EVEN_GPU_SLOW, .words = "its clock is held down no more"};
  monitored_listen(made);
  monitored_start(made);
  even_monitor_gpu_fault(made->monitor, &news); /* as it was */
  assert_null(strstr(monitored_heard(), "GPU"));
  news.value = 1;
  (void)strcpy(news.words, "its clock is held down by heat");
  even_monitor_gpu_fault(made->monitor, &news);
  even_monitor_gpu_fault(made->monitor, &news);
  const even_gpu_news xid = {.gpu = 1, .fault = EVEN_GPU_XID, .value = 79, .words = "Xid 79: gone"};
  even_monitor_gpu_fault(made->monitor, &xid);
  const even_gpu_news stranger = {.gpu = 7, .fault = EVEN_GPU_XID, .value = 79, .words = "Xid 79: a stranger's"};
  even_monitor_gpu_fault(made->monitor, &stranger);
  news.value = 0;
  even_monitor_gpu_fault(made->monitor, &news);
  assert_non_null(strstr(monitored_heard(), "GPU of rank 1 (cpu:1): Xid 79: gone|"));
  assert_null(strstr(monitored_heard(), "stranger"));
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_int_equal(monitored_number(made, "SELECT count(*) FROM events WHERE event='gpu' AND rank=1"), 3);
  assert_int_equal(monitored_number(made, "SELECT count(*) FROM events WHERE event='gpu' AND value=1"), 1);
  assert_int_equal(monitored_number(made, "SELECT count(*) FROM events WHERE event='gpu' AND value=0"), 1);
  assert_int_equal(monitored_number(made, "SELECT count(*) FROM events WHERE event='gpu' AND value=-1"), 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(gpus_are_shown_and_their_faults_told, monitored_set_up, monitored_tear_down),
      cmocka_unit_test_setup_teardown(gpus_may_go_unwatched, monitored_set_up, monitored_tear_down),
      cmocka_unit_test_setup_teardown(others_on_a_gpu_are_told_apart, monitored_set_up, monitored_tear_down),
      cmocka_unit_test_setup_teardown(faults_of_gpus_elsewhere_are_told_alike, monitored_set_up, monitored_tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
