/* Made-up shared extents: copies. */
#include "support/clones.h"

#include "os/calls.h"

#include <errno.h>
#include <linux/fs.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

clones_range clones_asked[CLONES_MOST];
size_t clones_count;
void (*clones_before)(void);
static long fails_from;
static int fails_with;

void clones_begin(long nth, int error_number) {
  clones_count = 0;
  clones_before = NULL;
  fails_from = nth;
  fails_with = error_number;
  even_os.ioctl = clones_ioctl;
}

static bool is_refused(int fd, const struct file_clone_range *range) {
  struct stat from;
  struct stat to;
  uint64_t end = range->src_offset + range->src_length;
  if (fstat((int)range->src_fd, &from) != 0 || fstat(fd, &to) != 0) {
    return true;
  }
  bool at_borders = range->src_offset % CLONES_BLOCK == 0 && range->dest_offset % CLONES_BLOCK == 0;
  bool whole_blocks = range->src_length % CLONES_BLOCK == 0;
  bool at_the_ends = end == (uint64_t)from.st_size && range->dest_offset + range->src_length >= (uint64_t)to.st_size;
  return !at_borders || end > (uint64_t)from.st_size || (!whole_blocks && !at_the_ends);
}

/* spoilt: with what is nobody's. */
static int copy(int fd, const struct file_clone_range *range, bool spoilt) {
  size_t bytes = (size_t)range->src_length;
  char *data = malloc(bytes);
  if (data == NULL || pread((int)range->src_fd, data, bytes, (off_t)range->src_offset) != (ssize_t)bytes) {
    abort();
  }
  if (spoilt) {
    memset(data, 0xA5, bytes);
  }
  if (pwrite(fd, data, bytes, (off_t)range->dest_offset) != (ssize_t)bytes) {
    abort();
  }
  free(data);
  return 0;
}

int clones_ioctl(int fd, unsigned long request, void *argument) {
  const struct file_clone_range *range = argument;
  if (request != FICLONERANGE) {
    return even_os_real.ioctl(fd, request, argument);
  }
  if (clones_before != NULL) {
    clones_before();
  }
  if (clones_count < CLONES_MOST) {
    clones_asked[clones_count] = (clones_range){range->dest_offset, range->src_length};
  }
  clones_count++;
  if (is_refused(fd, range)) {
    errno = EINVAL;
    return -1;
  }
  bool fails = fails_from > 0 && clones_count >= (size_t)fails_from;
  (void)copy(fd, range, fails);
  errno = fails ? fails_with : 0;
  return fails ? -1 : 0;
}
