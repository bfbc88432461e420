/* Where the memory of a group lies: no full /dev/shm matters to it, and where there are no memfds it is a file of the
 * first folder that has the room. */
#include "base/fail.h"
#include "comm/ranks.h"
#include "os/calls.h"
#include "support/fault.h"
#include "support/required.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define FLOATS 300000
#define CANNOT 77

static int restore(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

/* Small, staged and in the arena; `argument`: what the group says of its memory. */
static int reduce_all(even_comm *comm, void *argument) {
  static float values[FLOATS];
  const char *wanted = argument;
  char text[512];
  even_comm_describe(comm, text, sizeof text);
  RANKS_EXPECT(comm, strstr(text, wanted) != NULL);
  for (int way = 0; way < 3; way++) {
    float *data = way == 2 ? even_comm_arena(comm) : values;
    size_t count = way == 0 ? 10 : FLOATS;
    for (size_t i = 0; i < count; i++) {
      data[i] = (float)(i % 1000);
    }
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, count, EVEN_F32, EVEN_SUM) == EVEN_OK);
    for (size_t i = 0; i < count; i++) {
      RANKS_EXPECT(comm, data[i] == (float)(i % 1000) * (float)even_comm_ranks(comm));
    }
  }
  return 0;
}

static int reduce_over(const char *wanted) {
  ranks_setup setup = {.ranks = 2, .arena_bytes = FLOATS * sizeof(float), .timeout_seconds = 60, .spin = -1};
  return ranks_run(&setup, reduce_all, (void *)(uintptr_t)wanted, NULL);
}

static void without_memfds_a_group_shares_a_file(void **state) {
  (void)state;
  fault_os_from(FAULT_memfd_create, 1, EPERM);
  assert_int_equal(reduce_over("shared memory in a file of /"), 0);
  fault_os_from(FAULT_memfd_create, 1, EPERM);
  fault_os(FAULT_fallocate, 1, ENOSPC); /* /dev/shm is full */
  assert_int_equal(reduce_over("shared memory in a file of /tmp, "), 0);
}

static void without_any_room_it_is_said_where(void **state) {
  even_comm_params params = {.size = sizeof params, .ranks = 2, .timeout_seconds = 1};
  int fd = -1;
  (void)state;
  fault_os_from(FAULT_memfd_create, 1, ENOSYS);
  fault_os_from(FAULT_fallocate, 1, ENOSPC);
  assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_ERR_NO_SPACE);
  assert_int_equal(fd, -1);
  assert_non_null(strstr(even_error_last()->what, "/dev/shm has no room"));
  assert_non_null(strstr(even_error_last()->what, "/tmp has no room"));
}

/* A /dev/shm of 64 KB, this process's own, that is full. */
static bool have_full_folder(void) {
  static char zeros[65536];
  if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
      mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64k") != 0) {
    return false;
  }
  int fd = open("/dev/shm/full", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  bool full = fd >= 0 && write(fd, zeros, sizeof zeros) == sizeof zeros && write(fd, zeros, 1) < 0 && errno == ENOSPC;
  (void)close(fd);
  return full;
}

static void a_full_dev_shm_matters_to_no_group(void **state) {
  int ended = -1;
  (void)state;
  pid_t child = fork();
  if (child == 0) {
    if (!have_full_folder()) {
      _exit(CANNOT);
    }
    int wrong = reduce_over("shared memory, ");
    fault_os_from(FAULT_memfd_create, 1, EPERM);
    _exit(wrong + reduce_over("shared memory in a file of /tmp, "));
  }
  assert_int_equal(waitpid(child, &ended, 0), child);
  assert_true(WIFEXITED(ended));
  if (WEXITSTATUS(ended) == CANNOT) {
    assert_false(required("namespaces", "a full file system takes root, and mount(2)"));
    skip();
  }
  assert_int_equal(WEXITSTATUS(ended), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(without_memfds_a_group_shares_a_file, restore),
      cmocka_unit_test_teardown(without_any_room_it_is_said_where, restore),
      cmocka_unit_test_teardown(a_full_dev_shm_matters_to_no_group, restore),
  };
  return cmocka_run_group_tests_name("room for groups", tests, NULL, NULL);
}
