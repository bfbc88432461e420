/* TLS 1.3 between two processes that share a secret key: who does not have the key can neither read, nor change, nor
 * begin a connection, and what was recorded of one cannot be played into another (fresh Diffie-Hellman keys each time,
 * no early data). OpenSSL does all of it (RFC 8446, 2.2; RFC 9258 is not needed: one key, one job). No sockets here:
 * bytes in, bytes out. One thread at a time. */
#ifndef EVEN_OS_TLS_H
#define EVEN_OS_TLS_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct even_tls even_tls;

enum { EVEN_TLS_KEY_BYTES = 32 };

/* The key from its 64 hexadecimal digits. EVEN_ERR_INPUT: they are none. */
even_status even_tls_key_read(const char *digits, unsigned char key[EVEN_TLS_KEY_BYTES]) EVEN_MUST_USE;

/* One end of a connection: the one that was called (`server`), or the one that calls. */
even_status even_tls_open(bool server, const unsigned char key[EVEN_TLS_KEY_BYTES], even_tls **out) EVEN_MUST_USE;
/* NULL is allowed. The key is wiped from memory. */
void even_tls_close(even_tls *tls);
/* Bytes that came from the other end. */
even_status even_tls_feed(even_tls *tls, const void *bytes, size_t count) EVEN_MUST_USE;
/* The next bytes of what the other end wrote; *got 0: none yet, more must be fed. While the greeting of both ends
 * (handshake) is not done, it goes on with that. *ended: the other end has said that nothing more comes.
 * EVEN_ERR_PERMISSION: the other end does not have the key. EVEN_ERR_INPUT: what came is not TLS, or was tampered with.
 */
even_status even_tls_read(even_tls *tls, void *buffer, size_t room, size_t *got, bool *ended) EVEN_MUST_USE;
/* Whether both ends have proved that they have the key. */
bool even_tls_ready(const even_tls *tls);
/* Takes all of `bytes` for the other end, once ready (EVEN_ERR_STATE before). */
even_status even_tls_write(even_tls *tls, const void *bytes, size_t count) EVEN_MUST_USE;
/* Says that nothing more comes. */
void even_tls_end(even_tls *tls);
/* The next bytes to be sent to the other end, at most `room`; 0: none now. */
size_t even_tls_take(even_tls *tls, void *buffer, size_t room);
/* "OpenSSL 3.0.19 27 Jan 2026"; a static string. */
const char *even_tls_library(void);

#endif
