/* Tracebacks of a rank's standard error, held until their last exception is known. */
#include "cli/interruption.h"

#include "fault/traceback.h"

#include <string.h>

static bool starts(even_span_text line, const char *with) {
  size_t most = strlen(with);
  return line.length >= most && memcmp(line.start, with, most) == 0;
}

static bool begins(even_span_text line) {
  return starts(line, "Traceback (most recent call last):") || starts(line, "Exception ignored in");
}

static bool links(even_span_text line) {
  return starts(line, "During handling of the above exception") ||
         starts(line, "The above exception was the direct cause");
}

/* What Python prints of an exception beside its first line: more lines of the message, notes. */
static bool goes_on(even_span_text line) {
  return line.length == 0 || line.start[0] == ' ' || line.start[0] == '\t';
}

/* Whether the last exception is the interruption's; a handler that failed of its own is news. */
static bool tells_of_interruption(const even_text *held) {
  static const char interrupted[] = "KeyboardInterrupt";
  even_traceback found;
  if (even_traceback_find(held->data, held->length, &found)) {
    return even_traceback_blames(&found) != EVEN_BLAME_OWN;
  }
  return memmem(held->data, held->length, interrupted, sizeof interrupted - 1) != NULL;
}

static void settle(even_interruption *of, even_shown_line *show, void *context) {
  bool dropped = of->held.length == 0 || tells_of_interruption(&of->held);
  for (size_t at = 0; !dropped && at < of->held.length;) {
    const char *line = of->held.data + at;
    const char *end = memchr(line, '\n', of->held.length - at);
    size_t length = end == NULL ? of->held.length - at : (size_t)(end - line);
    show(context, line, length);
    at += length + 1;
  }
  even_text_clear(&of->held);
  of->raised = of->linked = false;
}

static void hold(even_interruption *of, const char *text, size_t length) {
  even_text_append(&of->held, text, length);
  even_text_add(&of->held, "\n");
}

static void begin(even_interruption *of, const char *text, size_t length, even_shown_line *show, void *context) {
  if (!begins(even_traceback_line(text, length))) {
    show(context, text, length);
    return;
  }
  hold(of, text, length);
  if (even_text_status(&of->held) != EVEN_OK) { /* no memory to hold it: shown, as without us */
    even_text_free(&of->held);
    show(context, text, length);
  }
}

void even_interruption_take(even_interruption *of, const char *text, size_t length, even_shown_line *show,
                            void *context) {
  even_span_text line = even_traceback_line(text, length);
  bool opens = begins(line);
  bool link = of->raised && links(line);
  bool belongs = !of->raised || goes_on(line) || link || (opens && of->linked);
  if (of->held.length == 0 || !belongs) {
    settle(of, show, context);
    begin(of, text, length, show, context);
    return;
  }
  hold(of, text, length);
  of->linked = link || (of->linked && !opens);
  of->raised = opens ? false : of->raised || (!goes_on(line) && !link);
}

void even_interruption_end(even_interruption *of, even_shown_line *show, void *context) {
  settle(of, show, context);
  even_text_free(&of->held);
}
