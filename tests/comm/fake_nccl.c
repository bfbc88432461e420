/* The made-up NCCL: its functions check what they are given and put operations on the made-up driver's streams, where
 * ranks meet and exchange bytes. Declared here on its own, from NCCL's documentation, as a second reading of it. */
#include "comm/fake_gpu.h"
#include "comm/fake_world.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
enum { SUM, PROD, MAX, MIN, AVG, OWN_OPS };
enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECEIVE };
enum { COMMS = 32, OPS = 64, MESSAGES = 16 };

typedef struct {
  char internal[128];
} ncclUniqueId;

typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga, least, most;
  const char *net;
} ncclConfig;

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

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static ncclComm *comms[COMMS];
static atomic_int errors[FAKE_RANKS];
static atomic_int polls_wanted;
static char said[128];
static _Thread_local int group_depth;
static _Thread_local operation *group_first, *group_last;
static _Thread_local int group_error;

int ncclGetVersion(int *version);
int ncclGetUniqueId(ncclUniqueId *out);
int ncclCommInitRankConfig(ncclComm **out, int ranks, ncclUniqueId id, int rank, ncclConfig *config);
int ncclCommFinalize(ncclComm *comm);
int ncclCommDestroy(ncclComm *comm);
int ncclCommAbort(ncclComm *comm);
int ncclCommGetAsyncError(ncclComm *comm, int *out);
const char *ncclGetErrorString(int result);
const char *ncclGetLastError(ncclComm *comm);
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, ncclComm *comm);
int ncclRedOpDestroy(int op, ncclComm *comm);
int ncclAllReduce(const void *input, void *output, size_t count, int type, int op, ncclComm *comm, void *stream);
int ncclReduce(const void *input, void *output, size_t count, int type, int op, int root, ncclComm *comm, void *stream);
int ncclReduceScatter(const void *input, void *output, size_t count, int type, int op, ncclComm *comm, void *stream);
int ncclAllGather(const void *input, void *output, size_t count, int type, ncclComm *comm, void *stream);
int ncclBroadcast(const void *input, void *output, size_t count, int type, int root, ncclComm *comm, void *stream);
int ncclSend(const void *data, size_t count, int type, int peer, ncclComm *comm, void *stream);
int ncclRecv(void *data, size_t count, int type, int peer, ncclComm *comm, void *stream);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclCommShrink(ncclComm *comm, int *excluded, int count, ncclComm **out, ncclConfig *config, int flags);
int ncclCommGetUniqueId(ncclComm *comm, ncclUniqueId *out);
int ncclCommGrow(ncclComm *comm, int ranks, const ncclUniqueId *id, int rank, ncclComm **out, ncclConfig *config);

void fake_gpu_async_error(int rank, int result) {
  atomic_store(&errors[rank], result);
}
void fake_gpu_polls(int count) {
  atomic_store(&polls_wanted, count);
}
void fake_gpu_say(const char *words) {
  (void)snprintf(said, sizeof said, "%s", words);
}

/* ---- communicators that are alive ---- */

static bool alive(const ncclComm *comm, const char *function) {
  bool found = false;
  (void)pthread_mutex_lock(&guard);
  for (int i = 0; i < COMMS; i++) {
    found = found || (comms[i] != NULL && comms[i] == comm);
  }
  (void)pthread_mutex_unlock(&guard);
  if (!found) {
    fake_violate("%s on a communicator that is gone or never was", function);
  }
  return found;
}

static ncclComm *comm_new(int rank, int ranks, bool blocking) {
  ncclComm *comm = calloc(1, sizeof *comm);
  if (comm == NULL) {
    abort();
  }
  comm->rank = rank;
  comm->ranks = ranks;
  comm->blocking = blocking;
  comm->device = fake_current_device();
  if (comm->device < 0) {
    fake_violate("a communicator of rank %d is made without a current device", rank);
  }
  (void)pthread_mutex_lock(&guard);
  for (int i = 0; i < COMMS; i++) {
    if (comms[i] == NULL) {
      comms[i] = comm;
      break;
    }
  }
  (void)pthread_mutex_unlock(&guard);
  fake_count(1);
  return comm;
}

