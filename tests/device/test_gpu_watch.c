/* GPUs that are watched while a job runs, through a made-up NVML (there is no GPU where these tests run). */
#include "device/cuda/watch.h"
#include "os/clock.h"

#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "device/fake_nvml_state.h"

static const char *const uuids[3] = {"GPU-00010203", "", "GPU-10111213"}; /* the rank between them has none */
static const uint64_t fast_ns = 5000000u;
static char state_path[64];

static int set_up(void **state) {
  (void)state;
  (void)strcpy(state_path, "/tmp/evenstep-nvml-XXXXXX");
  int file = mkstemp(state_path);
  assert_true(file >= 0);
  assert_int_equal(close(file), 0);
  assert_int_equal(setenv("EVENSTEP_FAKE_NVML_STATE", state_path, 1), 0);
  return 0;
}

static int tear_down(void **state) {
  static const char *const suffixes[] = {".new", ".xid", ".held"};
  (void)state;
  (void)unsetenv("EVENSTEP_FAKE_NVML_STATE");
  (void)unsetenv("EVENSTEP_FAKE_NVML_ERROR");
  (void)unsetenv("EVENSTEP_FAKE_NVML_HELD");
  for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) { /* of a test that failed */
    char name[96];
    (void)snprintf(name, sizeof name, "%s%s", state_path, suffixes[i]);
    (void)unlink(name);
  }
  return unlink(state_path);
}

static void say(const char *suffix, const char *words) {
  fake_nvml_say(state_path, suffix, words);
}

static even_gpu_watch *open_watch(void) {
  even_gpu_watch *watch = NULL;
  const even_device_source source = {.root = "", .nvml_library = FAKE_NVML};
  assert_int_equal(even_gpu_watch_open(&source, uuids, 3, fast_ns, &watch), EVEN_OK);
  assert_non_null(watch);
  return watch;
}

static even_gpu_sample first_sample(even_gpu_watch *watch, size_t gpu) {
  even_gpu_sample sample = {.at_ns = 0};
  while (sample.at_ns == 0) {
    (void)usleep(1000);
    even_gpu_watch_look(watch, gpu, &sample);
  }
  return sample;
}

static even_gpu_news next_news(even_gpu_watch *watch) {
  even_gpu_news news;
  while (!even_gpu_watch_news(watch, &news)) {
    (void)usleep(1000);
  }
  return news;
}

static void gpus_are_sampled(void **state) {
  even_gpu_sample none;
  even_gpu_news news;
  (void)state;
  even_gpu_watch *watch = open_watch();
  even_gpu_sample sample = first_sample(watch, 0);
  assert_float_equal(sample.clock_mhz, 1755, 0);
  assert_float_equal(sample.temperature_celsius, 40, 0);
  assert_float_equal(sample.power_watts, 98.5, 1e-9);
  assert_float_equal(sample.memory_used_bytes, 536870912, 0);
  assert_float_equal(sample.utilization_percent, 87, 0);
  assert_float_equal(sample.corrected, 3, 0);
  assert_float_equal(sample.uncorrected, 0, 0);
  assert_false(sample.slowed);
  sample = first_sample(watch, 2);
  assert_float_equal(sample.utilization_percent, 12, 0);
  assert_true(isnan(sample.power_watts)); /* refused by this GPU */
  even_gpu_watch_look(watch, 1, &none);
  assert_int_equal(none.at_ns, 0);
  uint64_t before = sample.at_ns;
  while (sample.at_ns == before) { /* again and again */
    even_gpu_watch_look(watch, 2, &sample);
  }
  assert_false(even_gpu_watch_news(watch, &news));
  even_gpu_watch_close(watch);
}

static void faults_are_news(void **state) {
  (void)state;
  even_gpu_watch *watch = open_watch();
  (void)first_sample(watch, 0);
  say("", "reasons 64\n");
  even_gpu_news news = next_news(watch);
  assert_int_equal(news.gpu, 0);
  assert_int_equal(news.fault, EVEN_GPU_SLOW);
  assert_int_equal(news.value, 1);
  assert_string_equal(news.words, "its clock is held down by heat (1755 MHz, 40 degrees, 98 W)");
  say("", "reasons 4\n"); /* a cap on power is usual */
  news = next_news(watch);
  assert_int_equal(news.fault, EVEN_GPU_SLOW);
  assert_int_equal(news.value, 0);
  say("", "uncorrected 2\n");
  news = next_news(watch);
  assert_int_equal(news.fault, EVEN_GPU_ECC);
  assert_int_equal(news.value, 2);
  assert_string_equal(news.words, "2 memory errors that ECC could not correct");
  say(".xid", "79");
  news = next_news(watch);
  assert_int_equal(news.fault, EVEN_GPU_XID);
  assert_int_equal(news.value, 79);
  assert_string_equal(news.words, "Xid 79: the GPU has fallen off the bus");
  say("", "uncorrected 2\nlost 1\n");
  news = next_news(watch);
  assert_int_equal(news.fault, EVEN_GPU_LOST);
  assert_int_equal(news.gpu, 0);
  even_gpu_sample sample = {.at_ns = 0};
  uint64_t before = first_sample(watch, 2).at_ns;
  while (sample.at_ns <= before) { /* the others go on, and it is told once */
    even_gpu_watch_look(watch, 2, &sample);
  }
  assert_false(even_gpu_watch_news(watch, &news));
  even_gpu_watch_close(watch);
}

