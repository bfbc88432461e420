/* A growing string with a sticky error. */
#include "base/text.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static bool reserve(even_text *text, size_t extra) {
  size_t wanted = 0;
  if (text->status != EVEN_OK) {
    return false;
  }
  if (!even_add_size(text->length, extra, &wanted) || !even_add_size(wanted, 1, &wanted)) {
    text->status = even_fail(EVEN_ERR_OVERFLOW, "a string of more than %zu bytes", text->length);
    return false;
  }
  if (wanted > text->capacity) {
    size_t capacity = text->capacity < 64 ? 64 : text->capacity;
    while (capacity < wanted) {
      capacity = capacity > SIZE_MAX / 2 ? wanted : capacity * 2; /* doubled: appending stays linear */
    }
    text->status = even_realloc((void **)&text->data, capacity, 1);
    if (text->status != EVEN_OK) {
      return false;
    }
    text->capacity = capacity;
  }
  return true;
}

void even_text_append(even_text *text, const char *data, size_t length) {
  if (!reserve(text, length)) {
    return;
  }
  if (length > 0) {
    memcpy(text->data + text->length, data, length);
  }
  text->length += length;
  text->data[text->length] = '\0';
}

void even_text_add(even_text *text, const char *string) {
  even_text_append(text, string, strlen(string));
}

void even_text_format(even_text *text, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(NULL, 0, format, arguments);
  va_end(arguments);
  if (length < 0) {
    text->status = even_fail(EVEN_ERR_ARGUMENT, "a text cannot be formatted");
    return;
  }
  if (!reserve(text, (size_t)length)) {
    return;
  }
  va_start(arguments, format);
  (void)vsnprintf(text->data + text->length, (size_t)length + 1, format, arguments);
  va_end(arguments);
  text->length += (size_t)length;
}

void even_text_add_shown(even_text *text, const char *string) {
  for (const char *mark = strstr(string, "://"); mark != NULL; mark = strstr(string, "://")) {
    const char *host = mark + 3;
    even_text_append(text, string, (size_t)(host - string));
    for (size_t i = strcspn(host, "/ \t\r\n"); i > 0; i--) {
      if (host[i - 1] == '@') {
        host += i;
        break;
      }
    }
    string = host;
  }
  even_text_add(text, string);
}

even_status even_text_status(const even_text *text) {
  return text->status;
}

const char *even_text_string(const even_text *text) {
  return text->data == NULL ? "" : text->data;
}

void even_text_clear(even_text *text) {
  text->length = 0;
  text->status = EVEN_OK;
  if (text->data != NULL) {
    text->data[0] = '\0';
  }
}

void even_text_free(even_text *text) {
  even_free(text->data);
  *text = (even_text)EVEN_TEXT_EMPTY;
}

bool even_ends_with(const char *string, const char *end) {
  size_t length = strlen(string);
  size_t tail = strlen(end);
  return length >= tail && strcmp(string + length - tail, end) == 0;
}
