/* Waiting for a descriptor. */
#include "os/readable.h"

#include "os/calls.h"

void even_readable_wait(int fd, uint64_t limit_ns) {
  struct pollfd wanted = {.fd = fd, .events = POLLIN};
  uint64_t milliseconds = limit_ns / 1000000u + (limit_ns % 1000000u != 0);
  (void)even_os.poll(&wanted, 1, milliseconds < 60000 ? (int)milliseconds : 60000);
}
