/* Questions to the file system that need no descriptor. */
#include "os/path.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/file.h"
#include "os/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

bool even_file_readable(const char *path) {
  return even_os.access(path, R_OK) == 0;
}

bool even_file_executable(const char *path) {
  return even_os.access(path, X_OK) == 0 && !even_path_is_folder(path); /* folders have that right, too */
}

const char *even_path_name(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash == NULL ? path : slash + 1;
}

even_status even_path_absolute(const char *path, even_text *out) {
  char here[PATH_MAX];
  even_text_clear(out);
  if (path[0] != '/') {
    if (even_os.getcwd(here, sizeof here) == NULL) {
      return even_fail_errno(errno, "the working folder cannot be found");
    }
    even_text_format(out, "%s/", here);
    while (path[0] == '.' && path[1] == '/') {
      path += 2;
    }
  }
  even_text_add(out, path);
  return even_text_status(out);
}

even_status even_path_enter(const char *path) {
  return even_os.chdir(path) == 0 ? EVEN_OK : even_fail_errno(errno, "folder %s cannot be entered", path);
}

even_status even_program_path(even_text *out) {
  char path[PATH_MAX];
  ssize_t length = even_os.readlink("/proc/self/exe", path, sizeof path);
  even_text_clear(out);
  if (length < 0) {
    return even_fail_errno(errno, "the program's own file cannot be found");
  }
  even_text_append(out, path, (size_t)length);
  return even_text_status(out);
}

void even_host_name(char *out, size_t bytes) {
  even_text text = EVEN_TEXT_EMPTY;
  const char *name = "localhost";
  if (even_file_read("/proc/sys/kernel/hostname", 4096, &text) == EVEN_OK && text.length > 1) {
    text.data[strcspn(text.data, "\n")] = '\0';
    name = text.data;
  }
  size_t length = strlen(name) < bytes - 1 ? strlen(name) : bytes - 1;
  memcpy(out, name, length);
  out[length] = '\0';
  even_text_free(&text);
}

bool even_path_is_url(const char *path) {
  size_t scheme = 0;
  while ((path[scheme] >= 'a' && path[scheme] <= 'z') || (path[scheme] >= 'A' && path[scheme] <= 'Z') ||
         (path[scheme] >= '0' && path[scheme] <= '9') || path[scheme] == '+') {
    scheme++;
  }
  return scheme > 0 && strncmp(path + scheme, "://", 3) == 0;
}
