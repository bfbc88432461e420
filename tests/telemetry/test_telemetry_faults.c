/* Foreign, damaged and unobtainable segments; failing calls. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "os/calls.h"
#include "telemetry/ring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int restore(void **state) {
  (void)state;
  even_os = even_os_real;
  even_allocator_current = (even_allocator){malloc, realloc, free};
  return 0;
}

static int segment(void) {
  int fd = -1;
  assert_int_equal(even_telemetry_create_segment(2, 16, &fd), EVEN_OK);
  return fd;
}

static void expect_refused(int fd, int rank, even_status expected) {
  even_telemetry *writer = NULL;
  assert_int_equal(even_telemetry_open(fd, rank, &writer), expected);
  assert_null(writer);
}

static void wrong_numbers_are_refused(void **state) {
  (void)state;
  int fd = -1;
  assert_int_equal(even_telemetry_create_segment(0, 0, &fd), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_telemetry_create_segment(EVEN_TELEMETRY_MOST_RANKS + 1, 0, &fd), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_telemetry_create_segment(1, SIZE_MAX, &fd), EVEN_ERR_ARGUMENT);
  assert_int_equal(fd, -1);
  fd = segment();
  expect_refused(fd, 2, EVEN_ERR_ARGUMENT);
  expect_refused(fd, -1, EVEN_ERR_ARGUMENT);
  (void)close(fd);
  expect_refused(-1, 0, EVEN_ERR_SYSTEM);
}

static void alter(size_t offset, uint32_t value, even_status expected) {
  int fd = segment();
  even_telemetry_reader *reader = NULL;
  assert_int_equal(pwrite(fd, &value, sizeof value, (off_t)offset), sizeof value);
  expect_refused(fd, 0, expected);
  assert_int_equal(even_telemetry_reader_open(fd, &reader), expected);
  assert_null(reader);
  assert_non_null(strstr(even_error_last()->fix, "evenstep run"));
  (void)close(fd);
}

static void foreign_and_damaged_segments_are_refused(void **state) {
  (void)state;
  alter(offsetof(even_ring_header, magic), 7, EVEN_ERR_INPUT);
  alter(offsetof(even_ring_header, version), 99, EVEN_ERR_INPUT);
  alter(offsetof(even_ring_header, slot_bytes), 128, EVEN_ERR_INPUT);
  alter(offsetof(even_ring_header, ranks), 3, EVEN_ERR_INPUT);
  alter(offsetof(even_ring_header, ranks), UINT32_MAX, EVEN_ERR_INPUT);
  alter(offsetof(even_ring_header, records), 32, EVEN_ERR_INPUT);
  alter(offsetof(even_ring_header, records), 0, EVEN_ERR_INPUT);
}

static void a_segment_cut_short_is_refused(void **state) {
  (void)state;
  const off_t lengths[] = {0, 1, 127, 128, 4000};
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    char start[4096] = {0};
    int fd = segment();
    int cut = memfd_create("cut", MFD_CLOEXEC); /* a segment's own size is sealed */
    assert_true(pread(fd, start, sizeof start, 0) > 128);
    assert_int_equal(write(cut, start, (size_t)lengths[i]), lengths[i]);
    expect_refused(cut, 0, EVEN_ERR_INPUT);
    (void)close(cut);
    (void)close(fd);
  }
}

static int no_duplicate(int fd) {
  (void)fd;
  errno = EMFILE;
  return -1;
}
static void *no_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  (void)address, (void)bytes, (void)protection, (void)flags, (void)fd, (void)offset;
  errno = ENOMEM;
  return MAP_FAILED;
}
static int no_memfd(const char *name, unsigned int flags) {
  (void)name, (void)flags;
  errno = ENOSPC;
  return -1;
}
static void *no_memory(size_t bytes) {
  (void)bytes;
  return NULL;
}

static void failing_calls_are_reported(void **state) {
  (void)state;
  int fd = segment();
  int other = -1;
  even_telemetry_reader *reader = NULL;
  even_os.duplicate = no_duplicate;
  expect_refused(fd, 0, EVEN_ERR_SYSTEM);
  even_os = even_os_real;
  even_os.mmap = no_mmap;
  expect_refused(fd, 0, EVEN_ERR_MEMORY);
  even_os = even_os_real;
  even_os.memfd_create = no_memfd;
  assert_int_equal(even_telemetry_create_segment(2, 0, &other), EVEN_ERR_NO_SPACE);
  assert_int_equal(other, -1);
  even_os = even_os_real;
  even_allocator_current.allocate = no_memory;
  expect_refused(fd, 0, EVEN_ERR_MEMORY);
  assert_int_equal(even_telemetry_reader_open(fd, &reader), EVEN_ERR_MEMORY);
  assert_null(reader);
  (void)restore(NULL);
  (void)close(fd);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(wrong_numbers_are_refused, restore),
      cmocka_unit_test_teardown(foreign_and_damaged_segments_are_refused, restore),
      cmocka_unit_test_teardown(a_segment_cut_short_is_refused, restore),
      cmocka_unit_test_teardown(failing_calls_are_reported, restore),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