static void comm_free(ncclComm *comm) {
  fake_world *world = comm->place.world;
  (void)pthread_mutex_lock(&guard);
  for (int i = 0; i < COMMS; i++) {
    comms[i] = comms[i] == comm ? NULL : comms[i];
  }
  (void)pthread_mutex_unlock(&guard);
  (void)pthread_mutex_lock(&world->lock);
  bool last = ++world->left == comm->ranks;
  (void)pthread_mutex_unlock(&world->lock);
  fake_place_close(&comm->place, last);
  free(comm);
  fake_count(-1);
}

/* Announces a rank; false: another has its GPU. */
static bool come(ncclComm *comm) {
  fake_world *world = comm->place.world;
  const char *shared = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  bool alone = true;
  (void)pthread_mutex_lock(&world->lock);
  for (int rank = 0; rank < comm->ranks; rank++) {
    alone = alone && (rank == comm->rank || world->device[rank] != comm->device + 1);
  }
  world->device[comm->rank] = comm->device + 1;
  world->ranks = comm->ranks;
  world->arrived++;
  (void)pthread_cond_broadcast(&world->changed);
  (void)pthread_mutex_unlock(&world->lock);
  if (!alone && (shared == NULL || strcmp(shared, "1") != 0)) {
    fake_gpu_say("Duplicate GPU detected : two ranks both on one CUDA device");
    return false;
  }
  return true;
}

static bool all_have_come(ncclComm *comm, bool wait) {
  fake_world *world = comm->place.world;
  (void)pthread_mutex_lock(&world->lock);
  while (wait && world->arrived < comm->ranks && !atomic_load(&comm->aborted)) {
    (void)pthread_cond_wait(&world->changed, &world->lock);
  }
  bool all = world->arrived >= comm->ranks;
  (void)pthread_mutex_unlock(&world->lock);
  return all;
}

/* ---- types and operations ---- */

static size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type >= 0 && type <= BFLOAT16 ? sizes[type] : 0;
}

