/* By a folder of its own, which it makes, locks and removes. */
#include "support/locks.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cmocka.h>

bool locks_are_told(const char *parent) {
  char path[256];
  char line[256];
  char wanted[96];
  struct stat facts;
  bool told = false;
  (void)snprintf(path, sizeof path, "%s/probe-of-locks", parent);
  assert_int_equal(mkdir(path, 0777), 0);
  int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  assert_true(fd >= 0);
  assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
  assert_int_equal(fstat(fd, &facts), 0);
  (void)snprintf(wanted, sizeof wanted, " %ld %02x:%02x:%llu ", (long)getpid(), major(facts.st_dev),
                 minor(facts.st_dev), (unsigned long long)facts.st_ino);
  FILE *locks = fopen("/proc/locks", "re");
  while (locks != NULL && !told && fgets(line, sizeof line, locks) != NULL) {
    told = strstr(line, wanted) != NULL;
  }
  if (locks != NULL) {
    assert_int_equal(fclose(locks), 0);
  }
  assert_int_equal(close(fd), 0);
  assert_int_equal(rmdir(path), 0);
  return told;
}
