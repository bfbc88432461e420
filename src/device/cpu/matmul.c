/* fp32 matrix products without torch: blocks of B that stay in a cache, rows of C in registers. */
#include "base/alloc.h"
#include "base/fail.h"
#include "device/cpu/crew.h"
#include "device/cpu/simd.h"
#include "device/cpu/speed.h"
#include "os/clock.h"

enum { SIZE = 256, LANES = 16, ROWS = 4 };

typedef struct task {
  float *memory; /* three matrices a thread */
  uint64_t budget_ns;
  double *rates;
} task;

typedef void (*product)(const float *a, const float *b, float *c);

static inline __attribute__((always_inline)) void multiply(const float *a, const float *b, float *c) {
  for (size_t column = 0; column < SIZE; column += LANES) {
    for (size_t row = 0; row < SIZE; row += ROWS) {
      float sums[ROWS][LANES] = {{0}};
      for (size_t k = 0; k < SIZE; k++) {
        for (size_t i = 0; i < ROWS; i++) {
          for (size_t lane = 0; lane < LANES; lane++) {
            sums[i][lane] += a[(row + i) * SIZE + k] * b[k * SIZE + column + lane];
          }
        }
      }
      for (size_t i = 0; i < ROWS; i++) {
        for (size_t lane = 0; lane < LANES; lane++) {
          c[(row + i) * SIZE + column + lane] = sums[i][lane];
        }
      }
    }
  }
}

static void multiply_plain(const float *a, const float *b, float *c) {
  multiply(a, b, c);
}

#if defined(__x86_64__)
/* one version a width of the vector unit (no target_clones: its resolvers run before the sanitizers can) */
__attribute__((target("avx2,fma"))) static void multiply_avx2(const float *a, const float *b, float *c) {
  multiply(a, b, c);
}

__attribute__((target("avx512f"))) static void multiply_avx512(const float *a, const float *b, float *c) {
  multiply(a, b, c);
}
#endif

static product widest(void) {
#if defined(__x86_64__)
  if (even_cpu_has_avx512()) {
    return multiply_avx512;
  }
  if (even_cpu_has_avx2()) {
    return multiply_avx2;
  }
#endif
  return multiply_plain;
}

static void work(void *context, size_t index) {
  task *shared = context;
  float *a = shared->memory + index * 3 * SIZE * SIZE;
  float *b = a + SIZE * SIZE;
  float *c = b + SIZE * SIZE;
  for (size_t i = 0; i < (size_t)SIZE * SIZE; i++) {
    a[i] = (float)(i % 7) * 0.25F;
    b[i] = (float)(i % 5) * 0.5F;
  }
  product multiply_widest = widest();
  uint64_t start = even_clock_ns();
  uint64_t now = start;
  double operations = 0;
  while (now - start < shared->budget_ns) {
    multiply_widest(a, b, c);
    a[0] = c[0] * 1e-6F; /* each product needs the one before */
    operations += 2.0 * (double)SIZE * (double)SIZE * (double)SIZE;
    now = even_clock_ns();
  }
  shared->rates[index] = operations / ((double)(now - start) * 1e-9);
}

even_status even_cpu_matmul_measure(const even_device *device, size_t threads, double seconds, double *gflops) {
  task shared = {.budget_ns = (uint64_t)(seconds * 1e9)};
  *gflops = 0;
  even_status status = even_alloc(threads, 3UL * SIZE * SIZE * sizeof(float), (void **)&shared.memory);
  if (status == EVEN_OK) {
    status = EVEN_NEW_ARRAY(&shared.rates, threads);
  }
  if (status == EVEN_OK) {
    status = even_crew_run(device, threads, work, &shared);
  }
  for (size_t i = 0; i < threads && status == EVEN_OK; i++) {
    *gflops += shared.rates[i] * 1e-9;
  }
  even_free(shared.memory);
  even_free(shared.rates);
  return status;
}
