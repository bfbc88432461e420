/* Random calls of device communicators with random shapes, over a made-up NCCL, against a plain reference. */
#include "comm/device_ranks.h"
#include "comm/device_values.h"
#include "comm/fake_gpu.h"
#include "conformance/comm/reference.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST_RANKS = 4, MOST_PART = 1500, CALLS = 150, GUARD = 0x5a };
enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, GATHER, SCATTER, BARRIER, KINDS };
#define ROOM ((size_t)MOST_RANKS * MOST_PART * 8 + 64)

static const even_dtype dtypes[] = {EVEN_F32, EVEN_F64, EVEN_F16,  EVEN_BF16, EVEN_I8, EVEN_U8,
                                    EVEN_I32, EVEN_I64, EVEN_BOOL, EVEN_U32,  EVEN_U64};
static const even_reduce_op ops[] = {EVEN_SUM, EVEN_PRODUCT, EVEN_MIN, EVEN_MAX, EVEN_AVG};

/* One call, the same on all ranks. */
typedef struct random_call {
  int kind;
  even_dtype dtype;
  even_reduce_op op;
  size_t element;
  size_t counts[MOST_RANKS]; /* of elements */
  size_t bytes[MOST_RANKS];
  size_t total; /* of elements */
  int root;
  bool in_place, weighed, grouped;
  uint64_t seed; /* of an all-to-all */
} random_call;

/* A rank's memory: 0 behind what a call reads, GUARD behind what it writes. */
typedef struct own {
  device_rank *at;
  unsigned char *input, *output;
} own;

static bool is_floating(even_dtype dtype) {
  return dtype == EVEN_F32 || dtype == EVEN_F64 || dtype == EVEN_F16 || dtype == EVEN_BF16;
}

/* Whether what comes of it is exact: thirds are not in 16 bits, and of integers there is no mean. */
static bool is_exact(even_dtype dtype, even_reduce_op op, int ranks) {
  return op != EVEN_AVG || dtype == EVEN_F32 || dtype == EVEN_F64 || (is_floating(dtype) && ranks != 3);
}

static size_t random_count(uint64_t *state) {
  uint64_t shape = reference_random(state) % 4;
  size_t count = (size_t)(reference_random(state) % (MOST_PART + 1));
  return shape == 0 ? 0 : shape == 1 ? count % 5 : count;
}

static random_call random_call_of(uint64_t seed, int ranks) {
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  random_call call = {.kind = 0};
  for (int i = 0; i < 4; i++) {
    (void)reference_random(&state);
  }
  call.kind = (int)(reference_random(&state) % KINDS);
  do {
    call.dtype = dtypes[reference_random(&state) % (sizeof dtypes / sizeof dtypes[0])];
    call.op = ops[reference_random(&state) % (sizeof ops / sizeof ops[0])];
  } while (!is_exact(call.dtype, call.op, ranks));
  call.element = even_dtype_bytes(call.dtype);
  call.root = (int)(reference_random(&state) % (uint64_t)ranks);
  call.in_place = reference_random(&state) % 2 == 0;
  call.grouped = reference_random(&state) % 4 == 0;
  call.weighed = call.op == EVEN_SUM && is_floating(call.dtype) && reference_random(&state) % 2 == 0;
  bool equal = reference_random(&state) % 2 == 0;
  for (int rank = 0; rank < ranks; rank++) {
    call.counts[rank] = equal && rank > 0 ? call.counts[0] : random_count(&state);
    call.bytes[rank] = call.counts[rank] * call.element;
    call.total += call.counts[rank];
  }
  call.seed = reference_random(&state);
  return call;
}

static double weight_of(const random_call *call, int rank) {
  return call->weighed ? (rank % 2 == 0 ? 2.0 : 0.5) : 1.0;
}

static double reduced(const random_call *call, int ranks, size_t i) {
  double sum = 0;
  for (int rank = 0; call->weighed && rank < ranks; rank++) {
    sum += device_value(rank, i) * weight_of(call, rank);
  }
  return call->weighed ? sum : device_reduced(call->op, call->dtype, ranks, i);
}

static int complain(const own *mine, const random_call *call, const char *what, size_t i) {
  (void)fprintf(stderr, "rank %d: kind %d, dtype %d, op %d, root %d, in place %d, weighed %d, grouped %d: %s %zu\n",
                mine->at->rank, call->kind, (int)call->dtype, (int)call->op, call->root, call->in_place, call->weighed,
                call->grouped, what, i);
  return 1;
}

