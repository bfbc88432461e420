/* The TCP ports at which a process listens (Linux: /proc/PID/net/tcp, /proc/PID/fd). */
#ifndef EVEN_OS_LISTENING_H
#define EVEN_OS_LISTENING_H

#include <evenstep/status.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct even_listening {
  char address[16]; /* IPv4, as others of its host reach it: 127.0.0.1 where it listens at all */
  int port;
} even_listening;

/* Those of the process, `room` at most, into `out`; *count are known. A process of another user, or one that has ended,
 * has none. Errors: EVEN_ERR_MEMORY. */
even_status even_listening_of(pid_t pid, even_listening *out, size_t room, size_t *count) EVEN_MUST_USE;

/* ---- for tests ---- */

/* From the text of /proc/net/tcp (or tcp6), those whose sockets have these numbers. Returns how many are in `out`. */
size_t even_listening_parse(const char *text, const uint64_t *sockets, size_t socket_count, even_listening *out,
                            size_t room);

#endif
