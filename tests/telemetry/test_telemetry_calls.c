/* Calls in the rings: counted always, recorded where somebody wants it, and as they were. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/json_check.h"
#include "telemetry/record.h"
#include "telemetry/trace.h"

#include <evenstep/types.h>

#include <pthread.h>
#include <string.h>
#include <unistd.h>

typedef struct fixture {
  int fd;
  even_telemetry *writer;
  even_telemetry_reader *reader;
} fixture;

static fixture open_fixture(size_t records, bool wanted) {
  fixture made = {.fd = -1};
  assert_int_equal(even_telemetry_create_segment(2, records, &made.fd), EVEN_OK);
  assert_int_equal(even_telemetry_open(made.fd, 1, &made.writer), EVEN_OK);
  assert_int_equal(even_telemetry_reader_open(made.fd, &made.reader), EVEN_OK);
  even_telemetry_reader_want_calls(made.reader, wanted);
  return made;
}

static void close_fixture(fixture *made) {
  even_telemetry_reader_close(made->reader);
  even_telemetry_close(made->writer);
  assert_int_equal(close(made->fd), 0);
}

static const even_call_record reduction = {.step = 41,
                                           .call = EVEN_RECORDED_ALL_REDUCE,
                                           .dtype = EVEN_BF16,
                                           .op = EVEN_AVG,
                                           .row = 255,
                                           .ranks = 4096,
                                           .member = 4095,
                                           .peer = -1,
                                           .group = 0xfedcba98U,
                                           .number = 0xffffffffU,
                                           .start_ns = UINT64_C(1) << 60,
                                           .duration_ns = 1000,
                                           .wait_ns = 400,
                                           .bytes = UINT64_C(1) << 40};
static const even_call_record message = {.step = 41,
                                         .call = EVEN_RECORDED_RECEIVE,
                                         .dtype = EVEN_CALL_NONE,
                                         .op = EVEN_CALL_NONE,
                                         .row = 3,
                                         .failed = 1,
                                         .ranks = 3,
                                         .member = 2,
                                         .peer = 1,
                                         .group = 7,
                                         .number = 9,
                                         .tag = 0x80000001U,
                                         .start_ns = 5,
                                         .duration_ns = 6,
                                         .wait_ns = (UINT64_C(1) << 47) - 1,
                                         .bytes = 11};

static void calls_come_back_as_written(void **state) {
  (void)state;
  fixture made = open_fixture(0, true);
  even_record records[4];
  uint64_t lost = 0;
  assert_true(even_telemetry_wants_calls(made.writer));
  even_telemetry_step(made.writer, &(even_step_record){.step = 40});
  even_telemetry_call(made.writer, &reduction);
  even_telemetry_call(made.writer, &message);
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 4, &lost), 3);
  assert_int_equal(lost, 0);
  assert_int_equal(records[1].kind, EVEN_RECORD_CALL);
  assert_int_equal(records[1].rank, 1);
  assert_memory_equal(&records[1].as.call, &reduction, sizeof reduction);
  assert_memory_equal(&records[2].as.call, &message, sizeof message);
  close_fixture(&made);
}

static void the_agent_asks_all_writers_to_end(void **state) {
  (void)state;
  fixture made = open_fixture(0, true);
  assert_false(even_telemetry_asks_end(made.writer));
  assert_false(even_telemetry_asks_end(NULL));
  even_telemetry_reader_ask_end(made.reader, true);
  assert_true(even_telemetry_asks_end(made.writer));
  assert_true(even_telemetry_wants_calls(made.writer));
  even_telemetry_reader_ask_end(made.reader, false);
  assert_false(even_telemetry_asks_end(made.writer));
  close_fixture(&made);
}

static void calls_are_counted_also_where_nobody_wants_records(void **state) {
  (void)state;
  fixture made = open_fixture(0, false);
  even_record records[4];
  even_call_totals totals;
  even_call_record call = reduction;
  call.ranks = 4;
  call.bytes = 1000;
  assert_false(even_telemetry_wants_calls(made.writer));
  assert_false(even_telemetry_wants_calls(NULL));
  even_telemetry_call(NULL, &call);
  even_telemetry_call(made.writer, &call);
  call.call = EVEN_RECORDED_BROADCAST;
  even_telemetry_call(made.writer, &call);
  call.failed = 1;
  even_telemetry_call(made.writer, &call); /* does not count */
  call = message;
  call.failed = 0;
  even_telemetry_call(made.writer, &call);
  even_telemetry_pause(made.writer, true);
  even_telemetry_call(made.writer, &call);
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 4, NULL), 0);
  even_telemetry_reader_totals(made.reader, 1, &totals);
  assert_int_equal(totals.collectives, 2);
  assert_int_equal(totals.bytes, 2000);
  assert_int_equal(totals.bus_bytes, 1500 + 1000);
  assert_int_equal(totals.ns, 2000);
  assert_int_equal(totals.wait_ns, 800);
  assert_int_equal(totals.messages, 1);
  assert_int_equal(totals.message_bytes, 11);
  even_telemetry_reader_totals(made.reader, 0, &totals);
  assert_int_equal(totals.collectives, 0);
  even_telemetry_reader_totals(made.reader, 2, &totals); /* no such rank */
  assert_int_equal(totals.collectives, 0);
  close_fixture(&made);
}