/* Whether `got` has what all ranks together have from index `from` on, and ends there. */
static int compare_reduced(const own *mine, const random_call *call, const unsigned char *got, size_t from,
                           size_t count) {
  for (size_t i = 0; i < count; i++) {
    unsigned char want[8];
    device_value_put(want, 0, call->dtype, reduced(call, mine->at->ranks, from + i));
    if (memcmp(got + i * call->element, want, call->element) != 0) {
      return complain(mine, call, "wrong element", i);
    }
  }
  return 0;
}

static unsigned char byte_of(const random_call *call, int from, int to, size_t i) {
  return (unsigned char)(call->seed + (uint64_t)(7 * from + 3 * to) + i);
}

static void fill_bytes(const random_call *call, unsigned char *data, size_t bytes, int from, int to) {
  for (size_t i = 0; i < bytes; i++) {
    data[i] = byte_of(call, from, to, i);
  }
}

static int compare_bytes(const own *mine, const random_call *call, const unsigned char *got, size_t bytes, int from,
                         int to) {
  for (size_t i = 0; i < bytes; i++) {
    if (got[i] != byte_of(call, from, to, i)) {
      return complain(mine, call, "wrong byte", i);
    }
  }
  return 0;
}

static size_t before(const size_t *parts, int rank) {
  size_t sum = 0;
  for (int other = 0; other < rank; other++) {
    sum += parts[other];
  }
  return sum;
}

/* ---- each kind ---- */

static even_status begin(const own *mine, const random_call *call) {
  return call->grouped ? even_device_comm_group_begin(mine->at->comm) : EVEN_OK;
}

static even_status finish(const own *mine, const random_call *call, even_status status) {
  even_status ended = call->grouped ? even_device_comm_group_end(mine->at->comm) : EVEN_OK;
  device_rank_wait(mine->at);
  return status == EVEN_OK ? ended : status;
}

static int try_reduction(const own *mine, const random_call *call) {
  device_rank *at = mine->at;
  double weight = weight_of(call, at->rank);
  const double *factor = call->weighed ? &weight : NULL;
  size_t own_before = before(call->counts, at->rank);
  bool scatters = call->kind == REDUCE_SCATTER;
  size_t from = scatters ? own_before : 0;
  size_t count = scatters ? call->counts[at->rank] : call->total;
  unsigned char *output = call->in_place ? mine->input + from * call->element : mine->output;
  bool gets = call->kind != REDUCE || at->rank == call->root;
  device_values_fill(mine->input, call->total, call->dtype, at->rank);
  DEVICE_EXPECT(at, begin(mine, call) == EVEN_OK);
  even_status status = scatters ? even_device_comm_reduce_scatter(at->comm, mine->input, output, call->counts,
                                                                  call->dtype, call->op, factor, at->stream)
                       : call->kind == REDUCE
                           ? even_device_comm_reduce(at->comm, mine->input, gets ? output : NULL, call->total,
                                                     call->dtype, call->op, factor, call->root, at->stream)
                           : even_device_comm_all_reduce(at->comm, mine->input, output, call->total, call->dtype,
                                                         call->op, factor, at->stream);
  DEVICE_EXPECT(at, finish(mine, call, status) == EVEN_OK);
  DEVICE_EXPECT(at, mine->output[gets && !call->in_place ? count * call->element : 0] == GUARD);
  return gets ? compare_reduced(mine, call, output, from, count) : 0;
}

static int try_all_gather(const own *mine, const random_call *call) {
  device_rank *at = mine->at;
  unsigned char *input = call->in_place ? mine->output + before(call->bytes, at->rank) : mine->input;
  int wrong = 0;
  fill_bytes(call, input, call->bytes[at->rank], at->rank, 0);
  DEVICE_EXPECT(at, begin(mine, call) == EVEN_OK);
  even_status status = even_device_comm_all_gather(at->comm, input, mine->output, call->bytes, at->stream);
  DEVICE_EXPECT(at, finish(mine, call, status) == EVEN_OK);
  for (int rank = 0; rank < at->ranks; rank++) {
    wrong = wrong || compare_bytes(mine, call, mine->output + before(call->bytes, rank), call->bytes[rank], rank, 0);
  }
  DEVICE_EXPECT(at, mine->output[before(call->bytes, at->ranks)] == GUARD);
  return wrong;
}

static int try_broadcast(const own *mine, const random_call *call) {
  device_rank *at = mine->at;
  fill_bytes(call, mine->output, call->bytes[0], at->rank, 0);
  DEVICE_EXPECT(at, begin(mine, call) == EVEN_OK);
  even_status status = even_device_comm_broadcast(at->comm, mine->output, call->bytes[0], call->root, at->stream);
  DEVICE_EXPECT(at, finish(mine, call, status) == EVEN_OK);
  DEVICE_EXPECT(at, mine->output[call->bytes[0]] == GUARD);
  return compare_bytes(mine, call, mine->output, call->bytes[0], call->root, 0);
}

