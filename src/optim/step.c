/* A step: pieces, by whoever is free; and what becomes of it where a rank ends in it. */
#include "base/checked.h"
#include "base/fail.h"
#include "comm/kernels.h"
#include "optim/states.h"
#include "os/clock.h"
#include "os/process.h"
#include "os/process_stat.h"

#include <math.h>
#include <string.h>

#define BLOCK 1024 /* 16-bit floats go through fp32 so many at a time */

static bool in_range(double value, double least, double below) {
  return value >= least && value < below;
}

/* How many states it wants. */
static int states_of(const even_optim_rule *rule) {
  if (rule->method == EVEN_OPTIM_SGD) {
    return rule->momentum != 0 ? 1 : 0;
  }
  return rule->amsgrad ? 3 : 2;
}

static even_status check_rule(const even_optim_rule *rule, size_t number) {
  bool sgd = rule->method == EVEN_OPTIM_SGD;
  if (!sgd && rule->method != EVEN_OPTIM_ADAM && rule->method != EVEN_OPTIM_ADAMW) {
    return even_fail(EVEN_ERR_ARGUMENT, "rule %zu: no method has the number %d", number, (int)rule->method);
  }
  bool right = isfinite(rule->lr) && isfinite(rule->weight_decay) && isfinite(rule->momentum) &&
               isfinite(rule->dampening) && isfinite(rule->eps) &&
               (sgd || (in_range(rule->beta1, 0, 1) && in_range(rule->beta2, 0, 1)));
  if (!right) {
    return even_fail(
        EVEN_ERR_ARGUMENT,
        "rule %zu: lr %g, weight_decay %g, momentum %g, dampening %g, betas %g and %g, eps %g: all have to "
        "be finite, the betas in [0, 1)",
        number, rule->lr, rule->weight_decay, rule->momentum, rule->dampening, rule->beta1, rule->beta2, rule->eps);
  }
  return EVEN_OK;
}

static bool is_aligned(const void *pointer, even_dtype dtype) {
  return (uintptr_t)pointer % even_dtype_bytes(dtype) == 0;
}

static even_status check_inputs(const even_optim *optim, const even_optim_rule *rules, size_t rule_count,
                                const even_optim_input *inputs) {
  for (size_t i = 0; i < rule_count; i++) {
    EVEN_TRY(check_rule(&rules[i], i));
  }
  for (size_t i = 0; i < optim->parameter_count; i++) {
    const even_optim_input *one = &inputs[i];
    const even_optim_place *of = &optim->places[i];
    if (one->gradient == NULL || of->count == 0) {
      continue;
    }
    if (one->rule >= rule_count || one->step == 0 || one->values == NULL) {
      return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu has rule %u of %zu, step %llu and values at %p", i, one->rule,
                       rule_count, (unsigned long long)one->step, one->values);
    }
    if (states_of(&rules[one->rule]) > of->states) {
      return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu has %d states, rule %u wants %d", i, of->states, one->rule,
                       states_of(&rules[one->rule]));
    }
    if (!is_aligned(one->values, of->dtype) || !is_aligned(one->gradient, of->dtype)) {
      return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu: values or gradient are not aligned to their elements", i);
    }
  }
  return EVEN_OK;
}

/* A step under way on this rank. */
typedef struct work {
  even_optim *optim;
  const even_optim_rule *rules;
  const even_optim_input *inputs;
  even_optim_round round;
  char *kept; /* where the next part of what is kept lies, or goes */
} work;

/* Elements of one parameter that lie in one piece. */
typedef struct range {
  size_t parameter;
  size_t first, count;
} range;

/* What is done to each of a piece's ranges. */
typedef void range_call(work *of, range where);

/* Calls `each` for those with a gradient; gives their elements. */
static size_t each_range(work *of, size_t piece, range_call *each) {
  const even_optim *optim = of->optim;
  size_t parameter = optim->pieces[piece].parameter;
  size_t first = optim->pieces[piece].first;
  size_t left = EVEN_OPTIM_PIECE;
  size_t done = 0;
  for (; parameter < optim->parameter_count && left > 0; parameter++, first = 0) {
    range where = {
        .parameter = parameter, .first = first, .count = even_least_size(optim->places[parameter].count - first, left)};
    left -= where.count;
    if (where.count > 0 && of->inputs[parameter].gradient != NULL) {
      each(of, where);
      done += where.count;
    }
  }
  return done;
}

/* ---- what a piece was ---- */

static even_optim_kept *kept_of(const even_optim *optim, int rank) {
  return even_optim_at(optim, optim->kept + (size_t)rank * optim->kept_stride);
}

