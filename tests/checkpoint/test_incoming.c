/* A checkpoint that comes file by file: the same bytes under its name, or nothing, whatever fails. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/fail.h"
#include "base/stop.h"
#include "base/text.h"
#include "checkpoint/incoming.h"
#include "checkpoint/scratch.h"
#include "os/calls.h"
#include "os/file.h"
#include "os/pipe.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { MOST = 1 << 20 };

typedef struct coming {
  const char *from;
  const char *to;
  bool replace;
  int altered; /* the file that comes with another byte, -1: none */
  int missing; /* the file that does not come */
} coming;

static even_status read_part(const char *folder, const char *name, even_text *out) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/%s", folder, name);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_file_read(path.data, MOST, out);
  }
  even_text_free(&path);
  return status;
}

static even_status take_file(even_checkpoint_incoming *incoming, const coming *how, size_t file) {
  const char *name = even_checkpoint_incoming_info(incoming)->files[file].name;
  even_text text = EVEN_TEXT_EMPTY;
  int fd = -1;
  even_status status = read_part(how->from, name, &text);
  if (status == EVEN_OK && how->altered == (int)file) {
    text.data[text.length / 2] = (char)(text.data[text.length / 2] ^ 4);
  }
  if (status == EVEN_OK) {
    status = even_checkpoint_incoming_create(incoming, file, &fd);
  }
  if (status == EVEN_OK) {
    status = even_file_write_all(fd, even_text_string(&text), text.length);
  }
  if (status == EVEN_OK) {
    even_checkpoint_incoming_filled(incoming, file, fd);
  } else {
    even_pipe_close(fd);
  }
  even_text_free(&text);
  return status;
}

/* The last file first: their order does not matter. */
static even_status take_files(even_checkpoint_incoming *incoming, const coming *how) {
  for (size_t i = even_checkpoint_incoming_info(incoming)->file_count; i > 0; i--) {
    if (how->missing != (int)i - 1 && even_checkpoint_incoming_info(incoming)->files[i - 1].bytes > 0) {
      EVEN_TRY(take_file(incoming, how, i - 1));
    }
  }
  return EVEN_OK;
}

static even_status come(void *context) {
  const coming *how = context;
  even_checkpoint_incoming *incoming = NULL;
  even_text manifest = EVEN_TEXT_EMPTY;
  even_status status = read_part(how->from, EVEN_CHECKPOINT_MANIFEST, &manifest);
  if (status == EVEN_OK) {
    status = even_checkpoint_incoming_open(how->to, how->replace, manifest.data, manifest.length, &incoming);
  }
  even_text_free(&manifest);
  EVEN_TRY(status);
  status = take_files(incoming, how);
  if (status == EVEN_OK) {
    return even_checkpoint_incoming_commit(incoming);
  }
  even_checkpoint_incoming_abandon(incoming);
  return status;
}

static void assert_same(const char *a, const char *b) {
  even_checkpoint_info info;
  assert_int_equal(even_checkpoint_verify(b, NULL), EVEN_OK);
  assert_int_equal(even_checkpoint_inspect(b, &info), EVEN_OK);
  for (size_t i = 0; i <= info.file_count; i++) {
    const char *name = i == info.file_count ? EVEN_CHECKPOINT_MANIFEST : info.files[i].name;
    even_text one = EVEN_TEXT_EMPTY;
    even_text other = EVEN_TEXT_EMPTY;
    assert_int_equal(read_part(a, name, &one), EVEN_OK);
    assert_int_equal(read_part(b, name, &other), EVEN_OK);
    assert_int_equal(one.length, other.length);
    assert_memory_equal(even_text_string(&one), even_text_string(&other), one.length);
    even_text_free(&one);
    even_text_free(&other);
  }
  even_checkpoint_info_free(&info);
}

