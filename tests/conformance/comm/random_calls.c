/* Random calls with random shapes, compared with the reference to the last bit. */
#include "conformance/comm/random_calls.h"

#include "comm/kernels.h"
#include "comm/ranks.h"
#include "conformance/comm/reference.h"

#include <stdlib.h>
#include <string.h>

#define GUARD 0x5a

/* One call, the same on all ranks. */
typedef struct random_call {
  uint64_t number;
  int kind; /* 0 all-reduce, 1 reduce-scatter, 2 all-gather, 3 broadcast, 4 barrier, 5 all-to-all */
  even_dtype dtype;
  even_reduce_op op;
  int root;
  size_t counts[RANKS_MOST];
  size_t total;
  bool in_arena[RANKS_MOST];
  size_t shift; /* elements between the memory's beginning and the data */
} random_call;

static size_t random_count(uint64_t *state, size_t most) {
  uint64_t shape = reference_random(state) % 8;
  size_t count = (size_t)(reference_random(state) % (most + 1));
  return shape == 0 ? 0 : shape == 1 ? count % 7 : shape < 5 ? count % (most / 64 + 1) : count;
}

static random_call random_call_of(const random_calls *suite, int ranks, uint64_t number) {
  uint64_t state = suite->seed * 0x9e3779b97f4a7c15u + number * 0xd1342543de82ef95u + 1;
  random_call call = {.number = number};
  for (int i = 0; i < 4; i++) {
    (void)reference_random(&state);
  }
  call.kind = (int)(reference_random(&state) % 6);
  do {
    call.dtype = (even_dtype)(reference_random(&state) % EVEN_DTYPES);
    call.op = (even_reduce_op)(reference_random(&state) % EVEN_REDUCE_OPS);
  } while (!reference_has(call.dtype, call.op));
  call.root = (int)(reference_random(&state) % (uint64_t)ranks);
  size_t most = suite->largest / even_dtype_bytes(call.dtype);
  uint64_t where = reference_random(&state) % 4;
  call.shift = reference_random(&state) % 2 == 0 ? 0 : (size_t)(reference_random(&state) % 33);
  for (int rank = 0; rank < ranks; rank++) {
    call.counts[rank] = random_count(&state, call.kind == 0 || call.kind == 3 ? most : most / (size_t)ranks);
    bool only_root = call.kind == 1 && call.shift % 3 == 1; /* a reduce to one rank */
    call.counts[rank] = only_root && rank != call.root ? 0 : call.counts[rank];
    call.total += call.counts[rank];
    call.in_arena[rank] = where == 0 || (where == 1 && reference_random(&state) % 2 == 0);
  }
  return call;
}

static unsigned char *memory_for(even_comm *comm, const random_call *call, unsigned char *plain) {
  unsigned char *memory = call->in_arena[even_comm_rank(comm)] ? even_comm_arena(comm) : plain;
  return memory + call->shift * even_dtype_bytes(call->dtype);
}

static int compare(even_comm *comm, const random_call *call, const unsigned char *got, size_t index, const void *wanted,
                   const char *what) {
  size_t element = even_dtype_bytes(call->dtype);
  if (memcmp(got + index * element, wanted, element) != 0) {
    return ranks_complain(comm, "call %llu, %s of dtype %d, op %d: element %zu of %zu is wrong",
                          (unsigned long long)call->number, what, (int)call->dtype, (int)call->op, index, call->total);
  }
  return 0;
}

static int try_all_reduce(even_comm *comm, const random_call *call, unsigned char *plain) {
  size_t element = even_dtype_bytes(call->dtype);
  size_t count = call->counts[0];
  unsigned char *data = memory_for(comm, call, plain);
  unsigned char wanted[8];
  for (size_t i = 0; i < count; i++) {
    reference_fill(data + i * element, call->dtype, call->number, even_comm_rank(comm), i);
  }
  memset(data + count * element, GUARD, element);
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, count, call->dtype, call->op) == EVEN_OK);
  for (size_t i = count; i-- > 0;) { /* from the end: what a peer might still be writing */
    reference_reduce(wanted, call->dtype, call->op, call->number, even_comm_ranks(comm), i);
    if (compare(comm, call, data, i, wanted, "all_reduce") != 0) {
      return 1;
    }
  }
  memset(wanted, GUARD, sizeof wanted);
  return compare(comm, call, data, count, wanted, "the end of all_reduce");
}

static int try_reduce_scatter(even_comm *comm, const random_call *call, unsigned char *plain, unsigned char *output) {
  size_t element = even_dtype_bytes(call->dtype);
  int own = even_comm_rank(comm);
  size_t begin = 0;
  unsigned char *input = memory_for(comm, call, plain);
  unsigned char wanted[8];
  for (int rank = 0; rank < own; rank++) {
    begin += call->counts[rank];
  }
  for (size_t i = 0; i < call->total; i++) {
    reference_fill(input + i * element, call->dtype, call->number, own, i);
  }
  unsigned char *into = call->root == 0 ? input + begin * element : output;
  if (into == output) {
    memset(into + call->counts[own] * element, GUARD, element);
  }
  RANKS_EXPECT(comm, even_comm_reduce_scatter(comm, input, into, call->counts, call->dtype, call->op) == EVEN_OK);
  for (size_t i = 0; i < call->counts[own]; i++) {
    reference_reduce(wanted, call->dtype, call->op, call->number, even_comm_ranks(comm), begin + i);
    if (compare(comm, call, into, i, wanted, "reduce_scatter") != 0) {
      return 1;
    }
  }
  memset(wanted, GUARD, sizeof wanted);
  return into == output ? compare(comm, call, into, call->counts[own], wanted, "the end of reduce_scatter") : 0;
}

