/* NVIDIA GPUs through made-up driver libraries (there is no GPU where these tests run). */
#include "device/cuda/gpu.h"
#include "device/machine.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static machine host;

static int setup(void **state) {
  (void)state;
  machine_make(&host, TWO_SOCKETS);
  host.source.cuda_library = FAKE_CUDA;
  host.source.nvml_library = FAKE_NVML;
  assert_int_equal(setenv("EVENSTEP_FAKE_GPUS", "2", 1), 0);
  (void)unsetenv("CUDA_VISIBLE_DEVICES");
  return 0;
}

static int teardown(void **state) {
  static const char *const names[] = {"EVENSTEP_FAKE_GPUS", "EVENSTEP_FAKE_CUDA_ERROR", "EVENSTEP_FAKE_BROKEN_GPU",
                                      "EVENSTEP_FAKE_NVML_ERROR", "CUDA_VISIBLE_DEVICES"};
  (void)state;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    (void)unsetenv(names[i]);
  }
  machine_remove(&host);
  return 0;
}

static void reads_all_of_a_gpu(void **state) {
  even_gpu_list list;
  (void)state;
  assert_int_equal(even_gpu_list_read(&host.source, &list), EVEN_OK);
  assert_int_equal(list.count, 2);
  assert_int_equal(list.cuda_version, 12080);
  assert_string_equal(list.driver, "570.86.10");
  assert_string_equal(list.note, "");
  assert_string_equal(list.items[1].name, "Fake GPU 1");
  assert_string_equal(list.items[1].uuid, "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f");
  assert_string_equal(list.items[1].pci_bus, "0000:02:00.0");
  assert_int_equal(list.items[1].memory_bytes, UINT64_C(2) << 30);
  assert_int_equal(list.items[1].memory_free_bytes, 1 << 29);
  assert_int_equal(list.items[0].multiprocessors, 132);
  assert_int_equal(list.items[0].capability_major, 9);
  assert_int_equal(list.items[0].clock_mhz, 1755);
  assert_int_equal(list.items[0].clock_most_mhz, 1980);
  assert_int_equal(list.items[0].memory_clock_mhz, 3201);
  assert_float_equal(list.items[1].temperature_celsius, 41, 0);
  assert_float_equal(list.items[0].power_watts, 98.5, 1e-9);
  assert_float_equal(list.items[0].power_limit_watts, 700, 1e-9);
  assert_true(isnan(list.items[1].power_watts));         /* refused by this GPU */
  assert_true(isnan(list.items[0].utilization_percent)); /* no such function in this NVML */
  even_gpu_list_free(&list);
}

static void expect_none(const char *words) {
  even_gpu_list list;
  assert_int_equal(even_gpu_list_read(&host.source, &list), EVEN_OK);
  assert_int_equal(list.count, 0);
  assert_non_null(strstr(list.note, words));
  even_gpu_list_free(&list);
}

static void absence_is_a_note(void **state) {
  (void)state;
  (void)setenv("EVENSTEP_FAKE_GPUS", "0", 1);
  expect_none("no CUDA-capable device is detected (error 100)");
  (void)setenv("EVENSTEP_FAKE_GPUS", "1", 1);
  (void)setenv("EVENSTEP_FAKE_CUDA_ERROR", "803", 1);
  expect_none("unknown error (error 803)");
  host.source.cuda_library = FAKE_CUDA_OLD;
  expect_none("lacks cuDeviceGetUuid");
  host.source.cuda_library = FAKE_NVML; /* a library, but not that one */
  expect_none("lacks cuInit");
  host.source.cuda_library = "libevenstep-absent.so";
  expect_none("no NVIDIA driver is installed");
}

static void a_broken_gpu_ends_the_list(void **state) {
  even_gpu_list list;
  (void)state;
  (void)setenv("EVENSTEP_FAKE_BROKEN_GPU", "1", 1);
  assert_int_equal(even_gpu_list_read(&host.source, &list), EVEN_OK);
  assert_int_equal(list.count, 1);
  assert_non_null(strstr(list.note, "error 999"));
  even_gpu_list_free(&list);
}

