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
  assert_string_equal(records[1].as.event.words, "012345678901234567890123456789012345678");
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

/* `letters` x's. */
static void long_name(size_t letters, char out[EVEN_EVENT_WORDS_BYTES]) {
  memset(out, 0, EVEN_EVENT_WORDS_BYTES);
  memset(out, 'x', letters);
}

static void write_scalar(even_telemetry *writer, uint32_t step, size_t letters, double number) {
  even_event_record record = {.event = EVEN_EVENT_SCALAR, .step = step, .at_ns = step, .number = number};
  char name[EVEN_EVENT_WORDS_BYTES];
  long_name(letters, name);
  even_event_record_words(&record, name);
  even_telemetry_event(writer, &record);
}

static void a_name_of_any_length_keeps_its_number(void **state) {
  (void)state;
  const size_t lengths[] = {0, 1, 32, 33, 80, 81, EVEN_EVENT_WORDS_BYTES - 1};
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    fixture made = open_fixture(16);
    even_record records[4];
    uint64_t lost = 0;
    char name[EVEN_EVENT_WORDS_BYTES];
    long_name(lengths[i], name);
    write_scalar(made.writers[0], 7, lengths[i], 23.456789012345678);
    write_span(made.writers[0], 8);
    assert_int_equal(even_telemetry_reader_drain(made.reader, records, 4, &lost), 2);
    assert_int_equal(lost, 0);
    assert_int_equal(records[0].kind, EVEN_RECORD_EVENT);
    assert_int_equal(records[0].as.event.event, EVEN_EVENT_SCALAR);
    assert_int_equal(records[0].as.event.step, 7);
    assert_true(records[0].as.event.number == 23.456789012345678);
    assert_string_equal(records[0].as.event.words, name);
    assert_int_equal(records[1].as.span.step, 8);
    close_fixture(&made);
  }
}

static void words_that_do_not_fit_end_whole(void **state) {
  (void)state;
  even_event_record record = {.event = EVEN_EVENT_SHARES};
  char list[1024] = "";
  char fits[EVEN_EVENT_WORDS_BYTES] = "";
  (void)snprintf(list, sizeof list, "7");
  for (int rank = 1; rank < 30; rank++) { /* 117 bytes */
    (void)snprintf(list + strlen(list), sizeof list - strlen(list), ",%d", 100 + rank);
  }
  even_event_record_words(&record, list);
  assert_string_equal(record.words, list);
  (void)snprintf(fits, sizeof fits, "%s,130,…", list);
  for (int rank = 30; rank < 200; rank++) {
    (void)snprintf(list + strlen(list), sizeof list - strlen(list), ",%d", 100 + rank);
  }
  even_event_record_words(&record, list);
  assert_string_equal(record.words, fits);
  record.event = EVEN_EVENT_MESSAGE;
  long_name(EVEN_EVENT_WORDS_BYTES - 2, list);
  memcpy(list + EVEN_EVENT_WORDS_BYTES - 2, "é", sizeof "é"); /* its second byte does not fit */
  even_event_record_words(&record, list);
  assert_int_equal(strlen(record.words), EVEN_EVENT_WORDS_BYTES - 2);
  even_event_record_words(&record, "short");
  assert_string_equal(record.words, "short");
}

static void a_record_of_several_slots_comes_whole_or_not_at_all(void **state) {
  (void)state;
  fixture made = open_fixture(16);
  even_shared_memory memory;
  even_ring_header facts;
  even_record records[64];
  uint64_t lost = 0;
  assert_int_equal(even_ring_map(made.fd, &memory, &facts), EVEN_OK);
  even_ring *ring = even_ring_of_rank(&memory, &facts, 0);
  write_scalar(made.writers[0], 1, 100, 1.5); /* slots 0, 1 and 2 */
  uint64_t kept = atomic_load(&ring->slots[1].sequence);
  atomic_store(&ring->slots[1].sequence, 3); /* its second one is still being written */
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 64, &lost), 0);
  atomic_store(&ring->slots[1].sequence, kept);
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 64, &lost), 1);
  assert_int_equal(strlen(records[0].as.event.words), 100);
  assert_int_equal(lost, 0);
  write_scalar(made.writers[0], 2, 100, 1.5);
  write_span(made.writers[0], 3);
  atomic_store(&ring->slots[4].payload[0], UINT64_MAX); /* a wild write into its second slot */
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 64, &lost), 1);
  assert_int_equal(records[0].as.span.step, 3);
  assert_int_equal(lost, 3);
  write_scalar(made.writers[0], 4, 100, 1.5);
  for (uint32_t i = 5; i < 20; i++) { /* 15 more: its first two slots are overwritten */
    write_span(made.writers[0], i);
  }
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 64, &lost), 15);
  assert_int_equal(records[0].as.span.step, 5);
  assert_int_equal(lost, 6);
  even_shared_memory_close(&memory);
  close_fixture(&made);
}

