/* One rank's time model. Robust regression of two numbers with a prior on the fixed part, over a window that ends
 * where the rank's speed changed (after ADWIN: Bifet and Gavaldà 2007). */
#include "balancer/model.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

/* Before two sizes were seen: a tenth of the time is taken as fixed, give or take a quarter. */
static const double prior_fixed_part = 0.1;
static const double prior_fixed_spread = 0.25;
/* What a step's time scatters by before the rank's own scatter is known, and the least that is believed. */
static const double prior_noise = 0.08;
static const double least_noise = 0.01;
/* The steepness is at least this part of the mean cost of a sample. Where the truth is flatter, a share still moves
 * until the times agree; were a rank taken as flat by mistake, it would never move, and the mistake never show. */
static const double least_slope = 0.2;
/* Times and sizes outside of these are cut: their squares must stay finite. */
static const double shortest_seconds = 1e-9;
static const double longest_seconds = 1e9;
static const double most_samples = 0x1p53;
/* Standard errors that make a change certain: many ranks are looked at often, so chance has many tries. */
static const double certain = 4.5;
/* Scatter above which steps are taken together, and below which they are told apart again. */
static const double bursty = 0.4;
static const double calm = 0.1;
/* A rank whose steps would take less than so many times as long as before it became slower is as fast as then. */
static const double as_before = 1.2;
/* Where it scattered by more, it was stopped now and then, and as fast as before says nothing. */
static const double noisy = 0.2;
/* A rank that was as fast, or as slow, in more of its steps before is no other one for a few such in a row. */
static const double often = 0.1;
/* Steps that depart from the line by more than this in the mean of the last few have it looked at. */
static const double drifted = 0.05;
/* What a new step counts in that mean, and what is left of it once the line was looked at. */
static const double drift_part = 0.125;
static const double drift_left = 0.5;
/* A stall is no drift. */
static const double most_drift = 0.2;
/* Of a rank that was steady for long, no stop of its quota's. */
static const double far_faster = 0.5;
enum {
  LONG = 48,       /* steps */
  FRESH_LINE = 24, /* steps before which a line still moves much at each look */
  MOST_BLOCK = 8,
  SHOWN = 16, /* steps at one speed that tell it for good */
  FEW = 6,    /* recent steps, of which the middle is compared; of more it is the mean … */
  MANY = 16   /* … and of so many their own scatter counts, and a change long ago half as much */
};

static double larger(double a, double b) {
  return a > b ? a : b;
}

static double smaller(double a, double b) {
  return a < b ? a : b;
}

double even_model_line(const even_rank_model *model, double samples) {
  return larger(shortest_seconds, model->fixed_seconds + model->seconds_per_sample * samples);
}

bool even_model_bent(const even_rank_model *model) {
  return model->shape.bent;
}

/* By the sizes where these are believed, else along the line. */
static double expected_at(const even_rank_model *model, double samples) {
  return model->shape.bent ? even_shape_at(&model->shape, samples) : even_model_line(model, samples);
}

static double in_buckets(const even_rank_model *model, int64_t samples) {
  int64_t over = model->bucket > 1 ? samples % model->bucket : 0;
  return (double)samples + (over > 0 ? (double)(model->bucket - over) : 0.0);
}

/* Micro-batches of the share beyond the first. */
static int64_t more_pieces(const even_rank_model *model, int64_t samples) {
  return model->micro_batch > 0 && samples > 0 ? (samples - 1) / model->micro_batch : 0;
}

/* To whole buckets, and with what further micro-batches cost: the time is a straight line over these. */
static double padded(const even_rank_model *model, int64_t samples) {
  int64_t more = more_pieces(model, samples);
  if (more == 0 || !(model->piece_samples > 0.0)) {
    return in_buckets(model, samples);
  }
  double whole = in_buckets(model, model->micro_batch) + model->piece_samples;
  return (double)more * whole + in_buckets(model, samples - more * model->micro_batch);
}

/* Micro-batches beyond the first of so many samples, which may be a mean, or a whole bucket's. */
static double pieces_of(double samples, int64_t micro_batch) {
  return micro_batch > 0 ? larger(0.0, ceil(samples / (double)micro_batch) - 1.0) : 0.0;
}

