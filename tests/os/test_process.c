/* Children: pinned, joined, told apart when they cannot start, dead with their parent. */
#include "os/process.h"

#include "os/calls.h"
#include "os/end_signal.h"
#include "os/pipe.h"
#include "os/process_stat.h"
#include "os/sweep.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static char *const no_environment[] = {(char *)"PATH=/usr/bin:/bin", NULL};

typedef struct ended {
  int status; /* of waitpid */
  char output[4096];
  char error[4096];
} ended;

static void read_whole(int fd, char *text, size_t size) {
  size_t filled = 0;
  assert_int_equal(fcntl(fd, F_SETFL, 0), 0); /* the test may wait */
  for (;;) {
    ssize_t got = read(fd, text + filled, size - 1 - filled);
    if (got <= 0) {
      break;
    }
    filled += (size_t)got;
  }
  text[filled] = '\0';
  (void)close(fd);
}

static even_status run(even_process_params params, ended *out) {
  even_process process;
  params.environment = no_environment;
  even_status status = even_process_start(&params, &process);
  if (status != EVEN_OK) {
    assert_int_equal(process.pid, -1);
    return status;
  }
  read_whole(process.output, out->output, sizeof out->output);
  read_whole(process.error, out->error, sizeof out->error);
  assert_int_equal(waitpid(process.pid, &out->status, 0), process.pid);
  return EVEN_OK;
}

static even_status run_shell(const char *script, ended *out) {
  char *const arguments[] = {(char *)"sh", (char *)"-c", (char *)script, NULL};
  return run((even_process_params){.arguments = arguments}, out);
}

static void gives_output_and_code(void **state) {
  (void)state;
  ended end;
  assert_int_equal(run_shell("echo out; echo err >&2; exit 7", &end), EVEN_OK);
  assert_string_equal(end.output, "out\n");
  assert_string_equal(end.error, "err\n");
  assert_true(WIFEXITED(end.status) && WEXITSTATUS(end.status) == 7);
}

static void leads_its_own_session_with_clean_signals(void **state) {
  (void)state;
  ended end;
  sigset_t set;
  sigset_t before;
  (void)sigemptyset(&set);
  (void)sigaddset(&set, SIGTERM);
  assert_int_equal(pthread_sigmask(SIG_BLOCK, &set, &before), 0);
  void (*handler)(int) = signal(SIGPIPE, SIG_IGN);
  char *const arguments[] = {(char *)"grep", (char *)"-E", (char *)"^Sig(Blk|Ign)", (char *)"/proc/self/status", NULL};
  assert_int_equal(run((even_process_params){.arguments = arguments}, &end), EVEN_OK);
  (void)signal(SIGPIPE, handler);
  assert_int_equal(pthread_sigmask(SIG_SETMASK, &before, NULL), 0);
  unsigned long long blocked = 1;
  unsigned long long ignored = 1;
  assert_int_equal(sscanf(end.output, "SigBlk:\t%llx\nSigIgn:\t%llx", &blocked, &ignored), 2);
  assert_int_equal(blocked, 0);
  /* 32 and 33 are libc's own: no program can set them, and posix_spawn (make) hands them on ignored */
  assert_int_equal(ignored & ~0x180000000ull, 0);
  assert_int_equal(run_shell("[ $$ = $(ps -o pgid= -p $$) ] && [ $$ = $(ps -o sid= -p $$) ] && echo leads", &end),
                   EVEN_OK);
  assert_string_equal(end.output, "leads\n");
}

