/* A changed copy of a file takes its place: of many pieces, of one with another name, with any call failing. */
#include "os/changed_copy.h"

#include "base/fail.h"
#include "base/text.h"
#include "os/calls.h"
#include "os/file.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { PIECE = 1 << 20, BYTES = 2 * PIECE + 5 };

static char folder[64];
static char path[128];
static char link_path[128];
static char temporary[128];
static char content[BYTES];

static int begin(void **state) {
  (void)state;
  (void)snprintf(folder, sizeof folder, "evenstep-test-XXXXXX");
  if (mkdtemp(folder) == NULL) {
    return -1;
  }
  (void)snprintf(path, sizeof path, "%s/file", folder);
  (void)snprintf(link_path, sizeof link_path, "%s/link", folder);
  (void)snprintf(temporary, sizeof temporary, "%s/new", folder);
  for (size_t i = 0; i < BYTES; i++) {
    content[i] = (char)(i % 251);
  }
  return even_file_replace(path, content, BYTES) == EVEN_OK ? 0 : -1;
}

static int end(void **state) {
  (void)state;
  fault_reset();
  (void)unlink(path);
  (void)unlink(link_path);
  (void)unlink(temporary);
  return rmdir(folder);
}

/* The first `bytes` of the content, with one byte that has `xor` turned. */
static void assert_content(const char *name, size_t bytes, size_t at, unsigned char xor) {
  even_text text = EVEN_TEXT_EMPTY;
  assert_int_equal(even_file_read(name, 2 * BYTES, &text), EVEN_OK);
  assert_int_equal(text.length, bytes);
  for (size_t i = 0; i < bytes; i++) {
    unsigned char expected = (unsigned char)content[i];
    if ((unsigned char)text.data[i] != (i == at ? expected ^ xor : expected)) {
      fail_msg("byte %zu differs", i);
    }
  }
  even_text_free(&text);
  assert_int_equal(access(temporary, F_OK), -1);
}

static void one_bit_turns_in_any_piece(void **state) {
  static const size_t places[] = {0, PIECE - 1, PIECE, 2 * PIECE + 4};
  (void)state;
  for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
    const even_file_change change = {.bytes = UINT64_MAX, .at = places[i], .xor = 8};
    assert_int_equal(even_file_put_changed(path, temporary, &change), EVEN_OK);
    assert_content(path, BYTES, places[i], 8);
    assert_int_equal(even_file_put_changed(path, temporary, &change), EVEN_OK); /* and back */
  }
}

static void the_end_is_cut_off_in_any_piece(void **state) {
  static const size_t lengths[] = {2 * PIECE + 4, 2 * PIECE, PIECE + 1, PIECE, 3, 0};
  (void)state;
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    const even_file_change change = {.bytes = lengths[i], .at = UINT64_MAX};
    assert_int_equal(even_file_put_changed(path, temporary, &change), EVEN_OK);
    assert_content(path, lengths[i], SIZE_MAX, 0);
  }
}

/* As checkpoints share files that stay the same. */
static void another_name_keeps_the_file_as_it_was(void **state) {
  const even_file_change change = {.bytes = 7, .at = 6, .xor = 1};
  (void)state;
  assert_int_equal(even_file_link(path, link_path), EVEN_OK);
  assert_int_equal(even_file_put_changed(path, temporary, &change), EVEN_OK);
  assert_content(path, 7, 6, 1);
  assert_content(link_path, BYTES, SIZE_MAX, 0);
}

static void short_and_interrupted_calls_are_continued(void **state) {
  const even_file_change change = {.bytes = 100, .at = 50, .xor = 128};
  (void)state;
  fault_os_short(7);
  fault_os(FAULT_read, 2, EINTR);
  fault_os(FAULT_write, 2, EINTR);
  assert_int_equal(even_file_put_changed(path, temporary, &change), EVEN_OK);
  fault_reset();
  assert_content(path, 100, 50, 128);
}

static even_status change_nothing(void *context) {
  return even_file_put_changed(path, temporary, context);
}

static void a_failure_keeps_the_old_file(void **state) {
  static const fault_call calls[] = {FAULT_open, FAULT_read, FAULT_write, FAULT_close, FAULT_rename};
  even_file_change change = {.bytes = 9, .at = 3, .xor = 1};
  (void)state;
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    fault_os(calls[i], 1, ENOSPC);
    assert_int_equal(even_file_put_changed(path, temporary, &change), EVEN_ERR_NO_SPACE);
    fault_reset();
    assert_content(path, BYTES, SIZE_MAX, 0);
  }
  change = (even_file_change){.bytes = UINT64_MAX, .at = UINT64_MAX};
  assert_true(fault_each_os(change_nothing, &change, EIO) >= 4);
  assert_int_equal(fault_each_allocation(change_nothing, &change), 1);
  assert_content(path, BYTES, SIZE_MAX, 0);
}

static void a_file_that_is_gone_is_told(void **state) {
  const even_file_change change = {.bytes = 1, .at = 0};
  (void)state;
  assert_int_equal(even_file_put_changed(link_path, temporary, &change), EVEN_ERR_NOT_FOUND);
  assert_int_equal(access(temporary, F_OK), -1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(one_bit_turns_in_any_piece, begin, end),
      cmocka_unit_test_setup_teardown(the_end_is_cut_off_in_any_piece, begin, end),
      cmocka_unit_test_setup_teardown(another_name_keeps_the_file_as_it_was, begin, end),
      cmocka_unit_test_setup_teardown(short_and_interrupted_calls_are_continued, begin, end),
      cmocka_unit_test_setup_teardown(a_failure_keeps_the_old_file, begin, end),
      cmocka_unit_test_setup_teardown(a_file_that_is_gone_is_told, begin, end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
