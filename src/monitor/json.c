/* Summary, course, spans and events as JSON. */
#include "monitor/json.h"

#include "base/json_writer.h"
#include "monitor/faults.h"
#include "monitor/lagging.h"
#include "monitor/verdict.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const char *const span_names[EVEN_SPAN_COUNT] = {
#define SPAN_NAME(name, number, words) words,
    EVEN_SPAN_LIST(SPAN_NAME)
#undef SPAN_NAME
};

/* Six digits are enough for a plot, and keep the answers small. */
static double six_digits(double value) {
  char digits[32];
  (void)snprintf(digits, sizeof digits, "%.6g", value);
  return strtod(digits, NULL);
}

static void positive(even_json *json, const char *key, long value) {
  if (value < 0) {
    even_json_null(json, key);
  } else {
    even_json_integer(json, key, value);
  }
}

static void gpu_member(even_json *json, const even_gpu_sample *gpu) {
  if (gpu->at_ns == 0) {
    even_json_null(json, "gpu");
    return;
  }
  even_json_object(json, "gpu");
  even_json_number(json, "utilization", gpu->utilization_percent / 100);
  even_json_number(json, "clock_mhz", gpu->clock_mhz);
  even_json_number(json, "temperature_celsius", gpu->temperature_celsius);
  even_json_number(json, "power_watts", gpu->power_watts);
  even_json_number(json, "memory_bytes", gpu->memory_used_bytes);
  even_json_number(json, "corrected_errors", gpu->corrected);
  even_json_number(json, "uncorrected_errors", gpu->uncorrected);
  even_json_bool(json, "slowed", gpu->slowed);
  even_json_object_end(json);
}

static void rank_members(even_json *json, const even_state_rank *at, const even_measure_rank *rank, int number) {
  even_json_integer(json, "rank", number);
  even_json_string(json, "device", at->device);
  even_json_string(json, "model", at->model);
  even_json_number(json, "cores", at->cores);
  even_json_number(json, "quota", at->quota);
  even_json_integer(json, "pid", at->pid);
  even_json_bool(json, "alive", at->pid != 0);
  even_json_string(json, "cause", at->cause);
  even_json_number(json, "share_samples", rank->share_samples);
  even_json_number(json, "busy_seconds", rank->busy_seconds);
  even_json_number(json, "wait_fraction", rank->wait_fraction);
  even_json_number(json, "samples_per_busy_second", rank->samples_per_busy_second);
  even_json_number(json, "communication_bytes", rank->communication_bytes);
  even_json_number(json, "cpu_cores", rank->cpu_cores);
  even_json_number(json, "rss_bytes", rank->rss_bytes);
  even_json_number(json, "throttled_fraction", rank->throttled_fraction);
  even_json_number(json, "collectives_per_second", rank->collectives_per_second);
  even_json_number(json, "collective_bytes_per_second", rank->collective_bytes_per_second);
  even_json_number(json, "collective_fraction", rank->collective_fraction);
  even_json_number(json, "bus_bandwidth_bytes_per_second", rank->bus_bandwidth);
  even_json_unsigned(json, "collectives", at->calls.now.collectives);
  even_json_unsigned(json, "collective_bytes", at->calls.now.bytes);
  even_json_unsigned(json, "samples", at->samples);
  gpu_member(json, &at->gpu);
}

