/* Rings: what is written is read, once and whole, or counted as lost. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "telemetry/record.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct fixture {
  int fd;
  even_telemetry *writers[2];
  even_telemetry_reader *reader;
} fixture;

static fixture open_fixture(size_t records) {
  fixture made = {.fd = -1};
  assert_int_equal(even_telemetry_create_segment(2, records, &made.fd), EVEN_OK);
  for (int rank = 0; rank < 2; rank++) {
    assert_int_equal(even_telemetry_open(made.fd, rank, &made.writers[rank]), EVEN_OK);
  }
  assert_int_equal(even_telemetry_reader_open(made.fd, &made.reader), EVEN_OK);
  return made;
}

static void close_fixture(fixture *made) {
  even_telemetry_reader_close(made->reader);
  even_telemetry_close(made->writers[0]);
  even_telemetry_close(made->writers[1]);
  assert_int_equal(close(made->fd), 0);
}

static void write_span(even_telemetry *writer, uint32_t step) {
  const even_span_record record = {
      .step = step, .span = EVEN_SPAN_WAIT, .start_ns = step * 10U, .duration_ns = step * 3U, .bytes = ~(uint64_t)step};
  even_telemetry_span(writer, &record);
}

static void every_kind_comes_back_as_written(void **state) {
  (void)state;
  fixture made = open_fixture(0);
  even_record records[8];
  const even_step_record step = {.step = 4000000000U,
                                 .epoch = 3,
                                 .end_ns = UINT64_C(1) << 60,
                                 .duration_ns = 5,
                                 .busy_ns = 4,
                                 .samples = 7,
                                 .batch = 16,
                                 .loss = 1.25F,
                                 .predicted_seconds = NAN};
  even_event_record event = {.event = EVEN_EVENT_SHARES, .step = 9, .at_ns = 77, .value = -5};
  (void)snprintf(event.words, sizeof event.words, "%s", "012345678901234567890123456789012345678");
  write_span(made.writers[1], 12);
  even_telemetry_step(made.writers[0], &step);
  even_telemetry_event(made.writers[0], &event);
  uint64_t lost = 0;
  assert_int_equal(even_telemetry_reader_ranks(made.reader), 2);
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 8, &lost), 3);
  assert_int_equal(lost, 0);
  assert_int_equal(records[0].kind, EVEN_RECORD_STEP);
  assert_int_equal(records[0].rank, 0);
  assert_true(isnan(records[0].as.step.predicted_seconds));
  records[0].as.step.predicted_seconds = step.predicted_seconds;
  assert_memory_equal(&records[0].as.step, &step, sizeof step);
  assert_int_equal(records[1].kind, EVEN_RECORD_EVENT);
  assert_int_equal(records[1].as.event.value, -5);
  assert_int_equal(records[1].as.event.at_ns, 77);
  assert_string_equal(records[1].as.event.words, "01234567890123456789012345678901");
  assert_int_equal(records[2].rank, 1);
  assert_int_equal(records[2].as.span.span, EVEN_SPAN_WAIT);
  assert_int_equal(records[2].as.span.duration_ns, 36);
  assert_int_equal(records[2].as.span.bytes, ~UINT64_C(12));
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 8, &lost), 0);
  even_telemetry_span(NULL, &records[2].as.span);
  even_telemetry_step(NULL, &step);
  even_telemetry_event(NULL, &event);
  close_fixture(&made);
}

static void a_full_ring_keeps_the_newest_and_counts_the_rest(void **state) {
  (void)state;
  fixture made = open_fixture(20); /* rounded up to 32 */
  even_record records[64];
  uint64_t lost = 0;
  for (uint32_t i = 0; i < 100; i++) {
    write_span(made.writers[0], i);
  }
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 64, &lost), 32);
  assert_int_equal(lost, 68);
  for (uint32_t i = 0; i < 32; i++) {
    assert_int_equal(records[i].as.span.step, 68 + i);
  }
  close_fixture(&made);
}

static void a_small_limit_serves_all_ranks_in_turn(void **state) {
  (void)state;
  fixture made = open_fixture(64);
  even_record record;
  unsigned seen[2] = {0, 0};
  for (uint32_t i = 0; i < 10; i++) {
    write_span(made.writers[0], i);
    write_span(made.writers[1], i);
  }
  for (int i = 0; i < 10; i++) {
    assert_int_equal(even_telemetry_reader_drain(made.reader, &record, 1, NULL), 1);
    assert_int_equal(record.as.span.step, seen[record.rank]++);
  }
  assert_int_equal(seen[0], 5);
  assert_int_equal(seen[1], 5);
  close_fixture(&made);
}

/* A writer that died between claiming a slot and publishing it must not be read, and must not be written into. */
/* A writer that claimed the next slot and began its record, then nothing. */
static void begin_a_record(even_ring *ring) {
  uint64_t ticket = atomic_fetch_add(&ring->next_ticket, 1);
  atomic_store(&ring->slots[ticket & 15].sequence, 2 * ticket + 1);
}

