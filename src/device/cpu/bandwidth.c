/* Memory bandwidth of a CPU device: copying and reading arrays much larger than its caches. */
#include "base/alloc.h"
#include "base/fail.h"
#include "device/cpu/crew.h"
#include "device/cpu/simd.h"
#include "device/cpu/speed.h"
#include "os/clock.h"

#include <stdint.h>
#include <string.h>

enum { LANES = 32, CHUNK = 1 << 20, LEAST_BYTES = 8 << 20, UNKNOWN_CACHE_BYTES = 64 << 20, MOST_BYTES = 256 << 20 };

typedef struct task {
  size_t bytes; /* of each thread's two arrays */
  uint64_t budget_ns;
  struct member *members;
} task;

typedef struct member {
  even_status status;
  even_cpu_bandwidth rate;
  uint64_t sum;
} member;

typedef uint64_t (*summation)(const unsigned char *data, size_t bytes);

static inline __attribute__((always_inline)) uint64_t sum_of(const unsigned char *data, size_t bytes) {
  uint64_t sums[LANES] = {0};
  uint64_t sum = 0;
  for (size_t i = 0; i < bytes; i += sizeof sums) {
    uint64_t words[LANES];
    memcpy(words, data + i, sizeof words);
    for (size_t lane = 0; lane < LANES; lane++) {
      sums[lane] += words[lane];
    }
  }
  for (size_t lane = 0; lane < LANES; lane++) {
    sum += sums[lane];
  }
  return sum;
}

static uint64_t sum_plain(const unsigned char *data, size_t bytes) {
  return sum_of(data, bytes);
}

#if defined(__x86_64__)
/* a narrow loop reads slower than the memory gives */
__attribute__((target("avx2"))) static uint64_t sum_avx2(const unsigned char *data, size_t bytes) {
  return sum_of(data, bytes);
}
#endif

static summation widest(void) {
#if defined(__x86_64__)
  if (even_cpu_has_avx2()) {
    return sum_avx2;
  }
#endif
  return sum_plain;
}

static double copy_rate(const task *shared, const unsigned char *from, unsigned char *to) {
  uint64_t start = even_clock_ns();
  uint64_t now = start;
  double done = 0;
  for (size_t at = 0; now - start < shared->budget_ns; at = (at + CHUNK) % shared->bytes, now = even_clock_ns()) {
    memcpy(to + at, from + at, CHUNK);
    done += 2.0 * (double)CHUNK;
  }
  return done / (double)(now - start);
}

/* *sum is kept so that no compiler may leave the reading out. */
static double read_rate(const task *shared, const unsigned char *from, uint64_t *sum) {
  summation sum_widest = widest();
  uint64_t start = even_clock_ns();
  uint64_t now = start;
  double done = 0;
  for (size_t at = 0; now - start < shared->budget_ns; at = (at + CHUNK) % shared->bytes, now = even_clock_ns()) {
    *sum += sum_widest(from + at, CHUNK);
    done += (double)CHUNK;
  }
  return done / (double)(now - start);
}

/* The arrays are made here, by the bound thread, so that they lie on its NUMA node. */
static void work(void *context, size_t index) {
  task *shared = context;
  member *self = &shared->members[index];
  unsigned char *from = NULL;
  unsigned char *to = NULL;
  self->status = even_alloc(shared->bytes, 1, (void **)&from);
  if (self->status == EVEN_OK) {
    self->status = even_alloc(shared->bytes, 1, (void **)&to);
  }
  if (self->status == EVEN_OK) {
    uint64_t start = even_clock_ns();
    uint64_t ran = even_clock_thread_cpu_ns();
    self->rate.copy_gb_per_second = copy_rate(shared, from, to); /* bytes a nanosecond are GB a second */
    self->rate.read_gb_per_second = read_rate(shared, from, &self->sum);
    self->rate.cpu_fraction = (double)(even_clock_thread_cpu_ns() - ran) / (double)(even_clock_ns() - start);
  }
  even_free(from);
  even_free(to);
}

/* One thread's part: all together twice the cache at least, within what one may ask of a machine. */
static size_t part_bytes(uint64_t cache_bytes, size_t threads) {
  uint64_t bytes = (cache_bytes > 0 ? cache_bytes : UNKNOWN_CACHE_BYTES) * 2 / threads;
  bytes = bytes < LEAST_BYTES ? LEAST_BYTES : bytes > MOST_BYTES ? MOST_BYTES : bytes;
  return (size_t)(bytes / CHUNK) * CHUNK;
}

even_status even_cpu_bandwidth_measure(const even_device *device, size_t threads, uint64_t cache_bytes, double seconds,
                                       even_cpu_bandwidth *out) {
  task shared = {.bytes = part_bytes(cache_bytes, threads), .budget_ns = (uint64_t)(seconds / 2 * 1e9)};
  *out = (even_cpu_bandwidth){0};
  EVEN_TRY(EVEN_NEW_ARRAY(&shared.members, threads));
  even_status status = even_crew_run(device, threads, work, &shared);
  for (size_t i = 0; i < threads && status == EVEN_OK; i++) {
    if (shared.members[i].status != EVEN_OK) {
      status = even_fail(shared.members[i].status, "no memory to measure the memory bandwidth of %s", device->name);
    }
    out->copy_gb_per_second += shared.members[i].rate.copy_gb_per_second;
    out->read_gb_per_second += shared.members[i].rate.read_gb_per_second;
    out->cpu_fraction += shared.members[i].rate.cpu_fraction / (double)threads;
  }
  even_free(shared.members);
  return status;
}
