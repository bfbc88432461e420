/* Batch normalisation over all ranks, beside the same computed of all samples at once. */
#include "comm/ranks.h"
#include "support/fault.h"

#include <evenstep/norm.h>

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 4, CHANNELS = 5, SAMPLES = 12 };

/* How many samples each rank has: shares are unequal, and may be none. */
static const int all_shares[][RANKS] = {{3, 3, 3, 3}, {7, 1, 4, 0}, {0, 0, 12, 0}, {0, 0, 0, 0}, {11, 0, 0, 1}};

enum { SPLITS = sizeof all_shares / sizeof all_shares[0] };

static double sample(int number, int channel) {
  return 3.0 * channel + sin(1.7 * number + channel) + (channel == 2 ? 1e4 : 0.0);
}

static double derivative(int number, int channel) {
  return cos(0.9 * number - channel);
}

typedef struct moments {
  double mean[CHANNELS];
  double variance[CHANNELS];
} moments;

/* Of samples first … last - 1; zeros of none. */
static moments moments_of(int first, int last) {
  moments found = {{0}, {0}};
  for (int c = 0; c < CHANNELS; c++) {
    for (int i = first; i < last; i++) {
      found.mean[c] += sample(i, c) / (last - first);
    }
    for (int i = first; i < last; i++) {
      double off = sample(i, c) - found.mean[c];
      found.variance[c] += off * off / (last - first);
    }
  }
  return found;
}

static void narrow(const double *values, float *out) {
  for (int c = 0; c < CHANNELS; c++) {
    out[c] = (float)values[c];
  }
}

static bool near(double value, double expected, double within) {
  return fabs(value - expected) <= within * fmax(1.0, fabs(expected));
}

/* Whether all ranks have these bits. */
static bool same_everywhere(even_comm *comm, const double *values, size_t count) {
  double all[RANKS * CHANNELS];
  size_t counts[RANKS];
  bool same = true;
  for (int r = 0; r < RANKS; r++) {
    counts[r] = count;
  }
  if (even_comm_all_gather(comm, values, all, counts, EVEN_F64) != EVEN_OK) {
    return false;
  }
  for (int r = 0; r < RANKS; r++) {
    same = same && memcmp(all + (size_t)r * count, values, count * sizeof *values) == 0;
  }
  return same;
}

static int first_of(const int *shares, int rank) {
  int first = 0;
  for (int r = 0; r < rank; r++) {
    first += shares[r];
  }
  return first;
}

static int statistics(even_comm *comm, const int *shares, even_dtype dtype) {
  int rank = even_comm_rank(comm);
  int first = first_of(shares, rank);
  moments mine = moments_of(first, first + shares[rank]);
  moments expected = moments_of(0, first_of(shares, RANKS));
  float means[CHANNELS];
  float variances[CHANNELS];
  double numbers[RANKS];
  double mean[CHANNELS];
  double variance[CHANNELS];
  narrow(mine.mean, means);
  narrow(mine.variance, variances);
  const even_norm_values values = {.size = sizeof values,
                                   .mark = {1.0, 77.0},
                                   .number = shares[rank],
                                   .dtype = dtype,
                                   .channels = CHANNELS,
                                   .first = dtype == EVEN_F64 ? (const void *)mine.mean : means,
                                   .second = dtype == EVEN_F64 ? (const void *)mine.variance : variances};
  even_norm_whole whole = {.numbers = numbers, .first = mean, .second = variance};
  RANKS_EXPECT(comm, even_norm_statistics(comm, &values, &whole) == EVEN_OK);
  RANKS_EXPECT(comm, whole.alike);
  double within = dtype == EVEN_F64 ? 1e-13 : 1e-6;
  for (int c = 0; c < CHANNELS; c++) {
    RANKS_EXPECT(comm, near(mean[c], expected.mean[c], within));
    /* means of 1e4 are known to 1e-3 in 32 bits */
    RANKS_EXPECT(comm, near(variance[c], expected.variance[c], dtype == EVEN_F64 ? 1e-11 : (c == 2 ? 1e-2 : 1e-5)));
  }
  for (int r = 0; r < RANKS; r++) {
    RANKS_EXPECT(comm, numbers[r] == shares[r]);
  }
  RANKS_EXPECT(comm, same_everywhere(comm, mean, CHANNELS) && same_everywhere(comm, variance, CHANNELS));
  return 0;
}

