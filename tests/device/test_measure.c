/* Measuring: what is counted, scored, and said when a part of it fails. */
#include "device/cpu/crew.h"
#include "device/cpu/simd.h"
#include "device/cpu/speed.h"
#include "device/machine.h"
#include "device/measure.h"
#include "device/profile.h"
#include "os/file.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "support/fault.h"

static even_device_list devices;
static machine folder;

static int setup(void **state) {
  (void)state;
  machine_make(&folder, TWO_CORES);
  return even_device_select("cpu:0", 1, &devices) != EVEN_OK;
}

static int teardown(void **state) {
  (void)state;
  fault_reset();
  even_device_list_free(&devices);
  machine_remove(&folder);
  return 0;
}

static even_measure_params quick(const char *python) {
  return (even_measure_params){.devices = &devices,
                               .folder = folder.root,
                               .python = python,
                               .seconds = 0.02,
                               .rounds = 1,
                               .disk_seconds = 0.01,
                               .cache_bytes = 1 << 20};
}

/* An interpreter that plays the worker. */
static const char *worker(const char *script) {
  static char path[128];
  char content[1024];
  (void)snprintf(content, sizeof content, "#!/bin/sh\n%s\n", script);
  machine_file(&folder, "/python", content);
  (void)snprintf(path, sizeof path, "%s/python", folder.root);
  assert_int_equal(chmod(path, 0755), 0);
  return path;
}

static void count_up(void *context, size_t index) {
  (void)index;
  atomic_fetch_add((atomic_int *)context, 1);
}

static void a_crew_runs_on_every_thread(void **state) {
  atomic_int count = 0;
  (void)state;
  assert_int_equal(even_crew_run(&devices.items[0], 5, count_up, &count), EVEN_OK);
  assert_int_equal(count, 5);
  fault_os(FAULT_thread_create, 3, EAGAIN);
  assert_int_not_equal(even_crew_run(&devices.items[0], 5, count_up, &count), EVEN_OK);
  assert_int_equal(count, 7); /* two had started and have ended */
  int32_t nowhere = 1 << 20;
  even_device absent = {.name = "cpu:9", .cpus = &nowhere, .cpu_count = 1};
  assert_int_not_equal(even_crew_run(&absent, 1, count_up, &count), EVEN_OK);
  assert_non_null(strstr(even_error_last()->what, "cpu:9"));
  assert_int_equal(count, 7);
}

static even_status bandwidth(void *context) {
  even_cpu_bandwidth out;
  (void)context;
  return even_cpu_bandwidth_measure(&devices.items[0], 2, 1 << 20, 0.002, &out);
}

static void bandwidth_survives_any_allocation(void **state) {
  even_cpu_bandwidth out;
  (void)state;
  assert_int_equal(even_cpu_bandwidth_measure(&devices.items[0], 2, 1 << 20, 0.02, &out), EVEN_OK);
  assert_true(out.cpu_fraction > 0 && out.cpu_fraction < 1.1);
  assert_true(out.copy_gb_per_second > 0.01 && out.read_gb_per_second > 0.01);
  assert_true(fault_each_allocation(bandwidth, NULL) >= 6);
}

static void in_c_without_an_interpreter(void **state) {
  even_measure_params params = quick(NULL);
  even_measure_result result;
  (void)state;
  assert_int_equal(even_measure(&params, &result), EVEN_OK);
  assert_string_equal(result.kernels, "C");
  assert_true(result.items[0].measured);
  assert_true(result.items[0].matmul_fp32_gflops > 0);
  assert_true(isnan(result.items[0].matmul_bf16_gflops));
  assert_float_equal(result.items[0].relative_score, 1, 0);
  assert_true(result.disk.write_mb_per_second > 0);
  even_measure_result_free(&result);
}

static void what_the_worker_says_is_taken(void **state) {
  even_measure_params params =
      quick(worker("echo '{\"torch\": \"2.6.0\"}'; read x <&$EVENSTEP_REQUESTS_FD; "
                   "echo '{\"name\": \"cpu:0\", \"matmul_fp32_gflops\": 120, \"matmul_bf16_gflops\": 240.5}'; "
                   "read x <&$EVENSTEP_REQUESTS_FD"));
  even_measure_result result;
  (void)state;
  assert_int_equal(even_measure(&params, &result), EVEN_OK);
  assert_string_equal(result.kernels, "torch 2.6.0");
  assert_string_equal(result.note, "");
  assert_float_equal(result.items[0].matmul_fp32_gflops, 120, 0);
  assert_float_equal(result.items[0].matmul_bf16_gflops, 240.5, 0);
  even_measure_result_free(&result);
}

