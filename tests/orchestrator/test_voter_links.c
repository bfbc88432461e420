/* A member whose connection broke without a word (its network was cut): called until it answers, or until it is known
 * to have ended. Members of this process, over loopback. */
#include "orchestrator/voter_links.h"

#include "os/clock.h"
#include "os/listener.h"
#include "os/signals.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { TURN_MS = 10 };

/* Far beyond what any of it takes: a machine may be slow. */
static const uint64_t LIMIT_NS = 120000000000u;
static const unsigned char KEY[EVEN_TLS_KEY_BYTES] = "a key that all of them have....";

typedef struct member {
  even_voter_links links;
  int port;
  char knows[EVEN_VOTER_ADDRESS]; /* where its agent says that the other one listens; "": it says nothing of it */
} member;

static even_loop loop;
static member one; /* the lower number, so that it is the other one that calls */
static member other;

static uint64_t term(void *context) {
  (void)context;
  return 7;
}

static void word(void *context, const even_voter_word *said) {
  (void)context;
  (void)said;
}

static even_status raft(void *context, uint64_t from, const unsigned char *bytes, size_t count) {
  (void)context;
  (void)from;
  (void)bytes;
  (void)count;
  return EVEN_OK;
}

static void where(void *context, uint64_t id, char address[EVEN_VOTER_ADDRESS]) {
  const member *of = context;
  if (id != of->links.own.id && of->knows[0] != '\0') {
    memcpy(address, of->knows, EVEN_VOTER_ADDRESS);
  }
}

static void begin(member *of, uint64_t id, int port) {
  *of = (member){.port = port};
  of->links = (even_voter_links){.loop = &loop,
                                 .listener = -1,
                                 .own = {.id = id},
                                 .context = of,
                                 .term = term,
                                 .word = word,
                                 .raft = raft,
                                 .where = where};
  memcpy(of->links.key, KEY, sizeof of->links.key);
  assert_int_equal(even_listener_open("127.0.0.1", &of->port, &of->links.listener), EVEN_OK);
  assert_int_equal(even_voter_links_open(&of->links), EVEN_OK);
}

static void turn(void) {
  assert_int_equal(even_loop_turn(&loop, TURN_MS), EVEN_OK);
  uint64_t now = even_clock_ns();
  even_voter_links_tick(&one.links, now);
  even_voter_links_tick(&other.links, now);
}

static void write_address(const member *of, char address[EVEN_VOTER_ADDRESS]) {
  (void)snprintf(address, EVEN_VOTER_ADDRESS, "127.0.0.1:%d", of->port);
}

static void await_met(void) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  while (even_voter_links_find(&one.links, other.links.own.id) == NULL ||
         even_voter_links_find(&other.links, one.links.own.id) == NULL) {
    assert_true(even_clock_ns() < until);
    turn();
  }
}

static int apart(void **state) {
  (void)state;
  assert_int_equal(even_loop_open(&loop), EVEN_OK);
  begin(&one, 2, 0);
  begin(&other, 5, 0);
  return 0;
}

static void call(member *by, const member *whom) {
  char address[EVEN_VOTER_ADDRESS];
  write_address(whom, address);
  even_voter_links_call(&by->links, whom->links.own.id, address);
}

static int met(void **state) {
  (void)apart(state);
  call(&other, &one);
  await_met();
  return 0;
}

/* Both are connected, and what the first one reads next is that nothing came back from the other. */
static int cut(void **state) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)met(state);
  write_address(&other, one.knows);
  assert_null(even_voter_links_missing(&one.links));
  fault_os(FAULT_read, 1, ETIMEDOUT);
  even_voter_links_tell(&other.links);
  while (even_voter_links_missing(&one.links) == NULL || even_voter_links_find(&other.links, 2) != NULL) {
    assert_true(even_clock_ns() < until);
    turn();
  }
  fault_reset();
  assert_true(even_voter_links_missing(&other.links)->closed); /* for that one it was a connection that was closed */
  assert_false(even_voter_links_missing(&one.links)->closed);
  one.knows[0] = '\0'; /* its agent has left it out meanwhile */
  return 0;
}

