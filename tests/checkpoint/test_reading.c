/* Reading files back in one pass: every byte comes to its place, and no altered one comes through. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/fail.h"
#include "checkpoint/items.h"
#include "checkpoint/scratch.h"
#include "checkpoint/stream_copy.h"
#include "os/calls.h"
#include "os/stream.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <evenstep/checkpoint.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

enum { FILE_BYTES = 3 * 1000 * 1000 + 17, CHUNK = 600 * 1000 };

static unsigned char content[FILE_BYTES];
static unsigned char found[FILE_BYTES];
static uint64_t *sums;
static size_t sum_count;

static int make(void **state) {
  uint64_t bytes = 0;
  if (scratch_make(state) != 0) {
    return -1;
  }
  for (size_t i = 0; i < FILE_BYTES; i++) {
    content[i] = (unsigned char)(i * 2654435761u >> 11);
  }
  memset(found, 0, sizeof found);
  FILE *file = fopen(scratch_path("file"), "wb");
  if (file == NULL || fwrite(content, 1, FILE_BYTES, file) != FILE_BYTES || fclose(file) != 0) {
    return -1;
  }
  return even_checkpoint_file_checksums(scratch_path("file"), CHUNK, &sums, &sum_count, &bytes) == EVEN_OK ? 0 : -1;
}

static int end(void **state) {
  even_checkpoint_free(sums);
  return scratch_remove(state);
}

static even_checkpoint_reading reading_of(const even_checkpoint_place *places, size_t count) {
  return (even_checkpoint_reading){.size = sizeof(even_checkpoint_reading),
                                   .path = scratch_path("file"),
                                   .bytes = FILE_BYTES,
                                   .chunk_bytes = CHUNK,
                                   .sums = sums,
                                   .sum_count = sum_count,
                                   .places = places,
                                   .place_count = count};
}

static even_status read_to(const even_checkpoint_place *places, size_t count) {
  const even_checkpoint_reading reading = reading_of(places, count);
  return even_checkpoint_file_read(&reading);
}

static void alter(size_t at, unsigned char by) {
  FILE *file = fopen(scratch_path("file"), "r+b");
  assert_non_null(file);
  assert_int_equal(fseek(file, (long)at, SEEK_SET), 0);
  assert_int_equal(fputc(content[at] ^ by, file), content[at] ^ by);
  assert_int_equal(fclose(file), 0);
}

/* Places of every size, with and without gaps, over the edges of windows and chunks. */
static void bytes_come_to_their_places(void **state) {
  static const size_t sizes[] = {0, 1, 7, 300000, 262144, 1, 0, 900001, 64, 1048576};
  even_checkpoint_place places[sizeof sizes / sizeof sizes[0]];
  size_t count = sizeof sizes / sizeof sizes[0];
  (void)state;
  for (size_t gap = 0; gap < 20000; gap = gap * 3 + 5) {
    uint64_t at = gap;
    memset(found, 0, sizeof found);
    for (size_t i = 0; i < count; i++) {
      places[i] = (even_checkpoint_place){at, sizes[i], found + at};
      at += sizes[i] + gap;
    }
    assert_int_equal(read_to(places, count), EVEN_OK);
    for (size_t i = 0; i < count; i++) {
      assert_memory_equal(found + places[i].begin, content + places[i].begin, places[i].bytes);
      if (gap > 0) {
        assert_int_equal(found[places[i].begin + places[i].bytes], 0); /* nothing beside */
      }
    }
  }
  assert_int_equal(read_to(NULL, 0), EVEN_OK);
}

static void an_altered_byte_anywhere_is_found(void **state) {
  (void)state;
  const even_checkpoint_place place = {100, 50, found};
  static const size_t ats[] = {0, 120, CHUNK - 1, CHUNK, 2 * CHUNK + 77, FILE_BYTES - 1};
  for (size_t i = 0; i < sizeof ats / sizeof ats[0]; i++) {
    char words[64];
    alter(ats[i], 0x10);
    assert_int_equal(read_to(&place, 1), EVEN_ERR_CORRUPT);
    (void)snprintf(words, sizeof words, "chunk %zu of file (bytes %zu", ats[i] / CHUNK, ats[i] / CHUNK * CHUNK);
    assert_non_null(strstr(even_error_last()->what, words));
    alter(ats[i], 0);
  }
  alter(FILE_BYTES - 1, 1);
  alter(3, 1);
  assert_int_equal(read_to(&place, 1), EVEN_ERR_CORRUPT); /* of two, the first is told, whoever found his earlier */
  assert_non_null(strstr(even_error_last()->what, "chunk 0 "));
}

