/* What benches of processes that share a machine have in common. */
#ifndef EVEN_BENCH_TWO_RANKS_H
#define EVEN_BENCH_TWO_RANKS_H

/* Keeps this process on the CPU of its rank, of those that it may use; nothing where these are fewer than the ranks. */
void bench_pin(int rank, int ranks);
/* The middle one of `count` values, which are sorted by it. */
double bench_median(double *values, int count);

#endif
