/* A member that cannot keep what it must not forget, or whose libraft lacks memory: nobody hears of it any more, and it
 * goes on with what it has kept. */
#include "orchestrator/voter_log.h"

#include "orchestrator/raft_wire.h"
#include "os/calls.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SELF = 1, SECOND = 2, THIRD = 3 };

static const uint64_t FIRST_NS = 1000000000000u;
static const even_voter_member names[] = {{SELF, "one:1"}, {SECOND, "two:1"}, {THIRD, "three:1"}};

static uint64_t now_ns;
static even_leadership_times times;
static even_voter_log own;

/* What it has sent since `forget_sent`. */
static struct {
  unsigned count;
  unsigned entries;
  bool granted;
  struct raft_message last; /* without its entries */
} sent;

static int its_time(clockid_t clock, struct timespec *out) {
  (void)clock;
  *out = (struct timespec){(time_t)(now_ns / 1000000000u), (long)(now_ns % 1000000000u)};
  return 0;
}

static void forget_sent(void) {
  memset(&sent, 0, sizeof sent);
}

static bool catch_message(void *context, uint64_t to, const void *bytes, size_t count) {
  struct raft_message message;
  assert_ptr_equal(context, &own);
  assert_true(to == SECOND || to == THIRD);
  assert_int_equal(even_raft_wire_read(bytes, count, &message), EVEN_OK);
  sent.count++;
  sent.entries += message.type == RAFT_IO_APPEND_ENTRIES ? message.append_entries.n_entries : 0;
  sent.granted = message.type == RAFT_IO_REQUEST_VOTE_RESULT && message.request_vote_result.vote_granted;
  even_raft_wire_drop(&message);
  sent.last = message;
  return true;
}

static void on_changed(void *context) {
  assert_ptr_equal(context, &own);
}

/* ---- libraft's memory ---- */

static long fails_at;      /* the how manieth allocation from now on; 0: none */
static long fails_hearing; /* of what is heard next */
static bool failed;
static bool lacked; /* in this test */

static bool has_memory(void) {
  bool fails = fails_at > 0 && --fails_at == 0;
  failed = failed || fails;
  lacked = lacked || fails;
  return !fails;
}

/* libraft loses some of what it has where it then lacks more: each block is in a list, to be freed at the end. */
typedef struct block {
  _Alignas(max_align_t) struct block *next;
  struct block **at;
} block;

static block *blocks;

static void link_block(block *one) {
  one->next = blocks;
  one->at = &blocks;
  if (blocks != NULL) {
    blocks->at = &one->next;
  }
  blocks = one;
}

static void unlink_block(const block *one) {
  *one->at = one->next;
  if (one->next != NULL) {
    one->next->at = one->at;
  }
}

static void *some_calloc(void *data, size_t count, size_t size) {
  (void)data;
  block *made = has_memory() ? calloc(1, sizeof *made + count * size) : NULL;
  if (made == NULL) {
    return NULL;
  }
  link_block(made);
  return made + 1;
}

static void *some_malloc(void *data, size_t size) {
  return some_calloc(data, 1, size);
}

static void *some_realloc(void *data, void *at, size_t size) {
  block *before = at == NULL ? NULL : (block *)at - 1;
  if (before == NULL || !has_memory()) {
    return before == NULL ? some_malloc(data, size) : NULL;
  }
  unlink_block(before);
  block *made = realloc(before, sizeof *made + size);
  assert_non_null(made);
  link_block(made);
  return made + 1;
}

static void some_free(void *data, void *at) {
  (void)data;
  if (at != NULL) {
    unlink_block((block *)at - 1);
    free((block *)at - 1);
  }
}

static struct raft_heap some_heap = {
    .malloc = some_malloc, .free = some_free, .calloc = some_calloc, .realloc = some_realloc};

/* ---- what it hears ---- */

