/* What a process may take of memory, on invented hosts in a folder; and what this one holds. */
#include "os/memory_use.h"

#include "support/fault.h"
#include "support/folder.h"
#include "support/sanitizer.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define MIB (UINT64_C(1) << 20)

/* Sanitizers have an allocator of their own, which keeps what was freed. */
#define OTHER_ALLOCATOR (EVEN_TEST_THREADS_WATCHED || EVEN_TEST_MEMORY_WATCHED)

static char root[FOLDER_BYTES];

static void write_file(const char *path, const char *text) {
  folder_write(root, path, text);
}

static int make_root(void **state) {
  (void)state;
  return folder_make("memory", root);
}

static int remove_root(void **state) {
  (void)state;
  fault_reset();
  return folder_remove(root);
}

static void a_host(void) {
  write_file("proc/self/status", "Name:\trank\nVmPeak:\t 9000 kB\nVmHWM:\t    3072 kB\nVmRSS:\t    2048 kB\n");
  write_file("proc/meminfo", "MemTotal:  102400 kB\nMemFree:  100 kB\nMemAvailable:  51200 kB\n");
}

static even_memory_use use_here(void) {
  even_memory_place place;
  even_memory_use use;
  assert_int_equal(even_memory_place_find(root, &place), EVEN_OK);
  assert_int_equal(even_memory_use_read(&place, &use), EVEN_OK);
  return use;
}

static void without_groups_the_host_counts(void **state) {
  (void)state;
  a_host();
  even_memory_use use = use_here();
  assert_true(use.resident_bytes == 2 * MIB && use.peak_bytes == 3 * MIB);
  assert_true(use.available_bytes == 50 * MIB && use.limit_bytes == 100 * MIB);
  assert_string_equal(use.limited_by, "");
}

static void much_memory_is_asked_for(void **state) {
  (void)state;
  even_memory_place place;
  a_host();
  assert_int_equal(even_memory_place_find(root, &place), EVEN_OK);
  const uint64_t most = 50 * MIB - 50 * MIB / 8;
  assert_int_equal(even_memory_ask(&place, most, "a test"), EVEN_OK);
  assert_int_equal(even_memory_ask(&place, most + 1, "a test"), EVEN_ERR_MEMORY);
  assert_non_null(
      strstr(even_error_last()->what, "a test needs 45875201 bytes of memory, and 52428800 are free on host "));
  assert_int_equal(even_memory_ask(NULL, 1, "a test"), EVEN_OK);
  assert_int_equal(even_memory_ask(NULL, UINT64_MAX, "a test"), EVEN_ERR_MEMORY);
}

