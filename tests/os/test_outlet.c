/* Output to a reader that pauses. */
#include "os/outlet.h"

#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { LIMIT = 4096 };
static const uint64_t LONG_NS = 20000000000u;

static void takes_no_more_than_fits_and_never_waits_longer_than_told(void **state) {
  (void)state;
  even_outlet *outlet = NULL;
  int ends[2];
  char block[1000];
  char bytes[8192];
  memset(block, 'x', sizeof block);
  memset(bytes, 'y', sizeof bytes);
  assert_int_equal(pipe(ends), 0);
  int pipe_bytes = fcntl(ends[1], F_SETPIPE_SZ, 4096);
  assert_in_range(pipe_bytes, 4096, sizeof bytes);
  assert_int_equal(write(ends[1], bytes, (size_t)pipe_bytes), pipe_bytes); /* full: the outlet's thread stands still */
  assert_int_equal(even_outlet_open(ends[1], LIMIT, &outlet), EVEN_OK);
  for (int i = 0; i < 4; i++) {
    assert_true(even_outlet_add(outlet, block, sizeof block, 0));
  }
  assert_false(even_outlet_add(outlet, block, sizeof block, 1000000));
  assert_false(even_outlet_add(outlet, bytes, LIMIT + 1, LONG_NS)); /* would never fit */
  assert_int_equal(even_outlet_waiting(outlet), 4000);
  assert_false(even_outlet_drain(outlet, 1000000));
  /* the reader goes on: what was taken comes out, whole */
  for (size_t seen = 0; seen < (size_t)pipe_bytes + 4000;) {
    ssize_t got = read(ends[0], bytes, sizeof bytes);
    assert_true(got > 0);
    seen += (size_t)got;
  }
  assert_true(even_outlet_drain(outlet, LONG_NS));
  assert_true(even_outlet_add(outlet, block, sizeof block, 0));
  assert_true(even_outlet_drain(outlet, LONG_NS));
  assert_int_equal(read(ends[0], bytes, sizeof bytes), sizeof block);
  even_outlet_close(outlet);
  (void)close(ends[0]);
  (void)close(ends[1]);
}

static void keeps_the_order_through_the_end_of_its_ring(void **state) {
  (void)state;
  even_outlet *outlet = NULL;
  int ends[2];
  char text[512];
  assert_int_equal(pipe(ends), 0);
  assert_int_equal(even_outlet_open(ends[1], 300, &outlet), EVEN_OK);
  for (int line = 0; line < 1000; line++) {
    int length = snprintf(text, sizeof text, "line %d of many, %0*d\n", line, line % 100 + 1, line);
    char back[512];
    assert_true(even_outlet_add(outlet, text, (size_t)length, LONG_NS));
    size_t got = 0;
    while (got < (size_t)length) {
      ssize_t piece = read(ends[0], back + got, (size_t)length - got);
      assert_true(piece > 0);
      got += (size_t)piece;
    }
    assert_memory_equal(back, text, (size_t)length);
  }
  assert_true(even_outlet_drain(outlet, LONG_NS));
  even_outlet_close(outlet);
  (void)close(ends[0]);
  (void)close(ends[1]);
}

static void a_reader_that_is_gone_takes_everything(void **state) {
  (void)state;
  even_outlet *outlet = NULL;
  int ends[2];
  assert_int_equal(pipe(ends), 0);
  (void)close(ends[0]);
  assert_int_equal(even_outlet_open(ends[1], LIMIT, &outlet), EVEN_OK);
  for (int i = 0; i < 1000; i++) { /* and SIGPIPE does not end the process */
    assert_true(even_outlet_add(outlet, "some words", 10, LONG_NS));
  }
  assert_true(even_outlet_drain(outlet, LONG_NS));
  even_outlet_close(outlet);
  (void)close(ends[1]);
}

static void a_disk_that_is_full_for_a_while_loses_nothing(void **state) {
  (void)state;
  even_outlet *outlet = NULL;
  int ends[2];
  char bytes[16] = "";
  for (int i = 0; i < 2; i++) {
    assert_int_equal(pipe(ends), 0);
    fault_os(FAULT_write, 1, i == 0 ? ENOSPC : EDQUOT);
    assert_int_equal(even_outlet_open(ends[1], LIMIT, &outlet), EVEN_OK);
    assert_true(even_outlet_add(outlet, "some words", 10, 0));
    assert_true(even_outlet_drain(outlet, LONG_NS));
    even_outlet_close(outlet);
    assert_int_equal(fault_os_calls(FAULT_write), 2);
    fault_reset();
    (void)close(ends[1]);
    assert_int_equal(read(ends[0], bytes, sizeof bytes), 10);
    assert_memory_equal(bytes, "some words", 10);
    (void)close(ends[0]);
  }
}

static void waits_where_the_descriptor_does_not_block(void **state) {
  (void)state;
  even_outlet *outlet = NULL;
  int ends[2];
  char bytes[65536];
  size_t seen = 0;
  assert_int_equal(pipe2(ends, O_NONBLOCK), 0);
  assert_int_equal(fcntl(ends[0], F_SETFL, 0), 0);
  char *big = calloc(1, 1 << 20);
  assert_int_equal(even_outlet_open(ends[1], 1 << 20, &outlet), EVEN_OK);
  assert_true(even_outlet_add(outlet, big, 1 << 20, 0));
  while (seen < 1 << 20) {
    ssize_t got = read(ends[0], bytes, sizeof bytes);
    assert_true(got > 0);
    seen += (size_t)got;
  }
  assert_true(even_outlet_drain(outlet, LONG_NS));
  even_outlet_close(outlet);
  free(big);
  (void)close(ends[0]);
  (void)close(ends[1]);
}

static void says_what_it_lacks(void **state) {
  (void)state;
  even_outlet *outlet = NULL;
  fault_os(FAULT_thread_create, 1, EAGAIN);
  assert_int_not_equal(even_outlet_open(1, LIMIT, &outlet), EVEN_OK);
  fault_reset();
  assert_null(outlet);
  for (int i = 1; i <= 2; i++) {
    fault_allocation(i);
    assert_int_equal(even_outlet_open(1, LIMIT, &outlet), EVEN_ERR_MEMORY);
    fault_reset();
  }
  even_outlet_close(NULL);
}

static void knows_one_end_by_two_numbers(void **state) {
  (void)state;
  int one[2];
  int two[2];
  assert_int_equal(pipe(one), 0);
  assert_int_equal(pipe(two), 0);
  int again = dup(one[1]);
  assert_true(even_outlet_same(one[1], again));
  assert_false(even_outlet_same(one[1], two[1]));
  assert_false(even_outlet_same(one[1], -1));
  for (int i = 0; i < 2; i++) {
    (void)close(one[i]);
    (void)close(two[i]);
  }
  (void)close(again);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(takes_no_more_than_fits_and_never_waits_longer_than_told),
      cmocka_unit_test(keeps_the_order_through_the_end_of_its_ring),
      cmocka_unit_test(a_reader_that_is_gone_takes_everything),
      cmocka_unit_test(a_disk_that_is_full_for_a_while_loses_nothing),
      cmocka_unit_test(waits_where_the_descriptor_does_not_block),
      cmocka_unit_test(says_what_it_lacks),
      cmocka_unit_test(knows_one_end_by_two_numbers),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
