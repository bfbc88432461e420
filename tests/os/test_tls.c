/* TLS with a shared key: both ends in this process, bytes carried by hand. */
#include "os/tls.h"

#include "base/fail.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { ROOM = 1 << 17 };

typedef struct ends {
  even_tls *server;
  even_tls *client;
} ends;

static const unsigned char KEY[EVEN_TLS_KEY_BYTES] = "one key for this job, 32 bytes.";
static const unsigned char OTHER[EVEN_TLS_KEY_BYTES] = "another one, of another job....";

static ends open_both(const unsigned char *server_key, const unsigned char *client_key) {
  ends both = {NULL, NULL};
  assert_int_equal(even_tls_open(true, server_key, &both.server), EVEN_OK);
  assert_int_equal(even_tls_open(false, client_key, &both.client), EVEN_OK);
  return both;
}

static void close_both(ends *both) {
  even_tls_close(both->server);
  even_tls_close(both->client);
}

/* Carries what `from` has to say; how much that was. */
static size_t carry(even_tls *from, even_tls *to) {
  static char buffer[ROOM];
  size_t all = 0;
  size_t got = 0;
  while ((got = even_tls_take(from, buffer, sizeof buffer)) > 0) {
    assert_int_equal(even_tls_feed(to, buffer, got), EVEN_OK);
    all += got;
  }
  return all;
}

/* Until nobody says anything any more, or one has failed; the first failure. */
static even_status shake_hands(ends *both) {
  char nothing[16];
  size_t got = 0;
  bool ended = false;
  for (int i = 0; i < 10; i++) {
    even_status client = even_tls_read(both->client, nothing, sizeof nothing, &got, &ended);
    (void)carry(both->client, both->server);
    even_status server = even_tls_read(both->server, nothing, sizeof nothing, &got, &ended);
    (void)carry(both->server, both->client);
    if (server != EVEN_OK || client != EVEN_OK) {
      return server != EVEN_OK ? server : client;
    }
  }
  return EVEN_OK;
}

static void who_has_the_key_is_heard(void **state) {
  static char sent[100000];
  static char heard[sizeof sent];
  ends both = open_both(KEY, KEY);
  size_t all = 0;
  size_t got = 0;
  bool ended = false;
  (void)state;
  assert_int_equal(even_tls_write(both.client, "early", 5), EVEN_ERR_STATE);
  assert_int_equal(shake_hands(&both), EVEN_OK);
  assert_true(even_tls_ready(both.client) && even_tls_ready(both.server));
  for (size_t i = 0; i < sizeof sent; i++) {
    sent[i] = (char)(i * 7);
  }
  assert_int_equal(even_tls_write(both.client, sent, sizeof sent), EVEN_OK);
  (void)carry(both.client, both.server);
  do {
    assert_int_equal(even_tls_read(both.server, heard + all, sizeof heard - all, &got, &ended), EVEN_OK);
    all += got;
  } while (got > 0 && all < sizeof heard);
  assert_int_equal(all, sizeof sent);
  assert_memory_equal(heard, sent, sizeof sent);
  even_tls_end(both.client);
  (void)carry(both.client, both.server);
  assert_int_equal(even_tls_read(both.server, heard, sizeof heard, &got, &ended), EVEN_OK);
  assert_true(ended && got == 0);
  close_both(&both);
}

static void who_has_another_key_is_not(void **state) {
  ends both = open_both(KEY, OTHER);
  (void)state;
  assert_int_equal(shake_hands(&both), EVEN_ERR_PERMISSION);
  assert_false(even_tls_ready(both.server));
  assert_false(even_tls_ready(both.client));
  close_both(&both);
}

static void noise_is_no_tls(void **state) {
  char nothing[16];
  size_t got = 0;
  bool ended = false;
  ends both = open_both(KEY, KEY);
  (void)state;
  assert_int_equal(even_tls_feed(both.server, "GET / HTTP/1.1\r\n\r\n", 18), EVEN_OK);
  assert_int_equal(even_tls_read(both.server, nothing, sizeof nothing, &got, &ended), EVEN_ERR_PERMISSION);
  close_both(&both);
}