static double half_value(uint16_t half) {
  int exponent = (half >> 10) & 31;
  double fraction = half & 1023;
  double magnitude = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

static double load(int type, const unsigned char *at) {
  int8_t i8;
  int32_t i32;
  int64_t i64;
  uint16_t half;
  float f32;
  double f64;
  switch (type) {
    case INT8:
      memcpy(&i8, at, 1);
      return i8;
    case UINT8:
      return *at;
    case INT32:
      memcpy(&i32, at, 4);
      return i32;
    case INT64:
      memcpy(&i64, at, 8);
      return (double)i64;
    case FLOAT32:
      memcpy(&f32, at, 4);
      return (double)f32;
    case FLOAT64:
      memcpy(&f64, at, 8);
      return f64;
    default:
      memcpy(&half, at, 2);
      if (type == FLOAT16) {
        return half_value(half);
      }
      uint32_t bits = (uint32_t)half << 16;
      memcpy(&f32, &bits, 4);
      return (double)f32;
  }
}

/* Only for values that the type holds exactly: tests choose such. */
static void store(int type, double value, unsigned char *at) {
  int8_t i8 = 0;
  uint8_t u8 = 0;
  int32_t i32 = 0;
  int64_t i64 = 0;
  uint32_t bits = 0;
  float f32 = (float)value;
  switch (type) {
    case INT8:
      i8 = (int8_t)value;
      memcpy(at, &i8, 1);
      return;
    case UINT8:
      u8 = (uint8_t)value;
      memcpy(at, &u8, 1);
      return;
    case INT32:
      i32 = (int32_t)value;
      memcpy(at, &i32, 4);
      return;
    case INT64:
      i64 = (int64_t)value;
      memcpy(at, &i64, 8);
      return;
    case FLOAT32:
      memcpy(at, &f32, 4);
      return;
    case FLOAT64:
      memcpy(at, &value, 8);
      return;
    case FLOAT16:
      for (bits = 0; bits < 0x7c00 && half_value((uint16_t)bits) < fabs(value); bits++) {
      }
      bits |= value < 0 ? 0x8000 : 0;
      memcpy(at, &bits, 2);
      return;
    default:
      memcpy(&bits, &f32, 4);
      bits >>= 16;
      memcpy(at, &bits, 2);
  }
}

static double combine(int op, double a, double b) {
  switch (op) {
    case PROD:
      return a * b;
    case MAX:
      return a > b ? a : b;
    case MIN:
      return a < b ? a : b;
    default:
      return a + b;
  }
}

/* ---- what streams run ---- */

/* Everybody's barrier; false: this rank was aborted. */
static bool meet(ncclComm *comm) {
  fake_world *world = comm->place.world;
  (void)pthread_mutex_lock(&world->lock);
  unsigned long phase = world->phase;
  if (++world->in_phase == comm->ranks) {
    world->in_phase = 0;
    world->phase++;
    (void)pthread_cond_broadcast(&world->changed);
  }
  while (world->phase == phase && !atomic_load(&comm->aborted)) {
    (void)pthread_cond_wait(&world->changed, &world->lock);
  }
  bool met = world->phase != phase;
  (void)pthread_mutex_unlock(&world->lock);
  return met;
}

static size_t parts_of(const operation *op, bool sent) {
  size_t ranks = (size_t)op->comm->ranks;
  return op->count * (op->kind == REDUCE_SCATTER && sent ? ranks : 1);
}

static void give(const operation *op) {
  size_t count = parts_of(op, true);
  size_t size = size_of(op->type);
  unsigned char *own = malloc(count * size + 1);
  if (own == NULL) {
    abort();
  }
  memcpy(own, op->input, count * size);
  for (size_t i = 0; op->scaled && i < count; i++) {
    store(op->type, load(op->type, own + i * size) * op->factor, own + i * size);
  }
  fake_place_write(&op->comm->place, op->comm->rank, own, count * size);
  free(own);
}

/* count reduced elements from element `from` on */
static void reduce_into(const operation *op, void *output, size_t from) {
  size_t size = size_of(op->type);
  size_t bytes = op->count * size;
  unsigned char *part = malloc(bytes + 1);
  double *sum = calloc(op->count + 1, sizeof *sum);
  if (part == NULL || sum == NULL) {
    abort();
  }
  for (int rank = 0; rank < op->comm->ranks; rank++) {
    fake_place_read(&op->comm->place, rank, part, bytes, from * size);
    for (size_t i = 0; i < op->count; i++) {
      double value = load(op->type, part + i * size);
      sum[i] = rank == 0 ? value : combine(op->op, sum[i], value);
    }
  }
  for (size_t i = 0; i < op->count; i++) {
    store(op->type, op->op == AVG ? sum[i] / op->comm->ranks : sum[i], (unsigned char *)output + i * size);
  }
  free(part);
  free(sum);
}

static void take(const operation *op) {
  ncclComm *comm = op->comm;
  size_t bytes = op->count * size_of(op->type);
  switch (op->kind) {
    case ALL_REDUCE:
      reduce_into(op, op->output, 0);
      return;
    case REDUCE:
      if (comm->rank == op->peer) {
        reduce_into(op, op->output, 0);
      }
      return;
    case REDUCE_SCATTER:
      reduce_into(op, op->output, (size_t)comm->rank * op->count);
      return;
    case ALL_GATHER:
      for (int rank = 0; rank < comm->ranks; rank++) {
        fake_place_read(&comm->place, rank, (char *)op->output + (size_t)rank * bytes, bytes, 0);
      }
      return;
    default:
      fake_place_read(&comm->place, op->peer, op->output, bytes, 0);
  }
}

static bool same_call(const operation *op) {
  fake_world *world = op->comm->place.world;
  bool same = true;
  (void)pthread_mutex_lock(&world->lock);
  for (int rank = 1; rank < op->comm->ranks; rank++) {
    same = same && world->signature[rank] == world->signature[0];
  }
  (void)pthread_mutex_unlock(&world->lock);
  if (!same) {
    fake_violate("ranks made different collectives");
    atomic_store(&op->comm->failed, INVALID_USAGE);
  }
  return same;
}

static bool collective(operation *op) {
  fake_world *world = op->comm->place.world;
  unsigned long root = op->kind == REDUCE || op->kind == BROADCAST ? (unsigned long)op->peer : 0;
  (void)pthread_mutex_lock(&world->lock);
  world->signature[op->comm->rank] = (unsigned long)op->kind | (unsigned long)op->type << 4 |
                                     (unsigned long)op->op << 8 | root << 12 | op->count << 20;
  (void)pthread_mutex_unlock(&world->lock);
  if (op->kind != BROADCAST || op->peer == op->comm->rank) {
    give(op);
  }
  if (!meet(op->comm)) {
    return false;
  }
  if (same_call(op)) {
    take(op);
  }
  return meet(op->comm);
}

/* One message, if it can go now; the world's lock is held. */
static bool move(operation *op) {
  fake_world *world = op->comm->place.world;
  int from = op->kind == SEND ? op->comm->rank : op->peer;
  int to = op->kind == SEND ? op->peer : op->comm->rank;
  int region = FAKE_RANKS + from * FAKE_RANKS + to;
  size_t bytes = op->count * size_of(op->type);
  bool full = world->sent[from][to] > world->received[from][to];
  if (full == (op->kind == SEND)) {
    return false;
  }
  if (op->kind == SEND) {
    fake_place_write(&op->comm->place, region, op->input, bytes);
    world->message[from][to] = bytes;
    world->sent[from][to]++;
  } else {
    if (world->message[from][to] != bytes) {
      fake_violate("rank %d receives %zu bytes from %d, which sent %zu", to, bytes, from, world->message[from][to]);
      bytes = bytes < world->message[from][to] ? bytes : world->message[from][to];
    }
    fake_place_read(&op->comm->place, region, op->output, bytes, 0);
    world->received[from][to]++;
  }
  (void)pthread_cond_broadcast(&world->changed);
  return true;
}

/* Messages of one pair and direction keep their order; any other may overtake. */
static bool is_next(const batch *all, const operation *op) {
  for (const operation *before = all->first; before != op; before = before->next) {
    if (before->kind == op->kind && before->peer == op->peer && !before->done) {
      return false;
    }
  }
  return true;
}

static void messages(batch *all) {
  fake_world *world = all->comm->place.world;
  (void)pthread_mutex_lock(&world->lock);
  for (;;) {
    bool left = false;
    bool moved = false;
    for (operation *op = all->first; op != NULL; op = op->next) {
      if (!op->done && is_next(all, op) && move(op)) {
        op->done = moved = true;
      }
      left = left || !op->done;
    }
    if (!left || atomic_load(&all->comm->aborted)) {
      break;
    }
    if (!moved) {
      (void)pthread_cond_wait(&world->changed, &world->lock);
    }
  }
  (void)pthread_mutex_unlock(&world->lock);
}

/* Stands still while the test wants it, until an abort. */
static void stand(ncclComm *comm) {
  fake_world *world = comm->place.world;
  (void)pthread_mutex_lock(&world->lock);
  while (fake_is_hanging() && !atomic_load(&comm->aborted)) {
    (void)pthread_cond_wait(&world->changed, &world->lock);
  }
  (void)pthread_mutex_unlock(&world->lock);
}

static void batch_free(batch *all) {
  while (all->first != NULL) {
    operation *op = all->first;
    all->first = op->next;
    free(op);
  }
  free(all);
}

static void batch_run(void *argument) {
  batch *all = argument;
  ncclComm *comm = all->comm;
  stand(comm);
  for (operation *op = all->first; op != NULL; op = op->next) {
    if (op->kind < SEND && !atomic_load(&comm->aborted)) {
      op->done = collective(op);
    }
    op->done = op->done || op->kind < SEND;
  }
  if (!atomic_load(&comm->aborted)) {
    messages(all);
  }
  batch_free(all);
  atomic_fetch_sub(&comm->outstanding, 1);
}

/* ---- calls ---- */

static bool fails(const char *function, int *result) {
  if (fake_fails(function, result)) {
    group_error = group_depth > 0 ? *result : group_error;
    return true;
  }
  return false;
}

/* A non-blocking communicator begins what was put by when it has said "in progress" often enough. */
static void begin(batch *all) {
  atomic_fetch_add(&all->comm->outstanding, 1);
  fake_stream_put(all->stream, batch_run, all);
}

static int launch(batch *all) {
  ncclComm *comm = all->comm;
  int polls = atomic_load(&polls_wanted);
  if (atomic_load(&comm->polls) > 0) {
    fake_violate("a call on a communicator that is still in progress");
  }
  if (comm->blocking || polls == 0) {
    begin(all);
    return SUCCESS;
  }
  comm->put_by = all;
  atomic_store(&comm->polls, polls);
  return IN_PROGRESS;
}

static int group_launch(void) {
  int result = SUCCESS;
  while (group_first != NULL) {
    batch *all = calloc(1, sizeof *all);
    operation *rest = NULL;
    operation **last = NULL;
    operation **rest_last = &rest;
    if (all == NULL) {
      abort();
    }
    all->comm = group_first->comm;
    all->stream = fake_stream_of(group_first->stream);
    last = &all->first;
    for (operation *op = group_first, *next = NULL; op != NULL; op = next) {
      next = op->next;
      op->next = NULL;
      if (op->comm == all->comm) {
        if (fake_stream_of(op->stream) != all->stream) {
          fake_violate("a group on several streams");
        }
        *last = op;
        last = &op->next;
      } else {
        *rest_last = op;
        rest_last = &op->next;
      }
    }
    group_first = rest;
    int one = launch(all);
    result = one == SUCCESS ? result : one;
  }
  group_last = NULL;
  return result;
}

static int enqueue(const char *function, operation given) {
  int result = SUCCESS;
  if (fails(function, &result)) {
    return result;
  }
  ncclComm *comm = given.comm;
  if (!alive(comm, function)) {
    return INVALID_ARGUMENT;
  }
  if (!comm->up) {
    fake_violate("%s before all ranks have come", function);
  }
  if (fake_current_device() != comm->device || fake_stream_device(fake_stream_of(given.stream)) != comm->device) {
    fake_violate("%s of device %d with device %d current, on a stream of device %d", function, comm->device,
                 fake_current_device(), fake_stream_device(fake_stream_of(given.stream)));
  }
  if (size_of(given.type) == 0 || given.peer < 0 || given.peer >= comm->ranks) {
    fake_violate("%s: type %d, rank %d", function, given.type, given.peer);
    return INVALID_ARGUMENT;
  }
  if (given.op >= OWN_OPS) {
    own_op *own = given.op - OWN_OPS < OPS ? &comm->ops[given.op - OWN_OPS] : NULL;
    if (own == NULL || !own->used || own->type != given.type) {
      fake_violate("%s with an operation that is not this communicator's and type's", function);
      return INVALID_ARGUMENT;
    }
    given.scaled = true;
    given.factor = own->factor;
    given.op = SUM;
  }
  operation *op = malloc(sizeof *op);
  if (op == NULL) {
    abort();
  }
  *op = given;
  if (group_first == NULL) {
    group_first = op;
  } else {
    group_last->next = op;
  }
  group_last = op;
  return group_depth > 0 ? SUCCESS : group_launch();
}

int ncclGroupStart(void) {
  int result = SUCCESS;
  fake_note("ncclGroupStart");
  if (fails("ncclGroupStart", &result)) {
    return result;
  }
  group_depth++;
  return SUCCESS;
}

int ncclGroupEnd(void) {
  int result = SUCCESS;
  fake_note("ncclGroupEnd");
  if (group_depth == 0) {
    fake_violate("ncclGroupEnd without ncclGroupStart");
    return INVALID_USAGE;
  }
  bool broken = fake_fails("ncclGroupEnd", &result);
  if (--group_depth > 0) {
    return broken ? result : SUCCESS;
  }
  result = broken ? result : group_error;
  group_error = SUCCESS;
  if (result == SUCCESS) {
    return group_launch();
  }
  while (group_first != NULL) {
    operation *op = group_first;
    group_first = op->next;
    free(op);
  }
  group_last = NULL;
  return result;
}

int ncclAllReduce(const void *input, void *output, size_t count, int type, int op, ncclComm *comm, void *stream) {
  fake_note("ncclAllReduce %zu", count);
  return enqueue("ncclAllReduce", (operation){.kind = ALL_REDUCE,
                                              .input = input,
                                              .output = output,
                                              .count = count,
                                              .type = type,
                                              .op = op,
                                              .comm = comm,
                                              .stream = stream});
}
int ncclReduce(const void *input, void *output, size_t count, int type, int op, int root, ncclComm *comm,
               void *stream) {
  fake_note("ncclReduce %zu to %d", count, root);
  return enqueue("ncclReduce", (operation){.kind = REDUCE,
                                           .input = input,
                                           .output = output,
                                           .count = count,
                                           .type = type,
                                           .op = op,
                                           .peer = root,
                                           .comm = comm,
                                           .stream = stream});
}
int ncclReduceScatter(const void *input, void *output, size_t count, int type, int op, ncclComm *comm, void *stream) {
  fake_note("ncclReduceScatter %zu", count);
  return enqueue("ncclReduceScatter", (operation){.kind = REDUCE_SCATTER,
                                                  .input = input,
                                                  .output = output,
                                                  .count = count,
                                                  .type = type,
                                                  .op = op,
                                                  .comm = comm,
                                                  .stream = stream});
}
int ncclAllGather(const void *input, void *output, size_t count, int type, ncclComm *comm, void *stream) {
  fake_note("ncclAllGather %zu", count);
  return enqueue("ncclAllGather", (operation){.kind = ALL_GATHER,
                                              .input = input,
                                              .output = output,
                                              .count = count,
                                              .type = type,
                                              .comm = comm,
                                              .stream = stream});
}
int ncclBroadcast(const void *input, void *output, size_t count, int type, int root, ncclComm *comm, void *stream) {
  fake_note("ncclBroadcast %zu from %d", count, root);
  return enqueue("ncclBroadcast", (operation){.kind = BROADCAST,
                                              .input = input,
                                              .output = output,
                                              .count = count,
                                              .type = type,
                                              .peer = root,
                                              .comm = comm,
                                              .stream = stream});
}
int ncclSend(const void *data, size_t count, int type, int peer, ncclComm *comm, void *stream) {
  fake_note("ncclSend %zu to %d", count, peer);
  return enqueue(
      "ncclSend",
      (operation){
          .kind = SEND, .input = data, .count = count, .type = type, .peer = peer, .comm = comm, .stream = stream});
}
int ncclRecv(void *data, size_t count, int type, int peer, ncclComm *comm, void *stream) {
  fake_note("ncclRecv %zu from %d", count, peer);
  return enqueue(
      "ncclRecv",
      (operation){
          .kind = RECEIVE, .output = data, .count = count, .type = type, .peer = peer, .comm = comm, .stream = stream});
}

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, ncclComm *comm) {
  int result = SUCCESS;
  if (fails("ncclRedOpCreatePreMulSum", &result)) {
    return result;
  }
  if (!alive(comm, "ncclRedOpCreatePreMulSum")) {
    return INVALID_ARGUMENT;
  }
  if (residence != 1) {
    fake_violate("a scalar of the host is said to be in device memory");
  }
  for (int i = 0; i < OPS; i++) {
    if (!comm->ops[i].used) {
      comm->ops[i] = (own_op){true, type, load(type, scalar)};
      *op = OWN_OPS + i;
      fake_count(1);
      return SUCCESS;
    }
  }
  return INTERNAL_ERROR;
}

