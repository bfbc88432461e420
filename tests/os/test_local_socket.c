/* A Unix socket in a folder: its mode, who is let in, long folders, and each call to the kernel that fails. */
#include "os/local_socket.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/pipe.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { DEEP = 40 };

static char folder[2048]; /* longer than a socket's address may be */

static int make_folder(void **state) {
  char root[] = "/tmp/even-local-XXXXXX";
  (void)state;
  assert_non_null(mkdtemp(root));
  (void)snprintf(folder, sizeof folder, "%s", root);
  for (int i = 0; i < DEEP; i++) {
    (void)strcat(folder, "/deeper");
    assert_int_equal(mkdir(folder, 0700), 0);
  }
  return 0;
}

static int remove_folder(void **state) {
  char path[sizeof folder + 16];
  (void)state;
  fault_reset();
  even_os = even_os_real;
  (void)snprintf(path, sizeof path, "%s/control", folder);
  (void)unlink(path);
  for (int i = 0; i <= DEEP; i++) {
    (void)rmdir(folder);
    *strrchr(folder, '/') = '\0';
  }
  return 0;
}

static even_status meet(int ends[3]) {
  ends[0] = ends[1] = ends[2] = -1;
  EVEN_TRY(even_local_socket_listen(folder, "control", &ends[0]));
  EVEN_TRY(even_local_socket_connect(folder, "control", &ends[1]));
  EVEN_TRY(even_local_socket_accept(ends[0], &ends[2]));
  return ends[2] >= 0 ? EVEN_OK : even_fail(EVEN_ERR_TIMEOUT, "nobody was taken");
}

static void close_all(const int ends[3]) {
  for (int i = 0; i < 3; i++) {
    if (ends[i] >= 0) {
      even_pipe_close(ends[i]);
    }
  }
}

static void words_go_through_and_the_file_is_its_owners_alone(void **state) {
  char path[sizeof folder + 16];
  char word[8] = "";
  struct stat facts;
  int ends[3];
  (void)state;
  mode_t before = umask(0);
  assert_int_equal(meet(ends), EVEN_OK);
  (void)umask(before);
  (void)snprintf(path, sizeof path, "%s/control", folder);
  assert_int_equal(stat(path, &facts), 0);
  assert_true(S_ISSOCK(facts.st_mode));
  assert_int_equal(facts.st_mode & 0777, 0600);
  assert_int_equal(write(ends[1], "drain", 5), 5);
  assert_int_equal(read(ends[2], word, sizeof word), 5);
  assert_string_equal(word, "drain");
  close_all(ends);
  assert_int_equal(meet(ends), EVEN_OK); /* what a job that was killed has left is replaced */
  close_all(ends);
}

static void where_nobody_listens_that_is_said(void **state) {
  int fd = -1;
  int ends[3];
  (void)state;
  assert_int_equal(even_local_socket_connect(folder, "control", &fd), EVEN_ERR_NOT_FOUND);
  assert_int_equal(meet(ends), EVEN_OK);
  close_all(ends);
  assert_int_equal(even_local_socket_connect(folder, "control", &fd), EVEN_ERR_NOT_FOUND);
  assert_int_equal(fd, -1);
  assert_int_equal(even_local_socket_connect("/nowhere/at/all", "control", &fd), EVEN_ERR_NOT_FOUND);
}

static int say_stranger(int fd, int level, int option, void *value, socklen_t *bytes) {
  int result = even_os_real.getsockopt(fd, level, option, value, bytes);
  if (level == SOL_SOCKET && option == SO_PEERCRED) {
    ((struct ucred *)value)->uid = 54321;
  }
  return result;
}

static void another_user_is_not_let_in(void **state) {
  int ends[3];
  (void)state;
  even_os.getsockopt = say_stranger;
  assert_int_equal(meet(ends), EVEN_ERR_TIMEOUT);
  even_os = even_os_real;
  char byte = 0;
  assert_int_equal(read(ends[1], &byte, 1), 0); /* closed */
  close_all(ends);
}

static even_status meet_once(void *context) {
  int ends[3];
  (void)context;
  even_status status = meet(ends);
  close_all(ends);
  return status;
}

static void each_fault_is_told_and_leaves_nothing(void **state) {
  (void)state;
  int before = open_descriptors();
  assert_in_range(fault_each_os(meet_once, NULL, EIO), 7, 30);
  assert_int_equal(open_descriptors(), before);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(words_go_through_and_the_file_is_its_owners_alone, make_folder, remove_folder),
      cmocka_unit_test_setup_teardown(where_nobody_listens_that_is_said, make_folder, remove_folder),
      cmocka_unit_test_setup_teardown(another_user_is_not_let_in, make_folder, remove_folder),
      cmocka_unit_test_setup_teardown(each_fault_is_told_and_leaves_nothing, make_folder, remove_folder),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
