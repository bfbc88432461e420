/* TCP ports of this host: one that nobody uses; bytes to one that somebody listens at. */
#ifndef EVEN_OS_PORT_H
#define EVEN_OS_PORT_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>

/* Keeps a port from further calls of even_port_free and even_port_hold by any process of this host. Zeros: none. */
typedef struct even_port_held {
  bool holds;
  int fd;
} even_port_held;

/* A port on 127.0.0.1 that was free a moment ago: bound for an instant, given back at once. Where it can be, it is one
 * of those that the kernel hands out to nobody who asks for any, so that another taking it before its user binds it is
 * unlikely, not impossible. */
even_status even_port_free(int *out) EVEN_MUST_USE;
/* As even_port_free, and no other process that asks so is given it until it is let go of, although nobody has bound it
 * yet; where that cannot be, nothing keeps it. Lets go of what `held` has. */
even_status even_port_hold(int *out, even_port_held *held) EVEN_MUST_USE;
/* Whether that port, which `from` holds, could still be bound on 127.0.0.1 a moment ago: then `to` holds it, and else
 * nobody. Never let go of in between: processes that were forked meanwhile have it, too. */
bool even_port_pass(int port, even_port_held *from, even_port_held *to);
/* Does nothing where none is held. */
void even_port_let_go(even_port_held *held);
/* Connects to the port at an IPv4 address ("127.0.0.1"), sends the bytes, as many as are taken, and hangs up.
 * EVEN_ERR_NOT_FOUND where nobody listens there, EVEN_ERR_ARGUMENT for no address. SIGPIPE must be ignored. */
even_status even_port_send(const char *host, int port, const void *data, size_t bytes) EVEN_MUST_USE;

#endif