int ncclRedOpDestroy(int op, ncclComm *comm) {
  if (!alive(comm, "ncclRedOpDestroy")) {
    return INVALID_ARGUMENT;
  }
  if (group_first != NULL) {
    fake_violate("an operation is freed inside the group that uses it");
  }
  if (op < OWN_OPS || op >= OWN_OPS + OPS || !comm->ops[op - OWN_OPS].used) {
    fake_violate("an operation is freed that is not there");
    return INVALID_ARGUMENT;
  }
  comm->ops[op - OWN_OPS].used = false;
  fake_count(-1);
  return SUCCESS;
}

/* ---- the lives of communicators ---- */

int ncclGetVersion(int *version) {
  const char *text = getenv("EVENSTEP_FAKE_NCCL_VERSION");
  int result = SUCCESS;
#ifdef FAKE_OLD
  *version = text == NULL ? 21805 : atoi(text);
#else
  *version = text == NULL ? 23203 : atoi(text);
#endif
  return fake_fails("ncclGetVersion", &result) ? result : SUCCESS;
}

static void name_place(const fake_place *place, ncclUniqueId *out) {
  memset(out, 0, sizeof *out);
  (void)snprintf(out->internal, sizeof out->internal, "%s", place->path);
}

int ncclGetUniqueId(ncclUniqueId *out) {
  fake_place place;
  int result = SUCCESS;
  if (fake_fails("ncclGetUniqueId", &result)) {
    return result;
  }
  (void)fake_place_create(&place, NULL);
  name_place(&place, out);
  fake_place_close(&place, false);
  return SUCCESS;
}

