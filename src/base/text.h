/* A growing string. A failed append is remembered: check once, at the end,
 * with even_text_status. */
#ifndef EVEN_BASE_TEXT_H
#define EVEN_BASE_TEXT_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct even_text {
  char *data;    /* always NUL-terminated once something was appended, else NULL */
  size_t length; /* bytes without the NUL */
  size_t capacity;
  even_status status;
} even_text;

#define EVEN_TEXT_EMPTY {NULL, 0, 0, EVEN_OK}

void even_text_append(even_text *text, const char *data, size_t length);
void even_text_add(even_text *text, const char *string);
void even_text_format(even_text *text, const char *format, ...) EVEN_PRINTF(2, 3);
/* Adds a string as it may be shown and kept: without user:password@ of the URLs in it. */
void even_text_add_shown(even_text *text, const char *string);
/* EVEN_OK, or the error of the first append that failed. */
even_status even_text_status(const even_text *text) EVEN_MUST_USE;
/* The string, "" when nothing was appended. Owned by `text`. */
const char *even_text_string(const even_text *text);
void even_text_clear(even_text *text); /* keeps the memory, forgets the content and the error */
void even_text_free(even_text *text);

bool even_ends_with(const char *string, const char *end);

#endif
