/* What the made-up NCCL's files share: communicators, and the operations that streams run. */
#ifndef EVEN_TEST_FAKE_NCCL_H
#define EVEN_TEST_FAKE_NCCL_H

#include "comm/fake_gpu.h"
#include "comm/fake_world.h"

#include <stdatomic.h>
#include <stdint.h>

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
enum { SUM, PROD, MAX, MIN, AVG, OWN_OPS };
enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECEIVE };
enum { OPS = 64 };

typedef struct own_op {
  bool used;
  int type;
  double factor;
} own_op;

typedef struct ncclComm {
  fake_place place;
  int rank, ranks, device;
  bool blocking;
  bool up; /* all ranks have come */
  bool finalizing;
  atomic_int polls; /* a call is in progress for as many polls; then what it put by begins */
  struct batch *put_by;
  atomic_bool aborted;
  atomic_int outstanding;
  atomic_int failed; /* an error that came on a stream */
  own_op ops[OPS];
  int children;
  struct ncclComm **deliver; /* where a child is to be written when its parent is through */
  struct ncclComm *child;
} ncclComm;

typedef struct operation {
  struct operation *next;
  int kind, type, op, peer;
  const void *input;
  void *output;
  size_t count;
  double factor;
  bool scaled;
  ncclComm *comm;
  void *stream;
  bool done;
} operation;

typedef struct batch {
  operation *first;
  ncclComm *comm;
  fake_stream *stream;
} batch;

/* Bytes of an element; 0 for no type. */
size_t fake_size_of(int type);
/* One element as a number. */
double fake_load(int type, const unsigned char *at);
/* NCCL reads what a batch gives while it writes what it takes: these lie apart, but where an operation is in place. */
void fake_batch_check(const batch *all);
/* Runs a batch's operations with the other ranks, and frees it. */
void fake_batch_run(void *batch);
void fake_batch_free(batch *all);

/* fake_nccl.c: the call fails because a test says so, and with it the group that it is in. */
bool fake_call_fails(const char *function, int *result);
/* Begins what a non-blocking communicator has put by, once it has said "in progress" often enough. */
void fake_batch_begin(batch *all);
/* fake_nccl_lives.c: whether the communicator is one, and not gone; else it is a violation. */
bool fake_alive(const ncclComm *comm, const char *function);
/* What fake_gpu_polls has set. */
int fake_polls(void);

#endif
