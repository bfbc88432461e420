/* Shared segments: one memory behind several mappings, sizes checked, nothing left after a failure. */
#include "os/shared_memory.h"

#include "base/fail.h"
#include "os/calls.h"
#include "support/fault.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static int restore(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

static int open_descriptors(void) {
  int count = 0;
  DIR *folder = opendir("/proc/self/fd");
  assert_non_null(folder);
  while (readdir(folder) != NULL) {
    count++;
  }
  (void)closedir(folder);
  return count;
}

static void two_mappings_are_one_memory(void **state) {
  even_shared_memory mine;
  even_shared_memory theirs;
  (void)state;
  int before = open_descriptors();
  assert_int_equal(even_shared_memory_create("test", 10000, &mine), EVEN_OK);
  assert_int_equal(((char *)mine.address)[9999], 0);
  assert_int_equal(ftruncate(mine.fd, 1), -1); /* a peer that could would kill this process by SIGBUS */
  assert_true((fcntl(mine.fd, F_GETFD) & FD_CLOEXEC) != 0);
  assert_int_equal(even_shared_memory_open_peer(getpid(), mine.fd, &theirs), EVEN_OK);
  assert_int_equal(theirs.bytes, 10000);
  memcpy(mine.address, "hello", 6);
  assert_string_equal(theirs.address, "hello");
  even_shared_memory_close(&mine);
  assert_string_equal(theirs.address, "hello");
  even_shared_memory_close(&theirs);
  even_shared_memory_close(&theirs);
  assert_int_equal(open_descriptors(), before);
}

static void wrong_sizes_and_descriptors_are_refused(void **state) {
  even_shared_memory memory;
  (void)state;
  assert_int_equal(even_shared_memory_create("test", 0, &memory), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_shared_memory_create("test", SIZE_MAX, &memory), EVEN_ERR_ARGUMENT);
  assert_int_equal(memory.fd, -1);
  assert_int_equal(even_shared_memory_adopt(open("/dev/null", O_RDWR | O_CLOEXEC), &memory), EVEN_ERR_INPUT);
  assert_int_equal(memory.fd, -1);
  assert_int_equal(even_shared_memory_adopt(-1, &memory), EVEN_ERR_SYSTEM);
}

static int advised;
static int refuse_advice(void *address, size_t bytes, int advice) {
  (void)address;
  (void)bytes;
  advised = advice;
  errno = EINVAL;
  return -1;
}

static void huge_pages_are_asked_for_and_not_needed(void **state) {
  even_shared_memory memory;
  (void)state;
  even_os.madvise = refuse_advice;
  assert_int_equal(even_shared_memory_create("test", 4096, &memory), EVEN_OK);
  assert_int_equal(advised, 0); /* a small segment would take more memory than it needs */
  even_shared_memory_close(&memory);
  assert_int_equal(even_shared_memory_create("test", (size_t)8 << 20, &memory), EVEN_OK);
  assert_int_equal(advised, MADV_HUGEPAGE);
  ((char *)memory.address)[0] = 1;
  even_shared_memory_close(&memory);
}

static void a_gone_peer_is_said_with_a_fix(void **state) {
  even_shared_memory memory;
  (void)state;
  assert_int_equal(even_shared_memory_open_peer(getpid(), 9999, &memory), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->fix, "one user"));
  even_shared_memory_close(&memory);
}

static even_status create_and_close(void *context) {
  even_shared_memory memory;
  (void)context;
  even_status status = even_shared_memory_create("test", 4096, &memory);
  even_shared_memory_close(&memory);
  return status;
}

static void each_call_may_fail(void **state) {
  (void)state;
  int before = open_descriptors();
  assert_int_equal(fault_each_os(create_and_close, NULL, ENOSPC), 4);
  assert_int_equal(open_descriptors(), before);
  fault_os(FAULT_ftruncate, 1, ENOSPC);
  assert_int_equal(create_and_close(NULL), EVEN_ERR_NO_SPACE);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(two_mappings_are_one_memory, restore),
      cmocka_unit_test_teardown(wrong_sizes_and_descriptors_are_refused, restore),
      cmocka_unit_test_teardown(huge_pages_are_asked_for_and_not_needed, restore),
      cmocka_unit_test_teardown(a_gone_peer_is_said_with_a_fix, restore),
      cmocka_unit_test_teardown(each_call_may_fail, restore),
  };
  return cmocka_run_group_tests_name("os_shared_memory", tests, NULL, NULL);
}
