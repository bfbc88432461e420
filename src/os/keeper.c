/* The keeper waits for the end of a pipe that only its parent holds, as the guardian does. */
#include "os/keeper.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/process.h"
#include "os/signals.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { MOST_PATH = 4096, LISTED = 4096, PASSES = 64, TRIES = 100 };
#define BETWEEN_TRIES_NS (uint64_t)100000000 /* 10 s in all */
static const uint64_t STOP_NS = 20000000000u;

/* Made before the fork: the child must not allocate. */
typedef struct duty {
  char folder[MOST_PATH];
  char inner[MOST_PATH];
} duty;

/* A file, or, at the first level, a folder with its files. Whether it is gone. */
static bool remove_entry(int fd, const char *folder, const char *name, char *inner);

/* What is in a folder. inner: room for the path of a folder in it, NULL: folders in it stay. Whether all is gone. */
static bool empty_folder(const char *folder, char *inner) {
  bool gone = false;
  for (int pass = 0; pass < PASSES && !gone; pass++) { /* what is removed while it is listed may hide others */
    int fd = even_os.open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW, 0);
    bool any = false;
    char buffer[LISTED];
    ssize_t got = 0;
    if (fd < 0) {
      return errno == ENOENT;
    }
    while ((got = even_os.getdents64(fd, buffer, sizeof buffer)) > 0) {
      for (size_t at = 0; at < (size_t)got;) {
        struct dirent64 entry;
        memcpy(&entry, buffer + at, offsetof(struct dirent64, d_name));
        const char *name = buffer + at + offsetof(struct dirent64, d_name);
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0) {
          any = true;
          (void)remove_entry(fd, folder, name, inner);
        }
        at += entry.d_reclen;
      }
    }
    (void)even_os.close(fd);
    gone = !any;
  }
  return gone;
}

static bool remove_entry(int fd, const char *folder, const char *name, char *inner) {
  if (even_os.unlinkat(fd, name, 0) == 0 || errno == ENOENT) {
    return true;
  }
  int length = inner == NULL ? MOST_PATH : snprintf(inner, MOST_PATH, "%s/%s", folder, name);
  return length < MOST_PATH && empty_folder(inner, NULL) && even_os.rmdir(inner) == 0;
}

static bool remove_all(duty *mine) {
  return empty_folder(mine->folder, mine->inner) && (even_os.rmdir(mine->folder) == 0 || errno == ENOENT);
}

static void keep(void *context, int pipe) {
  duty *mine = context;
  char nothing = 0;
  ssize_t got = 0;
  do {
    got = even_os.read(pipe, &nothing, 1);
  } while (got < 0 && errno == EINTR);
  for (int i = 0; i < TRIES && !remove_all(mine);
       i++) { /* ranks that outlive their agent write until they are killed */
    even_clock_sleep_ns(BETWEEN_TRIES_NS);
  }
}

even_status even_keeper_start(const char *folder, even_keeper *out) {
  static duty mine; /* the child's copy is its own */
  int ends[2] = {-1, -1};
  *out = (even_keeper){.pid = -1, .pipe = -1};
  if (strlen(folder) >= sizeof mine.folder) {
    return even_fail(EVEN_ERR_ARGUMENT, "a folder with a path of more than %zu bytes", sizeof mine.folder - 1);
  }
  memcpy(mine.folder, folder, strlen(folder) + 1);
  if (even_os.pipe2(ends, O_CLOEXEC) != 0) {
    return even_fail_errno(errno, "a pipe could not be made");
  }
  even_status status = even_process_fork(keep, &mine, ends[0], false, &out->pid);
  (void)even_os.close(ends[0]);
  if (status != EVEN_OK) {
    (void)even_os.close(ends[1]);
    out->pid = -1;
    return status;
  }
  out->pipe = ends[1];
  return EVEN_OK;
}

void even_keeper_take(pid_t pid, int pipe, even_keeper *out) {
  *out = (even_keeper){.pid = pid, .pipe = pipe};
}

/* One that is gone hears nothing, and that ends nobody. */
static void tell_to_begin(const even_keeper *keeper) {
  struct sigaction before;
  if (even_signals_pipe_ignore(&before) == EVEN_OK) {
    (void)even_os.write(keeper->pipe, "", 1);
    even_signals_pipe_restore(&before);
  }
}

void even_keeper_stop(even_keeper *keeper) {
  if (keeper->pid >= 0) {
    const even_error kept = *even_error_last();
    tell_to_begin(keeper);
    (void)even_os.close(keeper->pipe);
    even_process_await(keeper->pid, STOP_NS); /* one that is no child of this process */
    even_process_wait(keeper->pid);
    (void)even_error_restore(&kept);
  }
  *keeper = (even_keeper){.pid = -1, .pipe = -1};
}
