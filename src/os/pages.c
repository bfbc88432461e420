/* Advice on pages. */
#include "os/pages.h"

#include "os/calls.h"

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>

#define HUGE ((uintptr_t)2 << 20)
#define LEAST ((size_t)2 << 20)

void even_pages_prefer_huge(void *data, size_t bytes) {
  uintptr_t begin = ((uintptr_t)data + HUGE - 1) & ~(HUGE - 1);
  uintptr_t end = ((uintptr_t)data + bytes) & ~(HUGE - 1);
  int kept = errno;
  if (bytes >= LEAST && begin < end) {
    (void)even_os.madvise((char *)data + (begin - (uintptr_t)data), end - begin, MADV_HUGEPAGE);
  }
  errno = kept;
}
