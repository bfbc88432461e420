/* Shared libraries that are opened at run time, so that one build works with and without them. */
#ifndef EVEN_OS_LIBRARY_H
#define EVEN_OS_LIBRARY_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct even_library {
  void *handle; /* NULL when not open */
} even_library;

/* Opens `name` ("libcuda.so.1": where the loader looks; or a path). EVEN_ERR_NOT_FOUND with the loader's words. */
even_status even_library_open(const char *name, even_library *out) EVEN_MUST_USE;
/* The same, where the process has that library already; nothing is loaded. */
even_status even_library_find(const char *name, even_library *out) EVEN_MUST_USE;
/* The address of a symbol, NULL where the library lacks it (an older version). Copy it into a function pointer with
 * memcpy: ISO C knows no cast between the two. */
void *even_library_symbol(const even_library *library, const char *name);
/* A function that a table wants. */
typedef struct even_library_wanted {
  const char *name;
  size_t offset; /* of its pointer in the table */
  bool optional; /* NULL where the library lacks it */
} even_library_wanted;

/* Fills a table of function pointers. The first name that the library lacks and that is not optional, where filling
 * ends; NULL: it has all. */
const char *even_library_take(const even_library *library, const even_library_wanted *wanted, size_t count,
                              void *table);
/* Its symbols must not be used any more. A library that is not open is left alone. */
void even_library_close(even_library *library);

#endif
