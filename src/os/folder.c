/* Folders over the table of calls. */
#include "os/folder.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/text.h"
#include "os/calls.h"
#include "os/locks.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

static even_status append_name(even_names *names, size_t *capacity, const char *name) {
  if (names->count == *capacity) {
    size_t wanted = *capacity == 0 ? 16 : *capacity * 2;
    EVEN_TRY(even_realloc((void **)&names->items, wanted, sizeof *names->items));
    *capacity = wanted;
  }
  EVEN_TRY(even_duplicate(name, &names->items[names->count]));
  names->count++;
  return EVEN_OK;
}

static even_status append_entries(even_names *names, size_t *capacity, const char *buffer, size_t bytes) {
  size_t at = 0;
  while (at < bytes) {
    struct dirent64 entry;
    memcpy(&entry, buffer + at, offsetof(struct dirent64, d_name));
    const char *name = buffer + at + offsetof(struct dirent64, d_name);
    if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0) {
      EVEN_TRY(append_name(names, capacity, name));
    }
    at += entry.d_reclen;
  }
  return EVEN_OK;
}

static int by_name(const void *left, const void *right) {
  return strcmp(*(char *const *)left, *(char *const *)right);
}

/* What is in the folder behind `fd`, which has not been listed before. */
static even_status list(const char *path, int fd, even_names *out) {
  char buffer[8192];
  size_t capacity = 0;
  even_status status = EVEN_OK;
  while (status == EVEN_OK) {
    ssize_t got = even_os.getdents64(fd, buffer, sizeof buffer);
    if (got < 0) {
      status = even_fail_errno(errno, "folder %s cannot be listed", path);
    }
    if (got <= 0) {
      break;
    }
    status = append_entries(out, &capacity, buffer, (size_t)got);
  }
  if (status == EVEN_OK && out->count > 1) {
    qsort(out->items, out->count, sizeof *out->items, by_name);
  }
  return status;
}

static int open_for_reading(const char *path, int flags) {
  return even_os.open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags, 0);
}

static even_status open_folder(const char *path, int flags, int *fd) {
  *fd = open_for_reading(path, flags);
  return *fd < 0 ? even_fail_errno(errno, "folder %s cannot be opened", path) : EVEN_OK;
}

even_status even_folder_names(const char *path, even_names *out) {
  int fd = -1;
  *out = (even_names){NULL, 0};
  EVEN_TRY(open_folder(path, 0, &fd));
  even_status status = list(path, fd, out);
  (void)even_os.close(fd);
  return status;
}

even_status even_names_add(even_names *names, const char *text) {
  EVEN_TRY(even_realloc((void **)&names->items, names->count + 1, sizeof *names->items));
  EVEN_TRY(even_duplicate(text, &names->items[names->count]));
  names->count++;
  return EVEN_OK;
}

void even_names_free(even_names *names) {
  for (size_t i = 0; i < names->count; i++) {
    even_free(names->items[i]);
  }
  even_free(names->items);
  *names = (even_names){NULL, 0};
}

static even_status make_folder(const char *path, mode_t mode) {
  if (even_os.mkdir(path, mode) != 0) {
    return even_fail_errno(errno, "folder %s cannot be made", path);
  }
  return EVEN_OK;
}

even_status even_folder_create(const char *path) {
  return make_folder(path, 0777);
}

even_status even_folder_create_private(const char *path) {
  return make_folder(path, 0700);
}

even_status even_folder_remove_locked(const char *path, int fd) {
  even_names names = {NULL, 0};
  even_status status = list(path, fd, &names);
  for (size_t i = 0; i < names.count && status == EVEN_OK; i++) {
    if (even_os.unlinkat(fd, names.items[i], 0) != 0 && errno != ENOENT) {
      status = even_fail_errno(errno, "%s/%s cannot be removed", path, names.items[i]);
    }
  }
  if (status == EVEN_OK && even_os.rmdir(path) != 0) {
    status = even_fail_errno(errno, "folder %s cannot be removed", path);
  }
  even_names_free(&names);
  return status;
}

