/* /proc/PID/task: comm, stat, wchan, syscall; /proc/PID/io (proc(5)). */
#include "os/process_threads.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/entries.h"
#include "os/process_stat.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
  MOST_THREADS = 128,
  LOOKS = 2, /* a thread that waits for a lock of another one for a moment is no longer at rest in the next */
  LOOK_NS = 1000000
};

static void read_line(pid_t pid, long thread, const char *name, char *out, size_t bytes) {
  char path[80];
  if (thread > 0) {
    (void)snprintf(path, sizeof path, "/proc/%ld/task/%ld/%s", (long)pid, thread, name);
  } else {
    (void)snprintf(path, sizeof path, "/proc/%ld/%s", (long)pid, name);
  }
  int fd = even_os.open(path, O_RDONLY | O_CLOEXEC, 0);
  ssize_t got = fd < 0 ? 0 : even_os.read(fd, out, bytes - 1);
  out[got < 0 ? 0 : got] = '\0';
  if (fd >= 0) {
    (void)even_os.close(fd);
  }
}

/* Those in which a process is found waiting; one table for all machines. */
static const char *call_name(long number) {
  static const struct {
    long number;
    const char *name;
  } calls[] = {{SYS_read, "read"},
               {SYS_write, "write"},
               {SYS_pread64, "pread64"},
               {SYS_pwrite64, "pwrite64"},
               {SYS_openat, "openat"},
               {SYS_close, "close"},
               {SYS_ioctl, "ioctl"},
               {SYS_fsync, "fsync"},
               {SYS_flock, "flock"},
               {SYS_fcntl, "fcntl"},
               {SYS_futex, "futex"},
               {SYS_ppoll, "ppoll"},
               {SYS_pselect6, "pselect6"},
               {SYS_epoll_pwait, "epoll_pwait"},
               {SYS_nanosleep, "nanosleep"},
               {SYS_clock_nanosleep, "clock_nanosleep"},
               {SYS_wait4, "wait4"},
               {SYS_waitid, "waitid"},
               {SYS_connect, "connect"},
               {SYS_accept, "accept"},
               {SYS_accept4, "accept4"},
               {SYS_recvfrom, "recvfrom"},
               {SYS_recvmsg, "recvmsg"},
               {SYS_sendto, "sendto"},
               {SYS_sendmsg, "sendmsg"},
               {SYS_rt_sigtimedwait, "rt_sigtimedwait"},
               {SYS_rt_sigsuspend, "rt_sigsuspend"},
               {SYS_semtimedop, "semtimedop"},
               {SYS_msync, "msync"},
               {SYS_munmap, "munmap"},
#ifdef SYS_poll
               {SYS_poll, "poll"},
               {SYS_select, "select"},
               {SYS_epoll_wait, "epoll_wait"},
               {SYS_pause, "pause"},
               {SYS_open, "open"},
               {SYS_stat, "stat"}
#endif
  };
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    if (calls[i].number == number) {
      return calls[i].name;
    }
  }
  return NULL;
}

static void describe_call(const char *text, even_text *out) {
  char *end = NULL;
  long number = strtol(text, &end, 10);
  if (end == text) {
    even_text_add(out, strncmp(text, "running", 7) == 0 ? "runs" : "its system call is not told");
    return;
  }
  const char *name = call_name(number);
  if (number < 0) {
    even_text_add(out, "waits outside of a system call");
  } else if (name != NULL) {
    even_text_format(out, "in %s()", name);
  } else {
    even_text_format(out, "in system call %ld", number);
  }
}

typedef struct listing {
  pid_t pid;
  even_text *out;
  int count;
} listing;

static bool describe(void *context, const char *name) {
  listing *now = context;
  char text[512];
  char comm[32];
  long thread = strtol(name, NULL, 10);
  even_process_stat stat = {.state = '?'};
  if (thread <= 0) {
    return true;
  }
  read_line(now->pid, thread, "comm", comm, sizeof comm);
  comm[strcspn(comm, "\n")] = '\0';
  read_line(now->pid, thread, "stat", text, sizeof text);
  (void)even_process_stat_parse(text, &stat);
  even_text_format(now->out, "thread %ld (%s): state %c, ", thread, comm, stat.state == '\0' ? '?' : stat.state);
  read_line(now->pid, thread, "syscall", text, sizeof text);
  describe_call(text, now->out);
  read_line(now->pid, thread, "wchan", text, sizeof text);
  if (text[0] != '\0' && strcmp(text, "0") != 0) {
    even_text_format(now->out, ", waits in the kernel's %.64s", text);
  }
  even_text_add(now->out, "\n");
  return ++now->count < MOST_THREADS;
}

