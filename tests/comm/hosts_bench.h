/* What all-reduces between hosts cost over shaped links, beside what the links and the hosts' own memory allow. */
#ifndef EVEN_TEST_HOSTS_BENCH_H
#define EVEN_TEST_HOSTS_BENCH_H

#include "comm/ranks.h"

#define HOSTS_BENCH_HOSTS 3

/* The links of one run, in Mbit/s. */
typedef struct hosts_bench_links {
  const char *what;
  unsigned speeds[HOSTS_BENCH_HOSTS];
  size_t largest; /* bytes of the largest call */
  bool parts;     /* equal parts beside fitted ones; else the ways */
} hosts_bench_links;

extern const hosts_bench_links hosts_bench_all[];
extern const int hosts_bench_count;

/* A rank's; `argument` is the links of the run. Rank 0 prints. */
int hosts_bench_measure(even_comm *comm, void *argument);

#endif
