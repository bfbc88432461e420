/* The bench of groups over several hosts: each way of a large all-reduce, and parts by the speeds of links. */
#include "comm/hosts_bench.h"

#include "base/fail.h"
#include "comm/hosts/group.h"
#include "comm/ucx/group.h"
#include "os/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMES 5
#define SMALL_TIMES 101 /* of calls of up to 64 KB */
/* Of 1514 bytes of a packet's so many are data; the shaping counts all. */
#define DATA_OF_PACKET (1448.0 / 1514.0)

const hosts_bench_links hosts_bench_all[] = {
    {"links of 4 Gbit/s each", {4000, 4000, 4000}, (size_t)16 << 20, false},
    {"links of 1 Gbit/s each", {1000, 1000, 1000}, (size_t)16 << 20, false},
    {"links of 800, 800 and 200 Mbit/s", {800, 800, 200}, (size_t)16 << 20, true},
    {"links of 1000, 400 and 200 Mbit/s", {1000, 400, 200}, (size_t)16 << 20, true},
};
const int hosts_bench_count = sizeof hosts_bench_all / sizeof hosts_bench_all[0];

static int by_time(const void *left, const void *right) {
  double a = *(const double *)left;
  double b = *(const double *)right;
  return (a > b) - (a < b);
}

typedef even_status one_call(even_comm *comm, float *data, size_t bytes);

static even_status reduce(even_comm *comm, float *data, size_t bytes) {
  return even_comm_all_reduce(comm, data, bytes / sizeof *data, EVEN_F32, EVEN_MAX);
}

/* Of all ranks the same parts; the result of a scatter is this rank's own. */
static void cut(even_comm *comm, size_t bytes, size_t counts[RANKS_MOST], size_t *own) {
  *own = 0;
  for (int rank = 0; rank < even_comm_ranks(comm); rank++) {
    counts[rank] = bytes / sizeof(float) / (size_t)even_comm_ranks(comm);
    *own += rank < even_comm_rank(comm) ? counts[rank] : 0;
  }
}

static even_status scatter(even_comm *comm, float *data, size_t bytes) {
  size_t counts[RANKS_MOST];
  size_t own = 0;
  cut(comm, bytes, counts, &own);
  return even_comm_reduce_scatter(comm, data, data + own, counts, EVEN_F32, EVEN_MAX);
}

static even_status gather(even_comm *comm, float *data, size_t bytes) {
  size_t counts[RANKS_MOST];
  size_t own = 0;
  cut(comm, bytes, counts, &own);
  return even_comm_all_gather(comm, data + own, data, counts, EVEN_F32);
}

static even_status broadcast(even_comm *comm, float *data, size_t bytes) {
  return even_comm_broadcast(comm, data, bytes, 0);
}

/* The sums on the hosts, and their way back to all ranks there, as if nothing were between the hosts. */
static even_status reduce_inside(even_comm *comm, float *data, size_t bytes) {
  even_hosts_group *group = even_hosts_of(comm);
  size_t counts[RANKS_MOST] = {bytes / sizeof *data};
  EVEN_TRY(even_comm_reduce_scatter(group->inside, data, data, counts, EVEN_F32, EVEN_MAX));
  return even_comm_broadcast(group->inside, data, bytes, 0);
}

/* The median, each call begun together; ms. `all`: until all ranks are done, and not this one. */
static even_status time_calls(even_comm *comm, one_call *call, float *data, size_t bytes, bool all, double *median) {
  double took[SMALL_TIMES + 1];
  int times = bytes > (size_t)64 << 10 ? TIMES : SMALL_TIMES;
  for (int i = 0; i <= times; i++) {
    EVEN_TRY(even_comm_barrier(comm));
    uint64_t began = even_clock_ns();
    EVEN_TRY(call(comm, data, bytes));
    EVEN_TRY(all ? even_comm_barrier(comm) : EVEN_OK);
    took[i] = (double)(even_clock_ns() - began) * 1e-6;
  }
  qsort(took + 1, (size_t)times, sizeof took[0], by_time); /* the first one warms up, and measures links */
  *median = took[1 + times / 2];
  return EVEN_OK;
}

/* The medians of small calls of the group and, one after each of these, of the group between all ranks: what else goes
 * on slows both. Until all ranks are done, which both learn from the same barrier: the groups' own differ. */
