/* What others see of device calls: the flight record, and telemetry's records with the GPU's own times. */
#include "comm/device_members.h"
#include "comm/device_ranks.h"
#include "comm/fake_gpu.h"
#include "os/clock.h"

#include <evenstep/telemetry.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 2, MOST_RECORDS = 256 };

static int ring_fd = -1;
static even_telemetry_reader *reader;

static int begin(void **state) {
  if (device_test_begin(state) != 0 || even_telemetry_create_segment(RANKS, 0, &ring_fd) != EVEN_OK ||
      even_telemetry_reader_open(ring_fd, &reader) != EVEN_OK) {
    return 1;
  }
  even_telemetry_reader_want_calls(reader, true);
  return 0;
}

static int end(void **state) {
  even_telemetry_reader_close(reader);
  return close(ring_fd) + device_test_end(state);
}

static int run(ranks_body *body, void *argument) {
  const ranks_setup setup = {.ranks = RANKS, .arena_bytes = 4096, .timeout_seconds = 120, .spin = -1, .threads = true};
  return ranks_run(&setup, body, argument, NULL);
}

static int make_each_call(device_member *at) {
  static float memory[RANKS][6][12];
  float(*data)[12] = memory[at->rank];
  const size_t counts[RANKS] = {1, 2};
  const size_t bytes[RANKS] = {8, 8};
  const void *inputs[RANKS] = {data[0], data[1]};
  void *outputs[RANKS] = {data[2], data[3]};
  void *s = at->stream;
  even_device_comm *comm = at->comm;
  RANKS_EXPECT(at->host,
               even_device_comm_all_reduce(comm, data[0], data[0], 3, EVEN_F32, EVEN_MAX, NULL, s) == EVEN_OK);
  RANKS_EXPECT(at->host, even_device_comm_all_reduce(comm, NULL, data[0], 3, EVEN_F32, EVEN_MAX, NULL, s) ==
                             EVEN_ERR_ARGUMENT); /* no call */
  RANKS_EXPECT(at->host, even_device_comm_reduce(comm, data[0], data[1], 3, EVEN_F32, EVEN_SUM, NULL, 1, s) == EVEN_OK);
  RANKS_EXPECT(at->host,
               even_device_comm_reduce_scatter(comm, data[0], data[1], counts, EVEN_F32, EVEN_SUM, NULL, s) == EVEN_OK);
  RANKS_EXPECT(at->host, even_device_comm_all_gather(comm, data[0], data[1], bytes, s) == EVEN_OK);
  RANKS_EXPECT(at->host, even_device_comm_broadcast(comm, data[0], 24, 1, s) == EVEN_OK);
  RANKS_EXPECT(at->host, even_device_comm_all_to_all(comm, inputs, bytes, outputs, bytes, s) == EVEN_OK);
  RANKS_EXPECT(at->host, even_device_comm_gather(comm, data[0], outputs, bytes, 0, s) == EVEN_OK);
  RANKS_EXPECT(at->host, even_device_comm_scatter(comm, inputs, data[4], bytes, 0, s) == EVEN_OK);
  RANKS_EXPECT(at->host, even_device_comm_barrier(comm, s) == EVEN_OK);
  RANKS_EXPECT(at->host, (at->rank == 0 ? even_device_comm_send(comm, data[0], 16, 1, s)
                                        : even_device_comm_receive(comm, data[5], 16, 0, s)) == EVEN_OK);
  return 0;
}

/* Until the last call is seen to be done; the watcher sees it, or who polls. */
static int await_done(const device_member *at, uint64_t number) {
  even_flight_call call = {0};
  fake_gpu_wait(at->stream, at->rank);
  do {
    RANKS_EXPECT(at->host, even_device_comm_poll(at->comm) == EVEN_OK);
  } while (even_device_comm_flight(at->comm, at->rank, &call, 1) != 1 || call.number != number ||
           call.state == EVEN_FLIGHT_BEGUN);
  return 0;
}

