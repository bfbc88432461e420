/* What the kernel tells of the threads of a process: of one that waits, one that stands still, one that is gone. */
#include "os/process_threads.h"

#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static pid_t child_that_reads(int ends[2]) {
  assert_int_equal(pipe(ends), 0);
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    char byte;
    (void)setsid();
    (void)!read(ends[0], &byte, 1);
    _exit(0);
  }
  return child;
}

static void end_child(pid_t child, int ends[2]) {
  assert_int_equal(kill(child, SIGKILL), 0);
  assert_int_equal(waitpid(child, NULL, 0), child);
  assert_int_equal(close(ends[0]) + close(ends[1]), 0);
}

static void a_waiting_thread_is_described(void **state) {
  int ends[2];
  even_text text = EVEN_TEXT_EMPTY;
  pid_t child = child_that_reads(ends);
  (void)state;
  do { /* until it is in its call: a sanitizer's fork may wait for other things before */
    even_text_clear(&text);
    even_process_threads_describe(child, &text);
  } while (strstr(even_text_string(&text), "state S") == NULL ||
           (strstr(text.data, "in read()") == NULL && strstr(text.data, "not told") == NULL));
  assert_non_null(strstr(text.data, "thread "));
  assert_false(even_process_is_held(child));
  assert_true(even_process_session_work(child).cpu_seconds < 5);
  end_child(child, ends);
  even_text_clear(&text);
  even_process_threads_describe(child, &text);
  assert_int_equal(text.length, 0);
  even_text_free(&text);
}

static void one_that_was_stopped_is_held(void **state) {
  int ends[2];
  int status = 0;
  pid_t child = child_that_reads(ends);
  (void)state;
  assert_int_equal(kill(child, SIGSTOP), 0);
  assert_int_equal(waitpid(child, &status, WUNTRACED), child);
  assert_true(WIFSTOPPED(status));
  assert_true(even_process_is_held(child));
  end_child(child, ends);
  assert_false(even_process_is_held(child));
}

static void own_time_is_counted(void **state) {
  volatile unsigned long sum = 0;
  double before = even_process_session_work(getsid(0)).cpu_seconds;
  (void)state;
  while (even_process_session_work(getsid(0)).cpu_seconds < before + 0.02) {
    for (unsigned long i = 0; i < 1000000; i++) {
      sum = sum + i;
    }
  }
  fault_os_from(FAULT_open, 1, EMFILE); /* /proc cannot be read: nothing, and no error left behind */
  even_process_work none = even_process_session_work(getsid(0));
  assert_true(none.cpu_seconds <= 0 && none.moved_bytes <= 0);
  assert_false(even_process_is_held(getpid()));
  fault_reset();
}

/* Whether it succeeds in a session that nothing else is in. */
static bool succeeds_alone(bool (*call)(void)) {
  int status = 0;
  pid_t child = fork();
  if (child == 0) {
    _exit(setsid() > 0 && call() ? 0 : 1);
  }
  assert_true(child > 0);
  assert_int_equal(waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static bool counts_what_it_reads(void) {
  enum { BYTES = 1 << 20 };
  static char got[BYTES];
  int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  double before = even_process_session_work(getpid()).moved_bytes;
  return read(zeros, got, BYTES) == BYTES && even_process_session_work(getpid()).moved_bytes >= before + (double)BYTES;
}

static void what_it_reads_is_counted(void **state) {
  (void)state;
  if (access("/proc/self/io", R_OK) != 0) {
    skip(); /* this kernel does not count it */
  }
  assert_true(succeeds_alone(counts_what_it_reads));
}

/* As what a file's memory is, whose file system does not count what it reads for that. */
static bool counts_what_it_touches(void) {
  enum { PAGES = 4096 }; /* next to which what is read of /proc by looking is little */
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  char *memory = mmap(NULL, PAGES * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return false;
  }
  (void)madvise(memory, PAGES * page, MADV_NOHUGEPAGE);
  double before = even_process_session_work(getpid()).moved_bytes;
  for (size_t i = 0; i < PAGES; i++) {
    memory[i * page] = 1;
  }
  return even_process_session_work(getpid()).moved_bytes >= before + (double)(PAGES * page);
}

static void memory_that_it_touches_is_counted(void **state) {
  (void)state;
  assert_true(succeeds_alone(counts_what_it_touches));
}

typedef struct busy_one {
  atomic_bool begun;
  atomic_bool rests;
  int ends[2];
} busy_one;

static void *be_busy(void *context) {
  busy_one *now = context;
  char byte;
  (void)prctl(PR_SET_NAME, "busy one");
  atomic_store(&now->begun, true);
  while (!atomic_load(&now->rests)) {
  }
  (void)!read(now->ends[0], &byte, 1);
  return NULL;
}

static void a_thread_that_runs_is_waited_for(void **state) {
  busy_one now = {.begun = false};
  pthread_t thread;
  (void)state;
  assert_true(even_process_threads_rest("busy one", 0, 0)); /* there is none */
  assert_int_equal(pipe(now.ends), 0);
  assert_int_equal(pthread_create(&thread, NULL, be_busy, &now), 0);
  while (!atomic_load(&now.begun)) {
  }
  assert_false(even_process_threads_rest("busy one", 10 * 1000000, 1e9));
  assert_false(even_process_threads_rest("busy one", UINT64_MAX / 4, 0.05)); /* it goes on and on */
  assert_true(even_process_threads_rest("busy", 10 * 1000000, 1e9));         /* another name */
  fault_os_from(FAULT_open, 1, EMFILE);                                      /* what cannot be seen holds nobody up */
  assert_true(even_process_threads_rest("busy one", UINT64_MAX / 4, 1e9));
  fault_reset();
  atomic_store(&now.rests, true);
  assert_true(even_process_threads_rest("busy one", UINT64_MAX / 4, 1e9));
  assert_int_equal(close(now.ends[1]), 0);
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_int_equal(close(now.ends[0]), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_waiting_thread_is_described),
      cmocka_unit_test(one_that_was_stopped_is_held),
      cmocka_unit_test(own_time_is_counted),
      cmocka_unit_test(what_it_reads_is_counted),
      cmocka_unit_test(memory_that_it_touches_is_counted),
      cmocka_unit_test(a_thread_that_runs_is_waited_for),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
