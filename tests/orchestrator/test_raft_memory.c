/* A follower of libraft's, and what it answers to leaders of two terms, and to those that would lead. */
#include "orchestrator/raft_memory.h"

#include "orchestrator/raft_rules.h"
#include "orchestrator/raft_wire.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SELF = 1, BEFORE = 2, AFTER = 3 };

typedef struct follower {
  even_raft_memory memory;
  struct raft_fsm machine;
  struct raft raft;
  struct raft_append_entries_result answered; /* the last of these */
  struct raft_request_vote_result voted;      /* and of these */
  uint64_t to;
  unsigned applied;
} follower;

static bool catch_answer(void *context, uint64_t member, const void *bytes, size_t count) {
  follower *own = context;
  struct raft_message message;
  assert_int_equal(even_raft_wire_read(bytes, count, &message), EVEN_OK);
  assert_true(message.type == RAFT_IO_APPEND_ENTRIES_RESULT || message.type == RAFT_IO_REQUEST_VOTE_RESULT);
  if (message.type == RAFT_IO_APPEND_ENTRIES_RESULT) {
    own->answered = message.append_entries_result;
  } else {
    own->voted = message.request_vote_result;
  }
  own->to = member;
  return true;
}

static int on_apply(struct raft_fsm *machine, const struct raft_buffer *buffer, void **result) {
  (void)buffer;
  *result = NULL;
  ((follower *)machine->data)->applied++;
  return 0;
}

/* With a log that it has kept, or none. */
static void prepare(follower *own, const even_raft_store *store, uint64_t id, const char *address) {
  memset(own, 0, sizeof *own);
  own->machine = (struct raft_fsm){.version = 1, .data = own, .apply = on_apply};
  even_raft_memory_open(&own->memory, store, own, catch_answer);
  assert_int_equal(raft_init(&own->raft, &own->memory.io, &own->machine, id, address), 0);
}

static void open_follower(follower *own) {
  struct raft_configuration all;
  even_raft_store store;
  bool known = true;
  assert_int_equal(even_raft_store_open(&store, NULL, SELF, &known), EVEN_OK);
  prepare(own, &store, SELF, "1");
  raft_configuration_init(&all);
  assert_int_equal(raft_configuration_add(&all, SELF, "1", RAFT_VOTER), 0);
  assert_int_equal(raft_configuration_add(&all, BEFORE, "2", RAFT_VOTER), 0);
  assert_int_equal(raft_configuration_add(&all, AFTER, "3", RAFT_VOTER), 0);
  assert_int_equal(raft_bootstrap(&own->raft, &all), 0); /* the log's first entry, of term 1 */
  raft_configuration_close(&all);
  assert_int_equal(raft_start(&own->raft), 0);
}

static void close_follower(follower *own) {
  raft_close(&own->raft, NULL);
  even_raft_memory_close(&own->memory, false);
}

static void give(follower *own, uint64_t from, struct raft_message *message) {
  even_text bytes = EVEN_TEXT_EMPTY;
  own->to = 0;
  assert_int_equal(even_raft_wire_write(message, &bytes), EVEN_OK);
  assert_int_equal(even_raft_memory_receive(&own->memory, from, "leader", (unsigned char *)bytes.data, bytes.length),
                   EVEN_OK);
  even_text_free(&bytes);
  assert_int_equal(own->to, from);
}

/* A leader's message with `count` entries of its term behind entry `before`, which is of term `before_term`. */
static void hear(follower *own, uint64_t leader, uint64_t term, uint64_t before, uint64_t before_term, unsigned count,
                 uint64_t commit) {
  static char word[] = "a word";
  struct raft_entry entries[4];
  struct raft_message message;
  assert_true(count <= 4);
  for (unsigned i = 0; i < count; i++) {
    entries[i] = (struct raft_entry){term, RAFT_COMMAND, {word, sizeof word}, NULL};
  }
  memset(&message, 0, sizeof message);
  message.type = RAFT_IO_APPEND_ENTRIES;
  message.append_entries = (struct raft_append_entries){term, before, before_term, commit, entries, count};
  give(own, leader, &message);
}

/* One asks for its vote in `term`, with a log of one entry; a leader that there is does not matter where it `disrupts`.
 */
static bool grants(follower *own, uint64_t candidate, uint64_t term, bool disrupts) {
  struct raft_message message;
  memset(&message, 0, sizeof message);
  message.type = RAFT_IO_REQUEST_VOTE;
  message.request_vote = (struct raft_request_vote){
      .term = term, .candidate_id = candidate, .last_log_index = 1, .last_log_term = 1, .disrupt_leader = disrupts};
  give(own, candidate, &message);
  return own->voted.vote_granted;
}