static int be_recorded(even_comm *host, void *argument) {
  uint64_t *began = argument;
  device_member at;
  even_telemetry *telemetry = NULL;
  RANKS_EXPECT(host, even_telemetry_open(ring_fd, even_comm_rank(host), &telemetry) == EVEN_OK);
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0);
  RANKS_EXPECT(host, even_device_comm_record(at.comm, telemetry, NULL) == EVEN_ERR_ARGUMENT);
  RANKS_EXPECT(host, even_device_comm_record(at.comm, telemetry, "test/gpu") == EVEN_OK);
  if (at.rank == 0) {
    *began = even_clock_ns();
  }
  RANKS_EXPECT(host, even_comm_barrier(host) == EVEN_OK && make_each_call(&at) == 0 && await_done(&at, 9) == 0);
  RANKS_EXPECT(host, device_member_end(&at) == EVEN_OK);
  even_telemetry_close(telemetry);
  return 0;
}

static void check_rank(int rank, const even_record *records, size_t count, uint64_t began_ns) {
  static const struct {
    even_recorded_call call;
    uint64_t bytes;
    int op, peer;
  } expected[] = {{EVEN_RECORDED_ALL_REDUCE, 12, EVEN_MAX, -1},     {EVEN_RECORDED_REDUCE, 12, EVEN_SUM, 1},
                  {EVEN_RECORDED_REDUCE_SCATTER, 12, EVEN_SUM, -1}, {EVEN_RECORDED_ALL_GATHER, 16, EVEN_CALL_NONE, -1},
                  {EVEN_RECORDED_BROADCAST, 24, EVEN_CALL_NONE, 1}, {EVEN_RECORDED_ALL_TO_ALL, 16, EVEN_CALL_NONE, -1},
                  {EVEN_RECORDED_GATHER, 16, EVEN_CALL_NONE, 0},    {EVEN_RECORDED_SCATTER, 16, EVEN_CALL_NONE, 0},
                  {EVEN_RECORDED_BARRIER, 0, EVEN_CALL_NONE, -1}};
  size_t found = 0;
  uint64_t last_ns = began_ns;
  for (size_t i = 0; i < count; i++) {
    const even_call_record *call = &records[i].as.call;
    if (records[i].kind != EVEN_RECORD_CALL || (int)records[i].rank != rank) {
      continue;
    }
    assert_true(call->failed == 0 && call->ranks == RANKS && call->member == rank && call->row == EVEN_ROW_GPU + rank);
    assert_true(call->start_ns + 1000000 >= last_ns && call->start_ns + call->duration_ns <= even_clock_ns());
    last_ns = call->start_ns;
    if (found < sizeof expected / sizeof expected[0]) {
      assert_int_equal(call->call, expected[found].call);
      assert_int_equal(call->bytes, expected[found].bytes);
      assert_int_equal(call->op, expected[found].op);
      assert_int_equal(call->peer, expected[found].peer);
      assert_int_equal(call->number, found + 1);
    } else {
      assert_int_equal(call->call, rank == 0 ? EVEN_RECORDED_SEND : EVEN_RECORDED_RECEIVE);
      assert_true(call->bytes == 16 && call->peer == 1 - rank && call->number == 1);
    }
    found++;
  }
  assert_int_equal(found, sizeof expected / sizeof expected[0] + 1);
}

static void each_call_is_recorded_once(void **state) {
  even_record records[MOST_RECORDS];
  even_call_totals totals;
  uint64_t began_ns = 0;
  (void)state;
  assert_int_equal(run(be_recorded, &began_ns), 0);
  size_t count = even_telemetry_reader_drain(reader, records, MOST_RECORDS, NULL);
  for (int rank = 0; rank < RANKS; rank++) {
    check_rank(rank, records, count, began_ns);
    even_telemetry_reader_totals(reader, rank, &totals);
    assert_true(totals.collectives == 9 && totals.messages == 1 && totals.message_bytes == 16);
  }
}

/* ---- the flight record ---- */

