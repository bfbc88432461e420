/* What is kept for the next child: descriptors by their numbers, ends of those that are watched, whoever asks and dies
 * when. Parent and child are played by one process, but where a descriptor must outlive its owner. */
#include "os/custody.h"

#include "base/fail.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static int reset(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

/* As a fork would have it: the child has a copy of all, of which it closes nothing that the parent has. */
static void start_child(even_custody *parent, even_custody *child) {
  int end = -1;
  assert_int_equal(even_custody_begin(parent, &end), EVEN_OK);
  *child = (even_custody){.socket = -1, .count = parent->count};
  child->items = parent->count == 0 ? NULL : malloc(parent->count * sizeof *child->items);
  for (size_t i = 0; i < parent->count; i++) {
    child->items[i] = parent->items[i];
    child->items[i].fd = parent->items[i].fd < 0 ? -1 : dup(parent->items[i].fd);
  }
  even_custody_join(child, end);
}

static void write_and_close(int fd, char byte) {
  assert_int_equal(write(fd, &byte, 1), 1);
  assert_int_equal(close(fd), 0);
}

static void expect_byte(int fd, char wanted) {
  char byte = 0;
  assert_true(fd >= 0);
  assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  assert_int_equal(read(fd, &byte, 1), 1);
  assert_int_equal(byte, wanted);
  assert_int_equal(close(fd), 0);
}

static void what_a_killed_child_had_the_next_one_has(void **state) {
  (void)state;
  even_custody parent;
  even_custody next;
  int ends[2];
  int end = -1;
  int before = open_descriptors();
  even_custody_open(&parent);
  assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
  assert_int_equal(even_custody_begin(&parent, &end), EVEN_OK);
  pid_t child = fork();
  if (child == 0) {
    even_custody_join(&parent, end);
    if (even_custody_keep(&parent, 3, 7, ends[0]) == EVEN_OK && even_custody_keep(&parent, 3, 8, ends[0]) == EVEN_OK &&
        even_custody_drop(&parent, 3, 8) == EVEN_OK) {
      (void)raise(SIGKILL);
    }
    _exit(1);
  }
  (void)close(end);
  (void)close(ends[0]);
  int code = 0;
  assert_int_equal(waitpid(child, &code, 0), child);
  assert_true(WIFSIGNALED(code));
  even_custody_hear(&parent); /* of one that is gone */
  assert_false(parent.broken);
  assert_int_equal(parent.count, 1);
  write_and_close(ends[1], 'x'); /* somebody has the other end */
  start_child(&parent, &next);
  assert_int_equal(even_custody_claim(&next, 3, 8), -1);
  assert_int_equal(even_custody_claim(&next, 2, 7), -1);
  int found = even_custody_claim(&next, 3, 7);
  assert_int_equal(even_custody_claim(&next, 3, 7), -1); /* it is its own by now */
  assert_int_equal(fcntl(found, F_SETFD, FD_CLOEXEC), 0);
  expect_byte(found, 'x');
  even_custody_close(&next);
  even_custody_close(&parent);
  assert_int_equal(open_descriptors(), before);
}

static void the_newer_one_is_kept(void **state) {
  (void)state;
  even_custody parent;
  even_custody child;
  even_custody next;
  int first[2];
  int second[2];
  even_custody_open(&parent);
  start_child(&parent, &child);
  assert_int_equal(pipe(first), 0);
  assert_int_equal(pipe(second), 0);
  assert_int_equal(even_custody_keep(&child, 1, 0, first[0]), EVEN_OK);
  assert_int_equal(even_custody_keep(&child, 1, 0, second[0]), EVEN_OK);
  even_custody_hear(&parent);
  assert_int_equal(parent.count, 1);
  (void)close(first[0]);
  (void)close(second[0]);
  write_and_close(second[1], '2');
  start_child(&parent, &next);
  int found = even_custody_claim(&next, 1, 0);
  assert_int_equal(fcntl(found, F_SETFD, FD_CLOEXEC), 0);
  expect_byte(found, '2');
  assert_int_equal(fcntl(first[1], F_SETFL, O_NONBLOCK), 0);
  struct pollfd reader = {.fd = first[1]};
  assert_int_equal(poll(&reader, 1, 0), 1); /* nobody reads from the first any more */
  (void)close(first[1]);
  even_custody_close(&next);
  even_custody_close(&child);
  even_custody_close(&parent);
}

