/* Quotas and limits from trees of control groups. */
#include "device/limits.h"
#include "device/machine.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define V1_MOUNTS                                                                               \
  "27 1 254:0 / / rw - ext4 /dev/vda rw\n"                                                      \
  "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n" \
  "33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"                           \
  "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"                           \
  "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
#define V2_MOUNTS "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"

static machine host;
static even_limits limits;

static int setup(void **state) {
  (void)state;
  machine_make(&host, TWO_CORES);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  machine_remove(&host);
  return 0;
}

static void no_groups_no_limits(void **state) {
  (void)state;
  assert_int_equal(even_limits_read(&host.source, &limits), EVEN_OK);
  assert_true(isinf(limits.cpu_cores));
  assert_true(limits.memory_bytes == UINT64_MAX);
}

static void v1_tightest_of_nested_groups(void **state) {
  (void)state;
  machine_file(&host, "/proc/self/mountinfo", V1_MOUNTS);
  machine_file(&host, "/proc/self/cgroup", "4:cpu,cpuacct:/job/rank\n3:memory:/job\n2:cpuset:/\n0::/\n");
  machine_file(&host, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  machine_file(&host, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  machine_file(&host, "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "5000\n");
  machine_file(&host, "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "10000\n");
  machine_file(&host, "/sys/fs/cgroup/cpu,cpuacct/job/rank/cpu.cfs_quota_us", "150000\n");
  machine_file(&host, "/sys/fs/cgroup/cpu,cpuacct/job/rank/cpu.cfs_period_us", "100000\n");
  machine_file(&host, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  machine_file(&host, "/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1073741824\n");
  assert_int_equal(even_limits_read(&host.source, &limits), EVEN_OK);
  assert_float_equal(limits.cpu_cores, 0.5, 1e-12);
  assert_true(limits.memory_bytes == UINT64_C(1) << 30);
  assert_non_null(strstr(limits.cpu_folder, "cpu,cpuacct/job"));
  assert_null(strstr(limits.cpu_folder, "rank"));
  assert_non_null(strstr(limits.memory_folder, "memory/job"));
}

static void v2_tightest_of_nested_groups(void **state) {
  (void)state;
  machine_file(&host, "/proc/self/mountinfo", V2_MOUNTS);
  machine_file(&host, "/proc/self/cgroup", "0::/user.slice/job\n");
  machine_file(&host, "/sys/fs/cgroup/user.slice/cpu.max", "max 100000\n");
  machine_file(&host, "/sys/fs/cgroup/user.slice/memory.max", "4294967296\n");
  machine_file(&host, "/sys/fs/cgroup/user.slice/job/cpu.max", "25000 100000\n");
  machine_file(&host, "/sys/fs/cgroup/user.slice/job/memory.max", "max\n");
  assert_int_equal(even_limits_read(&host.source, &limits), EVEN_OK);
  assert_float_equal(limits.cpu_cores, 0.25, 1e-12);
  assert_true(limits.memory_bytes == UINT64_C(4) << 30);
  /* a device's memory and cores follow */
  even_device_list list;
  assert_int_equal(machine_devices(&host, &list), EVEN_OK);
  assert_float_equal(list.items[0].cores, 0.25, 1e-12);
  assert_true(list.items[0].memory_bytes == UINT64_C(4) << 30);
  even_device_list_free(&list);
}

/* A container without a namespace of its own: the path is the host's, only the container's group is mounted. */
static void container_sees_its_group_as_the_top(void **state) {
  (void)state;
  machine_file(&host, "/proc/self/mountinfo", "32 31 0:29 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  machine_file(&host, "/proc/self/cgroup", "0::/docker/abc/inner\n");
  machine_file(&host, "/sys/fs/cgroup/cpu.max", "200000 100000\n");
  machine_file(&host, "/sys/fs/cgroup/inner/cpu.max", "150000 100000\n");
  assert_int_equal(even_limits_read(&host.source, &limits), EVEN_OK);
  assert_float_equal(limits.cpu_cores, 1.5, 1e-12);
  /* a group that only begins with the same letters is another's */
  machine_file(&host, "/proc/self/cgroup", "0::/docker/abcinner\n");
  machine_file(&host, "/sys/fs/cgroupinner/cpu.max", "10000 100000\n");
  assert_int_equal(even_limits_read(&host.source, &limits), EVEN_OK);
  assert_float_equal(limits.cpu_cores, 2, 1e-12);
  /* moved out of the namespace: only the mounted top is known */
  machine_file(&host, "/proc/self/cgroup", "0::/../other\n");
  assert_int_equal(even_limits_read(&host.source, &limits), EVEN_OK);
  assert_float_equal(limits.cpu_cores, 2, 1e-12);
}

static void nonsense_is_no_limit(void **state) {
  (void)state;
  machine_file(&host, "/proc/self/mountinfo", V2_MOUNTS "no mount\n1 2 3 - cgroup2\n - cgroup2 a b\n");
  machine_file(&host, "/proc/self/cgroup", "0::/\nnothing\n:\n");
  machine_file(&host, "/sys/fs/cgroup/cpu.max", "all of it\n");
  machine_file(&host, "/sys/fs/cgroup/memory.max", "");
  assert_int_equal(even_limits_read(&host.source, &limits), EVEN_OK);
  assert_true(isinf(limits.cpu_cores));
  assert_true(limits.memory_bytes == UINT64_MAX);
  machine_file(&host, "/sys/fs/cgroup/cpu.max", "50000 0\n");
  machine_file(&host, "/sys/fs/cgroup/memory.max", "0\n");
  assert_int_equal(even_limits_read(&host.source, &limits), EVEN_OK);
  assert_true(isinf(limits.cpu_cores));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(no_groups_no_limits, setup, teardown),
      cmocka_unit_test_setup_teardown(v1_tightest_of_nested_groups, setup, teardown),
      cmocka_unit_test_setup_teardown(v2_tightest_of_nested_groups, setup, teardown),
      cmocka_unit_test_setup_teardown(container_sees_its_group_as_the_top, setup, teardown),
      cmocka_unit_test_setup_teardown(nonsense_is_no_limit, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
