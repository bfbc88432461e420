/* bind to port 0 and look. */
#include "os/port.h"

#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>
#include <netinet/in.h>
#include <string.h>

even_status even_port_free(int *out) {
  struct sockaddr_in address;
  socklen_t bytes = sizeof address;
  memset(&address, 0, sizeof address);
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
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
