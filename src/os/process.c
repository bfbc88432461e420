/* fork, exec and wait. Between fork and exec the child calls only what is safe there. */
#include "os/process.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/descriptors.h"
#include "os/file.h"
#include "os/process_stat.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

/* What the child could not do, written into the report pipe. */
typedef enum child_step {
  STEP_PARENT,
  STEP_SESSION,
  STEP_JOIN,
  STEP_PIN,
  STEP_INPUT,
  STEP_OUTPUT,
  STEP_LIMIT,
  STEP_EXEC
} child_step;

enum { MOST_COMMAND = 1 << 22 };

typedef struct child_report {
  int32_t step;
  int32_t error_number;
} child_report;

typedef struct child_plan {
  const even_process_params *params;
  const void *cpus; /* mask to pin to; NULL: not pinned */
  size_t cpu_bytes;
  pid_t parent;
  int output;
  int error;
  int report;
} child_plan;

static void default_handlers(void) {
  struct sigaction fallback;
  memset(&fallback, 0, sizeof fallback);
  fallback.sa_handler = SIG_DFL;
  for (int number = 1; number < NSIG; number++) {
    (void)even_os.sigaction(number, &fallback, NULL);
  }
}

static void default_signals(void) {
  sigset_t none;
  default_handlers();
  (void)sigemptyset(&none);
  (void)even_os.mask_signals(SIG_SETMASK, &none, NULL);
}

static void ignore_signal(int number) {
  struct sigaction ignore;
  memset(&ignore, 0, sizeof ignore);
  ignore.sa_handler = SIG_IGN;
  if (number != 0) {
    (void)even_os.sigaction(number, &ignore, NULL);
  }
}

/* A parent that died between fork and prctl would never send the signal: look once more. */
static bool die_with(pid_t parent) {
  return even_os.prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && even_os.getppid() == parent;
}

static bool join(const char *path) {
  int fd = even_os.open(path, O_WRONLY | O_CLOEXEC, 0);
  if (fd < 0) {
    return false;
  }
  bool joined = even_os.write(fd, "0", 1) == 1;
  int kept = errno;
  (void)even_os.close(fd);
  errno = kept;
  return joined;
}

static bool prepare_child(const child_plan *plan, child_step *step) {
  const even_process_params *params = plan->params;
  *step = STEP_PARENT;
  if (params->outlives ? even_os.getppid() != plan->parent : !die_with(plan->parent)) {
    return false;
  }
  *step = STEP_SESSION;
  if (even_os.setsid() < 0) {
    return false;
  }
  *step = STEP_JOIN;
  for (size_t i = 0; params->join != NULL && params->join[i] != NULL; i++) {
    if (!join(params->join[i])) {
      return false;
    }
  }
  *step = STEP_PIN;
  if (plan->cpus != NULL && even_os.setaffinity(0, plan->cpu_bytes, plan->cpus) != 0) {
    return false;
  }
  *step = STEP_INPUT;
  if (params->input > 0) {
    if (even_os.dup2(params->input, 0) < 0) {
      return false;
    }
  } else if (params->no_input ||
             even_os.isatty(0) == 1) { /* a session of its own cannot read from another's terminal */
    int null = even_os.open("/dev/null", O_RDONLY, 0);
    if (null < 0 || even_os.dup2(null, 0) < 0) {
      return false;
    }
    if (null != 0) {
      (void)even_os.close(null);
    }
  }
  *step = STEP_OUTPUT;
  if (even_os.dup2(plan->output, 1) < 0 || even_os.dup2(plan->error, 2) < 0) {
    return false;
  }
  for (size_t i = 0; i < params->inherit_count; i++) {
    if (even_os.fcntl(params->inherit[i], F_SETFD, 0) != 0) {
      return false;
    }
  }
  *step = STEP_LIMIT;
  return params->descriptors == 0 || even_descriptors_limit(params->descriptors);
}

