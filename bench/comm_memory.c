/* What bounds a large all-reduce on one host: how fast two cores read, write, copy and add to memory, alone and at
 * once, how far a word has to the other core and back, and beside these the all-reduce itself, from C, in plain memory
 * and in the arena, and by reading the other process's memory where the kernel permits that; fp32, two ranks, each on a
 * core of its own, in alternating rounds. Medians of what the slower rank took. Rounds are told apart by a word's way:
 * a virtual machine's cores are near one another (one chiplet) or far apart, and may move. comm_memory [MEGABYTES
 * [ROUNDS]] */
#include "comm/kernels.h"
#include "os/clock.h"
#include "peer_memory.h"
#include "two_ranks.h"

#include <evenstep/comm.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 2
#define MOST_ROUNDS 500
#define TRIPS 2000
/* Asked for so far ahead: the processor's own prefetching ends with each page. */
#define AHEAD ((size_t)4096)
/* A word's way there and back on cores that share a cache takes less. */
#define NEAR_NS 450

typedef enum figure {
  READ_ALONE,
  WRITE_ALONE,
  ADD_ALONE,
  COPY_ALONE,
  READ,
  WRITE,
  ADD,
  COPY,
  ARENA,
  WRITTEN, /* the same of data that each rank has just written, as it does with gradients */
  PLAIN,
  ATTACHED,   /* by reading the other process's memory */
  READ_OTHER, /* that alone */
  FIGURES
} figure;

static const char *const said[FIGURES] = {"one core reads",
                                          "one core writes past the caches",
                                          "one core adds in place",
                                          "one core copies past the caches",
                                          "both read",
                                          "both write past the caches",
                                          "both add in place",
                                          "both copy past the caches",
                                          "all-reduce in the arena",
                                          "  of data just written",
                                          "all-reduce of plain memory",
                                          "  by process_vm_readv",
                                          "both read the other's by that call"};

typedef struct bench {
  even_comm *comm;
  float *data;
  float *other;
  size_t bytes;
  int rank;
  bool may_read; /* the other process's memory */
  peer_memory peer;
  _Atomic uint32_t *words; /* two cache lines, one a rank */
} bench;

static double took[2][FIGURES][MOST_ROUNDS]; /* near, far; s */
static double trips[2][MOST_ROUNDS];
static int rounds_of[2];
static volatile uint64_t sink;

/* A word of each line: the line comes whole. */
static void read_all(const bench *with) {
  const char *data = (const char *)with->data;
  uint64_t sums[4] = {0};
  for (size_t at = 0; at + 256 <= with->bytes; at += 256) {
    for (size_t k = 0; k < 4; k++) {
      uint64_t word;
      __builtin_prefetch(data + at + k * 64 + AHEAD);
      memcpy(&word, data + at + k * 64, sizeof word);
      sums[k] += word;
    }
  }
  sink += sums[0] + sums[1] + sums[2] + sums[3];
}

static void write_all(const bench *with) {
  static float zeros[16384];
  for (size_t at = 0; at < with->bytes; at += sizeof zeros) {
    size_t left = with->bytes - at;
    even_copy_past_caches((char *)with->data + at, zeros, left < sizeof zeros ? left : sizeof zeros);
  }
}

static void add_all(const bench *with) {
  enum { BLOCK = 512 };
  even_reduce_function *add = even_kernels_best()->reduce[EVEN_F32][EVEN_SUM];
  for (size_t at = 0; at + BLOCK <= with->bytes; at += BLOCK) {
    void *targets[1] = {(char *)with->data + at};
    const void *sources[2] = {targets[0], targets[0]};
    for (size_t line = 0; line < BLOCK; line += 64) {
      __builtin_prefetch((char *)with->data + at + line + AHEAD);
    }
    add(targets, 1, sources, 2, BLOCK / sizeof(float), 1);
  }
}

