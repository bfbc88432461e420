/* The lives of device communicators: opening, several at once, shared GPUs, shrinking, growing, versions. */
#include "comm/device_ranks.h"
#include "comm/fake_gpu.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static int sum_is(device_rank *at, even_device_comm *comm, int expected) {
  int value = at->rank + 1;
  DEVICE_EXPECT(at,
                even_device_comm_all_reduce(comm, &value, &value, 1, EVEN_I32, EVEN_SUM, NULL, at->stream) == EVEN_OK);
  device_rank_wait(at);
  DEVICE_EXPECT(at, value == expected);
  return 0;
}

static void the_libraries_are_named(void **state) {
  int version = 0;
  even_device_comm_id id;
  (void)state;
  assert_int_equal(even_device_comm_library(NULL, &version), EVEN_OK);
  assert_int_equal(version, 23203);
  assert_int_equal(even_device_comm_library(FAKE_NCCL_OLD, &version), EVEN_OK);
  assert_int_equal(version, 21805);
  assert_int_equal(even_device_comm_library("libevenstep-absent.so", &version), EVEN_ERR_UNSUPPORTED);
  assert_non_null(strstr(even_error_last()->what, "NCCL was not found"));
  assert_non_null(strstr(even_error_last()->fix, "EVENSTEP_NCCL_LIBRARY"));
  assert_int_equal(even_device_comm_library("libm.so.6", &version), EVEN_ERR_UNSUPPORTED);
  assert_non_null(strstr(even_error_last()->what, "lacks ncclGetVersion"));
  (void)setenv("EVENSTEP_CUDA_LIBRARY", "libevenstep-absent.so", 1);
  assert_int_equal(even_device_comm_library(NULL, &version), EVEN_ERR_UNSUPPORTED);
  assert_non_null(strstr(even_error_last()->what, "no NVIDIA driver"));
  assert_int_equal(even_device_comm_make_id(NULL, &id), EVEN_OK); /* needs no driver */
}

static void a_gpu_that_is_not_there_is_said(void **state) {
  even_device_comm_id id = {{0}};
  even_device_comm *comm = NULL;
  even_device_comm_params params = {.size = sizeof params, .ranks = 1, .device = 8};
  (void)state;
  assert_int_equal(even_device_comm_open(&params, &id, &comm), EVEN_ERR_DEVICE);
  assert_non_null(strstr(even_error_last()->what, "there is no cuda:8: the driver shows 8 GPUs"));
  params.device = 0;
  params.rank = 1;
  assert_int_equal(even_device_comm_open(&params, &id, &comm), EVEN_ERR_ARGUMENT);
  params.rank = 0;
  params.size = 4;
  assert_int_equal(even_device_comm_open(&params, &id, &comm), EVEN_ERR_ARGUMENT);
}

/* A second communicator of the same ranks in another order, used in turn with the first. */
static int two_groups(device_rank *at) {
  const even_device_comm_id *id = at->argument;
  even_device_comm *second = NULL;
  even_device_comm_params params = {.size = sizeof params,
                                    .rank = at->ranks - 1 - at->rank,
                                    .ranks = at->ranks,
                                    .device = at->rank,
                                    .timeout_seconds = 60};
  DEVICE_EXPECT(at, even_device_comm_open(&params, id, &second) == EVEN_OK);
  DEVICE_EXPECT(at, even_device_comm_rank(second) == at->ranks - 1 - at->rank);
  DEVICE_EXPECT(at, even_device_comm_ranks(second) == at->ranks && even_device_comm_device(second) == at->rank);
  for (int i = 0; i < 20; i++) {
    DEVICE_EXPECT(at, sum_is(at, at->comm, 6) == 0 && sum_is(at, second, 6) == 0);
  }
  /* one group at a time on a thread */
  DEVICE_EXPECT(at, even_device_comm_group_begin(at->comm) == EVEN_OK);
  DEVICE_EXPECT(at, even_device_comm_barrier(second, at->stream) == EVEN_ERR_STATE);
  DEVICE_EXPECT(at, even_device_comm_group_end(at->comm) == EVEN_OK);
  DEVICE_EXPECT(at, even_device_comm_group_end(at->comm) == EVEN_ERR_STATE);
  DEVICE_EXPECT(at, even_device_comm_close(second) == EVEN_OK);
  return 0;
}

static void groups_are_independent(void **state) {
  even_device_comm_id id;
  device_setup setup = {.ranks = 3, .timeout_seconds = 60};
  (void)state;
  assert_int_equal(even_device_comm_make_id(NULL, &id), EVEN_OK);
  assert_int_equal(device_ranks_run(&setup, two_groups, &id), 0);
}

/* ---- two ranks on one GPU ---- */

