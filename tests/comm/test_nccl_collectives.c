/* Every collective through NCCL's interface, over a made-up NCCL that moves real bytes, against a plain reference. */
#include "comm/device_ranks.h"
#include "comm/device_values.h"
#include "comm/fake_gpu.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { COUNT = 1000 };

typedef struct kind {
  even_dtype dtype;
  even_reduce_op op;
} kind;

static void *memory(size_t bytes) {
  void *data = calloc(1, bytes + 1);
  if (data == NULL) {
    abort();
  }
  return data;
}

/* all_reduce, in place and not, of one type and operation */
static int reduces(device_rank *at) {
  const kind *how = at->argument;
  size_t bytes = COUNT * even_dtype_bytes(how->dtype);
  void *data = memory(bytes);
  void *other = memory(bytes);
  void *want = memory(bytes);
  device_values_fill(data, COUNT, how->dtype, at->rank);
  for (size_t i = 0; i < COUNT; i++) {
    device_value_put(want, i, how->dtype, device_reduced(how->op, how->dtype, at->ranks, i));
  }
  DEVICE_EXPECT(
      at, even_device_comm_all_reduce(at->comm, data, other, COUNT, how->dtype, how->op, NULL, at->stream) == EVEN_OK);
  DEVICE_EXPECT(
      at, even_device_comm_all_reduce(at->comm, data, data, COUNT, how->dtype, how->op, NULL, at->stream) == EVEN_OK);
  device_rank_wait(at);
  DEVICE_EXPECT(at, memcmp(other, want, bytes) == 0);
  DEVICE_EXPECT(at, memcmp(data, want, bytes) == 0);
  free(data);
  free(other);
  free(want);
  return 0;
}

static void all_reduce_of_every_type_and_operation(void **state) {
  static const even_dtype dtypes[] = {EVEN_F32, EVEN_F64,  EVEN_F16, EVEN_BF16, EVEN_I8,     EVEN_U8,    EVEN_I32,
                                      EVEN_I64, EVEN_BOOL, EVEN_U32, EVEN_U64,  EVEN_F8E4M3, EVEN_F8E5M2};
  static const even_reduce_op ops[] = {EVEN_SUM, EVEN_PRODUCT, EVEN_MIN, EVEN_MAX, EVEN_AVG};
  (void)state;
  for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
    for (size_t o = 0; o < sizeof ops / sizeof ops[0]; o++) {
      kind how = {dtypes[d], ops[o]};
      if (how.op == EVEN_AVG && how.dtype == EVEN_BOOL) {
        continue;
      }
      device_setup setup = {.ranks = how.op == EVEN_AVG ? 2 : 3};
      assert_int_equal(device_ranks_run(&setup, reduces, &how), 0);
    }
  }
}

static void nonblocking_calls_are_settled_before_they_return(void **state) {
  kind how = {EVEN_F32, EVEN_SUM};
  device_setup setup = {.ranks = 3};
  (void)state;
  fake_gpu_polls(3);
  assert_int_equal(device_ranks_run(&setup, reduces, &how), 0);
  setup.blocking = true;
  fake_gpu_polls(0);
  assert_int_equal(device_ranks_run(&setup, reduces, &how), 0);
}

/* Each rank's own weight, alone and inside a group. */
static int weighs(device_rank *at) {
  static const even_dtype dtypes[] = {EVEN_F32, EVEN_F64, EVEN_F16, EVEN_BF16};
  double weight = at->rank == 0 ? 0.25 : 0.5 * at->rank;
  for (size_t d = 0; d < 4; d++) {
    size_t bytes = 16 * even_dtype_bytes(dtypes[d]);
    void *data = memory(2 * bytes);
    void *want = memory(bytes);
    for (size_t i = 0; i < 16; i++) {
      double sum = 0;
      for (int rank = 0; rank < at->ranks; rank++) {
        sum += (double)(4 * (rank + 1)) * (rank == 0 ? 0.25 : 0.5 * rank);
      }
      device_value_put(data, i, dtypes[d], 4 * (at->rank + 1));
      device_value_put(data, 16 + i, dtypes[d], 4 * (at->rank + 1));
      device_value_put(want, i, dtypes[d], sum);
    }
    char *second = (char *)data + bytes;
    DEVICE_EXPECT(at, even_device_comm_group_begin(at->comm) == EVEN_OK);
    DEVICE_EXPECT(
        at, even_device_comm_all_reduce(at->comm, data, data, 16, dtypes[d], EVEN_SUM, &weight, at->stream) == EVEN_OK);
    DEVICE_EXPECT(at, even_device_comm_group_end(at->comm) == EVEN_OK);
    DEVICE_EXPECT(at, even_device_comm_all_reduce(at->comm, second, second, 16, dtypes[d], EVEN_SUM, &weight,
                                                  at->stream) == EVEN_OK);
    device_rank_wait(at);
    DEVICE_EXPECT(at, memcmp(data, want, bytes) == 0);
    DEVICE_EXPECT(at, memcmp(second, want, bytes) == 0);
    free(data);
    free(want);
  }
  return 0;
}

