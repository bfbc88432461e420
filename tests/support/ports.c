/* Binds the port, and the name by which one is held, and gives both back. */
#include "support/ports.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static bool can_bind(const struct sockaddr *address, socklen_t bytes) {
  int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool bound = fd >= 0 && bind(fd, address, bytes) == 0;
  if (fd >= 0) {
    (void)close(fd);
  }
  return bound;
}

bool port_is_free(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  struct sockaddr_un name = {.sun_family = AF_UNIX}; /* it begins with 0: no file's */
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "evenstep/port/%d", port);
  return can_bind((const struct sockaddr *)&address, sizeof address) &&
         can_bind((const struct sockaddr *)&name,
                  (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1) + (socklen_t)length);
}
