/* Micro-batches, buckets and constants over a time table. The function is monotone in the rounded arithmetic too (each
 * operation is, and a partial micro-batch is clamped to a whole one): the solver's exactness rests on it. */
#include "balancer/cost.h"

#include "balancer/time_table.h"
#include "base/fail.h"

#include <inttypes.h>
#include <math.h>

even_status even_rank_cost_check(const even_rank_cost *cost, size_t rank) {
  EVEN_TRY(even_time_table_check(&cost->table, rank));
  if (!isfinite(cost->constant_seconds) || cost->constant_seconds < 0.0) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: the constant part of a step of rank %zu is %g seconds", rank,
                     cost->constant_seconds);
  }
  if (cost->micro_batch < 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: the micro-batches of rank %zu have %" PRId64 " samples", rank,
                     cost->micro_batch);
  }
  if (cost->bucket < 0 || cost->bucket > EVEN_MOST_BUCKET) {
    (void)even_fail(EVEN_ERR_ARGUMENT, "balancer: the buckets of rank %zu have %" PRId64 " samples", rank,
                    cost->bucket);
    return even_error_fix("give 1 to %d, 0 for none", EVEN_MOST_BUCKET);
  }
  return EVEN_OK;
}

static bool has_buckets(const even_rank_cost *cost) {
  return cost->bucket > 1;
}

/* One micro-batch, without the constant part. */
static double micro_seconds(const even_rank_cost *cost, int64_t samples) {
  if (has_buckets(cost) && samples > 0) {
    int64_t over = samples % cost->bucket;
    int64_t missing = over > 0 ? cost->bucket - over : 0;
    samples = samples <= INT64_MAX - missing ? samples + missing : INT64_MAX;
  }
  return even_time_table_at(&cost->table, samples);
}

double even_rank_cost_at(const even_rank_cost *cost, int64_t samples) {
  if (samples == 0 && cost->leaves_out) {
    return 0.0;
  }
  if (cost->micro_batch == 0 || samples <= cost->micro_batch) {
    return micro_seconds(cost, samples) + cost->constant_seconds;
  }
  int64_t whole = samples / cost->micro_batch;
  int64_t rest = samples % cost->micro_batch;
  double one = micro_seconds(cost, cost->micro_batch);
  double seconds = (double)whole * one;
  if (rest > 0) {
    double next = (double)(whole + 1) * one;
    seconds += micro_seconds(cost, rest);
    seconds = seconds < next ? seconds : next;
  }
  return seconds + cost->constant_seconds;
}

int64_t even_time_table_best_micro_batch(const even_time_table *table, int64_t most) {
  int64_t best = most;
  double least = even_time_table_at(table, most) / (double)most;
  /* between two points the time per sample is (a + b n) / n, which only rises or only falls: the ends are enough */
  for (size_t i = table->points; i-- > 0;) {
    int64_t samples = table->samples[i];
    if (samples >= 1 && samples < most && table->seconds[i] / (double)samples < least) {
      best = samples;
      least = table->seconds[i] / (double)samples;
    }
  }
  return best;
}

/* A first guess at the inverse; may be off by rounding. */
static double guess(const even_rank_cost *cost, double seconds) {
  double left = seconds - cost->constant_seconds;
  double before = 0.0;
  if (cost->micro_batch > 0) {
    double one = micro_seconds(cost, cost->micro_batch);
    if (left >= one) {
      double whole = floor(left / one);
      before = whole * (double)cost->micro_batch;
      left -= whole * one;
    }
  }
  double rest = even_time_table_guess(&cost->table, left);
  if (has_buckets(cost)) {
    rest = floor(rest / (double)cost->bucket) * (double)cost->bucket;
  }
  return before + rest;
}

int64_t even_rank_cost_reach(const even_rank_cost *cost, double seconds, int64_t least, int64_t most) {
  double near = guess(cost, seconds);
  int64_t low = least; /* the answer lies in low … high */
  int64_t high = most;
  int64_t at = most;
  if (near < (double)most) { /* false for NaN and infinity too: then `most` is tried first */
    at = near > (double)least ? (int64_t)near : least;
    at = at < most ? at : most; /* (double)most may be rounded up */
  }
  /* the guess is mostly right to one sample: walk from it in growing steps, then halve */
  for (int64_t stride = 1; low < high; stride *= 2) {
    at = at > low ? at : low + 1;
    if (even_rank_cost_at(cost, at) <= seconds) {
      low = at;
      at = high - low > stride ? low + stride : high;
    } else {
      high = at - 1;
      at = high - low > stride ? high - stride + 1 : low + 1;
    }
    if (stride >= 16) {
      at = low + (high - low + 1) / 2;
      stride = 16;
    }
  }
  return low;
}