static void weights_are_multiplied_before_the_sum(void **state) {
  device_setup setup = {.ranks = 3};
  (void)state;
  assert_int_equal(device_ranks_run(&setup, weighs, NULL), 0);
}

/* reduce, reduce_scatter and all_gather, with equal and unequal parts */
static int splits(device_rank *at) {
  const size_t unequal[] = {5, 0, 7};
  const size_t equal[] = {4, 4, 4};
  for (int round = 0; round < 2; round++) {
    const size_t *counts = round == 0 ? unequal : equal;
    size_t bytes[3];
    size_t from = 0;
    float input[12];
    float part[12] = {0};
    float whole[12] = {0};
    for (int rank = 0; rank < 3; rank++) {
      bytes[rank] = counts[rank] * sizeof(float);
      from += rank < at->rank ? counts[rank] : 0;
    }
    device_values_fill(input, 12, EVEN_F32, at->rank);
    DEVICE_EXPECT(at, even_device_comm_reduce_scatter(at->comm, input, part, counts, EVEN_F32, EVEN_SUM, NULL,
                                                      at->stream) == EVEN_OK);
    DEVICE_EXPECT(at, even_device_comm_all_gather(at->comm, part, whole, bytes, at->stream) == EVEN_OK);
    device_rank_wait(at);
    for (size_t i = 0; i < 12; i++) {
      DEVICE_EXPECT(at, (double)whole[i] == device_reduced(EVEN_SUM, EVEN_F32, 3, i));
    }
    /* in place: the part lies where it belongs */
    DEVICE_EXPECT(at, even_device_comm_reduce_scatter(at->comm, input, input + from, counts, EVEN_F32, EVEN_MAX, NULL,
                                                      at->stream) == EVEN_OK);
    DEVICE_EXPECT(at, even_device_comm_all_gather(at->comm, input + from, input, bytes, at->stream) == EVEN_OK);
    device_rank_wait(at);
    for (size_t i = 0; i < 12; i++) {
      DEVICE_EXPECT(at, (double)input[i] == device_reduced(EVEN_MAX, EVEN_F32, 3, i));
    }
    device_values_fill(input, 12, EVEN_F32, at->rank);
    DEVICE_EXPECT(at, even_device_comm_reduce(at->comm, input, at->rank == 2 ? whole : NULL, 12, EVEN_F32, EVEN_PRODUCT,
                                              NULL, 2, at->stream) == EVEN_OK);
    device_rank_wait(at);
    for (size_t i = 0; i < 12 && at->rank == 2; i++) {
      DEVICE_EXPECT(at, (double)whole[i] == device_reduced(EVEN_PRODUCT, EVEN_F32, 3, i));
    }
  }
  return 0;
}

static void parts_may_be_equal_or_not(void **state) {
  device_setup setup = {.ranks = 3};
  (void)state;
  assert_int_equal(device_ranks_run(&setup, splits, NULL), 0);
}

/* rank r sends r*3+peer+1 bytes of its own number to each peer, none from 1 to 0 */
static int exchanges(device_rank *at) {
  unsigned char in[3][16];
  unsigned char out[3][16];
  const void *inputs[3];
  void *outputs[3];
  size_t sent[3];
  size_t received[3];
  memset(in, 0, sizeof in);
  for (int peer = 0; peer < 3; peer++) {
    sent[peer] = at->rank == 1 && peer == 0 ? 0 : (size_t)(at->rank * 3 + peer + 1);
    received[peer] = peer == 1 && at->rank == 0 ? 0 : (size_t)(peer * 3 + at->rank + 1);
    memset(out[peer], 16 * at->rank + peer, sizeof out[peer]);
    inputs[peer] = sent[peer] == 0 ? NULL : out[peer];
    outputs[peer] = received[peer] == 0 ? NULL : in[peer];
  }
  DEVICE_EXPECT(at, even_device_comm_all_to_all(at->comm, inputs, sent, outputs, received, at->stream) == EVEN_OK);
  device_rank_wait(at);
  for (int peer = 0; peer < 3; peer++) {
    for (size_t i = 0; i < 16; i++) {
      DEVICE_EXPECT(at, in[peer][i] == (i < received[peer] ? 16 * peer + at->rank : 0));
    }
  }
  return 0;
}

