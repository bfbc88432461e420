/* read(2) on pipes, with its three outcomes told apart. */
#include "os/pipe.h"

#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>
#include <fcntl.h>

even_pipe_state even_pipe_read(int fd, void *buffer, size_t bytes, size_t *got) {
  ssize_t count = 0;
  do {
    errno = 0; /* an end has none, also after a call that a signal broke off */
    count = even_os.read(fd, buffer, bytes);
  } while (count < 0 && errno == EINTR);
  *got = count > 0 ? (size_t)count : 0;
  if (count > 0) {
    return EVEN_PIPE_DATA;
  }
  return count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? EVEN_PIPE_EMPTY : EVEN_PIPE_ENDED;
}

void even_pipe_close(int fd) {
  if (fd >= 0) {
    (void)even_os.close(fd);
  }
}

bool even_pipe_is_held(int fd) {
  struct pollfd input = {.fd = fd, .events = POLLIN};
  return even_os.poll(&input, 1, 0) == 0;
}

even_status even_pipe_empty_input(void) {
  int nothing = even_os.open("/dev/null", O_RDONLY | O_CLOEXEC, 0);
  if (nothing < 0 || even_os.dup2(nothing, STDIN_FILENO) < 0) {
    even_status status = even_fail_errno(errno, "/dev/null cannot take the place of standard input");
    even_pipe_close(nothing);
    return status;
  }
  even_pipe_close(nothing);
  return EVEN_OK;
}

even_status even_log_open(const char *path, int *fd) {
  *fd = even_os.open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  return *fd >= 0 ? EVEN_OK : even_fail_errno(errno, "log %s cannot be opened", path);
}

even_status even_log_open_private(const char *path, int *fd) {
  EVEN_TRY(even_log_open(path, fd));
  if (even_os.fchmod(*fd, 0600) != 0) {
    even_status status = even_fail_errno(errno, "log %s cannot be made private", path);
    even_pipe_close(*fd);
    *fd = -1;
    return status;
  }
  return EVEN_OK;
}

even_status even_pipe_pair(int ends[2]) {
  if (even_os.pipe2(ends, O_CLOEXEC) != 0) {
    ends[0] = ends[1] = -1;
    return even_fail_errno(errno, "a pipe could not be made");
  }
  return EVEN_OK;
}
