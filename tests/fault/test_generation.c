/* Membership in shared memory: what the agent writes and what ranks see. */
#include "base/fail.h"
#include "fault/generation.h"
#include "os/shared_memory.h"
#include "os/thread.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define LONG_NS 120000000000u

typedef struct two_views {
  int fd;
  even_generation *agent, *rank;
} two_views;

static two_views open_views(int ranks) {
  two_views views = {.fd = -1};
  assert_int_equal(even_generation_create(ranks, &views.fd), EVEN_OK);
  assert_int_equal(even_generation_open(views.fd, &views.agent), EVEN_OK);
  assert_int_equal(even_generation_open(views.fd, &views.rank), EVEN_OK);
  return views;
}

static void close_views(two_views *views) {
  even_shared_memory memory;
  even_generation_close(views->agent);
  even_generation_close(views->rank);
  assert_int_equal(even_shared_memory_adopt(views->fd, &memory), EVEN_OK);
  even_shared_memory_close(&memory);
}

static void members_follow_from_the_losses(void **state) {
  two_views views = open_views(4);
  const bool first[4] = {false, true, false, false};
  const bool second[4] = {true, true, false, false};
  (void)state;
  assert_int_equal(even_generation_ranks(views.rank), 4);
  assert_int_equal(even_generation_number(views.rank), 0);
  assert_int_equal(even_generation_lose(views.agent, first), 1);
  assert_int_equal(even_generation_lose(views.agent, second), 2);
  const bool expected[3][4] = {{true, true, true, true},
                               {true, false, true, true},
                               {false, false, true, true}}; /* earlier ones stay as they were */
  for (uint32_t number = 0; number < 3; number++) {
    for (int rank = 0; rank < 4; rank++) {
      assert_int_equal(even_generation_has(views.rank, rank, number), expected[number][rank]);
    }
  }
  assert_false(even_generation_has(views.rank, 4, 0));
  assert_false(even_generation_has(views.rank, -1, 0));
  even_generation_begin(views.agent, NULL); /* another attempt */
  assert_int_equal(even_generation_number(views.rank), 0);
  assert_true(even_generation_has(views.rank, 1, 0));
  close_views(&views);
}

static void all_must_be_able(void **state) {
  two_views views = open_views(3);
  const bool lost[3] = {false, true, false};
  char why[EVEN_GENERATION_WORDS];
  char long_words[EVEN_GENERATION_WORDS + 50];
  int rank = -1;
  (void)state;
  even_generation_say(views.rank, 0, "");
  assert_false(even_generation_able(views.agent, lost, &rank, why));
  assert_int_equal(rank, 2);
  assert_string_equal(why, "it is not training yet, and in no call of Evenstep's that could be made again");
  even_generation_say(views.rank, 2, "its data set is a stream");
  assert_false(even_generation_able(views.agent, lost, &rank, why));
  assert_string_equal(why, "its data set is a stream");
  even_generation_say(views.rank, 2, "");
  assert_true(even_generation_able(views.agent, lost, &rank, why)); /* whatever the lost one had said */
  memset(long_words, 'x', sizeof long_words - 1);
  long_words[sizeof long_words - 1] = '\0';
  even_generation_say(views.rank, 0, long_words);
  assert_false(even_generation_able(views.agent, lost, &rank, why));
  assert_int_equal(strlen(why), EVEN_GENERATION_WORDS - 1);
  close_views(&views);
}

