/* Control groups of both versions, on invented hosts in a folder (files instead of the kernel's). */
#include "os/cgroup.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/oom.h"
#include "support/fault.h"
#include "support/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static char root[FOLDER_BYTES];

static void write_file(const char *path, const char *text) {
  folder_write(root, path, text);
}

static void assert_file(const char *folder, const char *name, const char *text) {
  char path[600];
  char found[64] = "";
  (void)snprintf(path, sizeof path, "%s/%s", folder, name);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  assert_true(fd >= 0);
  assert_true(read(fd, found, sizeof found - 1) >= 0);
  (void)close(fd);
  assert_string_equal(found, text);
}

static int make_root(void **state) {
  (void)state;
  return folder_make("cgroup", root);
}

static int remove_root(void **state) {
  (void)state;
  fault_reset();
  return folder_remove(root);
}

static const char mounts_v1[] =
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:5 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

static void finds_and_limits_in_version_1(void **state) {
  (void)state;
  even_cgroup own;
  even_cgroup group;
  write_file("proc/self/mountinfo", mounts_v1);
  write_file("proc/self/cgroup", "4:memory:/job/1\n1:cpuacct,cpu:/job\n0::/\n");
  write_file("sys/fs/cgroup/cpu/job/cgroup.procs", "");
  assert_int_equal(even_cgroup_own(root, "cpu", &own), EVEN_OK);
  assert_int_equal(own.version, 1);
  assert_string_equal(own.folder + strlen(root), "/sys/fs/cgroup/cpu/job");
  assert_int_equal(even_cgroup_make(&own, "cpu", "slow", &group), EVEN_OK);
  write_file("sys/fs/cgroup/cpu/job/slow/cpu.cfs_period_us", "");
  write_file("sys/fs/cgroup/cpu/job/slow/cpu.cfs_quota_us", "");
  assert_int_equal(even_cgroup_limit_cpu(&group, 0.25), EVEN_OK);
  assert_file(group.folder, "cpu.cfs_period_us", "10000");
  assert_file(group.folder, "cpu.cfs_quota_us", "2500");
  assert_int_equal(even_cgroup_make(&own, "cpu", "slow", &group), EVEN_OK); /* that one, with what is in it */
  assert_file(group.folder, "cpu.cfs_quota_us", "2500");
  assert_int_equal(even_cgroup_own(root, "memory", &own), EVEN_OK);
  assert_string_equal(own.folder + strlen(root), "/sys/fs/cgroup/memory/job/1");
  assert_int_equal(even_cgroup_own(root, "pids", &own), EVEN_ERR_UNSUPPORTED);
}

static void finds_and_limits_in_version_2(void **state) {
  (void)state;
  even_cgroup own;
  even_cgroup group;
  write_file("proc/self/mountinfo", "30 23 0:26 /user/me /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n");
  write_file("proc/self/cgroup", "0::/user/me/shell\n");
  write_file("sys/fs/cgroup/shell/cgroup.controllers", "cpuset cpu memory\n");
  write_file("sys/fs/cgroup/shell/cgroup.subtree_control", "");
  assert_int_equal(even_cgroup_own(root, "cpu", &own), EVEN_OK);
  assert_int_equal(own.version, 2);
  assert_string_equal(own.folder + strlen(root), "/sys/fs/cgroup/shell"); /* what the container sees of its group */
  assert_int_equal(even_cgroup_own(root, "io", &group), EVEN_ERR_UNSUPPORTED);
  assert_int_equal(even_cgroup_make(&own, "cpu", "slow", &group), EVEN_OK);
  assert_file(own.folder, "cgroup.subtree_control", "+cpu");
  write_file("sys/fs/cgroup/shell/slow/cpu.max", "");
  assert_int_equal(even_cgroup_limit_cpu(&group, 1.5), EVEN_OK);
  assert_file(group.folder, "cpu.max", "15000 10000");
  write_file("sys/fs/cgroup/shell/slow/cpu.max", "");
  assert_int_equal(even_cgroup_limit_cpu(&group, 0.01), EVEN_OK); /* no quota below a millisecond */
  assert_file(group.folder, "cpu.max", "1000 100000");
  assert_int_equal(even_cgroup_limit_cpu(&group, 0), EVEN_ERR_ARGUMENT);
  write_file("proc/self/cgroup", "0::/user/me2\n"); /* not below what is mounted, though it begins like it */
  write_file("sys/fs/cgroup2/cgroup.controllers", "cpu\n");
  assert_int_equal(even_cgroup_own(root, "cpu", &own), EVEN_ERR_UNSUPPORTED);
}