static void what_nobody_asks_for_is_left_alone(void **state) {
  (void)state;
  const even_checkpoint_place places[] = {
      {5, 0, found}, {CHUNK + 7, 0, found}, {2 * CHUNK + 9, CHUNK, found + 2 * CHUNK + 9}};
  even_checkpoint_reading reading = reading_of(places, 3);
  reading.only_places = true;
  static const size_t ats[] = {0, CHUNK + 7, 4 * CHUNK, FILE_BYTES - 1};
  for (size_t i = 0; i < sizeof ats / sizeof ats[0]; i++) {
    alter(ats[i], 1); /* all of them, by and by */
  }
  assert_int_equal(even_checkpoint_file_read(&reading), EVEN_OK);
  assert_memory_equal(found + 2 * CHUNK + 9, content + 2 * CHUNK + 9, CHUNK);
  alter(3 * CHUNK + 9, 1); /* behind the place, in its chunk */
  assert_int_equal(even_checkpoint_file_read(&reading), EVEN_ERR_CORRUPT);
  assert_non_null(strstr(even_error_last()->what, "chunk 3 "));
  reading.place_count = 0;
  assert_int_equal(even_checkpoint_file_read(&reading), EVEN_OK);
}

static void another_size_is_told(void **state) {
  (void)state;
  FILE *file = fopen(scratch_path("file"), "ab");
  assert_int_equal(fputc(1, file), 1);
  assert_int_equal(fclose(file), 0);
  assert_int_equal(read_to(NULL, 0), EVEN_ERR_CORRUPT);
  assert_non_null(strstr(even_error_last()->what, "file is too long: 3000018 of 3000017 bytes"));
  file = fopen(scratch_path("file"), "wb");
  assert_int_equal(fclose(file), 0);
  assert_int_equal(read_to(NULL, 0), EVEN_ERR_CORRUPT);
  assert_non_null(strstr(even_error_last()->what, "file is truncated: 0 of 3000017 bytes"));
}

static void what_makes_no_sense_is_refused(void **state) {
  (void)state;
  const even_checkpoint_place twice[] = {{0, 10, found}, {9, 10, found}};
  const even_checkpoint_place beyond = {FILE_BYTES - 5, 6, found};
  const even_checkpoint_place far = {UINT64_MAX - 2, 10, found};
  const even_checkpoint_place nowhere = {0, 1, NULL};
  assert_int_equal(read_to(twice, 2), EVEN_ERR_ARGUMENT);
  assert_int_equal(read_to(&beyond, 1), EVEN_ERR_ARGUMENT);
  assert_int_equal(read_to(&far, 1), EVEN_ERR_ARGUMENT);
  assert_int_equal(read_to(&nowhere, 1), EVEN_ERR_ARGUMENT);
  even_checkpoint_reading reading = {.size = sizeof reading, .path = scratch_path("file"), .bytes = FILE_BYTES};
  assert_int_equal(even_checkpoint_file_read(&reading), EVEN_ERR_ARGUMENT); /* chunks of 0 bytes */
  reading.chunk_bytes = CHUNK;
  assert_int_equal(even_checkpoint_file_read(&reading), EVEN_ERR_ARGUMENT); /* no sums */
  reading = (even_checkpoint_reading){.size = sizeof reading, .path = scratch_path("none"), .chunk_bytes = 1};
  assert_int_equal(even_checkpoint_file_read(&reading), EVEN_ERR_NOT_FOUND);
}

/* Each a range of `content` in a file of its own; more of them than are open at a time. */
enum { SEVERAL = 70, RANGE = 40001, RANGE_CHUNK = 9000 };

typedef struct range_file {
  char path[128];
  uint64_t *sums;
  size_t count;
  even_checkpoint_place place;
} range_file;

static range_file ranges[SEVERAL];