/* Each byte of what travels is protected. */
static void what_was_changed_on_the_way_is_refused(void **state) {
  char bytes[512];
  char heard[64];
  size_t got = 0;
  bool ended = false;
  (void)state;
  for (size_t at = 5; at < 30; at++) {
    ends both = open_both(KEY, KEY);
    assert_int_equal(shake_hands(&both), EVEN_OK);
    assert_int_equal(even_tls_write(both.client, "end the job", 11), EVEN_OK);
    size_t count = even_tls_take(both.client, bytes, sizeof bytes);
    assert_true(count >= 30);
    bytes[at] = (char)(bytes[at] ^ 1);
    assert_int_equal(even_tls_feed(both.server, bytes, count), EVEN_OK);
    assert_int_equal(even_tls_read(both.server, heard, sizeof heard, &got, &ended), EVEN_ERR_INPUT);
    close_both(&both);
  }
}

/* What was recorded of one connection says nothing in another, and nothing twice in the same. */
static void what_was_recorded_cannot_be_played_again(void **state) {
  static char recorded[ROOM];
  char bytes[512];
  char heard[64];
  size_t got = 0;
  size_t length = 0;
  bool ended = false;
  (void)state;
  ends both = open_both(KEY, KEY);
  assert_int_equal(even_tls_read(both.client, heard, sizeof heard, &got, &ended), EVEN_OK);
  length = even_tls_take(both.client, recorded, sizeof recorded); /* the client's first word, */
  assert_int_equal(even_tls_feed(both.server, recorded, length), EVEN_OK);
  assert_int_equal(even_tls_read(both.server, heard, sizeof heard, &got, &ended), EVEN_OK);
  (void)carry(both.server, both.client);
  assert_int_equal(even_tls_read(both.client, heard, sizeof heard, &got, &ended), EVEN_OK);
  length += even_tls_take(both.client, recorded + length, sizeof recorded - length); /* its second, */
  assert_int_equal(even_tls_write(both.client, "end the job", 11), EVEN_OK);
  size_t count = even_tls_take(both.client, bytes, sizeof bytes);
  memcpy(recorded + length, bytes, count); /* and a message */
  length += count;
  close_both(&both);

  even_tls *server = NULL;
  assert_int_equal(even_tls_open(true, KEY, &server), EVEN_OK);
  assert_int_equal(even_tls_feed(server, recorded, length), EVEN_OK);
  assert_int_not_equal(even_tls_read(server, heard, sizeof heard, &got, &ended), EVEN_OK);
  assert_int_equal(got, 0);
  assert_false(even_tls_ready(server));
  even_tls_close(server);

  both = open_both(KEY, KEY);
  assert_int_equal(shake_hands(&both), EVEN_OK);
  assert_int_equal(even_tls_write(both.client, "end the job", 11), EVEN_OK);
  count = even_tls_take(both.client, bytes, sizeof bytes);
  assert_int_equal(even_tls_feed(both.server, bytes, count), EVEN_OK);
  assert_int_equal(even_tls_feed(both.server, bytes, count), EVEN_OK);
  assert_int_equal(even_tls_read(both.server, heard, sizeof heard, &got, &ended), EVEN_OK);
  assert_int_equal(got, 11);
  assert_int_equal(even_tls_read(both.server, heard, sizeof heard, &got, &ended), EVEN_ERR_INPUT);
  close_both(&both);
}

static void keys_are_64_digits(void **state) {
  unsigned char key[EVEN_TLS_KEY_BYTES];
  (void)state;
  assert_int_equal(even_tls_key_read("00ff", key), EVEN_ERR_INPUT);
  assert_int_equal(even_tls_key_read("", key), EVEN_ERR_INPUT);
  assert_int_equal(even_tls_key_read("zz0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f", key),
                   EVEN_ERR_INPUT);
  assert_int_equal(even_tls_key_read("000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f", key), EVEN_OK);
  assert_int_equal(key[31], 31);
  assert_int_equal(even_tls_key_read("000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20", key),
                   EVEN_ERR_INPUT);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(who_has_the_key_is_heard),
      cmocka_unit_test(who_has_another_key_is_not),
      cmocka_unit_test(noise_is_no_tls),
      cmocka_unit_test(what_was_changed_on_the_way_is_refused),
      cmocka_unit_test(what_was_recorded_cannot_be_played_again),
      cmocka_unit_test(keys_are_64_digits),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
