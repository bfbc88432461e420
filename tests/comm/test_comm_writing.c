/* Staged data go through the caches or past them: what is measured decides, for every rank alike. */
#include "comm/writing.h"
#include "os/calls.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define STAGES 2000

static uint64_t now_ns;

static int made_up_clock(clockid_t clock, struct timespec *out) {
  (void)clock;
  *out = (struct timespec){(time_t)(now_ns / 1000000000u), (long)(now_ns % 1000000000u)};
  return 0;
}

static int set_up(void **state) {
  even_os.clock_gettime = made_up_clock;
  now_ns = 1000000000u;
  *state = calloc(1, sizeof(even_comm));
  return *state == NULL;
}

static int tear_down(void **state) {
  even_os = even_os_real;
  free(*state);
  return 0;
}

/* Runs stages that take ns[way]; returns how many were written past the caches. */
static int run(even_comm *comm, even_call_kind kind, bool full, int stages, const uint64_t *ns) {
  int past = 0;
  for (int stage = 0; stage < stages; stage++) {
    comm->call.kind = kind;
    bool past_caches = even_writing_begin(comm, full);
    now_ns += ns[past_caches] + (stage % 3 == 0 ? 500000 : 0); /* now and then something else has the core */
    past += past_caches;
    even_writing_end(comm, 131072);
  }
  return past;
}

static void test_the_faster_way_is_taken(void **state) {
  even_comm *comm = *state;
  const uint64_t apart[2] = {80000, 30000};
  const uint64_t together[2] = {20000, 45000};
  int past = run(comm, EVEN_CALL_ALL_REDUCE, true, STAGES, apart);
  assert_true(past > STAGES * 9 / 10 && past < STAGES); /* the other is tried now and then */
  /* The cores have moved: noticed by the next trial but one at the latest. */
  past = run(comm, EVEN_CALL_ALL_REDUCE, true, STAGES, together);
  assert_true(past > 0 && past < STAGES / 2);
  past = run(comm, EVEN_CALL_ALL_REDUCE, true, STAGES, together);
  assert_true(past > 0 && past < STAGES / 10);
}

static void test_the_figures_are_told(void **state) {
  even_comm *comm = *state;
  const uint64_t apart[2] = {81920, 30720};
  char text[128];
  even_writing_describe(comm, text, sizeof text);
  assert_string_equal(text, "written through the caches");
  (void)run(comm, EVEN_CALL_ALL_REDUCE, true, 20, apart);
  even_writing_describe(comm, text, sizeof text);
  assert_string_equal(text, "written past the caches (240 ns for 1 KB; through them 640)");
  comm->writing.forced = EVEN_WRITING_THROUGH;
  assert_int_equal(run(comm, EVEN_CALL_ALL_REDUCE, true, STAGES, apart), 0);
  even_writing_describe(comm, text, sizeof text);
  assert_string_equal(text, "written through the caches, as asked for");
}

static void test_stages_that_are_not_full_decide_nothing(void **state) {
  even_comm *comm = *state;
  const uint64_t apart[2] = {80000, 30000};
  assert_int_equal(run(comm, EVEN_CALL_ALL_REDUCE, false, STAGES, apart), 0);
  (void)run(comm, EVEN_CALL_ALL_REDUCE, true, 100, apart);
  assert_int_equal(run(comm, EVEN_CALL_ALL_REDUCE, false, STAGES, apart), STAGES);
}

static void test_different_collectives_are_not_compared(void **state) {
  even_comm *comm = *state;
  const uint64_t slow[2] = {90000, 80000};
  const uint64_t fast[2] = {30000, 40000};
  /* No verdict that compares the cached stages of the one with the uncached ones of the other. */
  (void)run(comm, EVEN_CALL_ALL_REDUCE, true, 6, slow);
  (void)run(comm, EVEN_CALL_ALL_GATHER, true, 6, fast);
  assert_false(comm->writing.past_caches);
  (void)run(comm, EVEN_CALL_ALL_REDUCE, true, 6, slow);
  assert_true(comm->writing.past_caches); /* the trial went on with its own kind */
}

static void test_a_collective_that_never_comes_again(void **state) {
  even_comm *comm = *state;
  const uint64_t apart[2] = {80000, 30000};
  (void)run(comm, EVEN_CALL_ALL_REDUCE, true, 3, apart);
  int past = run(comm, EVEN_CALL_ALL_GATHER, true, STAGES, apart);
  assert_true(past > STAGES / 2);
}

static void test_copies(void **state) {
  static char from[20000];
  static char to[20002];
  (void)state;
  for (size_t i = 0; i < sizeof from; i++) {
    from[i] = (char)(i * 31 % 251);
  }
  for (int past_caches = 0; past_caches < 2; past_caches++) {
    for (size_t bytes = 0; bytes < sizeof from - 64; bytes += 1237) {
      memset(to, 77, sizeof to);
      even_writing_copy(to + 1, from + bytes % 61, bytes, past_caches != 0);
      assert_memory_equal(to + 1, from + bytes % 61, bytes);
      memset(to, 77, sizeof to);
      even_copy_from_core(to + 1, from + bytes % 61, bytes);
      assert_memory_equal(to + 1, from + bytes % 61, bytes);
      assert_int_equal(to[0], 77);
      assert_int_equal(to[1 + bytes], 77);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_the_faster_way_is_taken, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_the_figures_are_told, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_stages_that_are_not_full_decide_nothing, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_different_collectives_are_not_compared, set_up, tear_down),
      cmocka_unit_test_setup_teardown(test_a_collective_that_never_comes_again, set_up, tear_down),
      cmocka_unit_test(test_copies),
  };
  return cmocka_run_group_tests_name("how staged data are written", tests, NULL, NULL);
}
