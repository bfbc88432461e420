/* What makes a disk full and memory short on purpose: real ones, and given back. */
#include "os/filler.h"
#include "os/memory_limit.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
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

/* Tries to map memory each time that it is told to, and answers whether that went. */
static void try_it(int asked, int answers) {
  char byte = 0;
  while (read(asked, &byte, 1) == 1) {
    void *there = mmap(NULL, 1 << 24, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    byte = there == MAP_FAILED ? 'n' : 'y';
    if (there != MAP_FAILED) {
      (void)munmap(there, 1 << 24);
    }
    if (write(answers, &byte, 1) != 1) {
      break;
    }
  }
}

static char answer(int to, int from) {
  char byte = '?';
  assert_int_equal(write(to, &byte, 1), 1);
  assert_int_equal(read(from, &byte, 1), 1);
  return byte;
}

static void another_process_gets_no_more_memory(void **state) {
  int down[2];
  int up[2];
  uint64_t before = 0;
  (void)state;
  assert_int_equal(pipe(down), 0);
  assert_int_equal(pipe(up), 0);
  pid_t child = fork();
  assert_int_not_equal(child, -1);
  if (child == 0) {
    (void)close(down[1]);
    try_it(down[0], up[1]);
    _exit(0);
  }
  assert_int_equal(answer(down[1], up[0]), 'y');
  assert_int_equal(even_memory_limit_set(child, 0, &before), EVEN_OK);
  assert_int_equal(answer(down[1], up[0]), 'n');
  assert_int_equal(even_memory_limit_restore(child, before), EVEN_OK);
  assert_int_equal(answer(down[1], up[0]), 'y');
  fault_os(FAULT_prlimit, 1, EPERM);
  assert_int_equal(even_memory_limit_set(child, 0, &before), EVEN_ERR_PERMISSION);
  fault_os(FAULT_prlimit, 2, EPERM);
  assert_int_equal(even_memory_limit_set(child, 0, &before), EVEN_ERR_PERMISSION);
  fault_os(FAULT_prlimit, 2, EPERM);
  assert_int_equal(even_memory_limit_restore(child, before), EVEN_ERR_PERMISSION);
  fault_reset();
  assert_int_equal(close(down[1]), 0);
  assert_int_equal(waitpid(child, NULL, 0), child);
  assert_int_equal(even_memory_limit_set(child, 0, &before), EVEN_ERR_NOT_FOUND);
  assert_int_equal(even_memory_limit_restore(child, before), EVEN_OK); /* it has ended */
  (void)close(down[0]);
  (void)close(up[0]);
  (void)close(up[1]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(it_writes_until_nothing_fits, teardown),
      cmocka_unit_test_teardown(another_process_gets_no_more_memory, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