static void run_child(const child_plan *plan) {
  child_step step = STEP_EXEC;
  default_signals();
  ignore_signal(plan->params->ignored);
  if (prepare_child(plan, &step)) {
    step = STEP_EXEC;
    (void)even_os.execvpe(plan->params->arguments[0], plan->params->arguments, plan->params->environment);
  }
  child_report report = {(int32_t)step, errno};
  (void)even_os.write(plan->report, &report, sizeof report);
  even_os.exit(127);
}

static even_status child_failed(const even_process_params *params, const child_report *report) {
  const char *program = params->arguments[0];
  switch ((child_step)report->step) {
    case STEP_JOIN:
      return even_fail_errno(report->error_number, "%s could not join its cgroup", program);
    case STEP_PIN: {
      even_status status = even_fail_errno(report->error_number, "%s could not be pinned to its CPUs", program);
      (void)even_error_fix("choose CPUs that this process may use (taskset -p $$), or give --no-pin");
      return status;
    }
    case STEP_EXEC: {
      even_status status = even_fail_errno(report->error_number, "%s cannot be run", program);
      (void)even_error_fix("name an executable file, or one on PATH");
      return status;
    }
    default:
      return even_fail_errno(report->error_number, "%s could not be prepared (step %d)", program, (int)report->step);
  }
}

/* Blocks until exec closed the pipe, or the child reported. */
static even_status read_report(const even_process_params *params, int fd) {
  child_report report = {0, 0};
  ssize_t got = 0;
  do {
    got = even_os.read(fd, &report, sizeof report);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    return even_fail_errno(errno, "the start of %s could not be watched", params->arguments[0]);
  }
  return got == (ssize_t)sizeof report ? child_failed(params, &report) : EVEN_OK;
}

even_status even_process_mask(const int32_t *cpus, size_t count, void **mask, size_t *bytes) {
  int32_t largest = 0;
  for (size_t i = 0; i < count; i++) {
    if (cpus[i] < 0) {
      return even_fail(EVEN_ERR_ARGUMENT, "CPU %d", cpus[i]);
    }
    largest = cpus[i] > largest ? cpus[i] : largest;
  }
  *bytes = CPU_ALLOC_SIZE((size_t)largest + 1);
  EVEN_TRY(even_alloc(1, *bytes, mask));
  for (size_t i = 0; i < count; i++) {
    CPU_SET_S((size_t)cpus[i], *bytes, (cpu_set_t *)*mask);
  }
  return EVEN_OK;
}

even_status even_process_pin(const int32_t *cpus, size_t count) {
  void *mask = NULL;
  size_t bytes = 0;
  EVEN_TRY(even_process_mask(cpus, count, &mask, &bytes));
  even_status status = EVEN_OK;
  if (even_os.setaffinity(0, bytes, mask) != 0) {
    status = even_fail_errno(errno, "a thread could not be pinned");
  }
  even_free(mask);
  return status;
}

static void close_pair(int ends[2]) {
  for (int i = 0; i < 2; i++) {
    if (ends[i] >= 0) {
      (void)even_os.close(ends[i]);
      ends[i] = -1;
    }
  }
}

static even_status make_pipe(int ends[2], bool quiet_reader) {
  if (even_os.pipe2(ends, O_CLOEXEC) != 0) {
    ends[0] = ends[1] = -1;
    return even_fail_errno(errno, "a pipe could not be made");
  }
  if (quiet_reader && even_os.fcntl(ends[0], F_SETFL, O_NONBLOCK) != 0) {
    even_status status = even_fail_errno(errno, "a pipe could not be made non-blocking");
    close_pair(ends);
    return status;
  }
  return EVEN_OK;
}

typedef struct start_pipes {
  int output[2];
  int error[2];
  int report[2];
} start_pipes;

static even_status fork_child(const even_process_params *params, const start_pipes *pipes, const void *cpus,
                              size_t cpu_bytes, even_process *out) {
  child_plan plan = {.params = params,
                     .cpus = cpus,
                     .cpu_bytes = cpu_bytes,
                     .parent = even_os.getpid(),
                     .output = pipes->output[1],
                     .error = pipes->error[1],
                     .report = pipes->report[1]};
  out->pid = even_os.fork();
  if (out->pid < 0) {
    even_status status = even_fail_errno(errno, "a process could not be started");
    (void)even_error_fix("look at the limits on processes (ulimit -u, pids.max) and memory");
    return status;
  }
  if (out->pid == 0) {
    run_child(&plan);
  }
  return EVEN_OK;
}

