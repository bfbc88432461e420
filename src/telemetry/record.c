/* Packing: the first word holds the step (low half), the kind, and what kind of span or event. */
#include "telemetry/record.h"

#include <string.h>

static uint64_t pair(uint32_t low, uint32_t high) {
  return (uint64_t)high << 32 | low;
}

static uint64_t head(uint32_t step, even_record_kind kind, uint32_t detail) {
  return pair(step, (uint32_t)kind | (detail > 0xffffU ? 0xffffU : detail) << 8);
}

static uint32_t bits_of(float value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float float_of(uint32_t bits) {
  float value = 0;
  memcpy(&value, &bits, sizeof value);
  return value;
}

void even_record_pack_span(const even_span_record *record, uint64_t words[EVEN_RING_PAYLOAD_WORDS]) {
  words[0] = head(record->step, EVEN_RECORD_SPAN, record->span);
  words[1] = record->start_ns;
  words[2] = record->duration_ns;
  words[3] = record->bytes;
}

void even_record_pack_step(const even_step_record *record, uint64_t words[EVEN_RING_PAYLOAD_WORDS]) {
  words[0] = head(record->step, EVEN_RECORD_STEP, 0);
  words[1] = record->end_ns;
  words[2] = record->duration_ns;
  words[3] = record->busy_ns;
  words[4] = pair(record->samples, record->batch);
  words[5] = pair(bits_of(record->loss), bits_of(record->predicted_seconds));
  words[6] = record->epoch;
}

void even_record_pack_event(const even_event_record *record, uint64_t words[EVEN_RING_PAYLOAD_WORDS]) {
  words[0] = head(record->step, EVEN_RECORD_EVENT, record->event);
  words[1] = record->at_ns;
  words[2] = (uint64_t)record->value;
  memcpy(&words[3], record->words, strnlen(record->words, EVEN_EVENT_WORDS_KEPT));
}

static void unpack_step(const uint64_t words[EVEN_RING_PAYLOAD_WORDS], uint32_t step, even_step_record *out) {
  *out = (even_step_record){.step = step,
                            .epoch = (uint32_t)words[6],
                            .end_ns = words[1],
                            .duration_ns = words[2],
                            .busy_ns = words[3],
                            .samples = (uint32_t)words[4],
                            .batch = (uint32_t)(words[4] >> 32),
                            .loss = float_of((uint32_t)words[5]),
                            .predicted_seconds = float_of((uint32_t)(words[5] >> 32))};
}

bool even_record_unpack(const uint64_t words[EVEN_RING_PAYLOAD_WORDS], even_record *out) {
  uint32_t step = (uint32_t)words[0];
  uint32_t detail = (uint32_t)(words[0] >> 40);
  out->kind = (uint32_t)(words[0] >> 32) & 0xffU;
  switch (out->kind) {
    case EVEN_RECORD_SPAN:
      out->as.span = (even_span_record){
          .step = step, .span = detail, .start_ns = words[1], .duration_ns = words[2], .bytes = words[3]};
      return detail < EVEN_SPAN_COUNT;
    case EVEN_RECORD_STEP:
      unpack_step(words, step, &out->as.step);
      return detail == 0;
    case EVEN_RECORD_EVENT:
      out->as.event = (even_event_record){.event = detail, .step = step, .at_ns = words[1], .value = (int64_t)words[2]};
      memcpy(out->as.event.words, &words[3], EVEN_EVENT_WORDS_KEPT);
      return detail >= EVEN_EVENT_SHARES && detail <= EVEN_EVENT_JOINED;
    default:
      return false;
  }
}
