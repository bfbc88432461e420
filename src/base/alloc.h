/* Memory from one replaceable table, so that tests can make any allocation fail. */
#ifndef EVEN_BASE_ALLOC_H
#define EVEN_BASE_ALLOC_H

#include <evenstep/status.h>
#include <stddef.h>

typedef struct even_allocator {
  void *(*allocate)(size_t bytes);
  void *(*reallocate)(void *pointer, size_t bytes);
  void (*release)(void *pointer);
} even_allocator;

/* The table in use; only tests write to it. Default: malloc, realloc, free. */
extern even_allocator even_allocator_current;

/* Zeroed memory for `count` elements of `size_bytes` each into *out (free with even_free);
 * errors: EVEN_ERR_MEMORY, EVEN_ERR_OVERFLOW. count 0 gives a valid pointer. Any thread. */
even_status even_alloc(size_t count, size_t size_bytes, void **out) EVEN_MUST_USE;
/* Grows or shrinks *pointer; on failure *pointer stays valid and unchanged. */
even_status even_realloc(void **pointer, size_t count, size_t size_bytes) EVEN_MUST_USE;
void even_free(void *pointer);
/* A copy of `text` into *out. */
even_status even_duplicate(const char *text, char **out) EVEN_MUST_USE;

#define EVEN_NEW(pointer) even_alloc(1, sizeof **(pointer), (void **)(pointer))
#define EVEN_NEW_ARRAY(pointer, count) even_alloc((count), sizeof **(pointer), (void **)(pointer))

#endif
