/* What /proc and the cgroup's files say. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "device/usage.h"
#include "os/clock.h"
#include "support/sanitizer.h"

#include <math.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

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

static const even_rank_usage nothing;

static void this_process_has_usage_and_a_gone_one_has_none(void **state) {
  (void)state;
  even_rank_usage usage;
  assert_true(even_usage_look(getpid(), 77, &nothing, &usage));
  assert_true(usage.rss_bytes > 100000);
  assert_int_equal(usage.at_ns, 77);
  assert_false(even_usage_look(0x7ffffffe, 77, &nothing, &usage));
  pid_t child = fork();
  if (child == 0) {
    _exit(0);
  }
  siginfo_t ended;
  assert_int_equal(waitid(P_PID, (id_t)child, &ended, WEXITED | WNOWAIT), 0);
  assert_false(even_usage_look(child, 77, &nothing, &usage)); /* not waited for: it has a stat line, and no memory */
  assert_int_equal(waitpid(child, NULL, 0), child);
}

enum { MIB = 1 << 20 };

/* Memory of its own, every page touched. */
static char *touch(size_t bytes) {
  char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(memory != MAP_FAILED);
  memset(memory, 1, bytes);
  return memory;
}

static void live(size_t bytes, uint64_t cpu_ns, int ready) {
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* also when the test fails */
  (void)touch(bytes);
  while (even_clock_thread_cpu_ns() < cpu_ns) {
  }
  (void)!write(ready, "x", 1);
  (void)pause();
  _exit(0);
}

/* A worker with memory of its own, and one below it with CPU time, too; each writes a byte when it is ready. */
static pid_t start_workers(int ready) {
  pid_t worker = fork();
  if (worker == 0) {
    if (fork() == 0) {
      live(8 * MIB, 300000000u, ready);
    }
    live(24 * MIB, 0, ready);
  }
  return worker;
}

static void workers_that_live_are_counted(void **state) {
#if EVEN_TEST_THREADS_WATCHED
  const uint64_t most = 600 * MIB; /* each byte that is touched has shadow bytes beside it */
#else
  const uint64_t most = 60 * MIB;
#endif
  (void)state;
  int ends[2];
  char byte = 0;
  even_rank_usage before;
  even_rank_usage with;
  even_rank_usage later;
  char *shared = touch(64 * MIB); /* a fork has it too, without a page of its own */
  assert_int_equal(pipe(ends), 0);
  assert_true(even_usage_look(getpid(), 1, &nothing, &before));
  assert_int_equal(before.workers, 0);
  pid_t worker = start_workers(ends[1]);
  assert_int_equal(read(ends[0], &byte, 1), 1);
  assert_int_equal(read(ends[0], &byte, 1), 1);
  assert_true(even_usage_look(getpid(), 2, &before, &with));
  assert_int_equal(with.workers, 2);
  assert_true(with.cpu_seconds >= before.cpu_seconds + 0.28); /* ticks are rounded */
  assert_in_range((uint64_t)(with.rss_bytes - before.rss_bytes), 30 * MIB, most);
  assert_int_equal(with.workers_at_ns, 2);
  assert_true(even_usage_look(getpid(), 3, &with, &later)); /* nothing changed: not measured anew */
  assert_int_equal(later.workers_at_ns, 2);
  assert_true(later.workers_bytes >= with.workers_bytes && later.workers_bytes <= with.workers_bytes);
  assert_true(even_usage_look(getpid(), UINT64_C(31000000000), &with, &later));
  assert_int_equal(later.workers_at_ns, UINT64_C(31000000000));
  assert_int_equal(kill(worker, SIGKILL), 0);
  assert_int_equal(waitpid(worker, NULL, 0), worker);
  assert_true(even_usage_look(getpid(), 4, &with, &later));
  assert_int_equal(later.workers, 0);
  assert_true(later.cpu_seconds >= with.cpu_seconds); /* though the time of the orphan below is nobody's now */
  assert_true(later.rss_bytes < with.rss_bytes - 20 * MIB);
  assert_int_equal(munmap(shared, 64 * MIB), 0);
  (void)close(ends[0]);
  (void)close(ends[1]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(both_cgroup_versions_tell_throttling),
      cmocka_unit_test(a_process_leads_to_its_cgroup),
      cmocka_unit_test(this_process_has_usage_and_a_gone_one_has_none),
      cmocka_unit_test(workers_that_live_are_counted),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
