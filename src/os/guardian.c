/* The guardian waits for the end of a pipe that only its parent holds: the kernel closes it whatever kills the parent.
 */
#include "os/guardian.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/calls.h"
#include "os/cgroup.h"
#include "os/clock.h"
#include "os/process.h"
#include "os/shared_memory.h"
#include "os/sweep.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { MOST_SESSIONS = 16384, MOST_GROUPS = 4096, SWEEP_MS = 5000, LOOK_MS = 250, ROOM_MS = 5000 };
static const uint64_t STOP_NS = 20000000000u;

typedef enum message_kind { ADD_SESSION, DROP_SESSION, ADD_GROUP, LIMIT, BEGIN } message_kind;

/* Not over the pipe, which may be full where the guardian was stopped. */
struct even_guardian_page {
  _Atomic uint64_t until_ns;
  _Atomic uint64_t kill_ns;
  _Atomic uint64_t held_ns; /* when it held the sessions, or let them go again */
  _Atomic uint32_t holds;
};

/* Smaller than PIPE_BUF: written and read whole. */
typedef struct message {
  int32_t kind;
  int32_t session;
  char folder[EVEN_CGROUP_PATH];
} message;

/* Allocated before the fork: the child must not allocate. */
typedef struct duty {
  char mark[EVEN_SWEEP_MARK];
  pid_t sessions[MOST_SESSIONS];
  size_t session_count;
  char (*groups)[EVEN_CGROUP_PATH];
  size_t group_count;
  struct even_guardian_page *page;
  uint64_t over_ns; /* the limit at which they were killed last */
} duty;

static void take(duty *now, const message *told) {
  size_t at = 0;
  while (at < now->session_count && now->sessions[at] != told->session) {
    at++;
  }
  switch ((message_kind)told->kind) {
    case ADD_SESSION: /* it may have been told of all before: once, or a dead one's number would stay */
      if (at == now->session_count && at < MOST_SESSIONS) {
        now->sessions[now->session_count++] = told->session;
      }
      break;
    case DROP_SESSION:
      if (at < now->session_count) {
        now->sessions[at] = now->sessions[--now->session_count];
      }
      break;
    case LIMIT: /* it stands in the page: this ends a wait without any */
    case BEGIN:
      break;
    case ADD_GROUP:
      if (now->group_count < MOST_GROUPS) {
        memcpy(now->groups[now->group_count++], told->folder, EVEN_CGROUP_PATH);
      }
      break;
  }
}

static even_sweep sweep_of(const duty *now) {
  even_sweep sweep = {.sessions = now->sessions, .session_count = now->session_count};
  memcpy(sweep.mark, now->mark, sizeof sweep.mark);
  return sweep;
}

static void kill_sessions(const duty *now) {
  const even_sweep sweep = sweep_of(now);
  (void)even_sweep_kill(&sweep, SWEEP_MS);
}

/* Again with each look, for those that have begun since, and those that somebody let go. */
static void hold(duty *now) {
  const even_sweep sweep = sweep_of(now);
  if (atomic_load(&now->page->holds) == 0) {
    atomic_store(&now->page->held_ns, even_clock_boot_ns());
    atomic_store(&now->page->holds, 1); /* first: who sees them stopped shall know by whom */
  }
  even_sweep_signal(&sweep, SIGSTOP);
}

static void let_go(duty *now, bool held) {
  const even_sweep sweep = sweep_of(now);
  if (held) { /* by itself, or by the one whose place it has */
    even_sweep_signal(&sweep, SIGCONT);
    atomic_store(&now->page->held_ns, even_clock_boot_ns());
    atomic_store(&now->page->holds, 0);
  }
}

/* Holds what may not run, kills what may live no longer; for how long nothing else is to be done, -1: for ever. held:
 * page->holds before. */
static int keep_limit(duty *now, bool held) {
  uint64_t until = atomic_load(&now->page->until_ns);
  uint64_t time = even_clock_boot_ns();
  if (until == 0 || until > time) {
    let_go(now, held);
  }
  if (until == 0) {
    return -1;
  }
  if (until > time) {
    uint64_t left_ms = (until - time) / 1000000u + 1;
    return left_ms < LOOK_MS ? (int)left_ms : LOOK_MS;
  }
  if (atomic_load(&now->page->kill_ns) > time) {
    hold(now);
  } else if (until != now->over_ns) {
    now->over_ns = until;
    kill_sessions(now);
  }
  return LOOK_MS;
}