static void ends_are_told_to_whoever_is_there(void **state) {
  (void)state;
  even_custody parent;
  even_custody first;
  even_custody second;
  even_process_end end;
  even_custody_open(&parent);
  start_child(&parent, &first);
  assert_int_equal(even_custody_watch(&first, 101), EVEN_OK);
  assert_int_equal(even_custody_watch(&first, 102), EVEN_OK);
  assert_int_equal(even_custody_watch(&first, 103), EVEN_OK);
  const even_process_end well = {.pid = 101, .code = 3, .peak_memory_bytes = 77};
  const even_process_end others = {.pid = 200};
  const even_process_end stops = {.pid = 102, .stopped = true, .signal = SIGSTOP};
  even_custody_tell(&parent, &well);
  even_custody_tell(&parent, &others); /* for whom nobody has asked */
  even_custody_tell(&parent, &stops);
  assert_true(even_custody_next(&first, &end));
  assert_memory_equal(&end, &well, sizeof end);
  assert_true(even_custody_next(&first, &end));
  assert_memory_equal(&end, &stops, sizeof end);
  assert_false(even_custody_next(&first, &end));
  assert_int_equal(even_custody_drop(&first, 0, 101), EVEN_OK); /* it has noted that */
  even_custody_close(&first);
  const even_process_end alone = {.pid = 103, .signal = SIGKILL};
  even_custody_tell(&parent, &alone); /* nobody is there */
  start_child(&parent, &second);
  const even_process_end later = {.pid = 102, .code = 1};
  even_custody_tell(&parent, &later);
  assert_true(even_custody_next(&second, &end));
  assert_memory_equal(&end, &alone, sizeof end);
  assert_true(even_custody_next(&second, &end));
  assert_memory_equal(&end, &later, sizeof end);
  assert_false(even_custody_next(&second, &end));
  even_custody_close(&second);
  even_custody_close(&parent);
}

/* A child that stands still reads nothing: it hears of all when it goes on, and the parent waits for nothing. */
static void a_full_socket_loses_no_end(void **state) {
  enum { MANY = 3000 };
  (void)state;
  even_custody parent;
  even_custody child;
  even_process_end end;
  even_custody_open(&parent);
  start_child(&parent, &child);
  for (int i = 1; i <= MANY; i++) {
    assert_int_equal(even_custody_watch(&child, i), EVEN_OK);
    even_custody_hear(&parent);
  }
  for (int i = 1; i <= MANY; i++) {
    const even_process_end its = {.pid = i, .code = i % 100};
    even_custody_tell(&parent, &its);
  }
  bool heard[MANY + 1] = {false};
  int count = 0;
  for (int round = 0; count < MANY && round < MANY; round++) {
    while (even_custody_next(&child, &end)) {
      assert_in_range(end.pid, 1, MANY);
      assert_false(heard[end.pid]);
      assert_int_equal(end.code, end.pid % 100);
      heard[end.pid] = true;
      count++;
    }
    even_custody_hear(&parent);
  }
  assert_int_equal(count, MANY);
  even_custody_close(&child);
  even_custody_close(&parent);
}

static void a_parent_that_stands_still_is_not_waited_for(void **state) {
  (void)state;
  even_custody parent;
  even_custody child;
  int kept = 0;
  even_custody_open(&parent);
  start_child(&parent, &child);
  while (kept < 1000000 && even_custody_watch(&child, kept + 1) == EVEN_OK) {
    kept++;
  }
  assert_in_range(kept, 1, 999999);
  assert_int_equal(even_error_last()->status, EVEN_ERR_SYSTEM);
  even_custody_hear(&parent);
  assert_int_equal(parent.count, kept);
  assert_int_equal(even_custody_watch(&child, kept + 1), EVEN_OK);
  even_custody_close(&child);
  even_custody_close(&parent);
}