/* Two entries of a leader that nobody else has got: the next one has one of its own in place of the first of these. */
static void what_only_a_leader_before_has_sent_is_not_answered_for(void **state) {
  follower own;
  (void)state;
  open_follower(&own);
  hear(&own, BEFORE, 2, 1, 1, 2, 1);
  assert_int_equal(own.answered.rejected, 0);
  assert_int_equal(own.answered.last_log_index, 3);
  hear(&own, AFTER, 3, 1, 1, 0, 1); /* it sends this as it is elected; its own entry it has by the time of the answer */
  assert_int_equal(own.answered.rejected, 0);
  assert_int_equal(own.answered.last_log_index, 1);
  hear(&own, AFTER, 3, 1, 1, 1, 1);
  assert_int_equal(own.answered.rejected, 0);
  assert_int_equal(own.answered.last_log_index, 2);
  assert_int_equal(own.memory.store.count, 2);
  assert_int_equal(own.memory.store.entries[1].term, 3);
  assert_int_equal(own.applied, 0);
  hear(&own, AFTER, 3, 2, 3, 0, 2);
  assert_int_equal(own.applied, 1);
  close_follower(&own);
}

/* A message may carry fewer entries than are committed: what lies behind them is not the leader's. */
static void what_lies_behind_a_message_is_not_committed_by_it(void **state) {
  follower own;
  (void)state;
  open_follower(&own);
  hear(&own, BEFORE, 2, 1, 1, 3, 1);
  hear(&own, AFTER, 3, 2, 2, 0, 4); /* of those three it has the first */
  assert_int_equal(own.answered.last_log_index, 2);
  assert_int_equal(own.applied, 1);
  hear(&own, AFTER, 3, 2, 2, 2, 4);
  assert_int_equal(own.answered.last_log_index, 4);
  assert_int_equal(own.applied, 3);
  assert_int_equal(own.memory.store.entries[2].term, 3);
  close_follower(&own);
}

static void what_is_refused_says_how_long_the_log_is(void **state) {
  follower own;
  (void)state;
  open_follower(&own);
  hear(&own, AFTER, 3, 5, 3, 1, 1);
  assert_int_equal(own.answered.rejected, 5);
  assert_int_equal(own.answered.last_log_index, 1);
  close_follower(&own);
}

/* An entry of other members is undone that was there when the process started: those of before count again, in the
 * leader's next message as in one that brings them anew. */
static void members_that_are_undone_count_no_more(void **state) {
  struct raft_configuration two;
  struct raft_buffer bytes;
  even_raft_store store;
  follower own;
  bool known = true;
  (void)state;
  raft_configuration_init(&two);
  assert_int_equal(raft_configuration_add(&two, SELF, "1", RAFT_VOTER), 0);
  assert_int_equal(raft_configuration_add(&two, BEFORE, "2", RAFT_STANDBY), 0);
  assert_int_equal(raft_configuration_encode(&two, &bytes), 0);
  raft_configuration_close(&two);
  open_follower(&own);
  const even_raft_kept change = {.term = 2, .type = RAFT_CHANGE, .bytes = bytes.len, .data = bytes.base};
  assert_int_equal(even_raft_store_open(&store, NULL, SELF, &known), EVEN_OK);
  assert_int_equal(even_raft_store_append(&store, own.memory.store.entries, 1), EVEN_OK);
  assert_int_equal(even_raft_store_append(&store, &change, 1), EVEN_OK);
  raft_free(bytes.base);
  close_follower(&own);
  prepare(&own, &store, BEFORE, "2");
  assert_int_equal(raft_start(&own.raft), 0);
  assert_int_equal(own.raft.configuration.n, 2);
  assert_int_equal(even_raft_rules_members(&own.raft, &own.memory.store), 0);
  assert_int_equal(own.raft.configuration.n, 2);
  assert_int_equal(own.raft.configuration.servers[1].role, RAFT_STANDBY);
  assert_int_equal(own.raft.configuration_index, 1);
  assert_int_equal(own.raft.configuration_uncommitted_index, 2);
  hear(&own, AFTER, 3, 1, 1, 1, 1);
  assert_int_equal(own.raft.configuration.n, 3);
  assert_string_equal(own.raft.configuration.servers[2].address, "3");
  assert_int_equal(own.raft.configuration_index, 1);
  assert_int_equal(own.raft.configuration_uncommitted_index, 0);
  close_follower(&own);
}

