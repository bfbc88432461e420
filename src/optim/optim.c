/* The states' memory, and the steps. */
#include <evenstep/optim.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "comm/kernels.h"
#include "optim/kernels.h"
#include "optim/pieces.h"
#include "os/calls.h"
#include "os/shared_memory.h"

#include <math.h>
#include <string.h>

#define LINE ((size_t)64)
#define BLOCK 1024 /* 16-bit floats go through fp32 so many at a time */
#define NOWHERE SIZE_MAX

/* Where the numbers of one parameter lie in the memory. */
typedef struct place {
  size_t count;
  even_dtype dtype;
  int states;
  size_t state[EVEN_OPTIM_STATES];
  size_t values; /* those that the other ranks take, of 16-bit floats in fp32; NOWHERE where nobody wants them */
} place;

struct even_optim {
  even_comm *comm; /* NULL: alone */
  int rank, ranks;
  size_t parameter_count;
  place *places;
  even_optim_factors *factors; /* of the step under way, one a parameter */
  even_optim_piece *pieces;
  size_t piece_count;
  even_shared_memory memory; /* the words of the pieces, then the numbers */
  uint64_t number;           /* of steps */
};

static bool is_short(even_dtype dtype) {
  return dtype == EVEN_F16 || dtype == EVEN_BF16;
}

/* Bytes of a number beside an element. */
static size_t wide_bytes(even_dtype dtype) {
  return dtype == EVEN_F64 ? sizeof(double) : sizeof(float);
}

/* ---- the layout: a function of the parameters, and of whether there are others ---- */

static even_status check_params(const even_optim_params *params) {
  if (params->size != sizeof *params) {
    return even_fail(EVEN_ERR_ARGUMENT, "even_optim_params.size is %zu, this library's is %zu", params->size,
                     sizeof *params);
  }
  for (size_t i = 0; i < params->parameter_count; i++) {
    const even_optim_parameter *one = &params->parameters[i];
    if (one->dtype != EVEN_F32 && one->dtype != EVEN_F64 && !is_short(one->dtype)) {
      return even_fail(EVEN_ERR_ARGUMENT,
                       "parameter %zu: an optimizer of dtype %d: F32, F64, F16 and BF16 are possible", i,
                       (int)one->dtype);
    }
    if (one->states < 0 || one->states > EVEN_OPTIM_STATES) {
      return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu: %d states: 0 … %d are possible", i, one->states,
                       EVEN_OPTIM_STATES);
    }
  }
  return EVEN_OK;
}

/* `count` numbers at the end of the layout. */
static bool put(size_t count, size_t bytes, size_t *total, size_t *at) {
  size_t all = 0;
  *at = *total;
  return even_multiply_size(count, bytes, &all) && even_add_size(*total, all, total) &&
         even_align_size(*total, LINE, total) && *total <= (size_t)INT64_MAX;
}

static even_status lay_out(even_optim *optim, const even_optim_params *params, size_t *total) {
  size_t words = 0;
  *total = 0;
  bool fits = put(optim->piece_count, sizeof(_Atomic uint64_t), total, &words);
  for (size_t i = 0; i < params->parameter_count && fits; i++) {
    const even_optim_parameter *from = &params->parameters[i];
    place *to = &optim->places[i];
    *to = (place){.count = from->count, .dtype = from->dtype, .states = from->states, .values = NOWHERE};
    size_t bytes = wide_bytes(from->dtype);
    for (int k = 0; k < from->states && fits; k++) {
      fits = put(from->count, bytes, total, &to->state[k]);
    }
    if (fits && (optim->ranks > 1 || is_short(from->dtype))) {
      fits = put(from->count, bytes, total, &to->values);
    }
  }
  if (!fits) {
    return even_fail(EVEN_ERR_OVERFLOW, "the states of these parameters are larger than memory can be");
  }
  *total += *total == 0 ? LINE : 0;
  return EVEN_OK;
}

/* ---- opening ---- */

/* What each rank tells the others, once it has done its part. */
typedef struct word {
  int32_t status;
  int32_t fd;
  int64_t process;
  uint64_t bytes;
  uint64_t signature; /* of the parameters */
} word;

/* FNV-1a. */
static uint64_t mix(uint64_t hash, uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) {
    hash = (hash ^ (value >> shift & 0xff)) * 0x100000001b3u;
  }
  return hash;
}

