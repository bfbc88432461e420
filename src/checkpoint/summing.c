/* The sums and the window of one thread. */
#include "checkpoint/summing.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/direct_file.h"

void even_summing_close(void *own) {
  even_summing *mine = own;
  if (mine != NULL) {
    even_chunk_sums_drop(mine->sums);
    even_free(mine->memory);
    even_free(mine);
  }
}

even_status even_summing_open(size_t chunk_bytes, size_t window_bytes, void **own) {
  even_summing *mine = NULL;
  EVEN_TRY(EVEN_NEW(&mine));
  *own = mine;
  EVEN_TRY(even_alloc(1, window_bytes + EVEN_DIRECT_ALIGNMENT, &mine->memory));
  uintptr_t aligned = ((uintptr_t)mine->memory + EVEN_DIRECT_ALIGNMENT - 1) & ~(uintptr_t)(EVEN_DIRECT_ALIGNMENT - 1);
  mine->window = (char *)mine->memory + (aligned - (uintptr_t)mine->memory);
  return even_chunk_sums_open(chunk_bytes, &mine->sums);
}
