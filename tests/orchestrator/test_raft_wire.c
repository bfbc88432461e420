/* Messages of the voters' log as bytes, and back; and what is none. */
#include "orchestrator/raft_wire.h"

#include "base/fail.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct raft_message sample(unsigned short type, struct raft_entry *entries) {
  struct raft_message message;
  memset(&message, 0, sizeof message);
  message.type = type;
  switch (type) {
    case RAFT_IO_APPEND_ENTRIES:
      message.append_entries = (struct raft_append_entries){7, 6, 5, 4, entries, 3};
      break;
    case RAFT_IO_APPEND_ENTRIES_RESULT:
      message.append_entries_result = (struct raft_append_entries_result){7, 0, 12};
      break;
    case RAFT_IO_REQUEST_VOTE:
      message.request_vote = (struct raft_request_vote){7, 3, 12, 6, true, false};
      break;
    case RAFT_IO_REQUEST_VOTE_RESULT:
      message.request_vote_result = (struct raft_request_vote_result){7, true, raft_tribool_true};
      break;
    default:
      message.timeout_now = (struct raft_timeout_now){7, 12, 6};
      break;
  }
  return message;
}

static const unsigned short types[] = {RAFT_IO_APPEND_ENTRIES, RAFT_IO_APPEND_ENTRIES_RESULT, RAFT_IO_REQUEST_VOTE,
                                       RAFT_IO_REQUEST_VOTE_RESULT, RAFT_IO_TIMEOUT_NOW};

static char first[] = "first";
static char third[] = "the third";

static void make_entries(struct raft_entry *entries) {
  entries[0] = (struct raft_entry){1, RAFT_CHANGE, {first, sizeof first}, NULL};
  entries[1] = (struct raft_entry){2, RAFT_BARRIER, {NULL, 0}, NULL};
  entries[2] = (struct raft_entry){2, RAFT_COMMAND, {third, sizeof third}, NULL};
}

/* What is read is written as the same bytes; with a byte less or more it is no message. */
static void each_kind_comes_back(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
    struct raft_entry entries[3];
    even_text once = EVEN_TEXT_EMPTY;
    even_text twice = EVEN_TEXT_EMPTY;
    struct raft_message read;
    make_entries(entries);
    const struct raft_message message = sample(types[i], entries);
    assert_int_equal(even_raft_wire_write(&message, &once), EVEN_OK);
    assert_int_equal(even_raft_wire_read((unsigned char *)once.data, once.length, &read), EVEN_OK);
    assert_int_equal(read.type, types[i]);
    assert_int_equal(even_raft_wire_write(&read, &twice), EVEN_OK);
    assert_int_equal(once.length, twice.length);
    assert_memory_equal(once.data, twice.data, once.length);
    if (types[i] == RAFT_IO_APPEND_ENTRIES) {
      assert_int_equal(read.append_entries.n_entries, 3);
      assert_string_equal((char *)read.append_entries.entries[2].buf.base, "the third");
    }
    even_raft_wire_drop(&read);
    for (size_t less = 0; less < once.length; less++) {
      assert_int_equal(even_raft_wire_read((unsigned char *)once.data, less, &read), EVEN_ERR_INPUT);
    }
    even_text_append(&once, "", 1);
    assert_int_equal(even_raft_wire_read((unsigned char *)once.data, once.length, &read), EVEN_ERR_INPUT);
    even_text_free(&once);
    even_text_free(&twice);
  }
}

/* A count or a length that is a lie takes no memory, and nothing is read beyond the end (AddressSanitizer sees that).
 */
static void numbers_that_lie_are_refused(void **state) {
  struct raft_entry entries[3];
  even_text text = EVEN_TEXT_EMPTY;
  struct raft_message read;
  (void)state;
  make_entries(entries);
  const struct raft_message message = sample(RAFT_IO_APPEND_ENTRIES, entries);
  assert_int_equal(even_raft_wire_write(&message, &text), EVEN_OK);
  static const size_t places[] = {0, 40, 56, 64}; /* type, count, an entry's type, its length */
  for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
    for (size_t byte = 0; byte < 8; byte++) {
      unsigned char *copy = malloc(text.length);
      assert_non_null(copy);
      memcpy(copy, text.data, text.length);
      copy[places[i] + byte] ^= 0x80;
      even_status status = even_raft_wire_read(copy, text.length, &read);
      assert_int_equal(status, EVEN_ERR_INPUT);
      free(copy);
    }
  }
  even_text_free(&text);
}

static void what_does_not_fit_follows_later(void **state) {
  static char large[700000];
  struct raft_entry entries[2] = {{1, RAFT_COMMAND, {large, sizeof large}, NULL},
                                  {1, RAFT_COMMAND, {large, sizeof large}, NULL}};
  struct raft_message message = sample(RAFT_IO_APPEND_ENTRIES, entries);
  even_text text = EVEN_TEXT_EMPTY;
  struct raft_message read;
  (void)state;
  message.append_entries.n_entries = 2;
  assert_int_equal(even_raft_wire_write(&message, &text), EVEN_OK);
  assert_true(text.length <= EVEN_RAFT_WIRE_MOST);
  assert_int_equal(even_raft_wire_read((unsigned char *)text.data, text.length, &read), EVEN_OK);
  assert_int_equal(read.append_entries.n_entries, 1);
  even_raft_wire_drop(&read);
  even_text_free(&text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(each_kind_comes_back),
      cmocka_unit_test(numbers_that_lie_are_refused),
      cmocka_unit_test(what_does_not_fit_follows_later),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