static uint64_t signature_of(const even_optim_params *params) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < params->parameter_count; i++) {
    const even_optim_parameter *one = &params->parameters[i];
    hash = mix(mix(mix(hash, one->count), (uint64_t)one->dtype), (uint64_t)one->states);
  }
  return hash;
}

/* All ranks' words, where none of them has failed; else this rank's error, or that of another one. */
static even_status tell(const even_optim *optim, const word *own, word *all, const size_t *counts) {
  even_error mine = *even_error_last();
  EVEN_TRY(even_comm_all_gather(optim->comm, own, all, counts, EVEN_U8));
  if (own->status != EVEN_OK) {
    return even_error_restore(&mine);
  }
  for (int r = 0; r < optim->ranks; r++) {
    if (all[r].status != EVEN_OK) {
      (void)even_fail((even_status)all[r].status, "rank %d has no memory for the optimizer's states: %s", r,
                      even_status_text((even_status)all[r].status));
      return even_error_place(r, NULL);
    }
    if (all[r].signature != own->signature) {
      (void)even_fail(EVEN_ERR_MISMATCH, "rank %d gives an optimizer other parameters than rank %d", r, optim->rank);
      (void)even_error_place(r, NULL);
      return even_error_fix("all ranks must have the same parameters, of the same dtypes, in the same order");
    }
  }
  return EVEN_OK;
}

/* The first rank's memory on all ranks. `status`: how this rank has fared so far. */
static even_status share(even_optim *optim, even_status status, const word *mine, word *all, const size_t *counts) {
  word own = *mine;
  size_t bytes = (size_t)own.bytes;
  if (status == EVEN_OK && optim->rank == 0) {
    status = even_shared_memory_create("evenstep-optim", bytes, &optim->memory);
    own.fd = optim->memory.fd;
  }
  own.status = (int32_t)status;
  EVEN_TRY(tell(optim, &own, all, counts));
  if (optim->rank != 0) {
    status = even_shared_memory_open_peer((pid_t)all[0].process, all[0].fd, &optim->memory);
  }
  if (status == EVEN_OK && optim->memory.bytes < bytes) {
    status = even_fail(EVEN_ERR_INPUT, "the optimizer's shared memory is cut short: %zu of %zu bytes",
                       optim->memory.bytes, bytes);
  }
  own.status = (int32_t)status;
  return tell(optim, &own, all, counts);
}

/* Collective. */
static even_status open_shared(even_optim *optim, even_status status, size_t bytes, uint64_t signature) {
  size_t ranks = (size_t)optim->ranks;
  word *all = NULL;
  size_t *counts = NULL;
  word own = {.fd = -1, .process = even_os.getpid(), .bytes = bytes, .signature = signature};
  even_status room = EVEN_NEW_ARRAY(&all, ranks);
  room = room == EVEN_OK ? EVEN_NEW_ARRAY(&counts, ranks) : room;
  for (size_t r = 0; r < ranks && room == EVEN_OK; r++) {
    counts[r] = sizeof own;
  }
  if (room == EVEN_OK) {
    status = share(optim, status, &own, all, counts);
  } else { /* nobody waits for what it cannot say */
    even_comm_revoke(optim->comm);
    status = room;
  }
  even_free(counts);
  even_free(all);
  return status;
}

/* What this rank has for itself. */
static even_status prepare(even_optim *optim, const even_optim_params *params, size_t *bytes) {
  EVEN_TRY(check_params(params));
  EVEN_TRY(even_optim_pieces_count(params, &optim->piece_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&optim->places, params->parameter_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&optim->factors, params->parameter_count));
  EVEN_TRY(lay_out(optim, params, bytes)); /* before the pieces: where there are too many, it says so */
  EVEN_TRY(EVEN_NEW_ARRAY(&optim->pieces, optim->piece_count));
  even_optim_pieces_place(params, optim->pieces);
  optim->parameter_count = params->parameter_count;
  return EVEN_OK;
}