static void a_full_ring_keeps_the_newest_calls_and_counts_the_rest(void **state) {
  (void)state;
  fixture made = open_fixture(16, true);
  even_record records[32];
  even_call_totals totals;
  uint64_t lost = 0;
  for (uint32_t i = 0; i < 100; i++) {
    even_call_record call = reduction;
    call.number = i;
    even_telemetry_call(made.writer, &call);
  }
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 32, &lost), 16);
  assert_int_equal(lost, 84);
  assert_int_equal(records[0].as.call.number, 84);
  even_telemetry_reader_totals(made.reader, 1, &totals);
  assert_int_equal(totals.collectives, 100);
  close_fixture(&made);
}

static void nonsense_is_no_call(void **state) {
  (void)state;
  fixture made = open_fixture(16, true);
  even_shared_memory memory;
  even_ring_header facts;
  even_record records[4];
  uint64_t lost = 0;
  assert_int_equal(even_ring_map(made.fd, &memory, &facts), EVEN_OK);
  even_ring *ring = even_ring_of_rank(&memory, &facts, 1);
  even_telemetry_call(made.writer, &reduction);
  even_telemetry_call(made.writer, &reduction);
  uint64_t head = atomic_load(&ring->slots[0].payload[0]);
  atomic_store(&ring->slots[0].payload[0], (head & ~(UINT64_C(0xff) << 40)) | ((uint64_t)EVEN_RECORDED_COUNT << 40));
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 4, &lost), 1);
  assert_int_equal(lost, 1);
  even_shared_memory_close(&memory);
  close_fixture(&made);
}

/* The figures of nccl-tests' doc/PERFORMANCE.md. */
static void bus_factors_are_those_of_nccl_tests(void **state) {
  (void)state;
  assert_true(even_call_bus_factor(EVEN_RECORDED_ALL_REDUCE, 2) == 1.0);
  assert_true(even_call_bus_factor(EVEN_RECORDED_ALL_REDUCE, 8) == 1.75);
  assert_true(even_call_bus_factor(EVEN_RECORDED_ALL_REDUCE, 1) == 0.0);
  assert_true(even_call_bus_factor(EVEN_RECORDED_REDUCE_SCATTER, 4) == 0.75);
  assert_true(even_call_bus_factor(EVEN_RECORDED_ALL_GATHER, 4) == 0.75);
  assert_true(even_call_bus_factor(EVEN_RECORDED_ALL_TO_ALL, 4) == 0.75);
  assert_true(even_call_bus_factor(EVEN_RECORDED_BROADCAST, 4) == 1.0);
  assert_true(even_call_bus_factor(EVEN_RECORDED_SEND, 4) == 1.0);
}

static void *ask_row(void *out) {
  *(int *)out = even_telemetry_row();
  assert_int_equal(even_telemetry_row(), *(int *)out);
  return NULL;
}

static void each_thread_has_a_row(void **state) {
  (void)state;
  pthread_t threads[2];
  int rows[3] = {0, 0, 0};
  for (int i = 0; i < 2; i++) {
    assert_int_equal(pthread_create(&threads[i], NULL, ask_row, &rows[i]), 0);
    assert_int_equal(pthread_join(threads[i], NULL), 0);
  }
  rows[2] = even_telemetry_row();
  assert_true(rows[0] >= EVEN_ROW_FIRST && rows[1] != rows[0] && rows[2] != rows[0] && rows[2] != rows[1]);
  even_telemetry_set_row(EVEN_ROW_ENGINE);
  assert_int_equal(even_telemetry_row(), EVEN_ROW_ENGINE);
}