/* It has given the log to one, and has stepped down; another one is elected first, and that one asks late. */
static void one_to_whom_the_log_was_given_gets_no_second_vote(void **state) {
  struct raft_transfer given = {.id = AFTER};
  follower own;
  (void)state;
  open_follower(&own);
  own.raft.transfer = &given;
  assert_true(grants(&own, BEFORE, 2, false));
  assert_false(grants(&own, AFTER, 2, true));
  assert_int_equal(own.voted.term, 2);
  assert_ptr_equal(own.raft.transfer, &given);
  assert_int_equal(own.memory.store.vote, BEFORE);
  assert_true(grants(&own, AFTER, 3, true));
  close_follower(&own);
}

/* One whose log does not say yet that it votes, and to which a leader has spoken, a moment ago or long ago. */
static void while_a_vote_is_asked_for_it_is_a_voter_that_gives_the_log_to_nobody(void **state) {
  struct raft_transfer given = {.id = AFTER};
  follower own;
  (void)state;
  open_follower(&own);
  own.raft.configuration.servers[0].role = RAFT_STANDBY;
  own.raft.transfer = &given;
  for (int late = 0; late < 2; late++) {
    own.raft.follower_state.current_leader.id = BEFORE;
    own.raft.election_timer_start = late ? 0 : own.memory.io.time(&own.memory.io) + 3600000;
    own.raft.election_timeout = 0;
    const even_raft_rules_vote before = even_raft_rules_vote_begin(&own.raft);
    assert_int_equal(own.raft.configuration.servers[0].role, RAFT_VOTER);
    assert_null(own.raft.transfer);
    assert_int_equal(own.raft.follower_state.current_leader.id, late ? 0 : BEFORE);
    even_raft_rules_vote_end(&own.raft, &before);
    assert_int_equal(own.raft.configuration.servers[0].role, RAFT_STANDBY);
    assert_ptr_equal(own.raft.transfer, &given);
  }
  own.raft.transfer = NULL;
  close_follower(&own);
}

static void who_asks_before_an_election_hears_of_the_newer_term(void **state) {
  struct raft_request_vote_result refused = {.term = 3, .pre_vote = raft_tribool_true};
  struct raft_request_vote_result newer = {.term = 9, .pre_vote = raft_tribool_true};
  struct raft_request_vote_result granted = {.term = 3, .pre_vote = raft_tribool_true, .vote_granted = true};
  struct raft_request_vote_result vote = {.term = 3, .pre_vote = raft_tribool_false};
  (void)state;
  even_raft_rules_refuse(&refused, 7);
  even_raft_rules_refuse(&newer, 7);
  even_raft_rules_refuse(&granted, 7);
  even_raft_rules_refuse(&vote, 7);
  assert_int_equal(refused.term, 7);
  assert_int_equal(newer.term, 9);
  assert_int_equal(granted.term, 3);
  assert_int_equal(vote.term, 3);
}

static void only_what_is_taken_ends_with_the_message(void **state) {
  struct raft_append_entries_result taken = {.rejected = 0, .last_log_index = 9};
  struct raft_append_entries_result refused = {.rejected = 5, .last_log_index = 9};
  (void)state;
  even_raft_rules_answer(&taken, 3);
  even_raft_rules_answer(&refused, 3);
  assert_int_equal(taken.last_log_index, 3);
  assert_int_equal(refused.last_log_index, 9);
}

static void members_change_only_of_one_that_follows(void **state) {
  follower own;
  (void)state;
  open_follower(&own);
  const struct raft_server *servers = own.raft.configuration.servers;
  own.raft.state = RAFT_LEADER;
  assert_int_equal(even_raft_rules_members(&own.raft, &own.memory.store), RAFT_BUSY);
  own.raft.state = RAFT_CANDIDATE;
  assert_int_equal(even_raft_rules_members(&own.raft, &own.memory.store), RAFT_BUSY);
  assert_ptr_equal(own.raft.configuration.servers, servers);
  own.raft.state = RAFT_FOLLOWER;
  assert_int_equal(even_raft_rules_members(&own.raft, &own.memory.store), 0);
  close_follower(&own);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(what_only_a_leader_before_has_sent_is_not_answered_for),
      cmocka_unit_test(what_lies_behind_a_message_is_not_committed_by_it),
      cmocka_unit_test(what_is_refused_says_how_long_the_log_is),
      cmocka_unit_test(members_that_are_undone_count_no_more),
      cmocka_unit_test(one_to_whom_the_log_was_given_gets_no_second_vote),
      cmocka_unit_test(while_a_vote_is_asked_for_it_is_a_voter_that_gives_the_log_to_nobody),
      cmocka_unit_test(who_asks_before_an_election_hears_of_the_newer_term),
      cmocka_unit_test(only_what_is_taken_ends_with_the_message),
      cmocka_unit_test(members_change_only_of_one_that_follows),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
