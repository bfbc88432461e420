/* Reads Python's tracebacks (traceback.c of CPython: format stable since 3.0) line by line. */
#include "fault/traceback.h"

#include <string.h>

static const char header[] = "Traceback (most recent call last):";

static bool starts(even_span_text line, const char *prefix) {
  size_t length = strlen(prefix);
  return line.length >= length && memcmp(line.start, prefix, length) == 0;
}

static bool contains(even_span_text line, const char *part) {
  return memmem(line.start, line.length, part, strlen(part)) != NULL;
}

even_span_text even_traceback_line(const char *text, size_t length) {
  static const char lead[] = "[rank";
  even_span_text line = {text, length};
  size_t at = sizeof lead - 1;
  if (!starts(line, lead)) {
    return line;
  }
  while (at < length && text[at] >= '0' && text[at] <= '9') {
    at++;
  }
  if (at == sizeof lead - 1 || at + 2 > length || memcmp(text + at, "]:", 2) != 0) {
    return line;
  }
  at += 2;
  if (at < length && text[at] != ' ') {
    return line; /* "[rank1]:[W1121 …": a line of its log */
  }
  at += at < length;
  return (even_span_text){text + at, length - at};
}

/* The line at *at, without its end; moves *at behind it. False at the end of the text. */
static bool next_line(const char *end, const char **at, even_span_text *line) {
  if (*at >= end) {
    return false;
  }
  const char *stop = memchr(*at, '\n', (size_t)(end - *at));
  line->start = *at;
  line->length = (size_t)((stop == NULL ? end : stop) - *at);
  *at = stop == NULL ? end : stop + 1;
  if (line->length > 0 && line->start[line->length - 1] == '\r') {
    line->length--;
  }
  *line = even_traceback_line(line->start, line->length);
  return true;
}

/* `  File "train.py", line 12, in main` */
static bool read_frame(even_span_text line, even_traceback *out) {
  static const char lead[] = "  File \"";
  if (!starts(line, lead)) {
    return false;
  }
  even_span_text file = {line.start + sizeof lead - 1, 0};
  const char *end = line.start + line.length;
  const char *quote = memmem(file.start, (size_t)(end - file.start), "\", line ", 8);
  if (quote == NULL) {
    return false;
  }
  file.length = (size_t)(quote - file.start);
  const char *at = quote + 8;
  int number = 0;
  while (at < end && *at >= '0' && *at <= '9' && number < 100000000) {
    number = number * 10 + (*at++ - '0');
  }
  out->file = file;
  out->line = number;
  out->function = (even_span_text){NULL, 0};
  if (end - at > 5 && memcmp(at, ", in ", 5) == 0) {
    out->function = (even_span_text){at + 5, (size_t)(end - at - 5)};
  }
  return true;
}

static bool is_foreign(even_span_text file) {
  return contains(file, "/site-packages/") || contains(file, "/dist-packages/") || contains(file, "/lib/python3") ||
         starts(file, "<frozen");
}

/* Reads one traceback whose frames begin at *at (behind its header). False when it has no exception line. */
static bool read_block(const char *end, const char **at, const char *start, even_traceback *out) {
  even_traceback frame = {0};
  even_traceback found = {0};
  even_span_text line;
  while (next_line(end, at, &line)) {
    if (starts(line, header)) { /* one that was cut short comes before it */
      found = (even_traceback){0};
      start = line.start;
      continue;
    }
    if (read_frame(line, &frame)) {
      if (found.file.start == NULL || !is_foreign(frame.file) || is_foreign(found.file)) {
        found = frame;
      }
      found.innermost = frame.file;
      continue;
    }
    if (line.length == 0 || line.start[0] == ' ' || line.start[0] == '\t') {
      continue;
    }
    found.exception = line;
    const char *behind = *at;
    even_span_text fix;
    if (next_line(end, &behind, &fix) && starts(fix, "  fix: ")) { /* the second line of our own errors */
      line = fix;
      *at = behind;
    }
    found.block = (even_span_text){start, (size_t)(line.start + line.length - start)};
    *out = found;
    return true;
  }
  return false;
}