static void expect(const even_text *text, const char *piece) {
  if (strstr(even_text_string(text), piece) == NULL) {
    fail_msg("%s is not in %s", piece, even_text_string(text));
  }
}

/* {"events":[…]} of one call. */
static void write_event(even_text *text, uint64_t origin_ns, const even_trace_call *call) {
  even_text_clear(text);
  even_json json = even_json_begin(text, 0);
  even_json_object(&json, NULL);
  even_json_array(&json, "events");
  even_trace_call_write(&json, origin_ns, call);
  even_json_array_end(&json);
  even_json_object_end(&json);
  assert_int_equal(even_text_status(text), EVEN_OK);
  assert_int_equal(even_json_check_object("the event", even_text_string(text)), EVEN_OK);
}

static void a_call_becomes_an_event(void **state) {
  (void)state;
  even_text text = EVEN_TEXT_EMPTY;
  even_trace_call call = {.rank = 3, .record = reduction, .dtype = "BF16", .op = "AVG", .group = "shm 4 dist/a \"b\""};
  call.record.ranks = 2;
  call.record.start_ns = 5000;
  call.record.bytes = 1200;
  call.record.row = EVEN_ROW_FIRST;
  write_event(&text, 2000, &call);
  expect(&text, "\"name\":\"all_reduce\",\"ph\":\"X\",\"pid\":3,\"tid\":19,\"cat\":\"collective\",\"ts\":3,\"dur\":1,");
  expect(&text, "\"group\":\"dist/a \\\"b\\\"\",\"engine\":\"shm\",\"number\":4294967295,\"ranks\":2,\"bytes\":1200");
  expect(&text, "\"dtype\":\"BF16\",\"op\":\"AVG\",\"waited_us\":0.4,\"algbw_GBps\":2,\"busbw_GBps\":2,\"step\":41");
  call.arrived_ns = 5200; /* the others' times tell more than the wait that this rank counted */
  call.drawn = true;
  call.arrow = 26;
  call.group = NULL;
  write_event(&text, 2000, &call);
  expect(&text, "\"group\":\"fedcba98\"");
  expect(&text, "\"busbw_GBps\":1.5");
  expect(&text,
         "{\"name\":\"came "
         "last\",\"ph\":\"f\",\"pid\":3,\"tid\":19,\"cat\":\"arrow\",\"id\":\"0x1a\",\"ts\":4,\"bp\":\"e\"}");
  call = (even_trace_call){.rank = 1, .record = message};
  write_event(&text, 0, &call);
  expect(&text,
         "{\"name\":\"receive\",\"ph\":\"b\",\"pid\":1,\"tid\":19,\"cat\":\"message\",\"id\":\"1.7.9\",\"ts\":0.005,");
  expect(&text, "\"peer\":1,\"tag\":2147483649,");
  expect(&text, "\"failed\":true");
  expect(&text,
         "{\"name\":\"receive\",\"ph\":\"e\",\"pid\":1,\"tid\":19,\"cat\":\"message\",\"id\":\"1.7.9\",\"ts\":0.011}");
  even_text_free(&text);
}

static void names_and_numbers_agree(void **state) {
  (void)state;
  for (int call = 1; call < EVEN_RECORDED_COUNT; call++) {
    assert_int_equal(even_call_number(even_call_name(call)), call);
  }
  assert_int_equal(even_call_number("opening"), 0);
  assert_string_equal(even_call_name(EVEN_RECORDED_COUNT), "?");
  assert_string_equal(even_dtype_name(EVEN_F16), "F16");
  assert_string_equal(even_op_name(EVEN_BXOR), "BXOR");
  assert_string_equal(even_dtype_name(77), "?");
  assert_string_equal(even_op_name(77), "?");
  assert_null(even_dtype_name(EVEN_CALL_NONE));
  assert_null(even_op_name(EVEN_CALL_NONE));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(calls_come_back_as_written),
      cmocka_unit_test(the_agent_asks_all_writers_to_end),
      cmocka_unit_test(calls_are_counted_also_where_nobody_wants_records),
      cmocka_unit_test(a_full_ring_keeps_the_newest_calls_and_counts_the_rest),
      cmocka_unit_test(nonsense_is_no_call),
      cmocka_unit_test(bus_factors_are_those_of_nccl_tests),
      cmocka_unit_test(each_thread_has_a_row),
      cmocka_unit_test(a_call_becomes_an_event),
      cmocka_unit_test(names_and_numbers_agree),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