/* Seconds for the largest share of a window. */
static double seconds_of(const even_rank_model *model, double share) {
  return expected_at(model, share + model->piece_samples * pieces_of(share, model->micro_batch));
}

/* Speeds of spared dummy batches that differ by less are the same. */
static const double same_speed = 1.25;
/* Of them, before their mean is compared. */
enum { IDLE_SHOWN = 5 };

static double idle_seconds(const even_rank_model *model) {
  return even_spread_of(model->idle, model->idle_count).mean;
}

bool even_model_idles(const even_rank_model *model) {
  return model->idle_count > 0;
}

double even_model_at(const even_rank_model *model, int64_t samples) {
  if (samples == 0 && even_model_idles(model)) {
    return smaller(idle_seconds(model), expected_at(model, padded(model, 1)));
  }
  if (samples == 0) {
    return model->dummy ? expected_at(model, padded(model, 1)) : model->fixed_seconds;
  }
  return expected_at(model, padded(model, samples));
}

double even_model_slope(const even_rank_model *model, int64_t samples) {
  if (!model->shape.bent) {
    return model->seconds_per_sample;
  }
  return even_model_at(model, samples + 1) - even_model_at(model, samples);
}

static void drop(even_rank_model *model, int oldest) {
  model->count -= oldest;
  memmove(model->samples, model->samples + oldest, (size_t)model->count * sizeof *model->samples);
  memmove(model->seconds, model->seconds + oldest, (size_t)model->count * sizeof *model->seconds);
  memmove(model->pieces, model->pieces + oldest, (size_t)model->count * sizeof *model->pieces);
}

/* Of `samples` in the mean, which had `pieces` so far. Those of micro-batches as large as before stay: of steps that
 * were taken together they are no whole number. */
static void cut_anew(const even_rank_model *before, int64_t micro_batch, double piece_samples, double *samples,
                     double *pieces) {
  double own = larger(1.0, *samples - before->piece_samples * *pieces);
  *pieces = micro_batch == before->micro_batch ? *pieces : pieces_of(own, micro_batch);
  *samples = own + piece_samples * *pieces;
}

void even_model_set_pieces(even_rank_model *model, int64_t micro_batch, double piece_samples) {
  for (int i = 0; i < model->count; i++) {
    cut_anew(model, micro_batch, piece_samples, &model->samples[i], &model->pieces[i]);
  }
  if (model->pending > 0) {
    double samples = model->pending_samples / model->pending;
    double pieces = model->pending_pieces / model->pending;
    cut_anew(model, micro_batch, piece_samples, &samples, &pieces);
    model->pending_samples = samples * model->pending;
    model->pending_pieces = pieces * model->pending;
  }
  model->micro_batch = micro_batch;
  model->piece_samples = piece_samples;
  model->shape = (even_shape){0}; /* sizes are others now */
}

/* All that was measured took `factor` times as long, had the rank's speed been today's. */
static void rescale(even_rank_model *model, double factor) {
  for (int i = 0; i < model->count; i++) {
    model->seconds[i] *= factor;
  }
  model->pending_seconds *= factor;
  model->fixed_seconds *= factor;
  model->seconds_per_sample *= factor;
  even_shape_move(&model->shape, factor, 0.0);
}

/* kept^steps. */
static double kept_for(double kept, int steps) {
  double left = 1.0;
  for (int step = 0; step < steps; step++) {
    left *= kept;
  }
  return left;
}

void even_model_follow(even_rank_model *model, double factor, double kept) {
  double left = kept_for(kept, model->pending);
  model->pending_seconds *= 1.0 + (factor - 1.0) * (1.0 - left);
  for (int i = model->count - 1; i >= 0; i--) {
    left *= left > 0.001 ? kept_for(kept, model->block) : 1.0;
    double seconds = model->seconds[i] * (1.0 + (factor - 1.0) * (1.0 - left));
    model->seconds[i] = larger(shortest_seconds, smaller(seconds, longest_seconds));
  }
  model->fixed_seconds *= factor;
  model->seconds_per_sample *= factor;
  model->known_seconds *= factor;
  model->idle_reference *= factor;
  for (int i = 0; i < model->idle_count; i++) {
    model->idle[i] *= factor;
  }
  even_shape_move(&model->shape, factor, 0.0);
}