static int finish(void **state) {
  (void)state;
  fault_reset();
  even_voter_links_close(&one.links);
  even_voter_links_close(&other.links);
  even_loop_close(&loop);
  return 0;
}

static void await_nobody_missing(void) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  while (even_voter_links_missing(&one.links) != NULL) {
    assert_true(even_clock_ns() < until);
    even_voter_links_call_missing(&one.links);
    turn();
  }
}

/* Whoever was left out knows no newer members that it could call, and none names it any more. */
static void one_that_is_there_again_is_found(void **state) {
  (void)state;
  even_voter_links_call_missing(&one.links);
  await_met();
  assert_null(even_voter_links_missing(&one.links));
}

/* The kernel has not heard from the other host yet, and takes nothing. */
static void call_in_progress(void) {
  fault_os(FAULT_connect, 1, EINPROGRESS);
  fault_os_from(FAULT_write, 1, EAGAIN);
  even_voter_links_call_missing(&one.links);
}

static void one_whose_network_is_still_cut_is_missed(void **state) {
  char address[EVEN_VOTER_ADDRESS];
  const even_voter_missing *missing = even_voter_links_missing(&one.links);
  (void)state;
  assert_int_equal(missing->id, 5);
  write_address(&other, address);
  assert_string_equal(missing->address, address);
  fault_os(FAULT_connect, 1, ENETUNREACH);
  even_voter_links_call_missing(&one.links);
  assert_ptr_equal(even_voter_links_missing(&one.links), missing);
  call_in_progress(); /* until the kernel gives it up */
  fault_os(FAULT_read, 1, EHOSTUNREACH);
  for (uint64_t until = even_clock_ns() + LIMIT_NS; one.links.open != NULL; turn()) {
    assert_true(even_clock_ns() < until);
  }
  assert_ptr_equal(even_voter_links_missing(&one.links), missing);
}

/* Its host says so. */
static void one_whose_process_has_ended_is_missed_no_more(void **state) {
  (void)state;
  even_voter_links_close(&other.links);
  await_nobody_missing();
}

/* The same where the kernel knows at once. */
static void one_that_is_refused_at_once_is_missed_no_more(void **state) {
  (void)state;
  fault_os(FAULT_connect, 1, ECONNREFUSED);
  even_voter_links_call_missing(&one.links);
  assert_null(even_voter_links_missing(&one.links));
}

/* The same by a host elsewhere, whose answer takes its time. */
static void one_whose_host_answers_later_is_missed_no_more(void **state) {
  (void)state;
  call_in_progress();
  assert_non_null(even_voter_links_missing(&one.links));
  fault_os(FAULT_read, 1, ECONNREFUSED);
  for (uint64_t until = even_clock_ns() + LIMIT_NS; even_voter_links_missing(&one.links) != NULL; turn()) {
    assert_true(even_clock_ns() < until);
  }
}

/* Its successor on that host has its port. */
static void one_in_whose_place_another_one_is_is_missed_no_more(void **state) {
  (void)state;
  even_voter_links_close(&other.links);
  begin(&other, 2000001, other.port);
  await_nobody_missing();
}

static size_t count_open(const member *of) {
  size_t count = 0;
  for (const even_voter_link *link = of->links.open; link != NULL; link = link->next) {
    count++;
  }
  return count;
}

/* As where the network of two that miss each other comes back: both have called. Each closing the connection that the
 * other keeps, they would have none, and miss nobody. */
static void of_two_that_call_each_other_both_keep_the_same_connection(void **state) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  call(&one, &other);
  call(&other, &one);
  do {
    assert_true(even_clock_ns() < until);
    turn();
    assert_non_null(one.links.open);
    assert_non_null(other.links.open);
  } while (count_open(&one) > 1 || count_open(&other) > 1 || even_voter_links_find(&one.links, 5) == NULL ||
           even_voter_links_find(&other.links, 2) == NULL);
  assert_true(other.links.open->called); /* the higher number's */
  assert_false(one.links.open->called);
  assert_null(even_voter_links_missing(&one.links));
  assert_null(even_voter_links_missing(&other.links));
}

