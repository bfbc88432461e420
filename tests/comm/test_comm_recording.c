/* What telemetry keeps of a group's calls: each once on every rank, under the same numbers. */
#include "base/alloc.h"
#include "comm/engine.h"
#include "comm/ranks.h"
#include "os/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 3, MOST_RECORDS = 256 };

static const ranks_setup three = {.ranks = RANKS, .arena_bytes = 4096, .timeout_seconds = 60, .spin = -1};

/* The ranks' rings; the parent's, inherited. */
static int ring_fd = -1;
static even_telemetry_reader *reader;

static int open_rings(void **state) {
  (void)state;
  if (even_telemetry_create_segment(RANKS, 0, &ring_fd) != EVEN_OK ||
      even_telemetry_reader_open(ring_fd, &reader) != EVEN_OK) {
    return 1;
  }
  even_telemetry_reader_want_calls(reader, true);
  return 0;
}

static int close_rings(void **state) {
  (void)state;
  even_allocator_current = (even_allocator){malloc, realloc, free};
  even_telemetry_reader_close(reader);
  return close(ring_fd);
}

static size_t drain(even_record records[MOST_RECORDS], int rank, even_record_kind kind) {
  static even_record all[MOST_RECORDS];
  static size_t count;
  size_t found = 0;
  count += even_telemetry_reader_drain(reader, all + count, MOST_RECORDS - count, NULL);
  for (size_t i = 0; i < count; i++) {
    if ((int)all[i].rank == rank && all[i].kind == (uint32_t)kind) {
      records[found++] = all[i];
    }
  }
  if (rank < 0) {
    count = 0;
  }
  return found;
}

static int make_each_call(even_comm *comm, void *argument) {
  even_telemetry *telemetry = NULL;
  double data[3] = {1, 2, 3};
  double all[9] = {0};
  const size_t counts[RANKS] = {3, 3, 3};
  const size_t bytes[RANKS] = {8, 8, 8};
  const void *inputs[RANKS] = {&data[0], &data[1], &data[2]};
  void *outputs[RANKS] = {&all[0], &all[1], &all[2]};
  int rank = even_comm_rank(comm);
  (void)argument;
  RANKS_EXPECT(comm, even_telemetry_open(ring_fd, rank, &telemetry) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_record(comm, telemetry, NULL) == EVEN_ERR_ARGUMENT);
  RANKS_EXPECT(comm, even_comm_record(comm, telemetry, "test/each") == EVEN_OK);
  const even_comm_engine *engine = even_comm_engine_of(comm);
  even_comm *part = NULL;
  for (int at = 0; engine->part != NULL && (part = engine->part(comm, &at)) != NULL; at++) {
    RANKS_EXPECT(comm, strcmp(even_comm_base_of(part)->name, "test/each") == 0); /* in which ranks are said to wait */
  }
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, 3, EVEN_F64, EVEN_MAX) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, NULL, 3, EVEN_F64, EVEN_MAX) == EVEN_ERR_ARGUMENT); /* no call */
  RANKS_EXPECT(comm, even_comm_all_gather(comm, data, all, counts, EVEN_F64) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_reduce_scatter(comm, all, data, counts, EVEN_F64, EVEN_SUM) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_broadcast(comm, data, 24, 2) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_all_to_all(comm, inputs, bytes, outputs, bytes) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  even_comm_request *request = NULL;
  if (rank == 0) {
    RANKS_EXPECT(comm, even_comm_send_begin(comm, data, 16, 1, 5, &request) == EVEN_OK);
  } else if (rank == 1) {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, all, 16, EVEN_COMM_ANY_RANK, 5, &request) == EVEN_OK);
  }
  while (rank == 1 && !even_comm_request_done(request)) { /* one is asked whether it is done, the other waited for */
    even_clock_sleep_ns(100000);
  }
  RANKS_EXPECT(comm, request == NULL || even_comm_request_wait(request, 0, NULL) == EVEN_OK);
  RANKS_EXPECT(comm, request == NULL || even_comm_request_done(request)); /* not once more */
  even_comm_request_free(request);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_record(comm, NULL, NULL) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK); /* not recorded */
  even_telemetry_close(telemetry);
  return 0;
}

