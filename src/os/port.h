/* TCP ports of this host: one that nobody uses; bytes to one that somebody listens at. */
#ifndef EVEN_OS_PORT_H
#define EVEN_OS_PORT_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>

/* A port on 127.0.0.1 that was free a moment ago: bound for an instant, given back at once. Where it can be, it is one
 * of those that the kernel hands out to nobody who asks for any, so that another taking it before its user binds it is
 * unlikely, not impossible. */
even_status even_port_free(int *out) EVEN_MUST_USE;
/* Whether that port could be bound on 127.0.0.1 a moment ago. */
bool even_port_is_free(int port);
/* Connects to the port at an IPv4 address ("127.0.0.1"), sends the bytes, as many as are taken, and hangs up.
 * EVEN_ERR_NOT_FOUND where nobody listens there, EVEN_ERR_ARGUMENT for no address. SIGPIPE must be ignored. */
even_status even_port_send(const char *host, int port, const void *data, size_t bytes) EVEN_MUST_USE;

#endif