static void expect_c(const char *script, const char *words) {
  even_measure_params params = quick(worker(script));
  even_measure_result result;
  assert_int_equal(even_measure(&params, &result), EVEN_OK);
  assert_string_equal(result.kernels, "C");
  assert_non_null(strstr(result.note, words));
  assert_true(result.items[0].matmul_fp32_gflops < 1e6);
  even_measure_result_free(&result);
}

static void a_worker_that_fails_is_replaced(void **state) {
  (void)state;
  expect_c("echo 'no torch here' >&2; exec 2>&-; exit 1", "no torch here");
  expect_c("echo nonsense", "not valid JSON");
  expect_c(
      "echo '{}'; read x <&$EVENSTEP_REQUESTS_FD; echo '{\"error\": \"a bad day\"}'; read x <&$EVENSTEP_REQUESTS_FD",
      "a bad day");
  expect_c(
      "echo '{}'; read x <&$EVENSTEP_REQUESTS_FD; echo '{\"matmul_fp32_gflops\": -1}'; read x <&$EVENSTEP_REQUESTS_FD",
      "no speed for cpu:0");
}

static void a_gpu_needs_torch(void **state) {
  (void)state;
  devices.items[0].kind = EVEN_DEVICE_CUDA;
  (void)snprintf(devices.items[0].name, sizeof devices.items[0].name, "cuda:0");
  even_measure_params params = quick(NULL);
  even_measure_result result;
  assert_int_equal(even_measure(&params, &result), EVEN_ERR_DEVICE);
  assert_non_null(strstr(even_error_last()->what, "cuda:0 can only be measured with torch"));
  even_measure_result_free(&result);
  devices.items[0].kind = EVEN_DEVICE_CPU;
}

static void a_full_disk_is_a_note(void **state) {
  even_measure_params params = quick(NULL);
  even_measure_result result;
  (void)state;
  fault_os_from(FAULT_pwrite, 1, ENOSPC);
  assert_int_equal(even_measure(&params, &result), EVEN_OK);
  assert_true(isnan(result.disk.write_mb_per_second));
  assert_true(result.disk_note[0] != '\0');
  even_measure_result_free(&result);
}

/* 40 like cores: one is measured for all, and the file says so. */
static void like_cores_are_measured_once(void **state) {
  even_device_list many = {0};
  even_measure_result result;
  (void)state;
  many.items = calloc(40, sizeof *many.items);
  assert_non_null(many.items);
  many.count = 40;
  for (size_t i = 0; i < many.count; i++) {
    many.items[i] = devices.items[0];
    (void)snprintf(many.items[i].name, sizeof many.items[i].name, "cpu:%zu", i);
    many.items[i].numa_node = i < 20 ? 0 : 1;
  }
  even_measure_params params = quick(NULL);
  params.devices = &many;
  assert_int_equal(even_measure(&params, &result), EVEN_OK);
  assert_int_equal(result.items[19].like, 0);
  assert_int_equal(result.items[39].like, 20);
  assert_true(result.items[39].measured);
  assert_float_equal(result.items[39].relative_score, result.items[20].relative_score, 0);
  even_measure_result_free(&result);
  free(many.items);
}

