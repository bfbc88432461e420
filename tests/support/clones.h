/* A file system that shares extents, made up: FICLONERANGE refuses what the kernel's refuses (mm/filemap.c and
 * fs/remap_range.c: borders of blocks, ends of files) and copies the rest. */
#ifndef EVEN_TESTS_SUPPORT_CLONES_H
#define EVEN_TESTS_SUPPORT_CLONES_H

#include <stddef.h>
#include <stdint.h>

enum { CLONES_BLOCK = 64 << 10, CLONES_MOST = 64 };

typedef struct clones_range {
  uint64_t offset;
  uint64_t bytes;
} clones_range;

/* What was asked for since clones_begin, in order, also in vain. */
extern clones_range clones_asked[CLONES_MOST];
extern size_t clones_count;

/* even_os.ioctl shares from now on; the nth call (1: the next; 0: none) and all after it fail with error_number, having
 * spoilt the range that they should have shared. Undone by `even_os = even_os_real`, as fault_reset does. */
void clones_begin(long nth, int error_number);
/* Called before each; NULL: nothing is. */
extern void (*clones_before)(void);
/* The call itself, of files without any model. */
int clones_ioctl(int fd, unsigned long request, void *argument);

#endif
