/* Steps of invented ranks. */
#include "monitor/feed.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

void feed_open(feed *out, int ranks, uint32_t batch, uint64_t now_ns) {
  *out = (feed){.fd = -1, .ranks = ranks, .batch = batch, .now_ns = now_ns};
  if (even_telemetry_create_segment(ranks, 0, &out->fd) != EVEN_OK) {
    abort();
  }
  for (int rank = 0; rank < ranks; rank++) {
    out->speeds[rank] = 100;
    if (even_telemetry_open(out->fd, rank, &out->writers[rank]) != EVEN_OK) {
      abort();
    }
  }
}

void feed_close(feed *made) {
  for (int rank = 0; rank < made->ranks; rank++) {
    even_telemetry_close(made->writers[rank]);
  }
  (void)close(made->fd);
}

static void span(feed *made, int rank, even_span kind, uint64_t *at, double seconds, uint64_t bytes) {
  uint64_t ns = (uint64_t)(seconds * 1e9);
  const even_span_record record = {
      .step = made->step, .span = kind, .start_ns = *at, .duration_ns = ns, .bytes = bytes};
  even_telemetry_span(made->writers[rank], &record);
  *at += ns;
}

void feed_step(feed *made, const uint32_t *shares) {
  double longest = 0;
  for (int rank = 0; rank < made->ranks; rank++) {
    longest = fmax(longest, shares[rank] / made->speeds[rank]);
  }
  double duration = longest * 1.02; /* the exchange of gradients */
  for (int rank = 0; rank < made->ranks; rank++) {
    double busy = shares[rank] / made->speeds[rank];
    uint64_t at = made->now_ns;
    span(made, rank, EVEN_SPAN_DATA, &at, 0.05 * busy, 0);
    span(made, rank, EVEN_SPAN_FORWARD, &at, 0.3 * busy, 0);
    uint64_t beside = at;
    span(made, rank, EVEN_SPAN_BACKWARD, &at, 0.6 * busy, 0);
    span(made, rank, EVEN_SPAN_COMMUNICATION, &beside, 0.1 * busy, 500000);
    span(made, rank, EVEN_SPAN_COMMUNICATION, &beside, 0.1 * busy, 500000);
    span(made, rank, EVEN_SPAN_WAIT, &at, duration - busy, 0);
    span(made, rank, EVEN_SPAN_OPTIMIZER, &at, 0.05 * busy, 0);
    const even_step_record record = {.step = made->step,
                                     .epoch = made->step / 100,
                                     .end_ns = made->now_ns + (uint64_t)(duration * 1e9),
                                     .duration_ns = (uint64_t)(duration * 1e9),
                                     .busy_ns = (uint64_t)(busy * 1e9),
                                     .samples = shares[rank],
                                     .batch = made->batch,
                                     .loss = (float)(4 * exp(-(double)made->step / 150.0) + 1),
                                     .predicted_seconds = (float)longest};
    even_telemetry_step(made->writers[rank], &record);
  }
  made->now_ns += (uint64_t)(duration * 1e9);
  made->step++;
}

void feed_event(feed *made, int rank, even_event event, int64_t value, const char *words) {
  even_event_record record = {.event = event, .step = made->step, .at_ns = made->now_ns, .value = value};
  even_event_record_words(&record, words);
  even_telemetry_event(made->writers[rank], &record);
}

void feed_scalar(feed *made, int rank, uint32_t step, const char *name, double number) {
  even_event_record record = {.event = EVEN_EVENT_SCALAR, .step = step, .at_ns = made->now_ns, .number = number};
  even_event_record_words(&record, name);
  even_telemetry_event(made->writers[rank], &record);
}