/* Before es.prepare: whoever waits in a call of all can do without others that do, and without nobody else. */
static void who_waits_early_goes_on_without_who_does_so_too(void **state) {
  two_views views = open_views(4);
  const bool nobody[4] = {false, false, false, false};
  const bool third[4] = {false, false, true, false};
  const bool two[4] = {false, true, true, false};
  const bool first[4] = {true, false, false, false};
  char why[EVEN_GENERATION_WORDS];
  int rank = -1;
  (void)state;
  even_generation_say_early(views.rank, 0, 1);
  even_generation_say_early(views.rank, 1, 1);
  even_generation_say_early(views.rank, 3, 1);
  assert_false(even_generation_able(views.agent, third, &rank, why)); /* the others may wait for what it does */
  assert_int_equal(rank, 2);
  assert_non_null(strstr(why, "script's own code"));
  even_generation_say_early(views.rank, 2, 1);
  assert_true(even_generation_able(views.agent, third, &rank, why));
  assert_true(even_generation_able(views.agent, nobody, &rank, why));
  assert_false(even_generation_able(views.agent, first, &rank, why)); /* the main one */
  assert_int_equal(rank, 0);
  assert_non_null(strstr(why, "the values that all begin with"));
  even_generation_say(views.rank, 2, ""); /* it has come to es.prepare */
  assert_true(even_generation_able(views.agent, third, &rank, why));
  even_generation_say_early(views.rank, 0, 0); /* it has come out of the call */
  assert_false(even_generation_able(views.agent, third, &rank, why));
  assert_int_equal(rank, 0);
  even_generation_say(views.rank, 0, "");
  even_generation_say(views.rank, 1, "");
  even_generation_say(views.rank, 3, "");
  even_generation_say_early(views.rank, 2, 0);
  assert_true(even_generation_able(views.agent, third, &rank, why)); /* nobody waits early */
  even_generation_say_early(views.rank, 0, 1);
  even_generation_say_early(views.rank, 1, 1);
  even_generation_say_early(views.rank, 2, 1);
  assert_int_equal(even_generation_lose(views.agent, third), 1);
  even_generation_vacate(views.agent, 2); /* one that was lost before is no member: whatever it says */
  assert_true(even_generation_able(views.agent, two, &rank, why));
  close_views(&views);
}

/* A rank in the call before, or on its way out of it, has not done what the script does between the two. */
static void who_waits_early_does_not_go_on_without_who_is_in_an_earlier_call(void **state) {
  two_views views = open_views(3);
  const bool second[3] = {false, true, false};
  char why[EVEN_GENERATION_WORDS];
  int rank = -1;
  (void)state;
  even_generation_say_early(views.rank, 0, 1);
  even_generation_say_early(views.rank, 1, 1);
  even_generation_say_early(views.rank, 2, 1);
  assert_true(even_generation_able(views.agent, second, &rank, why));
  even_generation_say_early(views.rank, 2, 2); /* one of the others is enough */
  assert_false(even_generation_able(views.agent, second, &rank, why));
  assert_int_equal(rank, 1);
  assert_non_null(strstr(why, "script's own code"));
  even_generation_say_early(views.rank, 1, 2);
  assert_true(even_generation_able(views.agent, second, &rank, why));
  even_generation_say_early(views.rank, 1, 3); /* it was further than all others: it has done all that they wait for */
  assert_true(even_generation_able(views.agent, second, &rank, why));
  even_generation_say(views.rank, 1, "");
  assert_true(even_generation_able(views.agent, second, &rank, why));
  even_generation_vacate(views.agent, 1); /* another process has made no call */
  assert_false(even_generation_able(views.agent, second, &rank, why));
  close_views(&views);
}

typedef struct waiter {
  even_generation *generation;
  uint32_t number, port;
  char address[EVEN_GENERATION_ADDRESS];
} waiter;

static void *wait_for_both(void *argument) {
  waiter *own = argument;
  own->number = even_generation_wait(own->generation, 0, LONG_NS);
  own->port = even_generation_port(own->generation, own->number, LONG_NS, own->address);
  return NULL;
}

static void who_waits_is_woken(void **state) {
  two_views views = open_views(2);
  const bool lost[2] = {true, false};
  waiter other = {.generation = views.rank};
  pthread_t thread;
  (void)state;
  assert_int_equal(even_thread_start(wait_for_both, &other, &thread), EVEN_OK);
  assert_int_equal(even_generation_lose(views.agent, lost), 1);
  even_generation_meet(views.agent, 1, 4711);
  even_thread_join(thread);
  assert_int_equal(other.number, 1);
  assert_int_equal(other.port, 4711);
  assert_string_equal(other.address, ""); /* of this host */
  close_views(&views);
}

