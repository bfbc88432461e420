/* Free ports: bind and look. Who holds one has bound a name for it that is no port's, which ends with its process. */
#include "os/port.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/file.h"
#include "os/random.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

enum { LOWEST = 10000, TRIES = 32 }; /* below it are the ports of well-known services */

static struct sockaddr_in loopback(int port) {
  struct sockaddr_in address;
  memset(&address, 0, sizeof address);
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons((uint16_t)port);
  return address;
}

/* The first port that the kernel hands out by itself, or 0 where that cannot be known. */
static long first_of_kernel(void) {
  even_text text = EVEN_TEXT_EMPTY;
  long first = 0;
  if (even_file_read("/proc/sys/net/ipv4/ip_local_port_range", 64, &text) == EVEN_OK) {
    first = strtol(even_text_string(&text), NULL, 10);
  } else {
    even_error_clear();
  }
  even_text_free(&text);
  return first > UINT16_MAX ? 0 : first;
}

/* One at random that the kernel gives to nobody who asks for any; 0: it has taken nearly all for that. */
static even_status choose(int *out) {
  long room = first_of_kernel() - LOWEST;
  char digits[9];
  *out = 0;
  if (room < LOWEST) {
    return EVEN_OK;
  }
  EVEN_TRY(even_random_hex(digits, sizeof digits - 1));
  *out = LOWEST + (int)(strtoul(digits, NULL, 16) % (unsigned long)room);
  return EVEN_OK;
}

/* 0 where the port, or any where it is 0, is free; else errno. */
static int try_port(int *port) {
  struct sockaddr_in address = loopback(*port);
  socklen_t bytes = sizeof address;
  int fd = even_os.socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return errno;
  }
  int error = 0;
  if (even_os.bind(fd, (const struct sockaddr *)&address, sizeof address) != 0 ||
      even_os.getsockname(fd, (struct sockaddr *)&address, &bytes) != 0) {
    error = errno;
  } else {
    *port = ntohs(address.sin_port);
  }
  (void)even_os.close(fd);
  return error;
}

/* EADDRINUSE where another has the port's name; else 0, also where there are no such names. */
static int name_port(int port, even_port_held *held) {
  struct sockaddr_un address = {.sun_family = AF_UNIX}; /* a name that begins with 0 is no file's */
  int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "evenstep/port/%d", port);
  int fd = even_os.socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return 0;
  }
  socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1) + (socklen_t)length;
  if (even_os.bind(fd, (const struct sockaddr *)&address, bytes) == 0) {
    *held = (even_port_held){.holds = true, .fd = fd};
    return 0;
  }
  int error = errno == EADDRINUSE ? EADDRINUSE : 0;
  (void)even_os.close(fd);
  return error;
}

even_status even_port_hold(int *out, even_port_held *held) {
  int error = EADDRINUSE;
  even_port_let_go(held);
  for (int i = 0; i < TRIES && error == EADDRINUSE; i++) {
    EVEN_TRY(choose(out));
    error = try_port(out);
    error = error == 0 ? name_port(*out, held) : error;
  }
  return error == 0 ? EVEN_OK : even_fail_errno(error, "no free port could be found on 127.0.0.1");
}

void even_port_let_go(even_port_held *held) {
  if (held->holds) {
    (void)even_os.close(held->fd);
  }
  *held = (even_port_held){.holds = false};
}

bool even_port_pass(int port, even_port_held *from, even_port_held *to) {
  bool is_free = try_port(&port) == 0;
  even_port_let_go(to);
  if (is_free) {
    *to = *from;
    *from = (even_port_held){.holds = false};
  }
  even_port_let_go(from);
  return is_free;
}

even_status even_port_free(int *out) {
  even_port_held held = {.holds = false};
  even_status status = even_port_hold(out, &held);
  even_port_let_go(&held);
  return status;
}

even_status even_port_send(const char *host, int port, const void *data, size_t bytes) {
  struct sockaddr_in address = loopback(port);
  if (inet_pton(AF_INET, host, &address.sin_addr) != 1) {
    return even_fail(EVEN_ERR_ARGUMENT, "%.64s is no address", host);
  }
  int fd = even_os.socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return even_fail_errno(errno, "a socket could not be made");
  }
  even_status status = EVEN_OK;
  if (even_os.connect(fd, (const struct sockaddr *)&address, sizeof address) != 0) {
    status = errno == ECONNREFUSED ? even_fail(EVEN_ERR_NOT_FOUND, "nobody listens at port %d of %s", port, host)
                                   : even_fail_errno(errno, "port %d of %s cannot be reached", port, host);
  } else if (even_file_write_all(fd, data, bytes) != EVEN_OK) {
    even_error_clear(); /* it hung up before the end: that is its right */
  }
  (void)even_os.close(fd);
  return status;
}
