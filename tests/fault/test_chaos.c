/* Plans of faults: the same seed, the same plan; every kind in its turn; times in order. */
#include "fault/chaos.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <evenstep/status.h>

#include <cmocka.h>

enum { FAULTS = 20, RANKS = 3 };

static void a_seed_gives_one_plan(void **state) {
  even_chaos_fault a[FAULTS];
  even_chaos_fault b[FAULTS];
  even_chaos_fault c[FAULTS];
  uint32_t all = 0;
  int same = 0;
  (void)state;
  assert_int_equal(even_chaos_parse("all", &all), EVEN_OK);
  even_chaos_plan(7, all, RANKS, FAULTS, a);
  even_chaos_plan(7, all, RANKS, FAULTS, b);
  even_chaos_plan(8, all, RANKS, FAULTS, c);
  for (int i = 0; i < FAULTS; i++) {
    assert_true(a[i].kind == b[i].kind && a[i].rank == b[i].rank && a[i].dice == b[i].dice);
    assert_true(a[i].when <= b[i].when && a[i].when >= b[i].when);
    same += a[i].dice == c[i].dice;
  }
  assert_int_equal(same, 0);
}

static void every_kind_has_its_turn(void **state) {
  even_chaos_fault plan[2 * EVEN_CHAOS_KINDS];
  uint32_t all = 0;
  (void)state;
  assert_int_equal(even_chaos_parse("all", &all), EVEN_OK);
  for (uint64_t seed = 0; seed < 500; seed++) {
    int seen[EVEN_CHAOS_KINDS] = {0};
    even_chaos_plan(seed, all, RANKS, 2 * EVEN_CHAOS_KINDS, plan);
    for (size_t i = 0; i < 2 * EVEN_CHAOS_KINDS; i++) {
      seen[plan[i].kind]++;
      assert_in_range(plan[i].rank, 0, RANKS - 1);
      assert_true(plan[i].when >= 0.1 && plan[i].when <= 0.9);
      assert_true(i == 0 || plan[i].when >= plan[i - 1].when);
    }
    for (int kind = 0; kind < EVEN_CHAOS_KINDS; kind++) {
      assert_int_equal(seen[kind], 2);
    }
  }
}

static void only_what_is_asked_for_comes(void **state) {
  even_chaos_fault plan[FAULTS];
  uint32_t kinds = 0;
  (void)state;
  assert_int_equal(even_chaos_parse("torn-write,stop", &kinds), EVEN_OK);
  assert_int_equal(kinds, 1u << EVEN_CHAOS_TORN | 1u << EVEN_CHAOS_STOP);
  even_chaos_plan(1, kinds, 1, FAULTS, plan);
  for (int i = 0; i < FAULTS; i++) {
    assert_true(plan[i].kind == EVEN_CHAOS_TORN || plan[i].kind == EVEN_CHAOS_STOP);
    assert_int_equal(plan[i].rank, 0);
  }
}

static void what_is_no_kind_is_refused(void **state) {
  static const char *const wrong[] = {
      "",           "kil",      "kill,",     ",kill",
      "kill,,stop", "all,kill", "kill stop", "a word that is much longer than any name of a kind of fault"};
  uint32_t kinds = 0;
  (void)state;
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    assert_int_equal(even_chaos_parse(wrong[i], &kinds), EVEN_ERR_USAGE);
  }
  assert_int_equal(even_chaos_parse("kil", &kinds), EVEN_ERR_USAGE);
  assert_non_null(strstr(even_error_last()->fix, "did you mean kill?"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_seed_gives_one_plan),
      cmocka_unit_test(every_kind_has_its_turn),
      cmocka_unit_test(only_what_is_asked_for_comes),
      cmocka_unit_test(what_is_no_kind_is_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
