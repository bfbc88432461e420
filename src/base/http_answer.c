/* Answers of HTTP/1: the head line by line, the body by length, in chunks, or to the end. */
#include "base/http_answer.h"

#include "base/fail.h"

#include <string.h>
#include <strings.h>

/* MOST_CHUNK: digits of a chunk's length. */
enum { MOST_CHUNK = 8, MOST_CHUNK_LINE = 256 };

typedef struct line {
  const char *text;
  size_t length; /* without its end */
} line;

static even_status no_answer(const char *why) {
  return even_fail(EVEN_ERR_INPUT, "what came is no answer of HTTP: %s", why);
}

static even_status too_long(void) {
  return even_fail(EVEN_ERR_INPUT, "the answer is longer than %d bytes", EVEN_HTTP_MOST_BODY);
}

/* The line that begins at *at, which goes behind it; false: its end is not there. */
static bool next_line(const char *bytes, size_t count, size_t *at, line *out) {
  const char *end = *at < count ? memchr(bytes + *at, '\n', count - *at) : NULL;
  if (end == NULL) {
    return false;
  }
  out->text = bytes + *at;
  out->length = (size_t)(end - out->text);
  *at += out->length + 1;
  if (out->length > 0 && out->text[out->length - 1] == '\r') {
    out->length--;
  }
  return true;
}

static bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

static bool is_blank(char c) {
  return c == ' ' || c == '\t';
}

/* "HTTP/1.1 200 OK" */
static even_status read_status(const line *first, int *status) {
  const char *text = first->text;
  bool fits = first->length >= 12 && memcmp(text, "HTTP/1.", 7) == 0 && is_digit(text[7]) && text[8] == ' ' &&
              is_digit(text[9]) && is_digit(text[10]) && is_digit(text[11]) && (first->length == 12 || text[12] == ' ');
  if (!fits) {
    return no_answer("its first line");
  }
  *status = (text[9] - '0') * 100 + (text[10] - '0') * 10 + (text[11] - '0');
  return *status >= 200 && *status <= 599 ? EVEN_OK : no_answer("its status");
}

/* Whether the line is that header; its value. */
static bool is_header(const line *one, const char *name, line *value) {
  size_t length = strlen(name);
  if (one->length <= length || one->text[length] != ':' || strncasecmp(one->text, name, length) != 0) {
    return false;
  }
  *value = (line){.text = one->text + length + 1, .length = one->length - length - 1};
  while (value->length > 0 && is_blank(value->text[0])) {
    value->text++;
    value->length--;
  }
  while (value->length > 0 && is_blank(value->text[value->length - 1])) {
    value->length--;
  }
  return true;
}

static bool find(const even_http_answer *answer, const char *name, line *value) {
  size_t at = 0;
  line one;
  while (next_line(answer->head, answer->head_bytes, &at, &one)) {
    if (is_header(&one, name, value)) {
      return true;
    }
  }
  return false;
}

/* All up to the empty line; *at is behind it then. */
static even_status read_head(const char *bytes, size_t count, even_http_answer *out, size_t *at, bool *whole) {
  line one;
  *at = 0;
  if (!next_line(bytes, count, at, &one)) {
    return count > EVEN_HTTP_MOST_HEAD ? no_answer("a head without end") : EVEN_OK;
  }
  EVEN_TRY(read_status(&one, &out->status));
  out->head = bytes + *at;
  while (next_line(bytes, count, at, &one)) {
    if (*at > EVEN_HTTP_MOST_HEAD) {
      return no_answer("a head without end");
    }
    if (one.length == 0) {
      *whole = true;
      return EVEN_OK;
    }
    out->head_bytes = (size_t)(bytes + *at - out->head);
  }
  return count > EVEN_HTTP_MOST_HEAD ? no_answer("a head without end") : EVEN_OK;
}

static even_status read_length(const line *value, size_t *out) {
  *out = 0;
  if (value->length == 0) {
    return no_answer("its length");
  }
  for (size_t i = 0; i < value->length; i++) {
    if (!is_digit(value->text[i])) {
      return no_answer("its length");
    }
    *out = *out * 10 + (size_t)(value->text[i] - '0');
    if (*out > EVEN_HTTP_MOST_BODY) {
      return too_long();
    }
  }
  return EVEN_OK;
}