/* One with a file of no bytes. */
static void save(const char *folder, int seed) {
  even_checkpoint_tensor tensors[3];
  even_checkpoint_writer *writer = NULL;
  const even_checkpoint_params params = {.size = sizeof params, .folder = folder};
  sample_tensors(tensors, seed);
  const even_checkpoint_file files[] = {
      {.size = sizeof files[0], .name = "model.safetensors", .tensors = tensors, .tensor_count = 3},
      {.size = sizeof files[0], .name = "empty.json", .raw = "", .raw_bytes = 0},
      {.size = sizeof files[0], .name = "index.json", .raw = "{}", .raw_bytes = 2},
  };
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  for (size_t i = 0; i < 3; i++) {
    assert_int_equal(even_checkpoint_writer_add(writer, &files[i]), EVEN_OK);
  }
  assert_int_equal(even_checkpoint_writer_commit(writer, "{\"step\": 7}"), EVEN_OK);
}

static void it_comes_as_it_is_elsewhere(void **state) {
  const coming how = {
      .from = scratch_path("here"), .to = scratch_path("there/runs/step-7"), .altered = -1, .missing = -1};
  (void)state;
  save(how.from, 1);
  int before = open_descriptors();
  assert_int_equal(come((void *)&how), EVEN_OK);
  assert_same(how.from, how.to);
  assert_int_equal(come((void *)&how), EVEN_ERR_IN_USE);
  assert_int_equal(open_descriptors(), before);
  assert_false(scratch_has("there/runs/step-7" EVEN_CHECKPOINT_PARTIAL));
}

static void another_one_gives_way_where_that_is_asked(void **state) {
  coming how = {.from = scratch_path("here"), .to = scratch_path("there"), .altered = -1, .missing = -1};
  (void)state;
  save(how.from, 1);
  save(how.to, 2);
  assert_int_equal(come(&how), EVEN_ERR_IN_USE);
  how.replace = true;
  how.altered = 2;
  assert_int_equal(come(&how), EVEN_ERR_CORRUPT);
  assert_int_equal(even_checkpoint_verify(how.to, NULL), EVEN_OK);
  how.altered = -1;
  assert_int_equal(come(&how), EVEN_OK);
  assert_same(how.from, how.to);
  assert_int_equal(scratch_entries(), 2);
}

static char other_from[128];
static char other_to[128];
static int folder_syncs;

/* When the last of the files is synced, and nothing had its name so far, another checkpoint gets it. */
static int sync_and_come_first(int fd) {
  struct stat facts;
  if (fstat(fd, &facts) == 0 && S_ISDIR(facts.st_mode) && --folder_syncs == 0) {
    assert_int_equal(rename(other_from, other_to), 0);
  }
  return even_os_real.fsync(fd);
}

/* However late it comes. */
static void one_that_came_first_stays(void **state) {
  coming how = {.from = scratch_path("here"), .to = other_to, .altered = -1, .missing = -1};
  (void)state;
  (void)snprintf(other_from, sizeof other_from, "%s", scratch_path("other"));
  (void)snprintf(other_to, sizeof other_to, "%s", scratch_path("there"));
  save(how.from, 1);
  for (int at = 1; at <= 2; at++) {
    save(other_from, 2);
    folder_syncs = at;
    even_os.fsync = sync_and_come_first;
    assert_int_equal(come(&how), EVEN_ERR_IN_USE);
    even_os.fsync = even_os_real.fsync;
    assert_int_equal(folder_syncs, 0);
    assert_int_equal(even_checkpoint_verify(other_to, NULL), EVEN_OK);
    assert_int_equal(even_checkpoint_remove(other_to), EVEN_OK);
    assert_int_equal(scratch_entries(), 1);
  }
}

static bool at_once(void) {
  return true;
}

static void who_asks_ends_it_early(void **state) {
  const coming how = {.from = scratch_path("here"), .to = scratch_path("there"), .altered = -1, .missing = -1};
  (void)state;
  save(how.from, 1);
  even_stop_when(at_once);
  even_status status = come((void *)&how);
  even_stop_when(NULL);
  assert_int_equal(status, EVEN_ERR_INTERRUPTED);
  assert_int_equal(scratch_entries(), 1);
}

