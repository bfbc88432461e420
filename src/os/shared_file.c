/* Files that are shared memory. */
#include "os/shared_file.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/random.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

/* In the order in which they are tried. */
static const char *const folders[] = {"/dev/shm", "/tmp", "/var/tmp"};

#define FOLDERS (sizeof folders / sizeof folders[0])
#define DIGITS 16
#define DELETED " (deleted)"

/* A write to memory that its file has no room for is a SIGBUS: all of it is taken at once. Of tmpfs a signal that comes
 * meanwhile ends the call, and what it took. */
static even_status take_room(const char *folder, int fd, size_t bytes) {
  int failed = 0;
  do {
    failed = even_os.fallocate(fd, 0, 0, (off_t)bytes);
  } while (failed != 0 && errno == EINTR);
  return failed == 0 ? EVEN_OK : even_fail_errno(errno, "%s has no room for %zu bytes of shared memory", folder, bytes);
}

static even_status create_in(const char *folder, const char *label, size_t bytes, int *fd) {
  char digits[DIGITS + 1];
  char path[128];
  EVEN_TRY(even_random_hex(digits, DIGITS));
  (void)snprintf(path, sizeof path, "%s/%s.%s", folder, label, digits);
  /* What somebody has put there before is not opened. */
  *fd = even_os.open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (*fd < 0) {
    return even_fail_errno(errno, "shared memory could not be made in %s", folder);
  }
  (void)even_os.unlink(path);
  even_status status = take_room(folder, *fd, bytes);
  if (status != EVEN_OK) {
    (void)even_os.close(*fd);
    *fd = -1;
  }
  return status;
}

even_status even_shared_file_create(const char *label, size_t bytes, int *fd) {
  char said[320] = "";
  even_status status = EVEN_ERR_SYSTEM;
  *fd = -1;
  for (size_t i = 0; i < FOLDERS; i++) {
    size_t length = strlen(said);
    status = create_in(folders[i], label, bytes, fd);
    if (status == EVEN_OK) {
      return EVEN_OK;
    }
    (void)snprintf(said + length, sizeof said - length, "%s%.100s", length == 0 ? "" : "; ", even_error_last()->what);
  }
  return even_fail(status, "%s", said);
}

/* Where the file's own name begins, of a path that is "FOLDER/LABEL.DIGITS (deleted)" with one of the folders. */
static const char *name_in(const char *path) {
  size_t length = strlen(path);
  const char *name = strrchr(path, '/');
  size_t ending = sizeof DELETED - 1;
  if (name == NULL || length < ending + DIGITS + 1 || strcmp(path + length - ending, DELETED) != 0 ||
      path[length - ending - DIGITS - 1] != '.') {
    return NULL;
  }
  for (size_t i = 0; i < FOLDERS; i++) {
    if (strncmp(path, folders[i], strlen(folders[i])) == 0 && path + strlen(folders[i]) == name) {
      return name + 1;
    }
  }
  return NULL;
}

bool even_shared_file_has_label(const char *path, const char *label) {
  const char *name = name_in(path);
  return name != NULL && strncmp(name, label, strlen(label)) == 0 &&
         strlen(name) == strlen(label) + 1 + DIGITS + sizeof DELETED - 1;
}

bool even_shared_file_folder(const char *path, char *folder, size_t bytes) {
  const char *name = name_in(path);
  if (name == NULL || strncmp(name, "evenstep-", 9) != 0) {
    return false;
  }
  (void)snprintf(folder, bytes, "%.*s", (int)(name - path - 1), path);
  return true;
}