static void waiting_ends(void **state) {
  two_views views = open_views(2);
  const bool lost[2] = {true, false};
  char address[EVEN_GENERATION_ADDRESS];
  (void)state;
  assert_int_equal(even_generation_wait(views.rank, 0, 1000), 0); /* time is up */
  assert_int_equal(even_generation_port(views.rank, 0, 1000, address), 0);
  assert_int_equal(even_generation_lose(views.agent, lost), 1);
  assert_int_equal(even_generation_port(views.rank, 0, LONG_NS, address), 0); /* that generation is over */
  assert_false(even_generation_refused(views.rank));
  even_generation_refuse(views.agent);
  assert_true(even_generation_refused(views.rank));
  assert_int_equal(even_generation_wait(views.rank, 1, LONG_NS), 1);
  assert_int_equal(even_generation_port(views.rank, 1, LONG_NS, address), 0);
  close_views(&views);
}

static void who_offers_itself_joins_those_that_stand(void **state) {
  two_views views = open_views(3);
  const bool began[3] = {true, true, false};
  const bool lost[3] = {false, true, false};
  const bool joins[3] = {false, false, true};
  uint32_t process = 0;
  int fd = -1;
  (void)state;
  even_generation_begin(views.agent, began);
  even_generation_started(views.agent, 0, 100);
  even_generation_started(views.agent, 2, 102);
  assert_false(even_generation_has(views.rank, 2, 0));
  assert_int_equal(even_generation_lose(views.agent, lost), 1);
  assert_false(even_generation_offers(views.agent, 2));
  even_generation_offer(views.rank, 2);
  assert_true(even_generation_offers(views.agent, 2));
  even_generation_ask(views.agent, EVEN_WISH_STAND);
  assert_int_equal(even_generation_wished(views.rank), EVEN_WISH_STAND);
  even_generation_stand(views.rank, 0, 0); /* of a generation that is over */
  assert_false(even_generation_stands(views.agent, 0));
  even_generation_stand(views.rank, 0, 1);
  assert_true(even_generation_stands(views.agent, 0));
  assert_int_equal(even_generation_grow(views.agent, joins), 2);
  assert_int_equal(even_generation_wished(views.rank), EVEN_WISH_NOTHING);
  assert_false(even_generation_stands(views.agent, 0));
  assert_false(even_generation_offers(views.agent, 2)); /* it is a member now */
  const bool expected[3][3] = {{true, true, false}, {true, false, false}, {true, false, true}};
  for (uint32_t number = 0; number < 3; number++) {
    for (int rank = 0; rank < 3; rank++) {
      assert_int_equal(even_generation_has(views.rank, rank, number), expected[number][rank]);
    }
  }
  assert_false(even_generation_given(views.rank, 2, &process, &fd));
  even_generation_give(views.rank, 0, 1, 7); /* to those of another one */
  assert_false(even_generation_given(views.rank, 2, &process, &fd));
  even_generation_give(views.rank, 0, 2, 0);
  assert_true(even_generation_given(views.rank, 2, &process, &fd));
  assert_int_equal(process, 100);
  assert_int_equal(fd, 0);
  close_views(&views);
}

