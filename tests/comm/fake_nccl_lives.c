/* The lives of the made-up NCCL's communicators, from the first rank that comes to their end. Declared here on its own,
 * as in fake_nccl.c. */
#include "comm/fake_nccl.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COMMS = 32 };

typedef struct {
  char internal[128];
} ncclUniqueId;

typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga, least, most;
  const char *net;
} ncclConfig;

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static ncclComm *comms[COMMS];
static atomic_int errors[FAKE_RANKS];
static atomic_int polls_wanted;
static char said[128];

int ncclGetVersion(int *version);
int ncclGetUniqueId(ncclUniqueId *out);
int ncclCommInitRankConfig(ncclComm **out, int ranks, ncclUniqueId id, int rank, ncclConfig *config);
int ncclCommFinalize(ncclComm *comm);
int ncclCommDestroy(ncclComm *comm);
int ncclCommAbort(ncclComm *comm);
int ncclCommGetAsyncError(ncclComm *comm, int *out);
const char *ncclGetErrorString(int result);
const char *ncclGetLastError(ncclComm *comm);
int ncclCommShrink(ncclComm *comm, int *excluded, int count, ncclComm **out, ncclConfig *config, int flags);
int ncclCommGetUniqueId(ncclComm *comm, ncclUniqueId *out);
int ncclCommGrow(ncclComm *comm, int ranks, const ncclUniqueId *id, int rank, ncclComm **out, ncclConfig *config);

void fake_gpu_async_error(int rank, int result) {
  atomic_store(&errors[rank], result);
}
void fake_gpu_polls(int count) {
  atomic_store(&polls_wanted, count);
}
int fake_polls(void) {
  return atomic_load(&polls_wanted);
}
void fake_gpu_say(const char *words) {
  (void)pthread_mutex_lock(&guard);
  (void)snprintf(said, sizeof said, "%s", words);
  (void)pthread_mutex_unlock(&guard);
}

/* ---- communicators that are alive ---- */

bool fake_alive(const ncclComm *comm, const char *function) {
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
  bool last = atomic_fetch_add(&world->left, 1) + 1 == comm->ranks;
  fake_place_close(&comm->place, last);
  free(comm);
  fake_count(-1);
}

/* Announces a rank; false: another has its GPU. */
static bool come(ncclComm *comm) {
  fake_world *world = comm->place.world;
  const char *shared = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  bool alone = true;
  atomic_store(&world->device[comm->rank], comm->device + 1);
  for (int rank = 0; rank < comm->ranks; rank++) {
    alone = alone && (rank == comm->rank || atomic_load(&world->device[rank]) != comm->device + 1);
  }
  atomic_fetch_add(&world->arrived, 1);
  fake_world_change(world);
  if (!alone && (shared == NULL || strcmp(shared, "1") != 0)) {
    fake_gpu_say("Duplicate GPU detected : two ranks both on one CUDA device");
    return false;
  }
  return true;
}

static bool all_have_come(ncclComm *comm, bool wait) {
  fake_world *world = comm->place.world;
  for (;;) {
    uint32_t seen = atomic_load(&world->changed);
    bool all = atomic_load(&world->arrived) >= comm->ranks;
    if (all || !wait || atomic_load(&comm->aborted)) {
      return all;
    }
    fake_world_wait(world, seen);
  }
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
  if (fake_call_fails("ncclCommFinalize", &result)) {
    return result;
  }
  if (!fake_alive(comm, "ncclCommFinalize")) {
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
  if (!fake_alive(comm, "ncclCommDestroy")) {
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
  atomic_store(&comm->aborted, true);
  fake_world_change(comm->place.world);
  while (atomic_load(&comm->outstanding) > 0) {
    (void)sched_yield();
  }
  if (comm->put_by != NULL) {
    fake_batch_free(comm->put_by);
    comm->put_by = NULL;
  }
}

int ncclCommAbort(ncclComm *comm) {
  fake_note("ncclCommAbort");
  if (!fake_alive(comm, "ncclCommAbort")) {
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
      fake_batch_begin(comm->put_by);
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
  if (!fake_alive(comm, "ncclCommGetAsyncError")) {
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
  static _Thread_local char heard[sizeof said];
  (void)comm;
  (void)pthread_mutex_lock(&guard);
  memcpy(heard, said, sizeof heard);
  (void)pthread_mutex_unlock(&guard);
  return heard;
}

#ifndef FAKE_OLD
/* A child is handed over when its parent is through. */
static int deliver(ncclComm *parent, ncclComm *child, ncclComm **out) {
  int polls = fake_polls();
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
  if (fake_call_fails("ncclCommShrink", &result)) {
    return result;
  }
  if (!fake_alive(comm, "ncclCommShrink") || config != NULL) {
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
  if (fake_call_fails("ncclCommGetUniqueId", &result)) {
    return result;
  }
  if (!fake_alive(comm, "ncclCommGetUniqueId")) {
    return INVALID_ARGUMENT;
  }
  (void)fake_place_create(&place, NULL);
  name_place(&place, out);
  fake_place_close(&place, false);
  fake_world *world = comm->place.world;
  (void)snprintf(world->grown, sizeof world->grown, "%.110s", out->internal);
  atomic_store(&world->has_grown, true);
  fake_world_change(world);
  return SUCCESS;
}

int ncclCommGrow(ncclComm *comm, int ranks, const ncclUniqueId *id, int rank, ncclComm **out, ncclConfig *config) {
  int result = SUCCESS;
  char path[FAKE_PATH];
  fake_note("ncclCommGrow to %d", ranks);
  if (fake_call_fails("ncclCommGrow", &result)) {
    return result;
  }
  if (comm == NULL) {
    ncclComm *joined = comm_new(rank, ranks, config->blocking != 0);
    fake_place_open(&joined->place, id->internal);
    *out = joined;
    return start(joined);
  }
  if (!fake_alive(comm, "ncclCommGrow") || rank != -1) {
    fake_violate("ncclCommGrow of a rank that is in the group, with rank %d", rank);
    return INVALID_ARGUMENT;
  }
  fake_world *world = comm->place.world;
  while (!atomic_load(&world->has_grown)) {
    fake_world_wait(world, atomic_load(&world->changed));
  }
  (void)snprintf(path, sizeof path, "%s", world->grown);
  ncclComm *child = comm_new(comm->rank, ranks, comm->blocking);
  fake_place_open(&child->place, path);
  return deliver(comm, child, out);
}
#endif
