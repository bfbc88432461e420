/* The loops of a step: what the formulas of kernels.h give with each operation rounded by itself, to the last bit, with
 * every instruction set that this machine has. */
#include "optim/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 200, STEPS = 3, SHIFTS = 3 };

static const char *const names[] = {"portable", "avx2", "avx512"};

/* One element in one step. What is volatile is rounded, and cannot become one operation with the next. */
#define REFERENCE(suffix, type, root)                                                                          \
  static void step_##suffix(const even_optim_factors *f, even_optim_method method, type *value, type gradient, \
                            type *const *states, size_t i) {                                                   \
    const volatile type decay = (type)f->decay;                                                                \
    const volatile type rate = (type)f->rate;                                                                  \
    volatile type v = *value;                                                                                  \
    volatile type g = (type)f->scale * gradient;                                                               \
    volatile type t = 0;                                                                                       \
    if (method != EVEN_OPTIM_ADAMW && f->decay != 0) {                                                         \
      t = decay * v;                                                                                           \
      g = g + t;                                                                                               \
    }                                                                                                          \
    if (method == EVEN_OPTIM_SGD) {                                                                            \
      if (states[0] != NULL) {                                                                                 \
        volatile type b = g;                                                                                   \
        if (!f->first) {                                                                                       \
          t = (type)f->take1 * g;                                                                              \
          b = (type)f->keep1 * states[0][i];                                                                   \
          b = b + t;                                                                                           \
        }                                                                                                      \
        states[0][i] = b;                                                                                      \
        t = (type)f->keep1 * b;                                                                                \
        g = f->nesterov ? g + t : b;                                                                           \
      }                                                                                                        \
      t = rate * g;                                                                                            \
      *value = v - t;                                                                                          \
      return;                                                                                                  \
    }                                                                                                          \
    if (method == EVEN_OPTIM_ADAMW) {                                                                          \
      v = v * decay;                                                                                           \
    }                                                                                                          \
    t = g - states[0][i];                                                                                      \
    t = (type)f->take1 * t;                                                                                    \
    volatile type m = states[0][i] + t;                                                                        \
    t = g * g;                                                                                                 \
    t = (type)f->take2 * t;                                                                                    \
    volatile type s = (type)f->keep2 * states[1][i];                                                           \
    s = s + t;                                                                                                 \
    states[0][i] = m;                                                                                          \
    states[1][i] = s;                                                                                          \
    if (f->amsgrad) {                                                                                          \
      s = isnan(s) || isnan(states[2][i]) ? (type)NAN : s > states[2][i] ? s : states[2][i];                   \
      states[2][i] = s;                                                                                        \
    }                                                                                                          \
    t = root(s);                                                                                               \
    t = t / (type)f->root2;                                                                                    \
    t = t + (type)f->eps;                                                                                      \
    t = m / t;                                                                                                 \
    t = rate * t;                                                                                              \
    *value = v - t;                                                                                            \
  }
REFERENCE(f32, float, sqrtf)
REFERENCE(f64, double, sqrt)

/* The same bits; of NaNs, any two. */
#define ALIKE(suffix, type, uint)                                                                         \
  static bool alike_##suffix(const type *a, const type *b, size_t count, const char *what, size_t turn) { \
    for (size_t i = 0; i < count; i++) {                                                                  \
      uint x;                                                                                             \
      uint y;                                                                                             \
      memcpy(&x, &a[i], sizeof x);                                                                        \
      memcpy(&y, &b[i], sizeof y);                                                                        \
      if (x != y && !(isnan(a[i]) && isnan(b[i]))) {                                                      \
        print_error("%s %zu of turn %zu: %a, not %a\n", what, i, turn, (double)a[i], (double)b[i]);       \
        return false;                                                                                     \
      }                                                                                                   \
    }                                                                                                     \
    return true;                                                                                          \
  }
ALIKE(f32, float, uint32_t)
ALIKE(f64, double, uint64_t)

static double number(size_t i, size_t seed) {
  double x = sin((double)i * 1.37 + (double)seed * 0.91) * pow(10, (double)((i * 7 + seed) % 9) - 5);
  static const double special[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1e-45, 3e38};
  return i % 29 == 3 ? special[(i / 29 + seed) % 7] : x;
}