static void another_process_in_a_place_has_said_nothing(void **state) {
  two_views views = open_views(2);
  const bool nobody[2] = {false, false};
  const bool lost[2] = {false, true};
  char why[EVEN_GENERATION_WORDS];
  int rank = -1;
  (void)state;
  even_generation_started(views.agent, 1, 11);
  even_generation_say(views.rank, 0, "");
  even_generation_say(views.rank, 1, "");
  even_generation_offer(views.rank, 1);
  assert_true(even_generation_able(views.agent, nobody, &rank, why));
  assert_int_equal(even_generation_lose(views.agent, lost), 1);
  assert_true(even_generation_offers(views.agent, 1));
  even_generation_vacate(views.agent, 1);
  even_generation_started(views.agent, 1, 12);
  assert_int_equal(even_generation_process(views.rank, 1), 12);
  assert_false(even_generation_offers(views.agent, 1));
  assert_false(even_generation_able(views.agent, nobody, &rank, why));
  assert_int_equal(rank, 1);
  assert_int_equal(even_generation_process(views.rank, 2), 0); /* there is none */
  close_views(&views);
}

static void ranks_hear_that_others_may_join(void **state) {
  two_views views = open_views(2);
  (void)state;
  assert_false(even_generation_takes_in(views.rank));
  even_generation_let_in(views.agent);
  even_generation_begin(views.agent, NULL);
  assert_true(even_generation_takes_in(views.rank));
  close_views(&views);
}

static void many_generations_are_told_apart(void **state) {
  two_views views = open_views(2);
  const bool lost[2] = {false, true};
  (void)state;
  for (uint32_t number = 1; number < 3 * EVEN_GENERATIONS_KEPT; number++) {
    bool in = number % 2 == 0;
    assert_int_equal(in ? even_generation_grow(views.agent, lost) : even_generation_lose(views.agent, lost), number);
    assert_int_equal(even_generation_has(views.rank, 1, number), in);
    assert_int_equal(even_generation_has(views.rank, 1, number - 1), !in);
    assert_true(even_generation_has(views.rank, 0, number));
  }
  close_views(&views);
}

/* The leader's memory, and that of another host, which follows it. */
static void members_of_another_host_follow(void **state) {
  two_views views = open_views(3);
  const bool none[3] = {false, false, false};
  const bool left[3] = {false, true, true};
  const bool last[3] = {false, false, true};
  (void)state;
  assert_false(even_generation_follow(views.agent, 2, left)); /* one was not heard of */
  assert_false(even_generation_follow(views.agent, 0, none)); /* what has begun stays */
  assert_int_equal(even_generation_number(views.rank), 0);
  assert_true(even_generation_follow(views.agent, 1, left));
  assert_true(even_generation_follow(views.agent, 2, last));
  assert_false(even_generation_follow(views.agent, 2, left));
  assert_int_equal(even_generation_number(views.rank), 2);
  for (int rank = 0; rank < 3; rank++) {
    assert_int_equal(even_generation_has(views.rank, rank, 1), left[rank]);
    assert_int_equal(even_generation_has(views.rank, rank, 2), last[rank]);
  }
  close_views(&views);
}

static void a_place_on_another_host_has_its_address(void **state) {
  two_views views = open_views(2);
  const bool lost[2] = {true, false};
  char address[EVEN_GENERATION_ADDRESS];
  char endless[2 * EVEN_GENERATION_ADDRESS];
  (void)state;
  assert_int_equal(even_generation_lose(views.agent, lost), 1);
  even_generation_place(views.agent, 1, 4711, "10.79.0.2");
  assert_int_equal(even_generation_port(views.rank, 1, 0, address), 4711);
  assert_string_equal(address, "10.79.0.2");
  assert_int_equal(even_generation_lose(views.agent, lost), 2);
  assert_int_equal(even_generation_port(views.rank, 2, 0, address), 0);
  assert_string_equal(address, "");
  even_generation_meet(views.rank, 2, 12);
  even_generation_place(views.agent, 1, 4711, "10.79.0.2"); /* too late */
  assert_int_equal(even_generation_port(views.rank, 2, 0, address), 12);
  assert_string_equal(address, "");
  memset(endless, 'x', sizeof endless - 1);
  endless[sizeof endless - 1] = '\0';
  even_generation_place(views.agent, 2, 13, endless);
  assert_int_equal(even_generation_port(views.rank, 2, 0, address), 13);
  assert_int_equal(strlen(address), EVEN_GENERATION_ADDRESS - 1);
  close_views(&views);
}

