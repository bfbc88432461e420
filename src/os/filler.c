/* Fills a file system by writing. */
#include "os/filler.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/file.h"

#include <errno.h>
#include <fcntl.h>

enum { LARGEST_PIECE = 1 << 16 };
static const char zeros[LARGEST_PIECE];

even_status even_filler_open(const char *path, int *fd) {
  *fd = even_os.open(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
  return *fd < 0 ? even_fail_errno(errno, "%s cannot be made", path) : EVEN_OK;
}

even_status even_filler_fill(int fd, uint64_t *bytes) {
  size_t piece = LARGEST_PIECE;
  while (piece > 0) {
    ssize_t written = even_os.write(fd, zeros, piece);
    if (written > 0) {
      *bytes += (uint64_t)written;
    } else if (written < 0 && errno != EINTR && errno != ENOSPC && errno != EDQUOT) {
      return even_fail_errno(errno, "the file that fills a disk cannot be written");
    } else if (written == 0 || errno != EINTR) {
      piece /= 16; /* down to single bytes */
    }
  }
  return EVEN_OK;
}

even_status even_filler_close(const char *path, int fd) {
  (void)even_os.close(fd);
  return even_file_remove(path);
}