even_status even_process_start(const even_process_params *params, even_process *out) {
  start_pipes pipes = {{-1, -1}, {-1, -1}, {-1, -1}};
  void *cpus = NULL;
  size_t cpu_bytes = 0;
  *out = (even_process){.pid = -1, .output = -1, .error = -1};
  if (params->cpu_count > 0) {
    EVEN_TRY(even_process_mask(params->cpus, params->cpu_count, &cpus, &cpu_bytes));
  }
  even_status status = make_pipe(pipes.output, true);
  if (status == EVEN_OK) {
    status = make_pipe(pipes.error, true);
  }
  if (status == EVEN_OK) {
    status = make_pipe(pipes.report, false);
  }
  if (status == EVEN_OK) {
    status = fork_child(params, &pipes, cpus, cpu_bytes, out);
  }
  if (status == EVEN_OK) {
    (void)even_os.close(pipes.report[1]);
    pipes.report[1] = -1;
    status = read_report(params, pipes.report[0]);
    if (status != EVEN_OK) {
      (void)even_os.kill(out->pid, SIGKILL);
      even_process_wait(out->pid);
      out->pid = -1;
    }
  }
  if (status == EVEN_OK) {
    out->output = pipes.output[0];
    out->error = pipes.error[0];
    pipes.output[0] = pipes.error[0] = -1;
  }
  close_pair(pipes.output);
  close_pair(pipes.error);
  close_pair(pipes.report);
  even_free(cpus);
  return status;
}

even_status even_process_reap(even_process_end *out, bool *any) {
  struct rusage usage;
  int status = 0;
  memset(&usage, 0, sizeof usage);
  *out = (even_process_end){.pid = -1};
  *any = false;
  pid_t pid = even_os.wait4(-1, &status, WNOHANG | WUNTRACED | WCONTINUED, &usage);
  if (pid == 0 || (pid < 0 && (errno == ECHILD || errno == EINTR))) {
    return EVEN_OK;
  }
  if (pid < 0) {
    return even_fail_errno(errno, "children could not be waited for");
  }
  *any = true;
  out->pid = pid;
  out->stopped = WIFSTOPPED(status);
  out->continued = WIFCONTINUED(status);
  out->signal = WIFSTOPPED(status) ? WSTOPSIG(status) : WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  out->code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
  out->peak_memory_bytes = (uint64_t)usage.ru_maxrss * 1024u; /* Linux gives KiB */
  return EVEN_OK;
}