static void what_ranks_say_can_be_repeated_elsewhere(void **state) {
  two_views views = open_views(2);
  const bool nobody[2] = {false, false};
  even_generation_words words;
  char why[EVEN_GENERATION_WORDS];
  int rank = -1;
  int other_fd = -1;
  even_generation *other = NULL;
  (void)state;
  assert_int_equal(even_generation_create(2, &other_fd), EVEN_OK);
  assert_int_equal(even_generation_open(other_fd, &other), EVEN_OK);
  even_generation_hear(views.agent, 1, &words);
  assert_false(words.said);
  even_generation_say(views.rank, 0, "");
  even_generation_say(views.rank, 1, "it is a stream");
  even_generation_stand(views.rank, 1, 0);
  for (int each = 0; each < 2; each++) {
    even_generation_hear(views.agent, each, &words);
    assert_true(words.said);
    even_generation_repeat(other, each, &words);
  }
  assert_false(even_generation_able(other, nobody, &rank, why));
  assert_int_equal(rank, 1);
  assert_string_equal(why, "it is a stream");
  assert_true(even_generation_stands(other, 1));
  assert_false(even_generation_stands(other, 0));
  even_generation_say(views.rank, 1, "");
  even_generation_hear(views.agent, 1, &words);
  even_generation_repeat(other, 1, &words);
  assert_true(even_generation_able(other, nobody, &rank, why));
  even_generation_vacate(views.agent, 1); /* another process has said nothing */
  even_generation_offer(views.rank, 1);
  even_generation_hear(views.agent, 1, &words);
  assert_false(words.said);
  assert_true(words.offers);
  even_generation_repeat(other, 1, &words);
  assert_false(even_generation_able(other, nobody, &rank, why));
  assert_false(even_generation_stands(other, 1));
  even_generation_say_early(views.rank, 1, 7);
  even_generation_hear(views.agent, 1, &words);
  assert_true(words.early == 7 && !words.said);
  even_generation_repeat(other, 1, &words);
  even_generation_hear(other, 1, &words);
  assert_true(words.early == 7 && !words.said);
  even_generation_say_early(views.rank, 1, 0);
  even_generation_hear(views.agent, 1, &words);
  even_generation_repeat(other, 1, &words);
  even_generation_hear(other, 1, &words);
  assert_false(words.early != 0 || words.said);
  even_generation_hear(views.agent, 2, &words); /* there is none */
  assert_false(words.said || words.offers);
  even_generation_repeat(other, 2, &words);
  even_shared_memory memory;
  even_generation_close(other);
  assert_int_equal(even_shared_memory_adopt(other_fd, &memory), EVEN_OK);
  even_shared_memory_close(&memory);
  close_views(&views);
}

