/* Sizes and what they took; see shape.h. Plain arithmetic alone: every rank must get the same bits. */
#include "balancer/shape.h"

#include <math.h>
#include <string.h>

enum {
  ARRIVED = 4,  /* steps with a size, after which a jump is the rank's and not the size's */
  SETTLED = 16, /* and after which what creeps is */
  LEAST_SIZES = 3,
  TILED_SIZES = 4,
  LOOKED_AT = 8, /* every so many steps with a size */
  TILES = 12
};

/* That kernels work on, more or less. */
static const double tiles[TILES] = {8.0, 12.0, 16.0, 20.0, 24.0, 32.0, 40.0, 48.0, 56.0, 64.0, 96.0, 128.0};

/* Steps that a mean is of: newer ones count more; that the scatter is of; of a size that agree, before it counts;
 * beside others of their size before the scatter is known. */
static const double most_steps = 16.0;
static const double memory = 64.0;
static const double shown = 2.0;
static const double known_after = 12.0;

/* A step so far from the others of its size is a stall, or the second of a change; more where they scatter. */
static const double least_far = 0.15;
static const double far_deviations = 4.0;
/* A step further off is off by so much. */
static const double most_off = 0.5;
/* Of steps that are not known yet, and the least that is believed. */
static const double usual_scatter = 0.08;
static const double least_scatter = 0.01;
/* Ranks that scatter by more are stopped now and then: trials find what is best for them. */
static const double stopped = 0.08;
static const double often = 0.04; /* of its steps */
/* The sizes differ from the line by so much more variance than steps among one another, and by this part of the time,
 * before they are believed; and until both are less than the others. */
static const double many = 8.0;
static const double begins = 4.0;
static const double begins_off = 0.03;
static const double ends = 1.5;
static const double ends_off = 0.015;
static const double nowhere = 0.3;
/* Tiles that are off by less than this part of chance explain the sizes alike. */
static const double alike = 0.03;
/* The stairs begin so many tiles below the last size's. */
static const double tiles_before = 6.0;
/* Less is rounding: all sizes are of one tile. */
static const double one_tile = 1e-9;
/* Stays with other sizes since a size was seen, after which it counts half. */
static const double believed_stays = 8.0;
/* A smaller size that took longer than a larger one by more than this is of another time. */
static const double contradicts = 0.85;
/* A rank that changed so often within so many steps comes and goes: what differs is its speed, and not its sizes. */
static const double most_changes = 1.0;
static const double remembered = 128.0;
/* More would be remembered for longer, though it has long been calm. */
static const double changes_known = 2.0;
/* Beyond the sizes a sample takes between these parts of the mean one. */
static const double least_slope = 0.2;
static const double most_slope = 0.9;
/* Larger sizes are not remembered: tables end far below. */
static const double most_samples = 0x1p39;

static double larger(double a, double b) {
  return a > b ? a : b;
}

static double smaller(double a, double b) {
  return a < b ? a : b;
}

static double deviation(const even_shape *shape) {
  double known = shape->scatter_steps;
  double square = (shape->scatter * known + usual_scatter * usual_scatter * 3.0) / (known + 3.0);
  return larger(least_scatter, sqrt(square));
}

static bool far_from(const even_shape *shape, double seconds, double mean) {
  double band = larger(least_far, far_deviations * deviation(shape));
  return seconds > mean * (1.0 + band) || seconds * (1.0 + band) < mean;
}

static void forget_oldest(even_shape *shape) {
  int oldest = 0;
  for (int i = 1; i < shape->count; i++) {
    oldest = shape->size[i].seen < shape->size[oldest].seen ? i : oldest;
  }
  shape->count--;
  memmove(&shape->size[oldest], &shape->size[oldest + 1], (size_t)(shape->count - oldest) * sizeof *shape->size);
}

/* The place of the size, made where it is new. */
static even_size *size_of(even_shape *shape, double samples) {
  int at = 0;
  while (at < shape->count && shape->size[at].samples < samples) {
    at++;
  }
  if (at < shape->count && !(shape->size[at].samples > samples)) {
    return &shape->size[at];
  }
  if (shape->count == EVEN_SHAPE_SIZES) {
    forget_oldest(shape);
    return size_of(shape, samples);
  }
  memmove(&shape->size[at + 1], &shape->size[at], (size_t)(shape->count - at) * sizeof *shape->size);
  shape->count++;
  shape->size[at] = (even_size){.samples = samples};
  return &shape->size[at];
}

void even_shape_move(even_shape *shape, double factor, double seconds) {
  for (int i = 0; i < shape->count; i++) {
    shape->size[i].seconds = larger(1e-9, shape->size[i].seconds * factor + seconds);
  }
  for (int i = 0; i < shape->points; i++) {
    shape->seconds[i] = larger(1e-9, shape->seconds[i] * factor + seconds);
  }
  shape->slope *= factor;
}

