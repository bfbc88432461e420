/* termios. */
#include "os/keys.h"

#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>

even_status even_keys_open(int fd, even_keys *out) {
  out->fd = -1;
  if (even_os.isatty(fd) != 1) {
    return EVEN_OK;
  }
  if (even_os.tcgetattr(fd, &out->before) != 0) {
    return even_fail_errno(errno, "the terminal's settings cannot be read");
  }
  struct termios raw = out->before;
  raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO | ISIG);
  raw.c_cc[VMIN] = 1;
  raw.c_cc[VTIME] = 0;
  if (even_os.tcsetattr(fd, TCSANOW, &raw) != 0) {
    return even_fail_errno(errno, "the terminal's settings cannot be changed");
  }
  out->fd = fd;
  return EVEN_OK;
}

void even_keys_close(even_keys *keys) {
  if (keys->fd >= 0) {
    (void)even_os.tcsetattr(keys->fd, TCSANOW, &keys->before);
    keys->fd = -1;
  }
}

int even_keys_next(int fd) {
  unsigned char key = 0;
  return even_os.read(fd, &key, 1) == 1 ? key : -1;
}