void even_monitor_json_summary(const even_state *state, const even_measure *measured, even_text *out) {
  const even_measure measure = *measured;
  even_verdict verdict;
  even_json json = even_json_begin(out, 0);
  even_verdict_find(&measure, &verdict);
  even_json_object(&json, NULL);
  even_json_string(&json, "run", state->run_name);
  even_json_string(&json, "command", state->command);
  even_json_string(&json, "policy", state->policy);
  even_json_string(&json, "state", even_phase_text(measure.phase));
  even_json_number(&json, "started_unix_seconds", (double)state->started_wall_ns / 1e9);
  even_json_bool(&json, "ended", state->ended_ns != 0);
  if (state->ended_ns != 0) {
    even_json_integer(&json, "exit_code", state->exit_code);
  }
  even_json_integer(&json, "attempt", measure.attempt);
  positive(&json, "step", measure.step);
  positive(&json, "total_steps", measure.total);
  even_json_integer(&json, "epoch", measure.epoch);
  even_json_integer(&json, "window_steps", measure.window_steps);
  even_json_number(&json, "batch", measure.batch);
  even_json_number(&json, "loss", measure.loss);
  even_json_number(&json, "step_seconds", measure.step_seconds);
  even_json_number(&json, "predicted_step_seconds", measure.predicted_step_seconds);
  even_json_number(&json, "samples_per_second", measure.samples_per_second);
  even_json_number(&json, "best_samples_per_second", measure.best_samples_per_second);
  even_json_number(&json, "efficiency", measure.efficiency);
  even_json_number(&json, "elapsed_seconds", measure.elapsed_seconds);
  even_json_number(&json, "eta_seconds", measure.eta_seconds);
  even_json_unsigned(&json, "samples", measure.samples_total);
  even_json_unsigned(&json, "checkpoints", state->checkpoints);
  even_json_bool(&json, "on_equal_shares", state->on_fixed == 1);
  even_json_unsigned(&json, "lost_records", measure.lost_records);
  even_json_unsigned(&json, "events", state->event_count);
  even_json_string(&json, "stall", even_state_stalls(state) ? state->stall_words : NULL);
  even_faults_json(&json, state);
  even_lagging_json(&json, state);
  even_json_object(&json, "verdict");
  even_json_string(&json, "kind", even_verdict_name(verdict.kind));
  positive(&json, "rank", verdict.rank);
  even_json_string(&json, "cause", even_straggler_name(verdict.cause));
  even_json_string(&json, "limit", verdict.limit);
  even_json_string(&json, "advice", verdict.advice);
  even_json_object_end(&json);
  even_json_array(&json, "ranks");
  for (int r = 0; r < measure.ranks; r++) {
    even_json_object(&json, NULL);
    rank_members(&json, &state->rank[r], &measure.rank[r], r);
    even_json_object_end(&json);
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
}

/* `points` neighbours as one: [step, attempt, seconds since the start, samples/s, loss, predicted seconds,
 * [samples a step of each rank], [wait fraction of each rank]]. */
static void point(even_json *json, const even_state *state, size_t first, size_t points) {
  size_t ranks = (size_t)state->ranks;
  size_t room = (size_t)state->room;
  even_point sum = {.used = false};
  double seconds = 0;
  double steps = 0;
  for (size_t i = first; i < first + points; i++) {
    const even_point *at = &state->points[i];
    if (!at->used) {
      continue;
    }
    uint32_t most = 0;
    uint64_t duration = 0;
    for (size_t r = 0; r < room; r++) {
      const even_point_rank *part = &state->point_ranks[i * room + r];
      if (part->steps > most) {
        most = part->steps;
        duration = part->duration_ns;
      }
    }
    steps += most;
    seconds += (double)duration / 1e9;
    sum.used = true;
    sum.step = at->step;
    sum.attempt = at->attempt;
    sum.end_ns = at->end_ns;
    sum.losses += at->losses;
    sum.loss_sum += at->loss_sum;
    sum.given += at->given;
    sum.given_sum += at->given_sum;
    sum.predicted += at->predicted;
    sum.predicted_sum += at->predicted_sum;
    sum.batches += at->batches;
    sum.batch_sum += at->batch_sum;
  }
  if (!sum.used) {
    return;
  }
  double batch = (double)sum.batch_sum / sum.batches;
  double losses = state->loss_given ? sum.given : sum.losses;
  double loss_sum = state->loss_given ? sum.given_sum : sum.loss_sum;
  even_json_array(json, NULL);
  even_json_unsigned(json, NULL, sum.step);
  even_json_integer(json, NULL, sum.attempt);
  even_json_number(json, NULL, round(1e3 * ((double)sum.end_ns - (double)state->started_ns) / 1e9) / 1e3);
  even_json_number(json, NULL, six_digits(seconds > 0 ? batch * steps / seconds : NAN));
  even_json_number(json, NULL, losses > 0 ? six_digits(loss_sum / losses) : NAN);
  even_json_number(json, NULL, sum.predicted > 0 ? six_digits(sum.predicted_sum / sum.predicted) : NAN);
  even_json_array(json, NULL);
  for (size_t r = 0; r < ranks; r++) {
    double samples = 0;
    double count = 0;
    for (size_t i = first; i < first + points; i++) {
      samples += (double)state->point_ranks[i * room + r].samples;
      count += state->point_ranks[i * room + r].steps;
    }
    even_json_number(json, NULL, count > 0 ? round(100 * samples / count) / 100 : NAN);
  }
  even_json_array_end(json);
  even_json_array(json, NULL);
  for (size_t r = 0; r < ranks; r++) {
    double busy = 0;
    double duration = 0;
    for (size_t i = first; i < first + points; i++) {
      busy += (double)state->point_ranks[i * room + r].busy_ns;
      duration += (double)state->point_ranks[i * room + r].duration_ns;
    }
    even_json_number(json, NULL, duration > 0 ? round(1e4 * fmin(1, fmax(0, 1 - busy / duration))) / 1e4 : NAN);
  }
  even_json_array_end(json);
  even_json_array_end(json);
}

void even_monitor_json_steps(const even_state *state, long since, size_t limit, even_text *out) {
  even_json json = even_json_begin(out, 0);
  size_t begin = 0;
  size_t together = 1;
  /* by powers of two, as points are merged: two runs' steps meet. Of the whole course, so that the next answer has the
   * same stride whatever it begins with */
  while (limit > 0 && state->point_count > limit * together) {
    together *= 2;
  }
  if (since >= 0 && state->point_count > 0 && (uint64_t)since >= state->first_step) {
    begin = (size_t)(((uint64_t)since - state->first_step) / state->stride);
    begin = begin > state->point_count ? state->point_count : begin - begin % together;
  }
  even_json_object(&json, NULL);
  even_json_integer(&json, "ranks", state->ranks);
  even_json_unsigned(&json, "generation", state->generation);
  even_json_unsigned(&json, "stride", (uint64_t)state->stride * together);
  even_json_string(&json, "columns",
                   "step, attempt, seconds, samples_per_second, loss, predicted_seconds, [share_samples], "
                   "[wait_fraction]");
  even_json_array(&json, "points");
  for (size_t at = begin; at < state->point_count; at += together) {
    size_t left = state->point_count - at;
    point(&json, state, at, left < together ? left : together);
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
}

void even_monitor_json_spans(const even_state *state, const even_measure *measure, even_text *out) {
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_number(&json, "step_seconds", measure->step_seconds);
  even_json_array(&json, "ranks");
  for (int r = 0; r < state->ranks; r++) {
    const even_state_rank *at = &state->rank[r];
    even_json_object(&json, NULL);
    even_json_integer(&json, "rank", r);
    even_json_object(&json, "seconds_per_step");
    for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
      even_json_number(&json, span_names[span], measure->rank[r].spans[span]);
    }
    even_json_object_end(&json);
    even_json_object(&json, "total_seconds");
    for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
      even_json_number(&json, span_names[span], (double)at->span_ns[span] / 1e9);
    }
    even_json_object_end(&json);
    even_json_object_end(&json);
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
}

void even_monitor_json_events(const even_state *state, uint64_t since, even_text *out) {
  even_json json = even_json_begin(out, 0);
  uint64_t first = state->event_count > EVEN_STATE_EVENTS ? state->event_count - EVEN_STATE_EVENTS : 0;
  first = since > first ? since : first;
  even_json_object(&json, NULL);
  even_json_unsigned(&json, "last", state->event_count);
  even_json_array(&json, "events");
  for (uint64_t i = first; i < state->event_count; i++) {
    const even_state_event *event = &state->events[i % EVEN_STATE_EVENTS];
    even_json_object(&json, NULL);
    even_json_unsigned(&json, "number", event->number);
    even_json_number(&json, "seconds", round(((double)event->at_ns - (double)state->started_ns) / 1e6) / 1e3);
    even_json_integer(&json, "attempt", event->attempt);
    if (event->rank < 0) {
      even_json_null(&json, "rank");
    } else {
      even_json_integer(&json, "rank", event->rank);
    }
    even_json_unsigned(&json, "step", event->step);
    even_json_string(&json, "event", even_state_event_name(event->event));
    if (event->event == EVEN_EVENT_SCALAR) {
      even_json_number(&json, "value", event->scalar);
    } else {
      even_json_integer(&json, "value", event->value);
    }
    even_json_string(&json, "words", event->words);
    even_json_object_end(&json);
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
}