static void pins(void **state) {
  (void)state;
  ended end;
  cpu_set_t allowed;
  assert_int_equal(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  int32_t last = 0;
  for (int32_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    last = CPU_ISSET((size_t)cpu, &allowed) ? cpu : last;
  }
  char *const arguments[] = {(char *)"grep", (char *)"Cpus_allowed_list", (char *)"/proc/self/status", NULL};
  assert_int_equal(run((even_process_params){.arguments = arguments, .cpus = &last, .cpu_count = 1}, &end), EVEN_OK);
  char expected[64];
  (void)snprintf(expected, sizeof expected, "Cpus_allowed_list:\t%d\n", last);
  assert_string_equal(end.output, expected);
  int32_t none = 100000;
  assert_int_not_equal(run((even_process_params){.arguments = arguments, .cpus = &none, .cpu_count = 1}, &end),
                       EVEN_OK);
  assert_non_null(strstr(even_error_last()->what, "pinned"));
  assert_non_null(strstr(even_error_last()->fix, "--no-pin"));
}

static void inherits_only_what_it_shall(void **state) {
  (void)state;
  ended end;
  char path[] = "/tmp/evenstep-inherit-XXXXXX";
  int kept = mkostemp(path, O_CLOEXEC);
  int other = dup(kept); /* not close-on-exec: the caller's own affair */
  assert_true(kept >= 0 && other >= 0);
  assert_int_equal(fcntl(other, F_SETFD, FD_CLOEXEC), 0);
  char script[128];
  (void)snprintf(script, sizeof script, "[ -e /proc/$$/fd/%d ] && echo kept; [ -e /proc/$$/fd/%d ] || echo closed",
                 kept, other);
  char *const arguments[] = {(char *)"sh", (char *)"-c", script, NULL};
  assert_int_equal(run((even_process_params){.arguments = arguments, .inherit = &kept, .inherit_count = 1}, &end),
                   EVEN_OK);
  assert_string_equal(end.output, "kept\nclosed\n");
  (void)close(kept);
  (void)close(other);
  (void)unlink(path);
}

static void joins_a_group_first(void **state) {
  (void)state;
  ended end;
  char path[] = "/tmp/evenstep-join-XXXXXX";
  int fd = mkstemp(path);
  assert_true(fd >= 0);
  char *const join[] = {path, NULL};
  char *const arguments[] = {(char *)"cat", path, NULL};
  assert_int_equal(run((even_process_params){.arguments = arguments, .join = join}, &end), EVEN_OK);
  assert_string_equal(end.output, "0"); /* "0" is the writer itself */
  (void)close(fd);
  (void)unlink(path);
  assert_int_equal(run((even_process_params){.arguments = arguments, .join = join}, &end), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, "join its cgroup"));
}

static void has_the_limit_on_open_files_that_it_shall(void **state) {
  (void)state;
  ended end;
  char *const arguments[] = {(char *)"sh", (char *)"-c", (char *)"ulimit -n", NULL};
  assert_int_equal(run((even_process_params){.arguments = arguments, .descriptors = 77}, &end), EVEN_OK);
  assert_string_equal(end.output, "77\n");
  fault_os(FAULT_setrlimit, 1, EPERM);
  assert_int_equal(run((even_process_params){.arguments = arguments, .descriptors = 77}, &end), EVEN_ERR_PERMISSION);
  fault_reset();
}

static void says_what_cannot_run(void **state) {
  (void)state;
  ended end;
  char *const missing[] = {(char *)"no-such-program-anywhere", NULL};
  char *const folder[] = {(char *)"/tmp", NULL};
  assert_int_equal(run((even_process_params){.arguments = missing}, &end), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, "no-such-program-anywhere"));
  assert_int_equal(run((even_process_params){.arguments = folder}, &end), EVEN_ERR_PERMISSION);
}

static void begins_with_a_signal_ignored(void **state) {
  (void)state;
  ended end;
  char *const arguments[] = {(char *)"sh", (char *)"-c", (char *)"kill -USR1 $$; exit 3", NULL};
  assert_int_equal(run((even_process_params){.arguments = arguments, .ignored = SIGUSR1}, &end), EVEN_OK);
  assert_true(WIFEXITED(end.status) && WEXITSTATUS(end.status) == 3);
  assert_int_equal(run((even_process_params){.arguments = arguments}, &end), EVEN_OK);
  assert_true(WIFSIGNALED(end.status) && WTERMSIG(end.status) == SIGUSR1);
}

