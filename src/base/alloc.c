/* Memory from one replaceable table. */
#include "base/alloc.h"

#include "base/checked.h"
#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

even_allocator even_allocator_current = {malloc, realloc, free};

even_status even_alloc(size_t count, size_t size_bytes, void **out) {
  size_t bytes = 0;
  *out = NULL;
  if (!even_multiply_size(count, size_bytes, &bytes)) {
    return even_fail(EVEN_ERR_OVERFLOW, "%zu elements of %zu bytes do not fit in memory", count, size_bytes);
  }
  void *memory = even_allocator_current.allocate(bytes == 0 ? 1 : bytes);
  if (memory == NULL) {
    return even_fail(EVEN_ERR_MEMORY, "%zu bytes of memory could not be had", bytes);
  }
  memset(memory, 0, bytes == 0 ? 1 : bytes);
  *out = memory;
  return EVEN_OK;
}

even_status even_realloc(void **pointer, size_t count, size_t size_bytes) {
  size_t bytes = 0;
  if (!even_multiply_size(count, size_bytes, &bytes)) {
    return even_fail(EVEN_ERR_OVERFLOW, "%zu elements of %zu bytes do not fit in memory", count, size_bytes);
  }
  void *memory = even_allocator_current.reallocate(*pointer, bytes == 0 ? 1 : bytes);
  if (memory == NULL) {
    return even_fail(EVEN_ERR_MEMORY, "%zu bytes of memory could not be had", bytes);
  }
  *pointer = memory;
  return EVEN_OK;
}

void even_free(void *pointer) {
  if (pointer != NULL) {
    even_allocator_current.release(pointer);
  }
}

even_status even_duplicate(const char *text, char **out) {
  size_t bytes = strlen(text) + 1;
  EVEN_TRY(even_alloc(bytes, 1, (void **)out));
  memcpy(*out, text, bytes);
  return EVEN_OK;
}