static void shift(double *values, int count, double seconds) {
  for (int i = 0; i < count; i++) {
    values[i] = larger(shortest_seconds, values[i] + seconds);
  }
}

void even_model_shift(even_rank_model *model, double seconds) {
  even_shape_move(&model->shape, 1.0, seconds);
  shift(model->seconds, model->count, seconds);
  shift(model->idle, model->idle_count, seconds);
  shift(&model->idle_reference, model->idle_reference > 0.0 ? 1 : 0, seconds);
  shift(&model->known_seconds, model->known_samples > 0.0 ? 1 : 0, seconds);
  shift(&model->pending_seconds, model->pending > 0 ? 1 : 0, seconds * model->pending);
  if (model->known) {
    model->fixed_seconds = larger(0.0, model->fixed_seconds + seconds);
    model->fixed_samples = larger(0.0, model->fixed_samples + seconds / model->seconds_per_sample);
  }
}

/* The line stays, but for the rank's speed. Whether that is another now. */
static bool take_idle(even_rank_model *model, double seconds) {
  model->idle[model->idle_next] = larger(shortest_seconds, smaller(seconds, longest_seconds));
  model->idle_next = (model->idle_next + 1) % EVEN_MODEL_IDLE;
  model->idle_count += model->idle_count < EVEN_MODEL_IDLE ? 1 : 0;
  model->idle_since += model->idle_since < EVEN_MODEL_IDLE ? 1 : 0;
  if (model->idle_since < IDLE_SHOWN) {
    return false;
  }
  double idle = idle_seconds(model);
  double factor = model->idle_reference > 0.0 ? idle / model->idle_reference : 1.0;
  if (model->idle_reference > 0.0 && factor < same_speed && factor * same_speed > 1.0) {
    return false;
  }
  model->idle_reference = idle;
  rescale(model, factor);
  return true;
}

/* Of another step than a spared one: what these were a guess for is measured now. */
static void end_idle(even_rank_model *model, int64_t samples) {
  if (model->guess) {
    model->count = model->pending = 0;
    model->pending_samples = model->pending_seconds = model->pending_pieces = 0.0;
    model->known = model->guess = false;
    model->shape = (even_shape){0};
  }
  model->idle_count = samples == 0 ? 0 : model->idle_count; /* they are not spared any more */
  model->idle_reference = 0.0;
  model->idle_since = 0;
}

/* A rank that is slower now forgets what it did before; not which share it did in what time, where that was steady. */
static void keep_known(even_rank_model *model, double factor, int older) {
  bool steady = older >= SHOWN && model->block == 1 && model->usual_noise < noisy;
  if (factor > 1.0 && steady && model->most_samples >= model->known_samples) {
    model->known_samples = model->most_samples;
    model->known_seconds = seconds_of(model, model->most_samples);
  }
}

/* Forgets all but the last `recent` entries: before them the rank took `factor` times less. */
static void begin_anew(even_rank_model *model, double factor, int recent) {
  int older = model->count - recent;
  keep_known(model, factor, older);
  bool steady = older >= LONG && model->block == 1 && model->usual_noise < noisy;
  model->sped_up = model->sped_up || (steady && factor < far_faster);
  drop(model, model->count - recent);
  model->fixed_seconds *= factor;
  model->seconds_per_sample *= factor;
  for (int idle = 0; idle < model->idle_count; idle++) {
    model->idle[idle] *= factor;
  }
  model->restless += 1.0;
}

/* Where the sizes are believed they tell, too, when the rank has become another: the line begins anew. */
static void take_size(even_rank_model *model, double samples, double seconds) {
  if (model->piece_samples > 0.0) {
    return;
  }
  double factor = even_shape_take(&model->shape, samples, seconds);
  bool changed = factor < 1.0 || factor > 1.0;
  if (model->shape.bent && changed && model->count > 0) {
    begin_anew(model, factor, 1);
  }
  if (model->shape.bent && (changed || even_shape_arrives(&model->shape))) {
    even_shape_judge(&model->shape, model->fixed_seconds, model->seconds_per_sample);
  }
}

