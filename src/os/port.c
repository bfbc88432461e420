/* Free ports: bind to port 0 and look. */
#include "os/port.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/file.h"

#include <errno.h>
#include <netinet/in.h>
#include <string.h>

static struct sockaddr_in loopback(int port) {
  struct sockaddr_in address;
  memset(&address, 0, sizeof address);
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons((uint16_t)port);
  return address;
}

even_status even_port_free(int *out) {
  struct sockaddr_in address = loopback(0);
  socklen_t bytes = sizeof address;
  int fd = even_os.socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return even_fail_errno(errno, "a socket could not be made");
  }
  even_status status = EVEN_OK;
  if (even_os.bind(fd, (const struct sockaddr *)&address, sizeof address) != 0 ||
      even_os.getsockname(fd, (struct sockaddr *)&address, &bytes) != 0) {
    status = even_fail_errno(errno, "no free port could be found on 127.0.0.1");
  } else {
    *out = ntohs(address.sin_port);
  }
  (void)even_os.close(fd);
  return status;
}

even_status even_port_send(int port, const void *data, size_t bytes) {
  struct sockaddr_in address = loopback(port);
  int fd = even_os.socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return even_fail_errno(errno, "a socket could not be made");
  }
  even_status status = EVEN_OK;
  if (even_os.connect(fd, (const struct sockaddr *)&address, sizeof address) != 0) {
    status = errno == ECONNREFUSED ? even_fail(EVEN_ERR_NOT_FOUND, "nobody listens at port %d", port)
                                   : even_fail_errno(errno, "port %d cannot be reached", port);
  } else if (even_file_write_all(fd, data, bytes) != EVEN_OK) {
    even_error_clear(); /* it hung up before the end: that is its right */
  }
  (void)even_os.close(fd);
  return status;
}