static void open_log(size_t count, const char *folder) {
  const even_voter_params params = {
      .size = sizeof params, .self = SELF, .members = names, .count = count, .first = SELF, .folder = folder};
  even_raft_store store;
  bool known = false;
  now_ns = FIRST_NS;
  times = even_leadership_times_of(4000);
  memset(&own, 0, sizeof own);
  own.context = &own;
  own.changed = on_changed;
  assert_int_equal(even_voter_log_store(&params, &store, &known), EVEN_OK);
  assert_int_equal(even_voter_log_open(&own, &params, &times, &store, known, catch_message), EVEN_OK);
  forget_sent();
}

static void give(uint64_t from, struct raft_message *message) {
  even_text bytes = EVEN_TEXT_EMPTY;
  assert_int_equal(even_raft_wire_write(message, &bytes), EVEN_OK);
  fails_at = fails_hearing;
  even_status status = even_raft_memory_receive(&own.memory, from, "x", (unsigned char *)bytes.data, bytes.length);
  fails_at = fails_hearing = 0;
  assert_true(status == EVEN_OK || (failed && status == EVEN_ERR_MEMORY));
  even_text_free(&bytes);
}

static void turn(void) {
  even_raft_memory_turn(&own.memory, now_ns);
}

/* Long enough for an election, and longer. */
static void pass(void) {
  now_ns += 3 * times.election_ns;
  turn();
}

static void grant(bool before) {
  struct raft_message message;
  memset(&message, 0, sizeof message);
  message.type = RAFT_IO_REQUEST_VOTE_RESULT;
  message.request_vote_result =
      (struct raft_request_vote_result){.term = own.raft.current_term + (before ? 1 : 0),
                                        .vote_granted = true,
                                        .pre_vote = before ? raft_tribool_true : raft_tribool_false};
  give(SECOND, &message);
}

/* The second one has its log up to number `index`. */
static void confirm(uint64_t index) {
  struct raft_message message;
  memset(&message, 0, sizeof message);
  message.type = RAFT_IO_APPEND_ENTRIES_RESULT;
  message.append_entries_result =
      (struct raft_append_entries_result){.term = own.raft.current_term, .last_log_index = index};
  give(SECOND, &message);
}

static void come_to_lead(void) {
  pass();
  grant(true);
  grant(false);
  assert_true(even_voter_log_leads(&own));
  confirm(1);
  forget_sent();
}

static void ask_vote(uint64_t from, uint64_t term) {
  struct raft_message message;
  memset(&message, 0, sizeof message);
  message.type = RAFT_IO_REQUEST_VOTE;
  message.request_vote = (struct raft_request_vote){
      .term = term, .candidate_id = from, .last_log_index = 9, .last_log_term = term - 1, .disrupt_leader = true};
  give(from, &message);
}

/* A leader's message: entry `before`, which is of term `before_term`, and then one of `type`, or none (0). */
static void hear(uint64_t leader, uint64_t term, uint64_t before, uint64_t before_term, unsigned short type) {
  static char word[24];
  struct raft_configuration two;
  struct raft_buffer members;
  struct raft_message message;
  raft_configuration_init(&two);
  assert_int_equal(raft_configuration_add(&two, SELF, "1", RAFT_VOTER), 0);
  assert_int_equal(raft_configuration_add(&two, SECOND, "2", RAFT_VOTER), 0);
  assert_int_equal(raft_configuration_encode(&two, &members), 0);
  raft_configuration_close(&two);
  struct raft_entry entry = {term, type, {word, sizeof word}, NULL};
  entry.buf = type == RAFT_CHANGE ? members : entry.buf;
  memset(&message, 0, sizeof message);
  message.type = RAFT_IO_APPEND_ENTRIES;
  message.append_entries = (struct raft_append_entries){term, before, before_term, 1, &entry, type == 0 ? 0 : 1};
  give(leader, &message);
  raft_free(members.base);
}

static void go_on(void) {
  assert_non_null(even_voter_log_gave_up(&own));
  assert_int_equal(even_voter_log_again(&own, &times), EVEN_OK);
  assert_null(even_voter_log_gave_up(&own));
}

