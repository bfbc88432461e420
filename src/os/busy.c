/* A loop that does nothing, on a CPU where somebody else wants to work. */
#include "os/busy.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/calls.h"
#include "os/process.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>

typedef struct neighbour {
  void *mask; /* of the CPU, made before the fork: the child must not allocate */
  size_t mask_bytes;
  int nice;
} neighbour;

int even_busy_plan(double fraction, int *nice) {
  double wanted = (1 - fraction) / fraction; /* their weight, in units of the rank's */
  double whole = ceil(wanted - 1e-9);        /* of a tiny fraction far more than an int holds */
  int count = whole<1 ? 1 : whole>(double) EVEN_BUSY_MOST ? EVEN_BUSY_MOST : (int)whole;
  double each = wanted / count;
  long steps = each >= 1 ? 0 : lround(log(1 / each) / log(1.25));
  *nice = steps > 19 ? 19 : (int)steps;
  return count;
}

/* Where sessions are scheduled as groups (autogroup), the group's own nice value counts, not the process's. */
static void be_nice(int value) {
  char text[16];
  int length = snprintf(text, sizeof text, "%d", value);
  int fd = even_os.open("/proc/self/autogroup", O_WRONLY | O_CLOEXEC, 0);
  if (fd >= 0) {
    (void)!even_os.write(fd, text, (size_t)length); /* switched off: below is all there is */
    (void)even_os.close(fd);
  }
  (void)even_os.setpriority(value);
}

/* Says into `report` whether it has its place (0) or why not (errno). */
static void spin(void *context, int report) {
  const neighbour *who = context;
  volatile unsigned long turns = 0;
  int32_t error_number = even_os.setaffinity(0, who->mask_bytes, who->mask) == 0 ? 0 : errno;
  if (error_number == 0) {
    be_nice(who->nice);
  }
  (void)!even_os.write(report, &error_number, sizeof error_number);
  (void)even_os.close(report);
  if (error_number != 0) {
    return; /* unpinned it would slow another rank */
  }
  for (;;) {
    turns++;
  }
}

static even_status read_report(int32_t cpu, int fd) {
  int32_t error_number = 0;
  ssize_t got = 0;
  do {
    got = even_os.read(fd, &error_number, sizeof error_number);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    return even_fail_errno(errno, "the start of a busy neighbour on CPU %d could not be watched", cpu);
  }
  if (got != (ssize_t)sizeof error_number) {
    return even_fail(EVEN_ERR_SYSTEM, "a busy neighbour on CPU %d ended at its start", cpu);
  }
  if (error_number != 0) {
    (void)even_fail_errno(error_number, "a busy neighbour could not be pinned to CPU %d", cpu);
    return even_error_fix("choose CPUs that this process may use (taskset -p $$)");
  }
  return EVEN_OK;
}

static even_status start_one(int32_t cpu, neighbour *who, pid_t *pid) {
  int ends[2] = {-1, -1};
  if (even_os.pipe2(ends, O_CLOEXEC) != 0) {
    return even_fail_errno(errno, "a pipe could not be made");
  }
  even_status status = even_process_fork(spin, who, ends[1], true, pid);
  (void)even_os.close(ends[1]);
  if (status == EVEN_OK) {
    status = read_report(cpu, ends[0]);
    if (status != EVEN_OK) {
      (void)even_process_signal(*pid, SIGKILL);
      even_process_wait(*pid);
    }
  }
  (void)even_os.close(ends[0]);
  return status;
}

even_status even_busy_start(int32_t cpu, double fraction, pid_t *pids, size_t *count) {
  neighbour who = {.nice = 0};
  *count = 0;
  if (!(fraction > 0 && fraction < 1) || cpu < 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "a neighbour that leaves %g of CPU %d", fraction, cpu);
  }
  int wanted = even_busy_plan(fraction, &who.nice);
  EVEN_TRY(even_process_mask(&cpu, 1, &who.mask, &who.mask_bytes));
  even_status status = EVEN_OK;
  for (int i = 0; i < wanted && status == EVEN_OK; i++) {
    status = start_one(cpu, &who, &pids[*count]);
    *count += status == EVEN_OK;
  }
  even_free(who.mask);
  return status;
}
