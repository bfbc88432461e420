/* What a small all-reduce between two processes costs from C, each on a core of its own: medians over rounds, of fp32
 * in the arena and in plain memory, and of that with telemetry: the calls counted, and each recorded. Prints JSON, for
 * bench/comm_bench.py. comm_latency [BYTES [ROUNDS]] */
#include "os/clock.h"
#include "two_ranks.h"

#include <evenstep/comm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 2
#define CALLS 2000
#define MOST_ROUNDS 1001

/* Of a rank: where its calls are counted, and the side that wants records of them. */
typedef struct rings {
  even_telemetry *ring;
  even_telemetry_reader *reader;
} rings;

typedef enum way { ARENA, PLAIN, COUNTED, RECORDED, WAYS } way;

/* Seconds of one call; below 0 where one failed. */
static double measure_round(even_comm *comm, float *data, size_t count) {
  if (even_comm_barrier(comm) != EVEN_OK) {
    return -1;
  }
  uint64_t began = even_clock_ns();
  for (int call = 0; call < CALLS; call++) {
    if (even_comm_all_reduce(comm, data, count, EVEN_F32, EVEN_SUM) != EVEN_OK) {
      return -1;
    }
  }
  return (double)(even_clock_ns() - began) * 1e-9 / CALLS;
}

/* The medians, the ways in turn. */
static bool measure(even_comm *comm, float *plain, size_t count, int rounds, const rings *of, double medians[WAYS]) {
  static double seconds[WAYS][MOST_ROUNDS];
  float *arena = even_comm_arena(comm);
  memset(plain, 0, count * sizeof *plain);
  memset(arena, 0, count * sizeof *arena);
  for (int round = 0; round < rounds; round++) {
    for (way how = ARENA; how < WAYS; how++) {
      even_telemetry_reader_want_calls(of->reader, how == RECORDED);
      if (even_comm_record(comm, how >= COUNTED ? of->ring : NULL, "bench") != EVEN_OK) {
        return false;
      }
      seconds[how][round] = measure_round(comm, how == ARENA ? arena : plain, count);
      if (seconds[how][round] < 0) {
        return false;
      }
    }
  }
  for (way how = ARENA; how < WAYS; how++) {
    medians[how] = bench_median(seconds[how], rounds);
  }
  return true;
}

static int run_rank(const even_comm_params *params, int fd, int ring_fd, int rounds) {
  even_comm *comm = NULL;
  rings of = {NULL, NULL};
  double medians[WAYS];
  bench_pin(params->rank, RANKS);
  if (even_telemetry_open(ring_fd, params->rank, &of.ring) != EVEN_OK ||
      even_telemetry_reader_open(ring_fd, &of.reader) != EVEN_OK || even_comm_open(params, fd, &comm) != EVEN_OK) {
    (void)fprintf(stderr, "comm_latency: %s\n", even_error_last()->what);
    return 1;
  }
  size_t count = params->arena_bytes / sizeof(float);
  float *plain = malloc(params->arena_bytes);
  bool measured = plain != NULL && measure(comm, plain, count, rounds, &of, medians);
  free(plain);
  even_comm_close(comm);
  even_telemetry_reader_close(of.reader);
  even_telemetry_close(of.ring);
  if (params->rank == 0 && measured) {
    (void)printf(
        "{\"bytes\": %zu, \"arena_seconds\": %.9f, \"plain_seconds\": %.9f, \"counted_seconds\": %.9f, "
        "\"recorded_seconds\": %.9f}\n",
        params->arena_bytes, medians[ARENA], medians[PLAIN], medians[COUNTED], medians[RECORDED]);
  }
  return !measured;
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
  int ring_fd = -1;
  if (even_comm_create_segment(&params, &fd) != EVEN_OK ||
      even_telemetry_create_segment(RANKS, 0, &ring_fd) != EVEN_OK) {
    (void)fprintf(stderr, "comm_latency: %s\n", even_error_last()->what);
    return 1;
  }
  pid_t child = fork();
  params.rank = child == 0 ? 1 : 0;
  int failed = child < 0 || run_rank(&params, fd, ring_fd, (int)rounds) != 0;
  int ended = 0;
  if (child > 0) {
    (void)waitpid(child, &ended, 0);
  }
  return failed || ended != 0;
}