static int start(ncclComm *comm) {
  if (!come(comm)) {
    return INVALID_USAGE;
  }
  if (comm->blocking) {
    comm->up = all_have_come(comm, true);
    return SUCCESS;
  }
  return IN_PROGRESS;
}

int ncclCommInitRankConfig(ncclComm **out, int ranks, ncclUniqueId id, int rank, ncclConfig *config) {
  int result = SUCCESS;
  fake_note("ncclCommInitRankConfig %d of %d", rank, ranks);
  if (fake_fails("ncclCommInitRankConfig", &result)) {
    return result;
  }
  if (config->size != sizeof *config || config->magic != 0xcafebeefU || config->version < 21700) {
    fake_violate("a config of %zu bytes, magic %x, version %u", config->size, config->magic, config->version);
    return INVALID_ARGUMENT;
  }
  ncclComm *comm = comm_new(rank, ranks, config->blocking != 0);
  fake_place_open(&comm->place, id.internal);
  *out = comm;
  return start(comm);
}

int ncclCommFinalize(ncclComm *comm) {
  int result = SUCCESS;
  fake_note("ncclCommFinalize");
  if (fails("ncclCommFinalize", &result)) {
    return result;
  }
  if (!alive(comm, "ncclCommFinalize")) {
    return INVALID_ARGUMENT;
  }
  comm->finalizing = true;
  while (comm->blocking && atomic_load(&comm->outstanding) > 0) {
    (void)sched_yield();
  }
  return comm->blocking ? SUCCESS : IN_PROGRESS;
}