static int all_statistics(even_comm *comm, void *argument) {
  (void)argument;
  for (size_t i = 0; i < SPLITS; i++) {
    if (statistics(comm, all_shares[i], EVEN_F64) != 0 || statistics(comm, all_shares[i], EVEN_F32) != 0) {
      return 1;
    }
  }
  return 0;
}

/* d loss / d sample: by even_norm's two steps, and by the definition, with a small change of the sample. The loss of
 * rank r weighs w_r; in all it is sum_r w_r sum_i derivative(i) y_i. */
static double loss_at(const int *shares, const double *weights, const double *factors, double eps, int moved,
                      int channel, double by) {
  int total = first_of(shares, RANKS);
  double values[SAMPLES];
  double mean = 0.0;
  double variance = 0.0;
  double loss = 0.0;
  for (int i = 0; i < total; i++) {
    values[i] = sample(i, channel) + (i == moved ? by : 0.0);
    mean += values[i] / total;
  }
  for (int i = 0; i < total; i++) {
    variance += (values[i] - mean) * (values[i] - mean) / total;
  }
  for (int r = 0; r < RANKS; r++) {
    for (int i = first_of(shares, r); i < first_of(shares, r) + shares[r]; i++) {
      loss += weights[r] * derivative(i, channel) * factors[channel] * (values[i] - mean) / sqrt(variance + eps);
    }
  }
  return loss;
}

static int gradient(even_comm *comm, const int *shares) {
  static const double factors[CHANNELS] = {1.0, -0.5, 2.0, 0.25, 3.0};
  const double weights[RANKS] = {0.4, 0.1, 0.3, 0.2};
  const double eps = 1e-3;
  int rank = even_comm_rank(comm);
  int first = first_of(shares, rank);
  int total = first_of(shares, RANKS);
  moments all = moments_of(0, total);
  double sums[2][CHANNELS] = {{0}};
  double numbers[RANKS];
  double both[2][CHANNELS];
  double slope[CHANNELS];
  double shift[CHANNELS];
  for (int c = 0; c < CHANNELS; c++) {
    for (int i = first; i < first + shares[rank]; i++) {
      sums[0][c] += derivative(i, c);
      sums[1][c] += derivative(i, c) * (sample(i, c) - all.mean[c]) / sqrt(all.variance[c] + eps);
    }
  }
  const even_norm_values values = {.size = sizeof values,
                                   .mark = {2.0, 78.0},
                                   .number = weights[rank],
                                   .dtype = EVEN_F64,
                                   .channels = CHANNELS,
                                   .first = shares[rank] > 0 ? sums[0] : NULL, /* zeros */
                                   .second = shares[rank] > 0 ? sums[1] : NULL};
  even_norm_whole whole = {.numbers = numbers, .first = both[0], .second = both[1]};
  RANKS_EXPECT(comm, even_norm_sums(comm, &values, &whole) == EVEN_OK);
  RANKS_EXPECT(comm, whole.alike && memcmp(numbers, weights, sizeof weights) == 0);
  RANKS_EXPECT(comm, same_everywhere(comm, both[0], CHANNELS) && same_everywhere(comm, both[1], CHANNELS));
  even_norm_backward layer = {.size = sizeof layer,
                              .dtype = EVEN_F64,
                              .channels = CHANNELS,
                              .variance = all.variance,
                              .weight = factors,
                              .eps = eps,
                              .values = total,
                              .part = weights[rank]};
  RANKS_EXPECT(comm, even_norm_through(&layer, &whole, slope, shift) == EVEN_OK);
  for (int c = 0; c < CHANNELS; c++) {
    for (int i = first; i < first + shares[rank]; i++) {
      double spread = sqrt(all.variance[c] + eps);
      double by = 1e-4;
      double alone = factors[c] * derivative(i, c) / spread;
      double mine = weights[rank] * (alone + slope[c] * (sample(i, c) - all.mean[c]) / spread + shift[c]);
      double expected =
          (loss_at(shares, weights, factors, eps, i, c, by) - loss_at(shares, weights, factors, eps, i, c, -by)) /
          (2.0 * by);
      RANKS_EXPECT(comm, near(mine, expected, c == 2 ? 1e-5 : 1e-7));
    }
  }
  return 0;
}

