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
  even_generation_begin(views.agent); /* another attempt */
  assert_int_equal(even_generation_number(views.rank), 0);
  assert_true(even_generation_has(views.rank, 1, 1));
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
  assert_string_equal(why, "it is not training yet");
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

typedef struct waiter {
  even_generation *generation;
  uint32_t number, port;
} waiter;

static void *wait_for_both(void *argument) {
  waiter *own = argument;
  own->number = even_generation_wait(own->generation, 0, LONG_NS);
  own->port = even_generation_port(own->generation, own->number, LONG_NS);
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
  close_views(&views);
}

static void waiting_ends(void **state) {
  two_views views = open_views(2);
  const bool lost[2] = {true, false};
  (void)state;
  assert_int_equal(even_generation_wait(views.rank, 0, 1000), 0); /* time is up */
  assert_int_equal(even_generation_port(views.rank, 0, 1000), 0);
  assert_int_equal(even_generation_lose(views.agent, lost), 1);
  assert_int_equal(even_generation_port(views.rank, 0, LONG_NS), 0); /* that generation is over */
  assert_false(even_generation_refused(views.rank));
  even_generation_refuse(views.agent);
  assert_true(even_generation_refused(views.rank));
  assert_int_equal(even_generation_wait(views.rank, 1, LONG_NS), 1);
  assert_int_equal(even_generation_port(views.rank, 1, LONG_NS), 0);
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
      cmocka_unit_test(who_waits_is_woken),
      cmocka_unit_test(waiting_ends),
      cmocka_unit_test(other_memory_is_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
