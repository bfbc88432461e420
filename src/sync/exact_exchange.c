/* The exchange of exact sums: of each piece of the elements every rank adds up its part, from all ranks' sums, along
 * the tree; then all have all parts. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "comm/kernels.h"
#include "sync/exact_loops.h"
#include "sync/exact_round.h"

#include <string.h>

/* Elements of one type, one after the other in every sum. */
typedef struct region {
  even_dtype dtype;
  size_t at; /* bytes */
  size_t count;
} region;

static even_status make_room(even_exact *exact) {
  if (exact->source_count <= exact->source_room) {
    return EVEN_OK;
  }
  even_free(exact->sources);
  even_free(exact->nodes);
  even_free(exact->stack);
  even_free(exact->additions);
  exact->sources = NULL;
  exact->nodes = NULL;
  exact->stack = NULL;
  exact->additions = NULL;
  exact->source_room = 0;
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->sources, exact->source_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->nodes, exact->source_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->stack, exact->source_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&exact->additions, exact->source_count));
  exact->source_room = exact->source_count;
  return EVEN_OK;
}

static even_status make_parts(even_exact *exact) {
  size_t bytes = 0;
  if (!even_multiply_size(exact->part_bytes, exact->source_count, &bytes)) {
    return even_fail(EVEN_ERR_OVERFLOW, "parts of %zu bytes of %zu sums", exact->part_bytes, exact->source_count);
  }
  if (bytes <= exact->parts_bytes) {
    return EVEN_OK;
  }
  even_free(exact->parts);
  exact->parts = NULL;
  exact->parts_bytes = 0;
  EVEN_TRY(even_alloc(bytes, 1, (void **)&exact->parts));
  exact->parts_bytes = bytes;
  return EVEN_OK;
}

even_status even_exact_plan(even_exact *exact) {
  even_tree_node nodes[EVEN_TREE_MOST];
  size_t first = 0;
  if (exact->ranks == 1) {
    return EVEN_OK;
  }
  exact->source_count = 0;
  exact->turns = 0;
  for (int rank = 0; rank < exact->ranks; first += exact->counts[rank++]) {
    size_t count = even_tree_cut(first, first + exact->counts[rank], exact->blocks, nodes);
    exact->source_count += count;
    exact->turns = count > exact->turns ? count : exact->turns;
  }
  EVEN_TRY(make_room(exact));
  EVEN_TRY(make_parts(exact));
  size_t made = 0;
  first = 0;
  for (int rank = 0; rank < exact->ranks; first += exact->counts[rank++]) {
    size_t count = even_tree_cut(first, first + exact->counts[rank], exact->blocks, nodes);
    for (size_t i = 0; i < count; i++) {
      exact->sources[made] = (even_exact_source){rank, i};
      exact->nodes[made++] = nodes[i];
    }
  }
  even_tree_plan(exact->nodes, exact->source_count, exact->blocks, exact->stack, exact->additions);
  return EVEN_OK;
}

static size_t sums_of(const even_exact *exact, int rank) {
  size_t count = 0;
  for (size_t i = 0; i < exact->source_count; i++) {
    count += exact->sources[i].rank == rank;
  }
  return count;
}

/* Each rank's `turn`-th sum goes to those who add up its parts: part r of the piece at `at` to rank r. What comes from
 * source i lies at parts + i * part_bytes. */
static even_status send_turn(even_exact *exact, size_t turn, size_t at, size_t element, uint64_t *bytes) {
  bool mine = turn < sums_of(exact, exact->rank);
  size_t before = 0;
  for (int rank = 0; rank < exact->ranks; rank++) {
    size_t part = rank == exact->rank || !mine ? 0 : exact->lengths[rank] * element;
    exact->inputs[rank] = mine ? exact->sums[turn].elements + at + before : exact->parts;
    exact->input_bytes[rank] = part;
    exact->outputs[rank] = exact->parts;
    exact->output_bytes[rank] = 0;
    before += exact->lengths[rank] * element;
    *bytes += part;
  }
  for (size_t i = 0; i < exact->source_count; i++) {
    int rank = exact->sources[i].rank;
    if (exact->sources[i].turn == turn && rank != exact->rank) {
      exact->outputs[rank] = exact->parts + i * exact->part_bytes;
      exact->output_bytes[rank] = exact->lengths[exact->rank] * element;
    }
  }
  return even_comm_all_to_all(exact->comm, exact->inputs, exact->input_bytes, exact->outputs, exact->output_bytes);
}

/* Adds up this rank's part of the piece at `at`, into its place in the result. */
static void add_up(even_exact *exact, even_dtype dtype, size_t at) {
  size_t element = even_dtype_bytes(dtype);
  size_t count = exact->lengths[exact->rank];
  for (int rank = 0; rank < exact->rank; rank++) {
    at += exact->lengths[rank] * element;
  }
  for (size_t i = 0; i < exact->source_count; i++) {
    if (exact->sources[i].rank == exact->rank) {
      memcpy(exact->parts + i * exact->part_bytes, exact->sums[exact->sources[i].turn].elements + at, count * element);
    }
  }
  for (size_t k = 0; k + 1 < exact->source_count; k++) {
    even_exact_join(exact->parts + exact->additions[k].to * exact->part_bytes,
                    exact->parts + exact->additions[k].from * exact->part_bytes, dtype, count);
  }
  memcpy(exact->result + at, exact->parts, count * element);
}

static even_status exchange_piece(even_exact *exact, even_dtype dtype, size_t at, size_t count, uint64_t *bytes) {
  size_t element = even_dtype_bytes(dtype);
  size_t ranks = (size_t)exact->ranks;
  size_t mine = at;
  for (size_t rank = 0; rank < ranks; rank++) {
    exact->lengths[rank] = count / ranks + (rank < count % ranks);
    mine += (int)rank < exact->rank ? exact->lengths[rank] * element : 0;
  }
  for (size_t turn = 0; turn < exact->turns; turn++) {
    EVEN_TRY(send_turn(exact, turn, at, element, bytes));
  }
  add_up(exact, dtype, at);
  *bytes += exact->lengths[exact->rank] * element;
  return even_comm_all_gather(exact->comm, exact->result + mine, exact->result + at, exact->lengths, dtype);
}

static even_status exchange_region(even_exact *exact, const region *one, uint64_t *bytes) {
  size_t element = even_dtype_bytes(one->dtype);
  size_t part = exact->part_bytes / element > 0 ? exact->part_bytes / element : 1;
  size_t piece = part * (size_t)exact->ranks;
  for (size_t first = 0; first < one->count; first += piece) {
    size_t count = even_least_size(one->count - first, piece);
    EVEN_TRY(exchange_piece(exact, one->dtype, one->at + first * element, count, bytes));
  }
  return EVEN_OK;
}

even_status even_exact_exchange(even_exact *exact, const unsigned char **result, uint64_t *bytes) {
  const even_exact_layout *layout = &exact->layout;
  const region regions[] = {{EVEN_F32, 0, layout->narrow}, {EVEN_F64, layout->wide_at, layout->wide}};
  *result = exact->ranks == 1 ? exact->sums[0].elements : exact->result;
  if (exact->ranks == 1) {
    return EVEN_OK;
  }
  for (size_t i = 0; i < sizeof regions / sizeof *regions; i++) {
    EVEN_TRY(exchange_region(exact, &regions[i], bytes));
  }
  if (exact->parameter_count == 0) {
    return EVEN_OK;
  }
  return even_comm_all_reduce(exact->comm, exact->used, exact->parameter_count, EVEN_U8, EVEN_MAX);
}
