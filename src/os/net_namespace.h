/* Network namespaces of this machine: a thread goes into one, and sockets that it makes meanwhile are there. */
#ifndef EVEN_OS_NET_NAMESPACE_H
#define EVEN_OS_NET_NAMESPACE_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <sys/types.h>

/* Takes the calling thread into the network namespace of a process. *before brings it back. EVEN_ERR_NOT_FOUND: there
 * is no such process; EVEN_ERR_PERMISSION: only root may. */
even_status even_net_namespace_enter(pid_t pid, int *before) EVEN_MUST_USE;
/* Back, and frees `before`. EVEN_ERR_SYSTEM: the thread is where it was. */
even_status even_net_namespace_leave(int before) EVEN_MUST_USE;
/* Whether both processes live, and in one network namespace. */
bool even_net_namespace_same(pid_t a, pid_t b);

#endif