static void guard(void *context, int pipe) {
  duty *now = context;
  message told;
  for (;;) {
    struct pollfd watched = {.fd = pipe, .events = POLLIN};
    /* first: who says that sessions are held has told of these, and of their limit, before */
    bool held = atomic_load(&now->page->holds) != 0;
    int ready = even_os.poll(&watched, 1, 0); /* what it was told before: the limit is of all sessions */
    ready = ready > 0 ? ready : even_os.poll(&watched, 1, keep_limit(now, held));
    if (ready <= 0) {
      continue; /* its time was over, or a signal came; the read tells what is wrong otherwise */
    }
    ssize_t got = even_os.read(pipe, &told, sizeof told);
    if (got == (ssize_t)sizeof told && told.kind != BEGIN) {
      take(now, &told);
    } else if (got >= 0 || errno != EINTR) {
      break; /* nobody holds the pipe, or its work is to be done now */
    }
  }
  kill_sessions(now);
  for (size_t i = 0; i < now->group_count; i++) {
    if (even_cgroup_remove(now->groups[i]) != EVEN_OK) {
      continue; /* nobody is left to tell */
    }
  }
}

static void give_page(const even_shared_memory *memory, even_guardian *out) {
  out->page = memory->address;
  out->page_fd = memory->fd;
}

static even_status map_page(even_guardian *out) {
  even_shared_memory memory = {.fd = -1};
  EVEN_TRY(even_shared_memory_create("evenstep-guardian", sizeof *out->page, &memory));
  give_page(&memory, out);
  return EVEN_OK;
}

static void unmap_page(even_guardian *guardian) {
  even_shared_memory memory = {.fd = guardian->page_fd, .address = guardian->page, .bytes = sizeof *guardian->page};
  if (guardian->page != NULL) {
    even_shared_memory_close(&memory);
  }
  guardian->page = NULL;
}

static even_status fork_guardian(duty *now, even_guardian *out) {
  int ends[2] = {-1, -1};
  if (even_os.pipe2(ends, O_CLOEXEC) != 0) {
    return even_fail_errno(errno, "a pipe could not be made");
  }
  even_status status = EVEN_OK;
  if (even_os.fcntl(ends[1], F_SETFL, O_NONBLOCK) != 0) {
    status = even_fail_errno(errno, "a pipe could not be made non-blocking");
  }
  if (status == EVEN_OK) {
    status = even_process_fork(guard, now, ends[0], false, &out->pid);
  }
  (void)even_os.close(ends[0]);
  if (status != EVEN_OK) {
    (void)even_os.close(ends[1]);
    out->pid = -1;
    return status;
  }
  out->pipe = ends[1];
  return EVEN_OK;
}

even_status even_guardian_start(const char *mark, even_guardian *out) {
  duty *now = NULL;
  *out = (even_guardian){.pid = -1, .pipe = -1};
  if (strlen(mark) >= EVEN_SWEEP_MARK || strchr(mark, '=') == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "\"%s\" is no mark", mark);
  }
  EVEN_TRY(EVEN_NEW(&now));
  even_status status = even_alloc(MOST_GROUPS, EVEN_CGROUP_PATH, (void **)&now->groups);
  if (status == EVEN_OK) {
    (void)snprintf(now->mark, sizeof now->mark, "%s", mark);
    status = map_page(out);
  }
  if (status == EVEN_OK) {
    now->page = out->page;
    status = fork_guardian(now, out);
  }
  if (status != EVEN_OK) {
    unmap_page(out);
  }
  even_free(now->groups);
  even_free(now);
  return status;
}

static bool awaits_room(const even_guardian *guardian, int limit_ms) {
  struct pollfd end = {.fd = guardian->pipe, .events = POLLOUT};
  /* a pipe is written to in pages: where one is free, a message fits; that nobody reads, the write says */
  return even_os.poll(&end, 1, limit_ms) == 1 && (end.revents & (POLLOUT | POLLERR)) != 0;
}

static bool has_written(const even_guardian *guardian, const message *told) {
  return even_os.write(guardian->pipe, told, sizeof *told) == (ssize_t)sizeof *told;
}

/* It reads at once what it is told, unless somebody has stopped it: then it goes on. One that does not read all the
 * same is of no use to anybody; its number is its own, for as long as it lives it alone has the pipe's other end. */
static bool can_tell(const even_guardian *guardian, const message *told) {
  bool told_now = has_written(guardian, told);
  if (told_now || errno != EAGAIN) {
    return told_now;
  }
  if (told->kind == LIMIT) {
    return true; /* it has that to read which wakes it as well */
  }
  (void)even_process_signal(guardian->pid, SIGCONT);
  if (awaits_room(guardian, ROOM_MS)) {
    return has_written(guardian, told);
  }
  (void)even_process_signal(guardian->pid, SIGKILL);
  errno = EPIPE; /* as of any that is gone */
  return false;
}

