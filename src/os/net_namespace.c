/* setns(2). */
#include "os/net_namespace.h"

#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

enum { PATH_BYTES = 48, LINK_BYTES = 48 };

static void path_of(pid_t pid, char path[PATH_BYTES]) {
  if (pid == 0) {
    (void)snprintf(path, PATH_BYTES, "/proc/thread-self/ns/net");
  } else {
    (void)snprintf(path, PATH_BYTES, "/proc/%ld/ns/net", (long)pid);
  }
}

static even_status open_namespace(pid_t pid, int *fd) {
  char path[PATH_BYTES];
  path_of(pid, path);
  *fd = even_os.open(path, O_RDONLY | O_CLOEXEC, 0);
  return *fd >= 0 ? EVEN_OK : even_fail_errno(errno, "the network of process %ld cannot be opened", (long)pid);
}

even_status even_net_namespace_enter(pid_t pid, int *before) {
  int there = -1;
  EVEN_TRY(open_namespace(0, before));
  even_status status = open_namespace(pid, &there);
  if (status == EVEN_OK && even_os.setns(there) != 0) {
    status = even_fail_errno(errno, "the network of process %ld cannot be entered", (long)pid);
  }
  if (there >= 0) {
    (void)even_os.close(there);
  }
  if (status != EVEN_OK) {
    (void)even_os.close(*before);
    *before = -1;
  }
  return status;
}

even_status even_net_namespace_leave(int before) {
  even_status status =
      even_os.setns(before) == 0 ? EVEN_OK : even_fail_errno(errno, "this thread cannot go back to its own network");
  (void)even_os.close(before);
  return status;
}

static bool read_name(pid_t pid, char name[LINK_BYTES]) {
  char path[PATH_BYTES];
  path_of(pid, path);
  ssize_t length = even_os.readlink(path, name, LINK_BYTES - 1);
  name[length < 0 ? 0 : length] = '\0';
  return length > 0;
}

bool even_net_namespace_same(pid_t a, pid_t b) {
  char names[2][LINK_BYTES];
  return read_name(a, names[0]) && read_name(b, names[1]) && strcmp(names[0], names[1]) == 0;
}