even_status even_optim_open(const even_optim_params *params, even_comm *comm, even_optim **out) {
  even_optim *optim = NULL;
  size_t bytes = 0;
  *out = NULL;
  if (comm != NULL && strcmp(even_comm_engine_name(comm), "shm") != 0) {
    return even_fail(EVEN_ERR_ARGUMENT,
                     "an optimizer's states in the memory of a group over \"%s\": its ranks have to "
                     "be on one host",
                     even_comm_engine_name(comm));
  }
  even_status status = EVEN_NEW(&optim);
  if (status != EVEN_OK) {
    if (comm != NULL) {
      even_comm_revoke(comm); /* nobody waits for this rank */
    }
    return status;
  }
  optim->memory.fd = -1;
  optim->ranks = comm == NULL ? 1 : even_comm_ranks(comm);
  optim->rank = comm == NULL ? 0 : even_comm_rank(comm);
  optim->comm = optim->ranks > 1 ? comm : NULL;
  status = prepare(optim, params, &bytes);
  if (optim->comm != NULL) {
    status = open_shared(optim, status, bytes, status == EVEN_OK ? signature_of(params) : 0);
  } else if (status == EVEN_OK) {
    status = even_shared_memory_create("evenstep-optim", bytes, &optim->memory);
  }
  if (status != EVEN_OK) {
    even_optim_close(optim);
    return status;
  }
  *out = optim;
  return EVEN_OK;
}

void even_optim_close(even_optim *optim) {
  if (optim == NULL) {
    return;
  }
  even_shared_memory_close(&optim->memory);
  even_free(optim->pieces);
  even_free(optim->factors);
  even_free(optim->places);
  even_free(optim);
}

void *even_optim_memory(even_optim *optim) {
  return optim->memory.address;
}

size_t even_optim_bytes(const even_optim *optim) {
  return optim->memory.bytes;
}

static void *at(const even_optim *optim, size_t offset) {
  return (char *)optim->memory.address + offset;
}

void *even_optim_state(even_optim *optim, size_t parameter, int state) {
  if (parameter >= optim->parameter_count || state < 0) {
    return NULL;
  }
  const place *of = &optim->places[parameter];
  if (state < of->states) {
    return at(optim, of->state[state]);
  }
  return state == of->states && is_short(of->dtype) ? at(optim, of->values) : NULL;
}

/* ---- a step ---- */

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
    const place *of = &optim->places[i];
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

/* Elements of one parameter that lie in one piece. */
typedef struct range {
  const place *of;
  size_t first, count;
} range;

/* What it does to each of a piece's ranges. */
typedef void range_call(even_optim *optim, const even_optim_rule *rules, const even_optim_input *input,
                        size_t parameter, range where);

/* Calls `each` for those with a gradient; gives their elements. */
static size_t each_range(even_optim *optim, const even_optim_rule *rules, const even_optim_input *inputs, size_t piece,
                         range_call *each) {
  size_t parameter = optim->pieces[piece].parameter;
  size_t first = optim->pieces[piece].first;
  size_t left = EVEN_OPTIM_PIECE;
  size_t done = 0;
  for (; parameter < optim->parameter_count && left > 0; parameter++, first = 0) {
    const place *of = &optim->places[parameter];
    range where = {.of = of, .first = first, .count = even_least_size(of->count - first, left)};
    left -= where.count;
    if (where.count > 0 && inputs[parameter].gradient != NULL) {
      each(optim, rules, &inputs[parameter], parameter, where);
      done += where.count;
    }
  }
  return done;
}

/* The states that the method looks at; the others are NULL. */
#define STATES(type, optim, rule, where, skip)                                       \
  {                                                                                  \
      states_of(rule) > 0 ? (type *)at(optim, (where).of->state[0]) + (skip) : NULL, \
      states_of(rule) > 1 ? (type *)at(optim, (where).of->state[1]) + (skip) : NULL, \
      states_of(rule) > 2 ? (type *)at(optim, (where).of->state[2]) + (skip) : NULL, \
  }

/* 16-bit floats: their values in fp32 step, unless somebody has given them others. */
static void update_short(even_optim *optim, const even_optim_rule *rule, const even_optim_factors *factors,
                         const even_optim_input *input, range where) {
  const even_kernels *kernels = even_kernels_best();
  even_dtype dtype = where.of->dtype;
  float gradient[BLOCK];
  uint16_t rounded[BLOCK];
  for (size_t done = 0; done < where.count; done += BLOCK) {
    size_t first = where.first + done;
    size_t some = even_least_size(where.count - done, BLOCK);
    float *const states[EVEN_OPTIM_STATES] = STATES(float, optim, rule, where, first);
    float *wide = (float *)at(optim, where.of->values) + first;
    uint16_t *values = (uint16_t *)input->values + first;
    kernels->narrow[dtype](rounded, wide, some, 1.0f);
    for (size_t i = 0; i < some; i++) {
      if (rounded[i] != values[i]) {
        kernels->widen[dtype](&wide[i], &values[i], 1);
      }
    }
    kernels->widen[dtype](gradient, (const uint16_t *)input->gradient + first, some);
    even_optim_kernels_best()->f32[rule->method](factors, wide, gradient, states, some);
    kernels->narrow[dtype](values, wide, some, 1.0f);
  }
}