static int all_gradients(even_comm *comm, void *argument) {
  (void)argument;
  return gradient(comm, all_shares[0]) + gradient(comm, all_shares[1]) + gradient(comm, all_shares[4]);
}

/* Of a rank that is in another layer, or in another call of the same one, all ranks know. */
static int in_other_calls(even_comm *comm, void *argument) {
  double numbers[RANKS];
  double out[2][CHANNELS];
  int odd = even_comm_rank(comm) == 2;
  (void)argument;
  even_norm_values values = {
      .size = sizeof values, .mark = {3.0, odd ? 5.0 : 4.0}, .dtype = EVEN_F32, .channels = CHANNELS};
  even_norm_whole whole = {.numbers = numbers, .first = out[0], .second = out[1], .alike = true};
  RANKS_EXPECT(comm, even_norm_statistics(comm, &values, &whole) == EVEN_OK && !whole.alike);
  values.mark[0] = odd ? 5.0 : 4.0;
  values.mark[1] = 4.0;
  whole.alike = true;
  RANKS_EXPECT(comm, even_norm_sums(comm, &values, &whole) == EVEN_OK && !whole.alike);
  values.mark[0] = 6.0;
  RANKS_EXPECT(comm, even_norm_sums(comm, &values, &whole) == EVEN_OK && whole.alike);
  values.channels = odd ? CHANNELS - 1 : CHANNELS; /* ends the group */
  even_status status = even_norm_sums(comm, &values, &whole);
  RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH);
  return 0;
}

static void run(ranks_body *body, const ranks_setup *like) {
  int results[RANKS_MOST];
  ranks_setup setup = *like;
  setup.ranks = RANKS;
  setup.timeout_seconds = 60;
  setup.spin = -1;
  assert_int_equal(ranks_run(&setup, body, NULL, results), 0);
}

static void merges_what_ranks_have(void **state) {
  (void)state;
  run(all_statistics, &(ranks_setup){0});
}

static void merges_over_hosts(void **state) {
  static const int host_of[RANKS] = {0, 0, 1, 1};
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  run(all_statistics, &(ranks_setup){.engine = RANKS_HOSTS, .host_of = host_of});
}

static void goes_back_through_statistics(void **state) {
  (void)state;
  run(all_gradients, &(ranks_setup){0});
}

static void tells_other_calls(void **state) {
  (void)state;
  run(in_other_calls, &(ranks_setup){0});
}

static even_status alone(void *context) {
  double numbers[1];
  double out[2][CHANNELS];
  const even_norm_values values = {.size = sizeof values, .number = 1.0, .dtype = EVEN_F64, .channels = CHANNELS};
  even_norm_whole whole = {.numbers = numbers, .first = out[0], .second = out[1]};
  return even_norm_statistics(context, &values, &whole);
}

static void survives_each_allocation(void **state) {
  even_comm *comm = ranks_open_alone(0);
  (void)state;
  assert_non_null(comm);
  assert_true(fault_each_allocation(alone, comm) >= 2);
  fault_reset();
  (void)even_comm_close(comm);
}