int even_process_end_signal(pid_t pid) {
  int status = 0;
  pid_t got = -1;
  while ((got = even_os.wait4(pid, &status, 0, NULL)) < 0 && errno == EINTR) {
  }
  return got == pid && WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

void even_process_wait(pid_t pid) {
  (void)even_process_end_signal(pid);
}

static bool ends_within(pid_t pid, int limit_ms) {
  int descriptor = even_os.pidfd_open(pid, 0);
  struct pollfd end = {.fd = descriptor, .events = POLLIN};
  if (descriptor < 0) {
    return errno == ESRCH;
  }
  bool ended = even_os.poll(&end, 1, limit_ms) > 0;
  (void)even_os.close(descriptor);
  return ended;
}

void even_process_await(pid_t pid, uint64_t limit_ns) {
  (void)ends_within(pid, (int)(limit_ns / 1000000u));
}

/* One that is another process's child: where pidfds are to be had, also before that one has reaped it. */
static bool is_gone(pid_t pid) {
  return ends_within(pid, 0) || (even_os.kill(pid, 0) != 0 && errno == ESRCH);
}

bool even_process_wait_within(pid_t pid, uint64_t limit_ns) {
  const uint64_t until_ns = even_clock_ns() + limit_ns;
  even_process_await(pid, limit_ns);
  for (;;) {
    pid_t got = even_os.wait4(pid, NULL, WNOHANG, NULL);
    if (got == pid || (got < 0 && errno != EINTR && is_gone(pid))) {
      return true;
    }
    if (even_clock_ns() >= until_ns) {
      return false;
    }
    even_clock_sleep_ns(1000000u);
  }
}

bool even_process_has_ended(pid_t pid) {
  return ends_within(pid, 0);
}

bool even_process_signal(pid_t pid, int signal) {
  return even_os.kill(pid, signal) == 0 || errno == ESRCH;
}

bool even_process_signal_as_parent(pid_t pid, int signal) {
  return even_os.sigqueue(pid, signal) == 0 || even_process_signal(pid, signal); /* there may be no room in its queue */
}

bool even_process_signal_group(pid_t leader, int signal) {
  return leader > 1 && even_process_signal(-leader, signal); /* -1 would be every process there is */
}

bool even_process_signal_exactly(pid_t pid, uint64_t start_time, int signal) {
  even_process_stat facts;
  int pidfd = even_os.pidfd_open(pid, 0); /* before the look: what it then is, the descriptor keeps meaning */
  bool sent = pidfd >= 0 && even_process_stat_read(pid, &facts) == 0 && facts.start_time == start_time &&
              even_os.pidfd_send_signal(pidfd, signal) == 0;
  if (pidfd >= 0) {
    (void)even_os.close(pidfd);
  }
  return sent;
}

even_status even_process_add_command(pid_t pid, even_text *out) {
  char path[64];
  even_text words = EVEN_TEXT_EMPTY;
  (void)snprintf(path, sizeof path, "/proc/%ld/cmdline", (long)pid);
  even_status status = even_file_read(path, MOST_COMMAND, &words);
  while (words.length > 0 && words.data[words.length - 1] == '\0') {
    words.length--;
  }
  for (size_t i = 0; i < words.length; i++) {
    words.data[i] = words.data[i] == '\0' ? ' ' : words.data[i];
  }
  even_text_add_shown(out, even_text_string(&words));
  even_text_free(&words);
  return status == EVEN_OK ? even_text_status(out) : status;
}

even_status even_process_adopt_orphans(void) {
  if (even_os.prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) {
    return even_fail_errno(errno, "orphans could not be adopted");
  }
  return EVEN_OK;
}

static void close_from_to(unsigned int first, unsigned int last) {
  if (first > last || even_os.close_range(first, last) == 0) {
    return;
  }
  for (unsigned int fd = first; fd <= last && fd < 65536; fd++) { /* a kernel before 5.9 */
    (void)even_os.close((int)fd);
  }
}

static void close_all_but(int kept) {
  unsigned int middle = kept < 3 ? 2 : (unsigned int)kept;
  if (kept > 3) {
    close_from_to(3, middle - 1);
  }
  close_from_to(middle + 1, ~0u);
}

static void run_body(void (*body)(void *context, int kept), void *context, int kept, bool dies_with_parent,
                     pid_t parent) {
  default_handlers();
  (void)even_os.setsid();
  if (!dies_with_parent || die_with(parent)) {
    close_all_but(kept);
    body(context, kept);
  }
  even_os.exit(0);
}

even_status even_process_fork(void (*body)(void *context, int kept), void *context, int kept, bool dies_with_parent,
                              pid_t *out) {
  pid_t parent = even_os.getpid();
  sigset_t all;
  sigset_t before;
  (void)sigfillset(&all);
  int error_number = even_os.mask_signals(SIG_SETMASK, &all, &before); /* from its first instruction on */
  if (error_number != 0) {
    return even_fail_errno(error_number, "signals could not be blocked");
  }
  *out = even_os.fork();
  if (*out == 0) {
    run_body(body, context, kept, dies_with_parent, parent);
  }
  even_status status = *out < 0 ? even_fail_errno(errno, "a process could not be started") : EVEN_OK;
  (void)even_os.mask_signals(SIG_SETMASK, &before, NULL);
  return status;
}
