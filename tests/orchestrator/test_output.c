/* Lines, logs and tails out of a rank's pipes. */
#include "orchestrator/rank_output.h"

#include "os/pipe.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct fixture {
  even_loop loop;
  even_rank_output output;
  int writers[2];
  char log[64];
  even_text lines; /* "<length>:<first 8 bytes>|", in capitals for stderr */
} fixture;

static void take_line(void *context, int rank, bool error, const char *text, size_t length) {
  fixture *now = context;
  assert_int_equal(rank, 3);
  even_text_format(&now->lines, "%c%zu:%.*s|", error ? 'e' : 'o', length, length > 8 ? 8 : (int)length, text);
}

static int open_fixture(void **state) {
  fixture *now = calloc(1, sizeof *now);
  int fds[2];
  int log = -1;
  assert_non_null(now);
  assert_int_equal(even_loop_open(&now->loop), EVEN_OK);
  for (int i = 0; i < 2; i++) {
    int ends[2];
    assert_int_equal(pipe2(ends, O_NONBLOCK), 0);
    fds[i] = ends[0];
    now->writers[i] = ends[1];
  }
  (void)strcpy(now->log, "/tmp/evenstep-output-XXXXXX");
  log = mkstemp(now->log);
  assert_int_equal(even_rank_output_open(&now->output, &now->loop, 3, fds[0], fds[1], log, take_line, now), EVEN_OK);
  *state = now;
  return 0;
}

static int close_fixture(void **state) {
  fixture *now = *state;
  fault_reset();
  even_rank_output_close(&now->output);
  even_rank_output_close(&now->output);
  for (int i = 0; i < 2; i++) {
    even_pipe_close(now->writers[i]);
  }
  even_loop_close(&now->loop);
  even_text_free(&now->lines);
  (void)unlink(now->log);
  free(now);
  return 0;
}

static void put(fixture *now, int stream, const char *data, size_t length) {
  while (length > 0) {
    ssize_t written = write(now->writers[stream], data, length);
    if (written > 0) {
      data += written;
      length -= (size_t)written;
    } else {
      assert_int_equal(errno, EAGAIN);
    }
    assert_int_equal(even_loop_turn(&now->loop, 0), EVEN_OK);
  }
}

static void assert_lines(fixture *now, const char *expected) {
  assert_string_equal(even_text_string(&now->lines), expected);
  even_text_clear(&now->lines);
}

static void splits_lines(void **state) {
  fixture *now = *state;
  put(now, 0, "one\ntw", 6);
  put(now, 1, "err\n", 4);
  assert_lines(now, "o3:one|e3:err|");
  put(now, 0, "o\n\nthree", 8);
  assert_lines(now, "o3:two|o0:|");
  put(now, 0, "\0\xff\n", 3);
  assert_int_equal(now->lines.data[1], '7'); /* "three", NUL and 0xff: seven bytes */
  even_text_clear(&now->lines);
  put(now, 1, "last words", 10);
  assert_lines(now, "");
  even_rank_output_finish(&now->output);
  assert_lines(now, "e10:last wor|");
}

static void gives_long_lines_in_pieces(void **state) {
  fixture *now = *state;
  char block[1000];
  memset(block, 'x', sizeof block);
  for (int i = 0; i < 200; i++) {
    put(now, 0, block, sizeof block);
  }
  put(now, 0, "\n", 1);
  size_t total = 0;
  for (char *at = now->lines.data; at != NULL && *at == 'o'; at = strchr(at, '|') + 1) {
    size_t length = strtoul(at + 1, NULL, 10);
    assert_in_range(length, 1, 65536 + 16384);
    total += length;
  }
  assert_int_equal(total, 200000);
}

static void outlives_a_closed_stream(void **state) {
  fixture *now = *state;
  put(now, 0, "bye", 3);
  even_pipe_close(now->writers[0]);
  now->writers[0] = -1;
  assert_int_equal(even_loop_turn(&now->loop, 0), EVEN_OK);
  assert_lines(now, "o3:bye|");
  put(now, 1, "still here\n", 11);
  assert_lines(now, "e10:still he|");
}

static void keeps_log_and_tail(void **state) {
  fixture *now = *state;
  char number[16];
  for (int i = 0; i < 20000; i++) {
    int length = snprintf(number, sizeof number, "%d\n", i);
    put(now, 1, number, (size_t)length);
  }
  const even_text *tail = &now->output.streams[1].tail;
  assert_in_range(tail->length, EVEN_RANK_TAIL_BYTES, 3 * EVEN_RANK_TAIL_BYTES);
  assert_memory_equal(tail->data + tail->length - 6, "19999\n", 6);
  struct stat facts;
  assert_int_equal(stat(now->log, &facts), 0);
  assert_int_equal(facts.st_size, 10 * 2 + 90 * 3 + 900 * 4 + 9000 * 5 + 10000 * 6);
}

static void a_full_disk_does_not_stop_it(void **state) {
  fixture *now = *state;
  fault_os_from(FAULT_write, 1, ENOSPC); /* the test's own writes are not counted: they bypass the table */
  put(now, 0, "one\n", 4);
  fault_reset();
  put(now, 0, "two\n", 4);
  assert_lines(now, "o3:one|o3:two|");
  assert_int_equal(now->output.log_status, EVEN_ERR_NO_SPACE);
  struct stat facts;
  assert_int_equal(stat(now->log, &facts), 0); /* it has room again */
  assert_int_equal(facts.st_size, 4);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(splits_lines, open_fixture, close_fixture),
      cmocka_unit_test_setup_teardown(gives_long_lines_in_pieces, open_fixture, close_fixture),
      cmocka_unit_test_setup_teardown(outlives_a_closed_stream, open_fixture, close_fixture),
      cmocka_unit_test_setup_teardown(keeps_log_and_tail, open_fixture, close_fixture),
      cmocka_unit_test_setup_teardown(a_full_disk_does_not_stop_it, open_fixture, close_fixture),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
