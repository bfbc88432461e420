/* Names, disks, interfaces and limits of this host; libraries opened at run time; scratch files past the cache. */
#include "os/direct_file.h"
#include "os/features.h"
#include "os/host.h"
#include "os/library.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#include <cmocka.h>

#include "support/fault.h"

static int teardown(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

static void names_are_the_kernels(void **state) {
  even_host_names names;
  struct utsname real;
  (void)state;
  assert_int_equal(even_host_names_read(&names), EVEN_OK);
  assert_int_equal(uname(&real), 0);
  assert_string_equal(names.kernel, real.release);
  assert_string_equal(names.architecture, real.machine);
  fault_os(FAULT_uname, 1, EFAULT);
  assert_int_equal(even_host_names_read(&names), EVEN_ERR_SYSTEM);
}

static void disk_of_a_folder(void **state) {
  even_disk disk;
  (void)state;
  assert_int_equal(even_disk_read("/proc", &disk), EVEN_OK);
  assert_string_equal(disk.filesystem, "proc");
  assert_string_equal(disk.mount, "/proc");
  assert_int_equal(even_disk_read(".", &disk), EVEN_OK);
  assert_true(disk.total_bytes >= disk.free_bytes);
  assert_int_equal(even_disk_read("/nothing/here", &disk), EVEN_ERR_NOT_FOUND);
  fault_os(FAULT_fstat, 1, EIO);
  assert_int_equal(even_disk_read(".", &disk), EVEN_ERR_SYSTEM);
  fault_os(FAULT_statvfs, 1, EACCES);
  assert_int_equal(even_disk_read(".", &disk), EVEN_ERR_PERMISSION);
}

static even_status list_interfaces(void *context) {
  even_interface_list list;
  (void)context;
  even_status status = even_interface_list_read(&list);
  even_interface_list_free(&list);
  return status;
}

static void interfaces_have_the_loopback(void **state) {
  even_interface_list list;
  bool found = false;
  (void)state;
  assert_int_equal(even_interface_list_read(&list), EVEN_OK);
  for (size_t i = 0; i < list.count; i++) {
    found = found || (strcmp(list.items[i].name, "lo") == 0 && list.items[i].loopback);
    for (size_t j = 0; j < i; j++) {
      assert_string_not_equal(list.items[i].name, list.items[j].name);
    }
  }
  assert_true(found);
  even_interface_list_free(&list);
  assert_true(fault_each_allocation(list_interfaces, NULL) > 0);
  fault_os(FAULT_getifaddrs, 1, EMFILE);
  assert_int_equal(list_interfaces(NULL), EVEN_ERR_SYSTEM);
}

static void limit_on_locked_memory(void **state) {
  uint64_t bytes = 1;
  (void)state;
  assert_int_equal(even_host_memlock_bytes(&bytes), EVEN_OK);
  fault_os(FAULT_getrlimit, 1, EPERM);
  assert_int_not_equal(even_host_memlock_bytes(&bytes), EVEN_OK);
}

static void libraries(void **state) {
  even_library library;
  (void)state;
  assert_int_equal(even_library_open("libevenstep-absent.so", &library), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, "libevenstep-absent.so"));
  assert_null(even_library_symbol(&library, "cos"));
  even_library_close(&library);
  assert_int_equal(even_library_open("libm.so.6", &library), EVEN_OK);
  assert_non_null(even_library_symbol(&library, "cos"));
  assert_null(even_library_symbol(&library, "even_absent"));
  even_library_close(&library);
  assert_null(library.handle);
}

static void scratch_file(even_status expected) {
  even_direct_file file;
  char *memory = NULL;
  assert_int_equal(posix_memalign((void **)&memory, EVEN_DIRECT_ALIGNMENT, 8192), 0);
  memset(memory, 7, 8192);
  even_status status = even_direct_file_open(".", &file);
  if (status == EVEN_OK) {
    status = even_direct_file_write(&file, memory, 8192, 4096);
  }
  if (status == EVEN_OK) {
    status = even_direct_file_sync(&file);
  }
  memset(memory, 0, 8192);
  if (status == EVEN_OK) {
    status = even_direct_file_read(&file, memory, 8192, 4096);
  }
  even_direct_file_close(&file);
  assert_int_equal(status, expected);
  assert_int_equal(memory[8191], expected == EVEN_OK ? 7 : 0);
  free(memory);
}

static void scratch_files(void **state) {
  even_direct_file file;
  (void)state;
  scratch_file(EVEN_OK);
  fault_os_short(4096);
  scratch_file(EVEN_OK);
  fault_reset();
  fault_os(FAULT_pwrite, 1, EINTR);
  scratch_file(EVEN_OK);
  fault_os(FAULT_pread, 1, EINTR);
  scratch_file(EVEN_OK);
  fault_os(FAULT_open, 1, EOPNOTSUPP); /* no O_TMPFILE: a name for a moment */
  scratch_file(EVEN_OK);
  fault_os(FAULT_pwrite, 1, ENOSPC);
  scratch_file(EVEN_ERR_NO_SPACE);
  fault_os(FAULT_fsync, 1, EIO);
  scratch_file(EVEN_ERR_SYSTEM);
  fault_os(FAULT_pread, 1, EIO);
  scratch_file(EVEN_ERR_SYSTEM);
  fault_os_from(FAULT_open, 1, EACCES);
  assert_int_equal(even_direct_file_open(".", &file), EVEN_ERR_PERMISSION);
  even_direct_file_close(&file);
}

static void features(void **state) {
  char folder[64] = "?";
  (void)state;
  assert_true(even_feature_shared_memory(folder, sizeof folder));
  assert_string_equal(folder, "");
  fault_os_from(FAULT_memfd_create, 1, ENOSYS);
  assert_true(even_feature_shared_memory(folder, sizeof folder));
  assert_true(folder[0] == '/');
  fault_os_from(FAULT_fallocate, 1, ENOSPC);
  assert_false(even_feature_shared_memory(folder, sizeof folder));
  fault_os(FAULT_pidfd_open, 1, ENOSYS);
  assert_false(even_feature_pidfd());
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(names_are_the_kernels, teardown),
      cmocka_unit_test_teardown(disk_of_a_folder, teardown),
      cmocka_unit_test_teardown(interfaces_have_the_loopback, teardown),
      cmocka_unit_test_teardown(limit_on_locked_memory, teardown),
      cmocka_unit_test_teardown(libraries, teardown),
      cmocka_unit_test_teardown(scratch_files, teardown),
      cmocka_unit_test_teardown(features, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