/* All numbers beside a range's values that a step may change, and where they are kept. */
static void each_number(work *of, range where, void (*move)(void *there, void *kept, size_t bytes)) {
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
static void keep(work *of, range where) {
  each_number(of, where, move_aside);
}
static void put_back(work *of, range where) {
  each_number(of, where, move_back);
}

/* Before this rank changes a piece. Of those that it kept before, nobody asks any more. */
static void keep_piece(work *of, size_t piece) {
  even_optim_kept *kept = kept_of(of->optim, of->round.rank);
  of->kept = (char *)(kept + 1);
  (void)each_range(of, piece, keep);
  atomic_thread_fence(memory_order_release);
  atomic_store_explicit(&kept->name, even_optim_round_name(&of->round, piece), memory_order_relaxed);
  atomic_thread_fence(memory_order_release); /* before what changes */
}

/* What ranks that have ended may have torn. Where none of them had kept the piece, none had begun to change it; where
 * several had, one after the other, each kept the same. */
static void put_piece_back(work *of, size_t piece) {
  for (int r = 0; r < of->optim->ranks; r++) {
    even_optim_kept *kept = kept_of(of->optim, r);
    if (atomic_load_explicit(&kept->name, memory_order_acquire) == even_optim_round_name(&of->round, piece)) {
      of->kept = (char *)(kept + 1);
      (void)each_range(of, piece, put_back);
      return;
    }
  }
}

/* ---- a piece ---- */

/* The states that the method looks at; the others are NULL. */
#define STATE(type, k) \
  ((k) < states_of(rule) ? (type *)even_optim_at(of->optim, place->state[k]) + where.first : (type *)NULL)

/* 16-bit floats: their values in fp32 step, unless somebody has given them others. */
static void update_short(work *of, range where) {
  const even_optim_place *place = &of->optim->places[where.parameter];
  const even_optim_input *input = &of->inputs[where.parameter];
  const even_optim_rule *rule = &of->rules[input->rule];
  const even_kernels *kernels = even_kernels_best();
  even_dtype dtype = place->dtype;
  size_t end = where.first + where.count;
  float gradient[BLOCK];
  uint16_t rounded[BLOCK];
  for (; where.first < end; where.first += BLOCK) {
    size_t some = even_least_size(end - where.first, BLOCK);
    float *const states[EVEN_OPTIM_STATES] = {STATE(float, 0), STATE(float, 1), STATE(float, 2)};
    float *wide = (float *)even_optim_at(of->optim, place->values) + where.first;
    uint16_t *values = (uint16_t *)input->values + where.first;
    kernels->narrow[dtype](rounded, wide, some, 1.0f);
    for (size_t i = 0; i < some; i++) {
      if (rounded[i] != values[i]) {
        kernels->widen[dtype](&wide[i], &values[i], 1);
      }
    }
    kernels->widen[dtype](gradient, (const uint16_t *)input->gradient + where.first, some);
    even_optim_kernels_best()->f32[rule->method](&of->optim->factors[where.parameter], wide, gradient, states, some);
    kernels->narrow[dtype](values, wide, some, 1.0f);
  }
}

static void update(work *of, range where) {
  const even_optim_place *place = &of->optim->places[where.parameter];
  const even_optim_input *input = &of->inputs[where.parameter];
  const even_optim_rule *rule = &of->rules[input->rule];
  const even_optim_factors *factors = &of->optim->factors[where.parameter];
  if (even_optim_is_short(place->dtype)) {
    update_short(of, where);
    return;
  }
  if (place->dtype == EVEN_F64) {
    double *const states[EVEN_OPTIM_STATES] = {STATE(double, 0), STATE(double, 1), STATE(double, 2)};
    even_optim_kernels_best()->f64[rule->method](factors, (double *)input->values + where.first,
                                                 (const double *)input->gradient + where.first, states, where.count);
  } else {
    float *const states[EVEN_OPTIM_STATES] = {STATE(float, 0), STATE(float, 1), STATE(float, 2)};
    even_optim_kernels_best()->f32[rule->method](factors, (float *)input->values + where.first,
                                                 (const float *)input->gradient + where.first, states, where.count);
  }
  if (place->values != EVEN_OPTIM_NOWHERE) {
    size_t wide = even_optim_wide_bytes(place->dtype);
    memcpy((char *)even_optim_at(of->optim, place->values) + where.first * wide,
           (const char *)input->values + where.first * wide, where.count * wide);
  }
}

/* The values of a range that another rank did. */
static void take(work *of, range where) {
  const even_optim_place *place = &of->optim->places[where.parameter];
  void *values = of->inputs[where.parameter].values;
  size_t wide = even_optim_wide_bytes(place->dtype);
  const char *from = (const char *)even_optim_at(of->optim, place->values) + where.first * wide;
  if (even_optim_is_short(place->dtype)) {
    const float *numbers = (const float *)even_optim_at(of->optim, place->values) + where.first;
    even_kernels_best()->narrow[place->dtype]((uint16_t *)values + where.first, numbers, where.count, 1.0f);
    return;
  }
  even_copy_from_core((char *)values + where.first * wide, from, where.count * wide);
}

/* One that this rank has taken; gives its elements. */
static size_t do_piece(work *of, size_t piece) {
  if (of->optim->survives) {
    keep_piece(of, piece);
  }
  size_t elements = each_range(of, piece, update);
  even_optim_round_done(&of->round, piece);
  return elements;
}

/* ---- among others ---- */

static even_status meet(const even_optim *optim, uint64_t *since, uint64_t *waited) {
  even_status status = optim->comm == NULL ? EVEN_OK : even_comm_barrier(optim->comm);
  uint64_t now = even_clock_ns();
  *waited += now - *since;
  *since = now;
  return status;
}

static bool has_ended(const even_optim_process *process) {
  even_process_stat facts;
  if (even_process_has_ended((pid_t)process->number)) {
    return true;
  }
  return process->start_time != 0 && even_process_stat_read((pid_t)process->number, &facts) == 0 &&
         facts.start_time != process->start_time;
}

#define LOOK_NS UINT64_C(200000)           /* between two looks at a piece that another rank still has */
#define PATIENCE_NS UINT64_C(600000000000) /* for one that stands still, and neither goes on nor ends */

/* In place of the barrier at a step's beginning: until all that are left have the last step's values. */
static even_status await_others(const work *of, even_status why) {
  const even_error first = *even_error_last();
  uint64_t until = even_clock_ns() + PATIENCE_NS;
  for (int r = 0; r < of->optim->ranks; r++) {
    while (atomic_load_explicit(&kept_of(of->optim, r)->taken, memory_order_acquire) + 1 < of->round.number &&
           !has_ended(&of->optim->processes[r])) {
      if (even_clock_ns() > until) {
        return first.status == why ? even_error_restore(&first) : why;
      }
      even_clock_sleep_ns(LOOK_NS);
    }
  }
  return EVEN_OK;
}

/* In place of that at its end: until all pieces are done, those of ranks that have ended by this rank or another one.
 */
static even_status finish_pieces(work *of, even_status why, uint64_t *elements) {
  const even_error first = *even_error_last();
  uint64_t until = even_clock_ns() + PATIENCE_NS;
  for (size_t piece = 0; piece < of->round.pieces; piece++) {
    int holder;
    while ((holder = even_optim_round_holder(&of->round, piece)) >= 0) {
      if (has_ended(&of->optim->processes[holder])) {
        if (even_optim_round_take_over(&of->round, piece, holder)) {
          put_piece_back(of, piece);
          *elements += do_piece(of, piece);
        }
      } else if (even_clock_ns() < until) {
        even_clock_sleep_ns(LOOK_NS);
      } else {
        return first.status == why ? even_error_restore(&first) : why;
      }
    }
  }
  return EVEN_OK;
}

/* What is the same for all elements; gives how many have a gradient. */
static uint64_t work_out(even_optim *optim, const even_optim_rule *rules, const even_optim_input *inputs) {
  uint64_t all = 0;
  for (size_t i = 0; i < optim->parameter_count; i++) {
    if (inputs[i].gradient != NULL && optim->places[i].count > 0) {
      even_optim_factors_of(&rules[inputs[i].rule], inputs[i].step, &optim->factors[i]);
      all += optim->places[i].count;
    }
  }
  return all;
}

/* Once there is something to do. */
static even_status make_step(work *of, even_optim_report *seen) {
  even_optim *optim = of->optim;
  uint64_t at_ns = even_clock_ns();
  even_status status = meet(optim, &at_ns, &seen->wait_ns); /* the others have the last step's values */
  if (status != EVEN_OK && optim->survives) {
    status = await_others(of, status);
    at_ns = even_clock_ns();
  }
  EVEN_TRY(status);
  even_optim_round_begin(&of->round);
  for (size_t piece = 0; even_optim_round_take(&of->round, &piece);) {
    seen->elements += do_piece(of, piece);
  }
  seen->update_ns = even_clock_ns() - at_ns;
  at_ns += seen->update_ns;
  status = meet(optim, &at_ns, &seen->wait_ns);
  if (status != EVEN_OK && optim->survives) {
    status = finish_pieces(of, status, &seen->elements);
    at_ns = even_clock_ns();
  }
  EVEN_TRY(status);
  for (size_t piece = 0; optim->ranks > 1 && piece < optim->piece_count; piece++) {
    if (!even_optim_round_is_own(&of->round, piece)) {
      (void)each_range(of, piece, take);
    }
  }
  if (optim->survives) {
    atomic_store_explicit(&kept_of(optim, optim->rank)->taken, of->round.number, memory_order_release);
  }
  seen->copy_ns = even_clock_ns() - at_ns;
  return EVEN_OK;
}

even_status even_optim_step(even_optim *optim, const even_optim_rule *rules, size_t rule_count,
                            const even_optim_input *inputs, even_optim_report *report) {
  even_optim_report seen = {0};
  EVEN_TRY(check_inputs(optim, rules, rule_count, inputs));
  seen.all = work_out(optim, rules, inputs);
  if (seen.all > 0) {
    work of = {.optim = optim,
               .rules = rules,
               .inputs = inputs,
               .round = {.words = even_optim_at(optim, 0),
                         .pieces = optim->piece_count,
                         .number = ++optim->number,
                         .rank = optim->rank,
                         .ranks = optim->ranks}};
    EVEN_TRY(make_step(&of, &seen));
  }
  if (report != NULL) {
    *report = seen;
  }
  return EVEN_OK;
}
