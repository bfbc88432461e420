/* The names in a folder, one by one, without allocating. */
#ifndef EVEN_OS_ENTRIES_H
#define EVEN_OS_ENTRIES_H

#include <evenstep/status.h>
#include <stdbool.h>

/* Calls `each` for every name in the folder but "." and "..", in no order, until it returns false. Allocates nothing,
 * so that a process just forked may call it. */
even_status even_folder_each(const char *path, bool (*each)(void *context, const char *name),
                             void *context) EVEN_MUST_USE;

#endif
