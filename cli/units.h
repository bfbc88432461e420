/* Amounts in words that people read. */
#ifndef EVEN_CLI_UNITS_H
#define EVEN_CLI_UNITS_H

#include <stddef.h>
#include <stdint.h>

/* "47.1 GiB"; each returns `out`. */
const char *even_cli_bytes(uint64_t bytes, char *out, size_t size);
/* "0-3,8": CPU numbers in order, in ranges where they are neighbours; cut with "…" where it does not fit. */
const char *even_cli_cpus(const int32_t *cpus, size_t count, char *out, size_t size);

#endif
