/* A ring of bytes between the caller and the thread that writes. */
#include "os/outlet.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/thread.h"

#include <errno.h>
#include <string.h>

struct even_outlet {
  pthread_mutex_t lock;
  pthread_cond_t changed; /* bytes came or went, or the end */
  pthread_t thread;
  int fd;
  char *ring;
  size_t limit;
  size_t first;   /* of the bytes that wait */
  size_t waiting; /* how many */
  bool gone;      /* nobody reads any more */
  bool ending;
};

/* How often a full disk is tried again. */
enum { ROOM_MS = 100 };

/* Some of the bytes; 0: none, since the disk is full, which passes (*full), or the reader is gone. The descriptor may
 * be non-blocking, as whoever made it wished. */
static size_t write_some(int fd, const char *bytes, size_t count, bool *full) {
  for (;;) {
    ssize_t written = even_os.write(fd, bytes, count);
    if (written > 0) {
      return (size_t)written;
    }
    *full = written < 0 && (errno == ENOSPC || errno == EDQUOT);
    if (*full) {
      return 0;
    }
    struct pollfd room = {.fd = fd, .events = POLLOUT};
    bool again = written < 0 && (errno == EINTR || (errno == EAGAIN && even_os.poll(&room, 1, -1) > 0));
    if (!again) {
      return 0;
    }
  }
}

static struct timespec after(uint64_t ns) {
  uint64_t until = even_clock_ns() + ns;
  return (struct timespec){.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};
}

static void *write_on(void *context) {
  enum { MOST_AT_ONCE = 65536 };
  even_outlet *outlet = context;
  (void)pthread_mutex_lock(&outlet->lock);
  for (;;) {
    while (outlet->waiting == 0 && !outlet->ending) {
      (void)pthread_cond_wait(&outlet->changed, &outlet->lock);
    }
    if (outlet->waiting == 0) {
      break;
    }
    const char *bytes = outlet->ring + outlet->first;
    size_t count = even_least_size(even_least_size(outlet->waiting, outlet->limit - outlet->first), MOST_AT_ONCE);
    (void)pthread_mutex_unlock(&outlet->lock); /* nobody else touches the bytes that wait */
    bool full = false;
    size_t written = write_some(outlet->fd, bytes, count, &full);
    (void)pthread_mutex_lock(&outlet->lock);
    if (full) {
      const struct timespec deadline = after(ROOM_MS * 1000000u);
      (void)pthread_cond_timedwait(&outlet->changed, &outlet->lock, &deadline);
      continue;
    }
    outlet->gone = outlet->gone || written == 0;
    outlet->first = (outlet->first + written) % outlet->limit;
    outlet->waiting = outlet->gone ? 0 : outlet->waiting - written;
    (void)pthread_cond_broadcast(&outlet->changed);
  }
  (void)pthread_mutex_unlock(&outlet->lock);
  return NULL;
}

static void release(even_outlet *outlet) {
  (void)pthread_mutex_destroy(&outlet->lock);
  (void)pthread_cond_destroy(&outlet->changed);
  even_free(outlet->ring);
  even_free(outlet);
}

even_status even_outlet_open(int fd, size_t limit_bytes, even_outlet **out) {
  even_outlet *outlet = NULL;
  pthread_condattr_t clock;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&outlet));
  (void)pthread_mutex_init(&outlet->lock, NULL);
  (void)pthread_condattr_init(&clock);
  (void)pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  (void)pthread_cond_init(&outlet->changed, &clock);
  (void)pthread_condattr_destroy(&clock);
  outlet->fd = fd;
  outlet->limit = limit_bytes;
  even_status status = EVEN_NEW_ARRAY(&outlet->ring, limit_bytes);
  if (status == EVEN_OK) {
    status = even_thread_start(write_on, outlet, &outlet->thread);
  }
  if (status != EVEN_OK) {
    release(outlet);
    return status;
  }
  *out = outlet;
  return EVEN_OK;
}

/* With the lock held: until at most `most` bytes wait; whether that is so. */
static bool wait_for(even_outlet *outlet, size_t most, uint64_t patience_ns) {
  const struct timespec deadline = after(patience_ns);
  int over = patience_ns == 0 ? ETIMEDOUT : 0;
  while (outlet->waiting > most && over == 0) {
    over = pthread_cond_timedwait(&outlet->changed, &outlet->lock, &deadline);
  }
  return outlet->waiting <= most;
}

bool even_outlet_add(even_outlet *outlet, const char *text, size_t length, uint64_t patience_ns) {
  bool fits = length <= outlet->limit;
  (void)pthread_mutex_lock(&outlet->lock);
  if (outlet->gone) {
    fits = true;
  } else if (fits && (fits = wait_for(outlet, outlet->limit - length, patience_ns)) && !outlet->gone && length > 0) {
    size_t end = (outlet->first + outlet->waiting) % outlet->limit;
    size_t before_wrap = even_least_size(length, outlet->limit - end);
    memcpy(outlet->ring + end, text, before_wrap);
    memcpy(outlet->ring, text + before_wrap, length - before_wrap);
    outlet->waiting += length;
    (void)pthread_cond_broadcast(&outlet->changed);
  }
  (void)pthread_mutex_unlock(&outlet->lock);
  return fits;
}

size_t even_outlet_waiting(even_outlet *outlet) {
  (void)pthread_mutex_lock(&outlet->lock);
  size_t waiting = outlet->waiting;
  (void)pthread_mutex_unlock(&outlet->lock);
  return waiting;
}

bool even_outlet_drain(even_outlet *outlet, uint64_t patience_ns) {
  (void)pthread_mutex_lock(&outlet->lock);
  bool drained = wait_for(outlet, 0, patience_ns);
  (void)pthread_mutex_unlock(&outlet->lock);
  return drained;
}

void even_outlet_close(even_outlet *outlet) {
  if (outlet == NULL) {
    return;
  }
  (void)pthread_mutex_lock(&outlet->lock);
  bool idle = outlet->waiting == 0;
  outlet->ending = idle;
  (void)pthread_cond_broadcast(&outlet->changed);
  (void)pthread_mutex_unlock(&outlet->lock);
  if (idle) {
    even_thread_join(outlet->thread);
    release(outlet);
  }
}

bool even_outlet_same(int one, int other) {
  struct stat first;
  struct stat second;
  return even_os.fstat(one, &first) == 0 && even_os.fstat(other, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}