static void update(even_optim *optim, const even_optim_rule *rules, const even_optim_input *input, size_t parameter,
                   range where) {
  const even_optim_rule *rule = &rules[input->rule];
  const even_optim_factors *factors = &optim->factors[parameter];
  size_t first = where.first;
  if (where.of->dtype == EVEN_F64) {
    double *const states[EVEN_OPTIM_STATES] = STATES(double, optim, rule, where, first);
    even_optim_kernels_best()->f64[rule->method](factors, (double *)input->values + first,
                                                 (const double *)input->gradient + first, states, where.count);
  } else if (where.of->dtype == EVEN_F32) {
    float *const states[EVEN_OPTIM_STATES] = STATES(float, optim, rule, where, first);
    even_optim_kernels_best()->f32[rule->method](factors, (float *)input->values + first,
                                                 (const float *)input->gradient + first, states, where.count);
  } else {
    update_short(optim, rule, factors, input, where);
    return;
  }
  if (where.of->values != NOWHERE) {
    size_t bytes = wide_bytes(where.of->dtype);
    memcpy((char *)at(optim, where.of->values) + first * bytes, (const char *)input->values + first * bytes,
           where.count * bytes);
  }
}

/* The values of a range that another rank did. */
static void take(even_optim *optim, const even_optim_rule *rules, const even_optim_input *input, size_t parameter,
                 range where) {
  (void)rules;
  (void)parameter;
  size_t bytes = wide_bytes(where.of->dtype);
  const char *from = (const char *)at(optim, where.of->values) + where.first * bytes;
  if (is_short(where.of->dtype)) {
    const float *wide = (const float *)at(optim, where.of->values) + where.first;
    even_kernels_best()->narrow[where.of->dtype]((uint16_t *)input->values + where.first, wide, where.count, 1.0f);
    return;
  }
  even_copy_from_core((char *)input->values + where.first * bytes, from, where.count * bytes);
}

static even_status meet(const even_optim *optim, uint64_t *since, uint64_t *waited) {
  even_status status = optim->comm == NULL ? EVEN_OK : even_comm_barrier(optim->comm);
  uint64_t now = even_clock_ns();
  *waited += now - *since;
  *since = now;
  return status;
}

even_status even_optim_step(even_optim *optim, const even_optim_rule *rules, size_t rule_count,
                            const even_optim_input *inputs, even_optim_report *report) {
  even_optim_report seen = {0};
  EVEN_TRY(check_inputs(optim, rules, rule_count, inputs));
  for (size_t i = 0; i < optim->parameter_count; i++) {
    if (inputs[i].gradient != NULL && optim->places[i].count > 0) {
      even_optim_factors_of(&rules[inputs[i].rule], inputs[i].step, &optim->factors[i]);
      seen.all += optim->places[i].count;
    }
  }
  uint64_t at_ns = even_clock_ns();
  EVEN_TRY(meet(optim, &at_ns, &seen.wait_ns)); /* the others have taken the last step's values */
  even_optim_round round = {.words = at(optim, 0),
                            .pieces = optim->piece_count,
                            .number = ++optim->number,
                            .rank = optim->rank,
                            .ranks = optim->ranks};
  even_optim_round_begin(&round);
  for (size_t piece = 0; even_optim_round_take(&round, &piece);) {
    seen.elements += each_range(optim, rules, inputs, piece, update);
  }
  seen.update_ns = even_clock_ns() - at_ns;
  at_ns += seen.update_ns;
  EVEN_TRY(meet(optim, &at_ns, &seen.wait_ns));
  for (size_t piece = 0; optim->ranks > 1 && piece < optim->piece_count; piece++) {
    if (!even_optim_round_is_own(&round, piece)) {
      (void)each_range(optim, rules, inputs, piece, take);
    }
  }
  seen.copy_ns = even_clock_ns() - at_ns;
  if (report != NULL) {
    *report = seen;
  }
  return EVEN_OK;
}