/* broadcast, gather, scatter from each root, and a ring of messages */
static int roots(device_rank *at) {
  const size_t bytes[] = {3, 0, 5};
  for (int root = 0; root < 3; root++) {
    unsigned char own[8];
    unsigned char got[3][8] = {{0}};
    void *places[] = {got[0], got[1], got[2]};
    unsigned char data[4] = {(unsigned char)at->rank, 1, 2, 3};
    memset(own, 10 + at->rank, sizeof own);
    DEVICE_EXPECT(at, even_device_comm_gather(at->comm, own, at->rank == root ? places : NULL, bytes, root,
                                              at->stream) == EVEN_OK);
    DEVICE_EXPECT(at, even_device_comm_broadcast(at->comm, data, 4, root, at->stream) == EVEN_OK);
    device_rank_wait(at);
    DEVICE_EXPECT(at, data[0] == root && data[3] == 3);
    for (int rank = 0; rank < 3; rank++) {
      for (size_t i = 0; i < 8; i++) {
        DEVICE_EXPECT(at, got[rank][i] == (at->rank == root && i < bytes[rank] ? 10 + rank : 0));
      }
    }
    memset(own, 0, sizeof own);
    for (int rank = 0; rank < 3; rank++) {
      memset(got[rank], 20 + rank, sizeof got[rank]);
    }
    DEVICE_EXPECT(at, even_device_comm_scatter(at->comm, at->rank == root ? (const void *const *)places : NULL, own,
                                               bytes, root, at->stream) == EVEN_OK);
    device_rank_wait(at);
    for (size_t i = 0; i < 8; i++) {
      DEVICE_EXPECT(at, own[i] == (i < bytes[at->rank] ? 20 + at->rank : 0));
    }
  }
  return 0;
}

static int messages(device_rank *at) {
  int token = at->rank;
  int got = -1;
  int self = -1;
  int next = (at->rank + 1) % at->ranks;
  int before = (at->rank + at->ranks - 1) % at->ranks;
  DEVICE_EXPECT(at, even_device_comm_group_begin(at->comm) == EVEN_OK);
  DEVICE_EXPECT(at, even_device_comm_group_begin(at->comm) == EVEN_OK); /* they nest */
  DEVICE_EXPECT(at, even_device_comm_receive(at->comm, &got, sizeof got, before, at->stream) == EVEN_OK);
  DEVICE_EXPECT(at, even_device_comm_send(at->comm, &token, sizeof token, next, at->stream) == EVEN_OK);
  DEVICE_EXPECT(at, even_device_comm_group_end(at->comm) == EVEN_OK);
  DEVICE_EXPECT(at, even_device_comm_send(at->comm, &token, sizeof token, at->rank, at->stream) == EVEN_OK);
  DEVICE_EXPECT(at, even_device_comm_receive(at->comm, &self, sizeof self, at->rank, at->stream) == EVEN_OK);
  DEVICE_EXPECT(at, even_device_comm_group_end(at->comm) == EVEN_OK);
  device_rank_wait(at);
  DEVICE_EXPECT(at, got == before && self == at->rank);
  /* one by one, each waiting on the stream for the other */
  if (at->rank == 0) {
    DEVICE_EXPECT(at, even_device_comm_send(at->comm, &token, sizeof token, 1, at->stream) == EVEN_OK);
    DEVICE_EXPECT(at, even_device_comm_receive(at->comm, &got, sizeof got, 1, at->stream) == EVEN_OK);
  } else if (at->rank == 1) {
    DEVICE_EXPECT(at, even_device_comm_receive(at->comm, &got, sizeof got, 0, at->stream) == EVEN_OK);
    DEVICE_EXPECT(at, even_device_comm_send(at->comm, &got, sizeof got, 0, at->stream) == EVEN_OK);
  }
  DEVICE_EXPECT(at, even_device_comm_barrier(at->comm, at->stream) == EVEN_OK);
  device_rank_wait(at);
  DEVICE_EXPECT(at, at->rank > 1 || got == 0);
  return 0;
}