static bool contradict(const even_size *one, const even_size *other) {
  const even_size *small = one->samples < other->samples ? one : other;
  const even_size *large = small == one ? other : one;
  return other->steps >= shown && large->seconds < contradicts * small->seconds;
}

/* Sizes that cannot be true beside this one, which is newer; where its time is another than it was (or not known), the
 * rank is another since then, and all are of before. */
static void doubt_contradictions(even_shape *shape, const even_size *now, bool all) {
  bool any = false;
  for (int i = 0; i < shape->count; i++) {
    even_size *size = &shape->size[i];
    bool wrong = size != now && !size->doubtful && contradict(now, size);
    size->doubtful = size->doubtful || wrong;
    any = any || wrong;
  }
  for (int i = 0; any && all && i < shape->count; i++) {
    shape->size[i].doubtful = &shape->size[i] != now;
  }
}

/* As fast as then: what was measured before counts again. */
static void trust(even_shape *shape) {
  for (int i = 0; i < shape->count; i++) {
    shape->size[i].doubtful = false;
  }
}

static void take_scatter(even_shape *shape, double off, bool far) {
  off = smaller(off, most_off);
  shape->scatter_steps += shape->scatter_steps < memory ? 1.0 : 0.0;
  shape->stalls += ((far ? 1.0 : 0.0) - shape->stalls) / shape->scatter_steps;
  shape->scatter += (off * off - shape->scatter) / shape->scatter_steps;
}

/* The mean of a size, after one more step that is near it. */
static void follow(even_shape *shape, even_size *size, double seconds) {
  take_scatter(shape, seconds / size->seconds - 1.0, false);
  size->steps += size->steps < most_steps ? 1.0 : 0.0;
  size->seconds += (seconds - size->seconds) / size->steps;
}

/* What differs while one size runs is the rank's speed, and is so for all sizes. */
static double settle(even_shape *shape, even_size *size, double before, bool changed) {
  double factor = size->seconds / before;
  double own = size->seconds;
  if (shape->stay <= (changed ? ARRIVED : SETTLED)) {
    if (shape->stay >= 2) {
      doubt_contradictions(shape, size, changed);
    }
    return 1.0;
  }
  even_shape_move(shape, factor, 0.0);
  size->seconds = own;
  shape->changes = changed ? smaller(shape->changes + 1.0, changes_known) : shape->changes;
  return changed ? factor : 1.0;
}

double even_shape_take(even_shape *shape, double samples, double seconds) {
  if (samples > most_samples) {
    return 1.0;
  }
  even_size *size = size_of(shape, samples);
  shape->taken++;
  shape->changes = larger(0.0, shape->changes - 1.0 / remembered);
  shape->stay = size->steps > 0.0 && samples <= shape->last && samples >= shape->last ? shape->stay + 1 : 1;
  shape->stays += shape->stay == 1 ? 1 : 0;
  shape->last = samples;
  size->seen = shape->taken;
  size->stays = shape->stays;
  double before = size->seconds;
  if (size->steps < 2.0) {
    /* the first steps of a training are slow (warm-up), never fast */
    bool like = size->steps > 0.0 && !far_from(shape, seconds, before);
    size->seconds = size->steps > 0.0 ? (like ? (before + seconds) / 2.0 : smaller(before, seconds)) : seconds;
    size->steps = like ? 2.0 : 1.0;
    if (like) {
      doubt_contradictions(shape, size, true);
    }
    return 1.0;
  }
  double off = size->off;
  if (!far_from(shape, seconds, before)) {
    if (off > 0.0) {
      take_scatter(shape, off / before - 1.0, true); /* it was a stall */
    }
    size->off = 0.0;
    follow(shape, size, seconds);
    if (size->doubtful) {
      trust(shape);
    }
    return settle(shape, size, before, false);
  }
  if (!(off > 0.0) || far_from(shape, seconds, off)) {
    if (off > 0.0) {
      take_scatter(shape, off / before - 1.0, true);
    }
    size->off = seconds;
    return 1.0;
  }
  *size = (even_size){
      .samples = samples, .seconds = (off + seconds) / 2.0, .steps = 2.0, .seen = size->seen, .stays = size->stays};
  return settle(shape, size, before, true);
}

bool even_shape_arrives(const even_shape *shape) {
  return shape->stay <= ARRIVED;
}

/* Whether the last size's time lies between those of smaller and larger ones. */
static bool fits(const even_shape *shape) {
  const even_size *now = NULL;
  double below = 0.0;
  double above = INFINITY;
  for (int i = 0; i < shape->count; i++) {
    const even_size *size = &shape->size[i];
    bool smaller_one = size->samples < shape->last;
    bool same = !smaller_one && size->samples <= shape->last;
    now = same ? size : now;
    below = smaller_one && size->steps >= shown && !size->doubtful ? larger(below, size->seconds) : below;
    above = !smaller_one && !same && size->steps >= shown && !size->doubtful ? smaller(above, size->seconds) : above;
  }
  return now != NULL && now->seconds >= contradicts * below && contradicts * now->seconds <= above;
}