static void a_paused_handle_writes_nothing(void **state) {
  (void)state;
  fixture made = open_fixture(16);
  even_record records[4];
  uint64_t lost = 0;
  even_telemetry_pause(NULL, true);
  even_telemetry_pause(made.writers[0], true);
  write_span(made.writers[0], 1);
  write_scalar(made.writers[0], 1, 100, 1);
  even_telemetry_step(made.writers[0], &(even_step_record){.step = 1});
  write_span(made.writers[1], 2); /* another handle */
  even_telemetry_pause(made.writers[0], false);
  write_span(made.writers[0], 3);
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 4, &lost), 2);
  assert_int_equal(records[0].as.span.step, 3);
  assert_int_equal(records[1].as.span.step, 2);
  assert_int_equal(lost, 0);
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

/* A writer that claimed the next slot and began its record, then nothing. */
static void begin_a_record(even_ring *ring) {
  uint64_t ticket = atomic_fetch_add(&ring->next_ticket, 1);
  atomic_store(&ring->slots[ticket & 15].sequence, 2 * ticket + 1);
}

/* A writer that died between claiming a slot and publishing it must not be read, and must not be written into. */
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

/* Of an agent that was killed, say. */
static void another_reader_goes_on_where_one_stood(void **state) {
  (void)state;
  fixture made = open_fixture(16);
  even_telemetry_reader *later = NULL;
  even_record records[64];
  uint64_t lost = 0;
  even_event_record event = {.event = EVEN_EVENT_MESSAGE, .step = 4};
  even_event_record_words(&event, "of several slots, so that a ring holds fewer of these");
  assert_int_equal(even_telemetry_reader_place(made.reader, 0), 0);
  for (uint32_t i = 0; i < 4; i++) {
    write_span(made.writers[0], i);
  }
  even_telemetry_event(made.writers[0], &event);
  write_span(made.writers[0], 5);
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 4, &lost), 4);
  assert_int_equal(even_telemetry_reader_place(made.reader, 0), 4);
  assert_int_equal(even_telemetry_reader_place(made.reader, 1), 0);
  assert_int_equal(even_telemetry_reader_place(made.reader, 2), 0); /* no such rank */
  assert_int_equal(even_telemetry_reader_open(made.fd, &later), EVEN_OK);
  even_telemetry_reader_go_on(later, 0, 4);
  even_telemetry_reader_go_on(later, 1, 1); /* so many were never written there */
  even_telemetry_reader_go_on(later, 2, 0);
  write_span(made.writers[1], 9);
  assert_int_equal(even_telemetry_reader_drain(later, records, 64, &lost), 3);
  assert_int_equal(records[0].kind, EVEN_RECORD_EVENT);
  assert_string_equal(records[0].as.event.words, event.words);
  assert_int_equal(records[1].as.span.step, 5);
  assert_int_equal(records[2].rank, 1);
  assert_int_equal(lost, 0);
  even_telemetry_reader_go_on(later, 0, 4); /* the same again, after a lap that overwrote it */
  uint64_t place = even_telemetry_reader_place(made.reader, 0);
  for (uint32_t i = 0; i < 20; i++) {
    write_span(made.writers[0], 100 + i);
  }
  assert_int_equal(even_telemetry_reader_drain(later, records, 64, &lost), 16);
  assert_int_equal(records[0].as.span.step, 104);
  assert_int_equal(lost, even_telemetry_reader_place(later, 0) - 16 - place);
  even_telemetry_reader_close(later);
  close_fixture(&made);
}

