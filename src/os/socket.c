/* connect, accept4, and the options that make the kernel look whether the other host lives. */
#include "os/socket.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/host.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

static bool set(int fd, int level, int option, int value) {
  return even_os.setsockopt(fd, level, option, &value, sizeof value) == 0;
}

enum { MOST_PROBES = 120 };

static _Atomic int silence_ms = EVEN_SOCKET_SILENCE_MS;

void even_socket_silence_set(int wish_ms) {
  int least = EVEN_SOCKET_SHORTEST_SILENCE_MS;
  int most = EVEN_SOCKET_LONGEST_SILENCE_MS;
  int wish = wish_ms == 0 ? EVEN_SOCKET_SILENCE_MS : wish_ms;
  atomic_store(&silence_ms, wish < least ? least : wish > most ? most : wish);
}

int even_socket_silence(void) {
  return atomic_load(&silence_ms);
}

/* Probes while nothing is on its way (tcp(7)), a limit for what is. */
even_status even_socket_watch(int fd) {
  int silence = even_socket_silence();
  int seconds = silence / 1000;
  int between = (seconds + MOST_PROBES - 1) / MOST_PROBES;
  int probes = seconds / between - 1;
  if (!set(fd, SOL_SOCKET, SO_KEEPALIVE, 1) || !set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 1) ||
      !set(fd, IPPROTO_TCP, TCP_KEEPINTVL, between) || !set(fd, IPPROTO_TCP, TCP_KEEPCNT, probes) ||
      !set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, silence) || !set(fd, IPPROTO_TCP, TCP_NODELAY, 1)) {
    return even_fail_errno(errno, "a connection cannot be set up");
  }
  return EVEN_OK;
}

int even_socket_silent(int fd) {
  struct tcp_info info;
  socklen_t bytes = sizeof info;
  memset(&info, 0, sizeof info);
  if (even_os.getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) {
    return 0;
  }
  /* data that acknowledges nothing new is no acknowledgement to the kernel, as to a process that sent nothing for long
   */
  uint32_t silent =
      info.tcpi_last_ack_recv < info.tcpi_last_data_recv ? info.tcpi_last_ack_recv : info.tcpi_last_data_recv;
  return silent > INT_MAX ? INT_MAX : (int)silent;
}

bool even_socket_delivered(int fd) {
  int waiting = 0;
  return even_os.ioctl(fd, SIOCOUTQ, &waiting) != 0 || waiting == 0;
}

/* Waits for the outcome of a connect that has begun. */
static even_status await(int fd, const char *address, int port, int timeout_ms) {
  struct pollfd wait = {.fd = fd, .events = POLLOUT};
  int error_number = 0;
  socklen_t bytes = sizeof error_number;
  int ready = 0;
  do {
    ready = even_os.poll(&wait, 1, timeout_ms);
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) {
    return even_fail(EVEN_ERR_TIMEOUT, "%s, port %d, does not answer", address, port);
  }
  if (ready < 0 || even_os.getsockopt(fd, SOL_SOCKET, SO_ERROR, &error_number, &bytes) != 0) {
    error_number = errno;
  }
  return error_number == 0 ? EVEN_OK : even_fail_errno(error_number, "%s, port %d, cannot be reached", address, port);
}

even_status even_socket_connect_begin(const char *address, int port, int *fd) {
  struct sockaddr_in where;
  memset(&where, 0, sizeof where);
  where.sin_family = AF_INET;
  *fd = -1;
  if (port < 1 || port > 65535 || inet_pton(AF_INET, address, &where.sin_addr) != 1) {
    return even_fail(EVEN_ERR_ARGUMENT, "%s, port %d, is no address to connect to", address, port);
  }
  where.sin_port = htons((uint16_t)port);
  int made = even_os.socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (made < 0) {
    return even_fail_errno(errno, "a socket could not be made");
  }
  even_status status = even_socket_watch(made);
  if (status == EVEN_OK && even_os.connect(made, (const struct sockaddr *)&where, sizeof where) != 0 &&
      errno != EINPROGRESS) {
    status = even_fail_errno(errno, "%s, port %d, cannot be reached", address, port);
  }
  if (status != EVEN_OK) {
    (void)even_os.close(made);
    return status;
  }
  *fd = made;
  return EVEN_OK;
}

even_status even_socket_connect(const char *address, int port, int timeout_ms, int *fd) {
  EVEN_TRY(even_socket_connect_begin(address, port, fd));
  even_status status = await(*fd, address, port, timeout_ms);
  if (status != EVEN_OK) {
    (void)even_os.close(*fd);
    *fd = -1;
  }
  return status;
}