static void check_rank(int rank) {
  static const struct {
    even_recorded_call call;
    uint64_t bytes;
    int dtype, op, peer;
  } expected[] = {{EVEN_RECORDED_ALL_REDUCE, 24, EVEN_F64, EVEN_MAX, -1},
                  {EVEN_RECORDED_ALL_GATHER, 72, EVEN_F64, EVEN_CALL_NONE, -1},
                  {EVEN_RECORDED_REDUCE_SCATTER, 72, EVEN_F64, EVEN_SUM, -1},
                  {EVEN_RECORDED_BROADCAST, 24, EVEN_CALL_NONE, EVEN_CALL_NONE, 2},
                  {EVEN_RECORDED_ALL_TO_ALL, 24, EVEN_CALL_NONE, EVEN_CALL_NONE, -1},
                  {EVEN_RECORDED_BARRIER, 0, EVEN_CALL_NONE, EVEN_CALL_NONE, -1},
                  {EVEN_RECORDED_BARRIER, 0, EVEN_CALL_NONE, EVEN_CALL_NONE, -1}};
  enum { COLLECTIVES = sizeof expected / sizeof expected[0] };
  even_record records[MOST_RECORDS];
  even_call_totals totals;
  size_t count = drain(records, rank, EVEN_RECORD_CALL);
  size_t seen = 0;
  int messages = 0;
  for (size_t i = 0; i < count; i++) {
    const even_call_record *call = &records[i].as.call;
    assert_int_equal(call->ranks, RANKS);
    assert_int_equal(call->member, rank);
    assert_int_equal(call->failed, 0);
    assert_true(call->start_ns > 0 && call->wait_ns <= call->duration_ns);
    if (even_call_is_message(call->call)) {
      messages++;
      assert_int_equal(call->call, rank == 0 ? EVEN_RECORDED_SEND : EVEN_RECORDED_RECEIVE);
      assert_int_equal(call->peer, rank == 0 ? 1 : 0); /* whom "any" was */
      assert_int_equal(call->tag, 5);
      assert_int_equal(call->bytes, 16);
      assert_int_equal(call->number, 1);
      continue;
    }
    assert_true(seen < COLLECTIVES);
    assert_int_equal(call->call, expected[seen].call);
    assert_int_equal(call->bytes, expected[seen].bytes);
    assert_int_equal(call->dtype, expected[seen].dtype);
    assert_int_equal(call->op, expected[seen].op);
    assert_int_equal(call->peer, expected[seen].peer);
    assert_int_equal(call->number, seen + 2); /* 1 was the group's opening, as in the flight record */
    assert_int_equal(call->group, records[0].as.call.group);
    seen++;
  }
  assert_int_equal(seen, COLLECTIVES);
  assert_int_equal(messages, rank < 2 ? 1 : 0);
  even_telemetry_reader_totals(reader, rank, &totals);
  assert_int_equal(totals.collectives, COLLECTIVES);
  assert_int_equal(totals.bytes, 24 + 72 + 72 + 24 + 24);
  assert_int_equal(totals.messages, rank < 2 ? 1 : 0);
  assert_int_equal(drain(records, rank, EVEN_RECORD_EVENT), 1);
  assert_int_equal(records[0].as.event.event, EVEN_EVENT_GROUP);
  assert_string_equal(strchr(records[0].as.event.words, ' '), " 3 test/each");
}

static void run_and_check(const ranks_setup *setup) {
  even_record records[MOST_RECORDS];
  assert_int_equal(ranks_run(setup, make_each_call, NULL, NULL), 0);
  for (int rank = 0; rank < RANKS; rank++) {
    check_rank(rank);
  }
  (void)drain(records, -1, EVEN_RECORD_CALL); /* forgets them */
}

static void each_call_is_recorded_once_on_every_rank(void **state) {
  (void)state;
  run_and_check(&three);
}

static void threads_as_ranks_record_the_same(void **state) {
  ranks_setup threads = three;
  threads.threads = true;
  (void)state;
  run_and_check(&threads);
}

static void groups_over_the_network_record_the_same(void **state) {
  static const int host_of[RANKS] = {0, 1, 1};
  ranks_setup ucx = three;
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  ucx.engine = RANKS_NETWORK;
  run_and_check(&ucx);
  assert_int_equal(close_rings(NULL), 0);
  assert_int_equal(open_rings(NULL), 0);
  ucx.engine = RANKS_HOSTS;
  ucx.host_of = host_of;
  run_and_check(&ucx); /* one group, whatever it is made of */
}

static int lose_a_rank(even_comm *comm, void *argument) {
  even_telemetry *telemetry = NULL;
  (void)argument;
  RANKS_EXPECT(comm, even_telemetry_open(ring_fd, even_comm_rank(comm), &telemetry) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_record(comm, telemetry, "test/lost") == EVEN_OK);
  if (even_comm_rank(comm) != 1) {
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST);
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST); /* the group has ended */
  }
  even_comm_close(NULL);
  return 0;
}

static void a_call_that_fails_says_so_and_does_not_count(void **state) {
  even_record records[MOST_RECORDS];
  even_call_totals totals;
  (void)state;
  assert_int_equal(ranks_run(&three, lose_a_rank, NULL, NULL), 0);
  assert_true(drain(records, 0, EVEN_RECORD_CALL) >= 1);
  assert_int_equal(records[0].as.call.failed, 1);
  assert_int_equal(records[0].as.call.number, 2);
  even_telemetry_reader_totals(reader, 0, &totals);
  assert_int_equal(totals.collectives, 0);
  assert_int_equal(drain(records, 1, EVEN_RECORD_CALL), 0);
  (void)drain(records, -1, EVEN_RECORD_CALL);
}

static void *no_memory(size_t bytes) {
  (void)bytes;
  return NULL;
}

static void want_of_memory_is_reported(void **state) {
  even_telemetry *telemetry = NULL;
  even_comm *comm = ranks_open_alone(0);
  (void)state;
  assert_non_null(comm);
  assert_int_equal(even_telemetry_open(ring_fd, 0, &telemetry), EVEN_OK);
  even_allocator_current.allocate = no_memory;
  assert_int_equal(even_comm_record(comm, telemetry, "alone"), EVEN_ERR_MEMORY);
  even_allocator_current = (even_allocator){malloc, realloc, free};
  assert_int_equal(even_comm_barrier(comm), EVEN_OK); /* the group is as it was */
  even_comm_close(comm);
  even_telemetry_close(telemetry);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(groups_over_the_network_record_the_same, open_rings, close_rings),
      cmocka_unit_test_setup_teardown(each_call_is_recorded_once_on_every_rank, open_rings, close_rings),
      cmocka_unit_test_setup_teardown(threads_as_ranks_record_the_same, open_rings, close_rings),
      cmocka_unit_test_setup_teardown(a_call_that_fails_says_so_and_does_not_count, open_rings, close_rings),
      cmocka_unit_test_setup_teardown(want_of_memory_is_reported, open_rings, close_rings),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
