/* The terminal's size. */
#ifndef EVEN_OS_TERMINAL_H
#define EVEN_OS_TERMINAL_H

#include <stdbool.h>

/* False when `fd` is no terminal or its size is unknown. */
bool even_terminal_size(int fd, int *rows, int *columns);

#endif