static void reads_what_the_kernel_counted(void **state) {
  (void)state;
  even_cgroup one = {.version = 1};
  even_cgroup two = {.version = 2};
  write_file("one/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n");
  write_file("two/memory.events", "oom 9\noom_kill 4\noom_group_kill 1\n");
  (void)snprintf(one.folder, sizeof one.folder, "%s/one", root);
  (void)snprintf(two.folder, sizeof two.folder, "%s/two", root);
  assert_int_equal(even_cgroup_oom_kills(&one), 3);
  assert_int_equal(even_cgroup_oom_kills(&two), 4);
  (void)strcat(two.folder, "/gone");
  assert_int_equal(even_cgroup_oom_kills(&two), 0);
}

/* As a container of version 2 shows it, where the kernel's log may not be read. */
static void a_kill_for_memory_is_seen_by_the_groups_count(void **state) {
  even_oom_watch watch = {.kernel_log = -1, .grouped = true, .group = {.version = 2}};
  (void)state;
  write_file("pod/memory.events", "low 0\nhigh 0\nmax 71\noom 2\noom_kill 1\noom_group_kill 0\n");
  (void)snprintf(watch.group.folder, sizeof watch.group.folder, "%s/pod", root);
  watch.kills_before = even_cgroup_oom_kills(&watch.group);
  assert_int_equal(watch.kills_before, 1);
  even_oom_watch_read(&watch);
  assert_false(watch.counted);
  write_file("pod/memory.events", "low 0\nhigh 0\nmax 90\noom 3\noom_kill 1\noom_group_kill 0\n");
  even_oom_watch_read(&watch);
  assert_false(watch.counted); /* it was short of memory, and nobody was killed */
  write_file("pod/memory.events", "low 0\nhigh 0\nmax 99\noom 4\noom_kill 2\noom_group_kill 0\n");
  even_oom_watch_read(&watch);
  assert_true(watch.counted);
  even_oom_watch_close(&watch);
}

static void removes_patiently(void **state) {
  (void)state;
  char folder[80];
  (void)snprintf(folder, sizeof folder, "%s/group", root);
  assert_int_equal(mkdir(folder, 0700), 0);
  fault_os(FAULT_rmdir, 1, EBUSY); /* a process that was just killed */
  assert_int_equal(even_cgroup_remove(folder), EVEN_OK);
  fault_reset();
  assert_int_equal(access(folder, F_OK), -1);
  assert_int_equal(even_cgroup_remove(folder), EVEN_OK); /* gone: fine */
  fault_os(FAULT_rmdir, 1, EACCES);
  assert_int_equal(even_cgroup_remove(folder), EVEN_ERR_PERMISSION);
}

static pid_t member;
static char procs[96];
static int sleeps;
static bool seen_alive;

static int never_sleeps(const struct timespec *time) {
  (void)time;
  sleeps++;
  return 0;
}

/* A group that is busy until its member has ended, and in which it is killed now. */
static int busy_until_the_member_ended(const char *path) {
  siginfo_t facts = {.si_pid = 0};
  assert_int_equal(waitid(P_PID, (id_t)member, &facts, WEXITED | WNOHANG | WNOWAIT), 0);
  if (facts.si_pid == member) {
    (void)unlink(procs);
    return rmdir(path);
  }
  assert_int_equal(kill(member, SIGKILL), 0);
  errno = EBUSY;
  return -1;
}

/* The first look comes before it has ended, whatever the scheduler does. */
static int sees_it_alive_first(struct pollfd *watched, nfds_t count, int timeout_ms) {
  if (!seen_alive) {
    seen_alive = true;
    assert_int_equal(timeout_ms, 0);
    return 0;
  }
  return poll(watched, count, timeout_ms);
}

static void waits_for_the_end_of_a_member(void **state) {
  (void)state;
  char folder[80];
  char number[24];
  (void)snprintf(folder, sizeof folder, "%s/group", root);
  (void)snprintf(procs, sizeof procs, "%s/cgroup.procs", folder);
  assert_int_equal(mkdir(folder, 0700), 0);
  member = fork();
  if (member == 0) {
    (void)pause();
    _exit(0);
  }
  (void)snprintf(number, sizeof number, "%ld\n", (long)member);
  write_file("group/cgroup.procs", number);
  sleeps = 0;
  seen_alive = false;
  even_os.nanosleep = never_sleeps;
  even_os.rmdir = busy_until_the_member_ended;
  even_os.poll = sees_it_alive_first;
  assert_int_equal(even_cgroup_remove(folder), EVEN_OK);
  assert_int_equal(sleeps, 0);
  assert_int_equal(waitpid(member, NULL, 0), member);
}