static void bytes_go_where_they_belong(void **state) {
  device_setup setup = {.ranks = 3};
  (void)state;
  assert_int_equal(device_ranks_run(&setup, exchanges, NULL), 0);
  assert_int_equal(device_ranks_run(&setup, roots, NULL), 0);
  assert_int_equal(device_ranks_run(&setup, messages, NULL), 0);
  fake_gpu_polls(2);
  assert_int_equal(device_ranks_run(&setup, roots, NULL), 0);
}

static void the_calls_are_the_ones_that_nccl_is_fastest_at(void **state) {
  even_device_comm_id id;
  device_rank at;
  device_setup setup = {.ranks = 1};
  const size_t one[] = {4};
  char data[16] = {0};
  (void)state;
  assert_int_equal(even_device_comm_make_id(NULL, &id), EVEN_OK);
  assert_int_equal(device_rank_begin(&setup, 0, &id, &at), EVEN_OK);
  assert_int_equal(even_device_comm_all_gather(at.comm, data, data, one, at.stream), EVEN_OK);
  assert_int_equal(even_device_comm_reduce_scatter(at.comm, data, data, one, EVEN_U8, EVEN_SUM, NULL, at.stream),
                   EVEN_OK);
  assert_int_equal(even_device_comm_broadcast(at.comm, data, 0, 0, at.stream), EVEN_OK); /* nothing: no call */
  assert_int_equal(device_rank_end(&at), EVEN_OK);
  assert_string_equal(fake_gpu_log(),
                      "ncclCommInitRankConfig 0 of 1; ncclAllGather 4; ncclReduceScatter 4; "
                      "ncclCommFinalize; ncclCommDestroy");
}

static void what_nccl_cannot_do_is_said(void **state) {
  even_device_comm_id id;
  device_rank at;
  device_setup setup = {.ranks = 1};
  double weight = 0.5;
  char data[16] = {0};
  (void)state;
  assert_int_equal(even_device_comm_make_id(NULL, &id), EVEN_OK);
  assert_int_equal(device_rank_begin(&setup, 0, &id, &at), EVEN_OK);
#define REDUCE(dtype, op, factor) \
  even_device_comm_all_reduce(at.comm, data, data, 1, (dtype), (op), (factor), at.stream)
  assert_int_equal(REDUCE(EVEN_I16, EVEN_SUM, NULL), EVEN_ERR_UNSUPPORTED);
  assert_int_equal(REDUCE(EVEN_I32, EVEN_BAND, NULL), EVEN_ERR_UNSUPPORTED);
  assert_int_equal(REDUCE(EVEN_BOOL, EVEN_AVG, NULL), EVEN_ERR_ARGUMENT);
  assert_int_equal(REDUCE(EVEN_F8E5M2, EVEN_SUM, &weight), EVEN_ERR_ARGUMENT);
  assert_int_equal(REDUCE(EVEN_F32, EVEN_MAX, &weight), EVEN_ERR_ARGUMENT);
  assert_int_equal(REDUCE(EVEN_I32, EVEN_SUM, &weight), EVEN_ERR_ARGUMENT);
  assert_int_equal(REDUCE((even_dtype)77, EVEN_SUM, NULL), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_device_comm_broadcast(at.comm, data, 4, 1, at.stream), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_device_comm_broadcast(at.comm, NULL, 4, 0, at.stream), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_device_comm_send(at.comm, data, 4, 0, at.stream), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_device_comm_all_reduce(at.comm, data, data, SIZE_MAX / 2, EVEN_F32, EVEN_SUM, NULL, at.stream),
                   EVEN_ERR_OVERFLOW);
  assert_int_equal(REDUCE(EVEN_F32, EVEN_SUM, &weight), EVEN_OK); /* none of it has broken anything */
  assert_int_equal(device_rank_end(&at), EVEN_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(all_reduce_of_every_type_and_operation, device_test_begin, device_test_end),
      cmocka_unit_test_setup_teardown(nonblocking_calls_are_settled_before_they_return, device_test_begin,
                                      device_test_end),
      cmocka_unit_test_setup_teardown(weights_are_multiplied_before_the_sum, device_test_begin, device_test_end),
      cmocka_unit_test_setup_teardown(parts_may_be_equal_or_not, device_test_begin, device_test_end),
      cmocka_unit_test_setup_teardown(bytes_go_where_they_belong, device_test_begin, device_test_end),
      cmocka_unit_test_setup_teardown(the_calls_are_the_ones_that_nccl_is_fastest_at, device_test_begin,
                                      device_test_end),
      cmocka_unit_test_setup_teardown(what_nccl_cannot_do_is_said, device_test_begin, device_test_end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
