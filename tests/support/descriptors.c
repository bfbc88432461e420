/* The entries of /proc/self/fd. */
#include "support/descriptors.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

int open_descriptors(void) {
  DIR *folder = opendir("/proc/self/fd");
  int count = 0;
  assert_non_null(folder);
  while (readdir(folder) != NULL) {
    count++;
  }
  assert_int_equal(closedir(folder), 0);
  return count;
}
