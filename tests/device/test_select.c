/* Devices that are found, and those that are chosen, on invented machines. */
#include "base/alloc.h"
#include "device/machine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static machine host;

static int make_two_sockets(void **state) {
  (void)state;
  machine_make(&host, TWO_SOCKETS);
  return 0;
}

static int make_two_cores(void **state) {
  (void)state;
  machine_make(&host, TWO_CORES);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  machine_remove(&host);
  return 0;
}

static void quota(const char *quota_us) {
  machine_file(&host, "/proc/self/cgroup", "1:cpu:/\n");
  machine_file(&host, "/proc/self/mountinfo", "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n");
  machine_file(&host, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota_us);
  machine_file(&host, "/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
}

static void check(const even_device *device, const char *name, size_t cpu_count, int first_cpu, double cores) {
  assert_string_equal(device->name, name);
  assert_int_equal(device->cpu_count, cpu_count);
  assert_int_equal(device->cpus[0], first_cpu);
  assert_float_equal(device->cores, cores, 1e-9);
}

static void expect_error(const char *spec, int ranks, even_status status, const char *words) {
  even_device_list list;
  assert_int_equal(even_device_select_from(&host.source, spec, ranks, &list), status);
  assert_non_null(strstr(even_error_last()->what, words));
  assert_true(even_error_last()->fix[0] != '\0');
  assert_null(list.items);
  assert_int_equal(list.count, 0);
}

static void discovers_cores_and_nodes(void **state) {
  even_device_list list;
  (void)state;
  assert_int_equal(machine_devices(&host, &list), EVEN_OK);
  assert_int_equal(list.count, 10);
  check(&list.items[0], "cpu:0", 2, 0, 1);
  check(&list.items[7], "cpu:7", 2, 14, 1);
  check(&list.items[9], "numa:1", 8, 8, 4);
  assert_int_equal(list.items[7].numa_node, 1);
  assert_int_equal(list.items[9].memory_bytes, UINT64_C(8) << 30);
  even_device_list_free(&list);
}

static void affinity_hides_cores(void **state) {
  even_device_list list;
  (void)state;
  host.source.allowed = "3,10-12"; /* one thread of core 1, core 5, one thread of core 6 */
  assert_int_equal(machine_devices(&host, &list), EVEN_OK);
  assert_int_equal(list.count, 5);
  check(&list.items[0], "cpu:0", 1, 3, 1);
  check(&list.items[1], "cpu:1", 2, 10, 1);
  check(&list.items[2], "cpu:2", 1, 12, 1);
  check(&list.items[4], "numa:1", 3, 10, 2);
  even_device_list_free(&list);
}

static void allowed_without_any_cpu_is_an_error(void **state) {
  even_device_list list;
  (void)state;
  host.source.allowed = "99";
  assert_int_equal(machine_devices(&host, &list), EVEN_ERR_DEVICE);
  host.source.allowed = "one";
  assert_int_equal(machine_devices(&host, &list), EVEN_ERR_INPUT);
  host.source.synthetic = "pack:zero";
  assert_int_equal(machine_devices(&host, &list), EVEN_ERR_INPUT);
}

static void named_devices(void **state) {
  even_device_list list;
  (void)state;
  assert_int_equal(even_device_select_from(&host.source, "cpu:1,cpu:4-6,numa:0", 3, &list), EVEN_OK);
  assert_int_equal(list.count, 3);
  check(&list.items[0], "cpu:1", 2, 2, 0.5); /* shared with numa:0 */
  check(&list.items[1], "cpu:4-6", 6, 8, 3);
  check(&list.items[2], "numa:0", 8, 0, 3.5);
  even_device_list_free(&list);
  assert_int_equal(even_device_select_from(&host.source, "cpu", 0, &list), EVEN_OK);
  check(&list.items[0], "cpu", 16, 0, 8);
  assert_int_equal(list.items[0].numa_node, -1);
  even_device_list_free(&list);
}

static void even_cuts(void **state) {
  even_device_list list;
  (void)state;
  assert_int_equal(even_device_select_from(&host.source, NULL, 3, &list), EVEN_OK);
  check(&list.items[0], "cpu:0-1", 4, 0, 2);
  check(&list.items[1], "cpu:2-4", 6, 4, 3);
  check(&list.items[2], "cpu:5-7", 6, 10, 3);
  even_device_list_free(&list);
  assert_int_equal(even_device_select_from(&host.source, NULL, 0, &list), EVEN_OK);
  assert_int_equal(list.count, 2);
  check(&list.items[1], "numa:1", 8, 8, 4);
  even_device_list_free(&list);
}

static void more_ranks_than_cores_share(void **state) {
  even_device_list list;
  (void)state;
  assert_int_equal(even_device_select_from(&host.source, NULL, 3, &list), EVEN_OK);
  assert_int_equal(list.count, 3);
  check(&list.items[0], "cpu:0", 1, 0, 0.5);
  check(&list.items[1], "cpu:0", 1, 0, 0.5);
  check(&list.items[2], "cpu:1", 1, 1, 1);
  even_device_list_free(&list);
}

static void quota_is_divided(void **state) {
  even_device_list list;
  (void)state;
  quota("50000\n");
  assert_int_equal(machine_devices(&host, &list), EVEN_OK);
  check(&list.items[1], "cpu:1", 1, 1, 0.5); /* alone it may use all of the quota */
  even_device_list_free(&list);
  assert_int_equal(even_device_select_from(&host.source, NULL, 2, &list), EVEN_OK);
  check(&list.items[0], "cpu:0", 1, 0, 0.25);
  check(&list.items[1], "cpu:1", 1, 1, 0.25);
  even_device_list_free(&list);
}

static void errors_say_what_exists(void **state) {
  (void)state;
  expect_error("cuda:1", 0, EVEN_ERR_DEVICE, "cuda:1 does not exist: this host has cpu:0, cpu:1");
  expect_error("cpu:2", 0, EVEN_ERR_DEVICE, "cpu:2 does not exist: this host has cpu:0, cpu:1");
  expect_error("cpu:1-2", 0, EVEN_ERR_DEVICE, "cpu:1-2 does not exist");
  expect_error("numa:1", 0, EVEN_ERR_DEVICE, "numa:1 does not exist");
  expect_error("gpu:0", 0, EVEN_ERR_ARGUMENT, "\"gpu:0\" does not name a device");
  expect_error("", 0, EVEN_ERR_ARGUMENT, "\"\" does not name a device");
  expect_error("cpu:0,", 0, EVEN_ERR_ARGUMENT, "\"\" does not name a device");
  expect_error("cpu:-1", 0, EVEN_ERR_ARGUMENT, "does not name a device");
  expect_error("cpu:1-0", 0, EVEN_ERR_ARGUMENT, "does not name a device");
  expect_error("cpu:99999999999999999999", 0, EVEN_ERR_ARGUMENT, "does not name a device");
  expect_error("cuda:0-1", 0, EVEN_ERR_ARGUMENT, "does not name a device");
  expect_error("cpu:0,cpu:00", 0, EVEN_ERR_ARGUMENT, "cpu:0 is named twice");
  expect_error("cpu,numa:0", 0, EVEN_ERR_ARGUMENT, "cpu and numa:0 are the same device");
  expect_error("cpu:0,cpu:1", 3, EVEN_ERR_ARGUMENT, "3 ranks are wanted on 2 named devices");
  expect_error(NULL, -1, EVEN_ERR_ARGUMENT, "-1 ranks are not possible");
  expect_error(NULL, 4097, EVEN_ERR_ARGUMENT, "4097 ranks are not possible");
}

static int allocations_left;

static void *limited_allocate(size_t bytes) {
  return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

static void *limited_reallocate(void *pointer, size_t bytes) {
  return allocations_left-- > 0 ? realloc(pointer, bytes) : NULL;
}

/* Every allocation of a selection fails once: always EVEN_ERR_MEMORY, nothing leaks (the sanitizer looks). */
static void any_allocation_may_fail(void **state) {
  static const even_allocator limited = {limited_allocate, limited_reallocate, free};
  even_allocator before = even_allocator_current;
  even_device_list list;
  even_status status = EVEN_ERR_MEMORY;
  int failures = 0;
  (void)state;
  quota("50000\n");
  while (status != EVEN_OK && failures < 1000) {
    even_allocator_current = limited;
    allocations_left = failures;
    status = even_device_select_from(&host.source, "cpu:0,cpu:1", 0, &list);
    even_allocator_current = before;
    if (status != EVEN_OK) {
      assert_int_equal(status, EVEN_ERR_MEMORY);
      assert_null(list.items);
      failures++;
    }
  }
  assert_true(failures > 10);
  assert_int_equal(status, EVEN_OK);
  assert_int_equal(list.count, 2);
  even_device_list_free(&list);
}

static void this_host_has_a_device(void **state) {
  even_device_list list;
  (void)state;
  assert_int_equal(even_device_select("cpu:0", 1, &list), EVEN_OK);
  assert_true(list.items[0].cores > 0);
  assert_true(list.items[0].memory_bytes > 0);
  even_device_list_free(&list);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(discovers_cores_and_nodes, make_two_sockets, teardown),
      cmocka_unit_test_setup_teardown(affinity_hides_cores, make_two_sockets, teardown),
      cmocka_unit_test_setup_teardown(allowed_without_any_cpu_is_an_error, make_two_sockets, teardown),
      cmocka_unit_test_setup_teardown(named_devices, make_two_sockets, teardown),
      cmocka_unit_test_setup_teardown(even_cuts, make_two_sockets, teardown),
      cmocka_unit_test_setup_teardown(more_ranks_than_cores_share, make_two_cores, teardown),
      cmocka_unit_test_setup_teardown(quota_is_divided, make_two_cores, teardown),
      cmocka_unit_test_setup_teardown(errors_say_what_exists, make_two_cores, teardown),
      cmocka_unit_test_setup_teardown(any_allocation_may_fail, make_two_cores, teardown),
      cmocka_unit_test(this_host_has_a_device),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
