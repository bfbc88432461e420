/* The size of staged pieces follows what calls cost. */
#include "comm/pieces.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define SMALL ((size_t)256 << 10)
#define LARGE ((size_t)4 << 20)
#define CALL ((size_t)64 << 20)

/* Invented costs: a meeting for each piece, and what a piece of that size costs a byte. */
typedef struct machine {
  double meeting_ns;
  double byte_ns[3];
} machine;

static uint64_t clock_ns = 1;

static void one_call(even_pieces *pieces, const machine *on, size_t bytes) {
  size_t piece = even_pieces_bytes(pieces);
  double each = on->byte_ns[piece == SMALL ? 0 : (piece == LARGE ? 2 : 1)];
  even_pieces_begin(pieces, bytes, clock_ns);
  assert_int_equal(even_pieces_bytes(pieces), piece); /* the size of a call is known before it begins */
  clock_ns += (uint64_t)((double)(bytes / piece) * on->meeting_ns + (double)bytes * each);
  even_pieces_end(pieces, bytes, clock_ns);
}

/* How many of the last `count` of `calls` calls had pieces of that size. */
static int calls_with(even_pieces *pieces, const machine *on, int calls, int count, size_t bytes, size_t size) {
  int found = 0;
  for (int i = 0; i < calls; i++) {
    found += i >= calls - count && even_pieces_bytes(pieces) == size;
    one_call(pieces, on, bytes);
  }
  return found;
}

static const machine quiet = {.meeting_ns = 1e3, .byte_ns = {0.15, 0.18, 0.25}};
static const machine busy = {.meeting_ns = 5e5, .byte_ns = {0.15, 0.18, 0.25}};

static void small_pieces_where_meetings_are_cheap(void **state) {
  even_pieces pieces;
  (void)state;
  even_pieces_start(&pieces, SMALL, LARGE, false);
  assert_int_equal(even_pieces_bytes(&pieces), SMALL);
  assert_true(calls_with(&pieces, &quiet, 600, 200, CALL, SMALL) >= 190);
  even_pieces_start(&pieces, SMALL, LARGE, true);
  assert_int_equal(even_pieces_bytes(&pieces), LARGE);
  assert_true(calls_with(&pieces, &quiet, 600, 200, CALL, SMALL) >= 190);
}

static void large_pieces_where_each_meeting_costs_a_turn(void **state) {
  even_pieces pieces;
  (void)state;
  even_pieces_start(&pieces, SMALL, LARGE, false);
  assert_true(calls_with(&pieces, &busy, 40, 10, CALL, LARGE) >= 7);     /* at once: two trials and the pause between */
  assert_true(calls_with(&pieces, &quiet, 700, 100, CALL, SMALL) >= 90); /* and back */
}

static void short_calls_teach_nothing(void **state) {
  even_pieces pieces;
  (void)state;
  even_pieces_start(&pieces, SMALL, LARGE, false);
  assert_int_equal(calls_with(&pieces, &busy, 200, 200, EVEN_PIECES_MEASURED - 1, SMALL), 200);
}

static void the_chain_is_tried_beside_pieces_that_stay_in_the_caches(void **state) {
  even_pieces pieces;
  (void)state;
  even_pieces_start(&pieces, SMALL, LARGE, true);
  even_pieces_add_chain(&pieces);
  const size_t chain = even_pieces_bytes(&pieces);
  assert_int_equal(chain, ((size_t)1 << 20) | EVEN_PIECES_CHAINED);
  for (int round = 0; round < 2; round++) { /* costs: of the chain, and of pieces of 1 MB */
    const uint64_t costs[2] = {round == 0 ? 20 : 10, round == 0 ? 10 : 20};
    int with_pieces = 0;
    for (int i = 0; i < 1500; i++) {
      size_t piece = even_pieces_bytes(&pieces);
      even_pieces_begin(&pieces, CALL, clock_ns);
      clock_ns += CALL / 1000 * (piece == chain ? costs[0] : piece == (size_t)1 << 20 ? costs[1] : 40);
      even_pieces_end(&pieces, CALL, clock_ns);
      with_pieces += i >= 1400 && piece == (size_t)1 << 20;
      assert_true(round == 1 || piece != LARGE);
    }
    assert_true(round == 0 ? with_pieces >= 90 : with_pieces <= 10);
  }
}

static void one_size_is_no_choice(void **state) {
  even_pieces pieces;
  (void)state;
  even_pieces_start(&pieces, SMALL, SMALL, true);
  assert_int_equal(calls_with(&pieces, &busy, 100, 100, CALL, SMALL), 100);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(small_pieces_where_meetings_are_cheap),
      cmocka_unit_test(large_pieces_where_each_meeting_costs_a_turn),
      cmocka_unit_test(short_calls_teach_nothing),
      cmocka_unit_test(the_chain_is_tried_beside_pieces_that_stay_in_the_caches),
      cmocka_unit_test(one_size_is_no_choice),
  };
  return cmocka_run_group_tests_name("comm_pieces", tests, NULL, NULL);
}