void even_shape_doubt(even_shape *shape, int64_t steps) {
  if (shape->stay >= steps + ARRIVED || fits(shape)) {
    return; /* the size ran before, and has told; or that is what its size takes */
  }
  for (int i = 0; i < shape->count; i++) {
    even_size *size = &shape->size[i];
    size->doubtful = size->doubtful || size->samples < shape->last || size->samples > shape->last;
  }
}

static bool counts(const even_size *size) {
  return !size->doubtful && size->steps >= shown;
}

/* What the rank's speed did since was seen by way of other sizes, a little wrongly each time. */
static double weight_of(const even_shape *shape, const even_size *size) {
  return size->steps / (1.0 + (double)(shape->stays - size->stays) / believed_stays);
}

static double line_at(double fixed, double slope, double samples) {
  return larger(1e-9, fixed + slope * samples);
}

typedef struct fit {
  int sizes;
  double weights;
  double fixed; /* of the straight line that fits the sizes best */
  double slope;
} fit;

/* What the time grows with: samples, or those of whole tiles. */
static double counted(double samples, double tile) {
  return tile > 1.0 ? ceil(samples / tile) * tile : samples;
}

/* Weighted least squares of relative errors. */
static fit fit_line(const even_shape *shape, double tile) {
  fit out = {0};
  double w = 0.0, x = 0.0, xx = 0.0, y = 0.0, xy = 0.0;
  for (int i = 0; i < shape->count; i++) {
    const even_size *size = &shape->size[i];
    if (counts(size)) {
      double steps = weight_of(shape, size);
      double weight = steps / (size->seconds * size->seconds);
      double samples = counted(size->samples, tile);
      w += weight;
      x += weight * samples;
      xx += weight * samples * samples;
      y += weight * size->seconds;
      xy += weight * samples * size->seconds;
      out.weights += steps;
      out.sizes++;
    }
  }
  double determinant = w * xx - x * x;
  bool several = tile > 1.0 ? determinant > one_tile * w * xx : out.sizes > 1;
  out.slope = several ? (w * xy - x * y) / determinant : 0.0;
  out.fixed = out.sizes > 0 ? (y - out.slope * x) / w : 0.0;
  return out;
}

/* Mean square of what the sizes are off a line over whole tiles, whatever its level is beside theirs. */
static double off_line(const even_shape *shape, double tile, double fixed, double slope) {
  double weights = 0.0;
  double sum = 0.0;
  double squares = 0.0;
  for (int i = 0; i < shape->count; i++) {
    const even_size *size = &shape->size[i];
    if (counts(size)) {
      double ratio = line_at(fixed, slope, counted(size->samples, tile)) / size->seconds;
      double weight = weight_of(shape, size);
      weights += weight;
      sum += weight * ratio;
      squares += weight * ratio * ratio;
    }
  }
  double mean = sum / weights;
  return larger(0.0, squares / weights / (mean * mean) - 1.0);
}

/* Whether steps of one size tell what it takes. */
static bool tells(const even_shape *shape) {
  return shape->changes <= most_changes && shape->scatter_steps >= known_after && deviation(shape) <= stopped &&
         shape->stalls <= often;
}

/* So many times the variance that chance gives the sizes beside a line. */
static double beside_chance(const even_shape *shape, const fit *own, double off) {
  double noise = deviation(shape);
  return off * own->weights / (noise * noise) / (many + (double)(own->sizes - 2));
}

/* Whether no straight line goes through the sizes, but for chance; or the one that is believed is nowhere near. */
static bool is_bent(const even_shape *shape, double off, double times, double fixed, double slope) {
  if (off_line(shape, 1.0, fixed, slope) > nowhere * nowhere) {
    return true;
  }
  return shape->bent ? times > ends && off > ends_off * ends_off : times > begins && off > begins_off * begins_off;
}

/* The tile whose multiples explain the sizes, but for chance, where no straight line does, of several the smallest; 1:
 * none. `off`: the best line's variance, which is so many times chance's. */