typedef struct neighbour {
  even_device_comm_params params;
  even_device_comm_id id;
  even_device_comm *comm;
  even_status status;
  char what[640];
} neighbour;

static void *open_neighbour(void *argument) {
  neighbour *at = argument;
  at->status = even_device_comm_open(&at->params, &at->id, &at->comm);
  memcpy(at->what, even_error_last()->what, sizeof at->what);
  return NULL;
}

static void open_two_on_one_gpu(bool said, neighbour out[2]) {
  pthread_t threads[2];
  even_device_comm_id id;
  assert_int_equal(even_device_comm_make_id(NULL, &id), EVEN_OK);
  for (int rank = 0; rank < 2; rank++) {
    out[rank] =
        (neighbour){.params = {.size = sizeof out->params, .rank = rank, .ranks = 2, .shares_device = said}, .id = id};
    out[rank].params.timeout_seconds = 20;
    assert_int_equal(pthread_create(&threads[rank], NULL, open_neighbour, &out[rank]), 0);
  }
  for (int rank = 0; rank < 2; rank++) {
    (void)pthread_join(threads[rank], NULL);
  }
}

static void a_shared_gpu_needs_nccl_s_consent(void **state) {
  neighbour two[2] = {0};
  int refused = 0;
  even_device_comm *comm = NULL;
  even_device_comm_params params = {.size = sizeof params, .ranks = 2, .shares_device = true, .library = FAKE_NCCL_OLD};
  (void)state;
  assert_int_equal(even_device_comm_open(&params, &two[0].id, &comm), EVEN_ERR_UNSUPPORTED);
  assert_non_null(strstr(even_error_last()->what, "NCCL 2.18 takes one rank a GPU"));
  params.library = NULL;
  assert_int_equal(even_device_comm_open(&params, &two[0].id, &comm), EVEN_ERR_UNSUPPORTED);
  assert_non_null(strstr(even_error_last()->fix, "NCCL_MULTI_RANK_GPU_ENABLE=1"));
  (void)setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  open_two_on_one_gpu(true, two);
  for (int rank = 0; rank < 2; rank++) {
    assert_int_equal(two[rank].status, EVEN_OK);
    assert_int_equal(even_device_comm_close(two[rank].comm), EVEN_OK);
  }
  /* not said, and NCCL finds it out: at least one of the two is told (the first may have come before the other) */
  (void)unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  open_two_on_one_gpu(false, two);
  for (int rank = 0; rank < 2; rank++) {
    if (two[rank].status != EVEN_OK) {
      assert_int_equal(two[rank].status, EVEN_ERR_UNSUPPORTED);
      assert_non_null(strstr(two[rank].what, "Duplicate GPU"));
      refused++;
    } else {
      even_device_comm_abort(two[rank].comm);
      assert_int_equal(even_device_comm_close(two[rank].comm), EVEN_OK);
    }
  }
  assert_true(refused >= 1);
}

/* ---- shrink and grow ---- */

static int loses_one(device_rank *at) {
  const int gone[] = {1};
  bool aborts = *(const bool *)at->argument;
  even_device_comm *rest = NULL;
  DEVICE_EXPECT(at, sum_is(at, at->comm, 10) == 0);
  if (at->rank == 1) {
    DEVICE_EXPECT(at, even_device_comm_shrink(at->comm, gone, 1, aborts, &rest) == EVEN_ERR_ARGUMENT);
    even_device_comm_abort(at->comm);
    return 0;
  }
  DEVICE_EXPECT(at, even_device_comm_shrink(at->comm, gone, 1, aborts, &rest) == EVEN_OK);
  DEVICE_EXPECT(at, even_device_comm_ranks(rest) == 3);
  DEVICE_EXPECT(at, even_device_comm_rank(rest) == (at->rank > 1 ? at->rank - 1 : at->rank));
  DEVICE_EXPECT(at, sum_is(at, rest, 8) == 0);
  DEVICE_EXPECT(at, even_device_comm_close(rest) == EVEN_OK);
  return 0;
}

static void a_group_goes_on_without_a_rank(void **state) {
  device_setup setup = {.ranks = 4, .timeout_seconds = 60};
  bool aborts = false;
  (void)state;
  assert_int_equal(device_ranks_run(&setup, loses_one, &aborts), 0);
  aborts = true;
  fake_gpu_polls(3);
  assert_int_equal(device_ranks_run(&setup, loses_one, &aborts), 0);
  assert_non_null(strstr(fake_gpu_log(), "ncclCommShrink 1, flags 1"));
}

typedef struct newcomer {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  bool known;
  even_device_comm_id id;
  device_rank rank;
  int result;
} newcomer;

