/* Ranks of device communicators as threads. */
#include "comm/device_ranks.h"

#include "comm/fake_gpu.h"
#include "comm/fake_world.h"
#include "support/fault.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct seat {
  device_setup setup;
  const even_device_comm_id *id;
  device_body *body;
  device_rank rank;
  int result;
} seat;

int device_complain(const device_rank *rank, const char *file, int line, const char *what) {
  (void)fprintf(stderr, "rank %d: %s:%d: %s; last error: %s; misuse: %s\n", rank->rank, file, line, what,
                even_error_last()->what, fake_gpu_violation());
  return 1;
}

void device_rank_wait(device_rank *rank) {
  fake_gpu_wait(rank->stream, rank->rank);
}

even_status device_rank_begin(const device_setup *setup, int rank, const even_device_comm_id *id, device_rank *out) {
  even_device_comm_params params = {.size = sizeof params,
                                    .rank = rank,
                                    .ranks = setup->ranks,
                                    .device = rank,
                                    .blocking = setup->blocking,
                                    .numbers = setup->numbers,
                                    .timeout_seconds = setup->timeout_seconds};
  *out = (device_rank){.rank = rank, .ranks = setup->ranks, .stream = fake_gpu_stream(rank)};
  even_status status = even_device_comm_open(&params, id, &out->comm);
  if (status != EVEN_OK) {
    fake_gpu_stream_free(out->stream);
    out->stream = NULL;
  }
  return status;
}

even_status device_rank_end(device_rank *rank) {
  device_rank_wait(rank);
  even_status status = even_device_comm_close(rank->comm);
  fake_gpu_stream_free(rank->stream);
  return status;
}

static void *sit(void *argument) {
  seat *at = argument;
  void *kept = at->rank.argument;
  int number = at->rank.rank;
  if (device_rank_begin(&at->setup, number, at->id, &at->rank) != EVEN_OK) {
    at->result = device_complain(&at->rank, __FILE__, __LINE__, "cannot open");
    return NULL;
  }
  at->rank.argument = kept;
  at->result = at->body(&at->rank);
  if (device_rank_end(&at->rank) != EVEN_OK && at->result == 0) {
    at->result = device_complain(&at->rank, __FILE__, __LINE__, "cannot close");
  }
  return NULL;
}

int device_ranks_run(const device_setup *setup, device_body *body, void *argument) {
  even_device_comm_id id;
  pthread_t threads[DEVICE_RANKS_MOST];
  seat seats[DEVICE_RANKS_MOST];
  int wrong = 0;
  if (even_device_comm_make_id(NULL, &id) != EVEN_OK) {
    (void)fprintf(stderr, "no id: %s\n", even_error_last()->what);
    return 1;
  }
  for (int rank = 0; rank < setup->ranks; rank++) {
    seats[rank] = (seat){.setup = *setup, .id = &id, .body = body, .rank = {.rank = rank, .argument = argument}};
    if (pthread_create(&threads[rank], NULL, sit, &seats[rank]) != 0) {
      abort();
    }
  }
  for (int rank = 0; rank < setup->ranks; rank++) {
    (void)pthread_join(threads[rank], NULL);
    wrong += seats[rank].result != 0;
  }
  return wrong;
}

int device_test_begin(void **state) {
  (void)state;
  (void)setenv("EVENSTEP_NCCL_LIBRARY", FAKE_NCCL, 1);
  (void)setenv("EVENSTEP_CUDA_LIBRARY", FAKE_NCCL, 1);
  (void)setenv("EVENSTEP_FAKE_GPUS", "8", 1);
  (void)unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  fake_gpu_reset();
  return 0;
}

int device_test_end(void **state) {
  (void)state;
  fault_reset();
  fake_places_forget();
  if (fake_gpu_violation()[0] != '\0' || fake_gpu_live() != 0) {
    (void)fprintf(stderr, "misuse: %s; %d things left\n", fake_gpu_violation(), fake_gpu_live());
    return 1;
  }
  fake_gpu_reset();
  return 0;
}
