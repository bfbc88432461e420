/* Reading gpu_profiles.json. */
#include "device/device.h"
#include "device/machine.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static machine host;
static char path[128];
static even_device_list devices;
static double speeds[4];

static int setup(void **state) {
  (void)state;
  machine_make(&host, "pack:1 core:4 pu:1");
  (void)snprintf(path, sizeof path, "%s/profile.json", host.root);
  return even_device_select_from(&host.source, "cpu:0,cpu:1,cpu:0-1,cpu:2-3", 0, &devices) != EVEN_OK;
}

static int teardown(void **state) {
  (void)state;
  even_device_list_free(&devices);
  machine_remove(&host);
  return 0;
}

static void scores_by_name_and_by_sum(void **state) {
  (void)state;
  machine_file(&host, "/profile.json",
               "{\"format\": \"evenstep-profile-1\", \"more\": [], \"devices\": ["
               "{\"name\": \"cpu:0\", \"cpus\": [0], \"relative_score\": 1},"
               "{\"name\": \"cpu:2\", \"cpus\": [2], \"relative_score\": 0.5},"
               "{\"name\": \"cpu:1\", \"cpus\": [1], \"relative_score\": 0.25}]}");
  assert_int_equal(even_profile_speeds(path, &devices, speeds), EVEN_OK);
  assert_float_equal(speeds[0], 1, 0);
  assert_float_equal(speeds[1], 0.25, 0);
  assert_float_equal(speeds[2], 1.25, 1e-12);
  assert_true(isnan(speeds[3])); /* cpu:3 is unknown */
}

static void a_disturbed_score_is_unknown(void **state) {
  (void)state;
  machine_file(&host, "/profile.json",
               "{\"format\": \"evenstep-profile-1\", \"devices\": ["
               "{\"name\": \"cpu:0\", \"cpus\": [0], \"relative_score\": 1, \"disturbed\": false},"
               "{\"name\": \"cpu:2\", \"cpus\": [2], \"relative_score\": 0.5},"
               "{\"name\": \"cpu:1\", \"cpus\": [1], \"relative_score\": 0.01, \"disturbed\": true}]}");
  assert_int_equal(even_profile_speeds(path, &devices, speeds), EVEN_OK);
  assert_float_equal(speeds[0], 1, 0);
  assert_true(isnan(speeds[1]));
  assert_true(isnan(speeds[2])); /* the set that cpu:1 belongs to */
}

/* "cpu:0" of another machine is another processor: nobody's speed here. */
static void another_machines_scores_are_unknown(void **state) {
  (void)state;
  for (size_t i = 0; i < devices.count; i++) {
    (void)snprintf(devices.items[i].model, sizeof devices.items[i].model, "Fast 9000");
  }
  machine_file(&host, "/profile.json",
               "{\"format\": \"evenstep-profile-1\", \"host\": \"other\", \"devices\": ["
               "{\"name\": \"cpu:0\", \"cpus\": [0], \"model\": \"Fast 9000\", \"relative_score\": 1},"
               "{\"name\": \"cpu:1\", \"cpus\": [1], \"model\": \"Slow 100\", \"relative_score\": 0.25},"
               "{\"name\": \"cpu:2\", \"cpus\": [2], \"relative_score\": 0.5},"
               "{\"name\": \"cpu:3\", \"cpus\": [3], \"model\": \"Fast 9000\", \"relative_score\": 0.125}]}");
  assert_int_equal(even_profile_speeds(path, &devices, speeds), EVEN_OK);
  assert_float_equal(speeds[0], 1, 0); /* the same model, whatever the host is called now */
  assert_true(isnan(speeds[1]));
  assert_true(isnan(speeds[2])); /* cpu:0-1 */
  assert_float_equal(speeds[3], 0.625, 1e-12);
}

static void a_core_that_comes_twice_counts_once(void **state) {
  (void)state;
  machine_file(&host, "/profile.json",
               "{\"format\": \"evenstep-profile-1\", \"devices\": ["
               "{\"name\": \"cpu:0\", \"cpus\": [0], \"relative_score\": 1},"
               "{\"name\": \"cpu:0\", \"cpus\": [0], \"relative_score\": 1},"
               "{\"name\": \"cpu:2\", \"cpus\": [2, 2], \"relative_score\": 0.5},"
               "{\"name\": \"cpu:3\", \"cpus\": [3], \"relative_score\": 0.25}]}");
  assert_int_equal(even_profile_speeds(path, &devices, speeds), EVEN_OK);
  assert_true(isnan(speeds[2])); /* cpu:0-1: nothing is known of 1 */
  assert_float_equal(speeds[3], 0.75, 1e-12);
}

static void expect(const char *content, const char *words) {
  machine_file(&host, "/profile.json", content);
  assert_int_equal(even_profile_speeds(path, &devices, speeds), EVEN_ERR_INPUT);
  assert_non_null(strstr(even_error_last()->what, words));
  assert_non_null(strstr(even_error_last()->what, path));
  assert_non_null(strstr(even_error_last()->fix, "evenstep profile"));
}

#define PROFILE(devices) "{\"format\": \"evenstep-profile-1\", \"devices\": " devices "}"

