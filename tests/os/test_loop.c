/* The event loop, signals as descriptors, and pipes. */
#include "os/loop.h"

#include "os/pipe.h"
#include "os/signals.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct pair {
  even_loop *loop;
  even_loop_watch watches[2];
  int calls[2];
  int removed; /* which watch to remove when any is ready, -1: none */
} pair;

static void note(pair *both, int which, int fd) {
  char byte = 0;
  both->calls[which]++;
  assert_int_equal(read(fd, &byte, 1), 1);
  if (both->removed >= 0) {
    even_loop_remove(both->loop, &both->watches[both->removed]);
  }
}
static void first_ready(void *context, int fd) {
  note(context, 0, fd);
}
static void second_ready(void *context, int fd) {
  note(context, 1, fd);
}

static void calls_what_is_ready(void **state) {
  (void)state;
  even_loop loop;
  int one[2];
  int two[2];
  assert_int_equal(pipe(one), 0);
  assert_int_equal(pipe(two), 0);
  assert_int_equal(even_loop_open(&loop), EVEN_OK);
  pair both = {.loop = &loop, .removed = -1};
  assert_int_equal(even_loop_add(&loop, &both.watches[0], one[0], first_ready, &both), EVEN_OK);
  assert_int_equal(even_loop_add(&loop, &both.watches[1], two[0], second_ready, &both), EVEN_OK);
  assert_int_equal(even_loop_turn(&loop, 0), EVEN_OK);
  assert_int_equal(both.calls[0] + both.calls[1], 0);
  assert_int_equal(write(one[1], "x", 1), 1);
  assert_int_equal(even_loop_turn(&loop, -1), EVEN_OK);
  assert_int_equal(both.calls[0], 1);
  assert_int_equal(both.calls[1], 0);
  /* both ready, and the first call removes the other: it is not called in the same turn */
  both.removed = 1;
  both.calls[0] = 0;
  assert_int_equal(write(one[1], "x", 1), 1);
  assert_int_equal(write(two[1], "x", 1), 1);
  assert_int_equal(even_loop_turn(&loop, -1), EVEN_OK);
  assert_int_equal(both.calls[0], 1);
  assert_int_equal(both.calls[1], 0);
  even_loop_remove(&loop, &both.watches[1]); /* again: fine */
  even_loop_close(&loop);
  even_loop_close(&loop);
  assert_int_not_equal(even_loop_add(&loop, &both.watches[0], one[0], first_ready, &both), EVEN_OK);
  for (int i = 0; i < 2; i++) {
    (void)close(one[i]);
    (void)close(two[i]);
  }
}

static void an_interrupted_turn_is_a_turn(void **state) {
  (void)state;
  even_loop loop;
  assert_int_equal(even_loop_open(&loop), EVEN_OK);
  fault_os(FAULT_epoll_wait, 1, EINTR);
  assert_int_equal(even_loop_turn(&loop, 0), EVEN_OK);
  fault_os(FAULT_epoll_wait, 1, EBADF);
  assert_int_equal(even_loop_turn(&loop, 0), EVEN_ERR_SYSTEM);
  fault_reset();
  even_loop_close(&loop);
  fault_os(FAULT_epoll_create1, 1, EMFILE);
  assert_int_equal(even_loop_open(&loop), EVEN_ERR_SYSTEM);
  fault_reset();
}

static volatile sig_atomic_t handled;
static void handler(int number) {
  handled = number;
}

static void reads_signals_and_gives_them_back(void **state) {
  (void)state;
  even_signals signals;
  (void)signal(SIGTERM, handler);
  assert_int_equal(even_signals_open(&signals), EVEN_OK);
  assert_int_equal(even_signals_next(&signals), 0);
  assert_int_equal(raise(SIGTERM), 0);
  assert_int_equal(raise(SIGPIPE), 0); /* ignored meanwhile */
  assert_int_equal(handled, 0);
  assert_int_equal(even_signals_next(&signals), SIGTERM);
  assert_int_equal(even_signals_next(&signals), 0);
  assert_int_equal(raise(SIGTERM), 0);
  even_signals_close(&signals); /* unread ones are dropped */
  even_signals_close(&signals);
  assert_int_equal(handled, 0);
  assert_int_equal(raise(SIGTERM), 0);
  assert_int_equal(handled, SIGTERM);
  (void)signal(SIGTERM, SIG_DFL);
}