static even_status time_in_turn(even_comm *comm, one_call *call, float *data, size_t bytes, double *medians) {
  double took[2][SMALL_TIMES + 1];
  even_comm *through[] = {comm, even_hosts_of(comm)->everyone};
  for (int i = 0; i <= SMALL_TIMES; i++) {
    for (int way = 0; way < 2; way++) {
      EVEN_TRY(even_comm_barrier(comm));
      uint64_t began = even_clock_ns();
      EVEN_TRY(call(through[way], data, bytes));
      EVEN_TRY(even_comm_barrier(comm));
      took[way][i] = (double)(even_clock_ns() - began) * 1e-6;
    }
  }
  for (int way = 0; way < 2; way++) {
    qsort(took[way] + 1, SMALL_TIMES, sizeof took[way][0], by_time);
    medians[way] = took[way][1 + SMALL_TIMES / 2];
  }
  return EVEN_OK;
}

static void take_way(even_comm *comm, const char *way) {
  for (int call = 0; call < EVEN_HOSTS_CALLS; call++) {
    even_ways *ways = &even_hosts_of(comm)->ways[call];
    even_ways_force(ways, even_ways_named(ways, way));
  }
}

/* Equal parts, or by the links' speeds, which the next call measures. */
static void take_parts(even_comm *comm, bool fitted) {
  const even_hosts_group *group = even_hosts_of(comm);
  for (int lane = 0; lane < group->lanes; lane++) {
    if (group->lane[lane] != NULL) {
      even_ucx_fit *fit = &even_ucx_of(group->lane[lane])->fit;
      fit->calls = 0;
      even_ways_force(&fit->ways, fitted ? 0 : 1);
    }
  }
}

static double link_ms(const hosts_bench_links *links, size_t bytes) {
  unsigned slowest = links->speeds[0];
  for (int host = 1; host < HOSTS_BENCH_HOSTS; host++) {
    slowest = links->speeds[host] < slowest ? links->speeds[host] : slowest;
  }
  return (double)bytes * 8 / (slowest * 1e6 * DATA_OF_PACKET) * 1e3;
}

static void print(const hosts_bench_links *links, size_t bytes, const char *what, double ms, bool fitted) {
  double least = link_ms(links, bytes);
  double bound = fitted ? least : least * (1 + (HOSTS_BENCH_HOSTS - 2.0) / HOSTS_BENCH_HOSTS);
  (void)printf("%6zu MB  %-14s %9.2f ms   the slowest link allows %9.2f ms: %3.0f%%\n", bytes >> 20, what, ms, bound,
               bound / ms * 100);
  (void)fflush(stdout);
}

static const struct {
  const char *name;
  one_call *call;
  even_ucx_moved move;
  bool sums; /* then it has no way between all ranks */
} others[] = {{"reduce-scatter", scatter, EVEN_UCX_REDUCE_SCATTER, true},
              {"all-gather", gather, EVEN_UCX_ALL_GATHER, false},
              {"broadcast", broadcast, EVEN_UCX_BROADCAST, false}};
#define OTHERS (sizeof others / sizeof others[0])

static void print_size(size_t bytes, const char *what) {
  const bool small = bytes < (size_t)1 << 20;
  (void)printf("%6zu %s  %-14s", bytes >> (small ? 10 : 20), small ? "KB" : "MB", what);
}

static void print_time(double ms, const char *way, bool last) {
  (void)printf(" %9.2f ms %s%s", ms, way, last ? "\n" : ",");
  (void)fflush(stdout);
}

/* The other collectives, in each way. */
static int measure_others(even_comm *comm, float *data, size_t bytes) {
  static const char *const ways[] = {"turns", "overlap", "lanes", "direct"};
  static const char *const said[] = {"in turns", "overlapped", "over two lanes", "between all ranks"};
  bool prints = even_comm_rank(comm) == 0;
  for (size_t i = 0; i < OTHERS; i++) {
    int count = others[i].sums ? 3 : 4;
    if (prints) {
      print_size(bytes, others[i].name);
    }
    for (int way = 0; way < count; way++) {
      double ms = 0;
      take_way(comm, ways[way]);
      RANKS_EXPECT(comm, time_calls(comm, others[i].call, data, bytes, true, &ms) == EVEN_OK);
      if (prints) {
        print_time(ms, said[way], way + 1 == count);
      }
    }
  }
  return 0;
}

/* Engine "ucx" between all ranks, as if each were a host: its two ways of each. Rank 0 chooses. */
static int measure_network(even_comm *comm, float *data, size_t bytes) {
  even_comm *all = even_hosts_of(comm)->everyone;
  bool prints = even_comm_rank(comm) == 0;
  for (size_t i = 0; i < OTHERS; i++) {
    even_ways *ways = &even_ucx_of(all)->move_ways[others[i].move];
    if (prints) {
      print_size(bytes, others[i].name);
    }
    for (int way = 0; way < 2; way++) {
      double ms = 0;
      even_ways_force(ways, prints ? way : -1);
      RANKS_EXPECT(comm, time_calls(all, others[i].call, data, bytes, true, &ms) == EVEN_OK);
      if (prints) {
        print_time(ms, ways->names[way], way == 1);
      }
    }
  }
  return 0;
}