/* The other one gave it up for its silence, and has called again. */
static void a_connection_that_is_long_silent_is_left_for_a_newer_one(void **state) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  even_voter_link *older = even_voter_links_find(&other.links, 2); /* it would outrank one of the first's */
  even_voter_link *lost = even_voter_links_find(&one.links, 5);
  lost->id = 77; /* given up there, which never came to be known here */
  call(&one, &other);
  while (other.links.open == older || count_open(&other) > 1) {
    assert_true(even_clock_ns() < until);
    lost->link.beat_ns = even_clock_ns(); /* no sign of life on it */
    older->link.heard_ns = even_clock_ns() - 5 * even_link_beat_ns();
    turn();
  }
  assert_false(other.links.open->called);
}

/* Until the other end closes one of two, either may break. */
static void one_that_is_connected_otherwise_is_not_missed(void **state) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  even_voter_link *older = other.links.open;
  one.links.open->id = 77; /* that end does not close it */
  call(&one, &other);
  while (other.links.open == older || !other.links.open->told) {
    assert_true(even_clock_ns() < until);
    turn();
  }
  assert_false(older->over); /* it outranks the other one */
  other.links.open->link.failed = true;
  other.links.open->link.why.system_error = ETIMEDOUT;
  turn();
  assert_ptr_equal(even_voter_links_find(&other.links, 2), older);
  assert_null(even_voter_links_missing(&other.links));
}

static uint64_t deserted(void) {
  const uint64_t all[] = {5, 2, 5};
  return even_voter_links_deserted(&one.links, all, sizeof all / sizeof all[0]);
}

/* That holds until it is not said any more, and for one with which nobody is connected. */
static void that_the_hosts_of_all_others_refuse_is_known(void **state) {
  const uint64_t own = 2;
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  write_address(&other, one.knows);
  assert_true(deserted() == 0);
  even_voter_links_close(&other.links);
  while (deserted() == 0) {
    assert_true(even_clock_ns() < until);
    call(&one, &other);
    turn();
  }
  assert_true(deserted() >= one.links.alone_ns);
  assert_true(even_voter_links_deserted(&one.links, &own, 1) == 0); /* there are no others */
  one.links.own.id = 7;
  assert_true(deserted() == 0); /* of 2 nothing was said */
  one.links.own.id = 2;
  fault_os(FAULT_connect, 1, ENETUNREACH);
  call(&one, &other);
  assert_true(deserted() == 0);
  call(&one, &other);
  while (deserted() == 0) {
    assert_true(even_clock_ns() < until);
    turn();
  }
  begin(&other, 5, other.port);
  call(&one, &other);
  await_met();
  one.links.alone_ns = 1;
  assert_true(deserted() == 0); /* it was reached */
  turn();
  one.links.refusals[7] = (even_voter_refusal){.id = 5, .since_ns = 1};
  assert_true(deserted() == 0); /* whatever was said: it is connected */
}

/* It lives, and has given up that connection alone: nobody else names it, so it is called. */
static void one_that_has_closed_its_connection_is_called(void **state) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  write_address(&other, one.knows);
  other.links.open->over = true;
  while (even_voter_links_missing(&one.links) == NULL) {
    assert_true(even_clock_ns() < until);
    turn();
  }
  assert_true(even_voter_links_missing(&one.links)->closed);
  assert_true(one.links.closed); /* at once */
  even_voter_links_call_missing(&one.links);
  await_met();
  assert_null(even_voter_links_missing(&one.links));
}

/* Its host has gone with it: nobody answers. */
static void one_that_closed_and_does_not_answer_is_missed_for_seconds_alone(void **state) {
  (void)state;
  assert_true(even_voter_links_missing(&other.links)->closed);
  even_voter_links_tick(&other.links, even_clock_ns() + 4000000000u);
  assert_null(even_voter_links_missing(&other.links));
  even_voter_links_tick(&one.links, even_clock_ns() + 4000000000u);
  assert_non_null(even_voter_links_missing(&one.links));
}