static even_status keep(even_http_answer *out, const char *bytes, size_t count) {
  if (count > EVEN_HTTP_MOST_BODY - out->body.length) {
    return too_long();
  }
  if (count > 0) {
    even_text_append(&out->body, bytes, count);
  }
  return even_text_status(&out->body);
}

static int digit_of(char c) {
  return is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* "1a2b;extension" */
static even_status read_chunk_length(const line *one, size_t *out) {
  size_t digits = 0;
  *out = 0;
  for (; digits < one->length && digit_of(one->text[digits]) >= 0; digits++) {
    if (digits == MOST_CHUNK) {
      return too_long();
    }
    *out = *out * 16 + (size_t)digit_of(one->text[digits]);
  }
  bool fits = digits > 0 && (digits == one->length || one->text[digits] == ';' || is_blank(one->text[digits]));
  return !fits ? no_answer("the length of a chunk") : *out > EVEN_HTTP_MOST_BODY ? too_long() : EVEN_OK;
}

/* Where bytes are missing, *whole stays false. */
static even_status read_chunks(const char *bytes, size_t count, even_http_answer *out, bool *whole) {
  size_t at = 0;
  size_t length = 0;
  line one;
  for (;;) {
    if (!next_line(bytes, count, &at, &one)) {
      return count - at > MOST_CHUNK_LINE ? no_answer("the length of a chunk") : EVEN_OK;
    }
    EVEN_TRY(one.length > MOST_CHUNK_LINE ? no_answer("the length of a chunk") : read_chunk_length(&one, &length));
    if (length == 0) {
      break;
    }
    if (length > count - at) {
      return EVEN_OK;
    }
    EVEN_TRY(keep(out, bytes + at, length));
    at += length;
    if (count - at >= 2 ? memcmp(bytes + at, "\r\n", 2) != 0 : count - at == 1 && bytes[at] != '\r') {
      return no_answer("the end of a chunk");
    }
    if (count - at < 2) {
      return EVEN_OK;
    }
    at += 2;
  }
  size_t trailers = at;
  while (next_line(bytes, count, &at, &one) && at - trailers <= EVEN_HTTP_MOST_HEAD) { /* to the empty one */
    if (one.length == 0) {
      *whole = true;
      return EVEN_OK;
    }
  }
  return count - trailers > EVEN_HTTP_MOST_HEAD ? no_answer("trailers without end") : EVEN_OK;
}

static even_status read_body(const char *bytes, size_t count, bool ended, even_http_answer *out, bool *whole) {
  line value;
  size_t length = 0;
  if (out->status == 204 || out->status == 304) {
    *whole = true;
    return EVEN_OK;
  }
  if (find(out, "Transfer-Encoding", &value)) {
    if (value.length != 7 || strncasecmp(value.text, "chunked", 7) != 0) {
      return no_answer("its encoding");
    }
    return read_chunks(bytes, count, out, whole);
  }
  if (find(out, "Content-Length", &value)) {
    EVEN_TRY(read_length(&value, &length));
    *whole = count >= length;
    return *whole ? keep(out, bytes, length) : EVEN_OK;
  }
  *whole = ended;
  if (count > EVEN_HTTP_MOST_BODY) {
    return too_long();
  }
  return ended ? keep(out, bytes, count) : EVEN_OK;
}

even_status even_http_answer_read(const char *bytes, size_t count, bool ended, even_http_answer *out, bool *whole) {
  size_t at = 0;
  bool headed = false;
  *out = (even_http_answer){.body = EVEN_TEXT_EMPTY};
  *whole = false;
  EVEN_TRY(read_head(bytes, count, out, &at, &headed));
  if (headed) {
    EVEN_TRY(read_body(bytes + at, count - at, ended, out, whole));
  }
  return ended && !*whole ? no_answer("it ends in the middle") : EVEN_OK;
}

void even_http_answer_free(even_http_answer *answer) {
  even_text_free(&answer->body);
}

void even_http_answer_header(const even_http_answer *answer, const char *name, char out[EVEN_HTTP_HEADER]) {
  line value;
  out[0] = '\0';
  if (find(answer, name, &value) && value.length < EVEN_HTTP_HEADER) {
    memcpy(out, value.text, value.length);
    out[value.length] = '\0';
  }
}