/* Calls of up to 64 KB: on the hosts and between them, and, what forms no sums, between all ranks. */
static int measure_smallest(even_comm *comm, float *data, size_t bytes) {
  bool prints = even_comm_rank(comm) == 0;
  for (size_t i = 0; i < OTHERS; i++) {
    double medians[2] = {0, 0};
    RANKS_EXPECT(comm, time_in_turn(comm, others[i].call, data, bytes, medians) == EVEN_OK);
    if (prints) {
      print_size(bytes, others[i].name);
      print_time(medians[0], "on the hosts and between them", false);
      print_time(medians[1], others[i].sums ? "between all ranks (another order of sums)" : "between all ranks", true);
    }
  }
  return 0;
}

/* All-reduces that do not go in pieces: their two ways between the hosts. */
static int measure_small_reduce(even_comm *comm, float *data, size_t bytes) {
  bool prints = even_comm_rank(comm) == 0;
  if (prints) {
    print_size(bytes, "all-reduce");
  }
  for (int way = 0; way < 2; way++) {
    double ms = 0;
    if (prints) { /* rank 0 leads the first host */
      even_ways_force(&even_ucx_of(even_hosts_of(comm)->between)->reduce_ways, way);
    }
    RANKS_EXPECT(comm, time_calls(comm, reduce, data, bytes, false, &ms) == EVEN_OK);
    if (prints) {
      print_time(ms, way == 0 ? "in parts" : "whole", way == 1);
    }
  }
  return 0;
}

static int measure_size(even_comm *comm, const hosts_bench_links *links, float *data, size_t bytes) {
  static const char *const ways[] = {"turns", "overlap", "lanes"};
  bool prints = even_comm_rank(comm) == 0;
  double ms = 0;
  take_parts(comm, false);
  for (int way = links->parts ? 1 : 0; way < (links->parts ? 2 : 3); way++) {
    take_way(comm, ways[way]);
    RANKS_EXPECT(comm, time_calls(comm, reduce, data, bytes, false, &ms) == EVEN_OK);
    if (prints) {
      print(links, bytes, links->parts ? "equal parts" : ways[way], ms, false);
    }
  }
  if (links->parts) {
    take_parts(comm, true);
    RANKS_EXPECT(comm, time_calls(comm, reduce, data, bytes, false, &ms) == EVEN_OK);
    if (prints) {
      print(links, bytes, "fitted parts", ms, true);
    }
  }
  RANKS_EXPECT(comm, time_calls(comm, reduce_inside, data, bytes, false, &ms) == EVEN_OK);
  if (prints) {
    (void)printf("%6zu MB  %-14s %9.2f ms\n", bytes >> 20, "on the hosts", ms);
    (void)fflush(stdout);
  }
  return links->parts ? 0 : measure_others(comm, data, bytes);
}

int hosts_bench_measure(even_comm *comm, void *argument) {
  const hosts_bench_links *links = argument;
  float *data = calloc(1, links->largest);
  int wrong = data == NULL;
  if (even_comm_rank(comm) == 0) {
    (void)printf("%s\n", links->what);
  }
  for (size_t bytes = (size_t)1 << 10; bytes <= (size_t)64 << 10 && !wrong && !links->parts; bytes *= 4) {
    wrong = measure_smallest(comm, data, bytes);
  }
  for (size_t bytes = (size_t)128 << 10; bytes < (size_t)1 << 20 && !wrong && !links->parts; bytes *= 4) {
    wrong = measure_small_reduce(comm, data, bytes) + measure_others(comm, data, bytes);
  }
  for (size_t bytes = (size_t)4 << 20; bytes <= links->largest && !wrong; bytes *= 4) {
    wrong = measure_size(comm, links, data, bytes);
  }
  if (even_comm_rank(comm) == 0 && !links->parts) {
    (void)printf("engine ucx between all %d ranks\n", even_comm_ranks(comm));
  }
  for (size_t bytes = (size_t)128 << 10; bytes <= links->largest && !wrong && !links->parts; bytes *= 4) {
    wrong = measure_network(comm, data, bytes);
  }
  if (links->parts && even_comm_rank(comm) == 0) {
    char text[4096];
    even_comm_describe(even_hosts_of(comm)->between, text, sizeof text);
    const char *parts = strstr(text, "parts by");
    (void)printf("%s\n", parts == NULL ? "links that differ too little" : parts);
    (void)fflush(stdout);
  }
  free(data);
  return wrong;
}