int ncclCommDestroy(ncclComm *comm) {
  int result = SUCCESS;
  fake_note("ncclCommDestroy");
  if (!alive(comm, "ncclCommDestroy")) {
    return INVALID_ARGUMENT;
  }
  for (int i = 0; i < OPS; i++) {
    if (comm->ops[i].used) {
      fake_violate("a communicator is destroyed with an operation of its own");
    }
  }
  if (atomic_load(&comm->outstanding) > 0) {
    fake_violate("a communicator is destroyed with work on its stream");
  }
  bool broken = fake_fails("ncclCommDestroy", &result);
  comm_free(comm);
  return broken ? result : SUCCESS;
}

static void stop_work(ncclComm *comm) {
  fake_world *world = comm->place.world;
  (void)pthread_mutex_lock(&world->lock);
  atomic_store(&comm->aborted, true);
  (void)pthread_cond_broadcast(&world->changed);
  (void)pthread_mutex_unlock(&world->lock);
  while (atomic_load(&comm->outstanding) > 0) {
    (void)sched_yield();
  }
  if (comm->put_by != NULL) {
    batch_free(comm->put_by);
    comm->put_by = NULL;
  }
}

int ncclCommAbort(ncclComm *comm) {
  fake_note("ncclCommAbort");
  if (!alive(comm, "ncclCommAbort")) {
    return INVALID_ARGUMENT;
  }
  stop_work(comm);
  for (int i = 0; i < OPS; i++) {
    fake_count(comm->ops[i].used ? -1 : 0);
  }
  comm_free(comm);
  return SUCCESS;
}

