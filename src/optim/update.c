/* What a step does to a piece: its elements, what they were, and what the others take of them. */
#include "base/checked.h"
#include "comm/kernels.h"
#include "optim/work.h"

#include <string.h>

#define BLOCK EVEN_OPTIM_BLOCK /* 16-bit floats go through fp32 so many at a time */

size_t even_optim_each_range(even_optim_work *of, size_t piece, even_optim_range_call *each) {
  const even_optim *optim = of->optim;
  size_t parameter = optim->pieces[piece].parameter;
  size_t first = optim->pieces[piece].first;
  size_t left = EVEN_OPTIM_PIECE;
  size_t done = 0;
  of->piece = piece;
  for (; parameter < optim->parameter_count && left > 0; parameter++, first = 0) {
    even_optim_range where = {
        .parameter = parameter, .first = first, .count = even_least_size(optim->places[parameter].count - first, left)};
    left -= where.count;
    if (where.count > 0 && of->job->inputs[parameter].gradient != NULL) {
      each(of, where);
      done += where.count;
    }
  }
  return done;
}

/* ---- what a piece was ---- */

/* All numbers beside a range's values that a step may change, and where they are kept. */
static void each_number(even_optim_work *of, even_optim_range where,
                        void (*move)(void *there, void *kept, size_t bytes)) {
  const even_optim_place *place = &of->optim->places[where.parameter];
  size_t wide = even_optim_wide_bytes(place->dtype);
  size_t bytes = where.count * wide;
  for (int k = 0; k < place->states; k++) {
    move((char *)even_optim_at(of->optim, place->state[k]) + where.first * wide, of->kept, bytes);
    of->kept += bytes;
  }
  if (even_optim_is_short(place->dtype)) {
    move((char *)even_optim_at(of->optim, place->values) + where.first * wide, of->kept, bytes);
    of->kept += bytes;
  }
}

static void move_aside(void *there, void *kept, size_t bytes) {
  memcpy(kept, there, bytes);
}
static void move_back(void *there, void *kept, size_t bytes) {
  memcpy(there, kept, bytes);
}
static void keep(even_optim_work *of, even_optim_range where) {
  each_number(of, where, move_aside);
}
static void put_back(even_optim_work *of, even_optim_range where) {
  each_number(of, where, move_back);
}

/* Before this rank changes a piece. Of those that it kept before, nobody asks any more. */
static void keep_piece(even_optim_work *of, size_t piece) {
  even_optim_kept *kept = even_optim_kept_of(of->optim, of->round.rank);
  of->kept = (char *)(kept + 1);
  (void)even_optim_each_range(of, piece, keep);
  atomic_thread_fence(memory_order_release);
  atomic_store_explicit(&kept->name, even_optim_round_name(&of->round, piece), memory_order_relaxed);
  atomic_thread_fence(memory_order_release); /* before what changes */
}

/* Where none of them had kept the piece, none had begun to change it; where
 * several had, one after the other, each kept the same. */
void even_optim_put_piece_back(even_optim_work *of, size_t piece) {
  for (int r = 0; r < of->optim->ranks; r++) {
    even_optim_kept *kept = even_optim_kept_of(of->optim, r);
    if (atomic_load_explicit(&kept->name, memory_order_acquire) == even_optim_round_name(&of->round, piece)) {
      of->kept = (char *)(kept + 1);
      (void)even_optim_each_range(of, piece, put_back);
      return;
    }
  }
}

/* ---- a piece ---- */

/* The states that the method looks at; the others are NULL. */
#define STATE(type, k) \
  ((k) < even_optim_states_of(rule) ? (type *)even_optim_at(of->optim, place->state[k]) + where.first : (type *)NULL)