static void keeps_an_ignored_hang_up_ignored(void **state) {
  (void)state;
  even_signals signals;
  (void)signal(SIGHUP, SIG_IGN);
  assert_int_equal(even_signals_open(&signals), EVEN_OK);
  assert_int_equal(raise(SIGHUP), 0);
  assert_int_equal(even_signals_next(&signals), 0);
  even_signals_close(&signals);
  (void)signal(SIGHUP, SIG_DFL);
  fault_os(FAULT_signalfd, 1, EMFILE);
  assert_int_equal(even_signals_open(&signals), EVEN_ERR_SYSTEM);
  fault_reset();
  sigset_t mask;
  assert_int_equal(pthread_sigmask(SIG_SETMASK, NULL, &mask), 0);
  assert_int_equal(sigismember(&mask, SIGTERM), 0);
}

static void names_signals(void **state) {
  (void)state;
  assert_string_equal(even_signal_name(SIGSEGV), "SIGSEGV");
  assert_string_equal(even_signal_name(12345), "");
}

static void tells_empty_from_ended(void **state) {
  (void)state;
  int ends[2];
  char buffer[4];
  size_t got = 0;
  assert_int_equal(pipe2(ends, O_NONBLOCK), 0);
  assert_int_equal(even_pipe_read(ends[0], buffer, sizeof buffer, &got), EVEN_PIPE_EMPTY);
  assert_int_equal(write(ends[1], "abcdef", 6), 6);
  assert_int_equal(even_pipe_read(ends[0], buffer, sizeof buffer, &got), EVEN_PIPE_DATA);
  assert_int_equal(got, 4);
  fault_os(FAULT_read, 1, EINTR);
  assert_int_equal(even_pipe_read(ends[0], buffer, sizeof buffer, &got), EVEN_PIPE_DATA);
  assert_int_equal(got, 2);
  fault_os(FAULT_read, 1, EIO);
  assert_int_equal(even_pipe_read(ends[0], buffer, sizeof buffer, &got), EVEN_PIPE_ENDED);
  fault_reset();
  even_pipe_close(ends[1]);
  assert_int_equal(even_pipe_read(ends[0], buffer, sizeof buffer, &got), EVEN_PIPE_ENDED);
  even_pipe_close(ends[0]);
  even_pipe_close(-1);
}

static void logs_grow_at_their_end(void **state) {
  (void)state;
  char folder[] = "/tmp/evenstep-log-XXXXXX";
  char path[64];
  char text[8] = "";
  int fd = -1;
  assert_non_null(mkdtemp(folder));
  (void)snprintf(path, sizeof path, "%s/log", folder);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(even_log_open(path, &fd), EVEN_OK);
    assert_int_equal(write(fd, "ab", 2), 2);
    even_pipe_close(fd);
  }
  fd = open(path, O_RDONLY | O_CLOEXEC);
  assert_int_equal(read(fd, text, sizeof text), 4);
  (void)close(fd);
  (void)unlink(path);
  (void)rmdir(folder);
  assert_int_equal(even_log_open(path, &fd), EVEN_ERR_NOT_FOUND);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(calls_what_is_ready),
      cmocka_unit_test(an_interrupted_turn_is_a_turn),
      cmocka_unit_test(reads_signals_and_gives_them_back),
      cmocka_unit_test(keeps_an_ignored_hang_up_ignored),
      cmocka_unit_test(names_signals),
      cmocka_unit_test(tells_empty_from_ended),
      cmocka_unit_test(logs_grow_at_their_end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
