/* How the memory that a process has is backed by pages. */
#ifndef EVEN_OS_PAGES_H
#define EVEN_OS_PAGES_H

#include <stddef.h>

/* Asks for huge pages behind memory that is about to be filled for the first time: one fault where there were 512.
 * Changes nothing where there are none, or where it is small. */
void even_pages_prefer_huge(void *data, size_t bytes);

#endif