static void write_range(size_t i, unsigned char by) {
  FILE *file = fopen(ranges[i].path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(content + i * RANGE, 1, RANGE, file), RANGE);
  assert_int_equal(fseek(file, 20000, SEEK_SET), 0);
  assert_int_equal(fputc(content[i * RANGE + 20000] ^ by, file), content[i * RANGE + 20000] ^ by);
  assert_int_equal(fclose(file), 0);
}

static void several_files_are_read_side_by_side(void **state) {
  even_checkpoint_reading readings[SEVERAL];
  uint64_t bytes = 0;
  (void)state;
  for (size_t i = 0; i < SEVERAL; i++) {
    (void)snprintf(ranges[i].path, sizeof ranges[i].path, "%s-%zu", scratch_path("range"), i);
    write_range(i, 0);
    assert_int_equal(
        even_checkpoint_file_checksums(ranges[i].path, RANGE_CHUNK, &ranges[i].sums, &ranges[i].count, &bytes),
        EVEN_OK);
    ranges[i].place = (even_checkpoint_place){.begin = 1, .bytes = RANGE - 1, .data = found + i * RANGE + 1};
    readings[i] = (even_checkpoint_reading){.size = sizeof readings[i],
                                            .path = ranges[i].path,
                                            .bytes = RANGE,
                                            .chunk_bytes = RANGE_CHUNK,
                                            .sums = ranges[i].sums,
                                            .sum_count = ranges[i].count,
                                            .places = &ranges[i].place,
                                            .place_count = 1};
  }
  assert_int_equal(even_checkpoint_files_read(readings, SEVERAL), EVEN_OK);
  for (size_t i = 0; i < SEVERAL; i++) {
    assert_int_equal(found[i * RANGE], 0);
    assert_memory_equal(found + i * RANGE + 1, content + i * RANGE + 1, RANGE - 1);
  }
  assert_int_equal(even_checkpoint_files_read(readings, 0), EVEN_OK);
  static const size_t damaged[] = {69, 33, 31, 7, 2}; /* of several the first is told */
  for (size_t i = 0; i < sizeof damaged / sizeof damaged[0]; i++) {
    char words[64];
    write_range(damaged[i], 4);
    assert_int_equal(even_checkpoint_files_read(readings, SEVERAL), EVEN_ERR_CORRUPT);
    (void)snprintf(words, sizeof words, "chunk 2 of range-%zu (bytes 18000", damaged[i]);
    assert_non_null(strstr(even_error_last()->what, words));
  }
  readings[69].place_count = 2; /* nothing is read before all makes sense */
  readings[69].places = (const even_checkpoint_place[]){{0, 10, found}, {9, 10, found}};
  assert_int_equal(even_checkpoint_files_read(readings, SEVERAL), EVEN_ERR_ARGUMENT);
  assert_int_equal(unlink(ranges[1].path), 0);
  assert_int_equal(even_checkpoint_files_read(readings, 3), EVEN_ERR_NOT_FOUND);
  for (size_t i = 0; i < SEVERAL; i++) {
    even_checkpoint_free(ranges[i].sums);
  }
}

static even_status read_all(void *context) {
  const even_checkpoint_place place = {0, FILE_BYTES, found};
  (void)context;
  return read_to(&place, 1);
}

/* One of three may fail while others are open: none stays so. */
static even_status read_three(void *context) {
  const even_checkpoint_place place = {0, FILE_BYTES, found};
  const even_checkpoint_reading readings[] = {reading_of(NULL, 0), reading_of(&place, 1), reading_of(NULL, 0)};
  int descriptors = open_descriptors();
  (void)context;
  even_status status = even_checkpoint_files_read(readings, 3);
  assert_int_equal(open_descriptors(), descriptors);
  return status;
}

static void every_call_may_fail(void **state) {
  (void)state;
  assert_true(fault_each_os(read_all, NULL, EIO) > 5);
  assert_true(fault_each_allocation(read_all, NULL) > 2);
  assert_true(fault_each_os(read_three, NULL, EIO) > 15);
  assert_true(fault_each_allocation(read_three, NULL) > 2);
  fault_os_short(70001);
  assert_int_equal(read_all(NULL), EVEN_OK);
  fault_reset();
  assert_memory_equal(found, content, FILE_BYTES);
}

/* ---- the threads ---- */
typedef struct counted {
  atomic_int done[100];
  atomic_int opened;
  size_t fails[2]; /* items, by the status that they fail with */
} counted;

