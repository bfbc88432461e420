/* A loop that does nothing, on a CPU where somebody else wants to work. */
#include "os/busy.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/process.h"

#include <fcntl.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

typedef struct neighbour {
  int32_t cpu;
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

static void spin(void *context, int kept) {
  const neighbour *who = context;
  volatile unsigned long turns = 0;
  cpu_set_t mask;
  (void)kept;
  CPU_ZERO(&mask);
  CPU_SET((size_t)who->cpu, &mask);
  if (who->cpu >= CPU_SETSIZE || even_os.setaffinity(0, sizeof mask, &mask) != 0) {
    return; /* unpinned it would slow another rank */
  }
  be_nice(who->nice);
  for (;;) {
    turns++;
  }
}

even_status even_busy_start(int32_t cpu, double fraction, pid_t *pids, size_t *count) {
  neighbour who = {.cpu = cpu};
  *count = 0;
  if (!(fraction > 0 && fraction < 1) || cpu < 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "a neighbour that leaves %g of CPU %d", fraction, cpu);
  }
  int wanted = even_busy_plan(fraction, &who.nice);
  for (int i = 0; i < wanted; i++) {
    EVEN_TRY(even_process_fork(spin, &who, -1, true, &pids[*count]));
    (*count)++;
  }
  return EVEN_OK;
}
