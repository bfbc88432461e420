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
  even_span_text block;     /* from "Traceback …" (or the last lines) to the exception, and to the fix of one of ours */
  even_span_text exception; /* "ValueError: bad input": first line of the message */
  even_span_text file;      /* of the innermost frame that is the user's own, else of the innermost */
  even_span_text function;
  int line;                 /* 0 where unknown */
  even_span_text innermost; /* file of the innermost frame, whoever's it is */
} even_traceback;

/* Of whose failing an exception tells. */
typedef enum even_traceback_blame {
  EVEN_BLAME_OWN,
  EVEN_BLAME_UNCLEAR, /* it was interrupted, or a connection broke: to another rank, or to a server outside the job */
  EVEN_BLAME_PEER     /* another rank went away */
} even_traceback_blame;

/* The traceback that ended the program, in `text` of `length` bytes (any bytes). False: there is none. */
bool even_traceback_find(const char *text, size_t length, even_traceback *out);
/* The line as Python wrote it: torch writes "[rank1]: " before each line of a traceback once a process group exists. */
even_span_text even_traceback_line(const char *text, size_t length);
/* The last `lines` lines that are not empty. */
even_span_text even_traceback_last_lines(const char *text, size_t length, size_t lines);
/* By the exception's line and where it was raised: what the system says of any connection ("Connection refused") is
 * taken for a rank's only where it comes from torch's process groups. */
even_traceback_blame even_traceback_blames(const even_traceback *traceback);

/* Whether it says that there was not enough memory: of Python (MemoryError), of torch, of a system call. */
bool even_traceback_is_of_memory(const even_traceback *traceback);

#endif