static void *symbol_of(const char *name, void **library) {
  *library = dlopen(FAKE_NVML, RTLD_NOW);
  assert_non_null(*library);
  void *found = dlsym(*library, name);
  assert_non_null(found);
  return found;
}

/* With a GPU that is lost, the driver refuses to wait at once, and the thread waits by itself. */
static void a_wait_that_is_refused_does_not_spin(void **state) {
  unsigned waits = 0;
  unsigned samples = 0;
  (void)state;
  say("", "deaf 1\n");
  even_gpu_watch *watch = open_watch();
  void *library = NULL;
  void *found = symbol_of("fake_nvml_counts", &library);
  void (*counts)(unsigned *, unsigned *) = NULL;
  memcpy(&counts, &found, sizeof counts);
  counts(&waits, &samples);
  unsigned waits_before = waits;
  unsigned samples_before = samples;
  while (samples - samples_before < 60) { /* of two GPUs */
    (void)usleep(1000);
    counts(&waits, &samples);
  }
  assert_true(waits - waits_before > 0);
  assert_true(waits - waits_before <= samples - samples_before);
  even_gpu_watch_close(watch);
  (void)dlclose(library);
}

/* As of a driver that wakes its GPUs up for minutes. */
static void who_opens_it_does_not_wait_until_nvml_has_begun(void **state) {
  char held[96];
  void *library = NULL;
  void *found = symbol_of("fake_nvml_beginning", &library);
  unsigned (*beginning)(void) = NULL;
  (void)state;
  memcpy(&beginning, &found, sizeof beginning);
  (void)snprintf(held, sizeof held, "%s.held", state_path);
  say(".held", "");
  assert_int_equal(setenv("EVENSTEP_FAKE_NVML_HELD", held, 1), 0);
  even_gpu_watch *watch = open_watch();
  while (beginning() == 0) {
    (void)usleep(1000);
  }
  even_gpu_sample sample;
  even_gpu_news news;
  even_gpu_watch_look(watch, 0, &sample);
  assert_int_equal(sample.at_ns, 0);
  assert_false(even_gpu_watch_news(watch, &news));
  assert_false(even_gpu_watch_is_over(watch));
  assert_int_equal(beginning(), 1);
  assert_int_equal(unlink(held), 0);
  assert_float_equal(first_sample(watch, 0).clock_mhz, 1755, 0);
  even_gpu_watch_close(watch);
  assert_int_equal(unsetenv("EVENSTEP_FAKE_NVML_HELD"), 0);
  (void)dlclose(library);
}

/* Its thread finds that out. */
static void expect_nothing(const char *library, const char *const *names, size_t count) {
  const even_device_source source = {.root = "", .nvml_library = library};
  even_gpu_watch *watch = NULL;
  even_gpu_sample sample;
  even_gpu_news news;
  assert_int_equal(even_gpu_watch_open(&source, names, count, fast_ns, &watch), EVEN_OK);
  assert_non_null(watch);
  while (!even_gpu_watch_is_over(watch)) {
    (void)usleep(1000);
  }
  even_gpu_watch_look(watch, 0, &sample);
  assert_int_equal(sample.at_ns, 0);
  assert_false(even_gpu_watch_news(watch, &news));
  even_gpu_watch_close(watch);
}

static void without_nvml_or_gpus_there_is_nothing(void **state) {
  static const char *const none[2] = {"", NULL};
  static const char *const strangers[1] = {"GPU-f1000000"};
  const even_device_source source = {.root = "", .nvml_library = FAKE_NVML};
  even_gpu_watch *watch = NULL;
  even_gpu_sample sample;
  even_gpu_news news;
  (void)state;
  assert_int_equal(even_gpu_watch_open(&source, none, 2, fast_ns, &watch), EVEN_OK);
  assert_null(watch);
  expect_nothing(FAKE_NVML, strangers, 1);
  expect_nothing(FAKE_NVML_OLD, uuids, 3); /* knows no UUIDs */
  expect_nothing("libevenstep-absent.so", uuids, 3);
  assert_int_equal(setenv("EVENSTEP_FAKE_NVML_ERROR", "9", 1), 0);
  expect_nothing(FAKE_NVML, uuids, 3);
  assert_false(even_gpu_watch_is_over(NULL));
  even_gpu_watch_look(NULL, 0, &sample);
  assert_int_equal(sample.at_ns, 0);
  assert_false(even_gpu_watch_news(NULL, &news));
  even_gpu_watch_close(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(gpus_are_sampled, set_up, tear_down),
      cmocka_unit_test_setup_teardown(faults_are_news, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_wait_that_is_refused_does_not_spin, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_opens_it_does_not_wait_until_nvml_has_begun, set_up, tear_down),
      cmocka_unit_test_setup_teardown(without_nvml_or_gpus_there_is_nothing, set_up, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
