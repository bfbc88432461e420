/* TIOCGWINSZ. */
#include "os/terminal.h"

#include "os/calls.h"

#include <sys/ioctl.h>

bool even_terminal_size(int fd, int *rows, int *columns) {
  struct winsize size = {0, 0, 0, 0};
  if (even_os.ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0) {
    return false;
  }
  *rows = size.ws_row;
  *columns = size.ws_col;
  return true;
}