/* `turn`: which combination of flags. Where memory begins is shifted, so that vectors do not lie evenly. */
#define CHECK(suffix, type)                                                                                          \
  static bool check_##suffix(const even_optim_kernels *kernels, even_optim_method method, size_t turn, size_t count, \
                             size_t shift) {                                                                         \
    static type memory[2][1 + EVEN_OPTIM_STATES][MOST + SHIFTS];                                                     \
    static type gradient_memory[MOST + SHIFTS];                                                                      \
    const even_optim_rule rule = {.method = method,                                                                  \
                                  .amsgrad = turn & 1,                                                               \
                                  .nesterov = turn & 1,                                                              \
                                  .maximize = turn & 2,                                                              \
                                  .lr = 0.03,                                                                        \
                                  .weight_decay = turn & 4 ? 0.1 : 0,                                                \
                                  .momentum = 0.9,                                                                   \
                                  .dampening = 0.2,                                                                  \
                                  .beta1 = 0.9,                                                                      \
                                  .beta2 = 0.97,                                                                     \
                                  .eps = 1e-6};                                                                      \
    size_t states = method == EVEN_OPTIM_SGD ? (turn & 8 ? 0 : 1) : (turn & 1 ? 3 : 2);                              \
    bool right = true;                                                                                               \
    for (size_t i = 0; i < count; i++) {                                                                             \
      memory[0][0][i + shift] = memory[1][0][i + shift] = (type)number(i, turn);                                     \
      for (size_t k = 1; k <= EVEN_OPTIM_STATES; k++) {                                                              \
        memory[0][k][i + shift] = memory[1][k][i + shift] = (type)fabs(number(i, turn + k));                         \
      }                                                                                                              \
    }                                                                                                                \
    for (uint64_t step = 1; step <= STEPS; step++) {                                                                 \
      even_optim_factors factors;                                                                                    \
      even_optim_factors_of(&rule, step, &factors);                                                                  \
      factors.scale *= turn & 4 ? 0.7 : 1;                                                                           \
      type *gradient = gradient_memory + shift;                                                                      \
      type *ours[EVEN_OPTIM_STATES] = {0};                                                                           \
      type *theirs[EVEN_OPTIM_STATES] = {0};                                                                         \
      for (size_t k = 0; k < states; k++) {                                                                          \
        ours[k] = memory[0][1 + k] + shift;                                                                          \
        theirs[k] = memory[1][1 + k] + shift;                                                                        \
      }                                                                                                              \
      for (size_t i = 0; i < count; i++) {                                                                           \
        gradient[i] = (type)number(i, turn + 50 * step);                                                             \
        step_##suffix(&factors, method, &memory[1][0][i + shift], gradient[i], theirs, i);                           \
      }                                                                                                              \
      kernels->suffix[method](&factors, memory[0][0] + shift, gradient, ours, count);                                \
      right = right && alike_##suffix(memory[0][0] + shift, memory[1][0] + shift, count, "value", turn);             \
      for (size_t k = 0; k < states; k++) {                                                                          \
        right = right && alike_##suffix(ours[k], theirs[k], count, "state", turn);                                   \
      }                                                                                                              \
    }                                                                                                                \
    return right;                                                                                                    \
  }
CHECK(f32, float)
CHECK(f64, double)

static void round_every_operation_once(void **state) {
  (void)state;
  static const size_t counts[] = {0, 1, 7, 16, 33, MOST};
  size_t tables = 0;
  for (size_t t = 0; t < sizeof names / sizeof *names; t++) {
    const even_optim_kernels *kernels = even_optim_kernels_named(names[t]);
    if (kernels == NULL) {
      continue;
    }
    tables++;
    assert_string_equal(kernels->name, names[t]);
    for (int method = 0; method < EVEN_OPTIM_METHODS; method++) {
      for (size_t turn = 0; turn < 16; turn++) {
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
          bool right = check_f32(kernels, (even_optim_method)method, turn, counts[c], c % SHIFTS) &&
                       check_f64(kernels, (even_optim_method)method, turn, counts[c], c % SHIFTS);
          if (!right) {
            fail_msg("%s, method %d, turn %zu, %zu elements", names[t], method, turn, counts[c]);
          }
        }
      }
    }
  }
  assert_true(tables >= 1);
  assert_null(even_optim_kernels_named("none"));
  assert_non_null(even_optim_kernels_best());
}

