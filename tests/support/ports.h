/* Whether a TCP port of this host is free, for tests of who keeps one. */
#ifndef EVEN_TESTS_SUPPORT_PORTS_H
#define EVEN_TESTS_SUPPORT_PORTS_H

#include <stdbool.h>

/* Whether it could be bound on 127.0.0.1 a moment ago, and nobody holds it (os/port.h). */
bool port_is_free(int port);

#endif
