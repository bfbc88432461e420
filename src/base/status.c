/* The error table's texts and the calling thread's error record. */
#include "base/fail.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local even_error last_error = {.rank = -1};

const char *even_status_name(even_status status) {
  switch (status) {
#define EVEN_STATUS_NAME(name, number, exit_code, text) \
  case EVEN_##name:                                     \
    return "EVEN_" #name;
    EVEN_STATUS_LIST(EVEN_STATUS_NAME)
#undef EVEN_STATUS_NAME
  }
  return "EVEN_ERR_UNKNOWN";
}

const char *even_status_text(even_status status) {
  switch (status) {
#define EVEN_STATUS_TEXT(name, number, exit_code, text) \
  case EVEN_##name:                                     \
    return text;
    EVEN_STATUS_LIST(EVEN_STATUS_TEXT)
#undef EVEN_STATUS_TEXT
  }
  return "unknown status";
}

int even_status_exit_code(even_status status) {
  switch (status) {
#define EVEN_STATUS_EXIT(name, number, exit_code, text) \
  case EVEN_##name:                                     \
    return exit_code;
    EVEN_STATUS_LIST(EVEN_STATUS_EXIT)
#undef EVEN_STATUS_EXIT
  }
  return 1;
}

const even_error *even_error_last(void) {
  return &last_error;
}

void even_error_clear(void) {
  memset(&last_error, 0, sizeof last_error);
  last_error.rank = -1;
}

even_status even_error_restore(const even_error *error) {
  last_error = *error;
  return error->status;
}

static void record(const char *file, int line, even_status status, int system_error) {
  even_error_clear();
  last_error.status = status;
  last_error.system_error = system_error;
  last_error.file = file;
  last_error.line = line;
}

const even_error *even_error_of(even_status status) {
  if (last_error.status != status) {
    record(NULL, 0, status, 0);
  }
  if (last_error.what[0] == '\0') {
    (void)snprintf(last_error.what, sizeof last_error.what, "%s", even_status_text(status));
  }
  return &last_error;
}

even_error even_error_aside(void) {
  const even_error aside = last_error;
  even_error_clear();
  return aside;
}

even_status even_error_told(even_status status, const even_error *aside) {
  if (status == EVEN_OK) {
    (void)even_error_restore(aside);
  } else {
    (void)even_error_of(status);
  }
  return status;
}

static even_status status_of_errno(int error_number) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
      return EVEN_ERR_NO_SPACE;
    case ENOMEM:
      return EVEN_ERR_MEMORY;
    case EACCES:
    case EPERM:
    case EROFS:
      return EVEN_ERR_PERMISSION;
    case EADDRINUSE:
    case EBUSY:
    case EEXIST:
      return EVEN_ERR_IN_USE;
    case ENOENT:
    case ENOTDIR:
      return EVEN_ERR_NOT_FOUND;
    case EINTR:
      return EVEN_ERR_INTERRUPTED;
    case ETIMEDOUT:
      return EVEN_ERR_TIMEOUT;
    case EOVERFLOW:
      return EVEN_ERR_OVERFLOW;
    default:
      return EVEN_ERR_SYSTEM;
  }
}

even_status even_fail_at(const char *file, int line, even_status status, int system_error, const char *format, ...) {
  va_list arguments;
  char text[sizeof last_error.what];
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  record(file, line, status, system_error);
  memcpy(last_error.what, text, sizeof text);
  return status;
}

even_status even_fail_errno_at(const char *file, int line, int system_error, const char *format, ...) {
  va_list arguments;
  char text[sizeof last_error.what - 128];
  char buffer[96];
  const char *reason = strerror_r(system_error, buffer, sizeof buffer); /* GNU: never fails */
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  record(file, line, status_of_errno(system_error), system_error);
  (void)snprintf(last_error.what, sizeof last_error.what, "%s: %s", text, reason);
  return last_error.status;
}

even_status even_error_fix(const char *format, ...) {
  if (last_error.fix[0] == '\0') {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(last_error.fix, sizeof last_error.fix, format, arguments);
    va_end(arguments);
  }
  return last_error.status;
}

even_status even_error_place(int rank, const char *device) {
  if (rank >= 0) {
    last_error.rank = rank;
  }
  if (device != NULL) {
    (void)snprintf(last_error.device, sizeof last_error.device, "%s", device);
  }
  return last_error.status;
}

even_status even_error_means(even_status status) {
  last_error.status = status;
  return status;
}

even_status even_error_prefix(const char *format, ...) {
  va_list arguments;
  char prefix[160];
  char text[sizeof last_error.what];
  va_start(arguments, format);
  (void)vsnprintf(prefix, sizeof prefix, format, arguments);
  va_end(arguments);
  memcpy(text, last_error.what, sizeof text);
  int written = snprintf(last_error.what, sizeof last_error.what, "%s: ", prefix);
  if (written > 0 && (size_t)written < sizeof last_error.what) {
    size_t room = sizeof last_error.what - (size_t)written;
    (void)snprintf(last_error.what + written, room, "%.*s", (int)room - 1, text);
  }
  return last_error.status;
}
