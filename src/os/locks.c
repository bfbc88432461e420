/* Locks over the table of calls. */
#include "os/locks.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/file.h>
#include <sys/vfs.h>

static const uint64_t ASKERS_LEAVE_NS = UINT64_C(2000000000);
static const uint64_t BETWEEN_TRIES_NS = 100000;

/* f_type of statfs(2): bcachefs, btrfs, ext2 to ext4, f2fs, JFS, overlayfs, ramfs, tmpfs, XFS, ZFS. */
static const uint32_t of_one_host[] = {0xCA451A4E, 0x9123683E, 0xEF53,     0xF2F52010, 0x3153464A,
                                       0x794C7630, 0x858458F6, 0x01021994, 0x58465342, 0x2FC12FC1};

/* Whoever asks whether it is locked holds the lock shared for a moment: where only such are in the way (it can be had
 * shared), it is asked for again. Two that want it would keep each other from it by asking, so each lets go before it
 * waits. */
int even_lock_take(int fd) {
  const uint64_t until = even_clock_ns() + ASKERS_LEAVE_NS;
  while (even_os.flock(fd, LOCK_EX | LOCK_NB) != 0) {
    int reason = errno;
    if (reason != EWOULDBLOCK) {
      return reason;
    }
    if (even_os.flock(fd, LOCK_SH | LOCK_NB) != 0) {
      return errno;
    }
    (void)even_os.flock(fd, LOCK_UN);
    if (even_clock_ns() >= until) {
      return reason;
    }
    even_clock_sleep_ns(BETWEEN_TRIES_NS);
  }
  return 0;
}

bool even_is_shared(int fd) {
  struct statfs facts;
  if (even_os.fstatfs(fd, &facts) != 0) {
    return true;
  }
  for (size_t i = 0; i < sizeof of_one_host / sizeof of_one_host[0]; i++) {
    if ((uint32_t)facts.f_type == of_one_host[i]) {
      return false;
    }
  }
  return true;
}

even_status even_sign_make(const char *path, const char *text, int *fd) {
  *fd = even_os.open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (*fd < 0) {
    return even_fail_errno(errno, "%s cannot be created", path);
  }
  (void)even_lock_take(*fd);
  even_status status = even_file_write_all(*fd, text, strlen(text));
  if (status != EVEN_OK) {
    (void)even_error_prefix("%s", path);
    even_lock_release(*fd);
    (void)even_os.unlink(path);
    *fd = -1;
  }
  return status;
}

void even_sign_ask(const char *path, even_sign *out) {
  *out = (even_sign){.held = false};
  int fd = even_os.open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0);
  if (fd < 0) {
    return;
  }
  ssize_t got = even_os.read(fd, out->text, sizeof out->text - 1);
  out->text[got > 0 ? got : 0] = '\0';
  out->held = even_os.flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  even_lock_release(fd);
}

even_status even_sign_is_there(const char *path, int fd, bool *out) {
  struct stat held = {0};
  struct stat named = {0};
  *out = false;
  int again = even_os.open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
  if (again < 0) {
    return errno == ENOENT ? EVEN_OK : even_fail_errno(errno, "%s cannot be looked at", path);
  }
  even_status status = even_os.fstat(fd, &held) == 0 && even_os.fstat(again, &named) == 0
                           ? EVEN_OK
                           : even_fail_errno(errno, "%s cannot be looked at", path);
  *out = status == EVEN_OK && held.st_ino == named.st_ino && held.st_dev == named.st_dev;
  (void)even_os.close(again);
  return status;
}

even_status even_sign_remove(const char *path) {
  return even_os.unlink(path) == 0 ? EVEN_OK : even_fail_errno(errno, "%s cannot be removed", path);
}

void even_lock_release(int fd) {
  if (fd >= 0) {
    (void)even_os.flock(fd, LOCK_UN);
    (void)even_os.close(fd);
  }
}