/* The slots of a record that is not whole yet are read again. */
static void a_record_begun_is_whole_for_another_reader(void **state) {
  (void)state;
  fixture made = open_fixture(16);
  even_telemetry_reader *later = NULL;
  even_shared_memory memory;
  even_ring_header facts;
  even_record records[8];
  even_event_record event = {.event = EVEN_EVENT_MESSAGE, .step = 4};
  even_event_record_words(&event, "of several slots, so that a ring holds fewer of these");
  assert_int_equal(even_ring_map(made.fd, &memory, &facts), EVEN_OK);
  even_ring *ring = even_ring_of_rank(&memory, &facts, 0);
  even_telemetry_event(made.writers[0], &event);
  uint64_t whole = atomic_load(&ring->slots[1].sequence);
  atomic_store(&ring->slots[1].sequence, whole - 1); /* its writer has come so far */
  assert_int_equal(even_telemetry_reader_drain(made.reader, records, 8, NULL), 0);
  assert_int_equal(even_telemetry_reader_place(made.reader, 0), 0);
  atomic_store(&ring->slots[1].sequence, whole);
  assert_int_equal(even_telemetry_reader_open(made.fd, &later), EVEN_OK);
  even_telemetry_reader_go_on(later, 0, even_telemetry_reader_place(made.reader, 0));
  assert_int_equal(even_telemetry_reader_drain(later, records, 8, NULL), 1);
  assert_string_equal(records[0].as.event.words, event.words);
  even_telemetry_reader_close(later);
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
    if (i % 8 == 7) { /* one slot, two, three */
      write_scalar(own->telemetry, own->first + i, i % 127, own->first + i);
    } else {
      write_span(own->telemetry, own->first + i);
    }
  }
  return NULL;
}

static uint64_t slots_of(size_t letters) {
  return letters <= 32 ? 1 : letters <= 80 ? 2 : 3;
}

/* All slots that a producer takes. */
static uint64_t slots_each(void) {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < RECORDS_EACH; i++) {
    sum += i % 8 == 7 ? slots_of(i % 127) : 1;
  }
  return sum;
}

/* The number of a record, which is what was written under it. */
static uint32_t checked(const even_record *record, uint64_t *slots) {
  if (record->kind == EVEN_RECORD_SPAN) {
    const even_span_record *span = &record->as.span;
    assert_int_equal(span->start_ns, span->step * 10U);
    assert_int_equal(span->duration_ns, span->step * 3U);
    assert_int_equal(span->bytes, ~(uint64_t)span->step);
    *slots += 1;
    return span->step;
  }
  const even_event_record *event = &record->as.event;
  char name[EVEN_EVENT_WORDS_BYTES];
  size_t letters = event->step % RECORDS_EACH % 127;
  long_name(letters, name);
  assert_true(event->number == event->step);
  assert_string_equal(event->words, name);
  *slots += slots_of(letters);
  return event->step;
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
  const uint64_t all = WRITERS * slots_each();
  while (seen + lost < all) {
    size_t count = even_telemetry_reader_drain(made.reader, records, 128, &lost);
    for (size_t i = 0; i < count; i++) {
      uint32_t number = checked(&records[i], &seen);
      uint32_t writer = number / RECORDS_EACH;
      assert_true(writer < WRITERS);
      assert_true(number % RECORDS_EACH >= next[writer]);
      next[writer] = number % RECORDS_EACH + 1;
    }
    if (count == 0 && running) {
      for (int i = 0; i < WRITERS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
      }
      running = false;
    }
  }
  assert_false(running && seen + lost > all);
  if (running) {
    for (int i = 0; i < WRITERS; i++) {
      assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
  }
  assert_true(seen > 0);
  assert_int_equal(seen + lost, all);
  close_fixture(&made);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_kind_comes_back_as_written),
      cmocka_unit_test(a_name_of_any_length_keeps_its_number),
      cmocka_unit_test(words_that_do_not_fit_end_whole),
      cmocka_unit_test(a_record_of_several_slots_comes_whole_or_not_at_all),
      cmocka_unit_test(a_paused_handle_writes_nothing),
      cmocka_unit_test(a_full_ring_keeps_the_newest_and_counts_the_rest),
      cmocka_unit_test(a_small_limit_serves_all_ranks_in_turn),
      cmocka_unit_test(a_half_written_slot_is_neither_read_nor_reused),
      cmocka_unit_test(another_reader_goes_on_where_one_stood),
      cmocka_unit_test(a_record_begun_is_whole_for_another_reader),
      cmocka_unit_test(nobody_waits_for_a_writer_that_ended),
      cmocka_unit_test(nonsense_in_the_ring_is_counted_not_returned),
      cmocka_unit_test(concurrent_writers_lose_records_but_never_mix_them),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