static void the_state_may_come_from_another_host(void **state) {
  two_views views = open_views(3);
  const bool joins[3] = {false, false, true};
  char why[EVEN_GENERATION_WORDS];
  uint32_t process = 0;
  int fd = -1;
  (void)state;
  even_generation_started(views.agent, 0, 100);
  even_generation_ask_away(views.agent, 0, 1);
  assert_false(even_generation_gives_away(views.rank, 0, 0));
  assert_int_equal(even_generation_grow(views.agent, joins), 1);
  assert_true(even_generation_gives_away(views.rank, 0, 1));
  assert_false(even_generation_gives_away(views.rank, 1, 1));
  assert_false(even_generation_gift(views.agent, 0, 1, &process, &fd));
  even_generation_give(views.rank, 0, 1, 7);
  assert_true(even_generation_gift(views.agent, 0, 1, &process, &fd));
  assert_int_equal(process, 100);
  assert_int_equal(fd, 7);
  assert_false(even_generation_gift(views.agent, 0, 2, &process, &fd));
  assert_false(even_generation_gift(views.agent, 1, 1, &process, &fd));

  assert_int_equal(even_generation_grow(views.agent, NULL), 2);
  assert_false(even_generation_given(views.rank, 2, &process, &fd));
  even_generation_bring(views.agent, 2, 4711, 0);
  assert_true(even_generation_given(views.rank, 2, &process, &fd));
  assert_int_equal(process, 4711);
  assert_int_equal(fd, 0);
  assert_int_equal(even_generation_grow(views.agent, NULL), 3);
  assert_false(even_generation_given(views.rank, 3, &process, &fd));
  assert_false(even_generation_ungiven(views.rank, 3, why));
  even_generation_fail_bringing(views.agent, 3, "no memory is free");
  even_generation_fail_bringing(views.agent, 3, "the second reason");
  assert_true(even_generation_ungiven(views.rank, 3, why));
  assert_string_equal(why, "no memory is free");
  assert_false(even_generation_ungiven(views.rank, 4, why));

  assert_false(even_generation_took(views.agent, 2, 2));
  even_generation_take(views.rank, 2, 2);
  assert_true(even_generation_took(views.agent, 2, 1) && even_generation_took(views.agent, 2, 2));
  assert_false(even_generation_took(views.agent, 2, 3));
  even_generation_vacate(views.agent, 2);
  assert_false(even_generation_took(views.agent, 2, 1));
  even_generation_begin(views.agent, NULL); /* another attempt */
  assert_false(even_generation_gives_away(views.rank, 0, 1));
  assert_false(even_generation_given(views.rank, 2, &process, &fd));
  assert_false(even_generation_ungiven(views.rank, 3, why));
  close_views(&views);
}

/* Its agent came while the others were further. */
static void a_host_that_comes_late_begins_where_they_are(void **state) {
  two_views views = open_views(3);
  const bool nobody[3] = {false, false, false};
  const bool left[3] = {true, false, false};
  const bool grown[3] = {true, false, true};
  (void)state;
  even_generation_begin(views.agent, nobody);
  assert_true(even_generation_adopt(views.agent, 5, left));
  assert_int_equal(even_generation_number(views.rank), 5);
  assert_true(even_generation_has(views.rank, 0, 5));
  assert_false(even_generation_has(views.rank, 0, 4) || even_generation_has(views.rank, 2, 5));
  assert_false(even_generation_adopt(views.agent, 7, grown));
  assert_true(even_generation_follow(views.agent, 6, grown));
  assert_true(even_generation_has(views.rank, 2, 6));
  close_views(&views);
}

static void other_memory_is_refused(void **state) {
  even_shared_memory memory;
  even_generation *generation = NULL;
  int fd = -1;
  (void)state;
  assert_int_equal(even_generation_create(0, &fd), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_shared_memory_create("other", 64, &memory), EVEN_OK);
  assert_int_equal(even_generation_open(memory.fd, &generation), EVEN_ERR_INPUT);
  assert_null(generation);
  even_shared_memory_close(&memory);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(members_follow_from_the_losses),
      cmocka_unit_test(all_must_be_able),
      cmocka_unit_test(who_waits_early_goes_on_without_who_does_so_too),
      cmocka_unit_test(who_waits_early_does_not_go_on_without_who_is_in_an_earlier_call),
      cmocka_unit_test(who_waits_is_woken),
      cmocka_unit_test(waiting_ends),
      cmocka_unit_test(who_offers_itself_joins_those_that_stand),
      cmocka_unit_test(another_process_in_a_place_has_said_nothing),
      cmocka_unit_test(ranks_hear_that_others_may_join),
      cmocka_unit_test(many_generations_are_told_apart),
      cmocka_unit_test(members_of_another_host_follow),
      cmocka_unit_test(a_place_on_another_host_has_its_address),
      cmocka_unit_test(what_ranks_say_can_be_repeated_elsewhere),
      cmocka_unit_test(the_state_may_come_from_another_host),
      cmocka_unit_test(a_host_that_comes_late_begins_where_they_are),
      cmocka_unit_test(other_memory_is_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
