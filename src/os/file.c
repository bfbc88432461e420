/* Whole files and durable replacement. */
#include "os/file.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Opens a file that the user may have named: not a FIFO or a terminal, on which a read may wait for ever. */
static even_status open_file(const char *path, int flags, int *fd) {
  struct stat facts;
  *fd = even_os.open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | flags, 0);
  if (*fd < 0 && errno == ELOOP && (flags & O_NOFOLLOW) != 0) {
    (void)even_fail(EVEN_ERR_INPUT, "%s is a symbolic link", path);
    return even_error_fix("name the file that it leads to: readlink -f %s", path);
  }
  if (*fd < 0) {
    return even_fail_errno(errno, "%s cannot be opened", path);
  }
  if (even_os.fstat(*fd, &facts) != 0) {
    even_status status = even_fail_errno(errno, "%s cannot be looked at", path);
    (void)even_os.close(*fd);
    return status;
  }
  if (!S_ISREG(facts.st_mode) && !S_ISDIR(facts.st_mode)) {
    (void)even_os.close(*fd);
    return even_fail(EVEN_ERR_INPUT, "%s is not a plain file (but a pipe, a device or a socket)", path);
  }
  return EVEN_OK;
}

/* Closes it. */
static even_status read_all(const char *path, int fd, size_t limit_bytes, even_text *out) {
  char buffer[16384];
  size_t total = 0;
  even_status status = EVEN_OK;
  for (;;) {
    ssize_t got = even_os.read(fd, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      status = errno == EISDIR ? even_fail(EVEN_ERR_INPUT, "%s is a folder, not a file", path)
                               : even_fail_errno(errno, "%s cannot be read", path);
      break;
    }
    if (got == 0) {
      even_text_append(out, "", 0);
      status = even_text_status(out);
      break;
    }
    total += (size_t)got;
    if (total > limit_bytes) {
      status = even_fail(EVEN_ERR_INPUT, "%s is larger than %zu bytes", path, limit_bytes);
      break;
    }
    even_text_append(out, buffer, (size_t)got);
  }
  (void)even_os.close(fd);
  return status;
}

even_status even_file_read(const char *path, size_t limit_bytes, even_text *out) {
  int fd = -1;
  EVEN_TRY(open_file(path, 0, &fd));
  return read_all(path, fd, limit_bytes, out);
}

even_status even_file_mark(const char *path, char out[EVEN_FILE_MARK]) {
  struct stat facts;
  int fd = -1;
  EVEN_TRY(open_file(path, 0, &fd));
  bool told = even_os.fstat(fd, &facts) == 0;
  int error = errno;
  (void)even_os.close(fd);
  if (!told) {
    return even_fail_errno(error, "%s cannot be looked at", path);
  }
  (void)snprintf(out, EVEN_FILE_MARK, "%" PRIu64 "-%" PRId64 ".%09ld", (uint64_t)facts.st_ino,
                 (int64_t)facts.st_mtim.tv_sec, facts.st_mtim.tv_nsec);
  return EVEN_OK;
}

static even_status check_private(const char *path, int fd) {
  struct stat facts;
  if (even_os.fstat(fd, &facts) != 0) {
    return even_fail_errno(errno, "%s cannot be looked at", path);
  }
  if (S_ISDIR(facts.st_mode)) {
    (void)even_fail(EVEN_ERR_INPUT, "%s is a folder", path);
    return even_error_fix("name a file in it");
  }
  if (facts.st_uid != even_os.geteuid()) {
    (void)even_fail(EVEN_ERR_PERMISSION, "%s belongs to another user (%ld, not %ld)", path, (long)facts.st_uid,
                    (long)even_os.geteuid());
    return even_error_fix("what it says may be that user's words: make one of your own");
  }
  if ((facts.st_mode & 077) != 0) {
    (void)even_fail(EVEN_ERR_PERMISSION, "%s is open to others (mode %04o)", path, (unsigned)(facts.st_mode & 07777));
    return even_error_fix("others may know what it holds: write a new one, and let nobody else read it (chmod 600)");
  }
  return EVEN_OK;
}

even_status even_file_read_private(const char *path, size_t limit_bytes, even_text *out) {
  int fd = -1;
  EVEN_TRY(open_file(path, O_NOFOLLOW, &fd));
  even_status status = check_private(path, fd);
  if (status != EVEN_OK) {
    (void)even_os.close(fd);
    return status;
  }
  return read_all(path, fd, limit_bytes, out);
}

even_status even_file_start(const char *path, size_t bytes, even_text *out) {
  char buffer[4096];
  int fd = -1;
  EVEN_TRY(open_file(path, 0, &fd));
  ssize_t got = even_os.read(fd, buffer, bytes < sizeof buffer ? bytes : sizeof buffer);
  even_status status = got < 0 && errno != EISDIR ? even_fail_errno(errno, "%s cannot be read", path) : EVEN_OK;
  (void)even_os.close(fd);
  if (got >= 0) {
    even_text_append(out, buffer, (size_t)got);
  }
  return status == EVEN_OK ? even_text_status(out) : status;
}