static int state_of(ncclComm *comm) {
  int error = atomic_load(&errors[comm->rank]);
  error = error != 0 ? error : atomic_load(&comm->failed);
  if (error != 0) {
    return error;
  }
  if (!comm->up) {
    comm->up = all_have_come(comm, false);
    return comm->up ? SUCCESS : IN_PROGRESS;
  }
  if (atomic_load(&comm->polls) > 0) {
    if (atomic_fetch_sub(&comm->polls, 1) > 1) {
      return IN_PROGRESS;
    }
    if (comm->put_by != NULL) {
      begin(comm->put_by);
      comm->put_by = NULL;
    }
    if (comm->deliver != NULL) {
      *comm->deliver = comm->child;
      comm->deliver = NULL;
    }
  }
  return comm->finalizing && atomic_load(&comm->outstanding) > 0 ? IN_PROGRESS : SUCCESS;
}

int ncclCommGetAsyncError(ncclComm *comm, int *out) {
  int result = SUCCESS;
  if (fake_fails("ncclCommGetAsyncError", &result)) {
    return result;
  }
  if (!alive(comm, "ncclCommGetAsyncError")) {
    return INVALID_ARGUMENT;
  }
  *out = state_of(comm);
  return SUCCESS;
}

const char *ncclGetErrorString(int result) {
  static const char *const texts[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a "
                                      "network error",
                                      "NCCL operation in progress"};
  return result >= 0 && result <= IN_PROGRESS ? texts[result] : "unknown result code";
}
const char *ncclGetLastError(ncclComm *comm) {
  (void)comm;
  return said;
}