static void *join_group(void *argument) {
  newcomer *new = argument;
  even_device_comm *comm = NULL;
  even_device_comm_params params = {.size = sizeof params, .rank = 2, .ranks = 3, .device = 2, .timeout_seconds = 60};
  (void)pthread_mutex_lock(&new->lock);
  while (!new->known) {
    (void)pthread_cond_wait(&new->changed, &new->lock);
  }
  (void)pthread_mutex_unlock(&new->lock);
  new->rank = (device_rank){.rank = 2, .ranks = 3, .stream = fake_gpu_stream(2)};
  new->result = 1;
  if (even_device_comm_join(&params, &new->id, &comm) == EVEN_OK) {
    new->result = sum_is(&new->rank, comm, 6);
    new->result += even_device_comm_close(comm) != EVEN_OK;
  }
  fake_gpu_stream_free(new->rank.stream);
  return NULL;
}

static int gains_one(device_rank *at) {
  newcomer *new = at->argument;
  even_device_comm_id id;
  even_device_comm *all = NULL;
  if (at->rank == 0) {
    DEVICE_EXPECT(at, even_device_comm_grow_id(at->comm, &id) == EVEN_OK);
    (void)pthread_mutex_lock(&new->lock);
    new->id = id;
    new->known = true;
    (void)pthread_cond_broadcast(&new->changed);
    (void)pthread_mutex_unlock(&new->lock);
  }
  DEVICE_EXPECT(at, even_device_comm_grow(at->comm, 2, &id, &all) == EVEN_ERR_ARGUMENT);
  DEVICE_EXPECT(at, even_device_comm_grow(at->comm, 3, at->rank == 0 ? &id : NULL, &all) == EVEN_OK);
  DEVICE_EXPECT(at, even_device_comm_rank(all) == at->rank && even_device_comm_ranks(all) == 3);
  DEVICE_EXPECT(at, sum_is(at, all, 6) == 0);
  DEVICE_EXPECT(at, even_device_comm_close(all) == EVEN_OK);
  return 0;
}

static void a_group_takes_a_new_rank(void **state) {
  device_setup setup = {.ranks = 2, .timeout_seconds = 60};
  newcomer new = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
  pthread_t thread;
  (void)state;
  assert_int_equal(pthread_create(&thread, NULL, join_group, &new), 0);
  assert_int_equal(device_ranks_run(&setup, gains_one, &new), 0);
  (void)pthread_join(thread, NULL);
  assert_int_equal(new.result, 0);
}

static void old_versions_say_what_they_cannot(void **state) {
  const int gone[] = {0};
  even_device_comm_id id;
  even_device_comm *comm = NULL;
  even_device_comm *other = NULL;
  even_device_comm_params params = {.size = sizeof params, .ranks = 1, .library = FAKE_NCCL_OLD};
  (void)state;
  (void)setenv("EVENSTEP_CUDA_LIBRARY", FAKE_NCCL_OLD, 1);
  assert_int_equal(even_device_comm_make_id(FAKE_NCCL_OLD, &id), EVEN_OK);
  assert_int_equal(even_device_comm_open(&params, &id, &comm), EVEN_OK);
  assert_int_equal(even_device_comm_shrink(comm, gone, 1, false, &other), EVEN_ERR_UNSUPPORTED);
  assert_string_equal(even_error_last()->what, "NCCL 2.18.5 cannot shrink a communicator");
  assert_int_equal(even_device_comm_grow_id(comm, &id), EVEN_ERR_UNSUPPORTED);
  assert_int_equal(even_device_comm_grow(comm, 2, &id, &other), EVEN_ERR_UNSUPPORTED);
  assert_int_equal(even_device_comm_join(&params, &id, &other), EVEN_ERR_UNSUPPORTED);
  char data[4] = {0};
  assert_int_equal(even_device_comm_all_reduce(comm, data, data, 4, EVEN_F8E4M3, EVEN_SUM, NULL, NULL),
                   EVEN_ERR_UNSUPPORTED);
  assert_string_equal(even_error_last()->what, "NCCL 2.18 does not reduce floats of 8 bits");
  assert_int_equal(even_device_comm_close(comm), EVEN_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(the_libraries_are_named, device_test_begin, device_test_end),
      cmocka_unit_test_setup_teardown(a_gpu_that_is_not_there_is_said, device_test_begin, device_test_end),
      cmocka_unit_test_setup_teardown(groups_are_independent, device_test_begin, device_test_end),
      cmocka_unit_test_setup_teardown(a_shared_gpu_needs_nccl_s_consent, device_test_begin, device_test_end),
      cmocka_unit_test_setup_teardown(a_group_goes_on_without_a_rank, device_test_begin, device_test_end),
      cmocka_unit_test_setup_teardown(a_group_takes_a_new_rank, device_test_begin, device_test_end),
      cmocka_unit_test_setup_teardown(old_versions_say_what_they_cannot, device_test_begin, device_test_end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