bool even_model_take(even_rank_model *model, int64_t samples, double seconds, bool spared) {
  if (samples == 0 && seconds <= 0.0) {
    return false;
  }
  model->dummy = model->dummy || samples == 0;
  if (samples > 0 || !spared) {
    end_idle(model, samples);
  } else if (model->count > 0 && !model->guess) {
    return take_idle(model, seconds);
  } else {
    model->guess = true;
  }
  /* a dummy batch is one sample whose gradient is thrown away */
  double size = smaller(padded(model, samples > 0 ? samples : 1), most_samples);
  double step = larger(shortest_seconds, smaller(seconds, longest_seconds));
  take_size(model, size, step);
  model->pending_samples += size;
  model->pending_seconds += step;
  model->pending_pieces += (double)more_pieces(model, samples);
  model->pending++;
  model->restless = larger(0.0, model->restless - 1.0 / 32.0);
  if (model->pending < model->block) {
    return false;
  }
  if (model->count == EVEN_MODEL_WINDOW) {
    drop(model, EVEN_MODEL_WINDOW / 8);
  }
  model->samples[model->count] = model->pending_samples / model->pending;
  model->seconds[model->count] = model->pending_seconds / model->pending;
  model->pieces[model->count] = model->pending_pieces / model->pending;
  double expected = model->known ? expected_at(model, model->samples[model->count]) : model->seconds[model->count];
  model->drift += drift_part * (smaller(most_drift, model->seconds[model->count] / expected - 1.0) - model->drift);
  model->count++;
  model->pending = 0;
  model->pending_samples = model->pending_seconds = model->pending_pieces = 0.0;
  return true;
}

/* Every two entries become their mean. */
static void merge(even_rank_model *model) {
  int odd = model->count % 2;
  drop(model, odd);
  model->count /= 2;
  for (int i = 0; i < model->count; i++) {
    model->samples[i] = (model->samples[(ptrdiff_t)2 * i] + model->samples[2 * i + 1]) / 2.0;
    model->seconds[i] = (model->seconds[(ptrdiff_t)2 * i] + model->seconds[2 * i + 1]) / 2.0;
    model->pieces[i] = (model->pieces[(ptrdiff_t)2 * i] + model->pieces[2 * i + 1]) / 2.0;
  }
  model->block *= 2;
}

bool even_model_surprised(const even_rank_model *model) {
  if (!model->known || model->count == 0) {
    return true;
  }
  double ratio = model->seconds[model->count - 1] / expected_at(model, model->samples[model->count - 1]);
  double band = larger(0.1, 2.0 * model->noise);
  return ratio > 1.0 + band || ratio < 1.0 - smaller(band, 0.5);
}

bool even_model_drifts(const even_rank_model *model) {
  return fabs(model->drift) > drifted;
}

static void begin(even_rank_model *model) {
  double samples = model->samples[0];
  model->fixed_seconds = prior_fixed_part * model->seconds[0];
  model->seconds_per_sample = (1.0 - prior_fixed_part) * model->seconds[0] / samples;
  model->fixed_samples = samples * prior_fixed_part / (1.0 - prior_fixed_part);
  model->noise = prior_noise;
  model->usual_noise = prior_noise;
  model->known = true;
}

static void ratios(const even_rank_model *model, double *out) {
  for (int i = 0; i < model->count; i++) {
    out[i] = model->seconds[i] / expected_at(model, model->samples[i]);
  }
}

/* One weighted least-squares step (relative errors) on the cut times; the prior on the fixed part counts as one more
 * measurement. */
