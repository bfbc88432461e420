/* Walks /proc. A process that dies or is replaced between the look and the signal is guarded by a pidfd: it is opened
 * first, so that the signal reaches the process that was looked at and no other; and it tells when that has ended. */
#include "os/sweep.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/entries.h"
#include "os/process_stat.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WATCHED = 256, MOMENT_MS = 5 };

typedef struct walk {
  const even_sweep *sweep;
  pid_t own;
  int signal;
  size_t alive;
  struct pollfd dying[MOST_WATCHED]; /* pidfds of what was killed; the rest waits for the next round */
  size_t dying_count;
} walk;

/* Whether the mark is, or begins, one of the NUL-ended strings of the file, read in overlapping pieces. */
static bool carries(int fd, const even_sweep *sweep) {
  char buffer[8192];
  const char *mark = sweep->mark;
  size_t length = strlen(mark) + (sweep->begins ? 0 : 1); /* with its NUL */
  size_t kept = 1;                                        /* a NUL before the first string */
  buffer[0] = '\0';
  for (;;) {
    ssize_t got = even_os.read(fd, buffer + kept, sizeof buffer - kept);
    if (got <= 0) {
      return false;
    }
    size_t filled = kept + (size_t)got;
    const char *at = buffer;
    while ((at = memmem(at, filled - (size_t)(at - buffer), mark, length)) != NULL) {
      if (at > buffer && at[-1] == '\0') {
        return true;
      }
      at++;
    }
    kept = filled < length ? filled : length;
    memmove(buffer, buffer + filled - kept, kept);
  }
}

static bool is_marked(const char *pid, const even_sweep *sweep) {
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%.20s/environ", pid);
  int fd = even_os.open(path, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) {
    return false;
  }
  bool marked = carries(fd, sweep);
  (void)even_os.close(fd);
  return marked;
}

static bool in_sessions(const even_sweep *sweep, pid_t session) {
  for (size_t i = 0; i < sweep->session_count; i++) {
    if (sweep->sessions[i] > 1 && sweep->sessions[i] == session) {
      return true;
    }
  }
  return false;
}

static bool look(void *context, const char *name) {
  walk *now = context;
  char *end = NULL;
  even_process_stat stat;
  long pid = strtol(name, &end, 10);
  if (end == name || *end != '\0' || pid <= 1 || pid == now->own) {
    return true;
  }
  int pidfd = even_os.pidfd_open((pid_t)pid, 0);
  bool no_pidfds = pidfd < 0 && errno == ENOSYS;
  if (even_process_stat_read((pid_t)pid, &stat) == 0 && !even_process_stat_ended(&stat) &&
      (in_sessions(now->sweep, stat.session) || is_marked(name, now->sweep))) {
    now->alive++;
    if (pidfd >= 0) {
      (void)even_os.pidfd_send_signal(pidfd, now->signal); /* ESRCH: it has ended; its number may be another's by now */
      if (now->signal == SIGKILL && now->dying_count < MOST_WATCHED) {
        now->dying[now->dying_count++] = (struct pollfd){.fd = pidfd, .events = POLLIN};
        return true;
      }
    } else if (no_pidfds) {
      (void)even_os.kill((pid_t)pid, now->signal); /* a kernel before 5.3 */
    } /* else it is for the next round, when there is a descriptor */
  }
  if (pidfd >= 0) {
    (void)even_os.close(pidfd);
  }
  return true;
}

static int left_ms(uint64_t deadline_ns) {
  uint64_t now = even_clock_ns();
  return now >= deadline_ns ? 0 : (int)((deadline_ns - now + 999999u) / 1000000u);
}

/* Waits until what was killed has ended, and forgets it. Where nothing tells of that, a moment. */
static void wait_for_the_dying(walk *now, uint64_t deadline_ns) {
  const struct timespec moment = {0, MOMENT_MS * 1000000};
  size_t living = now->dying_count;
  if (living == 0) {
    (void)even_os.nanosleep(&moment);
  }
  while (living > 0 && even_os.poll(now->dying, now->dying_count, left_ms(deadline_ns)) > 0) {
    for (size_t i = 0; i < now->dying_count; i++) {
      if (now->dying[i].fd >= 0 && now->dying[i].revents != 0) {
        (void)even_os.close(now->dying[i].fd);
        now->dying[i].fd = -1; /* poll passes over it from now on */
        living--;
      }
    }
  }
  for (size_t i = 0; i < now->dying_count; i++) {
    if (now->dying[i].fd >= 0) {
      (void)even_os.close(now->dying[i].fd);
    }
  }
  now->dying_count = 0;
}

size_t even_sweep_kill(const even_sweep *sweep, int limit_ms) {
  walk now = {.sweep = sweep, .own = even_os.getpid(), .signal = SIGKILL};
  uint64_t deadline_ns = even_clock_ns() + (uint64_t)limit_ms * 1000000u;
  for (;;) {
    now.alive = 0;
    bool read = even_folder_each("/proc", look, &now) == EVEN_OK;
    bool last = !read || now.alive == 0 || left_ms(deadline_ns) == 0;
    if (now.alive > 0) {
      wait_for_the_dying(&now, deadline_ns);
    }
    if (last) {
      return read ? now.alive : 1;
    }
  }
}

void even_sweep_signal(const even_sweep *sweep, int signal) {
  walk now = {.sweep = sweep, .own = even_os.getpid(), .signal = signal};
  if (even_folder_each("/proc", look, &now) != EVEN_OK) {
    even_error_clear(); /* who cannot be found is not told */
  }
}
