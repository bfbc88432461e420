/* What /proc and the cgroup's files say. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/usage.h"

#include <math.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void a_stat_line_is_read_behind_the_name(void **state) {
  (void)state;
  even_rank_usage usage = {0};
  assert_true(
      even_usage_parse_stat("4711 (py) (thon 3) S 1 4711 4711 0 -1 4194560 100 0 0 0 250 50 30 20 20 0 3 0 12345 "
                            "100000000 2048 18446744073709551615 1 1",
                            100, 4096, &usage));
  assert_float_equal(usage.cpu_seconds, 3.5, 1e-9);
  assert_float_equal(usage.rss_bytes, 2048.0 * 4096, 0);
  assert_false(even_usage_parse_stat("4711 (python) S 1", 100, 4096, &usage));
  assert_false(even_usage_parse_stat("", 100, 4096, &usage));
}

static void both_cgroup_versions_tell_throttling(void **state) {
  (void)state;
  assert_float_equal(even_usage_parse_throttled("nr_periods 10\nnr_throttled 3\nthrottled_time 1500000000\n"), 1.5,
                     1e-9);
  assert_float_equal(even_usage_parse_throttled("usage_usec 5\nnr_throttled 3\nthrottled_usec 2500000\n"), 2.5, 1e-9);
  assert_true(isnan(even_usage_parse_throttled("usage_usec 5\n")));
}

static bool leads_to(const char *cgroup, const char *expected) {
  char path[256];
  for (int which = 0; even_usage_cgroup_path(cgroup, which, path, sizeof path); which++) {
    if (strcmp(path, expected) == 0) {
      return true;
    }
  }
  return false;
}

static void a_process_leads_to_its_cgroup(void **state) {
  (void)state;
  const char *v1 = "12:cpuset:/x\n4:cpu,cpuacct:/evenstep-1/rank-1\n1:name=systemd:/y\n0::/z\n";
  assert_true(leads_to(v1, "/sys/fs/cgroup/cpu,cpuacct/evenstep-1/rank-1/cpu.stat"));
  assert_true(leads_to(v1, "/sys/fs/cgroup/cpu/evenstep-1/rank-1/cpu.stat"));
  assert_true(leads_to("0::/user.slice\n", "/sys/fs/cgroup/user.slice/cpu.stat"));
  assert_true(leads_to("0::/\n", "/sys/fs/cgroup/cpu.stat"));
  assert_false(leads_to("3:cpuset:/a\n", "/sys/fs/cgroup/cpu/a/cpu.stat"));
  assert_false(leads_to("nonsense", "/sys/fs/cgroup/cpu.stat"));
}

static void this_process_has_usage_and_a_gone_one_has_none(void **state) {
  (void)state;
  even_rank_usage usage;
  assert_true(even_usage_look(getpid(), 77, &usage));
  assert_true(usage.rss_bytes > 100000);
  assert_int_equal(usage.at_ns, 77);
  assert_false(even_usage_look(0x7ffffffe, 77, &usage));
  pid_t child = fork();
  if (child == 0) {
    _exit(0);
  }
  siginfo_t ended;
  assert_int_equal(waitid(P_PID, (id_t)child, &ended, WEXITED | WNOWAIT), 0);
  assert_false(even_usage_look(child, 77, &usage)); /* not waited for: it has a stat line, and no memory */
  assert_int_equal(waitpid(child, NULL, 0), child);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_stat_line_is_read_behind_the_name),
      cmocka_unit_test(both_cgroup_versions_tell_throttling),
      cmocka_unit_test(a_process_leads_to_its_cgroup),
      cmocka_unit_test(this_process_has_usage_and_a_gone_one_has_none),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