even_status even_socket_take(int listener, int *fd) {
  struct pollfd waits = {.fd = listener, .events = POLLIN};
  *fd = -1;
  if (even_os.poll(&waits, 1, 0) <= 0) {
    return EVEN_OK;
  }
  int made = even_os.accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (made < 0) {
    bool gone = errno == EAGAIN || errno == EWOULDBLOCK || errno == ECONNABORTED || errno == EINTR;
    return gone ? EVEN_OK : even_fail_errno(errno, "a connection cannot be taken");
  }
  *fd = made;
  return EVEN_OK;
}

even_status even_socket_accept(int listener, int *fd) {
  EVEN_TRY(even_socket_take(listener, fd));
  even_status status = *fd < 0 ? EVEN_OK : even_socket_watch(*fd);
  if (status != EVEN_OK) {
    (void)even_os.close(*fd);
    *fd = -1;
  }
  return status;
}

size_t even_socket_write(int fd, const void *bytes, size_t count, bool *broken, int *reason) {
  ssize_t written = 0;
  do {
    written = even_os.write(fd, bytes, count);
  } while (written < 0 && errno == EINTR);
  *broken = written < 0 && errno != EAGAIN && errno != EWOULDBLOCK;
  *reason = *broken ? errno : 0;
  return written < 0 ? 0 : (size_t)written;
}

void even_socket_wait(int fd, int timeout_ms) {
  struct pollfd room = {.fd = fd, .events = POLLOUT};
  (void)even_os.poll(&room, 1, timeout_ms);
}

even_pipe_state even_socket_read(int fd, void *buffer, size_t bytes, size_t *got, int *reason) {
  even_pipe_state state = even_pipe_read(fd, buffer, bytes, got);
  *reason = state == EVEN_PIPE_ENDED ? errno : 0;
  return state;
}

static void write_address(const struct sockaddr_in *where, char *out, size_t bytes) {
  if (where->sin_family != AF_INET || inet_ntop(AF_INET, &where->sin_addr, out, (socklen_t)bytes) == NULL) {
    out[0] = '\0';
  }
}

void even_socket_local(int fd, char *out, size_t bytes) {
  struct sockaddr_in where;
  socklen_t length = sizeof where;
  memset(&where, 0, sizeof where);
  (void)even_os.getsockname(fd, (struct sockaddr *)&where, &length);
  write_address(&where, out, bytes);
}

void even_socket_peer(int fd, char *out, size_t bytes) {
  struct sockaddr_in where;
  socklen_t length = sizeof where;
  memset(&where, 0, sizeof where);
  (void)even_os.getpeername(fd, (struct sockaddr *)&where, &length);
  write_address(&where, out, bytes);
}

bool even_socket_is_address(const char *text) {
  struct in_addr address;
  return inet_pton(AF_INET, text, &address) == 1;
}

even_status even_socket_resolve(const char *name, even_socket_addresses *out) {
  const struct addrinfo wanted = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
  struct addrinfo *found = NULL;
  out->count = 0;
  int problem = even_os.getaddrinfo(name, NULL, &wanted, &found);
  if (problem == EAI_MEMORY) {
    return even_fail(EVEN_ERR_MEMORY, "the addresses of %s", name);
  }
  if (problem == EAI_SYSTEM) {
    return even_fail_errno(errno, "%s cannot be looked up", name);
  }
  if (problem != 0) {
    return even_fail(EVEN_ERR_NOT_FOUND, "%s has no IPv4 address: %s", name, gai_strerror(problem));
  }
  for (const struct addrinfo *each = found; each != NULL && out->count < EVEN_SOCKET_MOST_ADDRESSES;
       each = each->ai_next) {
    if (each->ai_addrlen == sizeof(struct sockaddr_in)) {
      struct sockaddr_in where;
      memcpy(&where, each->ai_addr, sizeof where);
      write_address(&where, out->items[out->count], sizeof out->items[0]);
      out->count += out->items[out->count][0] != '\0' ? 1 : 0;
    }
  }
  freeaddrinfo(found);
  return out->count > 0 ? EVEN_OK : even_fail(EVEN_ERR_NOT_FOUND, "%s has no IPv4 address", name);
}

static bool has(const char *addresses, const char *address) {
  size_t length = strlen(address);
  while (*addresses != '\0') {
    size_t one = strcspn(addresses, ", ");
    if (one == length && strncmp(addresses, address, length) == 0) {
      return true;
    }
    addresses += one + strspn(addresses + one, ", ");
  }
  return false;
}

void even_socket_interface(const char *address, char *out, size_t bytes) {
  const even_error kept = *even_error_last();
  even_interface_list list = {NULL, 0};
  out[0] = '\0';
  if (even_interface_list_read(&list) == EVEN_OK) {
    for (size_t i = 0; i < list.count && out[0] == '\0'; i++) {
      if (has(list.items[i].addresses, address)) {
        (void)snprintf(out, bytes, "%s", list.items[i].name);
      }
    }
  }
  even_interface_list_free(&list);
  (void)even_error_restore(&kept);
}