even_status even_file_write_all(int fd, const void *data, size_t bytes) {
  const char *at = data;
  while (bytes > 0) {
    ssize_t written = even_os.write(fd, at, bytes);
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written < 0) {
      return even_fail_errno(errno, "%zu bytes could not be written", bytes);
    }
    if (written == 0) {
      return even_fail(EVEN_ERR_SYSTEM, "%zu bytes could not be written: the file takes no more", bytes);
    }
    at += written;
    bytes -= (size_t)written;
  }
  return EVEN_OK;
}

even_status even_folder_sync(const char *path) {
  int fd = even_os.open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) {
    return even_fail_errno(errno, "folder %s cannot be opened", path);
  }
  even_status status = EVEN_OK;
  if (even_os.fsync(fd) != 0 && errno != EINVAL) {
    status = even_fail_errno(errno, "folder %s cannot be synced", path);
  }
  (void)even_os.close(fd);
  return status;
}

static even_status sync_parent(const char *path) {
  const char *slash = strrchr(path, '/');
  char *folder = NULL;
  if (slash == NULL) {
    return even_folder_sync(".");
  }
  EVEN_TRY(even_duplicate(path, &folder));
  folder[slash == path ? 1 : slash - path] = '\0';
  even_status status = even_folder_sync(folder);
  even_free(folder);
  return status;
}

/* The file is always a new one: a stale one of that name may be a link to another file, or open to others. */
static even_status write_new(const char *path, const void *data, size_t bytes, mode_t mode) {
  (void)even_os.unlink(path);
  int fd = even_os.open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
  if (fd < 0) {
    return even_fail_errno(errno, "%s cannot be created", path);
  }
  even_status status = even_file_write_all(fd, data, bytes);
  if (status == EVEN_OK && even_os.fsync(fd) != 0) {
    status = even_fail_errno(errno, "%s cannot be synced", path);
  }
  if (even_os.close(fd) != 0 && status == EVEN_OK) {
    status = even_fail_errno(errno, "%s cannot be closed", path);
  }
  if (status != EVEN_OK) {
    (void)even_os.unlink(path);
  }
  return status;
}

static even_status replace(const char *path, const void *data, size_t bytes, mode_t mode) {
  even_text temporary = EVEN_TEXT_EMPTY;
  even_text_format(&temporary, "%s.tmp", path);
  even_status status = even_text_status(&temporary);
  if (status == EVEN_OK) {
    status = write_new(even_text_string(&temporary), data, bytes, mode);
  }
  if (status == EVEN_OK && even_os.rename(even_text_string(&temporary), path) != 0) {
    status = even_fail_errno(errno, "%s cannot be put in place", path);
    (void)even_os.unlink(even_text_string(&temporary));
  }
  if (status == EVEN_OK) {
    status = sync_parent(path);
  }
  even_text_free(&temporary);
  return status;
}

even_status even_file_replace(const char *path, const void *data, size_t bytes) {
  return replace(path, data, bytes, 0666);
}

even_status even_file_replace_private(const char *path, const void *data, size_t bytes) {
  return replace(path, data, bytes, 0600);
}

even_status even_file_rename(const char *from, const char *to) {
  if (even_os.rename(from, to) != 0) {
    return even_fail_errno(errno, "%s cannot be renamed to %s", from, to);
  }
  return EVEN_OK;
}

even_status even_file_link(const char *from, const char *to) {
  if (even_os.link(from, to) != 0) {
    return even_fail_errno(errno, "%s cannot get the further name %s", from, to);
  }
  return EVEN_OK;
}

even_status even_file_remove(const char *path) {
  if (even_os.unlink(path) != 0 && errno != ENOENT) {
    return even_fail_errno(errno, "%s cannot be removed", path);
  }
  return EVEN_OK;
}

/* Of a folder that is new. Whoever may write to a folder need not be allowed to read it: then its name is as safe as
 * that file system makes it. */
static even_status sync_new_name(const char *path) {
  even_error kept = *even_error_last();
  even_status status = sync_parent(path);
  if (status == EVEN_ERR_PERMISSION) {
    (void)even_error_restore(&kept);
    return EVEN_OK;
  }
  return status;
}

static even_status make_one_folder(const char *path) {
  if (even_os.mkdir(path, 0777) == 0) {
    return sync_new_name(path);
  }
  if (errno != EEXIST) {
    return even_fail_errno(errno, "folder %s cannot be made", path);
  }
  int fd = even_os.open(path, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd >= 0) {
    (void)even_os.close(fd);
    return EVEN_OK;
  }
  if (errno == ENOTDIR) {
    return even_fail(EVEN_ERR_IN_USE, "folder %s cannot be made: something else has that name", path);
  }
  if (errno == ENOENT) {
    return even_fail(EVEN_ERR_IN_USE, "folder %s cannot be made: a link of that name leads nowhere", path);
  }
  return even_fail_errno(errno, "folder %s is there and cannot be entered", path);
}

even_status even_folder_make(const char *path) {
  char *partial = NULL;
  EVEN_TRY(even_duplicate(path, &partial));
  even_status status = EVEN_OK;
  char *slash = partial[0] == '\0' ? NULL : strchr(partial + 1, '/');
  for (; status == EVEN_OK && slash != NULL; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    status = make_one_folder(partial);
    *slash = '/';
  }
  if (status == EVEN_OK) {
    status = make_one_folder(partial);
  }
  even_free(partial);
  return status;
}
