/* A TCP port of this host that nobody uses. */
#ifndef EVEN_OS_PORT_H
#define EVEN_OS_PORT_H

#include <evenstep/status.h>

/* A port on 127.0.0.1 that was free a moment ago: bound for an instant, given back at once. The kernel hands such ports
 * out at random, so that another taking it before its user binds it is unlikely, not impossible. */
even_status even_port_free(int *out) EVEN_MUST_USE;

#endif