static bool run_one(const bench *with, figure which) {
  size_t count = with->bytes / sizeof(float);
  switch (which) {
    case READ_ALONE:
    case READ:
      read_all(with);
      return true;
    case WRITE_ALONE:
    case WRITE:
      write_all(with);
      return true;
    case ADD_ALONE:
    case ADD:
      add_all(with);
      return true;
    case COPY_ALONE:
    case COPY:
      even_copy_past_caches(with->other, with->data, with->bytes);
      return true;
    case ATTACHED:
      return bench_peer_all_reduce(&with->peer);
    case READ_OTHER:
      return bench_peer_read(&with->peer, with->other);
    default:
      return even_comm_all_reduce(with->comm, which != PLAIN ? even_comm_arena(with->comm) : with->data, count,
                                  EVEN_F32, EVEN_SUM) == EVEN_OK;
  }
}

/* ns of a word's way to the other core and back. */
static double word_trip(const bench *with) {
  static uint32_t last;
  _Atomic uint32_t *own = with->words + 16 * with->rank;
  _Atomic uint32_t *other = with->words + 16 * (1 - with->rank);
  uint64_t began = even_clock_ns();
  for (int i = 0; i < TRIPS; i++) {
    last++;
    if (with->rank == 0) {
      atomic_store(own, last);
    }
    while (atomic_load(other) != last) {
    }
    if (with->rank == 1) {
      atomic_store(own, last);
    }
  }
  return (double)(even_clock_ns() - began) / TRIPS;
}

static void write_own(const bench *with) {
  float *own = even_comm_arena(with->comm);
  for (size_t i = 0; i < with->bytes / sizeof *own; i++) {
    own[i] = (float)(i % 7);
  }
}

/* False where a call failed. `all`: what the slower rank took. */
static bool one_round(const bench *with, double all[FIGURES + 1]) {
  if (even_comm_barrier(with->comm) != EVEN_OK) {
    return false;
  }
  all[FIGURES] = word_trip(with);
  for (figure which = READ_ALONE; which < FIGURES; which++) {
    bool works = which >= ATTACHED ? with->may_read : which > COPY_ALONE || with->rank == 0;
    bool well = even_comm_barrier(with->comm) == EVEN_OK && (!works || which < ARENA || run_one(with, which));
    if (which == WRITTEN) {
      write_own(with);
    }
    well = well && even_comm_barrier(with->comm) == EVEN_OK;
    uint64_t began = even_clock_ns();
    if (!well || (works && !run_one(with, which))) {
      return false;
    }
    all[which] = works ? (double)(even_clock_ns() - began) * 1e-9 : 0;
  }
  return even_comm_all_reduce(with->comm, all, FIGURES + 1, EVEN_F64, EVEN_MAX) == EVEN_OK;
}

static void print(int place, size_t bytes, bool may_read) {
  int count = rounds_of[place];
  if (count == 0) {
    return;
  }
  (void)printf("a word goes to the other core and back in %.0f ns (%d rounds)\n", bench_median(trips[place], count),
               count);
  double of[FIGURES];
  for (figure which = READ_ALONE; which < FIGURES; which++) {
    of[which] = bench_median(took[place][which], count);
    if (which >= ATTACHED && !may_read) {
      (void)printf("  %-34s        - the kernel does not permit it here\n", said[which]);
      continue;
    }
    (void)printf("  %-34s %8.3f ms", said[which], of[which] * 1e3);
    if (which < ARENA || which == READ_OTHER) {
      double cores = which > COPY_ALONE ? 2 : 1;
      double ways = which == ADD || which == ADD_ALONE || which == COPY || which == COPY_ALONE ? 2 : 1;
      (void)printf("  %6.1f GB/s", cores * ways * (double)bytes / of[which] * 1e-9);
    } else {
      (void)printf("  %.2f of adding in place, %.2f of reading alone", of[ADD] / of[which], of[READ] / of[which]);
    }
    (void)printf("\n");
  }
}

