/* Agreement of members, and that no interleaving of ranks that use it ends wrong (agree_search.c). */
#include "fault/agree.h"

#include "agree_search.h"
#include "base/fail.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>

typedef struct setting {
  int ranks, steps, deaths;
  bool calls, call_last;
  bool joins; /* the last of the ranks */
  bool asks;
  int turns;
} setting;

static void assert_right(setting given) {
  exploration search = {.ranks = given.ranks,
                        .steps = given.steps,
                        .deaths = given.deaths,
                        .turns = given.turns,
                        .calls = given.calls,
                        .call_last = given.call_last,
                        .asks = given.asks,
                        .joiner = given.joins ? given.ranks - 1 : -1,
                        .agree = even_agree};
  explore(&search);
  if (search.wrong != NULL) {
    fail_msg("%d ranks, %d steps, %d deaths%s: %s", given.ranks, given.steps, given.deaths,
             given.joins ? ", one joins" : "", search.wrong);
  }
  assert_true(search.recovered > 0);
  assert_true(!given.joins || search.joined > 0);
  assert_true(!given.asks || search.failed > 0);
  print_message("%d ranks, %d passes of %d steps, %d deaths%s: %zu states\n", given.ranks, given.steps, given.turns,
                given.deaths, given.joins ? ", one joins" : "", search.count);
}

static void two_ranks(void **state) {
  (void)state;
  for (int i = 0; i < 4; i++) {
    assert_right((setting){2, 2, 1, (i & 1) != 0, (i & 2) != 0, false, false, 1});
  }
}

static void three_ranks_of_which_two_die(void **state) {
  (void)state;
  assert_right((setting){3, 2, 2, true, true, false, false, 1});
  assert_right((setting){3, 2, 2, false, true, false, false, 1});
  assert_right((setting){3, 2, 2, false, false, false, false, 1});
}

static void four_ranks_of_which_two_die(void **state) {
  (void)state;
  assert_right((setting){4, 1, 2, false, true, false, false, 1});
}

static void calls_that_need_the_lost_fail_on_all(void **state) {
  (void)state;
  assert_right((setting){2, 2, 1, true, true, false, true, 1});
  assert_right((setting){3, 2, 1, true, true, false, true, 1});
  assert_right((setting){3, 1, 1, true, true, true, true, 1});
}

static void who_knows_of_no_failure_is_found(void **state) {
  exploration search = {.ranks = 3, .steps = 2, .deaths = 1, .turns = 1, .calls = true, .call_last = true};
  (void)state;
  search.asks = search.forgets_failing = true;
  search.joiner = -1;
  search.agree = even_agree;
  explore(&search);
  assert_non_null(search.wrong);
}

static void two_optimizers_step_in_a_pass(void **state) {
  (void)state;
  assert_right((setting){2, 2, 1, true, true, false, false, 2});
  assert_right((setting){3, 1, 2, false, true, false, false, 2});
  assert_right((setting){3, 2, 1, true, true, false, false, 2});
  assert_right((setting){3, 1, 1, true, true, false, true, 2});
  assert_right((setting){3, 2, 1, false, true, true, false, 2});
}

static void a_step_applied_twice_is_found(void **state) {
  exploration search = {.ranks = 3, .steps = 1, .deaths = 1, .turns = 2, .call_last = true, .forgets_over = true};
  (void)state;
  search.joiner = -1;
  search.agree = even_agree;
  explore(&search);
  assert_string_equal(search.wrong, "a step was applied twice");
}

static void one_joins_and_any_two_die(void **state) {
  (void)state;
  assert_right((setting){2, 2, 2, true, true, true, false, 1});
  assert_right((setting){3, 2, 2, false, true, true, false, 1});
  assert_right((setting){3, 2, 1, true, true, true, false, 1});
  assert_right((setting){4, 1, 1, false, true, true, false, 1});
}

/* Whoever has not come out of the commit does not apply. */
static even_status takes_the_least(const even_position *positions, size_t count, even_agreement *out) {
  EVEN_TRY(even_agree(positions, count, out));
  for (size_t i = 0; i < count; i++) {
    out->committed = positions[i].committed < out->committed ? positions[i].committed : out->committed;
  }
  return EVEN_OK;
}

/* Each redoes what it was in. */
static even_status forgets_passes(const even_position *positions, size_t count, even_agreement *out) {
  EVEN_TRY(even_agree(positions, count, out));
  out->voids = out->voids > 0 ? 1 : 0;
  return EVEN_OK;
}