/* Whoever starts children lets go of the rest first, and waits for what the last one has left. */
static void what_stays_is_kept_where_all_else_is_dropped(void **state) {
  (void)state;
  even_custody parent;
  even_custody child;
  int before = open_descriptors();
  int ends[2];
  even_custody_open(&parent);
  start_child(&parent, &child);
  assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
  assert_int_equal(even_custody_keep(&child, 1, 0, ends[0]), EVEN_OK);
  assert_int_equal(even_custody_keep(&child, EVEN_CUSTODY_STAYS, 0, ends[0]), EVEN_OK);
  assert_int_equal(even_custody_keep(&child, 2, 0, ends[0]), EVEN_OK);
  assert_int_equal(even_custody_drop_all(&child), EVEN_OK);
  even_custody_hear(&parent);
  even_custody_release(&parent);
  assert_int_equal(parent.count, 1);
  assert_int_equal(parent.items[0].kind, EVEN_CUSTODY_STAYS);
  (void)close(ends[0]);
  write_and_close(ends[1], 's');
  even_custody_close(&child);
  start_child(&parent, &child);
  int found = even_custody_claim(&child, EVEN_CUSTODY_STAYS, 0);
  assert_int_equal(fcntl(found, F_SETFD, FD_CLOEXEC), 0);
  expect_byte(found, 's');
  even_custody_close(&child);
  even_custody_close(&parent);
  assert_int_equal(open_descriptors(), before);
}

static void what_cannot_be_kept_is_known(void **state) {
  (void)state;
  even_custody parent;
  even_custody child;
  even_custody_open(&parent);
  start_child(&parent, &child);
  assert_int_equal(even_custody_keep(&child, 0, 1, 0), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_custody_keep(&child, 1, 1, -1), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_custody_keep(&child, 1, 1, 0), EVEN_OK);
  fault_allocation(1);
  even_custody_hear(&parent);
  fault_reset();
  assert_true(parent.broken);
  assert_int_equal(parent.count, 0);
  even_custody_release(&parent); /* the next child begins anew */
  assert_false(parent.broken);
  assert_int_equal(send(child.socket, "odd", 3, 0), 3);
  even_custody_hear(&parent);
  assert_true(parent.broken);
  even_custody_close(&child);
  even_custody_close(&parent);
}

static even_status pass_on(void *context) {
  even_custody parent;
  int end = -1;
  (void)context;
  even_custody_open(&parent);
  even_status status = even_custody_begin(&parent, &end);
  if (status == EVEN_OK) {
    even_custody child = {.socket = -1};
    even_custody_join(&child, end);
    status = even_custody_keep(&child, 1, 0, 0);
    even_custody_hear(&parent);
    if (status == EVEN_OK && (parent.broken || parent.count != 1)) {
      status = even_fail(EVEN_ERR_MEMORY, "it was not kept"); /* of which the child hears nothing */
    }
    even_custody_close(&child);
  }
  even_custody_close(&parent);
  return status;
}

static void survives_every_fault(void **state) {
  (void)state;
  assert_true(fault_each_allocation(pass_on, NULL) >= 1);
  assert_true(fault_each_os(pass_on, NULL, ENFILE) >= 3);
  even_custody parent;
  even_custody child;
  even_custody_open(&parent);
  start_child(&parent, &child);
  fault_os(FAULT_sendmsg, 1, EINTR);
  assert_int_equal(even_custody_watch(&child, 5), EVEN_OK);
  fault_reset();
  fault_os(FAULT_recvmsg, 1, EINTR);
  even_custody_hear(&parent);
  fault_reset();
  assert_int_equal(parent.count, 1);
  even_custody_close(&child);
  even_custody_close(&parent);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(what_a_killed_child_had_the_next_one_has, reset),
      cmocka_unit_test_teardown(the_newer_one_is_kept, reset),
      cmocka_unit_test_teardown(ends_are_told_to_whoever_is_there, reset),
      cmocka_unit_test_teardown(a_full_socket_loses_no_end, reset),
      cmocka_unit_test_teardown(a_parent_that_stands_still_is_not_waited_for, reset),
      cmocka_unit_test_teardown(what_stays_is_kept_where_all_else_is_dropped, reset),
      cmocka_unit_test_teardown(what_cannot_be_kept_is_known, reset),
      cmocka_unit_test_teardown(survives_every_fault, reset),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