static int begin(void **state) {
  (void)state;
  even_os.clock_gettime = its_time;
  fails_at = 0;
  failed = lacked = false;
  raft_heap_set(&some_heap);
  return 0;
}

static int end(void **state) {
  (void)state;
  even_voter_log_close(&own, true);
  assert_true(lacked || blocks == NULL);
  while (blocks != NULL) {
    some_free(NULL, blocks + 1);
  }
  raft_heap_set_default();
  fault_reset();
  return 0;
}

/* ---- leading ---- */

/* It was to write an entry; another leader writes another one of that number. */
static void what_a_leader_cannot_keep_nobody_hears_of(void **state) {
  (void)state;
  open_log(3, NULL);
  come_to_lead();
  even_voter_log_propose(&own, 0);
  assert_int_equal(sent.entries, 1);
  confirm(2);
  forget_sent();
  fault_allocation(1);
  even_voter_log_propose(&own, SELF);
  fault_allocation(0);
  assert_int_equal(even_voter_log_gave_up(&own)->status, EVEN_ERR_MEMORY);
  assert_false(even_voter_log_leads(&own));
  assert_int_equal(even_voter_log_leader(&own), 0);
  for (int i = 0; i < 3; i++) {
    pass();
    confirm(2);
    ask_vote(SECOND, 9);
    even_voter_log_propose(&own, SELF);
    even_voter_log_yield(&own, SECOND);
    even_voter_log_change(&own, names, 2, now_ns);
  }
  assert_int_equal(sent.count, 0);
  assert_int_equal(own.memory.store.count, 2);
  assert_int_equal(own.memory.store.term, 2);
  uint64_t came_back_ns = now_ns;
  go_on();
  assert_false(own.proposed);
  assert_int_equal(own.claim_ns, came_back_ns);
  hear(THIRD, 3, 2, 2, RAFT_COMMAND);
  assert_int_equal(sent.last.append_entries_result.last_log_index, 3);
  assert_int_equal(own.memory.store.entries[2].term, 3);
  assert_int_equal(even_voter_log_leader(&own), THIRD);
}

static bool has(uint64_t id) {
  return even_voter_log_server(&own, id) != NULL;
}

/* Wherever libraft lacks memory for a change: it frees members that it uses on, and has an entry that is kept nowhere.
 */
static void a_change_for_which_there_is_no_memory_is_made_later(void **state) {
  long nth = 0;
  (void)state;
  do {
    open_log(1, NULL);
    assert_true(even_voter_log_leads(&own));
    nth++;
    for (int of_three = 0; of_three < 3; of_three++) { /* to add one, to let it listen, to remove it */
      size_t count = of_three < 2 ? 2 : 1;
      failed = false;
      fails_at = nth;
      even_voter_log_change(&own, names, count, now_ns);
      fails_at = 0;
      turn();
      if (even_voter_log_gave_up(&own) != NULL) {
        assert_true(failed);
        assert_false(even_voter_log_leads(&own));
        go_on();
      }
      now_ns += 1000000000u;
      for (int i = 0; i < 3 && !even_voter_log_is(&own, names, count); i++) {
        even_voter_log_change(&own, names, count, now_ns);
        turn();
        now_ns += 1000000000u;
      }
      assert_true(even_voter_log_leads(&own));
      assert_true(even_voter_log_is(&own, names, count));
      assert_int_equal(has(SECOND), count == 2);
    }
    even_voter_log_close(&own, true);
  } while (failed);
  assert_true(nth > 5);
}

/* ---- following ---- */

/* One message of each kind that has something written; it is answered once it can be. */
static void hear_one(int kind) {
  switch (kind) {
    case 0: /* a term */
      hear(SECOND, 3, 1, 1, 0);
      break;
    case 1: /* an entry: members */
      hear(SECOND, 3, 1, 1, RAFT_CHANGE);
      break;
    case 2: /* others in their place */
      hear(THIRD, 4, 1, 1, RAFT_CHANGE);
      break;
    case 3: /* none in their place */
      hear(SECOND, 5, 1, 1, RAFT_COMMAND);
      break;
    case 4: /* a vote */
      ask_vote(SECOND, 6);
      break;
    default: /* it is to stand for election at once */
      give(SECOND, &(struct raft_message){.type = RAFT_IO_TIMEOUT_NOW,
                                          .timeout_now = {.term = 5, .last_log_index = 2, .last_log_term = 5}});
      break;
  }
}