/* Many end with the job, and of few more than one is remembered. */
static void one_that_has_closed_takes_no_place_of_one_that_is_cut_off(void **state) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  for (size_t i = 0; i < EVEN_VOTER_MISSING; i++) {
    one.links.missing[i] = (even_voter_missing){.id = 100 + i, .since_ns = 1 + i};
  }
  other.links.open->over = true;
  while (one.links.open != NULL) {
    assert_true(even_clock_ns() < until);
    turn();
  }
  for (size_t i = 0; i < EVEN_VOTER_MISSING; i++) {
    assert_int_equal(one.links.missing[i].id, 100 + i);
  }
  one.links.missing[3] = (even_voter_missing){.id = 900, .since_ns = even_clock_ns(), .closed = true};
  assert_int_equal(even_voter_links_missing(&one.links)->id, 107); /* the latest of the others */
}

/* It has the key, so that it is a member; the network was cut before it could say which. */
static void one_that_was_called_and_says_no_word_is_missed(void **state) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  call(&one, &other);
  while (!one.links.open->link.was_ready) {
    assert_true(even_clock_ns() < until);
    turn();
  }
  assert_false(one.links.open->told);
  even_voter_links_tick(&one.links, even_clock_ns() + 4000000000u);
  assert_int_equal(even_voter_links_missing(&one.links)->id, 5);
  assert_false(even_voter_links_missing(&one.links)->closed);
}

/* Its process is gone, and another one keeps its listener, at which the next one is to be. */
static void one_whose_listener_is_kept_is_awaited(void **state) {
  enum { CALL_NS = 1000000 };
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  even_loop_remove(&loop, &one.links.watch); /* nobody accepts */
  assert_false(even_voter_links_awaits(&other.links, 2, even_clock_ns(), CALL_NS));
  call(&other, &one);
  while (!even_voter_links_awaits(&other.links, 2, even_clock_ns(), CALL_NS)) {
    assert_true(even_clock_ns() < until);
    turn();
  }
  assert_false(even_voter_links_awaits(&other.links, 3, even_clock_ns(), CALL_NS));
  assert_int_equal(even_voter_links_open(&one.links), EVEN_OK); /* the next one */
  await_met();
  while (even_voter_links_awaits(&other.links, 2, even_clock_ns(), CALL_NS)) { /* it is there */
    assert_true(even_clock_ns() < until);
    turn();
  }
}

static void await_delivered(void) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  while (!even_voter_links_delivered(&one.links)) {
    assert_true(even_clock_ns() < until);
    turn();
  }
}

/* One that is cut off is known to be only after seconds: until then its host does not say that it got this. */
static void what_was_told_is_delivered_once_the_other_host_has_it(void **state) {
  (void)state;
  await_delivered();
  fault_os_from(FAULT_write, 1, EAGAIN); /* nothing goes out */
  even_voter_links_tell(&one.links);
  assert_false(even_voter_links_delivered(&one.links));
  one.links.open->over = true; /* it is none any more */
  assert_true(even_voter_links_delivered(&one.links));
  one.links.open->over = false;
  fault_reset();
  await_delivered();
}

/* The second connection of two, of which only the called one's end is to speak. */
static void call_beside(even_voter_link *older) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  older->id = 77;
  call(&one, &other);
  while (one.links.open == older || !one.links.open->link.was_ready) {
    assert_true(even_clock_ns() < until);
    turn();
  }
  older->id = 5;
  assert_false(one.links.open->told);
}

static void one_that_is_connected_otherwise_need_say_no_word(void **state) {
  (void)state;
  even_voter_link *older = one.links.open;
  call_beside(older);
  one.links.open->link.failed = true;
  one.links.open->link.why.system_error = ETIMEDOUT;
  turn();
  assert_ptr_equal(one.links.open, older);
  assert_null(even_voter_links_missing(&one.links));
  call_beside(older);
  even_voter_links_tick(&one.links, even_clock_ns() + 4000000000u);
  assert_ptr_equal(one.links.open, older);
  assert_null(even_voter_links_missing(&one.links));
}

/* Nor has it closed anything: it may go on, and wait for a majority. */
static void one_that_stands_still_has_not_ended(void **state) {
  (void)state;
  one.links.open->link.failed = true;
  one.links.open->link.why = (even_error){.status = EVEN_ERR_TIMEOUT, .rank = -1};
  even_voter_links_tick(&one.links, even_clock_ns());
  assert_int_equal(even_voter_links_missing(&one.links)->id, 5);
  assert_false(even_voter_links_missing(&one.links)->closed);
}

