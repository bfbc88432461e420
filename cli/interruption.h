/* What a rank says of the interruption itself: tracebacks of KeyboardInterrupt, and of another rank that the
 * interruption took away. Whoever pressed Ctrl-C need not read them; the logs keep them. */
#ifndef EVEN_CLI_INTERRUPTION_H
#define EVEN_CLI_INTERRUPTION_H

#include "base/text.h"

#include <stdbool.h>

/* Of one rank's standard error since the interruption; zeroed to begin with. */
typedef struct even_interruption {
  even_text held; /* a traceback of which it is not plain yet what it tells; lines that end in newlines */
  bool raised;    /* its exception was read; what follows may still belong to it */
  bool linked;    /* another traceback of the same failure follows */
} even_interruption;

/* One line, without its newline, that is to be shown. */
typedef void even_shown_line(void *context, const char *text, size_t length);

/* Takes a line, without its newline; shows it, and what was held, unless it tells of the interruption alone. */
void even_interruption_take(even_interruption *of, const char *text, size_t length, even_shown_line *show,
                            void *context);
/* The rank has ended: what is still held is shown or dropped, and its memory freed. */
void even_interruption_end(even_interruption *of, even_shown_line *show, void *context);

#endif
