/* A TCP socket that waits for connections. */
#ifndef EVEN_OS_LISTENER_H
#define EVEN_OS_LISTENER_H

#include <evenstep/status.h>

/* Listens at an IPv4 address ("127.0.0.1") and port; 0 takes any free one. *port becomes the real one, *fd
 * (close-on-exec) is the caller's. EVEN_ERR_IN_USE where the port is taken, EVEN_ERR_ARGUMENT for no address. */
even_status even_listener_open(const char *address, int *port, int *fd) EVEN_MUST_USE;

/* At which port it listens. */
even_status even_listener_port(int fd, int *port) EVEN_MUST_USE;

void even_listener_close(int fd);

#endif