bool even_traceback_find(const char *text, size_t length, even_traceback *out) {
  const char *at = length == 0 ? "" : text; /* no arithmetic on NULL */
  const char *end = at + length;
  bool any = false;
  bool ignored = false; /* the block that follows "Exception ignored in: …" is a destructor's affair */
  even_span_text line;
  *out = (even_traceback){0};
  while (next_line(end, &at, &line)) {
    even_traceback found;
    even_traceback frame;
    bool headed = starts(line, header);
    /* a syntax error of the script itself has no header */
    bool bare = !headed && read_frame(line, &frame) && frame.function.start == NULL;
    if (headed || bare) {
      const char *from = headed ? at : line.start;
      if (read_block(end, &from, line.start, &found)) {
        if (!ignored && (headed || contains(found.exception, "Error: "))) {
          *out = found;
          any = true;
        }
        at = from;
      }
      ignored = false;
    } else if (line.length > 0) {
      ignored = starts(line, "Exception ignored in");
    }
  }
  return any;
}

even_span_text even_traceback_last_lines(const char *text, size_t length, size_t lines) {
  text = length == 0 ? "" : text;
  const char *end = text + length;
  while (end > text && (end[-1] == '\n' || end[-1] == '\r' || end[-1] == ' ')) {
    end--;
  }
  const char *start = end;
  while (start > text) {
    if (start[-1] == '\n' && --lines == 0) {
      break;
    }
    start--;
  }
  return (even_span_text){end > start ? start : NULL, (size_t)(end - start)};
}

/* `parts` ends with NULL. */
static bool contains_any(even_span_text text, const char *const *parts) {
  for (; text.start != NULL && *parts != NULL; parts++) {
    if (contains(text, *parts)) {
      return true;
    }
  }
  return false;
}

even_traceback_blame even_traceback_blames(const even_traceback *traceback) {
  /* ours, and words that only process groups have */
  static const char *const of_a_peer[] = {"EVEN_ERR_PEER_LOST", "EVEN_ERR_REVOKED",    "another rank died",
                                          "DistNetworkError",   "recvValue failed",    "ncclRemoteError",
                                          "Socket Timeout",     "was aborted on rank", NULL};
  static const char *const of_any_connection[] = {"Connection closed by peer",
                                                  "Connection reset",
                                                  "Broken pipe",
                                                  "Connection refused",
                                                  "socket has been closed",
                                                  "Timed out waiting",
                                                  "connection was forcibly",
                                                  NULL};
  static const char *const of_a_group[] = {"gloo", "Gloo", "nccl", "NCCL", "torch.distributed.", NULL};
  static const char *const group_folder[] = {"/torch/distributed/", NULL};
  static const char *const interrupted[] = {"KeyboardInterrupt", NULL};
  if (contains_any(traceback->exception, of_a_peer)) {
    return EVEN_BLAME_PEER;
  }
  if (contains_any(traceback->exception, of_any_connection)) {
    bool group = contains_any(traceback->exception, of_a_group) || contains_any(traceback->innermost, group_folder);
    return group ? EVEN_BLAME_PEER : EVEN_BLAME_UNCLEAR;
  }
  return contains_any(traceback->exception, interrupted) ? EVEN_BLAME_UNCLEAR : EVEN_BLAME_OWN;
}

bool even_traceback_is_of_memory(const even_traceback *traceback) {
  static const char *const kinds[] = {"MemoryError", "OutOfMemoryError", NULL};
  static const char *const plain[] = {"RuntimeError: ", "OSError: ", "EvenstepError: ", NULL};
  static const char *const words[] = {"can't allocate memory",
                                      "annot allocate memory",
                                      "ot enough memory",
                                      "ut of memory",
                                      "bad_alloc",
                                      "ALLOC_FAILED",
                                      "nable to allocate",
                                      "could not create a memory",
                                      NULL};
  even_span_text kind = traceback->exception;
  const char *colon = kind.start == NULL ? NULL : memchr(kind.start, ':', kind.length);
  kind.length = colon == NULL ? kind.length : (size_t)(colon - kind.start);
  return contains_any(kind, kinds) ||
         (contains_any(traceback->exception, plain) && contains_any(traceback->exception, words));
}