static even_status count_open(void *context, void **own) {
  *own = context;
  (void)atomic_fetch_add(&((counted *)context)->opened, 1);
  return EVEN_OK;
}

static void count_close(void *own) {
  (void)atomic_fetch_sub(&((counted *)own)->opened, 1);
}

static even_status count_item(void *context, void *own, size_t item) {
  counted *counts = context;
  assert_ptr_equal(context, own);
  (void)atomic_fetch_add(&counts->done[item], 1);
  if (item == counts->fails[0] || item == counts->fails[1]) {
    return even_fail(EVEN_ERR_CORRUPT, "item %zu", item);
  }
  return EVEN_OK;
}

static void each_item_is_done_once(void **state) {
  (void)state;
  for (size_t most = 1; most <= EVEN_ITEMS_MOST_THREADS + 1; most++) {
    counted counts = {.fails = {1000, 1000}};
    const even_items_job job = {.count = 100,
                                .most = most,
                                .context = &counts,
                                .open = count_open,
                                .close = count_close,
                                .work = count_item,
                                .what = "items are counted"};
    assert_int_equal(even_items_run(&job), EVEN_OK);
    for (size_t i = 0; i < 100; i++) {
      assert_int_equal(atomic_load(&counts.done[i]), 1);
    }
    assert_int_equal(atomic_load(&counts.opened), 0);
    counts = (counted){.fails = {40, 41}};
    assert_int_equal(even_items_run(&job), EVEN_ERR_CORRUPT);
    assert_string_equal(even_error_last()->what, "item 40");
    assert_int_equal(atomic_load(&counts.opened), 0);
  }
}

/* ---- past the page cache ---- */

static atomic_int direct_reads;
static bool direct_refused;
static atomic_bool misaligned;

static int nothing_cached(void *address, size_t bytes, unsigned char *pages) {
  (void)address;
  memset(pages, 0, (bytes + 4095) / 4096);
  return 0;
}

static int on_ext4(int fd, struct statfs *out) {
  int failed = fstatfs(fd, out);
  out->f_type = 0xEF53;
  return failed;
}

static ssize_t counted_pread(int fd, void *buffer, size_t bytes, off_t offset) {
  if ((fcntl(fd, F_GETFL) & O_DIRECT) != 0) {
    (void)atomic_fetch_add(&direct_reads, 1);
    if (((uintptr_t)buffer | bytes | (uint64_t)offset) % 4096 != 0) {
      atomic_store(&misaligned, true);
    }
    if (direct_refused) {
      errno = EINVAL;
      return -1;
    }
  }
  return pread(fd, buffer, bytes, offset);
}

/* All of the file, in chunks of whole blocks, to `to`. */
static even_status read_whole(void *to) {
  enum { BLOCKS = 1 << 20 };
  uint64_t bytes = 0;
  uint64_t *own = NULL;
  size_t count = 0;
  const even_checkpoint_place place = {0, FILE_BYTES, to};
  assert_int_equal(even_checkpoint_file_checksums(scratch_path("file"), BLOCKS, &own, &count, &bytes), EVEN_OK);
  const even_checkpoint_reading reading = {.size = sizeof reading,
                                           .path = scratch_path("file"),
                                           .bytes = FILE_BYTES,
                                           .chunk_bytes = BLOCKS,
                                           .sums = own,
                                           .sum_count = count,
                                           .places = &place,
                                           .place_count = 1};
  atomic_store(&direct_reads, 0);
  even_status status = even_checkpoint_file_read(&reading);
  even_checkpoint_free(own);
  return status;
}

static bool has_direct(void) {
  int fd = open(scratch_path("file"), O_RDONLY | O_DIRECT);
  if (fd >= 0) {
    (void)close(fd);
  }
  return fd >= 0;
}

