/* Where the made-up NCCL's ranks meet. One mapping for each file in a process, so that ThreadSanitizer sees one lock.
 */
#include "comm/fake_world.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAPPED = 64, CREATED = 512 };

static const off_t HEAD = 1 << 20;
static const off_t REGION = (off_t)1 << 28;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static struct {
  fake_place place;
  int users;
} mapped[MAPPED];

/* The last paths that this process has created. */
static char created[CREATED][FAKE_PATH];
static size_t created_count;

static void map(fake_place *out) {
  if (ftruncate(out->fd, HEAD) != 0) {
    abort();
  }
  out->world = mmap(NULL, sizeof(fake_world), PROT_READ | PROT_WRITE, MAP_SHARED, out->fd, 0);
  if (out->world == MAP_FAILED) {
    abort();
  }
}

static void adopt(const fake_place *place) {
  for (int i = 0; i < MAPPED; i++) {
    if (mapped[i].users == 0) {
      mapped[i].place = *place;
      mapped[i].users = 1;
      return;
    }
  }
  abort();
}

static bool find(fake_place *out, const char *path) {
  for (int i = 0; i < MAPPED; i++) {
    if (mapped[i].users > 0 && strcmp(mapped[i].place.path, path) == 0) {
      mapped[i].users++;
      *out = mapped[i].place;
      return true;
    }
  }
  return false;
}

bool fake_place_create(fake_place *out, const char *path) {
  const char *folder = getenv("TMPDIR");
  (void)pthread_mutex_lock(&guard);
  if (path == NULL) {
    (void)snprintf(out->path, sizeof out->path, "%s/fake-nccl-XXXXXX", folder == NULL ? "/tmp" : folder);
    out->fd = mkostemp(out->path, O_CLOEXEC);
  } else {
    (void)snprintf(out->path, sizeof out->path, "%s", path);
    out->fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  }
  bool made = out->fd >= 0;
  if (made) {
    (void)snprintf(created[created_count++ % CREATED], FAKE_PATH, "%s", out->path);
    map(out);
    adopt(out);
  }
  (void)pthread_mutex_unlock(&guard);
  if (!made && path == NULL) {
    abort();
  }
  return made;
}

void fake_places_forget(void) {
  (void)pthread_mutex_lock(&guard);
  for (size_t i = 0; i < created_count && i < CREATED; i++) {
    (void)unlink(created[i]);
  }
  created_count = 0;
  (void)pthread_mutex_unlock(&guard);
}

void fake_place_open(fake_place *out, const char *path) {
  (void)pthread_mutex_lock(&guard);
  if (!find(out, path)) {
    (void)snprintf(out->path, sizeof out->path, "%s", path);
    out->fd = open(path, O_RDWR | O_CLOEXEC);
    if (out->fd < 0) {
      abort();
    }
    map(out);
    adopt(out);
  }
  (void)pthread_mutex_unlock(&guard);
}

void fake_place_close(fake_place *place, bool remove_it) {
  (void)pthread_mutex_lock(&guard);
  if (remove_it) {
    (void)unlink(place->path);
  }
  for (int i = 0; i < MAPPED; i++) {
    if (mapped[i].users > 0 && strcmp(mapped[i].place.path, place->path) == 0 && --mapped[i].users == 0) {
      (void)munmap(mapped[i].place.world, sizeof(fake_world));
      (void)close(mapped[i].place.fd);
    }
  }
  (void)pthread_mutex_unlock(&guard);
}

void fake_place_write(const fake_place *place, int region, const void *data, size_t bytes) {
  if (bytes > (size_t)REGION || pwrite(place->fd, data, bytes, HEAD + region * REGION) != (ssize_t)bytes) {
    abort();
  }
}

void fake_place_read(const fake_place *place, int region, void *data, size_t bytes, size_t offset) {
  if (pread(place->fd, data, bytes, HEAD + region * REGION + (off_t)offset) != (ssize_t)bytes) {
    abort();
  }
}

void fake_world_change(fake_world *world) {
  atomic_fetch_add(&world->changed, 1u);
  (void)syscall(SYS_futex, &world->changed, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

void fake_world_wait(fake_world *world, uint32_t seen) {
  const struct timespec limit = {.tv_nsec = 5000000};
  (void)syscall(SYS_futex, &world->changed, FUTEX_WAIT, seen, &limit, NULL, 0);
}