static double find_tile(const even_shape *shape, int sizes, double off, double times, fit *stairs) {
  bool known = shape->tile > 1.0;
  /* it costs a dozen fits: else only whether the known one still holds */
  bool news = shape->stay <= SETTLED || shape->stay % LOOKED_AT == 0;
  double enough = known ? ends : begins;
  double least = off / enough;
  double best = 1.0;
  for (int i = 0; i < TILES && sizes >= TILED_SIZES && times > enough; i++) {
    bool this_one = known && !(tiles[i] < shape->tile || tiles[i] > shape->tile);
    fit own = news || this_one ? fit_line(shape, tiles[i]) : (fit){0};
    if (own.slope > 0.0 && own.fixed >= 0.0) {
      double rest = larger(alike * off / times, off_line(shape, tiles[i], own.fixed, own.slope));
      if (rest < least && beside_chance(shape, &own, rest) < ends) {
        least = rest;
        best = tiles[i];
        *stairs = own;
      }
    }
  }
  return best;
}

/* The first and the last size of each of the tiles around the last size. */
static void build_stairs(even_shape *shape, const fit *stairs) {
  double tile = shape->tile;
  double before = larger(0.0, counted(shape->last, tile) - tile * tiles_before);
  shape->points = EVEN_SHAPE_SIZES;
  for (int i = 0; i < EVEN_SHAPE_SIZES; i += 2) {
    shape->samples[i] = before + 1.0;
    before += tile;
    shape->samples[i + 1] = before;
    shape->seconds[i] = shape->seconds[i + 1] = line_at(stairs->fixed, stairs->slope, before);
  }
  shape->slope = stairs->slope;
}

/* The sizes as a table that never falls: neighbours of which the larger took less time become their mean. How many. */
static int pool(const even_shape *shape, bool doubtful, double *samples, double *seconds) {
  double weight[EVEN_SHAPE_SIZES];
  double mean[EVEN_SHAPE_SIZES];
  int first[EVEN_SHAPE_SIZES]; /* of each pool's sizes */
  int pools = 0;
  int points = 0;
  for (int i = 0; i < shape->count; i++) {
    const even_size *size = &shape->size[i];
    if (!counts(size) && !(doubtful && size->steps >= shown)) {
      continue;
    }
    first[pools] = points;
    mean[pools] = size->seconds;
    weight[pools++] = size->steps;
    samples[points++] = size->samples;
    for (; pools > 1 && mean[pools - 2] > mean[pools - 1]; pools--) {
      double both = weight[pools - 2] + weight[pools - 1];
      mean[pools - 2] += (mean[pools - 1] - mean[pools - 2]) * weight[pools - 1] / both;
      weight[pools - 2] = both;
    }
  }
  for (int p = 0; p < pools; p++) {
    for (int i = first[p]; i < (p + 1 < pools ? first[p + 1] : points); i++) {
      seconds[i] = mean[p];
    }
  }
  return points;
}

int even_shape_hopes(const even_shape *shape, double *samples, double *seconds) {
  double size[EVEN_SHAPE_SIZES];
  double took[EVEN_SHAPE_SIZES];
  int sizes = pool(shape, true, size, took);
  int points = 0;
  for (int i = 0; i < sizes; i++) {
    samples[points] = size[i];
    seconds[points++] = took[i];
    if (i + 1 < sizes && size[i + 1] > size[i] + 1.0) {
      samples[points] = size[i + 1] - 1.0;
      seconds[points++] = took[i];
    }
  }
  return points;
}

void even_shape_judge(even_shape *shape, double fixed, double slope) {
  fit own = fit_line(shape, 1.0);
  fit stairs = {0};
  if (own.sizes < LEAST_SIZES || !tells(shape)) {
    shape->tile = 1.0;
    shape->bent = false;
    return;
  }
  double off = off_line(shape, 1.0, own.fixed, own.slope);
  double times = beside_chance(shape, &own, off);
  shape->tile = find_tile(shape, own.sizes, off, times, &stairs);
  if (shape->tile > 1.0) {
    build_stairs(shape, &stairs);
    shape->bent = true;
    return;
  }
  shape->bent = is_bent(shape, off, times, fixed, slope);
  if (!shape->bent) {
    return;
  }
  shape->points = pool(shape, false, shape->samples, shape->seconds);
  int last = shape->points - 1;
  double mean = shape->seconds[last] / shape->samples[last];
  double secant = (shape->seconds[last] - shape->seconds[0]) / larger(1.0, shape->samples[last] - shape->samples[0]);
  shape->slope = larger(least_slope * mean, smaller(most_slope * mean, secant));
}

double even_shape_at(const even_shape *shape, double samples) {
  const double *at = shape->samples;
  int last = shape->points - 1;
  if (samples >= at[last]) {
    return shape->seconds[last] + shape->slope * (samples - at[last]);
  }
  if (samples <= at[0]) {
    double least = (1.0 - most_slope) * shape->seconds[0];
    return larger(least, shape->seconds[0] - shape->slope * (at[0] - samples));
  }
  int right = 1;
  while (at[right] < samples) {
    right++;
  }
  double part = (samples - at[right - 1]) / (at[right] - at[right - 1]);
  return shape->seconds[right - 1] + (shape->seconds[right] - shape->seconds[right - 1]) * part;
}