static int try_all_gather(even_comm *comm, const random_call *call, unsigned char *plain, unsigned char *output) {
  size_t element = even_dtype_bytes(call->dtype);
  int own = even_comm_rank(comm);
  bool in_place = call->root == 0;
  size_t begin = 0;
  unsigned char wanted[8];
  for (int rank = 0; rank < own; rank++) {
    begin += call->counts[rank];
  }
  unsigned char *input = in_place ? output + begin * element : memory_for(comm, call, plain);
  for (size_t i = 0; i < call->counts[own]; i++) {
    reference_fill(input + i * element, call->dtype, call->number, own, i);
  }
  memset(output + call->total * element, GUARD, element);
  RANKS_EXPECT(comm, even_comm_all_gather(comm, input, output, call->counts, call->dtype) == EVEN_OK);
  size_t at = 0;
  for (int rank = 0; rank < even_comm_ranks(comm); rank++) {
    for (size_t i = 0; i < call->counts[rank]; i++, at++) {
      memset(wanted, 0, sizeof wanted);
      reference_fill(wanted, call->dtype, call->number, rank, i);
      if (compare(comm, call, output, at, wanted, "all_gather") != 0) {
        return 1;
      }
    }
  }
  memset(wanted, GUARD, sizeof wanted);
  return compare(comm, call, output, call->total, wanted, "the end of all_gather");
}

static int try_broadcast(even_comm *comm, const random_call *call, unsigned char *plain) {
  size_t element = even_dtype_bytes(call->dtype);
  size_t count = call->counts[0];
  unsigned char *data = memory_for(comm, call, plain);
  unsigned char wanted[8];
  for (size_t i = 0; i < count; i++) {
    reference_fill(data + i * element, call->dtype, call->number, even_comm_rank(comm), i);
  }
  RANKS_EXPECT(comm, even_comm_broadcast(comm, data, count * element, call->root) == EVEN_OK);
  for (size_t i = 0; i < count; i++) {
    reference_fill(wanted, call->dtype, call->number, call->root, i);
    if (compare(comm, call, data, i, wanted, "broadcast") != 0) {
      return 1;
    }
  }
  return 0;
}

/* Bytes that `from` has for `to`: now few, now many, now for one rank or from one rank alone. */
static size_t part_bytes(const random_calls *suite, const random_call *call, int ranks, int from, int to) {
  uint64_t state = call->number * 0x9e3779b97f4a7c15u + (uint64_t)(from * 64 + to) * 0xd1342543de82ef95u + 7;
  for (int i = 0; i < 4; i++) {
    (void)reference_random(&state);
  }
  int shape = (int)call->shift % 4;
  size_t most = suite->largest / (size_t)ranks;
  size_t bytes = random_count(&state, shape == 0 ? (size_t)6000 / (size_t)ranks : most);
  return (shape == 1 && to != call->root) || (shape == 2 && from != call->root) ? 0 : bytes;
}

static int try_all_to_all(even_comm *comm, const random_calls *suite, const random_call *call, unsigned char *input,
                          unsigned char *output) {
  size_t sends[RANKS_MOST];
  size_t receives[RANKS_MOST];
  const void *inputs[RANKS_MOST];
  void *outputs[RANKS_MOST];
  int ranks = even_comm_ranks(comm);
  int own = even_comm_rank(comm);
  size_t at = 0;
  for (int rank = 0; rank < ranks; rank++) {
    sends[rank] = part_bytes(suite, call, ranks, own, rank);
    receives[rank] = part_bytes(suite, call, ranks, rank, own);
    inputs[rank] = input + at;
    for (size_t i = 0; i < sends[rank]; i++) {
      reference_fill(input + at++, EVEN_U8, call->number, own * 64 + rank, i);
    }
  }
  size_t total = 0;
  for (int rank = 0; rank < ranks; rank++) {
    outputs[rank] = output + total;
    total += receives[rank];
  }
  memset(output + total, GUARD, 1);
  RANKS_EXPECT(comm, even_comm_all_to_all(comm, inputs, sends, outputs, receives) == EVEN_OK);
  at = 0;
  for (int rank = 0; rank < ranks; rank++) {
    for (size_t i = 0; i < receives[rank]; i++, at++) {
      unsigned char wanted[8] = {0};
      reference_fill(wanted, EVEN_U8, call->number, rank * 64 + own, i);
      if (output[at] != wanted[0]) {
        return ranks_complain(comm, "call %llu, all_to_all: byte %zu from rank %d is wrong",
                              (unsigned long long)call->number, i, rank);
      }
    }
  }
  RANKS_EXPECT(comm, output[total] == GUARD);
  return 0;
}

int random_calls_run(even_comm *comm, void *argument) {
  const random_calls *suite = argument;
  int wrong = 0;
  unsigned char *plain = malloc(suite->largest + 4096);
  unsigned char *output = malloc(suite->largest + 4096);
  for (int number = 0; wrong == 0 && number < suite->calls; number++) {
    random_call call = random_call_of(suite, even_comm_ranks(comm), (uint64_t)number);
    switch (call.kind) {
      case 0:
        wrong = try_all_reduce(comm, &call, plain);
        break;
      case 1:
        wrong = try_reduce_scatter(comm, &call, plain, output);
        break;
      case 2:
        wrong = try_all_gather(comm, &call, plain, output);
        break;
      case 3:
        wrong = try_broadcast(comm, &call, plain);
        break;
      case 5:
        wrong = try_all_to_all(comm, suite, &call, plain, output);
        break;
      default:
        wrong = even_comm_barrier(comm) != EVEN_OK;
        break;
    }
  }
  free(plain);
  free(output);
  return wrong;
}
