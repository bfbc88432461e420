/* The stacks of a process whose threads hang, asked for from its page. */
#include "telemetry/stacks.h"

#include "os/clock.h"
#include "os/thread.h"
#include "support/fault.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static pthread_mutex_t taken = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int there;
static int interpreter_fd;

/* What faulthandler does: from a handler, to a descriptor. */
static void write_as_an_interpreter(int number) {
  static const char words[] = "File \"train.py\", line 7 in hang\n";
  (void)number;
  (void)!write(interpreter_fd, words, sizeof words - 1);
}

static void *hang_in_a_lock(void *unused) {
  (void)unused;
  (void)atomic_fetch_add(&there, 1);
  (void)pthread_mutex_lock(&taken);
  (void)pthread_mutex_unlock(&taken);
  return NULL;
}

static void *hang_in_a_read(void *argument) {
  char byte;
  (void)atomic_fetch_add(&there, 1);
  return read(*(int *)argument, &byte, 1) == 1 ? argument : NULL;
}

static void ask(pid_t pid, even_text *out) {
  even_stacks_request request;
  assert_int_equal(even_stacks_ask(pid, &request), EVEN_OK);
  const uint64_t patience = even_clock_ns() + UINT64_C(120000000000);
  while (!even_stacks_told(&request) && even_clock_ns() < patience) {
    even_clock_sleep_ns(1000000);
  }
  assert_true(even_stacks_told(&request));
  even_text_clear(out);
  even_stacks_take(&request, out);
  assert_null(request.page);
}

static size_t count(const char *text, const char *words) {
  size_t found = 0;
  for (const char *at = text; (at = strstr(at, words)) != NULL; at++) {
    found++;
  }
  return found;
}

static void threads_that_hang_are_seen_and_go_on(void **state) {
  pthread_t in_a_lock;
  pthread_t in_a_read;
  pthread_t deaf;
  int ends[2];
  int number = 0;
  void *read_well = NULL;
  even_stacks *stacks = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  struct sigaction action = {.sa_handler = write_as_an_interpreter};
  (void)state;
  assert_int_equal(pipe(ends), 0);
  assert_int_equal(even_stacks_open(&number, &interpreter_fd, &stacks), EVEN_OK);
  assert_int_equal(sigaction(number, &action, NULL), 0);
  assert_int_equal(pthread_mutex_lock(&taken), 0);
  assert_int_equal(pthread_create(&in_a_lock, NULL, hang_in_a_lock, NULL), 0);
  assert_int_equal(pthread_create(&in_a_read, NULL, hang_in_a_read, &ends[0]), 0);
  assert_int_equal(even_thread_start(hang_in_a_lock, NULL, &deaf), EVEN_OK); /* blocks all signals */
  while (atomic_load(&there) < 3) {
    even_clock_sleep_ns(1000000);
  }
  for (int i = 0; i < 3; i++) { /* again and again, as it hangs on */
    ask(getpid(), &text);
    assert_int_equal(count(text.data, "line 7 in hang"), 1);
    assert_true(count(text.data, "takes no signals") >= 1); /* a sanitizer has such a thread, too */
    assert_non_null(strstr(text.data, "C stacks:"));
    assert_true(count(text.data, "  #") >= 6);
    assert_null(strstr(text.data, "did not answer"));
  }
  assert_int_equal(write(ends[1], "x", 1), 1);
  assert_int_equal(pthread_mutex_unlock(&taken), 0);
  assert_int_equal(pthread_join(in_a_read, &read_well), 0);
  assert_non_null(read_well); /* the signals did not end its call */
  assert_int_equal(pthread_join(in_a_lock, NULL), 0);
  assert_int_equal(pthread_join(deaf, NULL), 0);
  even_stacks_close(stacks);
  even_text_free(&text);
  assert_int_equal(close(ends[0]) + close(ends[1]), 0);
}

/* Where nobody writes the interpreter's, the rest is told; a signal without a handler is not raised. */
static void without_an_interpreter_the_c_stacks_are_told(void **state) {
  int number = 0;
  int fd = -1;
  even_stacks *stacks = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(even_stacks_open(&number, &fd, &stacks), EVEN_OK);
  assert_int_not_equal(signal(number, SIG_DFL), SIG_ERR); /* which would end the process */
  ask(getpid(), &text);
  assert_int_equal(strncmp(text.data, "\nC stacks:\nthread ", 18), 0);
  even_stacks_close(stacks);
  even_text_free(&text);
}

static void a_process_without_a_page_is_told_apart(void **state) {
  even_stacks_request request;
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(even_stacks_ask(getpid(), &request), EVEN_ERR_NOT_FOUND);
  assert_false(even_stacks_told(&request));
  even_stacks_take(&request, &text);
  assert_int_equal(text.length, 0);
  assert_int_not_equal(even_stacks_ask(0x3fffffff, &request), EVEN_OK);
}

static even_status open_and_close(void *context) {
  even_stacks *stacks = NULL;
  int number = 0;
  int fd = -1;
  (void)context;
  even_status status = even_stacks_open(&number, &fd, &stacks);
  even_stacks_close(stacks);
  return status;
}

static void survives_every_fault(void **state) {
  (void)state;
  assert_true(fault_each_allocation(open_and_close, NULL) >= 1);
  assert_true(fault_each_os(open_and_close, NULL, ENOMEM) >= 3);
}

static int tear_down(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(a_process_without_a_page_is_told_apart, tear_down),
      cmocka_unit_test_teardown(threads_that_hang_are_seen_and_go_on, tear_down),
      cmocka_unit_test_teardown(without_an_interpreter_the_c_stacks_are_told, tear_down),
      cmocka_unit_test_teardown(survives_every_fault, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
