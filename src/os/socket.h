/* TCP connections that never wait, and that end soon when the other host is gone. */
#ifndef EVEN_OS_SOCKET_H
#define EVEN_OS_SOCKET_H

#include "os/pipe.h"

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>

/* The kernel gives a connection up when the other host has been silent for so long: it answers the kernel's own
 * probes, once a second, also while its processes stand still. At least two such seconds, in which the kernel repeats
 * what was lost three times: in less, a host that is only slow to answer would be lost. */
enum { EVEN_SOCKET_SILENCE_MS = 4000, EVEN_SOCKET_SHORTEST_SILENCE_MS = 2000, EVEN_SOCKET_LONGEST_SILENCE_MS = 600000 };

/* Another time for it (from the shortest to the longest, which what is beyond counts as; 0: the usual one), of
 * connections that begin in this process from now on. Any thread. */
void even_socket_silence_set(int silence_ms);
int even_socket_silence(void);
/* Of a connection that is there already. */
even_status even_socket_watch(int fd) EVEN_MUST_USE;
/* For how many milliseconds nothing at all has come from the other host, neither data (whether or not they were read)
 * nor its kernel's word that it has got something (tcp(7), TCP_INFO); of a connection that is up and watched at most a
 * second while that host lives. 0 where the kernel does not say. The kernel's own limits are reckoned from its first
 * repetition of what was not acknowledged, which comes seconds late after a network that was cut for moments: what it
 * repeated then counts as a slow way. */
int even_socket_silent(int fd);
/* Whether the other host's kernel has said that it has all that was written (tcp(7), SIOCOUTQ), read there or not. True
 * where the kernel here does not say. */
bool even_socket_delivered(int fd);

enum { EVEN_SOCKET_ADDRESS = 16, EVEN_SOCKET_MOST_ADDRESSES = 8 };

/* Of a host, in the order in which they should be tried. */
typedef struct even_socket_addresses {
  size_t count;
  char items[EVEN_SOCKET_MOST_ADDRESSES][EVEN_SOCKET_ADDRESS];
} even_socket_addresses;

/* Whether the text is an IPv4 address ("10.0.0.1"). */
bool even_socket_is_address(const char *text);
/* The IPv4 addresses that a name has now, the first of them; an address is its own. It may ask other hosts, and take as
 * long as they do. EVEN_ERR_NOT_FOUND: it has none, or nobody who would know answers. */
even_status even_socket_resolve(const char *name, even_socket_addresses *out) EVEN_MUST_USE;
/* Connects to an IPv4 address ("10.0.0.1"); *fd (close-on-exec, non-blocking) is the caller's, even_pipe_close closes
 * it. EVEN_ERR_TIMEOUT after `timeout_ms`. */
even_status even_socket_connect(const char *address, int port, int timeout_ms, int *fd) EVEN_MUST_USE;
/* The same without waiting: the connection is on its way when this returns; what is written meanwhile waits, and that
 * it fails is told by reading. */
even_status even_socket_connect_begin(const char *address, int port, int *fd) EVEN_MUST_USE;
/* The next connection that waits at a listener (os/listener.h), as above; *fd -1: none does. */
even_status even_socket_accept(int listener, int *fd) EVEN_MUST_USE;
/* The same at a listener of any kind: nothing is set at the connection but that it does not block. */
even_status even_socket_take(int listener, int *fd) EVEN_MUST_USE;
/* Writes what the kernel takes now and returns how much that is; *broken: the connection is, for *reason (an errno). */
size_t even_socket_write(int fd, const void *bytes, size_t count, bool *broken, int *reason);
/* Waits until it can be written to, at most for so long. */
void even_socket_wait(int fd, int timeout_ms);
/* As even_pipe_read; *reason of EVEN_PIPE_ENDED: an errno, 0 where the other end closed it. */
even_pipe_state even_socket_read(int fd, void *buffer, size_t bytes, size_t *got, int *reason);
/* The addresses of this end and of the other, "" where they are not known. */
void even_socket_local(int fd, char *out, size_t bytes);
void even_socket_peer(int fd, char *out, size_t bytes);
/* The interface that has this address ("eth0"), "" for none. */
void even_socket_interface(const char *address, char *out, size_t bytes);

#endif
