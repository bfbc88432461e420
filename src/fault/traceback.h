/* Finds in a process's last output why it ended: Python's traceback, or its last lines. */
#ifndef EVEN_FAULT_TRACEBACK_H
#define EVEN_FAULT_TRACEBACK_H

#include "base/text.h"

#include <stdbool.h>
#include <stddef.h>

/* Parts of a text, not copied; start NULL where there is none. */
typedef struct even_span_text {
  const char *start;
  size_t length;
} even_span_text;

typedef struct even_traceback {
  even_span_text block;     /* from "Traceback …" (or the last lines) to the exception */
  even_span_text exception; /* "ValueError: bad input": first line of the message */
  even_span_text file;      /* of the innermost frame that is the user's own, else of the innermost */
  even_span_text function;
  int line; /* 0 where unknown */
} even_traceback;

/* The traceback that ended the program, in `text` of `length` bytes (any bytes). False: there is none. */
bool even_traceback_find(const char *text, size_t length, even_traceback *out);
/* The last `lines` lines that are not empty. */
even_span_text even_traceback_last_lines(const char *text, size_t length, size_t lines);
/* Whether an exception's line tells of another rank's end rather than of a fault of its own. */
bool even_traceback_is_secondary(even_span_text exception);

#endif
