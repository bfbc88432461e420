/* A rank's own timeline file: whole, replaced, and what a full disk or a failing call does. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/json_check.h"
#include "base/text.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/file.h"

#include <errno.h>
#include <evenstep/telemetry.h>
#include <evenstep/types.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char path[] = "/tmp/even-timeline-XXXXXX";
static int ring_fd = -1;
static even_telemetry *ring;

static int set_up(void **state) {
  (void)state;
  (void)snprintf(path + strlen(path) - 6, 7, "XXXXXX");
  int fd = mkstemp(path); /* a file that is there already */
  (void)close(fd);
  return even_telemetry_create_segment(1, 64, &ring_fd) != EVEN_OK || even_telemetry_open(ring_fd, 0, &ring) != EVEN_OK;
}

static int tear_down(void **state) {
  (void)state;
  even_os = even_os_real;
  even_allocator_current = (even_allocator){malloc, realloc, free};
  even_telemetry_close(ring);
  (void)close(ring_fd);
  return unlink(path) != 0 && errno != ENOENT;
}

static void write_records(uint32_t calls) {
  even_event_record group = {.event = EVEN_EVENT_GROUP, .value = 7};
  even_event_record_words(&group, "ucx 2 mine");
  even_telemetry_event(ring, &group);
  even_telemetry_span(ring, &(even_span_record){.step = 1, .span = EVEN_SPAN_FORWARD, .duration_ns = 5});
  even_telemetry_step(ring, &(even_step_record){.step = 1, .end_ns = 50, .duration_ns = 5});
  for (uint32_t i = 1; i <= calls; i++) {
    even_telemetry_call(ring, &(even_call_record){.call = i % 2 == 0 ? EVEN_RECORDED_BARRIER : EVEN_RECORDED_SEND,
                                                  .dtype = EVEN_CALL_NONE,
                                                  .op = EVEN_CALL_NONE,
                                                  .row = EVEN_ROW_FIRST,
                                                  .ranks = 2,
                                                  .peer = -1,
                                                  .group = 7,
                                                  .number = i,
                                                  .start_ns = i,
                                                  .duration_ns = 1});
  }
}

/* The file as one JSON object. */
static void read_file(even_text *out) {
  even_text_add(out, "{\"events\":");
  assert_int_equal(even_file_read(path, 1 << 20, out), EVEN_OK);
  even_text_add(out, "}");
  assert_int_equal(even_json_check_object(path, even_text_string(out)), EVEN_OK);
}

static int count_of(const even_text *text, const char *piece) {
  int found = 0;
  for (const char *at = even_text_string(text); (at = strstr(at, piece)) != NULL; at++) {
    found++;
  }
  return found;
}

static void all_that_was_recorded_is_in_the_file(void **state) {
  even_timeline *timeline = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(even_timeline_open(ring_fd, 5, path, &timeline), EVEN_OK);
  assert_true(even_telemetry_wants_calls(ring));
  write_records(10);
  assert_int_equal(even_timeline_close(timeline), EVEN_OK);
  read_file(&text);
  assert_int_equal(count_of(&text, "\"name\":\"barrier\",\"ph\":\"X\",\"pid\":5,"), 5);
  assert_int_equal(count_of(&text, "\"name\":\"send\",\"ph\":\"b\",\"pid\":5,"), 5);
  assert_int_equal(count_of(&text, "\"name\":\"send\",\"ph\":\"e\",\"pid\":5,"), 5);
  assert_int_equal(count_of(&text, "\"group\":\"mine\",\"engine\":\"ucx\""), 10);
  assert_int_equal(count_of(&text, "\"name\":\"forward\",\"ph\":\"X\""), 1);
  assert_int_equal(count_of(&text, "\"name\":\"step 1\""), 1);
  assert_int_equal(count_of(&text, "\"args\":{\"name\":\"calls\"}"), 1); /* a row is named once */
  assert_int_equal(count_of(&text, "\"name\":\"evenstep_lost_records\""), 1);
  assert_int_equal(count_of(&text, "\"args\":{\"count\":0}"), 1);
  even_text_free(&text);
  assert_int_equal(even_timeline_close(NULL), EVEN_OK);
}

static void what_comes_too_fast_is_counted(void **state) {
  even_timeline *timeline = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  write_records(1000); /* before anybody reads; calls are not wanted yet */
  for (int i = 0; i < 100; i++) {
    even_telemetry_span(ring, &(even_span_record){.span = EVEN_SPAN_DATA, .duration_ns = 1});
  }
  assert_int_equal(even_timeline_open(ring_fd, 0, path, &timeline), EVEN_OK);
  assert_int_equal(even_timeline_close(timeline), EVEN_OK);
  read_file(&text);
  assert_int_equal(count_of(&text, "\"name\":\"data\",\"ph\":\"X\""), 64);
  assert_int_equal(count_of(&text, "\"args\":{\"count\":39}"), 1); /* 103 records in a ring of 64 */
  even_text_free(&text);
}

static atomic_bool is_full; /* the thread that writes is under way when the disk becomes so */

static ssize_t write_unless_full(int fd, const void *data, size_t bytes) {
  if (!atomic_load(&is_full)) {
    return write(fd, data, bytes);
  }
  errno = ENOSPC;
  return -1;
}

static void a_full_disk_is_told_at_the_end_and_stops_nobody(void **state) {
  even_timeline *timeline = NULL;
  (void)state;
  atomic_store(&is_full, false);
  even_os.write = write_unless_full;
  assert_int_equal(even_timeline_open(ring_fd, 0, path, &timeline), EVEN_OK);
  atomic_store(&is_full, true);
  write_records(10);
  assert_int_equal(even_timeline_close(timeline), EVEN_ERR_NO_SPACE);
  assert_non_null(strstr(even_error_last()->what, path));
  assert_int_equal(even_timeline_open(ring_fd, 0, path, &timeline), EVEN_ERR_NO_SPACE);
  assert_null(timeline);
}

static int allocations_left;
static void *allocate_some(size_t bytes) {
  return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

static void want_of_memory_is_reported(void **state) {
  even_timeline *timeline = NULL;
  (void)state;
  for (int left = 0; left < 4; left++) {
    even_allocator_current.allocate = allocate_some;
    allocations_left = left;
    even_status status = even_timeline_open(ring_fd, 0, path, &timeline);
    even_allocator_current = (even_allocator){malloc, realloc, free};
    if (status == EVEN_OK) {
      assert_int_equal(even_timeline_close(timeline), EVEN_OK);
      return;
    }
    assert_int_equal(status, EVEN_ERR_MEMORY);
    assert_null(timeline);
  }
}

static void bad_places_are_refused(void **state) {
  even_timeline *timeline = NULL;
  (void)state;
  assert_int_equal(even_timeline_open(ring_fd, 0, "/nowhere/at/all.json", &timeline), EVEN_ERR_NOT_FOUND);
  assert_int_equal(even_timeline_open(-1, 0, path, &timeline), EVEN_ERR_SYSTEM);
  assert_null(timeline);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(all_that_was_recorded_is_in_the_file, set_up, tear_down),
      cmocka_unit_test_setup_teardown(what_comes_too_fast_is_counted, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_full_disk_is_told_at_the_end_and_stops_nobody, set_up, tear_down),
      cmocka_unit_test_setup_teardown(want_of_memory_is_reported, set_up, tear_down),
      cmocka_unit_test_setup_teardown(bad_places_are_refused, set_up, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