even_status even_folder_remove(const char *path) {
  int fd = -1;
  EVEN_TRY(open_folder(path, O_NOFOLLOW, &fd));
  even_status status = even_folder_remove_locked(path, fd);
  (void)even_os.close(fd);
  return status;
}

/* Where a name is taken a server of SFTP says no more than that it failed, and sshfs makes EPERM of that. */
static bool is_taken_elsewhere(const char *path) {
  int fd = even_os.open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  bool taken = fd >= 0 && even_is_shared(fd);
  if (fd >= 0) {
    (void)even_os.close(fd);
  }
  return taken;
}

even_status even_folder_rename(const char *from, const char *to) {
  if (even_os.rename(from, to) == 0) {
    return EVEN_OK;
  }
  even_status status = even_fail_errno(errno, "%s cannot be renamed to %s", from, to);
  int error = even_error_last()->system_error;
  bool taken = error == ENOTEMPTY || (error == EPERM && is_taken_elsewhere(to));
  return taken ? even_error_means(EVEN_ERR_IN_USE) : status;
}

even_status even_folder_exchange(const char *a, const char *b) {
  if (even_os.exchange(a, b) == 0) {
    return EVEN_OK;
  }
  if (errno == EINVAL || errno == ENOSYS) {
    return even_fail(EVEN_ERR_UNSUPPORTED, "the file system of %s cannot swap two folders in one step", b);
  }
  return even_fail_errno(errno, "%s and %s cannot be swapped", a, b);
}

bool even_path_exists(const char *path) {
  int fd = even_os.open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
  if (fd < 0) {
    return errno != ENOENT && errno != ENOTDIR;
  }
  (void)even_os.close(fd);
  return true;
}

bool even_path_is_folder(const char *path) {
  int fd = even_os.open(path, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd >= 0) {
    (void)even_os.close(fd);
  }
  return fd >= 0;
}

bool even_path_is_special(const char *path) {
  struct stat facts;
  int fd = even_os.open(path, O_PATH | O_CLOEXEC, 0);
  if (fd < 0) {
    return false;
  }
  bool special = even_os.fstat(fd, &facts) == 0 && !S_ISREG(facts.st_mode) && !S_ISDIR(facts.st_mode);
  (void)even_os.close(fd);
  return special;
}

even_status even_path_is_link(const char *path, bool *out) {
  struct stat facts;
  even_status status = EVEN_OK;
  *out = false;
  int fd = even_os.open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
  if (fd < 0) {
    return errno == ENOENT || errno == ENOTDIR ? EVEN_OK : even_fail_errno(errno, "%s cannot be looked at", path);
  }
  if (even_os.fstat(fd, &facts) != 0) {
    status = even_fail_errno(errno, "%s cannot be looked at", path);
  } else {
    *out = S_ISLNK(facts.st_mode);
  }
  (void)even_os.close(fd);
  return status;
}

static bool same_folder(const char *path, int flags, int fd) {
  struct stat held;
  struct stat named;
  int again = open_for_reading(path, flags);
  if (again < 0) {
    return false;
  }
  bool same = even_os.fstat(fd, &held) == 0 && even_os.fstat(again, &named) == 0 && held.st_ino == named.st_ino &&
              held.st_dev == named.st_dev;
  (void)even_os.close(again);
  return same;
}

int even_folder_hold(const char *path) {
  return open_for_reading(path, 0);
}

bool even_folder_is_at(const char *path, int fd) {
  return fd >= 0 && same_folder(path, 0, fd);
}

static even_status locking_failed(const char *path, int reason) {
  if (reason == ENOSYS || reason == ENOLCK || reason == EOPNOTSUPP) {
    return even_fail(EVEN_ERR_UNSUPPORTED, "folder %s cannot be locked: its file system has no locks", path);
  }
  return reason == EWOULDBLOCK ? EVEN_OK : even_fail_errno(reason, "folder %s cannot be locked", path);
}