static void end_of_child(int *signal, pid_t pid) {
  int status = 0;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  *signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

/* A child that is sent SIGTERM by a process that is not its parent, and says so; then by this one. */
static void ends_by_its_parents_word_alone(void **state) {
  int ends[2];
  int signal = 0;
  char said = 0;
  (void)state;
  assert_int_equal(pipe(ends), 0);
  pid_t child = fork();
  if (child == 0) {
    bool held = even_end_signal_hold(false) == EVEN_OK;
    pid_t other = held ? fork() : -1;
    if (other == 0) {
      _exit(kill(getppid(), SIGTERM) == 0 ? 0 : 1);
    }
    int status = 1;
    while (waitpid(other, &status, 0) < 0 && errno == EINTR) {
    }
    said = status == 0 ? 'y' : 'n';
    while (write(ends[1], &said, 1) != 1) {
    }
    for (;;) {
      (void)pause();
    }
  }
  assert_int_equal(read(ends[0], &said, 1), 1);
  assert_int_equal(said, 'y');
  assert_int_equal(kill(child, SIGTERM), 0);
  end_of_child(&signal, child);
  assert_int_equal(signal, SIGTERM);
  assert_int_equal(close(ends[0]) + close(ends[1]), 0);
}

/* One that is started in a killed parent's place. */
static void ends_by_who_speaks_for_its_parent(void **state) {
  int ends[2];
  int signal = 0;
  char said = 0;
  (void)state;
  assert_int_equal(pipe(ends), 0);
  pid_t child = fork();
  if (child == 0) {
    said = even_end_signal_hold(false) == EVEN_OK ? 'y' : 'n';
    while (write(ends[1], &said, 1) != 1) {
    }
    for (;;) {
      (void)pause();
    }
  }
  assert_int_equal(read(ends[0], &said, 1), 1);
  assert_int_equal(said, 'y');
  pid_t other = fork();
  if (other == 0) {
    _exit(even_process_signal_as_parent(child, SIGTERM) ? 0 : 1);
  }
  end_of_child(&signal, other);
  assert_int_equal(signal, 0);
  end_of_child(&signal, child);
  assert_int_equal(signal, SIGTERM);
  assert_int_equal(close(ends[0]) + close(ends[1]), 0);
  fault_os(FAULT_sigqueue, 1, EAGAIN); /* too many wait for this user's processes: then as others do */
  assert_true(even_process_signal_as_parent(getpid(), 0));
  fault_reset();
}

static void ends_by_its_own_word(void **state) {
  (void)state;
  for (int way = 0; way < 2; way++) {
    int signal = 0;
    pid_t child = fork();
    if (child == 0) {
      bool held = even_end_signal_hold(false) == EVEN_OK;
      _exit(held && (way == 0 ? raise(SIGTERM) : kill(getpid(), SIGTERM)) == 0 ? 0 : 1);
    }
    end_of_child(&signal, child);
    assert_int_equal(signal, SIGTERM);
  }
}

static void a_handler_of_the_program_stays(void **state) {
  struct sigaction before;
  struct sigaction now;
  struct sigaction ignore;
  (void)state;
  memset(&ignore, 0, sizeof ignore);
  ignore.sa_handler = SIG_IGN;
  assert_int_equal(sigaction(SIGTERM, &ignore, &before), 0);
  assert_int_equal(even_end_signal_hold(false), EVEN_OK);
  assert_int_equal(sigaction(SIGTERM, NULL, &now), 0);
  assert_true(now.sa_handler == SIG_IGN);
  assert_int_equal(even_end_signal_hold(true), EVEN_OK); /* torch's, of a DataLoader's worker */
  assert_int_equal(sigaction(SIGTERM, NULL, &now), 0);
  assert_true((now.sa_flags & SA_SIGINFO) != 0);
  assert_int_equal(sigaction(SIGTERM, &before, NULL), 0);
}

static void reaps_ends_and_stops(void **state) {
  (void)state;
  even_process process;
  even_process_end end;
  bool any = true;
  char *const arguments[] = {(char *)"sh", (char *)"-c", (char *)"kill -STOP $$; exit 3", NULL};
  const even_process_params params = {.arguments = arguments, .environment = no_environment};
  siginfo_t facts;
  assert_int_equal(even_process_reap(&end, &any), EVEN_OK);
  assert_false(any);
  assert_int_equal(even_process_start(&params, &process), EVEN_OK);
  assert_int_equal(waitid(P_PID, (id_t)process.pid, &facts, WSTOPPED | WNOWAIT), 0);
  assert_int_equal(even_process_reap(&end, &any), EVEN_OK);
  assert_true(any && end.stopped && end.pid == process.pid && end.signal == SIGSTOP);
  assert_true(even_process_signal(process.pid, SIGCONT));
  assert_int_equal(waitid(P_PID, (id_t)process.pid, &facts, WEXITED | WNOWAIT), 0);
  assert_int_equal(even_process_reap(&end, &any), EVEN_OK);
  assert_true(any && !end.stopped && end.pid == process.pid && end.signal == 0 && end.code == 3);
  assert_true(end.peak_memory_bytes > 0);
  assert_true(even_process_signal(process.pid, SIGTERM)); /* gone: no error */
  assert_false(even_process_signal_group(1, SIGTERM));
  assert_false(even_process_signal_group(0, SIGTERM));
  even_pipe_close(process.output);
  even_pipe_close(process.error);
}

/* A parent that is killed takes its child along: told by the pipe that the child alone then holds. */
static void dies_with_its_parent(void **state) {
  (void)state;
  int ends[2];
  char byte = 0;
  assert_int_equal(pipe(ends), 0);
  pid_t parent = fork();
  if (parent == 0) {
    char *const arguments[] = {(char *)"sleep", (char *)"600", NULL};
    const even_process_params params = {
        .arguments = arguments, .environment = no_environment, .inherit = &ends[1], .inherit_count = 1};
    even_process process;
    if (even_process_start(&params, &process) == EVEN_OK) {
      (void)!write(ends[1], "x", 1);
    }
    (void)pause();
    _exit(0);
  }
  (void)close(ends[1]);
  assert_int_equal(read(ends[0], &byte, 1), 1);
  assert_int_equal(kill(parent, SIGKILL), 0);
  assert_int_equal(read(ends[0], &byte, 1), 0); /* ends only when the sleeper has ended, too */
  assert_int_equal(waitpid(parent, NULL, 0), parent);
  (void)close(ends[0]);
}

static void body(void *context, int kept) {
  (void)!write(kept, context, 4);
}

static void forks_with_one_descriptor(void **state) {
  (void)state;
  int ends[2];
  char text[8] = "";
  pid_t pid = -1;
  assert_int_equal(pipe(ends), 0);
  assert_int_equal(even_process_fork(body, (void *)(uintptr_t)"done", ends[1], true, &pid), EVEN_OK);
  (void)close(ends[1]);
  assert_int_equal(read(ends[0], text, 4), 4);
  assert_string_equal(text, "done");
  assert_int_equal(read(ends[0], text, 1), 0);
  even_process_wait(pid);
  even_process_wait(pid); /* again: fine */
  assert_int_equal(even_process_end_signal(pid), 0);
  (void)close(ends[0]);
}

static void says_by_which_signal_a_child_ended(void **state) {
  pid_t pid = fork();
  (void)state;
  if (pid == 0) {
    for (;;) {
      (void)pause();
    }
  }
  assert_true(even_process_signal(pid, SIGKILL));
  assert_int_equal(even_process_end_signal(pid), SIGKILL);
}

static even_status start_one(void *context) {
  (void)context;
  int32_t cpu = sched_getcpu();
  char *const arguments[] = {(char *)"true", NULL};
  const even_process_params params = {
      .arguments = arguments, .environment = no_environment, .cpus = &cpu, .cpu_count = 1};
  even_process process;
  even_status status = even_process_start(&params, &process);
  if (status == EVEN_OK) {
    even_process_wait(process.pid);
    even_pipe_close(process.output);
    even_pipe_close(process.error);
  }
  return status;
}

static size_t open_descriptors(void) {
  size_t count = 0;
  for (int fd = 0; fd < 1024; fd++) {
    count += fcntl(fd, F_GETFD) >= 0;
  }
  return count;
}

/* As the ranks that an agent has taken over, which are its supervisor's. */
static void waits_for_one_that_is_no_child(void **state) {
  int status = 0;
  (void)state;
  pid_t asks = fork();
  if (asks == 0) {
    _exit(even_process_wait_within(getppid(), 1000000u) ? 1 : 0); /* this one lives */
  }
  assert_true(asks > 0);
  assert_int_equal(waitpid(asks, &status, 0), asks);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
  fault_os(FAULT_pidfd_open, 1, EMFILE);
  assert_true(even_process_wait_within(asks, 1000000u)); /* was reaped */
  fault_reset();
  assert_true(even_process_wait_within(asks, 1000000u));
}

static void signals_exactly_the_one_meant(void **state) {
  (void)state;
  even_process_stat facts;
  pid_t child = fork();
  if (child == 0) {
    for (;;) {
      (void)pause();
    }
  }
  assert_int_equal(even_process_stat_read(child, &facts), 0);
  assert_false(even_process_signal_exactly(child, facts.start_time + 1, SIGKILL)); /* another, of that number */
  fault_os(FAULT_pidfd_open, 1, EMFILE);
  assert_false(even_process_signal_exactly(child, facts.start_time, SIGKILL));
  fault_reset();
  assert_int_equal(waitpid(child, NULL, WNOHANG), 0);
  assert_true(even_process_signal_exactly(child, facts.start_time, SIGKILL));
  assert_int_equal(waitpid(child, NULL, 0), child);
  assert_false(even_process_signal_exactly(child, facts.start_time, SIGKILL));
}

static void its_command_may_be_shown(void **state) {
  char *const words[] = {(char *)"sh", (char *)"-c", (char *)"while :; do sleep 600; done",
                         (char *)"s3://me:secret@node/x", NULL};
  even_process process;
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(
      even_process_start(&(even_process_params){.arguments = words, .environment = no_environment}, &process), EVEN_OK);
  assert_int_equal(even_process_add_command(process.pid, &text), EVEN_OK);
  assert_string_equal(even_text_string(&text), "sh -c while :; do sleep 600; done s3://node/x");
  assert_true(even_process_signal_group(process.pid, SIGKILL));
  even_process_wait(process.pid);
  assert_int_not_equal(even_process_add_command(process.pid, &text), EVEN_OK);
  even_text_free(&text);
  (void)close(process.output);
  (void)close(process.error);
}

static void survives_every_fault(void **state) {
  (void)state;
  size_t before = open_descriptors();
  assert_true(fault_each_allocation(start_one, NULL) >= 1);
  even_status last = EVEN_ERR_STATE;
  for (long nth = 1; nth < 60; nth++) { /* the parent's calls and the child's count apart */
    fault_os_any(nth, EAGAIN);
    last = start_one(NULL);
    fault_reset();
    assert_int_equal(open_descriptors(), before);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
  }
  assert_int_equal(last, EVEN_OK);
  for (fault_call call = FAULT_fork; call <= FAULT_dup2; call++) {
    if (call == FAULT_signalfd) {
      continue; /* not part of a start */
    }
    fault_os(call, 1, EPERM);
    assert_int_not_equal(start_one(NULL), EVEN_OK);
    fault_reset();
    assert_int_equal(open_descriptors(), before);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* and no child is left */
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(gives_output_and_code),
      cmocka_unit_test(leads_its_own_session_with_clean_signals),
      cmocka_unit_test(pins),
      cmocka_unit_test(inherits_only_what_it_shall),
      cmocka_unit_test(joins_a_group_first),
      cmocka_unit_test(has_the_limit_on_open_files_that_it_shall),
      cmocka_unit_test(says_what_cannot_run),
      cmocka_unit_test(begins_with_a_signal_ignored),
      cmocka_unit_test(ends_by_its_parents_word_alone),
      cmocka_unit_test(ends_by_who_speaks_for_its_parent),
      cmocka_unit_test(ends_by_its_own_word),
      cmocka_unit_test(a_handler_of_the_program_stays),
      cmocka_unit_test(reaps_ends_and_stops),
      cmocka_unit_test(dies_with_its_parent),
      cmocka_unit_test(says_by_which_signal_a_child_ended),
      cmocka_unit_test(forks_with_one_descriptor),
      cmocka_unit_test(waits_for_one_that_is_no_child),
      cmocka_unit_test(signals_exactly_the_one_meant),
      cmocka_unit_test(its_command_may_be_shown),
      cmocka_unit_test(survives_every_fault),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