#define SQUARES(suffix, type)                                                                   \
  static bool squares_##suffix(const even_optim_kernels *kernels, size_t count, size_t shift) { \
    type memory[MOST + SHIFTS];                                                                 \
    volatile double lanes[16] = {0};                                                            \
    for (size_t i = 0; i < count; i++) {                                                        \
      memory[i + shift] = (type)(sin((double)i) * (i % 7 == 0 ? 1e8 : 1));                      \
      volatile double square = (double)memory[i + shift] * (double)memory[i + shift];           \
      lanes[i % 16] = lanes[i % 16] + square;                                                   \
    }                                                                                           \
    for (size_t width = 8; width > 0; width /= 2) {                                             \
      for (size_t k = 0; k < width; k++) {                                                      \
        lanes[k] = lanes[k] + lanes[k + width];                                                 \
      }                                                                                         \
    }                                                                                           \
    double found = kernels->square_##suffix(memory + shift, count);                             \
    double wanted = lanes[0];                                                                   \
    return memcmp(&found, &wanted, sizeof found) == 0;                                          \
  }
SQUARES(f32, float)
SQUARES(f64, double)

/* Also of what is not finite: a norm says so. */
static void add_squares_in_one_order(void **state) {
  (void)state;
  const float large[3] = {3e38f, -3e38f, 1};
  const double none[2] = {1, NAN};
  for (size_t t = 0; t < sizeof names / sizeof *names; t++) {
    const even_optim_kernels *kernels = even_optim_kernels_named(names[t]);
    for (size_t count = 0; kernels != NULL && count <= MOST; count++) {
      assert_true(squares_f32(kernels, count, count % SHIFTS) && squares_f64(kernels, count, count % SHIFTS));
    }
    if (kernels != NULL) {
      assert_true(kernels->square_f32(large, 3) > 1e76 && isfinite(kernels->square_f32(large, 3)));
      assert_true(isnan(kernels->square_f64(none, 2)));
    }
  }
}

static void work_out_what_is_the_same_for_all(void **state) {
  (void)state;
  static const uint64_t steps[] = {1, 2, 3, 1000, 1000000, UINT64_MAX};
  even_optim_rule rule = {
      .method = EVEN_OPTIM_ADAMW, .lr = 0.5, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1};
  even_optim_factors f;
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
    even_optim_factors_of(&rule, steps[i], &f);
    long double first = 1 - powl(0.9L, (long double)steps[i]);
    long double second = 1 - powl(0.999L, (long double)steps[i]);
    assert_true(fabs(f.rate / (double)(0.5L / first) - 1) < 1e-12);
    assert_true(fabs(f.root2 / (double)sqrtl(second) - 1) < 1e-10);
  }
  assert_true(f.decay == 1 - 0.5 * 0.1 && f.keep1 == 0.9 && f.take1 == 1 - 0.9 && f.eps == 1 && f.take2 == 1 - 0.999);
  rule.method = EVEN_OPTIM_ADAM;
  even_optim_factors_of(&rule, 1, &f);
  assert_true(f.decay == 0.1 && !f.amsgrad);
  rule = (even_optim_rule){.method = EVEN_OPTIM_SGD, .lr = 0.5, .momentum = 0.9, .dampening = 0.25, .nesterov = true};
  even_optim_factors_of(&rule, 1, &f);
  assert_true(f.rate == 0.5 && f.keep1 == 0.9 && f.take1 == 0.75 && f.first && f.nesterov);
  even_optim_factors_of(&rule, 2, &f);
  assert_false(f.first);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(round_every_operation_once),
      cmocka_unit_test(add_squares_in_one_order),
      cmocka_unit_test(work_out_what_is_the_same_for_all),
  };
  return cmocka_run_group_tests_name("optim_kernels", tests, NULL, NULL);
}