void even_process_threads_describe(pid_t pid, even_text *out) {
  listing now = {.pid = pid, .out = out};
  char path[48];
  (void)snprintf(path, sizeof path, "/proc/%ld/task", (long)pid);
  if (even_folder_each(path, describe, &now) != EVEN_OK) {
    even_error_clear();
  }
}

typedef struct search {
  const char *name;
  pid_t pid;
  bool runs;
  double cpu_seconds; /* of all that have it */
} search;

static bool look(void *context, const char *name) {
  search *now = context;
  char text[512];
  even_process_stat stat;
  long thread = strtol(name, NULL, 10);
  if (thread <= 0) {
    return true;
  }
  read_line(now->pid, thread, "comm", text, sizeof text);
  text[strcspn(text, "\n")] = '\0';
  if (strcmp(text, now->name) != 0) {
    return true;
  }
  read_line(now->pid, thread, "stat", text, sizeof text);
  if (even_process_stat_parse(text, &stat)) {
    now->runs = now->runs || stat.state == 'R' || stat.state == 'D';
    now->cpu_seconds += stat.cpu_seconds;
  }
  return true;
}

bool even_process_threads_rest(const char *name, uint64_t limit_ns, double busy_seconds) {
  const uint64_t deadline = even_clock_ns() + limit_ns;
  double began = -1.0;
  for (int rested = 0; rested < LOOKS;) {
    search now = {.name = name, .pid = even_os.getpid()};
    if (even_folder_each("/proc/self/task", look, &now) != EVEN_OK) {
      even_error_clear();
    }
    rested = now.runs ? 0 : rested + 1;
    began = began < 0.0 ? now.cpu_seconds : began;
    if (now.runs && (even_clock_ns() >= deadline || now.cpu_seconds - began > busy_seconds)) {
      return false;
    }
    if (rested < LOOKS) {
      even_clock_sleep_ns(LOOK_NS);
    }
  }
  return true;
}

bool even_process_is_held(pid_t pid) {
  even_process_stat stat;
  char text[2048];
  if (even_process_stat_read(pid, &stat) == 0 && (stat.state == 'T' || stat.state == 't')) {
    return true;
  }
  read_line(pid, 0, "status", text, sizeof text);
  const char *tracer = strstr(text, "TracerPid:");
  return tracer != NULL && strtol(tracer + 10, NULL, 10) != 0;
}

typedef struct session_work {
  pid_t session;
  even_process_work sum;
} session_work;

static double number_after(const char *text, const char *name) {
  const char *at = strstr(text, name);
  return at == NULL ? 0 : strtod(at + strlen(name), NULL);
}

static double moved_bytes(pid_t pid) {
  char text[512];
  read_line(pid, 0, "io", text, sizeof text);
  return number_after(text, "rchar: ") + number_after(text, "wchar: ") + number_after(text, "\nread_bytes: ");
}

static bool add_work(void *context, const char *name) {
  session_work *work = context;
  even_process_stat stat;
  long pid = strtol(name, NULL, 10);
  if (pid > 0 && even_process_stat_read((pid_t)pid, &stat) == 0 && stat.session == work->session) {
    work->sum.cpu_seconds += stat.cpu_seconds;
    work->sum.moved_bytes +=
        moved_bytes((pid_t)pid) + (stat.minor_faults + stat.major_faults) * (double)even_os.sysconf(_SC_PAGESIZE);
  }
  return true;
}

even_process_work even_process_session_work(pid_t session) {
  session_work work = {.session = session};
  if (even_folder_each("/proc", add_work, &work) != EVEN_OK) {
    even_error_clear();
  }
  return work.sum;
}