static void the_tightest_group_of_version_1_counts(void **state) {
  (void)state;
  a_host();
  write_file("proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  write_file("proc/self/cgroup", "4:memory:/job/one\n");
  write_file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write_file("sys/fs/cgroup/memory/memory.usage_in_bytes", "77777777\n");
  write_file("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "41943040\n"); /* 40 MiB */
  write_file("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "33554432\n"); /* 32 MiB, of it 2 of idle files */
  write_file("sys/fs/cgroup/memory/job/memory.stat", "inactive_file 5\ntotal_cache 9\ntotal_inactive_file 2097152\n");
  write_file("sys/fs/cgroup/memory/job/one/memory.limit_in_bytes", "20971520\n"); /* 20 MiB, and only 1 is used */
  write_file("sys/fs/cgroup/memory/job/one/memory.usage_in_bytes", "1048576\n");
  even_memory_use use = use_here();
  assert_true(use.available_bytes == 10 * MIB && use.limit_bytes == 40 * MIB);
  assert_string_equal(use.limited_by + strlen(root), "/sys/fs/cgroup/memory/job");
  write_file("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "99999999\n"); /* the limit was lowered */
  assert_true(use_here().available_bytes == 0);
}

static void the_tightest_group_of_version_2_counts(void **state) {
  (void)state;
  a_host();
  write_file("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  write_file("proc/self/cgroup", "0::/job/rank-1\n");
  write_file("sys/fs/cgroup/job/rank-1/cgroup.controllers", "cpu\n"); /* a quota alone: the limit is above it */
  write_file("sys/fs/cgroup/job/memory.max", "20971520\n");
  write_file("sys/fs/cgroup/job/memory.current", "12582912\n");
  write_file("sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file 1048576\n");
  even_memory_use use = use_here();
  assert_true(use.available_bytes == 9 * MIB && use.limit_bytes == 20 * MIB);
  assert_string_equal(use.limited_by + strlen(root), "/sys/fs/cgroup/job");
  write_file("sys/fs/cgroup/job/memory.high", "16777216\n"); /* above 16 MiB it is slowed down, which kills nobody */
  use = use_here();
  assert_true(use.available_bytes == 9 * MIB && use.limit_bytes == 20 * MIB);
  assert_true(use.free_part == 0.3125);
  write_file("sys/fs/cgroup/job/memory.high", "max\n");
  assert_true(use_here().free_part == 0.45);
  write_file("sys/fs/cgroup/job/memory.max", "max\n");
  assert_true(use_here().available_bytes == 50 * MIB);
}

/* Of the host half is free; a group that has more free bytes may have a smaller part, and one with fewer a larger. */
static void the_least_free_part_is_of_any_limit(void **state) {
  (void)state;
  a_host();
  assert_true(use_here().free_part == 0.5);
  write_file("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  write_file("proc/self/cgroup", "0::/job\n");
  write_file("sys/fs/cgroup/job/cgroup.controllers", "memory\n");
  write_file("sys/fs/cgroup/job/memory.max", "20971520\n"); /* 20 MiB, of which 16 are taken: */
  write_file("sys/fs/cgroup/job/memory.current", "16777216\n");
  write_file("sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file 1048576\nactive_file 3145728\n"); /* 4 by files */
  even_memory_use use = use_here();
  assert_true(use.free_part == 0.4 && use.available_bytes == 5 * MIB);
  write_file("sys/fs/cgroup/job/memory.stat", "anon 5\nactive_file 12582912\n");
  use = use_here();
  assert_true(use.free_part == 0.5 && use.available_bytes == 4 * MIB); /* the host's, as more of the group's is */
}

static void what_proc_does_not_say_is_an_error(void **state) {
  (void)state;
  even_memory_place place;
  even_memory_use use;
  char path[2 * EVEN_CGROUP_PATH];
  a_host();
  assert_int_equal(even_memory_place_find(root, &place), EVEN_OK);
  write_file("proc/self/status", "Name:\tkernel thread\n");
  assert_int_equal(even_memory_use_read(&place, &use), EVEN_ERR_INPUT);
  a_host();
  write_file("proc/meminfo", "MemTotal:  102400 kB\n");
  assert_int_equal(even_memory_use_read(&place, &use), EVEN_ERR_INPUT);
  memset(path, 'x', sizeof path);
  path[sizeof path - 1] = '\0';
  assert_int_equal(even_memory_place_find(path, &place), EVEN_ERR_OVERFLOW);
}

/* This process: a peak stays when its memory is given back, until a new one begins. */
static void the_peak_of_this_process_is_seen(void **state) {
  (void)state;
  even_memory_place place;
  even_memory_use before;
  even_memory_use held;
  even_memory_use after;
  const size_t bytes = (size_t)(64 * MIB);
  assert_int_equal(even_memory_place_find("", &place), EVEN_OK);
  assert_int_equal(even_memory_use_read(&place, &before), EVEN_OK);
  assert_true(before.resident_bytes > 0 && before.peak_bytes >= before.resident_bytes);
  assert_true(before.limit_bytes > 0 && before.available_bytes <= before.limit_bytes);
  volatile char *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(block != MAP_FAILED);
  for (size_t at = 0; at < bytes; at += 1024) {
    block[at] = 1;
  }
  assert_int_equal(even_memory_use_read(&place, &held), EVEN_OK);
  assert_true(held.peak_bytes >= before.resident_bytes + bytes / 2);
  assert_int_equal(munmap((void *)block, bytes), 0);
  assert_int_equal(even_memory_use_read(&place, &after), EVEN_OK);
  assert_true(after.peak_bytes >= held.resident_bytes - bytes / 4); /* the kernel counts in steps of some pages */
  assert_true(after.resident_bytes <= held.resident_bytes - bytes / 2);
  if (even_memory_peak_reset(&place)) {
    assert_int_equal(even_memory_use_read(&place, &after), EVEN_OK);
    assert_true(after.peak_bytes <= held.resident_bytes - bytes / 2);
  }
}

/* Many small blocks between others that stay: the allocator keeps their pages until it is asked. */
static void what_the_allocator_keeps_is_given_back(void **state) {
  (void)state;
  enum { BLOCKS = 1 << 14, BYTES = 1 << 12 };
  static char *blocks[BLOCKS];
  even_memory_place place;
  even_memory_use held;
  even_memory_use after;
  assert_int_equal(even_memory_place_find("", &place), EVEN_OK);
  for (int i = 0; i < BLOCKS; i++) {
    blocks[i] = malloc(BYTES);
    assert_non_null(blocks[i]);
    memset(blocks[i], i, BYTES);
  }
  assert_int_equal(even_memory_use_read(&place, &held), EVEN_OK);
  for (int i = 0; i < BLOCKS - 1; i++) { /* the last one keeps the heap's end where it is */
    free(blocks[i]);
  }
  even_memory_give_back();
  assert_int_equal(even_memory_use_read(&place, &after), EVEN_OK);
#if defined(__GLIBC__) && !OTHER_ALLOCATOR
  assert_true(after.resident_bytes + (uint64_t)BLOCKS * BYTES / 2 <= held.resident_bytes);
#endif
  assert_true(blocks[BLOCKS - 1][0] == (char)(BLOCKS - 1));
  free(blocks[BLOCKS - 1]);
}

#if defined(__GLIBC__) && !OTHER_ALLOCATOR
/* Page faults of this process while a block is taken, written to and freed. */
static long faults_of_a_block(size_t bytes) {
  struct rusage before;
  struct rusage after;
  assert_int_equal(getrusage(RUSAGE_SELF, &before), 0);
  volatile char *block = malloc(bytes);
  assert_non_null((void *)(uintptr_t)block);
  for (size_t at = 0; at < bytes; at += 1024) {
    block[at] = 1;
  }
  free((void *)(uintptr_t)block);
  assert_int_equal(getrusage(RUSAGE_SELF, &after), 0);
  return after.ru_minflt - before.ru_minflt;
}
#endif

static void the_allocator_keeps_what_is_freed_while_it_is_told_to(void **state) {
  (void)state;
#if defined(__GLIBC__) && !OTHER_ALLOCATOR
  const size_t bytes = (size_t)(80 * MIB); /* above all that glibc keeps by itself */
  const long pages = (long)(bytes / (size_t)sysconf(_SC_PAGESIZE));
  even_memory_place place;
  even_memory_use held;
  even_memory_use after;
  assert_int_equal(even_memory_place_find("", &place), EVEN_OK);
  assert_true(faults_of_a_block(bytes) >= pages / 2 && faults_of_a_block(bytes) >= pages / 2);
  assert_true(even_memory_keep(true));
  (void)faults_of_a_block(bytes);
  assert_true(faults_of_a_block(bytes) < pages / 100);
  assert_true(even_memory_kept_bytes() >= bytes);
  assert_int_equal(even_memory_use_read(&place, &held), EVEN_OK);
  even_memory_give_back();
  assert_int_equal(even_memory_use_read(&place, &after), EVEN_OK);
  assert_true(after.resident_bytes + bytes / 2 <= held.resident_bytes);
  (void)faults_of_a_block(bytes); /* given back once: it is kept all the same */
  assert_true(faults_of_a_block(bytes) < pages / 100);
  assert_true(even_memory_keep(false));
  even_memory_give_back();
  assert_true(faults_of_a_block(bytes) >= pages / 2 && faults_of_a_block(bytes) >= pages / 2);
#else
  assert_false(even_memory_keep(true));
  assert_true(even_memory_kept_bytes() == 0);
#endif
}

static even_status find_and_read(void *context) {
  even_memory_place place;
  even_memory_use use;
  (void)context;
  even_status status = even_memory_place_find(root, &place);
  status = status == EVEN_OK ? even_memory_use_read(&place, &use) : status;
  (void)even_memory_peak_reset(&place);
  return status;
}

static void survives_every_fault(void **state) {
  (void)state;
  the_tightest_group_of_version_1_counts(state);
  assert_true(fault_each_allocation(find_and_read, NULL) >= 2);
  assert_true(fault_each_os(find_and_read, NULL, EIO) >= 8);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(without_groups_the_host_counts, make_root, remove_root),
      cmocka_unit_test_setup_teardown(much_memory_is_asked_for, make_root, remove_root),
      cmocka_unit_test_setup_teardown(the_tightest_group_of_version_1_counts, make_root, remove_root),
      cmocka_unit_test_setup_teardown(the_tightest_group_of_version_2_counts, make_root, remove_root),
      cmocka_unit_test_setup_teardown(the_least_free_part_is_of_any_limit, make_root, remove_root),
      cmocka_unit_test_setup_teardown(what_proc_does_not_say_is_an_error, make_root, remove_root),
      cmocka_unit_test(the_peak_of_this_process_is_seen),
      cmocka_unit_test(what_the_allocator_keeps_is_given_back),
      cmocka_unit_test(the_allocator_keeps_what_is_freed_while_it_is_told_to),
      cmocka_unit_test_setup_teardown(survives_every_fault, make_root, remove_root),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
