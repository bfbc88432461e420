/* Random names. */
#ifndef EVEN_OS_RANDOM_H
#define EVEN_OS_RANDOM_H

#include <evenstep/status.h>
#include <stddef.h>

/* `digits` random hexadecimal digits and a NUL into `out` (digits + 1 bytes; at most 64 digits), from the kernel's
 * generator: fit for tokens. */
even_status even_random_hex(char *out, size_t digits) EVEN_MUST_USE;

#endif
