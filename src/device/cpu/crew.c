/* Bound threads. */
#include "device/cpu/crew.h"

#include "base/alloc.h"
#include "base/fail.h"

#include <pthread.h>
#include <sched.h>

typedef struct member {
  pthread_t thread;
  void (*body)(void *context, size_t index);
  void *context;
  size_t index;
} member;

static void *member_run(void *argument) {
  member *self = argument;
  self->body(self->context, self->index);
  return NULL;
}

/* Thread attributes that bind to the device's CPUs. */
static even_status attributes_bind(const even_device *device, pthread_attr_t *attributes) {
  int32_t most = 0;
  for (size_t i = 0; i < device->cpu_count; i++) {
    most = device->cpus[i] > most ? device->cpus[i] : most;
  }
  cpu_set_t *set = NULL;
  size_t bytes = CPU_ALLOC_SIZE((size_t)most + 1);
  EVEN_TRY(even_alloc(1, bytes, (void **)&set));
  for (size_t i = 0; i < device->cpu_count; i++) {
    CPU_SET_S((size_t)device->cpus[i], bytes, set);
  }
  int error = pthread_attr_setaffinity_np(attributes, bytes, set);
  even_free(set);
  return error != 0 ? even_fail_errno(error, "threads cannot be bound to %s", device->name) : EVEN_OK;
}

static even_status members_run(member *members, size_t threads, const pthread_attr_t *attributes) {
  even_status status = EVEN_OK;
  size_t started = 0;
  for (; started < threads; started++) {
    int error = pthread_create(&members[started].thread, attributes, member_run, &members[started]);
    if (error != 0) {
      status = even_fail_errno(error, "a thread for a measurement cannot start");
      break;
    }
  }
  for (size_t i = 0; i < started; i++) {
    (void)pthread_join(members[i].thread, NULL);
  }
  return status;
}

even_status even_crew_run(const even_device *device, size_t threads, void (*body)(void *context, size_t index),
                          void *context) {
  pthread_attr_t attributes;
  member *members = NULL;
  EVEN_TRY(EVEN_NEW_ARRAY(&members, threads));
  for (size_t i = 0; i < threads; i++) {
    members[i] = (member){.body = body, .context = context, .index = i};
  }
  (void)pthread_attr_init(&attributes); /* cannot fail on Linux (pthread_attr_init(3)) */
  even_status status = attributes_bind(device, &attributes);
  if (status == EVEN_OK) {
    status = members_run(members, threads, &attributes);
  }
  (void)pthread_attr_destroy(&attributes);
  even_free(members);
  return status;
}