static bool measure(const bench *with, int rounds) {
  double all[FIGURES + 1];
  for (int round = 0; round <= rounds; round++) { /* the first one warms up */
    if (!one_round(with, all)) {
      return false;
    }
    int place = all[FIGURES] < NEAR_NS ? 0 : 1;
    for (figure which = READ_ALONE; which < FIGURES && round > 0; which++) {
      took[place][which][rounds_of[place]] = all[which];
    }
    trips[place][rounds_of[place]] = all[FIGURES];
    rounds_of[place] += round > 0;
  }
  return true;
}

static bool get_memory(bench *with) {
  with->data = malloc(with->bytes);
  with->other = malloc(with->bytes);
  if (with->data == NULL || with->other == NULL) {
    return false;
  }
  memset(with->data, 0, with->bytes);
  memset(with->other, 0, with->bytes);
  return true;
}

/* Whether it can be read, and whether the sums that are formed so are right; the data are zero again afterwards. */
static bool look_at_peer(bench *with) {
  int may = bench_peer_open(&with->peer, with->comm, with->rank, with->data, with->bytes);
  size_t count = with->bytes / sizeof *with->data;
  with->may_read = may == 1;
  if (may != 1) {
    return may == 0;
  }
  for (size_t i = 0; i < count; i++) {
    with->data[i] = (float)(i % 1000) + (float)with->rank;
  }
  if (!bench_peer_all_reduce(&with->peer)) {
    return false;
  }
  for (size_t i = 0; i < count; i++) {
    if (with->data[i] != 2 * (float)(i % 1000) + 1) {
      (void)fprintf(stderr, "comm_memory: sums by process_vm_readv are wrong\n");
      return false;
    }
  }
  memset(with->data, 0, with->bytes);
  return true;
}

static int run_rank(const even_comm_params *params, int fd, void *words, int rounds) {
  bench with = {.bytes = params->arena_bytes, .rank = params->rank, .words = words};
  bench_pin(params->rank, RANKS);
  bool well = even_comm_open(params, fd, &with.comm) == EVEN_OK;
  if (well) {
    memset(even_comm_arena(with.comm), 0, with.bytes);
    well = get_memory(&with) && look_at_peer(&with) && measure(&with, rounds);
  }
  if (!well) {
    (void)fprintf(stderr, "comm_memory: %s\n", even_error_last()->what);
  } else if (params->rank == 0) {
    (void)printf("%zu MB of fp32 a rank, %d ranks, %s; medians of what the slower rank took\n", with.bytes >> 20, RANKS,
                 even_comm_simd());
    print(0, with.bytes, with.may_read);
    print(1, with.bytes, with.may_read);
  }
  bench_peer_close(&with.peer);
  free(with.data);
  free(with.other);
  even_comm_close(with.comm);
  return !well;
}

int main(int argc, char **argv) {
  long megabytes = argc > 1 ? strtol(argv[1], NULL, 10) : 64;
  long rounds = argc > 2 ? strtol(argv[2], NULL, 10) : 31;
  int fd = -1;
  if (megabytes < 1 || megabytes > 1024 || rounds < 1 || rounds >= MOST_ROUNDS) {
    (void)fprintf(stderr, "comm_memory [MEGABYTES [ROUNDS]]: at most 1024 and %d\n", MOST_ROUNDS - 1);
    return 2;
  }
  even_comm_params params = {
      .size = sizeof params, .ranks = RANKS, .arena_bytes = (size_t)megabytes << 20, .timeout_seconds = 60, .spin = -1};
  void *words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (words == MAP_FAILED || even_comm_create_segment(&params, &fd) != EVEN_OK) {
    (void)fprintf(stderr, "comm_memory: %s\n", words == MAP_FAILED ? "no memory" : even_error_last()->what);
    return 1;
  }
  pid_t child = fork();
  params.rank = child == 0 ? 1 : 0;
  int failed = child < 0 || run_rank(&params, fd, words, (int)rounds) != 0;
  int ended = 0;
  if (child > 0) {
    (void)waitpid(child, &ended, 0);
  }
  return failed || ended != 0;
}