static void without_nvml_temperatures_are_unknown(void **state) {
  even_gpu_list list;
  (void)state;
  (void)setenv("EVENSTEP_FAKE_NVML_ERROR", "9", 1);
  assert_int_equal(even_gpu_list_read(&host.source, &list), EVEN_OK);
  assert_int_equal(list.count, 2);
  assert_non_null(strstr(list.note, "NVML does not start (error 9)"));
  assert_true(isnan(list.items[0].temperature_celsius));
  even_gpu_list_free(&list);
  host.source.nvml_library = "libevenstep-absent.so";
  assert_int_equal(even_gpu_list_read(&host.source, &list), EVEN_OK);
  assert_int_equal(list.count, 2);
  assert_non_null(strstr(list.note, "libevenstep-absent.so was not found"));
  even_gpu_list_free(&list);
}

static void auto_takes_one_rank_a_gpu_near_its_cores(void **state) {
  even_device_list list;
  (void)state;
  assert_int_equal(even_device_select_from(&host.source, NULL, 0, &list), EVEN_OK);
  assert_int_equal(list.count, 2);
  assert_string_equal(list.items[1].name, "cuda:1");
  assert_int_equal(list.items[1].kind, EVEN_DEVICE_CUDA);
  assert_int_equal(list.items[1].cuda_index, 1);
  assert_int_equal(list.items[1].cpu_count, 8);
  assert_int_equal(list.items[1].cpus[0], 8);
  assert_int_equal(list.items[1].numa_node, 1);
  assert_float_equal(list.items[1].cores, 4, 1e-9);
  even_device_list_free(&list);
  /* more ranks than GPUs: the cores */
  assert_int_equal(even_device_select_from(&host.source, NULL, 4, &list), EVEN_OK);
  assert_string_equal(list.items[0].name, "cpu:0-1");
  even_device_list_free(&list);
}

static void a_gpu_leaves_cores_to_cpu_ranks(void **state) {
  even_device_list list;
  (void)state;
  assert_int_equal(even_device_select_from(&host.source, "cuda:0,cpu:0-2", 2, &list), EVEN_OK);
  assert_int_equal(list.items[0].cpu_count, 2);
  assert_int_equal(list.items[0].cpus[0], 6);
  assert_float_equal(list.items[0].cores, 1, 1e-9);
  assert_float_equal(list.items[1].cores, 3, 1e-9);
  even_device_list_free(&list);
  /* none left: it shares them */
  assert_int_equal(even_device_select_from(&host.source, "cuda:0,numa:0", 2, &list), EVEN_OK);
  assert_int_equal(list.items[0].cpu_count, 8);
  assert_float_equal(list.items[0].cores, 2, 1e-9);
  even_device_list_free(&list);
}

static void visible_devices_are_renumbered(void **state) {
  even_device_list list;
  (void)state;
  (void)setenv("CUDA_VISIBLE_DEVICES", "1", 1);
  assert_int_equal(even_device_select_from(&host.source, "cuda:0", 0, &list), EVEN_OK);
  assert_string_equal(list.items[0].model, "Fake GPU 1");
  assert_string_equal(list.items[0].uuid, "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f");
  even_device_list_free(&list);
  assert_int_equal(even_device_select_from(&host.source, "cuda:1", 0, &list), EVEN_ERR_DEVICE);
  assert_non_null(strstr(even_error_last()->what, "cpu:7, numa:0, numa:1, cuda:0"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(reads_all_of_a_gpu, setup, teardown),
      cmocka_unit_test_setup_teardown(absence_is_a_note, setup, teardown),
      cmocka_unit_test_setup_teardown(a_broken_gpu_ends_the_list, setup, teardown),
      cmocka_unit_test_setup_teardown(without_nvml_temperatures_are_unknown, setup, teardown),
      cmocka_unit_test_setup_teardown(auto_takes_one_rank_a_gpu_near_its_cores, setup, teardown),
      cmocka_unit_test_setup_teardown(a_gpu_leaves_cores_to_cpu_ranks, setup, teardown),
      cmocka_unit_test_setup_teardown(visible_devices_are_renumbered, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
