/* The shared library of cli/chaos_clock_preload.c, as it was linked. */
#ifndef EVEN_CLI_CHAOS_CLOCK_LIBRARY_H
#define EVEN_CLI_CHAOS_CLOCK_LIBRARY_H

#include <stddef.h>

extern const unsigned char even_chaos_clock_library[];
extern const size_t even_chaos_clock_library_bytes;

#endif
