/* getdents64(2) with a buffer on the stack. */
#include "os/entries.h"

#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>

/* struct linux_dirent64 of getdents64(2), which libc does not declare */
typedef struct directory_entry {
  uint64_t inode;
  int64_t offset;
  uint16_t length;
  uint8_t type;
  char name[];
} directory_entry;

even_status even_folder_each(const char *path, bool (*each)(void *context, const char *name), void *context) {
  _Alignas(directory_entry) char buffer[8192];
  int fd = even_os.open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) {
    return even_fail_errno(errno, "folder %s cannot be opened", path);
  }
  even_status status = EVEN_OK;
  bool more = true;
  while (more) {
    ssize_t got = even_os.getdents64(fd, buffer, sizeof buffer);
    if (got < 0) {
      status = even_fail_errno(errno, "folder %s cannot be read", path);
    }
    if (got <= 0) {
      break;
    }
    for (ssize_t at = 0; more && at < got;) {
      const directory_entry *entry = (const directory_entry *)(const void *)(buffer + at);
      if (strcmp(entry->name, ".") != 0 && strcmp(entry->name, "..") != 0) {
        more = each(context, entry->name);
      }
      at += entry->length;
    }
  }
  (void)even_os.close(fd);
  return status;
}