/* Whole blocks do, to any memory; the rest of the file does not, nor what the page cache has. */
static void what_is_not_cached_comes_past_the_cache(void **state) {
  unsigned char *block = aligned_alloc(4096, (FILE_BYTES / 4096 + 2) * 4096);
  bool cached = false;
  (void)state;
  assert_non_null(block);
  even_os.fstatfs = on_ext4;
  even_os.pread = counted_pread;
  assert_int_equal(even_checkpoint_file_is_cached(scratch_path("file"), &cached), EVEN_OK);
  assert_true(cached); /* it was just written */
  assert_int_equal(read_whole(block), EVEN_OK);
  assert_int_equal(atomic_load(&direct_reads), 0);
  even_os.mincore = nothing_cached;
  assert_int_equal(even_checkpoint_file_is_cached(scratch_path("file"), &cached), EVEN_OK);
  assert_int_equal(cached, !has_direct());
  for (size_t shift = 0; shift < 2; shift++) { /* memory that suits the device, and such that does not */
    for (int refused = 0; refused < 2; refused++) {
      direct_refused = refused == 1;
      memset(block, 0, FILE_BYTES + shift);
      assert_int_equal(read_whole(block + shift), EVEN_OK);
      assert_memory_equal(block + shift, content, FILE_BYTES);
      assert_int_equal(atomic_load(&direct_reads) > 0, has_direct());
    }
  }
  assert_false(atomic_load(&misaligned));
  free(block);
}

static long large_pages(int name) {
  return name == _SC_PAGESIZE ? 65536 : sysconf(name);
}

static int large_whole_pages(void *address, size_t bytes, unsigned char *pages) {
  static uintptr_t first; /* a file's map begins at a page, of whatever size */
  first = first == 0 ? (uintptr_t)address : first;
  if (((uintptr_t)address - first) % 65536 != 0) {
    errno = EINVAL;
    return -1;
  }
  memset(pages, 1, (bytes + 65535) / 65536); /* what lies beyond is not written to */
  pages[0] = (uintptr_t)address == first;
  return 0;
}

/* Where pages are larger than the blocks of a disk, the page that holds a block is asked for. */
static void larger_pages_are_looked_at_whole(void **state) {
  even_input input;
  (void)state;
  even_os.fstatfs = on_ext4;
  even_os.sysconf = large_pages;
  even_os.mincore = large_whole_pages;
  assert_int_equal(even_input_open(scratch_path("file"), &input), EVEN_OK);
  even_input_go_direct(&input);
  if (has_direct()) {
    assert_non_null(input.map);
    assert_true(even_input_is_cached(&input, 0, 3 * 65536));
    assert_true(even_input_is_cached(&input, 8192, 4096));
    assert_false(even_input_is_cached(&input, 65536 + 8192, 4096));
  }
  even_input_close(&input);
}

/* Copies of any size, many at a time. */
static void blocks_are_moved_whole(void **state) {
  even_checkpoint_move moves[4] = {{content, found, 1},
                                   {content + 1, found + 1, (1 << 20) + 3},
                                   {NULL, NULL, 0},
                                   {content + (1 << 20) + 4, found + (1 << 20) + 4, FILE_BYTES - (1 << 20) - 4}};
  (void)state;
  assert_int_equal(even_checkpoint_bytes_move(moves, 4), EVEN_OK);
  assert_memory_equal(found, content, FILE_BYTES);
  assert_int_equal(even_checkpoint_bytes_move(moves, 0), EVEN_OK);
}

/* Of any size, at any place in a line, and nothing beside. */
static void streams_copy_what_they_are_given(void **state) {
  (void)state;
  for (size_t bytes = 0; bytes < 200000; bytes = bytes * 3 / 2 + 1) {
    for (size_t shift = 0; shift < 70; shift += 23) {
      memset(found, 0, bytes + 200);
      even_stream_copy(found + 64 + shift, content + 2 * shift, bytes);
      assert_memory_equal(found + 64 + shift, content + 2 * shift, bytes);
      assert_int_equal(found[63 + shift], 0);
      assert_int_equal(found[64 + shift + bytes], 0);
    }
  }
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, make, end)
  const struct CMUnitTest tests[] = {
      CASE(bytes_come_to_their_places),
      CASE(an_altered_byte_anywhere_is_found),
      CASE(what_nobody_asks_for_is_left_alone),
      CASE(another_size_is_told),
      CASE(what_makes_no_sense_is_refused),
      CASE(several_files_are_read_side_by_side),
      CASE(what_is_not_cached_comes_past_the_cache),
      CASE(larger_pages_are_looked_at_whole),
      CASE(blocks_are_moved_whole),
      CASE(streams_copy_what_they_are_given),
      CASE(every_call_may_fail),
      CASE(each_item_is_done_once),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