/* Its host may be one that refuses no call: the end of a job must not wait for that. */
static void one_that_has_the_word_of_the_end_is_not_missed(void **state) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  one.links.own.newest = (even_leadership){.generation = 2, .leader = EVEN_LEADERSHIP_NOBODY};
  await_delivered();
  other.links.open->over = true;
  while (one.links.open != NULL) {
    assert_true(even_clock_ns() < until);
    turn();
  }
  assert_null(even_voter_links_missing(&one.links));
}

/* Else one that calls all others of a large job could not be called. */
static void only_those_that_call_are_strangers(void **state) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  call(&one, &other);
  while (other.links.open == NULL) {
    assert_true(even_clock_ns() < until);
    turn();
  }
  assert_false(one.links.open->told);
  assert_int_equal(one.links.unknown, 0);
  assert_int_equal(other.links.unknown, 1);
}

static uint64_t refuse(void) {
  const uint64_t id = 5;
  fault_os(FAULT_connect, 1, ECONNREFUSED);
  call(&one, &other);
  return even_voter_links_deserted(&one.links, &id, 1);
}

static void who_is_no_member_any_more_leaves_its_place_among_those_that_were_refused(void **state) {
  (void)state;
  turn();
  for (size_t i = 0; i < EVEN_VOTER_REFUSALS; i++) {
    one.links.refusals[i] = (even_voter_refusal){.id = 100 + i, .since_ns = 1};
  }
  write_address(&other, one.knows); /* it knows where all of them listen */
  assert_true(refuse() == 0);
  one.knows[0] = '\0';
  assert_true(refuse() != 0);
}

int main(void) {
  struct sigaction before;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(one_that_is_there_again_is_found, cut, finish),
      cmocka_unit_test_setup_teardown(one_whose_network_is_still_cut_is_missed, cut, finish),
      cmocka_unit_test_setup_teardown(one_whose_process_has_ended_is_missed_no_more, cut, finish),
      cmocka_unit_test_setup_teardown(one_that_is_refused_at_once_is_missed_no_more, cut, finish),
      cmocka_unit_test_setup_teardown(one_whose_host_answers_later_is_missed_no_more, cut, finish),
      cmocka_unit_test_setup_teardown(one_in_whose_place_another_one_is_is_missed_no_more, cut, finish),
      cmocka_unit_test_setup_teardown(of_two_that_call_each_other_both_keep_the_same_connection, apart, finish),
      cmocka_unit_test_setup_teardown(a_connection_that_is_long_silent_is_left_for_a_newer_one, met, finish),
      cmocka_unit_test_setup_teardown(one_that_is_connected_otherwise_is_not_missed, met, finish),
      cmocka_unit_test_setup_teardown(that_the_hosts_of_all_others_refuse_is_known, met, finish),
      cmocka_unit_test_setup_teardown(one_that_has_closed_its_connection_is_called, met, finish),
      cmocka_unit_test_setup_teardown(one_that_closed_and_does_not_answer_is_missed_for_seconds_alone, cut, finish),
      cmocka_unit_test_setup_teardown(one_that_has_closed_takes_no_place_of_one_that_is_cut_off, met, finish),
      cmocka_unit_test_setup_teardown(one_that_was_called_and_says_no_word_is_missed, apart, finish),
      cmocka_unit_test_setup_teardown(one_whose_listener_is_kept_is_awaited, apart, finish),
      cmocka_unit_test_setup_teardown(what_was_told_is_delivered_once_the_other_host_has_it, met, finish),
      cmocka_unit_test_setup_teardown(one_that_is_connected_otherwise_need_say_no_word, met, finish),
      cmocka_unit_test_setup_teardown(one_that_stands_still_has_not_ended, met, finish),
      cmocka_unit_test_setup_teardown(one_that_has_the_word_of_the_end_is_not_missed, met, finish),
      cmocka_unit_test_setup_teardown(only_those_that_call_are_strangers, apart, finish),
      cmocka_unit_test_setup_teardown(who_is_no_member_any_more_leaves_its_place_among_those_that_were_refused, apart,
                                      finish),
  };
  if (even_signals_pipe_ignore(&before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
