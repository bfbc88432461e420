/* Gradients that travel encoded: what every rank has, and what it has left out, is known to the last bit, by either
 * way, on every kind of group. */
#include "comm/kernels.h"
#include "comm/ranks.h"
#include "sync/encoded_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct task {
  even_sync_encoding encoding;
  even_sync_way way;
  const int *host_of; /* of each rank; NULL: each encodes its own */
} task;

typedef struct memory {
  double of[MODEL_PARAMETERS][7001];
} memory;

static bool same(float a, float b) {
  return a == b || (isnan(a) && isnan(b));
}

/* Element i of parameter p, as the sum that every rank should have. */
static float wanted(const model *m, size_t p, size_t i) {
  float sum = m->sums[model_first(m, p) + i];
  uint16_t narrow = 0;
  if (model_parameters[p].dtype == EVEN_BF16) {
    even_kernels_best()->narrow[EVEN_BF16](&narrow, &sum, 1, 1.0f);
    even_kernels_best()->widen[EVEN_BF16](&sum, &narrow, 1);
  }
  return sum;
}

static float got(even_sync *sync, size_t p, size_t i) {
  const void *slot = even_sync_slot(sync, p);
  float value = 0;
  if (model_parameters[p].dtype != EVEN_BF16) {
    return ((const float *)slot)[i];
  }
  even_kernels_best()->widen[EVEN_BF16](&value, (const uint16_t *)slot + i, 1);
  return value;
}

static int check_sums(even_comm *comm, even_sync *sync, const model *m, int round) {
  for (size_t p = 0; p < MODEL_PARAMETERS; p++) {
    for (size_t i = 0; m->used[p] != 0 && i < model_parameters[p].count; i++) {
      if (model_parameters[p].dtype == EVEN_F64) {
        double sum = 0;
        for (int r = 0; r < m->ranks; r++) {
          double values[3];
          model_gradient(r, round, p, values);
          sum += values[i] * model_weight(r, m->ranks, round);
        }
        RANKS_EXPECT(comm, fabs(((const double *)even_sync_slot(sync, p))[i] - sum) < 1e-14);
      } else if (!same(got(sync, p, i), wanted(m, p, i))) {
        return ranks_complain(comm, "round %d, parameter %zu, element %zu: %a instead of %a", round, p, i,
                              (double)got(sync, p, i), (double)wanted(m, p, i));
      }
    }
  }
  return 0;
}

/* Of sums a rank keeps its own part. */
static int check_left_out(even_comm *comm, even_sync *sync, const model *m) {
  bool keeps = m->encoding.kind != EVEN_SYNC_INT8;
  int rank = even_comm_rank(comm);
  int encoder = model_encoder(m, rank);
  for (size_t p = 0; p < MODEL_PARAMETERS; p++) {
    even_sync_left own;
    even_sync_left of_sums;
    size_t first = 0;
    size_t count = 0;
    size_t begin = model_first(m, p);
    size_t there = keeps && model_parameters[p].dtype != EVEN_F64 ? model_parameters[p].count : 0;
    RANKS_EXPECT(comm, even_sync_left_out(sync, p, 0, &own) == EVEN_OK && own.first == 0 && own.count == there);
    for (size_t i = 0; i < own.count; i++) {
      RANKS_EXPECT(comm, same(own.values[i], m->left[rank][begin + i]));
    }
    RANKS_EXPECT(comm, even_sync_left_out(sync, p, 1, &of_sums) == EVEN_OK);
    if (encoder >= 0) {
      model_part(m, m->layout.places[p].bucket, encoder, &first, &count);
    }
    size_t from = first > begin ? first : begin;
    size_t until = first + count < begin + there ? first + count : begin + there;
    bool some = m->params.way == EVEN_SYNC_PARTS && from < until;
    RANKS_EXPECT(comm, of_sums.count == (some ? until - from : 0) && (!some || of_sums.first == from - begin));
    for (size_t i = 0; i < of_sums.count; i++) {
      RANKS_EXPECT(comm, same(of_sums.values[i], m->left_of_sums[from + i]));
    }
  }
  return 0;
}

static int one_round(even_comm *comm, even_sync *sync, model *m, int round, memory *gradients) {
  int rank = even_comm_rank(comm);
  uint8_t used[MODEL_PARAMETERS];
  even_sync_report report;
  RANKS_EXPECT(comm, even_sync_begin(sync, model_weight(rank, m->ranks, round), model_step(round)) == EVEN_OK);
  for (size_t k = 0; k < MODEL_PARAMETERS; k++) {
    size_t p = (MODEL_PARAMETERS - 1 - k + (size_t)round) % MODEL_PARAMETERS;
    void *at = p == 2 ? even_sync_slot(sync, p) : gradients->of[p]; /* one that lies in its slot */
    if (model_has(rank, round, p)) {
      model_gradient(rank, round, p, at);
      RANKS_EXPECT(comm, even_sync_ready(sync, p, at) == EVEN_OK);
    }
  }
  RANKS_EXPECT(comm, even_sync_finish(sync, used, &report) == EVEN_OK);
  model_round(m, round);
  RANKS_EXPECT(comm, memcmp(used, m->used, sizeof used) == 0);
  RANKS_EXPECT(comm, m->finite == (round != MODEL_BAD_ROUND || model_weight(0, m->ranks, round) == 0));
  RANKS_EXPECT(comm, report.full_bytes >= 8002 * 4 && report.bytes > 0);
  RANKS_EXPECT(comm, m->ranks > 2 || report.bytes < report.full_bytes / 2);
  return check_sums(comm, sync, m, round) + check_left_out(comm, sync, m);
}