static void errors_say_what_is_wrong(void **state) {
  (void)state;
  expect("speed: 3", "is not valid JSON: line 1");
  expect("", "is not valid JSON");
  expect("[1, 2]", "its format is missing");
  expect("{\"format\": \"evenstep-profile-2\", \"devices\": []}", "its format is evenstep-profile-2");
  expect("{\"format\": \"evenstep-profile-1\"}", "no list of devices");
  expect(PROFILE("[{\"relative_score\": 1}]"), "device 0 has no name");
  expect(PROFILE("[7]"), "device 0 has no name");
  expect(PROFILE("[{\"name\": \"cpu:0\"}]"), "cpu:0 has no relative_score");
  expect(PROFILE("[{\"name\": \"cpu:0\", \"relative_score\": null}]"), "cpu:0 has no relative_score");
  expect(PROFILE("[{\"name\": \"cpu:0\", \"relative_score\": \"fast\"}]"), "of cpu:0 is not a number");
  expect(PROFILE("[{\"name\": \"cpu:0\", \"relative_score\": 0}]"), "of cpu:0 is 0; a speed is above 0");
  expect(PROFILE("[{\"name\": \"cpu:9\", \"relative_score\": -0.5}]"), "of cpu:9 is -0.5; a speed is above 0");
  expect(PROFILE("[{\"name\": \"cpu:0\", \"relative_score\": 1, \"matmul_fp32_gflops\": -3}]"),
         "matmul_fp32_gflops of cpu:0 is no speed");
  expect(PROFILE("[{\"name\": \"cpu:0\", \"relative_score\": 1, \"memory_read_gb_per_second\": \"fast\"}]"),
         "memory_read_gb_per_second of cpu:0 is no speed");
  expect(PROFILE("[{\"name\": \"cpu:0\", \"relative_score\": NaN}]"), "is not valid JSON");
  expect(PROFILE("[{\"name\": \"cpu:0\", \"relative_score\": 1e999}]"), "is not valid JSON");
}

/* Two hosts' files: a score of 1 is another speed in each. */
static void strengths_are_of_one_unit_on_all_hosts(void **state) {
  (void)state;
  machine_file(
      &host, "/profile.json",
      "{\"format\": \"evenstep-profile-1\", \"measured_with\": \"torch 2.13.0\", \"devices\": ["
      "{\"name\": \"cpu:0\", \"cpus\": [0], \"relative_score\": 1, \"matmul_fp32_gflops\": 90,"
      " \"memory_bandwidth_gb_per_second\": 10},"
      "{\"name\": \"cpu:1\", \"cpus\": [1], \"relative_score\": 0.5}]}"); /* changed by hand, and what counts */
  devices.items[1].strength = 7;                                          /* by its own host's */
  assert_int_equal(even_profile_strengths(path, &devices), EVEN_OK);
  assert_float_equal(devices.items[0].strength, 30, 1e-12);
  assert_float_equal(devices.items[1].strength, 7, 0);
  assert_float_equal(devices.items[2].strength, 45, 1e-12);
  assert_float_equal(devices.items[3].strength, 0, 0);
  assert_false(devices.items[0].strength_in_c);
  machine_file(&host, "/profile.json",
               "{\"format\": \"evenstep-profile-1\", \"measured_with\": \"C\", \"devices\": ["
               "{\"name\": \"cpu:2\", \"cpus\": [2], \"relative_score\": 0.5},"
               "{\"name\": \"cpu:3\", \"cpus\": [3], \"relative_score\": 1, \"matmul_fp32_gflops\": 4,"
               " \"memory_bandwidth_gb_per_second\": 1}]}");
  assert_int_equal(even_profile_strengths(path, &devices), EVEN_OK);
  assert_float_equal(devices.items[3].strength, 3, 1e-12);
  assert_true(devices.items[3].strength_in_c);
}

/* Of a file that does not say what its scores are of, or without a measure of memory (another figure), none is known.
 */
static void scores_of_an_unknown_unit_are_no_strengths(void **state) {
  static const char *const files[] = {
      "{\"format\": \"evenstep-profile-1\", \"measured_with\": \"C\", \"devices\": ["
      "{\"name\": \"cpu:0\", \"cpus\": [0], \"relative_score\": 1}]}",
      "{\"format\": \"evenstep-profile-1\", \"measured_with\": \"C\", \"devices\": ["
      "{\"name\": \"cpu:0\", \"cpus\": [0], \"relative_score\": 1, \"matmul_fp32_gflops\": 90,"
      " \"memory_bandwidth_gb_per_second\": null}]}",
      "{\"format\": \"evenstep-profile-1\", \"devices\": ["
      "{\"name\": \"cpu:0\", \"cpus\": [0], \"relative_score\": 1, \"matmul_fp32_gflops\": 90,"
      " \"memory_bandwidth_gb_per_second\": 10}]}"};
  (void)state;
  for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
    machine_file(&host, "/profile.json", files[i]);
    assert_int_equal(even_profile_strengths(path, &devices), EVEN_OK);
    assert_float_equal(devices.items[0].strength, 0, 0);
  }
  machine_file(&host, "/profile.json", "[]");
  assert_int_equal(even_profile_strengths(path, &devices), EVEN_ERR_INPUT);
  assert_non_null(strstr(even_error_last()->fix, "evenstep profile"));
}

static void a_missing_file_is_not_found(void **state) {
  (void)state;
  assert_int_equal(even_profile_speeds(path, &devices, speeds), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, path));
  assert_non_null(strstr(even_error_last()->fix, "evenstep profile"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(scores_by_name_and_by_sum, setup, teardown),
      cmocka_unit_test_setup_teardown(a_disturbed_score_is_unknown, setup, teardown),
      cmocka_unit_test_setup_teardown(another_machines_scores_are_unknown, setup, teardown),
      cmocka_unit_test_setup_teardown(a_core_that_comes_twice_counts_once, setup, teardown),
      cmocka_unit_test_setup_teardown(errors_say_what_is_wrong, setup, teardown),
      cmocka_unit_test_setup_teardown(strengths_are_of_one_unit_on_all_hosts, setup, teardown),
      cmocka_unit_test_setup_teardown(scores_of_an_unknown_unit_are_no_strengths, setup, teardown),
      cmocka_unit_test_setup_teardown(a_missing_file_is_not_found, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