static even_status tell(even_guardian *guardian, message_kind kind, pid_t session, const char *folder) {
  message told;
  memset(&told, 0, sizeof told);
  told.kind = (int32_t)kind;
  told.session = (int32_t)session;
  (void)snprintf(told.folder, sizeof told.folder, "%s", folder);
  if (guardian->pid < 0) {
    return EVEN_OK;
  }
  if (!can_tell(guardian, &told)) {
    return even_fail_errno(errno, "the job's guardian (process %ld) cannot be told", (long)guardian->pid);
  }
  return EVEN_OK;
}

even_status even_guardian_add_session(even_guardian *guardian, pid_t leader) {
  return tell(guardian, ADD_SESSION, leader, "");
}

even_status even_guardian_drop_session(even_guardian *guardian, pid_t leader) {
  return tell(guardian, DROP_SESSION, leader, "");
}

even_status even_guardian_add_cgroup(even_guardian *guardian, const char *folder) {
  return tell(guardian, ADD_GROUP, 0, folder);
}

bool even_guardian_has_room(const even_guardian *guardian) {
  return guardian->pid < 0 || awaits_room(guardian, 0);
}

even_status even_guardian_limit(even_guardian *guardian, uint64_t until_ns, uint64_t kill_ns) {
  if (guardian->page == NULL) {
    return EVEN_OK;
  }
  atomic_store(&guardian->page->kill_ns, kill_ns); /* first: it is never that of an earlier limit */
  uint64_t before = atomic_exchange(&guardian->page->until_ns, until_ns);
  return before == 0 && until_ns != 0 ? tell(guardian, LIMIT, 0, "") : EVEN_OK;
}

bool even_guardian_holds(const even_guardian *guardian, uint64_t *held_ns) {
  *held_ns = guardian->page == NULL ? 0 : atomic_load(&guardian->page->held_ns);
  return guardian->page != NULL && atomic_load(&guardian->page->holds) != 0;
}

even_status even_guardian_inherit(even_guardian *guardian, const even_guardian *gone) {
  struct even_guardian_page *page = guardian->page;
  if (page == NULL || gone->page == NULL) {
    return EVEN_OK;
  }
  atomic_store(&page->held_ns, atomic_load(&gone->page->held_ns));
  /* The limit first: the new one looks already, and what it is said to hold it lets go where it knows of none. */
  atomic_store(&page->kill_ns, atomic_load(&gone->page->kill_ns));
  atomic_store(&page->until_ns, atomic_load(&gone->page->until_ns));
  if (atomic_load(&gone->page->holds) != 0) { /* else it may hold them itself by now */
    atomic_store(&page->holds, 1);
  }
  return tell(guardian, LIMIT, 0, ""); /* so that it looks now, also where there is no limit */
}

even_status even_guardian_take(pid_t pid, int pipe, int page_fd, even_guardian *out) {
  even_shared_memory memory = {.fd = -1};
  *out = (even_guardian){.pid = pid, .pipe = pipe};
  if (page_fd < 0) {
    return EVEN_OK;
  }
  EVEN_TRY(even_shared_memory_adopt(page_fd, &memory));
  if (memory.bytes < sizeof *out->page) {
    even_shared_memory_close(&memory);
    return even_fail(EVEN_ERR_MISMATCH, "the agent before has left a guardian whose limit this one cannot read");
  }
  give_page(&memory, out);
  return EVEN_OK;
}

void even_guardian_stop(even_guardian *guardian) {
  const even_error kept = *even_error_last();
  if (guardian->pid >= 0) {
    bool lives = tell(guardian, BEGIN, 0, "") == EVEN_OK; /* one that has ended hears nothing */
    if (lives) {
      (void)even_process_signal(guardian->pid, SIGCONT); /* somebody may have stopped it */
    }
    (void)even_os.close(guardian->pipe);
    if (!even_process_wait_within(guardian->pid, STOP_NS) && lives) { /* so its number is its own */
      (void)even_process_signal(guardian->pid, SIGKILL);
      (void)!even_process_wait_within(guardian->pid, STOP_NS);
    }
  }
  (void)even_error_restore(&kept);
  unmap_page(guardian);
  *guardian = (even_guardian){.pid = -1, .pipe = -1};
}

void even_guardian_leave(even_guardian *guardian) {
  if (guardian->pipe >= 0) {
    (void)even_os.close(guardian->pipe);
  }
  unmap_page(guardian);
  *guardian = (even_guardian){.pid = -1, .pipe = -1};
}