/* What another engine has kept goes on in this one. */
static int hand_over(even_comm *comm, const model *m, even_sync *sync) {
  even_sync_left to;
  int rank = even_comm_rank(comm);
  for (size_t p = 0; p < MODEL_PARAMETERS; p++) {
    for (int of_sums = 0; of_sums < 2; of_sums++) {
      const float *from = of_sums != 0 ? m->left_of_sums : m->left[rank];
      RANKS_EXPECT(comm, even_sync_left_out(sync, p, of_sums, &to) == EVEN_OK);
      if (to.count > 0) {
        memcpy(to.values, from + model_first(m, p) + to.first, to.count * sizeof(float));
      }
    }
  }
  return 0;
}

static int rounds(even_comm *comm, const task *todo, model *m, memory *gradients) {
  even_sync_params params = model_params(todo->encoding, todo->way);
  for (int life = 0; life < 2; life++) {
    even_sync *sync = NULL;
    RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
    int failed = life == 0 ? 0 : hand_over(comm, m, sync);
    for (int round = 0; failed == 0 && round < MODEL_ROUNDS - 4 * life; round++) {
      failed = one_round(comm, sync, m, round, gradients);
    }
    even_sync_close(sync);
    if (failed != 0) {
      return failed;
    }
  }
  return 0;
}

static int body(even_comm *comm, void *argument) {
  const task *todo = argument;
  even_sync_params params = model_params(todo->encoding, todo->way);
  memory *gradients = calloc(1, sizeof *gradients);
  model m;
  int failed = 1;
  if (model_open(&m, &params, even_comm_ranks(comm), todo->host_of) && gradients != NULL) {
    failed = rounds(comm, todo, &m, gradients);
  }
  model_close(&m);
  free(gradients);
  return failed;
}

static void run(const ranks_setup *wanted_setup, even_sync_encoding encoding, even_sync_way way) {
  int results[RANKS_MOST];
  ranks_setup setup = *wanted_setup;
  task todo = {.encoding = encoding, .way = way, .host_of = setup.host_of};
  even_sync_params params = model_params(encoding, way);
  assert_int_equal(even_sync_arena_bytes(&params, &setup.arena_bytes), EVEN_OK);
  setup.timeout_seconds = 120;
  setup.spin = -1;
  assert_int_equal(ranks_run(&setup, body, &todo, results), 0);
}

static void run_all(const ranks_setup *setup) {
  for (int encoding = EVEN_SYNC_INT8; encoding <= EVEN_SYNC_TOP; encoding++) {
    run(setup, (even_sync_encoding)encoding, EVEN_SYNC_GATHER);
    run(setup, (even_sync_encoding)encoding, EVEN_SYNC_PARTS);
  }
}

static void test_processes(void **state) {
  (void)state;
  for (int ranks = 1; ranks <= 3; ranks++) {
    run_all(&(ranks_setup){.ranks = ranks});
  }
}

static void test_more_ranks_than_blocks(void **state) {
  (void)state;
  run(&(ranks_setup){.ranks = MODEL_RANKS}, EVEN_SYNC_ONE_BIT, EVEN_SYNC_PARTS);
}

static void test_threads(void **state) {
  (void)state;
  run_all(&(ranks_setup){.ranks = 3, .threads = true});
}

/* Of a host one rank encodes for all. */
static void test_hosts(void **state) {
  static const int host_of[] = {0, 1, 0};
  static const int three[MODEL_RANKS] = {0, 1, 1, 2, 0};
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  run(&(ranks_setup){.ranks = 3, .engine = RANKS_HOSTS, .host_of = host_of}, EVEN_SYNC_TOP, EVEN_SYNC_PARTS);
  run(&(ranks_setup){.ranks = 3, .engine = RANKS_HOSTS, .host_of = host_of}, EVEN_SYNC_ONE_BIT, EVEN_SYNC_GATHER);
  run(&(ranks_setup){.ranks = MODEL_RANKS, .engine = RANKS_HOSTS, .host_of = three, .silent = true}, EVEN_SYNC_ONE_BIT,
      EVEN_SYNC_PARTS);
  run(&(ranks_setup){.ranks = MODEL_RANKS, .engine = RANKS_HOSTS, .host_of = three}, EVEN_SYNC_INT8, EVEN_SYNC_GATHER);
  run(&(ranks_setup){.ranks = 2, .engine = RANKS_NETWORK}, EVEN_SYNC_INT8, EVEN_SYNC_PARTS);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_processes),
      cmocka_unit_test(test_more_ranks_than_blocks),
      cmocka_unit_test(test_threads),
      cmocka_unit_test(test_hosts),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
