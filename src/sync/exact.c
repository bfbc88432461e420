/* Exact sums as their callers see them: rounds of begin, add, finish. A rank's sums are a stack: a block that comes
 * becomes a sum of its own, or goes into the one before it where the two are halves of a node, and so on upwards. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "base/params.h"
#include "os/clock.h"
#include "sync/exact_loops.h"
#include "sync/exact_round.h"

#include <math.h>
#include <string.h>

#define ALIGNMENT ((size_t)64)
#define DEFAULT_PART_BYTES ((size_t)256 << 10)

static even_status too_many(const even_exact_params *params) {
  return even_fail(EVEN_ERR_OVERFLOW, "%zu parameters do not fit in memory", params->parameter_count);
}

/* Each parameter begins at a multiple of 64 bytes. */
static even_status lay_out(const even_exact_params *params, even_exact_layout *layout) {
  for (size_t i = 0; i < params->parameter_count; i++) {
    const even_sync_parameter *parameter = &params->parameters[i];
    if ((unsigned)parameter->dtype > EVEN_BF16) {
      return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu has dtype number %d, which has no gradient", i,
                       (int)parameter->dtype);
    }
    size_t *total = parameter->dtype == EVEN_F64 ? &layout->wide : &layout->narrow;
    size_t count = 0;
    layout->places[i] = *total;
    if (!even_align_size(parameter->count, ALIGNMENT / sizeof(float), &count) || !even_add_size(*total, count, total)) {
      return too_many(params);
    }
  }
  layout->wide += 2;
  if (!even_multiply_size(layout->narrow, sizeof(float), &layout->wide_at) ||
      !even_multiply_size(layout->wide, sizeof(double), &layout->bytes) ||
      !even_add_size(layout->wide_at, layout->bytes, &layout->bytes)) {
    return too_many(params);
  }
  return EVEN_OK;
}

static even_status set_up(even_exact *exact, const even_exact_params *params) {
  size_t ranks = (size_t)exact->ranks;
  exact->parameter_count = params->parameter_count;
  exact->part_bytes = params->part_bytes != 0 ? params->part_bytes : DEFAULT_PART_BYTES;
  if (!even_align_size(exact->part_bytes, ALIGNMENT, &exact->part_bytes)) {
    return even_fail(EVEN_ERR_OVERFLOW, "parts of %zu bytes", params->part_bytes);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->parameters, params->parameter_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->layout.places, params->parameter_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->used, params->parameter_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->counts, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->inputs, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->outputs, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->input_bytes, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->output_bytes, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->lengths, ranks));
  if (params->parameter_count > 0) {
    memcpy(exact->parameters, params->parameters, params->parameter_count * sizeof *params->parameters);
  }
  EVEN_TRY(lay_out(params, &exact->layout));
  return ranks > 1 ? even_alloc(exact->layout.bytes, 1, (void **)&exact->result) : EVEN_OK;
}

even_status even_exact_open(const even_exact_params *params, even_comm *comm, even_exact **out) {
  even_exact *exact = NULL;
  even_exact_params own;
  *out = NULL;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_exact_params, &own, params));
  params = &own;
  if (params->parameter_count > 0 && params->parameters == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "%zu parameters and no list of them", params->parameter_count);
  }
  EVEN_TRY(EVEN_NEW(&exact));
  exact->comm = comm;
  exact->rank = comm == NULL ? 0 : even_comm_rank(comm);
  exact->ranks = comm == NULL ? 1 : even_comm_ranks(comm);
  even_status status = set_up(exact, params);
  if (status != EVEN_OK) {
    even_error error = *even_error_last();
    even_exact_close(exact);
    return even_error_restore(&error);
  }
  *out = exact;
  return EVEN_OK;
}

void even_exact_close(even_exact *exact) {
  if (exact == NULL) {
    return;
  }
  for (size_t i = 0; i < exact->room; i++) {
    even_free(exact->sums[i].elements);
  }
  even_free(exact->parameters);
  even_free(exact->layout.places);
  even_free(exact->used);
  even_free(exact->counts);
  even_free(exact->sources);
  even_free(exact->nodes);
  even_free(exact->stack);
  even_free(exact->additions);
  even_free(exact->parts);
  even_free((void *)exact->inputs);
  even_free((void *)exact->outputs);
  even_free(exact->input_bytes);
  even_free(exact->output_bytes);
  even_free(exact->lengths);
  even_free(exact->result);
  even_free(exact);
}

even_status even_exact_begin(even_exact *exact, const size_t *counts) {
  exact->open = false;
  exact->sum_count = 0;
  exact->blocks = 0;
  for (int rank = 0; rank < exact->ranks; rank++) {
    if (rank == exact->rank) {
      exact->next = exact->blocks;
      exact->end = exact->blocks + counts[rank];
    }
    exact->counts[rank] = counts[rank];
    if (!even_add_size(exact->blocks, counts[rank], &exact->blocks) || exact->blocks > (size_t)PTRDIFF_MAX) {
      return even_fail(EVEN_ERR_OVERFLOW, "the ranks have more blocks than a size can count");
    }
  }
  if (exact->blocks == 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "a round of exact sums without any block");
  }
  if (exact->parameter_count > 0) {
    memset(exact->used, 0, exact->parameter_count);
  }
  EVEN_TRY(even_exact_plan(exact));
  exact->open = true;
  return EVEN_OK;
}

