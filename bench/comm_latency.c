/* What a small all-reduce between two processes costs from C, each on a core of its own: medians over rounds, of fp32
 * in the arena and in plain memory. Prints JSON, for bench/comm_bench.py. comm_latency [BYTES [ROUNDS]] */
#include "os/clock.h"

#include <evenstep/comm.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 2
#define CALLS 2000
#define MOST_ROUNDS 1001

static void pin(int rank) {
  cpu_set_t all;
  int seen = 0;
  if (sched_getaffinity(0, sizeof all, &all) != 0 || CPU_COUNT(&all) < RANKS) {
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

/* Seconds of one call, the median of the rounds; below 0 where a call failed. */
static double measure(even_comm *comm, float *data, size_t count, int rounds) {
  static double seconds[MOST_ROUNDS];
  memset(data, 0, count * sizeof *data);
  for (int round = 0; round < rounds; round++) {
    if (even_comm_barrier(comm) != EVEN_OK) {
      return -1;
    }
    uint64_t began = even_clock_ns();
    for (int call = 0; call < CALLS; call++) {
      if (even_comm_all_reduce(comm, data, count, EVEN_F32, EVEN_SUM) != EVEN_OK) {
        return -1;
      }
    }
    seconds[round] = (double)(even_clock_ns() - began) * 1e-9 / CALLS;
  }
  qsort(seconds, (size_t)rounds, sizeof *seconds, by_size);
  return seconds[rounds / 2];
}

static int run_rank(const even_comm_params *params, int fd, int rounds) {
  even_comm *comm = NULL;
  pin(params->rank);
  if (even_comm_open(params, fd, &comm) != EVEN_OK) {
    (void)fprintf(stderr, "comm_latency: %s\n", even_error_last()->what);
    return 1;
  }
  size_t count = params->arena_bytes / sizeof(float);
  float *plain = malloc(params->arena_bytes);
  double arena_seconds = plain == NULL ? -1 : measure(comm, even_comm_arena(comm), count, rounds);
  double plain_seconds = arena_seconds < 0 ? -1 : measure(comm, plain, count, rounds);
  free(plain);
  even_comm_close(comm);
  if (params->rank == 0 && plain_seconds >= 0) {
    (void)printf("{\"bytes\": %zu, \"arena_seconds\": %.9f, \"plain_seconds\": %.9f}\n", params->arena_bytes,
                 arena_seconds, plain_seconds);
  }
  return plain_seconds < 0;
}

int main(int argc, char **argv) {
  long bytes = argc > 1 ? strtol(argv[1], NULL, 10) : 1024;
  long rounds = argc > 2 ? strtol(argv[2], NULL, 10) : 21;
  if (bytes < (long)sizeof(float) || bytes > 1 << 30 || rounds < 1 || rounds > MOST_ROUNDS) {
    (void)fprintf(stderr, "comm_latency [BYTES [ROUNDS]]: at most 2^30 and %d\n", MOST_ROUNDS);
    return 2;
  }
  even_comm_params params = {.size = sizeof params,
                             .ranks = RANKS,
                             .arena_bytes = (size_t)bytes / sizeof(float) * sizeof(float),
                             .timeout_seconds = 60,
                             .spin = -1};
  int fd = -1;
  if (even_comm_create_segment(&params, &fd) != EVEN_OK) {
    (void)fprintf(stderr, "comm_latency: %s\n", even_error_last()->what);
    return 1;
  }
  pid_t child = fork();
  params.rank = child == 0 ? 1 : 0;
  int failed = child < 0 || run_rank(&params, fd, (int)rounds) != 0;
  int ended = 0;
  if (child > 0) {
    (void)waitpid(child, &ended, 0);
  }
  return failed || ended != 0;
}
