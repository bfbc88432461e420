/* A scratch file past the page cache. */
#include "os/direct_file.h"

#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

/* Tries O_TMPFILE first; a filesystem without it (NFS, overlay on old kernels) gets a name for a moment. */
static int open_nameless(const char *folder, int flags) {
  char path[4096];
  int fd = even_os.open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL && errno != ENOENT)) {
    return fd;
  }
  int length = snprintf(path, sizeof path, "%s/.evenstep-disk-test", folder);
  if (length < 0 || (size_t)length >= sizeof path) {
    errno = ENAMETOOLONG;
    return -1;
  }
  (void)even_os.unlink(path); /* of one that was killed in that moment */
  fd = even_os.open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | flags, 0600);
  int error = errno;
  (void)even_os.unlink(path);
  errno = error;
  return fd;
}

even_status even_direct_file_open(const char *folder, even_direct_file *out) {
  out->direct = true;
  out->fd = open_nameless(folder, O_DIRECT);
  if (out->fd < 0 && errno == EINVAL) {
    out->direct = false;
    out->fd = open_nameless(folder, 0);
  }
  return out->fd < 0 ? even_fail_errno(errno, "no file can be made in %s", folder) : EVEN_OK;
}

void even_direct_file_close(even_direct_file *file) {
  if (file->fd >= 0) {
    (void)even_os.close(file->fd);
    file->fd = -1;
  }
}

even_status even_direct_file_write(even_direct_file *file, const void *data, size_t bytes, uint64_t offset) {
  const char *at = data;
  while (bytes > 0) {
    ssize_t written = even_os.pwrite(file->fd, at, bytes, (off_t)offset);
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      return even_fail_errno(written == 0 ? ENOSPC : errno, "the scratch file cannot be written");
    }
    at += written;
    bytes -= (size_t)written;
    offset += (uint64_t)written;
  }
  return EVEN_OK;
}

even_status even_direct_file_read(even_direct_file *file, void *data, size_t bytes, uint64_t offset) {
  char *at = data;
  while (bytes > 0) {
    ssize_t got = even_os.pread(file->fd, at, bytes, (off_t)offset);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      return even_fail_errno(got == 0 ? EIO : errno, "the scratch file cannot be read");
    }
    at += got;
    bytes -= (size_t)got;
    offset += (uint64_t)got;
  }
  return EVEN_OK;
}

even_status even_direct_file_sync(even_direct_file *file) {
  return even_os.fsync(file->fd) != 0 ? even_fail_errno(errno, "the scratch file cannot be synced") : EVEN_OK;
}