static void refuses_what_cannot_be(void **state) {
  even_comm *comm = ranks_open_alone(0);
  double numbers[1];
  double out[2][CHANNELS] = {{0}};
  even_norm_values values = {.size = sizeof values, .dtype = EVEN_F16, .channels = CHANNELS};
  even_norm_whole whole = {.numbers = numbers, .first = out[0], .second = out[1]};
  even_norm_backward layer = {
      .size = sizeof layer, .dtype = EVEN_I32, .channels = CHANNELS, .variance = out[0], .values = 1.0, .part = 1.0};
  (void)state;
  assert_non_null(comm);
  assert_int_equal(even_norm_statistics(comm, &values, &whole), EVEN_ERR_ARGUMENT);
  values.dtype = EVEN_F64;
  values.size = 1;
  assert_int_equal(even_norm_sums(comm, &values, &whole), EVEN_ERR_ARGUMENT);
  values.size = sizeof values;
  values.channels = SIZE_MAX / 2;
  assert_int_equal(even_norm_statistics(comm, &values, &whole), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_norm_through(&layer, &whole, out[0], out[1]), EVEN_ERR_ARGUMENT);
  layer.dtype = EVEN_F64;
  layer.size = 1;
  assert_int_equal(even_norm_through(&layer, &whole, out[0], out[1]), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_norm_follow(out[0], EVEN_BF16, out[1], CHANNELS, 0.1, 1.0), EVEN_ERR_ARGUMENT);
  (void)even_comm_close(comm);
}

/* Beside sums in 64 bits by the definition, for shapes around the lengths at which the loops change. */
static void finds_moments(void **state) {
  static const size_t inners[] = {1, 2, 31, 32, 33, 49, 1023, 1024, 1025, 2050};
  static float narrowed[3 * 4 * 2050];
  static double x[3 * 4 * 2050];
  (void)state;
  for (size_t i = 0; i < sizeof inners / sizeof inners[0]; i++) {
    even_norm_layout layout = {.size = sizeof layout, .outer = 3, .channels = 4, .inner = inners[i]};
    for (size_t at = 0; at < 12 * inners[i]; at++) {
      narrowed[at] = (float)(100.0 * (double)(at / inners[i] % 4) + sin(0.3 * (double)at));
      x[at] = (double)narrowed[at];
    }
    for (size_t c = 0; c < 4; c++) {
      double mean[2][4];
      double variance[2][4];
      double sum = 0.0;
      double squares = 0.0;
      double count = 3.0 * (double)inners[i];
      layout.dtype = EVEN_F32;
      assert_int_equal(even_norm_moments(&layout, narrowed, mean[0], variance[0]), EVEN_OK);
      layout.dtype = EVEN_F64;
      assert_int_equal(even_norm_moments(&layout, x, mean[1], variance[1]), EVEN_OK);
      for (size_t at = 0; at < 12 * inners[i]; at++) {
        sum += at / inners[i] % 4 == c ? x[at] : 0.0;
      }
      for (size_t at = 0; at < 12 * inners[i]; at++) {
        squares += at / inners[i] % 4 == c ? (x[at] - sum / count) * (x[at] - sum / count) : 0.0;
      }
      assert_true(near(mean[0][c], sum / count, 1e-6) && near(mean[1][c], sum / count, 1e-13));
      assert_true(near(variance[0][c], squares / count, 1e-5) && near(variance[1][c], squares / count, 1e-12));
    }
  }
}

static void keeps_the_digits_of_large_means(void **state) {
  even_norm_layout layout = {.size = sizeof layout, .dtype = EVEN_F32, .outer = 1024, .channels = 2, .inner = 2};
  static float x[1024 * 2 * 2];
  double mean[2];
  double variance[2];
  (void)state;
  for (size_t at = 0; at < 4096; at++) {
    x[at] = at / 2 % 2 == 0 ? 100.1f : 1000.0f + (float)sin((double)at);
  }
  assert_int_equal(even_norm_moments(&layout, x, mean, variance), EVEN_OK);
  assert_true(mean[0] == (double)100.1f && variance[0] == 0.0);
  assert_true(fabs(mean[1] - 1000.0) < 0.01 && fabs(variance[1] - 0.5) < 0.01);
  x[1] = NAN;
  assert_int_equal(even_norm_moments(&layout, x, mean, variance), EVEN_OK);
  assert_true(isnan(mean[0]) && isnan(variance[0]) && fabs(variance[1] - 0.5) < 0.01);
}

