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

/* Both are connected, and what the first one reads next is that nothing came back from the other. */
static int cut(void **state) {
  char address[EVEN_VOTER_ADDRESS];
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  assert_int_equal(even_loop_open(&loop), EVEN_OK);
  begin(&one, 2, 0);
  begin(&other, 5, 0);
  write_address(&one, address);
  write_address(&other, one.knows);
  even_voter_links_call(&other.links, 2, address);
  await_met();
  assert_null(even_voter_links_missing(&one.links));
  fault_os(FAULT_read, 1, ETIMEDOUT);
  even_voter_links_tell(&other.links);
  while (even_voter_links_missing(&one.links) == NULL || even_voter_links_find(&other.links, 2) != NULL) {
    assert_true(even_clock_ns() < until);
    turn();
  }
  fault_reset();
  assert_null(even_voter_links_missing(&other.links)); /* for that one it was a connection that was closed */
  one.knows[0] = '\0';                                 /* its agent has left it out meanwhile */
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

int main(void) {
  struct sigaction before;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(one_that_is_there_again_is_found, cut, finish),
      cmocka_unit_test_setup_teardown(one_whose_network_is_still_cut_is_missed, cut, finish),
      cmocka_unit_test_setup_teardown(one_whose_process_has_ended_is_missed_no_more, cut, finish),
      cmocka_unit_test_setup_teardown(one_that_is_refused_at_once_is_missed_no_more, cut, finish),
      cmocka_unit_test_setup_teardown(one_whose_host_answers_later_is_missed_no_more, cut, finish),
      cmocka_unit_test_setup_teardown(one_in_whose_place_another_one_is_is_missed_no_more, cut, finish),
  };
  if (even_signals_pipe_ignore(&before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
