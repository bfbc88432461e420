/* What a call is to the script is compared between ranks, and told, on every engine: which elements are moved, and the
 * gather, scatter or reduce that the engine's call stands for. */
#include "comm/called.h"
#include "comm/ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define RANKS 3

typedef enum calling { BROADCAST, ALL_GATHER, GATHER, SCATTER, REDUCE, CALLINGS } calling;

/* One call by each rank; `odd` ranks mean another dtype, or (gather and those behind it) another root. */
static even_status call_as(even_comm *comm, calling what, bool odd) {
  float data[4 * RANKS] = {0};
  float out[4 * RANKS];
  const void *inputs[RANKS];
  void *outputs[RANKS];
  size_t none[RANKS] = {0};
  size_t parts[RANKS];
  size_t one[RANKS] = {0};
  int root = odd ? 2 : 0;
  even_comm_called called = {.elements = EVEN_CALLED_DTYPE(odd ? EVEN_I32 : EVEN_F32), .root = root, .count = 16};
  for (int rank = 0; rank < RANKS; rank++) {
    inputs[rank] = &data[4 * rank];
    outputs[rank] = &out[4 * rank];
    parts[rank] = 16;
  }
  one[root] = 16;
  bool is_root = even_comm_rank(comm) == root;
  even_status status = EVEN_OK;
  switch (what) {
    case BROADCAST:
      even_comm_call_as(&called);
      return even_comm_broadcast(comm, data, 16, 0);
    case ALL_GATHER:
      even_comm_call_as(&called);
      return even_comm_all_gather(comm, data, out, parts, EVEN_U8);
    case GATHER:
    case SCATTER:
      called.kind = what == GATHER ? EVEN_CALL_GATHER : EVEN_CALL_SCATTER;
      called.elements = EVEN_CALLED_DTYPE(EVEN_F32);
      even_comm_call_as(&called);
      status = what == GATHER ? even_comm_all_to_all(comm, inputs, one, outputs, is_root ? parts : none)
                              : even_comm_all_to_all(comm, inputs, is_root ? parts : none, outputs, one);
      break;
    default:
      called = (even_comm_called){.kind = EVEN_CALL_REDUCE, .root = root, .count = 4};
      one[root] = 4;
      even_comm_call_as(&called);
      status = even_comm_reduce_scatter(comm, data, data, one, EVEN_F32, EVEN_SUM);
      break;
  }
  return status;
}

static bool mentions(const char *text) {
  return strstr(even_error_last()->what, text) != NULL;
}

static const char *const words[CALLINGS][2] = {
    {"broadcast of 16 bytes of F32 from rank 0", "broadcast of 16 bytes of I32 from rank 0"},
    {"all_gather of 48 bytes of F32 in all", "all_gather of 48 bytes of I32 in all"},
    {"gather of 16 bytes of F32 to rank 0", "gather of 16 bytes of F32 to rank 2"},
    {"scatter of 16 bytes of F32 from rank 0", "scatter of 16 bytes of F32 from rank 2"},
    {"reduce of 4 F32 elements with SUM to rank 0", "reduce of 4 F32 elements with SUM to rank 2"},
};

static int call_differently(even_comm *comm, void *argument) {
  int what = *(int *)argument;
  bool odd = even_comm_rank(comm) == 2;
  for (int before = 0; before < CALLINGS; before++) { /* what all mean alike is done, and leaves nothing for the next */
    RANKS_EXPECT(comm, call_as(comm, (calling)before, false) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  }
  char plain[4] = {0};
  RANKS_EXPECT(comm, even_comm_broadcast(comm, plain, sizeof plain, 1) == EVEN_OK);
  RANKS_EXPECT(comm, call_as(comm, (calling)what, odd) == EVEN_ERR_MISMATCH);
  /* Who hears of the end before its own part has met another is told that it is there, and by whom it is named. */
  bool named = mentions(words[what][0]) && mentions(words[what][1]);
  RANKS_EXPECT(comm, named || mentions("found that the ranks make different calls"));
  RANKS_EXPECT(comm, !odd || named);
  return 0;
}

static void run(const ranks_setup *setup) {
  for (int what = 0; what < CALLINGS; what++) {
    assert_int_equal(ranks_run(setup, call_differently, &what, NULL), 0);
  }
}

static void on_one_host(void **state) {
  const ranks_setup setup = {.ranks = RANKS, .timeout_seconds = 300, .spin = -1};
  (void)state;
  run(&setup);
}

static void over_a_network(void **state) {
  const ranks_setup setup = {.ranks = RANKS, .timeout_seconds = 300, .spin = -1, .engine = RANKS_NETWORK};
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  run(&setup);
}

static void over_hosts(void **state) {
  const int host_of[RANKS] = {0, 0, 1};
  const ranks_setup setup = {
      .ranks = RANKS, .timeout_seconds = 300, .spin = -1, .engine = RANKS_HOSTS, .host_of = host_of};
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  run(&setup);
}

static void a_call_that_is_refused_leaves_nothing(void **state) {
  even_comm *comm = ranks_open_alone(0);
  const even_comm_called called = {.kind = EVEN_CALL_GATHER, .count = 4, .elements = EVEN_CALLED_OTHER};
  char data[4] = {0};
  even_flight_call last;
  (void)state;
  assert_non_null(comm);
  even_comm_call_as(&called);
  assert_int_equal(even_comm_broadcast(comm, data, sizeof data, 7), EVEN_ERR_ARGUMENT);
  even_comm_call_as(NULL);
  assert_int_equal(even_comm_broadcast(comm, data, sizeof data, 0), EVEN_OK);
  assert_int_equal(even_comm_flight(comm, 0, &last, 1), 1);
  assert_string_equal(last.call, "broadcast of 4 bytes from rank 0");
  even_comm_close(comm);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(on_one_host),
      cmocka_unit_test(over_a_network),
      cmocka_unit_test(over_hosts),
      cmocka_unit_test(a_call_that_is_refused_leaves_nothing),
  };
  return cmocka_run_group_tests_name("what calls are to the script", tests, NULL, NULL);
}