/* What is written can be read back as speeds. */
static void the_file_is_read_back(void **state) {
  even_measurement items[2] = {{.like = 0, .measured = true, .relative_score = 0.25},
                               {.like = 1, .measured = false, .note = "torch cannot"}};
  even_measure_result result = {.items = items, .count = 2};
  even_device two[2];
  even_device_list list = {two, 2};
  even_text text = EVEN_TEXT_EMPTY;
  even_host host;
  double speeds[2];
  char path[128];
  (void)state;
  two[0] = devices.items[0];
  two[1] = devices.items[0];
  (void)snprintf(two[1].name, sizeof two[1].name, "cuda:3");
  two[1].kind = EVEN_DEVICE_CUDA;
  assert_int_equal(even_host_read(&folder.source, ".", &host), EVEN_OK);
  assert_int_equal(even_profile_write(&host, &list, &result, &text), EVEN_OK);
  (void)snprintf(path, sizeof path, "%s/p.json", folder.root);
  assert_int_equal(even_file_replace(path, text.data, text.length), EVEN_OK);
  assert_int_equal(even_profile_speeds(path, &list, speeds), EVEN_OK);
  assert_float_equal(speeds[0], 0.25, 0);
  assert_true(isnan(speeds[1]));
  assert_non_null(strstr(text.data, "torch cannot"));
  even_text_free(&text);
  even_host_free(&host);
}

static void other_work_is_noticed_a_quota_is_none(void **state) {
  even_device device = {.name = "cpu:0", .cores = 1};
  even_measurement item = {.measured = true, .cpu_fraction = 0.5};
  (void)state;
  assert_true(even_measurement_disturbed(&device, &item));
  item.cpu_fraction = 0.95;
  assert_false(even_measurement_disturbed(&device, &item));
  device.cores = 0.5;
  item.cpu_fraction = 0.49;
  assert_false(even_measurement_disturbed(&device, &item));
  item.cpu_fraction = NAN; /* a GPU */
  assert_false(even_measurement_disturbed(&device, &item));
}

static even_status host_read(void *context) {
  even_host host;
  (void)context;
  even_status status = even_host_read(&folder.source, ".", &host);
  even_host_free(&host);
  return status;
}

static void a_host_is_read_in_spite_of_faults(void **state) {
  even_host host;
  (void)state;
  machine_file(&folder, "/etc/os-release", "NAME=x\nPRETTY_NAME=\"Some Linux 1\"\n");
  machine_file(&folder, "/proc/meminfo", "MemTotal: 2048 kB\nMemAvailable:  1024 kB\nSwapTotal: 512 kB\n");
  assert_int_equal(host_read(NULL), EVEN_OK);
  assert_int_equal(even_host_read(&folder.source, ".", &host), EVEN_OK);
  assert_string_equal(host.distribution, "Some Linux 1");
  assert_int_equal(host.memory.total_bytes, 2 << 20);
  assert_int_equal(host.memory.available_bytes, 1 << 20);
  assert_int_equal(host.memory.swap_total_bytes, 512 << 10);
  assert_int_equal(host.devices.items[0].memory_bytes, 2 << 20);
  even_host_free(&host);
  assert_true(fault_each_allocation(host_read, NULL) > 10);
  assert_true(fault_each_os(host_read, NULL, EIO) > 5);
}

static void simd_has_words(void **state) {
  char words[160];
  (void)state;
  assert_true(strlen(even_cpu_simd_words(words, sizeof words)) > 0);
  assert_true((strstr(words, "AVX2") != NULL) || !even_cpu_has_avx2());
  assert_true((strstr(words, "AVX-512F") != NULL) == even_cpu_has_avx512());
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_crew_runs_on_every_thread, setup, teardown),
      cmocka_unit_test_setup_teardown(bandwidth_survives_any_allocation, setup, teardown),
      cmocka_unit_test_setup_teardown(in_c_without_an_interpreter, setup, teardown),
      cmocka_unit_test_setup_teardown(what_the_worker_says_is_taken, setup, teardown),
      cmocka_unit_test_setup_teardown(a_worker_that_fails_is_replaced, setup, teardown),
      cmocka_unit_test_setup_teardown(a_gpu_needs_torch, setup, teardown),
      cmocka_unit_test_setup_teardown(a_full_disk_is_a_note, setup, teardown),
      cmocka_unit_test_setup_teardown(like_cores_are_measured_once, setup, teardown),
      cmocka_unit_test_setup_teardown(the_file_is_read_back, setup, teardown),
      cmocka_unit_test_setup_teardown(other_work_is_noticed_a_quota_is_none, setup, teardown),
      cmocka_unit_test_setup_teardown(a_host_is_read_in_spite_of_faults, setup, teardown),
      cmocka_unit_test_setup_teardown(simd_has_words, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