static void finds_the_inputs_gradient(void **state) {
  enum { OUTER = 2, OF = 3, INNER = 35, ALL = OUTER * OF * INNER };
  static const double mean[OF] = {1.0, -2.0, 300.0};
  static const double variance[OF] = {0.5, 4.0, 9.0};
  static const double weight[OF] = {1.0, -0.5, 2.0};
  static const double slope[OF] = {0.1, 0.2, -0.3};
  static const double shift[OF] = {-1.0, 0.5, 0.25};
  even_norm_layout layout = {.size = sizeof layout, .dtype = EVEN_F64, .outer = OUTER, .channels = OF, .inner = INNER};
  double g[ALL];
  double x[ALL];
  double out[ALL];
  (void)state;
  for (size_t at = 0; at < ALL; at++) {
    g[at] = cos((double)at);
    x[at] = mean[at / INNER % OF] + sin((double)at);
  }
  for (int weighted = 0; weighted < 2; weighted++) {
    assert_int_equal(even_norm_input(&layout, g, x, mean, variance, 0.25, weighted ? weight : NULL, slope, shift, out),
                     EVEN_OK);
    for (size_t at = 0; at < ALL; at++) {
      size_t c = at / INNER % OF;
      double spread = sqrt(variance[c] + 0.25);
      double expected =
          g[at] * (weighted ? weight[c] : 1.0) / spread + slope[c] * (x[at] - mean[c]) / spread + shift[c];
      assert_true(near(out[at], expected, 1e-14));
    }
  }
  layout.dtype = EVEN_F16;
  assert_int_equal(even_norm_input(&layout, g, x, mean, variance, 0.25, weight, slope, shift, out), EVEN_ERR_ARGUMENT);
  layout =
      (even_norm_layout){.size = sizeof layout, .dtype = EVEN_F64, .outer = SIZE_MAX / 4, .channels = 3, .inner = 2};
  assert_int_equal(even_norm_moments(&layout, x, out, out), EVEN_ERR_ARGUMENT);
  layout = (even_norm_layout){.size = sizeof layout, .dtype = EVEN_F64, .outer = 0, .channels = OF, .inner = 5};
  assert_int_equal(even_norm_moments(&layout, NULL, out, out + OF), EVEN_OK);
  assert_true(out[0] == 0.0 && out[2 * OF - 1] == 0.0);
  layout = (even_norm_layout){.size = sizeof layout, .dtype = EVEN_F64, .outer = 1, .channels = OF, .inner = 1};
  fault_allocation(1);
  assert_int_equal(even_norm_input(&layout, g, x, mean, variance, 0.25, NULL, slope, shift, out), EVEN_ERR_MEMORY);
  fault_reset();
}

static void follows(void **state) {
  float narrow_running[2] = {1.0f, -2.0f};
  double running[2] = {1.0, -2.0};
  const double values[2] = {3.0, 5.0};
  (void)state;
  assert_int_equal(even_norm_follow(narrow_running, EVEN_F32, values, 2, 0.25, 2.0), EVEN_OK);
  assert_int_equal(even_norm_follow(running, EVEN_F64, values, 2, 0.25, 2.0), EVEN_OK);
  assert_true(narrow_running[0] == 2.25f && narrow_running[1] == 1.0f);
  assert_true(running[0] == 2.25 && running[1] == 1.0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(merges_what_ranks_have),
      cmocka_unit_test(merges_over_hosts),
      cmocka_unit_test(goes_back_through_statistics),
      cmocka_unit_test(tells_other_calls),
      cmocka_unit_test(survives_each_allocation),
      cmocka_unit_test(refuses_what_cannot_be),
      cmocka_unit_test(follows),
      cmocka_unit_test(finds_moments),
      cmocka_unit_test(keeps_the_digits_of_large_means),
      cmocka_unit_test(finds_the_inputs_gradient),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