static void regress(even_rank_model *model) {
  double ratio[EVEN_MODEL_WINDOW] = {0};
  for (int i = 0; i < model->count; i++) {
    ratio[i] = model->seconds[i] / even_model_line(model, model->samples[i]);
  }
  even_spread cut = even_spread_of(ratio, model->count);
  double weights = 0.0, x = 0.0, xx = 0.0, y = 0.0, xy = 0.0, mean_samples = 0.0;
  for (int i = 0; i < model->count; i++) {
    double expected = even_model_line(model, model->samples[i]);
    double seconds = expected * even_spread_cut(&cut, ratio[i]);
    double weight = 1.0 / (expected * expected);
    weights += weight;
    x += weight * model->samples[i];
    xx += weight * model->samples[i] * model->samples[i];
    y += weight * seconds;
    xy += weight * model->samples[i] * seconds;
    mean_samples += model->samples[i];
  }
  mean_samples /= model->count;
  double level = even_model_line(model, mean_samples) * cut.mean;
  double prior = level * model->fixed_samples / (model->fixed_samples + mean_samples);
  double spread_seconds = prior_fixed_spread * level;
  double noise = larger(model->noise, least_noise);
  double certainty = noise * noise / (spread_seconds * spread_seconds);
  double determinant = (weights + certainty) * xx - x * x;
  double fixed = ((y + certainty * prior) * xx - x * xy) / determinant;
  double slope = (xy - fixed * x) / xx;
  double least = least_slope * level / mean_samples;
  if (!(fixed >= 0.0)) {
    fixed = 0.0;
    slope = xy / xx;
  } else if (slope < least) {
    slope = least;
    fixed = larger(0.0, (y - slope * x) / weights);
  }
  model->fixed_seconds = fixed;
  model->seconds_per_sample = larger(slope, least);
  /* once the data know the fixed part far better than the prior did, they are the prior of what comes; not while the
   * rank is changing, when the difference of two moments would be taken for that of two sizes */
  if (weights - x * x / xx > 4.0 * certainty && model->restless < 0.5 && model->noise < 2.0 * model->usual_noise) {
    model->fixed_samples = model->fixed_seconds / model->seconds_per_sample;
  }
}

/* `usual` counts as three steps. */
static double blended_noise(double usual, double measured, int count) {
  return sqrt((measured * measured * count + usual * usual * 3.0) / (count + 3));
}

/* The smallest change that `count` steps in agreement can prove whatever the noise: two steps prove a half, many
 * prove a twentieth. */
static double least_change(int count) {
  return count <= 2 ? 0.5 : count == 3 ? 0.3 : count == 4 ? 0.2 : count <= 6 ? 0.12 : 0.05;
}

/* Sums of the first i ratios, i = 0 … count, cut like the whole window's: any part's mean and deviation in one step. */
typedef struct running {
  double sum[EVEN_MODEL_WINDOW + 1];
  double squares[EVEN_MODEL_WINDOW + 1];
} running;

static void run(const even_rank_model *model, const double *ratio, const even_spread *cut, running *out) {
  out->sum[0] = 0.0;
  out->squares[0] = 0.0;
  for (int i = 0; i < model->count; i++) {
    double value = even_spread_cut(cut, ratio[i]);
    out->sum[i + 1] = out->sum[i] + value;
    out->squares[i + 1] = out->squares[i] + value * value;
  }
}

/* The same question without a normal distribution, for ranks with rare long stalls: all the last `count` ratios lie
 * beyond half the way to `factor`; how likely is that, by how often the earlier ones did? */
static bool unheard_of(const double *ratio, int older, int count, double mean, double factor) {
  double half = mean * (1.0 + factor) / 2.0;
  int beyond = 0;
  double chance = 1.0;
  for (int i = 0; i < older; i++) {
    beyond += factor > 1.0 ? ratio[i] >= half : ratio[i] <= half;
  }
  for (int i = 0; i < count; i++) {
    chance *= (beyond + 1.0) / (older + 2.0); /* rule of succession */
    if (factor > 1.0 ? ratio[older + i] < half : ratio[older + i] > half) {
      return false;
    }
  }
  return chance < 1e-4;
}

/* Whether steps before were often as far on that side: a rank that its quota stops now and then is fast, or slow, for
 * some steps in a row. One slow step alone may be a training's first, which is warm-up. */
static bool usual(const double *ratio, int older, double mean, double factor) {
  double half = mean * (1.0 + factor) / 2.0;
  int beyond = 0;
  for (int i = 0; i < older; i++) {
    beyond += factor > 1.0 ? ratio[i] >= half : ratio[i] <= half;
  }
  return beyond > often * older && (factor < 1.0 || beyond > 1);
}

/* Of the last `count` ratios' mean, as a part of `mean`, not above the scatter that all had before: a steady rank's
 * level is known sooner than that of the steps before it was steady (Welch 1947). */
