/* Answers of HTTP: whole at the right byte and not before, whatever pieces they come in, and within their limits. */
#include "base/http_answer.h"

#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static even_status read_all(const char *bytes, size_t count, bool ended, bool *whole, int *code, char body[64]) {
  even_http_answer answer;
  even_status status = even_http_answer_read(bytes, count, ended, &answer, whole);
  *code = answer.status;
  (void)snprintf(body, 64, "%s", even_text_string(&answer.body));
  even_http_answer_free(&answer);
  return status;
}

static const struct {
  const char *bytes;
  int status;
  const char *body;
  bool ends; /* only the end of the connection ends it */
} good[] = {
    {"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nTRUE", 200, "TRUE", false},
    {"HTTP/1.0 404 Not Found\r\ncontent-length:0\r\n\r\n", 404, "", false},
    {"HTTP/1.1 200 OK\nContent-Length: 2\n\nab", 200, "ab", false},
    {"HTTP/1.1 204\r\n\r\n", 204, "", false},
    {"HTTP/1.1 200 OK\r\nServer: x\r\n\r\nto the end", 200, "to the end", true},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n",
     200, "abc0123456789", false},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n1\r\nz\r\n0\r\n\r\n", 200, "z", false},
};

static void answers_are_whole_at_their_last_byte(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
    size_t length = strlen(good[i].bytes);
    for (size_t count = 0; count <= length; count++) {
      bool whole = false;
      int code = 0;
      char body[64];
      assert_int_equal(read_all(good[i].bytes, count, false, &whole, &code, body), EVEN_OK);
      assert_int_equal(whole, count == length && !good[i].ends);
    }
    bool whole = false;
    int code = 0;
    char body[64];
    assert_int_equal(read_all(good[i].bytes, length, true, &whole, &code, body), EVEN_OK);
    assert_true(whole);
    assert_int_equal(code, good[i].status);
    assert_string_equal(body, good[i].body);
  }
}

static void what_is_no_answer_is_refused(void **state) {
  static const char *const bad[] = {
      "SSH-2.0-OpenSSH\r\n\r\n",
      "HTTP/2.0 200 OK\r\n\r\n",
      "HTTP/1.1 20 OK\r\n\r\n",
      "HTTP/1.1 100 Continue\r\n\r\n",
      "HTTP/1.1 2000 OK\r\n\r\n",
      "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
      "HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n",
      "HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n",
      "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551617\r\n\r\n",
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\n",
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20000\r\n",
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
  };
  bool whole = false;
  int code = 0;
  char body[64];
  (void)state;
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    assert_int_equal(read_all(bad[i], strlen(bad[i]), false, &whole, &code, body), EVEN_ERR_INPUT);
    assert_false(whole);
  }
}

static void what_ends_early_is_refused(void **state) {
  static const char text[] = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nTRUE";
  (void)state;
  for (size_t count = 0; count < sizeof text - 1; count++) {
    bool whole = false;
    int code = 0;
    char body[64];
    assert_int_equal(read_all(text, count, true, &whole, &code, body), EVEN_ERR_INPUT);
  }
}

/* A head, a body or trailers that never end. */
static void what_goes_on_for_ever_is_refused(void **state) {
  static const char *const beginnings[] = {"", "HTTP/1.1 200 OK\r\nX: ", "HTTP/1.1 200 OK\r\n\r\n",
                                           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;",
                                           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"};
  enum { MANY = EVEN_HTTP_MOST_HEAD + EVEN_HTTP_MOST_BODY };
  char *bytes = malloc(MANY);
  (void)state;
  assert_non_null(bytes);
  for (size_t i = 0; i < sizeof beginnings / sizeof beginnings[0]; i++) {
    bool whole = false;
    int code = 0;
    char body[64];
    memset(bytes, 'a', MANY);
    memcpy(bytes, beginnings[i], strlen(beginnings[i]));
    assert_int_equal(read_all(bytes, MANY, false, &whole, &code, body), EVEN_ERR_INPUT);
  }
  free(bytes);
}

static void headers_are_found_in_any_case(void **state) {
  static const char text[] = "HTTP/1.1 200 OK\r\nMetadata-flavor:  Google \t\r\nEmpty:\r\n\r\nMetadata: body";
  even_http_answer answer;
  bool whole = false;
  char value[EVEN_HTTP_HEADER];
  (void)state;
  assert_int_equal(even_http_answer_read(text, sizeof text - 1, true, &answer, &whole), EVEN_OK);
  even_http_answer_header(&answer, "Metadata-Flavor", value);
  assert_string_equal(value, "Google");
  even_http_answer_header(&answer, "Empty", value);
  assert_string_equal(value, "");
  even_http_answer_header(&answer, "Metadata", value);
  assert_string_equal(value, "");
  even_http_answer_free(&answer);
}

static even_status read_one(void *context) {
  bool whole = false;
  int code = 0;
  char body[64];
  (void)context;
  return read_all(good[5].bytes, strlen(good[5].bytes), true, &whole, &code, body);
}

static void memory_that_lacks_is_told(void **state) {
  (void)state;
  assert_true(fault_each_allocation(read_one, NULL) > 0);
}

static int reset(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(answers_are_whole_at_their_last_byte),
      cmocka_unit_test(what_is_no_answer_is_refused),
      cmocka_unit_test(what_ends_early_is_refused),
      cmocka_unit_test(what_goes_on_for_ever_is_refused),
      cmocka_unit_test(headers_are_found_in_any_case),
      cmocka_unit_test_teardown(memory_that_lacks_is_told, reset),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
