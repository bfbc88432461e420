/* What of the job's generations concerns a set of its ranks, and where its members meet. */
#include "fault/generation.h"
#include "fault/generation_sets.h"
#include "os/pipe.h"
#include "os/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>

#define LONG_NS 120000000000u

static const int left[2] = {0, 1};
static const int right[2] = {2, 3};

static even_generation *open_four(int *fd) {
  even_generation *generation;
  assert_int_equal(even_generation_create(4, fd), EVEN_OK);
  assert_int_equal(even_generation_open(*fd, &generation), EVEN_OK);
  return generation;
}

static void end(even_generation *generation, int fd) {
  even_generation_close(generation);
  even_pipe_close(fd);
}

static void losses_concern_the_set_that_has_them(void **state) {
  int fd;
  even_generation *generation = open_four(&fd);
  const bool third[4] = {false, false, false, true};
  const bool first[4] = {true, false, false, true};
  (void)state;
  assert_int_equal(even_generation_number_of(generation, left, 2), 0);
  assert_int_equal(even_generation_lose(generation, third), 1);
  assert_int_equal(even_generation_number_of(generation, left, 2), 0);
  assert_int_equal(even_generation_number_of(generation, right, 2), 1);
  assert_int_equal(even_generation_lose(generation, first), 2);
  assert_int_equal(even_generation_number_of(generation, left, 2), 2);
  assert_int_equal(even_generation_number_of(generation, right, 2), 1);
  for (uint32_t number = 3; number < 3 + 2 * EVEN_GENERATIONS_KEPT; number++) { /* one was stopped, and goes on */
    assert_int_equal(even_generation_grow(generation, NULL), number);
    assert_int_equal(even_generation_number_of(generation, left, 2), number);
    assert_int_equal(even_generation_number_of(generation, right, 2), number);
  }
  even_generation_begin(generation, NULL);
  assert_int_equal(even_generation_number_of(generation, left, 2), 0);
  end(generation, fd);
}

static void a_hosts_memory_that_follows_says_the_same(void **state) {
  int fd;
  even_generation *generation = open_four(&fd);
  const bool members[4] = {true, true, true, false};
  (void)state;
  assert_true(even_generation_follow(generation, 1, members));
  assert_int_equal(even_generation_number_of(generation, left, 2), 0);
  assert_int_equal(even_generation_number_of(generation, right, 2), 1);
  assert_true(even_generation_follow(generation, 2, members));
  assert_int_equal(even_generation_number_of(generation, left, 2), 2);
  end(generation, fd);
}

typedef struct waiter {
  even_generation *generation;
  uint32_t port;
} waiter;

static void *wait_for_place(void *argument) {
  waiter *own = argument;
  own->port = even_generation_port_at(own->generation, 2, 1, 1, LONG_NS);
  return NULL;
}

static void each_set_meets_at_a_place_of_its_own(void **state) {
  int fd;
  even_generation *generation = open_four(&fd);
  const bool lost[4] = {false, true, false, true};
  waiter other = {.generation = generation};
  pthread_t thread;
  (void)state;
  assert_int_equal(even_generation_lose(generation, lost), 1);
  assert_int_equal(even_generation_port_at(generation, 0, 1, 1, 1000), 0); /* time is up */
  even_generation_meet_at(generation, 0, 1, 4711);
  assert_int_equal(even_thread_start(wait_for_place, &other, &thread), EVEN_OK);
  even_generation_meet_at(generation, 2, 1, 4712);
  even_thread_join(thread);
  assert_int_equal(other.port, 4712);
  assert_int_equal(even_generation_port_at(generation, 0, 1, 1, LONG_NS), 4711);
  assert_int_equal(even_generation_port_at(generation, 0, 1, 0, LONG_NS), 4711); /* that one concerns others */
  assert_int_equal(even_generation_port_at(generation, 0, 2, 0, LONG_NS), 0);    /* they look again */
  assert_int_equal(even_generation_port_at(generation, 4, 1, 1, LONG_NS), 0);    /* no rank */
  even_generation_refuse(generation);
  assert_int_equal(even_generation_port_at(generation, 0, 2, 1, LONG_NS), 0);
  end(generation, fd);
}

static void what_ranks_say_lasts_for_an_attempt(void **state) {
  int fd;
  even_generation *generation = open_four(&fd);
  (void)state;
  assert_false(even_generation_is_apart(generation));
  even_generation_train_apart(generation);
  assert_true(even_generation_is_apart(generation));
  assert_false(even_generation_left(generation, 3));
  even_generation_leave(generation, 3);
  assert_true(even_generation_left(generation, 3));
  assert_false(even_generation_left(generation, 4));
  even_generation_vacate(generation, 3);
  assert_false(even_generation_left(generation, 3));
  even_generation_leave(generation, 2);
  even_generation_begin(generation, NULL);
  assert_false(even_generation_is_apart(generation));
  assert_false(even_generation_left(generation, 2));
  end(generation, fd);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(losses_concern_the_set_that_has_them),
      cmocka_unit_test(a_hosts_memory_that_follows_says_the_same),
      cmocka_unit_test(each_set_meets_at_a_place_of_its_own),
      cmocka_unit_test(what_ranks_say_lasts_for_an_attempt),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
