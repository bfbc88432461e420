/* Packing: the first word holds the step (low half), the kind, what kind of span or event, and how many slots follow.
 */
#include "telemetry/record.h"

#include "base/utf8.h"

#include <string.h>

/* A call's wait_ns shares its word with whether it failed and the rank's number in the group. */
#define FAILED (UINT64_C(1) << 47)
#define MOST_WAIT (FAILED - 1)
#define MEMBER_SHIFT 48

enum { KIND_MORE = 4 }; /* further words of the event in the slot before */

static uint64_t pair(uint32_t low, uint32_t high) {
  return (uint64_t)high << 32 | low;
}

static uint64_t head(uint32_t step, uint32_t kind, uint32_t detail) {
  return pair(step, kind | (detail > 0xffffU ? 0xffffU : detail) << 8);
}

static uint32_t kind_of(uint64_t first) {
  return (uint32_t)(first >> 32) & 0xffU;
}

static uint32_t detail_of(uint64_t first) {
  return (uint32_t)(first >> 40) & 0xffffU;
}

static unsigned more_of(uint64_t first) {
  return (unsigned)(first >> 56);
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

void even_record_pack_span(const even_span_record *record, even_record_slot words) {
  words[0] = head(record->step, EVEN_RECORD_SPAN, record->span);
  words[1] = record->start_ns;
  words[2] = record->duration_ns;
  words[3] = record->bytes;
}

void even_record_pack_step(const even_step_record *record, even_record_slot words) {
  words[0] = head(record->step, EVEN_RECORD_STEP, 0);
  words[1] = record->end_ns;
  words[2] = record->duration_ns;
  words[3] = record->busy_ns;
  words[4] = pair(record->samples, record->batch);
  words[5] = pair(bits_of(record->loss), bits_of(record->predicted_seconds));
  words[6] = record->epoch;
}

/* The head's detail is the call and its row; the other small numbers share words. */
void even_record_pack_call(const even_call_record *record, even_record_slot words) {
  words[0] = head(record->step, EVEN_RECORD_CALL, (uint32_t)record->call | (uint32_t)record->row << 8);
  words[1] = record->start_ns;
  words[2] = record->duration_ns;
  words[3] = (record->wait_ns < MOST_WAIT ? record->wait_ns : MOST_WAIT) | (uint64_t)record->member << MEMBER_SHIFT |
             (record->failed != 0 ? FAILED : 0);
  words[4] = record->bytes;
  words[5] = pair(record->group, (uint32_t)record->ranks | (uint32_t)(uint16_t)record->peer << 16);
  words[6] = even_call_is_message(record->call)
                 ? pair(record->number, record->tag)
                 : pair(record->number, (uint32_t)record->dtype | (uint32_t)record->op << 8);
}

void even_record_pack_leg(const even_leg_record *record, even_record_slot words) {
  words[0] = head(0, EVEN_RECORD_LEG, 0);
  words[1] = record->at_ns;
  words[2] = pair(record->own, record->peer);
  words[3] = record->transfers;
  words[4] = record->bytes;
  words[5] = record->ns;
}

size_t even_record_pack_event(const even_event_record *record, even_record_slot out[EVEN_RECORD_MOST_SLOTS]) {
  size_t length = strnlen(record->words, sizeof record->words - 1);
  size_t taken = length < EVEN_RECORD_WORDS_FIRST ? length : EVEN_RECORD_WORDS_FIRST;
  size_t slots = 1;
  out[0][1] = record->at_ns;
  out[0][2] = (uint64_t)record->value;
  if (record->event == EVEN_EVENT_SCALAR) {
    memcpy(&out[0][2], &record->number, sizeof record->number);
  }
  memcpy(&out[0][3], record->words, taken);
  for (; taken < length; slots++) {
    size_t next = length - taken < EVEN_RECORD_WORDS_NEXT ? length - taken : EVEN_RECORD_WORDS_NEXT;
    out[slots][0] = head(record->step, KIND_MORE, (uint32_t)slots);
    memcpy(&out[slots][1], record->words + taken, next);
    taken += next;
  }
  out[0][0] = head(record->step, EVEN_RECORD_EVENT, record->event) | (uint64_t)(slots - 1) << 56;
  return slots;
}

/* Where the list ends so that "…" has room behind a whole number. */
static void cut_list(char words[EVEN_EVENT_WORDS_BYTES]) {
  static const char rest[] = "…";
  size_t end = EVEN_EVENT_WORDS_BYTES - sizeof rest;
  while (end > 0 && words[end - 1] != ',') {
    end--;
  }
  memcpy(words + end, rest, sizeof rest);
}

void even_event_record_words(even_event_record *record, const char *words) {
  size_t length = strnlen(words, sizeof record->words);
  memset(record->words, 0, sizeof record->words);
  memcpy(record->words, words, length < sizeof record->words ? length : sizeof record->words - 1);
  if (length == sizeof record->words && record->event == EVEN_EVENT_SHARES) {
    cut_list(record->words);
  } else if (length == sizeof record->words) {
    even_utf8_trim(record->words);
  }
}

static void unpack_step(const even_record_slot words, uint32_t step, even_step_record *out) {
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

static void unpack_event(const even_record_slot words, uint32_t step, uint32_t event, even_event_record *out) {
  *out = (even_event_record){.event = event, .step = step, .at_ns = words[1]};
  if (event == EVEN_EVENT_SCALAR) {
    memcpy(&out->number, &words[2], sizeof out->number);
  } else {
    out->value = (int64_t)words[2];
  }
  memcpy(out->words, &words[3], EVEN_RECORD_WORDS_FIRST);
}

static bool unpack_call(const even_record_slot words, uint32_t step, uint32_t detail, even_call_record *out) {
  uint32_t place = (uint32_t)(words[5] >> 32);
  uint32_t last = (uint32_t)(words[6] >> 32);
  *out = (even_call_record){.step = step,
                            .call = (uint8_t)(detail & 0xffU),
                            .row = (uint8_t)(detail >> 8),
                            .dtype = EVEN_CALL_NONE,
                            .op = EVEN_CALL_NONE,
                            .failed = (words[3] & FAILED) != 0,
                            .ranks = (uint16_t)(place & 0xffffU),
                            .peer = (int16_t)(place >> 16),
                            .member = (uint16_t)(words[3] >> MEMBER_SHIFT),
                            .group = (uint32_t)words[5],
                            .number = (uint32_t)words[6],
                            .start_ns = words[1],
                            .duration_ns = words[2],
                            .wait_ns = words[3] & MOST_WAIT,
                            .bytes = words[4]};
  if (even_call_is_message(out->call)) {
    out->tag = last;
  } else {
    out->dtype = (uint8_t)(last & 0xffU);
    out->op = (uint8_t)(last >> 8 & 0xffU);
  }
  return out->call >= EVEN_RECORDED_ALL_REDUCE && out->call < EVEN_RECORDED_COUNT;
}

static void unpack_leg(const even_record_slot words, even_leg_record *out) {
  *out = (even_leg_record){.own = (uint32_t)words[2],
                           .peer = (uint32_t)(words[2] >> 32),
                           .at_ns = words[1],
                           .transfers = (uint32_t)words[3],
                           .bytes = words[4],
                           .ns = words[5]};
}

bool even_record_unpack(const even_record_slot words, even_record *out, unsigned *more) {
  uint32_t step = (uint32_t)words[0];
  uint32_t detail = detail_of(words[0]);
  *more = more_of(words[0]);
  out->kind = kind_of(words[0]);
  switch (out->kind) {
    case EVEN_RECORD_SPAN:
      out->as.span = (even_span_record){
          .step = step, .span = detail, .start_ns = words[1], .duration_ns = words[2], .bytes = words[3]};
      return detail < EVEN_SPAN_COUNT && *more == 0;
    case EVEN_RECORD_STEP:
      unpack_step(words, step, &out->as.step);
      return detail == 0 && *more == 0;
    case EVEN_RECORD_EVENT:
      unpack_event(words, step, detail, &out->as.event);
      return detail >= EVEN_EVENT_SHARES && detail <= EVEN_EVENT_LAST && *more < EVEN_RECORD_MOST_SLOTS;
    case EVEN_RECORD_CALL:
      return unpack_call(words, step, detail, &out->as.call) && *more == 0;
    case EVEN_RECORD_LEG:
      unpack_leg(words, &out->as.leg);
      return detail == 0 && *more == 0;
    default:
      return false;
  }
}

bool even_record_unpack_more(const even_record_slot words, unsigned number, even_record *out) {
  even_event_record *event = &out->as.event;
  if (kind_of(words[0]) != KIND_MORE || detail_of(words[0]) != number || (uint32_t)words[0] != event->step) {
    return false;
  }
  memcpy(event->words + EVEN_RECORD_WORDS_FIRST + (size_t)(number - 1) * EVEN_RECORD_WORDS_NEXT, &words[1],
         EVEN_RECORD_WORDS_NEXT);
  event->words[sizeof event->words - 1] = '\0';
  return true;
}