static void what_is_altered_or_missing_leaves_nothing(void **state) {
  coming how = {.from = scratch_path("here"), .to = scratch_path("there"), .altered = -1, .missing = -1};
  (void)state;
  save(how.from, 1);
  for (int file = 0; file < 3; file += 2) {
    how.altered = file;
    assert_int_equal(come(&how), EVEN_ERR_CORRUPT);
    how.altered = -1;
    how.missing = file;
    assert_int_equal(come(&how), EVEN_ERR_STATE);
    how.missing = -1;
    assert_int_equal(scratch_entries(), 1);
  }
}

static void what_is_no_manifest_is_refused(void **state) {
  even_checkpoint_incoming *incoming = NULL;
  even_text manifest = EVEN_TEXT_EMPTY;
  const char *to = scratch_path("there");
  int fd = -1;
  (void)state;
  save(scratch_path("here"), 1);
  assert_int_equal(even_checkpoint_incoming_open(to, false, "{}", 2, &incoming), EVEN_ERR_CORRUPT);
  assert_int_equal(read_part(scratch_path("here"), EVEN_CHECKPOINT_MANIFEST, &manifest), EVEN_OK);
  manifest.data[manifest.length / 2] = (char)(manifest.data[manifest.length / 2] ^ 1);
  assert_int_equal(even_checkpoint_incoming_open(to, false, manifest.data, manifest.length, &incoming),
                   EVEN_ERR_CORRUPT);
  manifest.data[manifest.length / 2] = (char)(manifest.data[manifest.length / 2] ^ 1);
  assert_int_equal(even_checkpoint_incoming_open("step-7", false, manifest.data, manifest.length, &incoming),
                   EVEN_ERR_ARGUMENT);
  assert_int_equal(even_checkpoint_incoming_open(to, false, manifest.data, manifest.length, &incoming), EVEN_OK);
  assert_int_equal(even_checkpoint_incoming_create(incoming, 3, &fd), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_checkpoint_incoming_create(incoming, 0, &fd), EVEN_OK);
  even_pipe_close(fd);
  assert_int_equal(even_checkpoint_incoming_create(incoming, 0, &fd), EVEN_ERR_STATE);
  even_checkpoint_incoming_abandon(incoming);
  even_text_free(&manifest);
  assert_int_equal(scratch_entries(), 1);
}

/* Whole, or not there at all. */
static long each_fault(coming *how, bool of_memory) {
  bool hit = true;
  long nth = 0;
  while (hit) {
    fault_reset();
    fault_allocation(of_memory ? ++nth : 0);
    fault_os_any(of_memory ? 0 : ++nth, EIO);
    even_status status = come(how);
    hit = (of_memory ? fault_allocations() : fault_os_calls(FAULT_CALL_COUNT)) >= nth;
    assert_int_equal(fault_live_blocks(), 0);
    fault_reset();
    assert_true(hit || status == EVEN_OK);
    if (scratch_has("there")) {
      assert_same(how->from, how->to);
      assert_int_equal(even_checkpoint_remove(how->to), EVEN_OK);
    } else {
      assert_int_not_equal(status, EVEN_OK);
    }
  }
  return nth;
}

static void each_fault_leaves_it_whole_or_not_there(void **state) {
  char from[128];
  char to[128];
  coming how = {.from = from, .to = to, .altered = -1, .missing = -1};
  (void)state;
  (void)snprintf(from, sizeof from, "%s", scratch_path("here"));
  (void)snprintf(to, sizeof to, "%s", scratch_path("there"));
  save(how.from, 1);
  int before = open_descriptors();
  assert_true(each_fault(&how, false) > 30);
  assert_true(each_fault(&how, true) > 10);
  assert_int_equal(come(&how), EVEN_OK); /* what faults left is swept */
  assert_int_equal(scratch_entries(), 2);
  assert_int_equal(open_descriptors(), before);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(it_comes_as_it_is_elsewhere, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(another_one_gives_way_where_that_is_asked, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(one_that_came_first_stays, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(who_asks_ends_it_early, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(what_is_altered_or_missing_leaves_nothing, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(what_is_no_manifest_is_refused, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(each_fault_leaves_it_whole_or_not_there, scratch_make, scratch_remove),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