/* 16-bit floats: their values in fp32 step, unless somebody has given them others. At most BLOCK of them. */
static void update_short(even_optim_work *of, even_optim_range where, const uint16_t *gradient) {
  const even_optim_place *place = &of->optim->places[where.parameter];
  const even_optim_input *input = &of->job->inputs[where.parameter];
  const even_optim_rule *rule = &of->job->rules[input->rule];
  const even_kernels *kernels = even_kernels_best();
  even_dtype dtype = place->dtype;
  float *const states[EVEN_OPTIM_STATES] = {STATE(float, 0), STATE(float, 1), STATE(float, 2)};
  float *wide = (float *)even_optim_at(of->optim, place->values) + where.first;
  uint16_t *values = (uint16_t *)input->values + where.first;
  float widened[BLOCK];
  uint16_t rounded[BLOCK];
  kernels->narrow[dtype](rounded, wide, where.count, 1.0f);
  for (size_t i = 0; i < where.count; i++) {
    if (rounded[i] != values[i]) {
      kernels->widen[dtype](&wide[i], &values[i], 1);
    }
  }
  kernels->widen[dtype](widened, gradient, where.count);
  even_optim_kernels_best()->f32[rule->method](&of->optim->factors[where.parameter], wide, widened, states,
                                               where.count);
  kernels->narrow[dtype](values, wide, where.count, 1.0f);
}

static void update_f64(even_optim_work *of, even_optim_range where, const double *gradient) {
  const even_optim_place *place = &of->optim->places[where.parameter];
  const even_optim_input *input = &of->job->inputs[where.parameter];
  const even_optim_rule *rule = &of->job->rules[input->rule];
  double *const states[EVEN_OPTIM_STATES] = {STATE(double, 0), STATE(double, 1), STATE(double, 2)};
  even_optim_kernels_best()->f64[rule->method](&of->optim->factors[where.parameter],
                                               (double *)input->values + where.first, gradient, states, where.count);
}

static void update_f32(even_optim_work *of, even_optim_range where, const float *gradient) {
  const even_optim_place *place = &of->optim->places[where.parameter];
  const even_optim_input *input = &of->job->inputs[where.parameter];
  const even_optim_rule *rule = &of->job->rules[input->rule];
  float *const states[EVEN_OPTIM_STATES] = {STATE(float, 0), STATE(float, 1), STATE(float, 2)};
  even_optim_kernels_best()->f32[rule->method](&of->optim->factors[where.parameter],
                                               (float *)input->values + where.first, gradient, states, where.count);
}

static void update(even_optim_work *of, even_optim_range where) {
  const even_optim_place *place = &of->optim->places[where.parameter];
  const char *values = of->job->inputs[where.parameter].values;
  bool is_short = even_optim_is_short(place->dtype);
  size_t most = is_short ? BLOCK : even_optim_gradient_most(of);
  for (even_optim_range next = where; next.first < where.first + where.count; next.first += next.count) {
    next.count = even_least_size(where.first + where.count - next.first, most);
    const void *gradient = even_optim_gradient(of, next);
    if (is_short) {
      update_short(of, next, gradient);
    } else if (place->dtype == EVEN_F64) {
      update_f64(of, next, gradient);
    } else {
      update_f32(of, next, gradient);
    }
  }
  if (!is_short && place->values != EVEN_OPTIM_NOWHERE) {
    size_t wide = even_optim_wide_bytes(place->dtype);
    memcpy((char *)even_optim_at(of->optim, place->values) + where.first * wide, values + where.first * wide,
           where.count * wide);
  }
}

/* The values of a range that another rank did. */
static void take(even_optim_work *of, even_optim_range where) {
  const even_optim_place *place = &of->optim->places[where.parameter];
  void *values = of->job->inputs[where.parameter].values;
  size_t wide = even_optim_wide_bytes(place->dtype);
  const char *from = (const char *)even_optim_at(of->optim, place->values) + where.first * wide;
  if (even_optim_is_short(place->dtype)) {
    const float *numbers = (const float *)even_optim_at(of->optim, place->values) + where.first;
    even_kernels_best()->narrow[place->dtype]((uint16_t *)values + where.first, numbers, where.count, 1.0f);
    return;
  }
  even_copy_from_core((char *)values + where.first * wide, from, where.count * wide);
}

void even_optim_take_piece(even_optim_work *of, size_t piece) {
  (void)even_optim_each_range(of, piece, take);
}

size_t even_optim_do_piece(even_optim_work *of, size_t piece) {
  if (of->optim->survives) {
    keep_piece(of, piece);
  }
  size_t elements = even_optim_each_range(of, piece, update);
  even_optim_round_done(&of->round, piece);
  return elements;
}