/* Calls are made again by all that are in one. */
static even_status forgets_calls(const even_position *positions, size_t count, even_agreement *out) {
  EVEN_TRY(even_agree(positions, count, out));
  for (size_t i = 0; i < count; i++) {
    out->calls = positions[i].calls < out->calls ? positions[i].calls : out->calls;
  }
  return EVEN_OK;
}

/* Nothing is void where somebody stands between two steps. */
static even_status asks_one_that_stands(const even_position *positions, size_t count, even_agreement *out) {
  EVEN_TRY(even_agree(positions, count, out));
  for (size_t i = 0; i < count; i++) {
    out->voids = positions[i].stands ? 0 : out->voids;
  }
  return EVEN_OK;
}

static void the_search_finds_wrong_agreements(void **state) {
  const struct {
    agree_call *agree;
    bool calls, joins;
  } wrong[] = {{takes_the_least, false, false},
               {forgets_passes, false, false},
               {forgets_calls, true, false},
               {asks_one_that_stands, false, true}};
  (void)state;
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    exploration search = {.ranks = 3,
                          .steps = 2,
                          .deaths = 2,
                          .turns = 1,
                          .calls = wrong[i].calls,
                          .call_last = true,
                          .joiner = wrong[i].joins ? 2 : -1,
                          .agree = wrong[i].agree};
    explore(&search);
    if (search.wrong == NULL) {
      fail_msg("nothing is wrong with agreement %zu, it says after %zu states", i, search.count);
    }
  }
}

static void says_what_cannot_be(void **state) {
  even_agreement agreed;
  const even_position far[] = {{.committed = 3}, {.committed = 5}};
  const even_position calls[] = {{.calls = 7}, {.calls = 9}};
  const even_position behind[] = {{.committed = 4, .stands = true}, {.committed = 5}};
  (void)state;
  assert_int_equal(even_agree(far, 0, &agreed), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_agree(far, 2, &agreed), EVEN_ERR_MISMATCH);
  assert_int_equal(even_agree(calls, 2, &agreed), EVEN_ERR_MISMATCH);
  assert_int_equal(even_agree(behind, 2, &agreed), EVEN_ERR_MISMATCH);
}

static void the_furthest_counts(void **state) {
  even_agreement agreed;
  const even_position positions[] = {{.committed = 4, .passes = 2, .calls = 9},
                                     {.committed = 5, .calls = 8},
                                     {.committed = 5, .passes = 1, .calls = 9}};
  (void)state;
  assert_int_equal(even_agree(positions, 3, &agreed), EVEN_OK);
  assert_int_equal(agreed.committed, 5);
  assert_int_equal(agreed.voids, 2); /* those of the step that stands do not count */
  assert_int_equal(agreed.calls, 9);
  assert_int_equal(agreed.giver, 0);
}

static void a_call_fails_where_somebody_in_it_asks(void **state) {
  even_agreement agreed;
  even_position positions[] = {{.calls = 4, .asks = true}, {.calls = 4}};
  (void)state;
  assert_int_equal(even_agree(positions, 2, &agreed), EVEN_OK);
  assert_true(agreed.fails);
  positions[1].calls = 5; /* has come out of it, and knows what it gave */
  assert_int_equal(even_agree(positions, 2, &agreed), EVEN_OK);
  assert_false(agreed.fails);
  assert_int_equal(agreed.calls, 5);
  assert_int_equal(agreed.giver, 1);
}

static void nothing_is_void_where_all_stand(void **state) {
  even_agreement agreed;
  even_position positions[] = {{.committed = 5, .calls = 9, .stands = true},
                               {.committed = 5, .calls = 9, .stands = true}};
  (void)state;
  assert_int_equal(even_agree(positions, 2, &agreed), EVEN_OK);
  assert_int_equal(agreed.voids, 0);
  positions[1].stands = false;
  assert_int_equal(even_agree(positions, 2, &agreed), EVEN_OK);
  assert_int_equal(agreed.voids, 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_furthest_counts),
      cmocka_unit_test(nothing_is_void_where_all_stand),
      cmocka_unit_test(a_call_fails_where_somebody_in_it_asks),
      cmocka_unit_test(says_what_cannot_be),
      cmocka_unit_test(two_ranks),
      cmocka_unit_test(three_ranks_of_which_two_die),
      cmocka_unit_test(four_ranks_of_which_two_die),
      cmocka_unit_test(calls_that_need_the_lost_fail_on_all),
      cmocka_unit_test(who_knows_of_no_failure_is_found),
      cmocka_unit_test(two_optimizers_step_in_a_pass),
      cmocka_unit_test(a_step_applied_twice_is_found),
      cmocka_unit_test(one_joins_and_any_two_die),
      cmocka_unit_test(the_search_finds_wrong_agreements),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