/* Bytes that a rank has for another. */
static size_t bytes_between(const random_call *call, int from, int to) {
  if (call->kind == GATHER) {
    return to == call->root ? call->bytes[from] : 0;
  }
  if (call->kind == SCATTER) {
    return from == call->root ? call->bytes[to] : 0;
  }
  uint64_t state = call->seed + (uint64_t)(from * MOST_RANKS + to) * 0xd1342543de82ef95u;
  state = state == 0 ? 1 : state;
  (void)reference_random(&state);
  return random_count(&state);
}

static even_status exchange(const own *mine, const random_call *call, const void *const *inputs, const size_t *sent,
                            void *const *outputs, const size_t *received) {
  device_rank *at = mine->at;
  if (call->kind == GATHER) {
    return even_device_comm_gather(at->comm, inputs[call->root], at->rank == call->root ? outputs : NULL, call->bytes,
                                   call->root, at->stream);
  }
  if (call->kind == SCATTER) {
    return even_device_comm_scatter(at->comm, at->rank == call->root ? inputs : NULL, outputs[call->root], call->bytes,
                                    call->root, at->stream);
  }
  return even_device_comm_all_to_all(at->comm, inputs, sent, outputs, received, at->stream);
}

static int try_exchange(const own *mine, const random_call *call) {
  device_rank *at = mine->at;
  const void *inputs[MOST_RANKS];
  void *outputs[MOST_RANKS];
  size_t sent[MOST_RANKS];
  size_t received[MOST_RANKS];
  size_t in = 0;
  size_t out = 0;
  int wrong = 0;
  for (int rank = 0; rank < at->ranks; rank++) {
    sent[rank] = bytes_between(call, at->rank, rank);
    received[rank] = bytes_between(call, rank, at->rank);
    inputs[rank] = mine->input + in;
    outputs[rank] = mine->output + out;
    fill_bytes(call, mine->input + in, sent[rank], at->rank, rank);
    in += sent[rank];
    out += received[rank];
  }
  DEVICE_EXPECT(at, begin(mine, call) == EVEN_OK);
  even_status status = exchange(mine, call, inputs, sent, outputs, received);
  DEVICE_EXPECT(at, finish(mine, call, status) == EVEN_OK);
  for (int rank = 0; rank < at->ranks; rank++) {
    wrong = wrong || compare_bytes(mine, call, outputs[rank], received[rank], rank, at->rank);
  }
  DEVICE_EXPECT(at, mine->output[out] == GUARD);
  return wrong;
}

static int try_call(const own *mine, const random_call *call) {
  memset(mine->input, 0, ROOM);
  memset(mine->output, GUARD, ROOM);
  switch (call->kind) {
    case ALL_REDUCE:
    case REDUCE:
    case REDUCE_SCATTER:
      return try_reduction(mine, call);
    case ALL_GATHER:
      return try_all_gather(mine, call);
    case BROADCAST:
      return try_broadcast(mine, call);
    case BARRIER:
      DEVICE_EXPECT(mine->at, even_device_comm_barrier(mine->at->comm, mine->at->stream) == EVEN_OK);
      device_rank_wait(mine->at);
      return 0;
    default:
      return try_exchange(mine, call);
  }
}

static int make_random_calls(device_rank *at) {
  const uint64_t *seed = at->argument;
  const own mine = {.at = at, .input = malloc(ROOM), .output = malloc(ROOM)};
  int wrong = mine.input == NULL || mine.output == NULL;
  for (uint64_t number = 0; wrong == 0 && number < CALLS; number++) {
    random_call call = random_call_of(*seed * 1000 + number, at->ranks);
    wrong = try_call(&mine, &call);
  }
  free(mine.input);
  free(mine.output);
  return wrong;
}

static void random_calls_match_the_reference(void **state) {
  (void)state;
  for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
    uint64_t seed = (uint64_t)ranks;
    device_setup setup = {.ranks = ranks, .blocking = ranks % 2 == 0, .timeout_seconds = 60};
    assert_int_equal(device_ranks_run(&setup, make_random_calls, &seed), 0);
  }
}

static void calls_that_nccl_begins_later_match_it_too(void **state) {
  uint64_t seed = 9;
  device_setup setup = {.ranks = 3, .timeout_seconds = 60};
  (void)state;
  fake_gpu_polls(2);
  assert_int_equal(device_ranks_run(&setup, make_random_calls, &seed), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(random_calls_match_the_reference, device_test_begin, device_test_end),
      cmocka_unit_test_setup_teardown(calls_that_nccl_begins_later_match_it_too, device_test_begin, device_test_end),
  };
  return cmocka_run_group_tests_name("random calls over NCCL", tests, NULL, NULL);
}