static even_status lock_opened(const char *path, int flags, int opened, int *fd) {
  int reason = even_lock_take(opened);
  if (reason != 0) {
    (void)even_os.close(opened);
    return locking_failed(path, reason);
  }
  if (!same_folder(path, flags, opened)) { /* between open and flock another process has removed it */
    even_folder_unlock(opened);
    return EVEN_OK;
  }
  *fd = opened;
  return EVEN_OK;
}

static even_status lock(const char *path, int flags, int *fd) {
  *fd = -1;
  int opened = open_for_reading(path, flags);
  if (opened < 0) {
    return errno == ENOENT ? EVEN_OK : even_fail_errno(errno, "folder %s cannot be opened", path);
  }
  return lock_opened(path, flags, opened, fd);
}

even_status even_folder_lock_again(const char *path, int held, int *fd) {
  *fd = -1;
  return lock_opened(path, 0, held, fd);
}

even_status even_folder_lock(const char *path, int *fd) {
  return lock(path, 0, fd);
}

even_status even_folder_is_locked(const char *path, bool *out) {
  *out = false;
  int fd = open_for_reading(path, 0);
  if (fd < 0) {
    return errno == ENOENT ? EVEN_OK : even_fail_errno(errno, "folder %s cannot be opened", path);
  }
  if (even_os.flock(fd, LOCK_SH | LOCK_NB) == 0) {
    even_folder_unlock(fd);
    return EVEN_OK;
  }
  int reason = errno;
  (void)even_os.close(fd);
  *out = reason == EWOULDBLOCK;
  return locking_failed(path, reason);
}

even_status even_folder_lock_itself(const char *path, int *fd) {
  return lock(path, O_NOFOLLOW, fd);
}

static void look_at(const struct stat *facts, uint64_t *newest) {
  uint64_t written = (uint64_t)facts->st_mtim.tv_sec * 1000000000u + (uint64_t)facts->st_mtim.tv_nsec;
  if (facts->st_mtim.tv_sec > 0 && written > *newest) {
    *newest = written;
  }
}

/* A file that is gone by now counts as just written: somebody is at work. */
static even_status look_at_file(const char *folder, const char *name, uint64_t *newest) {
  even_text path = EVEN_TEXT_EMPTY;
  struct stat facts;
  even_text_format(&path, "%s/%s", folder, name);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    int fd = even_os.open(even_text_string(&path), O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
    if (fd < 0 || even_os.fstat(fd, &facts) != 0) {
      *newest = UINT64_MAX;
    } else {
      look_at(&facts, newest);
    }
    if (fd >= 0) {
      (void)even_os.close(fd);
    }
  }
  even_text_free(&path);
  return status;
}

even_status even_folder_written_ns(const char *path, uint64_t *out) {
  even_names names = {NULL, 0};
  struct stat facts;
  int fd = -1;
  *out = 0;
  EVEN_TRY(open_folder(path, O_NOFOLLOW, &fd));
  even_status status = list(path, fd, &names);
  if (status == EVEN_OK && even_os.fstat(fd, &facts) != 0) {
    status = even_fail_errno(errno, "folder %s cannot be looked at", path);
  }
  if (status == EVEN_OK) {
    look_at(&facts, out);
  }
  for (size_t i = 0; i < names.count && status == EVEN_OK; i++) {
    status = look_at_file(path, names.items[i], out);
  }
  (void)even_os.close(fd);
  even_names_free(&names);
  return status;
}

bool even_path_is_own_folder(const char *path) {
  int fd = even_os.open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  bool own = fd >= 0 && even_folder_is_own(fd);
  if (fd >= 0) {
    (void)even_os.close(fd);
  }
  return own;
}

bool even_folder_is_own(int fd) {
  struct stat facts;
  return even_os.fstat(fd, &facts) == 0 && facts.st_uid == even_os.geteuid();
}

void even_folder_unlock(int fd) {
  even_lock_release(fd);
}