static int be_in_the_record(even_comm *host, void *argument) {
  even_flight_call calls[EVEN_FLIGHT_CALLS];
  device_member at;
  (void)argument;
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0);
  even_device_comm_set_site(at.comm, "train.c:41");
  for (size_t i = 0; i < 19; i++) {
    RANKS_EXPECT(host, device_member_sum(&at, 1 + i) == EVEN_OK);
  }
  RANKS_EXPECT(host, even_device_comm_barrier(at.comm, at.stream) == EVEN_OK && await_done(&at, 20) == 0);
  RANKS_EXPECT(host, even_comm_barrier(host) == EVEN_OK);
  for (int rank = 0; rank < RANKS; rank++) {
    RANKS_EXPECT(host, even_device_comm_flight(at.comm, rank, calls, EVEN_FLIGHT_CALLS) == EVEN_FLIGHT_CALLS);
    for (size_t i = 0; i < EVEN_FLIGHT_CALLS; i++) {
      RANKS_EXPECT(host, calls[i].number == 5 + i && calls[i].state == EVEN_FLIGHT_DONE && calls[i].ended_ns != 0);
      RANKS_EXPECT(host, strcmp(calls[i].site, "train.c:41") == 0);
    }
    RANKS_EXPECT(host, strcmp(calls[14].call, "all_reduce of 19 F32 elements with SUM") == 0);
    RANKS_EXPECT(host, strcmp(calls[15].call, "barrier") == 0);
  }
  RANKS_EXPECT(host, even_device_comm_flight(at.comm, RANKS, calls, 1) == 0);
  RANKS_EXPECT(host, even_comm_barrier(host) == EVEN_OK);
  return device_member_end(&at) != EVEN_OK;
}

static void all_ranks_see_the_last_calls(void **state) {
  (void)state;
  assert_int_equal(run(be_in_the_record, NULL), 0);
}

/* A call that failed is in both as such. */
static int fail_one(even_comm *host, void *argument) {
  even_flight_call call = {0};
  even_telemetry *telemetry = NULL;
  device_member at;
  (void)argument;
  RANKS_EXPECT(host, even_telemetry_open(ring_fd, even_comm_rank(host), &telemetry) == EVEN_OK);
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0);
  RANKS_EXPECT(host, even_device_comm_record(at.comm, telemetry, "test/fails") == EVEN_OK);
  RANKS_EXPECT(host, even_comm_barrier(host) == EVEN_OK); /* a failure ends those that still open, too */
  if (at.rank == 0) {
    fake_gpu_fail("ncclAllReduce", 1, 2);
    RANKS_EXPECT(host, device_member_sum(&at, 4) == EVEN_ERR_SYSTEM);
    RANKS_EXPECT(host, even_device_comm_flight(at.comm, 0, &call, 1) == 1 && call.state == EVEN_FLIGHT_FAILED);
  }
  RANKS_EXPECT(host, even_comm_barrier(host) == EVEN_OK);
  if (at.rank == 1) { /* and the others end with it, instead of waiting */
    RANKS_EXPECT(host, device_member_sum(&at, 4) == EVEN_OK);
    RANKS_EXPECT(host, device_member_failure(&at) == EVEN_ERR_SYSTEM && even_error_last()->rank == 0);
  }
  (void)!device_member_end(&at);
  even_telemetry_close(telemetry);
  return 0;
}

static void a_failure_is_recorded_and_heard_of(void **state) {
  even_record records[MOST_RECORDS];
  size_t failed = 0;
  (void)state;
  assert_int_equal(run(fail_one, NULL), 0);
  size_t count = even_telemetry_reader_drain(reader, records, MOST_RECORDS, NULL);
  for (size_t i = 0; i < count; i++) {
    failed += records[i].kind == EVEN_RECORD_CALL && records[i].as.call.failed != 0;
  }
  assert_int_equal(failed, 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(each_call_is_recorded_once, begin, end),
      cmocka_unit_test_setup_teardown(all_ranks_see_the_last_calls, begin, end),
      cmocka_unit_test_setup_teardown(a_failure_is_recorded_and_heard_of, begin, end),
  };
  return cmocka_run_group_tests_name("records of device calls", tests, NULL, NULL);
}
