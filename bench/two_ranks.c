#include "two_ranks.h"

#include <sched.h>
#include <stdlib.h>

void bench_pin(int rank, int ranks) {
  cpu_set_t all;
  int seen = 0;
  if (sched_getaffinity(0, sizeof all, &all) != 0 || CPU_COUNT(&all) < ranks) {
    return;
  }
  for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (CPU_ISSET(cpu, &all) && seen++ == rank) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      (void)sched_setaffinity(0, sizeof one, &one);
      return;
    }
  }
}

static int by_size(const void *a, const void *b) {
  double first = *(const double *)a;
  double second = *(const double *)b;
  return (first > second) - (first < second);
}

double bench_median(double *values, int count) {
  qsort(values, (size_t)count, sizeof *values, by_size);
  return values[count / 2];
}