static void a_half_written_slot_is_neither_read_nor_reused(void **state) {
  (void)state;
  fixture made = open_fixture(16);
  even_shared_memory memory;
  even_ring_header facts;
  even_record records[64];
  uint64_t lost = 0;
  assert_int_equal(even_ring_map(made.fd, &memory, &facts), EVEN_OK);
  even_ring *ring = even_ring_of_rank(&memory, &facts, 0);
  write_span(made.writers[0], 0);
  begin_a_record(ring);
  write_span(made.writers[0], 2);
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 64, &lost), 1);
  assert_int_equal(lost, 0); /* it may still come */
  for (uint32_t i = 3; i < 19; i++) {
    write_span(made.writers[0], i); /* a lap: 17 would lie in the dead slot */
  }
  size_t count = even_telemetry_reader_drain(made.reader, records, 64, &lost);
  assert_int_equal(records[0].as.span.step, 3);
  assert_int_equal(records[count - 1].as.span.step, 16); /* 17 is waited for */
  assert_int_equal(lost, 2);                             /* 1 and 2 were overtaken */
  assert_int_equal(atomic_load(&ring->slots[1].sequence), 3);
  even_shared_memory_close(&memory);
  close_fixture(&made);
}

static void nobody_waits_for_a_writer_that_ended(void **state) {
  (void)state;
  fixture made = open_fixture(16);
  even_shared_memory memory;
  even_ring_header facts;
  even_record records[64];
  uint64_t lost = 0;
  assert_int_equal(even_ring_map(made.fd, &memory, &facts), EVEN_OK);
  even_ring *ring = even_ring_of_rank(&memory, &facts, 0);
  begin_a_record(ring); /* killed in the middle of it */
  write_span(made.writers[0], 1);
  even_telemetry_reader_writers(made.reader, false);
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 64, &lost), 1);
  assert_int_equal(records[0].as.span.step, 1);
  assert_int_equal(lost, 1);
  begin_a_record(ring);
  even_telemetry_reader_writers(made.reader, true);
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 64, &lost),
                   0); /* the next attempt's: it may come */
  assert_int_equal(lost, 1);
  even_shared_memory_close(&memory);
  close_fixture(&made);
}

static void nonsense_in_the_ring_is_counted_not_returned(void **state) {
  (void)state;
  fixture made = open_fixture(16);
  even_shared_memory memory;
  even_ring_header facts;
  even_record records[16];
  uint64_t lost = 0;
  assert_int_equal(even_ring_map(made.fd, &memory, &facts), EVEN_OK);
  even_ring *ring = even_ring_of_rank(&memory, &facts, 0);
  for (uint32_t i = 0; i < 3; i++) {
    write_span(made.writers[0], i);
  }
  atomic_store(&ring->slots[1].payload[0], UINT64_MAX);
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 16, &lost), 2);
  assert_int_equal(lost, 1);
  atomic_store(&ring->next_ticket, 0); /* set back by a wild write: nothing new, no loop */
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 16, &lost), 0);
  assert_int_equal(lost, 1);
  even_shared_memory_close(&memory);
  close_fixture(&made);
}

enum { WRITERS = 4, RECORDS_EACH = 500000 };

typedef struct producer {
  even_telemetry *telemetry;
  uint32_t first;
} producer;

static void *produce(void *argument) {
  const producer *own = argument;
  for (uint32_t i = 0; i < RECORDS_EACH; i++) {
    write_span(own->telemetry, own->first + i);
  }
  return NULL;
}

/* Four threads lap a small ring while it is read: each record is whole, each writer's come in order, and read plus lost
 * makes all. */
static void concurrent_writers_lose_records_but_never_mix_them(void **state) {
  (void)state;
  fixture made = open_fixture(16);
  pthread_t threads[WRITERS];
  producer producers[WRITERS];
  even_record records[128];
  uint32_t next[WRITERS];
  uint64_t lost = 0;
  uint64_t seen = 0;
  for (uint32_t i = 0; i < WRITERS; i++) {
    producers[i] = (producer){.telemetry = made.writers[1], .first = i * RECORDS_EACH};
    next[i] = 0;
    assert_int_equal(pthread_create(&threads[i], NULL, produce, &producers[i]), 0);
  }
  bool running = true;
  while (seen + lost < (uint64_t)WRITERS * RECORDS_EACH) {
    size_t count = even_telemetry_reader_drain(made.reader, records, 128, &lost);
    for (size_t i = 0; i < count; i++) {
      const even_span_record *span = &records[i].as.span;
      uint32_t writer = span->step / RECORDS_EACH;
      assert_true(writer < WRITERS);
      assert_int_equal(span->start_ns, span->step * 10U);
      assert_int_equal(span->duration_ns, span->step * 3U);
      assert_int_equal(span->bytes, ~(uint64_t)span->step);
      assert_true(span->step % RECORDS_EACH >= next[writer]);
      next[writer] = span->step % RECORDS_EACH + 1;
    }
    seen += count;
    if (count == 0 && running) {
      for (int i = 0; i < WRITERS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
      }
      running = false;
    }
  }
  assert_false(running && seen + lost > (uint64_t)WRITERS * RECORDS_EACH);
  if (running) {
    for (int i = 0; i < WRITERS; i++) {
      assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
  }
  assert_true(seen > 0);
  assert_int_equal(seen + lost, (uint64_t)WRITERS * RECORDS_EACH);
  close_fixture(&made);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_kind_comes_back_as_written),
      cmocka_unit_test(a_full_ring_keeps_the_newest_and_counts_the_rest),
      cmocka_unit_test(a_small_limit_serves_all_ranks_in_turn),
      cmocka_unit_test(a_half_written_slot_is_neither_read_nor_reused),
      cmocka_unit_test(nobody_waits_for_a_writer_that_ended),
      cmocka_unit_test(nonsense_in_the_ring_is_counted_not_returned),
      cmocka_unit_test(concurrent_writers_lose_records_but_never_mix_them),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
