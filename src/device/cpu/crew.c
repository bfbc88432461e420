/* Bound threads. */
#include "device/cpu/crew.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/process.h"
#include "os/thread.h"

typedef struct member {
  pthread_t thread;
  const even_device *device;
  void (*body)(void *context, size_t index);
  void *context;
  size_t index;
  even_status status;
} member;

static void *member_run(void *argument) {
  member *self = argument;
  self->status = even_process_pin(self->device->cpus, self->device->cpu_count);
  if (self->status == EVEN_OK) {
    self->body(self->context, self->index);
  }
  return NULL;
}

static even_status members_run(member *members, size_t threads) {
  even_status status = EVEN_OK;
  size_t started = 0;
  for (; started < threads && status == EVEN_OK; started++) {
    status = even_thread_start(member_run, &members[started], &members[started].thread);
    if (status != EVEN_OK) {
      break;
    }
  }
  for (size_t i = 0; i < started; i++) {
    even_thread_join(members[i].thread);
    if (status == EVEN_OK && members[i].status != EVEN_OK) { /* its words are that thread's */
      status = even_fail(members[i].status, "a thread could not be pinned to %s", members[i].device->name);
    }
  }
  return status;
}

even_status even_crew_run(const even_device *device, size_t threads, void (*body)(void *context, size_t index),
                          void *context) {
  member *members = NULL;
  EVEN_TRY(EVEN_NEW_ARRAY(&members, threads));
  for (size_t i = 0; i < threads; i++) {
    members[i] = (member){.device = device, .body = body, .context = context, .index = i};
  }
  even_status status = members_run(members, threads);
  even_free(members);
  return status;
}