static void leaves_the_parent_as_it_was(void **state) {
  (void)state;
  even_cgroup own = {.version = 2};
  even_cgroup group;
  even_cgroup second;
  (void)snprintf(own.folder, sizeof own.folder, "%s/v2", root);
  write_file("v2/cgroup.subtree_control", "memory\n");
  assert_int_equal(even_cgroup_make(&own, "cpu", "one", &group), EVEN_OK);
  assert_true(group.switched_on);
  write_file("v2/cgroup.subtree_control", "cpu memory\n"); /* as the kernel says it then */
  assert_int_equal(even_cgroup_make(&own, "cpu", "two", &second), EVEN_OK);
  assert_false(second.switched_on);
  assert_file(own.folder, "cgroup.subtree_control", "cpu memory\n");
  assert_int_equal(rmdir(group.folder), 0);
  even_cgroup_switch_off(&second, "cpu"); /* not its doing */
  assert_file(own.folder, "cgroup.subtree_control", "cpu memory\n");
  write_file("v2/two/cgroup.procs", "");
  even_cgroup_switch_off(&group, "cpu"); /* another relies on it */
  assert_file(own.folder, "cgroup.subtree_control", "cpu memory\n");
  char path[EVEN_CGROUP_PATH + 64];
  (void)snprintf(path, sizeof path, "%s/cgroup.procs", second.folder);
  assert_int_equal(unlink(path), 0);
  assert_int_equal(rmdir(second.folder), 0);
  even_cgroup_switch_off(&group, "cpu");
  assert_file(own.folder, "cgroup.subtree_control", "-cpumemory\n"); /* a file, not the kernel's: written over */
}

static void refusals_come_back(void **state) {
  (void)state;
  even_cgroup own = {.version = 2};
  even_cgroup group;
  (void)snprintf(own.folder, sizeof own.folder, "%s/v2", root);
  write_file("v2/cgroup.subtree_control", "");
  fault_os(FAULT_write, 1, EBUSY); /* a group with processes of its own may not have children with controllers */
  assert_int_equal(even_cgroup_make(&own, "cpu", "slow", &group), EVEN_ERR_IN_USE);
  assert_string_equal(group.folder, "");
  fault_os(FAULT_mkdir, 1, EACCES);
  assert_int_equal(even_cgroup_make(&own, "cpu", "slow", &group), EVEN_ERR_PERMISSION);
  assert_file(own.folder, "cgroup.subtree_control", "-cpu"); /* switched on for it, and off again */
  assert_false(group.switched_on);
  assert_string_equal(group.folder, "");
  assert_non_null(strstr(even_error_last()->what, "cannot be made"));
}

static void a_path_that_is_too_long_names_no_group(void **state) {
  (void)state;
  even_cgroup own = {.version = 1};
  even_cgroup group;
  memset(own.folder, 'x', sizeof own.folder - 4);
  own.folder[0] = '/';
  assert_int_equal(even_cgroup_make(&own, "cpu", "slow", &group), EVEN_ERR_OVERFLOW);
  assert_string_equal(group.folder, "");
  assert_false(group.switched_on);
}

/* Cleaning up says nothing: the record is of what went wrong before. */
static void switching_off_keeps_the_record(void **state) {
  (void)state;
  even_cgroup group = {.version = 2, .switched_on = true};
  (void)snprintf(group.folder, sizeof group.folder, "%s/not-there/slow", root);
  assert_int_equal(even_fail(EVEN_ERR_NO_SPACE, "the cause"), EVEN_ERR_NO_SPACE);
  even_cgroup_switch_off(&group, "cpu");
  assert_int_equal(even_error_last()->status, EVEN_ERR_NO_SPACE);
  assert_string_equal(even_error_last()->what, "the cause");
}

static even_status find(void *context) {
  even_cgroup own;
  (void)context;
  return even_cgroup_own(root, "cpu", &own);
}

static void survives_every_fault(void **state) {
  (void)state;
  write_file("proc/self/mountinfo", mounts_v1);
  write_file("proc/self/cgroup", "1:cpu:/\n");
  assert_true(fault_each_allocation(find, NULL) >= 1);
  assert_true(fault_each_os(find, NULL, EIO) >= 4);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(finds_and_limits_in_version_1, make_root, remove_root),
      cmocka_unit_test_setup_teardown(finds_and_limits_in_version_2, make_root, remove_root),
      cmocka_unit_test_setup_teardown(reads_what_the_kernel_counted, make_root, remove_root),
      cmocka_unit_test_setup_teardown(a_kill_for_memory_is_seen_by_the_groups_count, make_root, remove_root),
      cmocka_unit_test_setup_teardown(removes_patiently, make_root, remove_root),
      cmocka_unit_test_setup_teardown(waits_for_the_end_of_a_member, make_root, remove_root),
      cmocka_unit_test_setup_teardown(leaves_the_parent_as_it_was, make_root, remove_root),
      cmocka_unit_test_setup_teardown(refusals_come_back, make_root, remove_root),
      cmocka_unit_test_setup_teardown(a_path_that_is_too_long_names_no_group, make_root, remove_root),
      cmocka_unit_test_setup_teardown(switching_off_keeps_the_record, make_root, remove_root),
      cmocka_unit_test_setup_teardown(survives_every_fault, make_root, remove_root),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
