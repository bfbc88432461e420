/* socket, bind, listen. */
#include "os/listener.h"

#include "base/fail.h"
#include "os/calls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

/* Of the largest job every host may come at once; the kernel has a limit of its own (net.core.somaxconn). */
enum { BACKLOG = 1024 };

even_status even_listener_port(int fd, int *port) {
  struct sockaddr_in where;
  socklen_t bytes = sizeof where;
  memset(&where, 0, sizeof where);
  if (even_os.getsockname(fd, (struct sockaddr *)&where, &bytes) != 0) {
    return even_fail_errno(errno, "the port of a socket cannot be read");
  }
  *port = ntohs(where.sin_port);
  return EVEN_OK;
}

static even_status listen_at(int fd, const struct sockaddr_in *where, const char *address, int *port) {
  int on = 1;
  /* connections of a run that has just ended do not keep the port */
  if (even_os.setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0) {
    return even_fail_errno(errno, "a socket cannot be set up");
  }
  if (even_os.bind(fd, (const struct sockaddr *)where, sizeof *where) != 0 || even_os.listen(fd, BACKLOG) != 0) {
    int error_number = errno;
    return *port == 0 ? even_fail_errno(error_number, "%s cannot be listened at", address)
                      : even_fail_errno(error_number, "port %d of %s cannot be listened at", *port, address);
  }
  return even_listener_port(fd, port);
}

even_status even_listener_open(const char *address, int *port, int *fd) {
  struct sockaddr_in where;
  memset(&where, 0, sizeof where);
  where.sin_family = AF_INET;
  *fd = -1;
  if (*port < 0 || *port > 65535 || inet_pton(AF_INET, address, &where.sin_addr) != 1) {
    return even_fail(EVEN_ERR_ARGUMENT, "%s, port %d, is no address to listen at", address, *port);
  }
  where.sin_port = htons((uint16_t)*port);
  int made = even_os.socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (made < 0) {
    return even_fail_errno(errno, "a socket could not be made");
  }
  even_status status = listen_at(made, &where, address, port);
  if (status != EVEN_OK) {
    (void)even_os.close(made);
    return status;
  }
  *fd = made;
  return EVEN_OK;
}

void even_listener_close(int fd) {
  (void)even_os.close(fd);
}