static double recent_noise(const running *sums, int before, int count, double mean, double noise) {
  if (count < MANY) {
    return noise;
  }
  double at = (sums->sum[before + count] - sums->sum[before]) / count;
  double square = (sums->squares[before + count] - sums->squares[before]) / count - at * at;
  double own = sqrt(larger(0.0, square) * count / (count - 1) + least_noise * least_noise) / mean;
  return smaller(noise, 1.25 * own); /* what the cut took */
}

/* By what factor the last `count` ratios differ from those before, 1 when that may be chance. */
static double change(const even_rank_model *model, const double *ratio, const running *sums, int count) {
  int older = model->count - count;
  double mean = sums->sum[older] / older;
  double variance = larger(0.0, sums->squares[older] / older - mean * mean);
  double up = 0.0;
  double down = 0.0;
  if (count > FEW) {
    up = down = (sums->sum[model->count] - sums->sum[older]) / count;
  } else {
    /* more than half of the steps must agree, on the cautious side */
    up = even_spread_at(ratio + older, count, (count - 1) / 2, 1.0);
    down = even_spread_at(ratio + older, count, count / 2, 1.0);
  }
  double factor = up > mean ? up / mean : (down < mean ? down / mean : 1.0);
  double size = factor > 1.0 ? factor - 1.0 : 1.0 / factor - 1.0;
  if (size <= least_change(count)) {
    return 1.0;
  }
  double noise = blended_noise(model->usual_noise, sqrt(variance) / mean, older);
  double own = recent_noise(sums, older, count, mean, noise);
  double doubts = (count < MANY ? 2.0 : 1.0) * model->restless;
  double chance = (certain + doubts) * sqrt(own * own / count + noise * noise / older);
  bool proven = size > chance && !(count <= FEW && usual(ratio, older, mean, factor));
  return proven || (count <= FEW && unheard_of(ratio, older, count, mean, factor)) ? factor : 1.0;
}

double even_model_measured(const even_rank_model *model) {
  bool again = model->known_samples > model->most_samples &&
               seconds_of(model, model->known_samples) < model->known_seconds * as_before;
  return again ? model->known_samples : model->most_samples;
}

/* Drops the steps before the rank's speed changed; whether it did. *rest: the ratios of those that are left. */
static bool forget_the_past(even_rank_model *model, even_spread *rest) {
  static const int recent[] = {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
  double ratio[EVEN_MODEL_WINDOW];
  running sums;
  ratios(model, ratio);
  *rest = even_spread_of(ratio, model->count);
  run(model, ratio, rest, &sums);
  for (size_t i = 0; i < sizeof recent / sizeof recent[0] && recent[i] < model->count; i++) {
    double factor = change(model, ratio, &sums, recent[i]);
    if (factor < 1.0 || factor > 1.0) {
      begin_anew(model, factor, recent[i]);
      if (!model->shape.bent) {
        even_shape_doubt(&model->shape, (int64_t)recent[i] * model->block);
      }
      ratios(model, ratio);
      *rest = even_spread_of(ratio, model->count);
      return true;
    }
  }
  return false;
}

void even_model_learn(even_rank_model *model) {
  if (model->count == 0) {
    return;
  }
  if (!model->known) {
    begin(model);
  }
  even_spread rest = {0};
  model->drift *= drift_left;
  bool again = true;
  for (int tries = 0; again && tries < 2; tries++) {
    /* the last line is a good start where little is new */
    for (int pass = model->count < FRESH_LINE ? 3 : 1; pass > 0; pass--) {
      regress(model);
    }
    again = forget_the_past(model, &rest);
  }
  even_shape_judge(&model->shape, model->fixed_seconds, model->seconds_per_sample);
  double noise = larger(least_noise, rest.deviation / rest.mean);
  model->noise = blended_noise(model->usual_noise, noise, model->count);
  if (model->count >= 16) {
    model->usual_noise = noise;
  }
  if (model->count >= 16) {
    if (noise > bursty && model->block < MOST_BLOCK) {
      merge(model);
    } else if (noise < calm && model->block > 1) {
      model->block /= 2;
    }
  }
  model->most_samples = 0.0;
  for (int i = 0; i < model->count; i++) {
    double share = model->samples[i] - model->piece_samples * model->pieces[i];
    model->most_samples = larger(model->most_samples, larger(1.0, share));
  }
}
