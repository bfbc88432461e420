/* What makes a disk full on purpose, and gives the room back. */
#include "os/filler.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/fault.h"

static int teardown(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

/* Full after three writes: what fits goes on in smaller pieces, to the last byte. */
static void it_writes_until_nothing_fits(void **state) {
  char path[] = "/tmp/evenstep-filler-XXXXXX";
  uint64_t bytes = 0;
  int fd = -1;
  struct stat facts;
  (void)state;
  assert_int_not_equal(fd = mkstemp(path), -1);
  assert_int_equal(close(fd), 0);
  assert_int_equal(even_filler_open(path, &fd), EVEN_OK);
  fault_os_from(FAULT_write, 4, ENOSPC);
  assert_int_equal(even_filler_fill(fd, &bytes), EVEN_OK);
  fault_reset();
  assert_int_equal(fstat(fd, &facts), 0);
  assert_int_equal(bytes, 3 * 65536);
  assert_int_equal(facts.st_size, bytes);
  fault_os(FAULT_write, 1, EIO);
  assert_int_equal(even_filler_fill(fd, &bytes), EVEN_ERR_SYSTEM);
  fault_reset();
  assert_int_equal(even_filler_close(path, fd), EVEN_OK);
  assert_int_equal(access(path, F_OK), -1);
  assert_int_equal(even_filler_open("/nowhere/at/all", &fd), EVEN_ERR_NOT_FOUND);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(it_writes_until_nothing_fits, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