/* Into the elements of a sum, or with `add` onto them. A block of weight 0 adds zeros, whatever it holds: the mean of
 * no tokens is not a number. */
static void take(even_exact *exact, unsigned char *elements, double weight, double loss, const void *const *gradients,
                 bool add) {
  bool counts = weight > 0.0;
  const even_exact_layout *layout = &exact->layout;
  double *wide = (double *)(void *)(elements + layout->wide_at);
  double more[2] = {1.0, loss};
  for (size_t i = 0; i < exact->parameter_count; i++) {
    const even_sync_parameter *parameter = &exact->parameters[i];
    void *sum = parameter->dtype == EVEN_F64 ? (void *)(wide + layout->places[i])
                                             : (void *)((float *)(void *)elements + layout->places[i]);
    const void *gradient = gradients[i];
    exact->used[i] |= gradient != NULL;
    even_exact_take(sum, counts ? gradient : NULL, parameter->dtype, parameter->count, weight, add);
  }
  even_exact_take(wide + layout->wide - 2, counts ? more : NULL, EVEN_F64, 2, weight, add);
}

static even_status new_sum(even_exact *exact, even_tree_node node) {
  if (exact->sum_count == exact->room) {
    EVEN_TRY(even_alloc(exact->layout.bytes, 1, (void **)&exact->sums[exact->room].elements));
    exact->room++;
  }
  exact->sums[exact->sum_count++].node = node;
  return EVEN_OK;
}

static void join_upwards(even_exact *exact) {
  const even_exact_layout *layout = &exact->layout;
  while (exact->sum_count > 1) {
    even_exact_sum *left = &exact->sums[exact->sum_count - 2];
    const even_exact_sum *right = left + 1;
    if (!even_tree_are_halves(left->node, right->node, exact->blocks)) {
      return;
    }
    even_exact_join(left->elements, right->elements, EVEN_F32, layout->narrow);
    even_exact_join(left->elements + layout->wide_at, right->elements + layout->wide_at, EVEN_F64, layout->wide);
    left->node.end = right->node.end;
    exact->sum_count--;
  }
}

even_status even_exact_add(even_exact *exact, double weight, double loss, const void *const *gradients) {
  if (!exact->open || exact->next == exact->end) {
    return even_fail(EVEN_ERR_STATE, exact->open ? "a block more than this rank has in the round"
                                                 : "a block comes outside a round of exact sums");
  }
  if (!isfinite(weight) || weight < 0.0) {
    return even_fail(EVEN_ERR_ARGUMENT, "block %zu has the weight %g", exact->next, weight);
  }
  even_tree_node block = {exact->next, exact->next + 1};
  even_exact_sum *last = exact->sum_count > 0 ? &exact->sums[exact->sum_count - 1] : NULL;
  if (last != NULL && even_tree_are_halves(last->node, block, exact->blocks)) {
    take(exact, last->elements, weight, loss, gradients, true);
    last->node.end = block.end;
  } else {
    EVEN_TRY(new_sum(exact, block));
    take(exact, exact->sums[exact->sum_count - 1].elements, weight, loss, gradients, false);
  }
  join_upwards(exact);
  exact->next++;
  return EVEN_OK;
}

static void give(even_exact *exact, const unsigned char *elements, double weight, void *const *targets) {
  const even_exact_layout *layout = &exact->layout;
  const double *wide = (const double *)(const void *)(elements + layout->wide_at);
  for (size_t i = 0; i < exact->parameter_count; i++) {
    const even_sync_parameter *parameter = &exact->parameters[i];
    const void *sum = parameter->dtype == EVEN_F64
                          ? (const void *)(wide + layout->places[i])
                          : (const void *)((const float *)(const void *)elements + layout->places[i]);
    if (exact->used[i] != 0) {
      even_exact_give(targets[i], sum, parameter->dtype, parameter->count, weight);
    }
  }
}

even_status even_exact_finish(even_exact *exact, void *const *targets, uint8_t *used, even_exact_report *report) {
  const unsigned char *elements = NULL;
  even_exact_report now = {0};
  if (!exact->open || exact->next != exact->end) {
    bool missing = exact->open;
    exact->open = false;
    if (exact->comm != NULL) {
      even_comm_revoke(exact->comm);
    }
    return missing ? even_fail(EVEN_ERR_STATE, "%zu blocks of this rank are missing", exact->end - exact->next)
                   : even_fail(EVEN_ERR_STATE, "no round of exact sums is open");
  }
  exact->open = false;
  uint64_t began = even_clock_ns();
  uint64_t waited = exact->comm == NULL ? 0 : even_comm_wait_ns(exact->comm);
  EVEN_TRY(even_exact_exchange(exact, &elements, &now.bytes));
  now.communication_ns = even_clock_ns() - began;
  now.peer_wait_ns = exact->comm == NULL ? 0 : even_comm_wait_ns(exact->comm) - waited;
  const double *last = (const double *)(const void *)(elements + exact->layout.wide_at) + exact->layout.wide - 2;
  now.weight = last[0];
  now.loss = last[0] > 0.0 ? last[1] / last[0] : NAN;
  if (!(now.weight > 0.0) && exact->parameter_count > 0) {
    memset(exact->used, 0, exact->parameter_count);
  }
  give(exact, elements, now.weight, targets);
  if (exact->parameter_count > 0) {
    memcpy(used, exact->used, exact->parameter_count);
  }
  if (report != NULL) {
    *report = now;
  }
  return EVEN_OK;
}
