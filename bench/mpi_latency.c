/* What a small all-reduce between two processes costs from C over MPI, as bench/comm_latency.c measures ours: each on a
 * core of its own, medians over rounds, of fp32 to other memory and in place. Prints JSON, for bench/latency.py, which
 * builds it by the MPI's own mpicc (it is no part of this project's build). mpi_latency [BYTES [ROUNDS]] */
#define _GNU_SOURCE
#include "two_ranks.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#define CALLS 2000
#define MOST_ROUNDS 1001

/* Seconds of one call. */
static double measure_round(const void *from, float *to, int count) {
  (void)MPI_Barrier(MPI_COMM_WORLD);
  double began = MPI_Wtime();
  for (int call = 0; call < CALLS; call++) {
    (void)MPI_Allreduce(from, to, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); /* errors end the job */
  }
  return (MPI_Wtime() - began) / CALLS;
}

int main(int argc, char **argv) {
  static double apart[MOST_ROUNDS];
  static double in_place[MOST_ROUNDS];
  long bytes = argc > 1 ? strtol(argv[1], NULL, 10) : 1024;
  long rounds = argc > 2 ? strtol(argv[2], NULL, 10) : 21;
  int rank = 0;
  int ranks = 0;
  if (bytes < (long)sizeof(float) || bytes > 1 << 30 || rounds < 1 || rounds > MOST_ROUNDS) {
    (void)fprintf(stderr, "mpi_latency [BYTES [ROUNDS]]: at most 2^30 and %d\n", MOST_ROUNDS);
    return 2;
  }
  (void)MPI_Init(&argc, &argv);
  (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  (void)MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  bench_pin(rank, ranks);
  int count = (int)((size_t)bytes / sizeof(float));
  float *from = calloc((size_t)count, sizeof *from);
  float *to = calloc((size_t)count, sizeof *to);
  if (from == NULL || to == NULL) {
    (void)MPI_Abort(MPI_COMM_WORLD, 1);
  }
  for (int round = 0; round < (int)rounds; round++) {
    apart[round] = measure_round(from, to, count);
    in_place[round] = measure_round(MPI_IN_PLACE, to, count);
  }
  if (rank == 0) {
    (void)printf("{\"bytes\": %ld, \"apart_seconds\": %.9f, \"in_place_seconds\": %.9f}\n", bytes,
                 bench_median(apart, (int)rounds), bench_median(in_place, (int)rounds));
  }
  free(from);
  free(to);
  (void)MPI_Finalize();
  return 0;
}
