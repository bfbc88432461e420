/* An answer of HTTP/1 (RFC 9112), as far as one needs it who asks a service of this machine or network for some words.
 * Pure: bytes in; status, headers and body out, all of them within limits. */
#ifndef EVEN_BASE_HTTP_ANSWER_H
#define EVEN_BASE_HTTP_ANSWER_H

#include "base/text.h"

#include <stdbool.h>

enum { EVEN_HTTP_MOST_HEAD = 8192, EVEN_HTTP_MOST_BODY = 65536, EVEN_HTTP_HEADER = 128 };

typedef struct even_http_answer {
  int status;       /* 200 … 599 */
  const char *head; /* its header lines, in the bytes that it was read from */
  size_t head_bytes;
  even_text body; /* free it with even_http_answer_free, also where the answer is not whole */
} even_http_answer;

/* Looks whether the answer to a GET or PUT is whole in these bytes, `ended`: after which the connection was closed; the
 * body is then as its length says, put together from its chunks, or all that came. EVEN_ERR_INPUT: it is no such
 * answer, it ended early, or it is longer than the limits, which its own length says as soon as the head is there. */
even_status even_http_answer_read(const char *bytes, size_t count, bool ended, even_http_answer *out,
                                  bool *whole) EVEN_MUST_USE;
void even_http_answer_free(even_http_answer *answer);
/* The value of a header, "" where it has none or one that does not fit. Names are the same in any case. */
void even_http_answer_header(const even_http_answer *answer, const char *name, char out[EVEN_HTTP_HEADER]);

#endif