#ifndef FAKE_OLD
/* A child is handed over when its parent is through. */
static int deliver(ncclComm *parent, ncclComm *child, ncclComm **out) {
  int polls = atomic_load(&polls_wanted);
  int result = start(child);
  if (child->blocking || result == INVALID_USAGE || polls == 0) {
    *out = child;
    return result == IN_PROGRESS ? SUCCESS : result;
  }
  parent->child = child;
  parent->deliver = out;
  atomic_store(&parent->polls, polls);
  return IN_PROGRESS;
}

int ncclCommShrink(ncclComm *comm, int *excluded, int count, ncclComm **out, ncclConfig *config, int flags) {
  int result = SUCCESS;
  fake_note("ncclCommShrink %d, flags %d", count, flags);
  if (fails("ncclCommShrink", &result)) {
    return result;
  }
  if (!alive(comm, "ncclCommShrink") || config != NULL) {
    return INVALID_ARGUMENT;
  }
  if (flags == 1) {
    stop_work(comm);
    atomic_store(&comm->aborted, false);
  }
  int rank = comm->rank;
  for (int i = 0; i < count; i++) {
    rank -= excluded[i] < comm->rank;
  }
  char path[FAKE_PATH];
  ncclComm *child = comm_new(rank, comm->ranks - count, comm->blocking);
  (void)snprintf(path, sizeof path, "%.100s.%d", comm->place.path, comm->children++);
  if (!fake_place_create(&child->place, path)) {
    fake_place_open(&child->place, path);
  }
  return deliver(comm, child, out);
}

int ncclCommGetUniqueId(ncclComm *comm, ncclUniqueId *out) {
  int result = SUCCESS;
  fake_place place;
  if (fails("ncclCommGetUniqueId", &result)) {
    return result;
  }
  if (!alive(comm, "ncclCommGetUniqueId")) {
    return INVALID_ARGUMENT;
  }
  (void)fake_place_create(&place, NULL);
  name_place(&place, out);
  fake_place_close(&place, false);
  fake_world *world = comm->place.world;
  (void)pthread_mutex_lock(&world->lock);
  (void)snprintf(world->grown, sizeof world->grown, "%.110s", out->internal);
  (void)pthread_cond_broadcast(&world->changed);
  (void)pthread_mutex_unlock(&world->lock);
  return SUCCESS;
}

int ncclCommGrow(ncclComm *comm, int ranks, const ncclUniqueId *id, int rank, ncclComm **out, ncclConfig *config) {
  int result = SUCCESS;
  char path[FAKE_PATH];
  fake_note("ncclCommGrow to %d", ranks);
  if (fails("ncclCommGrow", &result)) {
    return result;
  }
  if (comm == NULL) {
    ncclComm *joined = comm_new(rank, ranks, config->blocking != 0);
    fake_place_open(&joined->place, id->internal);
    *out = joined;
    return start(joined);
  }
  if (!alive(comm, "ncclCommGrow") || rank != -1) {
    fake_violate("ncclCommGrow of a rank that is in the group, with rank %d", rank);
    return INVALID_ARGUMENT;
  }
  fake_world *world = comm->place.world;
  (void)pthread_mutex_lock(&world->lock);
  while (world->grown[0] == '\0') {
    (void)pthread_cond_wait(&world->changed, &world->lock);
  }
  (void)snprintf(path, sizeof path, "%s", world->grown);
  (void)pthread_mutex_unlock(&world->lock);
  ncclComm *child = comm_new(comm->rank, ranks, comm->blocking);
  fake_place_open(&child->place, path);
  return deliver(comm, child, out);
}
#endif
