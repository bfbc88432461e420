/* What ranks tell of the ways between their hosts: of which calls, by whom, and of which ways. */
#include "comm/ranks.h"

#include <evenstep/telemetry.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 4, MOST = 64 };
static const int HOST_OF[RANKS] = {0, 0, 1, 1};

static int ring_fd = -1;
static even_telemetry_reader *reader;
static even_record records[MOST];
static int legs_of[RANKS];
static uint64_t bytes_of[RANKS];

static int set_up(void **state) {
  (void)state;
  memset(legs_of, 0, sizeof legs_of);
  memset(bytes_of, 0, sizeof bytes_of);
  assert_int_equal(even_telemetry_create_segment(RANKS, 0, &ring_fd), EVEN_OK);
  assert_int_equal(even_telemetry_reader_open(ring_fd, &reader), EVEN_OK);
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  even_telemetry_reader_close(reader);
  return 0;
}

static void enter_host(int rank) {
  (void)setenv("EVENSTEP_HOST_ID", HOST_OF[rank] == 0 ? "first" : "second", 1);
}

/* Two calls, of which the first one is recorded. */
static int reduce(even_comm *comm, void *argument) {
  size_t bytes = *(const size_t *)argument;
  even_telemetry *telemetry = NULL;
  float *data = calloc(1, bytes);
  RANKS_EXPECT(comm, data != NULL && even_telemetry_open(ring_fd, even_comm_rank(comm), &telemetry) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_record(comm, telemetry, "test") == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, bytes / sizeof *data, EVEN_F32, EVEN_SUM) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_record(comm, NULL, NULL) == EVEN_OK);
  even_telemetry_close(telemetry);
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, bytes / sizeof *data, EVEN_F32, EVEN_SUM) == EVEN_OK);
  free(data);
  return 0;
}

static void run(ranks_engine engine, size_t bytes) {
  ranks_setup setup = {.ranks = RANKS,
                       .arena_bytes = 4096,
                       .timeout_seconds = 60,
                       .spin = -1,
                       .engine = engine,
                       .host_of = HOST_OF,
                       .enter = enter_host};
  assert_int_equal(ranks_run(&setup, reduce, &bytes, NULL), 0);
  size_t count = even_telemetry_reader_drain(reader, records, MOST, NULL);
  for (size_t i = 0; i < count; i++) {
    const even_leg_record *leg = &records[i].as.leg;
    if (records[i].kind != EVEN_RECORD_LEG) {
      continue;
    }
    assert_true(leg->own != leg->peer && leg->transfers == 1 && leg->bytes > 0 && leg->bytes <= bytes);
    assert_true(leg->at_ns > 0 && leg->ns > 0);
    legs_of[records[i].rank]++;
    bytes_of[records[i].rank] += leg->bytes;
  }
}

/* From both ranks of the other host to each; nothing is told of who is on the same one. */
static void each_rank_tells_of_the_other_host(void **state) {
  (void)state;
  run(RANKS_NETWORK, 65536);
  for (int rank = 0; rank < RANKS; rank++) {
    assert_int_equal(legs_of[rank], 2);
  }
}

static void of_small_calls_nothing_is_told(void **state) {
  (void)state;
  run(RANKS_NETWORK, 4096);
  for (int rank = 0; rank < RANKS; rank++) {
    assert_int_equal(legs_of[rank], 0);
  }
}

/* In shared memory on each host: those that speak between these. */
static void the_hosts_first_ranks_tell(void **state) {
  (void)state;
  run(RANKS_HOSTS, 65536);
  for (int rank = 0; rank < RANKS; rank++) {
    assert_int_equal(legs_of[rank], rank % 2 == 0 ? 1 : 0);
  }
}

/* Where pieces cross while others are still summed. */
static void what_is_sent_in_pieces_is_told_of_too(void **state) {
  (void)state;
  run(RANKS_HOSTS, (size_t)4 << 20);
  assert_int_equal(legs_of[0], 1);
  assert_int_equal(legs_of[2], 1);
  assert_true(bytes_of[0] < (size_t)4 << 20); /* one of them */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(each_rank_tells_of_the_other_host, set_up, tear_down),
      cmocka_unit_test_setup_teardown(of_small_calls_nothing_is_told, set_up, tear_down),
      cmocka_unit_test_setup_teardown(the_hosts_first_ranks_tell, set_up, tear_down),
      cmocka_unit_test_setup_teardown(what_is_sent_in_pieces_is_told_of_too, set_up, tear_down),
  };
  if (!ranks_have_ucx()) {
    return 77; /* skipped, as CMakeLists.txt says */
  }
  return cmocka_run_group_tests_name("what ranks tell of the ways between hosts", tests, NULL, NULL);
}
