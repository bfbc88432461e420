/* Gradients: whole ones, those whose parts lie with the ranks, and the norm of all. */
#include "base/checked.h"
#include "base/fail.h"
#include "comm/kernels.h"
#include "optim/work.h"

#include <math.h>

static const char *elements_at(const void *first, even_dtype dtype, size_t element) {
  return (const char *)first + element * even_dtype_bytes(dtype);
}

/* Where the same part lies that this rank has at `own`. */
static const void *part_of(even_comm *parts, const void *own, int rank) {
  const char *mine = even_comm_peer_arena(parts, even_comm_rank(parts));
  return (const char *)even_comm_peer_arena(parts, rank) + ((const char *)own - mine);
}

/* The sum of all ranks' parts, as an all-reduce has it. */
static void add_up(const even_optim_work *of, even_optim_range where, void *sum) {
  const even_optim *optim = of->optim;
  even_dtype dtype = optim->places[where.parameter].dtype;
  const void *own = elements_at(of->job->inputs[where.parameter].gradient, dtype, where.first);
  void *targets[1] = {sum};
  for (int r = 0; r < optim->ranks; r++) {
    optim->parts[r] = part_of(of->job->parts, own, r);
  }
  even_kernels_best()->reduce[dtype][EVEN_SUM](targets, 1, optim->parts, (size_t)optim->ranks, where.count, 1.0);
}

size_t even_optim_gradient_most(const even_optim_work *of) {
  return of->job->parts != NULL && of->job->max_norm == 0 ? EVEN_OPTIM_PIECE : SIZE_MAX;
}

const void *even_optim_gradient(const even_optim_work *of, even_optim_range where) {
  even_dtype dtype = of->optim->places[where.parameter].dtype;
  const void *own = elements_at(of->job->inputs[where.parameter].gradient, dtype, where.first);
  if (of->job->parts == NULL) {
    return own;
  }
  if (of->job->max_norm != 0) { /* who has added up the squares has the sum */
    return part_of(of->job->parts, own, even_optim_round_who(&of->sums, of->piece));
  }
  add_up(of, where, of->optim->room);
  return of->optim->room;
}

/* ---- the norm ---- */

static double square(const void *gradient, even_dtype dtype, size_t count) {
  float widened[EVEN_OPTIM_BLOCK];
  if (dtype == EVEN_F64) {
    return even_optim_kernels_best()->square_f64(gradient, count);
  }
  if (even_optim_is_short(dtype)) {
    even_kernels_best()->widen[dtype](widened, gradient, count);
    gradient = widened;
  }
  return even_optim_kernels_best()->square_f32(gradient, count);
}

/* In blocks, so that it is the same number to the bit with parts and without. */
static void add_squares(even_optim_work *of, even_optim_range where) {
  even_dtype dtype = of->optim->places[where.parameter].dtype;
  const void *gradients = of->job->inputs[where.parameter].gradient;
  for (even_optim_range next = where; next.first < where.first + where.count; next.first += next.count) {
    next.count = even_least_size(where.first + where.count - next.first, EVEN_OPTIM_BLOCK);
    const char *own = elements_at(gradients, dtype, next.first);
    if (of->job->parts != NULL) { /* this rank's part of this is nobody else's concern */
      const char *mine = even_comm_peer_arena(of->job->parts, of->optim->rank);
      add_up(of, next, (char *)even_comm_arena(of->job->parts) + (own - mine));
    }
    of->squares += square(own, dtype, next.count);
  }
}

static double *squares_of(const even_optim *optim) {
  return even_optim_at(optim, optim->squares);
}

size_t even_optim_square_piece(even_optim_work *of, size_t piece) {
  of->squares = 0;
  (void)even_optim_each_range(of, piece, add_squares);
  squares_of(of->optim)[piece] = of->squares;
  even_optim_round_done(&of->sums, piece);
  return 0;
}

double even_optim_norm(const even_optim_work *of) {
  double sum = 0;
  for (size_t piece = 0; piece < of->optim->piece_count; piece++) {
    sum += squares_of(of->optim)[piece];
  }
  return sqrt(sum);
}

even_status even_optim_check_parts(const even_optim *optim, const even_optim_job *job) {
  int rank = even_comm_rank(job->parts);
  int ranks = even_comm_ranks(job->parts);
  const char *arena = even_comm_peer_arena(job->parts, rank);
  if (optim->survives) {
    return even_fail(EVEN_ERR_ARGUMENT,
                     "gradients in parts, of which a rank that ends takes its own with it, and states "
                     "that survive it");
  }
  if (arena == NULL || rank != optim->rank || ranks != optim->ranks) {
    return even_fail(
        EVEN_ERR_ARGUMENT,
        "gradients in parts of rank %d of %d over \"%s\", for the states of rank %d of %d: they have to be "
        "the same ranks, with an arena in shared memory",
        rank, ranks, even_comm_engine_name(job->parts), optim->rank, optim->ranks);
  }
  size_t bytes = even_comm_arena_bytes(job->parts);
  for (size_t i = 0; i < optim->parameter_count; i++) {
    const even_optim_place *of = &optim->places[i];
    uintptr_t at = (uintptr_t)job->inputs[i].gradient;
    size_t wanted = of->count * even_dtype_bytes(of->dtype);
    if (at != 0 && (at < (uintptr_t)arena || wanted > bytes || at - (uintptr_t)arena > bytes - wanted)) {
      return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu: its part of the gradient is not in the group's arena", i);
    }
  }
  return EVEN_OK;
}