enum { KINDS = 6 };

static bool answers(int kind) {
  return kind < 4   ? sent.last.type == RAFT_IO_APPEND_ENTRIES_RESULT && sent.last.append_entries_result.rejected == 0
         : kind < 5 ? sent.granted
                    : sent.last.type == RAFT_IO_REQUEST_VOTE && sent.last.request_vote.disrupt_leader;
}

/* What the first ones of them leave. */
static void hear_those_before(int kind) {
  for (int before = 0; before < kind && before < 4; before++) {
    hear_one(before);
  }
  forget_sent();
}

static void see_as_after(int kind) {
  static const uint64_t terms[KINDS] = {3, 3, 4, 5, 6, 6};
  assert_true(answers(kind));
  assert_int_equal(own.memory.store.term, terms[kind]);
  assert_int_equal(own.raft.current_term, terms[kind]);
  assert_int_equal(own.memory.store.vote, kind == 4 ? SECOND : kind == 5 ? SELF : 0);
  assert_int_equal(own.memory.store.count, kind == 0 ? 1 : 2);
  assert_int_equal(own.raft.configuration.n, kind == 1 || kind == 2 ? 2 : 3);
}

/* The disk takes neither the file, nor that there is none. */
static void what_a_follower_cannot_keep_is_as_unheard(void **state) {
  (void)state;
  for (int kind = 0; kind < KINDS; kind++) {
    char folder[] = "/tmp/evenstep-gives-up-XXXXXX"; /* it goes with the member */
    assert_non_null(mkdtemp(folder));
    open_log(3, folder);
    hear_those_before(kind);
    const uint64_t term = own.memory.store.term;
    const size_t count = own.memory.store.count;
    fault_os_from(FAULT_fsync, 1, EROFS);
    fault_os_from(FAULT_unlink, 1, EROFS);
    even_os.clock_gettime = its_time;
    hear_one(kind);
    pass();
    assert_int_equal(even_voter_log_gave_up(&own)->system_error, EROFS);
    assert_int_equal(sent.count, 0);
    assert_int_equal(own.memory.store.term, term);
    assert_int_equal(own.memory.store.count, count);
    fault_reset();
    even_os.clock_gettime = its_time;
    go_on();
    if (kind == 5) {
      hear(SECOND, 5, 2, 5, 0); /* who leads */
    }
    hear_one(kind);
    see_as_after(kind);
    even_voter_log_close(&own, true);
  }
}

static void a_follower_that_lacks_memory_goes_on_later(void **state) {
  (void)state;
  for (int kind = 0; kind < KINDS; kind++) {
    unsigned gave_up = 0;
    long nth = 0;
    do {
      open_log(3, NULL);
      hear_those_before(kind);
      failed = false;
      fails_hearing = ++nth;
      hear_one(kind);
      turn();
      if (even_voter_log_gave_up(&own) != NULL) {
        assert_true(failed);
        gave_up++;
        go_on();
      }
      if (!answers(kind)) {
        assert_true(failed);
        if (kind == 5) {
          hear(SECOND, 5, 2, 5, 0);
        }
        hear_one(kind);
      }
      see_as_after(kind);
      even_voter_log_close(&own, true);
    } while (failed);
    assert_true(gave_up > 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(what_a_leader_cannot_keep_nobody_hears_of, begin, end),
      cmocka_unit_test_setup_teardown(a_change_for_which_there_is_no_memory_is_made_later, begin, end),
      cmocka_unit_test_setup_teardown(what_a_follower_cannot_keep_is_as_unheard, begin, end),
      cmocka_unit_test_setup_teardown(a_follower_that_lacks_memory_goes_on_later, begin, end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
