/* The sums and the window of one thread. */
#include "checkpoint/summing.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/direct_file.h"
#include "os/pages.h"

enum { HUGE_PAGE = 2 << 20 };

void even_summing_close(void *own) {
  even_summing *mine = own;
  if (mine != NULL) {
    even_chunk_sums_drop(mine->sums);
    even_chunk_sums_drop(mine->parts);
    even_free(mine->memory);
    even_free(mine);
  }
}

even_status even_summing_open(size_t chunk_bytes, size_t window_bytes, void **own) {
  even_summing *mine = NULL;
  EVEN_TRY(EVEN_NEW(&mine));
  *own = mine;
  /* a device takes a huge page in one piece, and 512 small ones in as many */
  uintptr_t alignment = window_bytes >= HUGE_PAGE ? HUGE_PAGE : EVEN_DIRECT_ALIGNMENT;
  EVEN_TRY(even_alloc(1, window_bytes + alignment, &mine->memory));
  uintptr_t aligned = ((uintptr_t)mine->memory + alignment - 1) & ~(alignment - 1);
  mine->window = (char *)mine->memory + (aligned - (uintptr_t)mine->memory);
  even_pages_prefer_huge(mine->window, window_bytes);
  return even_chunk_sums_open(chunk_bytes, &mine->sums);
}
