/* What a metadata service, or whoever answers in its place, says: the answer of HTTP, whole and in pieces, and what
 * each service's words are taken for; and where a user says that it is. */
#include "base/http_answer.h"
#include "base/utf8.h"
#include "orchestrator/announcement.h"
#include "orchestrator/notice_place.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(even_status status, const even_announcement *found) {
  if (status != EVEN_OK && found->due) {
    abort();
  }
  size_t length = strnlen(found->what, sizeof found->what);
  if (length == sizeof found->what || !even_utf8_valid(found->what) || (found->due && !(found->seconds <= 1e6))) {
    abort();
  }
}

static void read_services(int status, const char *body, size_t bytes) {
  even_announcement found;
  check(even_announcement_of_aws(status, body, bytes, &found), &found);
  check(even_announcement_of_aws_rebalance(status, body, bytes, &found), &found);
  check(even_announcement_of_gcp(status, body, bytes, &found), &found);
  check(even_announcement_of_azure(status, body, bytes, "vm_0", &found), &found);
  check(even_announcement_of_text(status, body, bytes, &found), &found);
  even_announcement_of_command(body, bytes, &found);
  check(EVEN_OK, &found);
}

/* What is whole, or refused, with so many bytes is so with more, and has the same body. */
static void read_in_pieces(const char *bytes, size_t count) {
  even_http_answer whole;
  bool all = false;
  even_status status = even_http_answer_read(bytes, count, false, &whole, &all);
  if (whole.body.length > EVEN_HTTP_MOST_BODY || (all && status != EVEN_OK)) {
    abort();
  }
  for (size_t part = 0; part < count; part += 1 + count / 16) {
    even_http_answer answer;
    bool ready = false;
    even_status first = even_http_answer_read(bytes, part, false, &answer, &ready);
    bool same = ready && all && answer.status == whole.status && answer.body.length == whole.body.length;
    if ((first != EVEN_OK && status == EVEN_OK) || (ready && !same)) {
      abort();
    }
    even_http_answer_free(&answer);
  }
  even_http_answer_free(&whole);
}

static void read_answer(const char *bytes, size_t count) {
  even_http_answer answer;
  bool whole = false;
  char header[EVEN_HTTP_HEADER];
  read_in_pieces(bytes, count);
  if (even_http_answer_read(bytes, count, true, &answer, &whole) == EVEN_OK) {
    if (!whole) {
      abort();
    }
    even_http_answer_header(&answer, "Metadata-Flavor", header);
    if (strnlen(header, sizeof header) == sizeof header) {
      abort();
    }
    read_services(answer.status, even_text_string(&answer.body), answer.body.length);
  }
  even_http_answer_free(&answer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  even_notice_place place;
  int64_t at = 0;
  char *text = malloc(size + 1);
  if (text == NULL) {
    return 0;
  }
  memcpy(text, data, size);
  text[size] = '\0';
  read_answer(text, size);
  read_services(200, text, size);
  if (even_announcement_instant(text, &at) && (at < 0 || at > 253402300800)) {
    abort();
  }
  if (even_notice_place_read(text, &place) == EVEN_OK && place.service != EVEN_NOTICE_OFF &&
      place.service != EVEN_NOTICE_EXEC && (place.port < 1 || place.port > 65535 || place.address[0] == '\0')) {
    abort();
  }
  free(text);
  return 0;
}
