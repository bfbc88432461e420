/* Pieces of a step: together all elements, each taken once, a rank's own first. */
#include "optim/pieces.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#define PIECE EVEN_OPTIM_PIECE
enum { MOST = 16 };

static size_t places_of(const size_t *counts, size_t count, even_optim_piece *out) {
  even_optim_parameter parameters[MOST] = {0};
  even_optim_params params = {.size = sizeof params, .parameters = parameters, .parameter_count = count};
  size_t pieces = 0;
  for (size_t i = 0; i < count; i++) {
    parameters[i].count = counts[i];
  }
  assert_int_equal(even_optim_pieces_count(&params, &pieces), EVEN_OK);
  assert_true(pieces <= MOST);
  even_optim_pieces_place(&params, out);
  return pieces;
}

static void begin_each_piece_behind_the_last(void **state) {
  (void)state;
  even_optim_piece found[MOST];
  assert_int_equal(places_of(NULL, 0, found), 0);
  assert_int_equal(places_of((size_t[]){0, 0}, 2, found), 0);
  assert_int_equal(places_of((size_t[]){0, 1, 0}, 3, found), 1);
  assert_true(found[0].parameter == 1 && found[0].first == 0);
  assert_int_equal(places_of((size_t[]){PIECE, PIECE}, 2, found), 2);
  assert_true(found[1].parameter == 1 && found[1].first == 0);
  /* 3 small ones, one over several pieces that begins in the first, and what is left */
  assert_int_equal(places_of((size_t[]){5, 0, 7, 2 * PIECE, PIECE, 3}, 6, found), 4);
  assert_true(found[0].parameter == 0 && found[0].first == 0);
  assert_true(found[1].parameter == 3 && found[1].first == PIECE - 12);
  assert_true(found[2].parameter == 3 && found[2].first == 2 * PIECE - 12);
  assert_true(found[3].parameter == 4 && found[3].first == PIECE - 12);
}

static void refuse_more_elements_than_memory_holds(void **state) {
  (void)state;
  const even_optim_parameter parameters[] = {{.count = SIZE_MAX}, {.count = 1}};
  even_optim_params params = {.size = sizeof params, .parameters = parameters, .parameter_count = 2};
  size_t pieces = 0;
  assert_int_equal(even_optim_pieces_count(&params, &pieces), EVEN_ERR_OVERFLOW);
}

static void take_own_pieces_first(void **state) {
  (void)state;
  enum { PIECES = 11, RANKS = 3 }; /* 4, 4 and 3 */
  const size_t expected[PIECES] = {4, 5, 6, 7, 10, 9, 8, 3, 2, 1, 0};
  _Atomic uint64_t words[PIECES] = {0};
  size_t piece = 0;
  for (uint64_t number = 1; number <= 2; number++) { /* and the same in the next step */
    even_optim_round round = {.words = words, .pieces = PIECES, .number = number, .rank = 1, .ranks = RANKS};
    even_optim_round_begin(&round);
    for (size_t i = 0; i < PIECES; i++) {
      assert_true(even_optim_round_take(&round, &piece));
      assert_int_equal(piece, expected[i]);
      assert_true(even_optim_round_is_own(&round, piece));
    }
    assert_false(even_optim_round_take(&round, &piece));
    assert_false(even_optim_round_take(&round, &piece));
  }
}

/* Whatever the order in which the ranks come. */
static void take_each_piece_once(void **state) {
  (void)state;
  enum { MOST_PIECES = 40, MOST_RANKS = 7 };
  srand(5);
  for (int turn = 0; turn < 300; turn++) {
    size_t pieces = (size_t)(rand() % MOST_PIECES);
    int ranks = 1 + rand() % MOST_RANKS;
    _Atomic uint64_t words[MOST_PIECES] = {0};
    int by[MOST_PIECES];
    size_t taken = 0;
    even_optim_round rounds[MOST_RANKS];
    bool goes_on[MOST_RANKS];
    for (int r = 0; r < ranks; r++) {
      rounds[r] = (even_optim_round){.words = words, .pieces = pieces, .number = 1, .rank = r, .ranks = ranks};
      even_optim_round_begin(&rounds[r]);
      goes_on[r] = true;
    }
    for (size_t i = 0; i < pieces; i++) {
      by[i] = -1;
    }
    for (int left = ranks; left > 0;) {
      int r = rand() % ranks;
      size_t piece = 0;
      if (goes_on[r] && even_optim_round_take(&rounds[r], &piece)) {
        assert_true(piece < pieces && by[piece] == -1);
        by[piece] = r;
        taken++;
      } else if (goes_on[r]) {
        goes_on[r] = false;
        left--;
        assert_int_equal(taken, pieces); /* it ends when there is none left */
      }
    }
    for (size_t i = 0; i < pieces; i++) {
      for (int r = 0; r < ranks; r++) {
        assert_true(even_optim_round_is_own(&rounds[r], i) == (by[i] == r));
      }
    }
  }
}

static void tell_who_has_a_piece_until_it_is_done(void **state) {
  (void)state;
  _Atomic uint64_t words[3] = {0};
  even_optim_round rounds[2];
  size_t piece = 9;
  for (int r = 0; r < 2; r++) {
    rounds[r] = (even_optim_round){.words = words, .pieces = 3, .number = 5, .rank = r, .ranks = 2};
    even_optim_round_begin(&rounds[r]);
  }
  assert_int_equal(even_optim_round_holder(&rounds[0], 2), -1);
  assert_true(even_optim_round_take(&rounds[1], &piece));
  assert_int_equal(piece, 2);
  assert_int_equal(even_optim_round_holder(&rounds[0], 2), 1);
  assert_false(even_optim_round_take_over(&rounds[0], 2, 0)); /* not from who does not have it */
  assert_true(even_optim_round_take_over(&rounds[0], 2, 1));
  assert_false(even_optim_round_take_over(&rounds[0], 2, 1));
  assert_int_equal(even_optim_round_holder(&rounds[1], 2), 0);
  assert_true(even_optim_round_is_own(&rounds[0], 2) && !even_optim_round_is_own(&rounds[1], 2));
  even_optim_round_done(&rounds[0], 2);
  assert_int_equal(even_optim_round_holder(&rounds[1], 2), -1);
  assert_true(even_optim_round_is_own(&rounds[0], 2));
  assert_false(even_optim_round_take_over(&rounds[1], 2, 0));
  for (uint64_t number = 5; number < 7; number++) { /* each its own name, never that of no piece */
    for (size_t i = 0; i < 3; i++) {
      rounds[0].number = number;
      assert_int_equal(even_optim_round_name(&rounds[0], i), number * 3 + i);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(begin_each_piece_behind_the_last),
      cmocka_unit_test(refuse_more_elements_than_memory_holds),
      cmocka_unit_test(take_own_pieces_first),
      cmocka_unit_test(take_each_piece_once),
      cmocka_unit_test(tell_who_has_a_piece_until_it_is_done),
  };
  return cmocka_run_group_tests_name("optim_pieces", tests, NULL, NULL);
}
