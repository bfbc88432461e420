/* Shared segments: one memory behind several mappings, sizes checked, nothing left after a failure. */
#include "os/shared_memory.h"

#include "base/fail.h"
#include "os/calls.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static int restore(void **state) {
  (void)state;
  fault_reset();
  return 0;
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

static void who_leaves_has_a_copy(void **state) {
  even_shared_memory mine;
  even_shared_memory theirs;
  even_shared_memory was;
  (void)state;
  int before = open_descriptors();
  assert_int_equal(even_shared_memory_create("test", 10000, &mine), EVEN_OK);
  assert_int_equal(even_shared_memory_open_peer(getpid(), mine.fd, &theirs), EVEN_OK);
  char *at = mine.address;
  memcpy(at, "hello", 6);
  for (int call = 1; call <= 2; call++) { /* each may fail: then it is shared as before */
    fault_os(FAULT_mmap, call, ENOMEM);
    assert_int_equal(even_shared_memory_leave(&mine, 4096, &was), EVEN_ERR_MEMORY);
    fault_reset();
    assert_int_equal(was.fd, -1);
    at[0]++;
    assert_int_equal(at[0], ((char *)theirs.address)[0]);
  }
  assert_int_equal(even_shared_memory_leave(&mine, 4096, &was), EVEN_OK);
  assert_int_equal(((const uint64_t *)theirs.address)[512], 10000); /* the others see how far it has come */
  assert_ptr_equal(mine.address, at);
  assert_string_equal(at, "jello");
  at[1] = 'u';
  ((char *)was.address)[0] = 'c';
  assert_string_equal(theirs.address, "cello");
  assert_string_equal(at, "jullo");
  even_shared_memory_close(&was);
  even_shared_memory_close(&mine);
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

/* ---- without memfds, and without room ---- */

/* As in a container whose profile forbids it: the memory is a file that nobody else can open, and gone with its last
 * descriptor. */
static void without_memfds_it_is_a_file(void **state) {
  even_shared_memory mine;
  even_shared_memory theirs;
  struct stat facts;
  char folder[64];
  (void)state;
  int before = open_descriptors();
  fault_os_from(FAULT_memfd_create, 1, EPERM);
  assert_int_equal(even_shared_memory_create("evenstep-test", 10000, &mine), EVEN_OK);
  assert_int_equal(fstat(mine.fd, &facts), 0);
  assert_int_equal(facts.st_mode & 07777, 0600);
  assert_int_equal(facts.st_nlink, 0);
  assert_int_equal(facts.st_size, 10000);
  assert_true(facts.st_blocks * 512 >= 10000); /* a write can find no disk full */
  assert_true((fcntl(mine.fd, F_GETFD) & FD_CLOEXEC) != 0);
  assert_true(even_shared_memory_is_file(mine.fd, folder, sizeof folder));
  assert_string_equal(folder, "/dev/shm");
  assert_true(even_shared_memory_has_label(mine.fd, "evenstep-test"));
  assert_false(even_shared_memory_has_label(mine.fd, "evenstep-tes"));
  assert_int_equal(even_shared_memory_open_peer(getpid(), mine.fd, &theirs), EVEN_OK);
  memcpy(mine.address, "hello", 6);
  assert_string_equal(theirs.address, "hello");
  even_shared_memory_close(&mine);
  even_shared_memory_close(&theirs);
  assert_int_equal(open_descriptors(), before);
  fault_reset();
  assert_int_equal(even_shared_memory_create("evenstep-test", 10000, &mine), EVEN_OK);
  assert_false(even_shared_memory_is_file(mine.fd, folder, sizeof folder));
  assert_int_equal(fstat(mine.fd, &facts), 0);
  assert_int_equal(facts.st_mode & 07777, 0600);
  even_shared_memory_close(&mine);
}

static void a_full_folder_is_left_for_the_next(void **state) {
  even_shared_memory memory;
  char folder[64];
  (void)state;
  int before = open_descriptors();
  fault_os(FAULT_ftruncate, 1, ENOSPC);
  fault_os(FAULT_fallocate, 1, ENOSPC);
  assert_int_equal(even_shared_memory_create("evenstep-test", 4096, &memory), EVEN_OK);
  assert_true(even_shared_memory_is_file(memory.fd, folder, sizeof folder));
  assert_string_equal(folder, "/tmp");
  even_shared_memory_close(&memory);
  fault_os(FAULT_ftruncate, 1, ENOSPC);
  fault_os_from(FAULT_fallocate, 1, ENOSPC);
  assert_int_equal(even_shared_memory_create("evenstep-test", 4096, &memory), EVEN_ERR_NO_SPACE);
  assert_int_equal(memory.fd, -1);
  const char *what = even_error_last()->what;
  assert_non_null(strstr(what, "could not grow to 4096 bytes"));
  assert_non_null(strstr(what, "/dev/shm has no room"));
  assert_non_null(strstr(what, "/var/tmp has no room"));
  assert_int_equal(open_descriptors(), before);
}

static void a_signal_does_not_end_taking_room(void **state) {
  even_shared_memory memory;
  char folder[64];
  (void)state;
  fault_os(FAULT_ftruncate, 1, ENOSPC);
  fault_os(FAULT_fallocate, 1, EINTR);
  assert_int_equal(even_shared_memory_create("evenstep-test", 4096, &memory), EVEN_OK);
  assert_int_equal(fault_os_calls(FAULT_fallocate), 2);
  assert_true(even_shared_memory_is_file(memory.fd, folder, sizeof folder));
  assert_string_equal(folder, "/dev/shm"); /* and not the next, as if this one were full */
  even_shared_memory_close(&memory);
}

/* ---- others ---- */

/* A process of another user that holds a segment, or tries to open this one's: runs `body` there. */
static int as_nobody(int (*body)(int argument), int argument) {
  int ended = -1;
  pid_t child = fork();
  if (child == 0) {
    _exit(setresgid(65534, 65534, 65534) != 0 || setresuid(65534, 65534, 65534) != 0 ? 99 : body(argument));
  }
  assert_int_equal(waitpid(child, &ended, 0), child);
  return WIFEXITED(ended) ? WEXITSTATUS(ended) : -1;
}

static int try_to_open(int fd) {
  even_shared_memory memory;
  bool refused = even_shared_memory_open_peer(getppid(), fd, &memory) == EVEN_ERR_PERMISSION;
  return refused && strstr(even_error_last()->what, "Permission denied") != NULL ? 0 : 1;
}

static void another_user_cannot_open_it(void **state) {
  even_shared_memory memory;
  (void)state;
  if (geteuid() != 0) {
    skip(); /* it takes root to be another user */
  }
  for (int file = 0; file < 2; file++) {
    fault_os_from(FAULT_memfd_create, file, EPERM);
    assert_int_equal(even_shared_memory_create("evenstep-test", 4096, &memory), EVEN_OK);
    assert_int_equal(as_nobody(try_to_open, memory.fd), 0);
    even_shared_memory_close(&memory);
  }
}

/* Where root's rank 0 was expected, another user's process has come to its number, with a segment ready. */
static void a_segment_that_another_user_planted_is_refused(void **state) {
  even_shared_memory memory;
  int ready[2];
  int done[2];
  int fd = -1;
  (void)state;
  if (geteuid() != 0) {
    skip();
  }
  assert_int_equal(pipe(ready), 0);
  assert_int_equal(pipe(done), 0);
  pid_t child = fork();
  if (child == 0) {
    even_shared_memory bait;
    (void)close(done[1]);
    bool made =
        setresuid(65534, 65534, 65534) == 0 && even_shared_memory_create("evenstep-group", 4096, &bait) == EVEN_OK;
    made = made && write(ready[1], &bait.fd, sizeof bait.fd) == sizeof bait.fd;
    _exit(made && read(done[0], &fd, 1) == 0 ? 0 : 1);
  }
  (void)close(done[0]);
  assert_int_equal(read(ready[0], &fd, sizeof fd), sizeof fd);
  int before = open_descriptors();
  assert_int_equal(even_shared_memory_open_peer(child, fd, &memory), EVEN_ERR_PERMISSION);
  assert_non_null(strstr(even_error_last()->what, "is user 65534's"));
  assert_non_null(strstr(even_error_last()->fix, "as one user"));
  assert_int_equal(memory.fd, -1);
  assert_int_equal(open_descriptors(), before);
  (void)close(done[1]);
  assert_int_equal(waitpid(child, &fd, 0), child);
  assert_int_equal(fd, 0);
  (void)close(ready[0]);
  (void)close(ready[1]);
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
  assert_int_equal(fault_each_os(create_and_close, NULL, EIO), 4);
  assert_int_equal(open_descriptors(), before);
  for (long nth = 1; nth <= 3; nth++) { /* and of the file in its place: in every folder */
    static const fault_call calls[] = {FAULT_getrandom, FAULT_open, FAULT_fallocate};
    fault_os_from(FAULT_memfd_create, 1, ENOSYS);
    fault_os_from(calls[nth - 1], 1, EIO);
    assert_int_equal(create_and_close(NULL), EVEN_ERR_SYSTEM);
    assert_int_equal(open_descriptors(), before);
    fault_reset();
  }
  fault_os_from(FAULT_memfd_create, 1, ENOSYS);
  fault_os(FAULT_mmap, 1, ENOMEM);
  assert_int_equal(create_and_close(NULL), EVEN_ERR_MEMORY);
  assert_int_equal(open_descriptors(), before);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(two_mappings_are_one_memory, restore),
      cmocka_unit_test_teardown(who_leaves_has_a_copy, restore),
      cmocka_unit_test_teardown(wrong_sizes_and_descriptors_are_refused, restore),
      cmocka_unit_test_teardown(huge_pages_are_asked_for_and_not_needed, restore),
      cmocka_unit_test_teardown(a_gone_peer_is_said_with_a_fix, restore),
      cmocka_unit_test_teardown(without_memfds_it_is_a_file, restore),
      cmocka_unit_test_teardown(a_full_folder_is_left_for_the_next, restore),
      cmocka_unit_test_teardown(a_signal_does_not_end_taking_room, restore),
      cmocka_unit_test_teardown(another_user_cannot_open_it, restore),
      cmocka_unit_test_teardown(a_segment_that_another_user_planted_is_refused, restore),
      cmocka_unit_test_teardown(each_call_may_fail, restore),
  };
  return cmocka_run_group_tests_name("os_shared_memory", tests, NULL, NULL);
}
