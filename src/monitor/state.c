/* The run's state: opened, told, closed. */
#include "monitor/state.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "monitor/faults.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* A step this far beyond the last is damage, not progress. */
enum { FARTHEST_JUMP = 1 << 24 };

static void set_unknown(even_state *state, int first) {
  for (int r = first; r < state->room; r++) {
    state->rank[r].cores = NAN;
    state->rank[r].quota = NAN;
    state->rank[r].usage.throttled_seconds = NAN;
  }
}

static even_status fill(even_state *state, const char *run_name, const char *command, const char *policy) {
  size_t ranks = (size_t)state->ranks;
  EVEN_TRY(even_duplicate(run_name == NULL ? "" : run_name, &state->run_name));
  EVEN_TRY(even_duplicate(command == NULL ? "" : command, &state->command));
  EVEN_TRY(even_duplicate(policy == NULL ? "" : policy, &state->policy));
  EVEN_TRY(EVEN_NEW_ARRAY(&state->rank, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&state->measure_ranks, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&state->points, EVEN_STATE_POINTS));
  EVEN_TRY(EVEN_NEW_ARRAY(&state->point_ranks, EVEN_STATE_POINTS * ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&state->stragglers, EVEN_STATE_STRAGGLERS));
  return EVEN_NEW_ARRAY(&state->events, EVEN_STATE_EVENTS);
}

even_status even_state_open(int ranks, const char *run_name, const char *command, const char *policy,
                            even_state **out) {
  even_state *state = NULL;
  *out = NULL;
  if (ranks < 1 || ranks > EVEN_STATE_MOST_RANKS) {
    return even_fail(EVEN_ERR_ARGUMENT, "a run of %d ranks", ranks);
  }
  EVEN_TRY(EVEN_NEW(&state));
  state->ranks = state->room = ranks;
  state->total = -1;
  state->last_step = -1;
  state->stride = 1;
  even_status status = fill(state, run_name, command, policy);
  if (status != EVEN_OK) {
    even_state_close(state);
    return status;
  }
  set_unknown(state, 0);
  *out = state;
  return EVEN_OK;
}

/* Room for more ranks: each point's part of them follows that of those before. */
static even_status make_room(even_state *state, int ranks) {
  size_t before = (size_t)state->room;
  size_t after = (size_t)ranks;
  even_point_rank *parts = NULL;
  EVEN_TRY(EVEN_NEW_ARRAY(&parts, EVEN_STATE_POINTS * after));
  even_status status = even_realloc((void **)&state->rank, after, sizeof *state->rank);
  if (status == EVEN_OK) {
    status = even_realloc((void **)&state->measure_ranks, after, sizeof *state->measure_ranks);
  }
  if (status != EVEN_OK) {
    even_free(parts);
    return status;
  }
  for (size_t i = 0; i < EVEN_STATE_POINTS; i++) {
    memcpy(&parts[i * after], &state->point_ranks[i * before], before * sizeof *parts);
  }
  even_free(state->point_ranks);
  state->point_ranks = parts;
  memset(&state->rank[before], 0, (after - before) * sizeof *state->rank);
  memset(&state->measure_ranks[before], 0, (after - before) * sizeof *state->measure_ranks);
  state->room = ranks;
  set_unknown(state, (int)before);
  return EVEN_OK;
}

even_status even_state_ranks(even_state *state, int ranks) {
  if (ranks < 1 || ranks > EVEN_STATE_MOST_RANKS) {
    return even_fail(EVEN_ERR_ARGUMENT, "a run of %d ranks", ranks);
  }
  if (ranks > state->room) {
    EVEN_TRY(make_room(state, ranks));
  }
  state->generation += ranks != state->ranks; /* a client then fetches all anew */
  state->ranks = ranks;
  return EVEN_OK;
}

void even_state_close(even_state *state) {
  if (state == NULL) {
    return;
  }
  even_free(state->run_name);
  even_free(state->command);
  even_free(state->policy);
  even_free(state->rank);
  even_free(state->measure_ranks);
  even_free(state->points);
  even_free(state->point_ranks);
  even_free(state->stragglers);
  even_free(state->events);
  even_free(state);
}

void even_state_rank_facts(even_state *state, int rank, const char *device, const char *model, double cores,
                           double quota) {
  even_state_rank *at = &state->rank[rank];
  (void)snprintf(at->device, sizeof at->device, "%s", device == NULL ? "" : device);
  (void)snprintf(at->model, sizeof at->model, "%s", model == NULL ? "" : model);
  at->cores = cores;
  at->quota = quota;
}

void even_state_attempt(even_state *state, int attempt, uint64_t at_ns) {
  state->attempt = attempt;
  state->attempt_steps = 0;
  state->last_end_ns = at_ns;
}

void even_state_span(even_state *state, int rank, const even_span_record *record) {
  even_state_rank *at = &state->rank[rank];
  size_t slot = record->step % EVEN_STATE_WINDOW;
  if (at->span_step[slot] != record->step + 1) {
    at->span_step[slot] = record->step + 1;
    memset(at->span_window[slot], 0, sizeof at->span_window[slot]);
    at->communication_window[slot] = 0;
  }
  at->span_window[slot][record->span] += record->duration_ns;
  if (record->span == EVEN_SPAN_COMMUNICATION) {
    at->communication_window[slot] += record->bytes;
  }
  at->span_ns[record->span] += record->duration_ns;
  at->span_bytes[record->span] += record->bytes;
}

static void add_point(even_point *to, const even_point *from) {
  to->given += from->given;
  to->given_sum += from->given_sum;
  if (!from->used) {
    return;
  }
  if (!to->used) {
    const even_point given = {.given = to->given, .given_sum = to->given_sum};
    *to = *from;
    to->given = given.given;
    to->given_sum = given.given_sum;
    return;
  }
  to->attempt = from->attempt > to->attempt ? from->attempt : to->attempt;
  to->step = from->step > to->step ? from->step : to->step;
  to->end_ns = from->end_ns > to->end_ns ? from->end_ns : to->end_ns;
  to->losses += from->losses;
  to->loss_sum += from->loss_sum;
  to->predicted += from->predicted;
  to->predicted_sum += from->predicted_sum;
  to->batches += from->batches;
  to->batch_sum += from->batch_sum;
}

static void clear_points(even_state *state, size_t from) {
  size_t ranks = (size_t)state->room;
  if (from < state->point_count) {
    memset(&state->points[from], 0, (state->point_count - from) * sizeof *state->points);
    memset(&state->point_ranks[from * ranks], 0, (state->point_count - from) * ranks * sizeof *state->point_ranks);
    state->point_count = from;
    state->generation++;
  }
}

/* Halves the resolution. */
static void merge_points(even_state *state) {
  size_t ranks = (size_t)state->room;
  for (size_t i = 0; i < EVEN_STATE_POINTS; i++) {
    even_point point = state->points[i];
    memset(&state->points[i], 0, sizeof point);
    add_point(&state->points[i / 2], &point);
    for (size_t r = 0; r < ranks; r++) {
      even_point_rank part = state->point_ranks[i * ranks + r];
      memset(&state->point_ranks[i * ranks + r], 0, sizeof part);
      even_point_rank *to = &state->point_ranks[i / 2 * ranks + r];
      to->steps += part.steps;
      to->samples += part.samples;
      to->busy_ns += part.busy_ns;
      to->duration_ns += part.duration_ns;
    }
  }
  state->point_count = (state->point_count + 1) / 2;
  state->stride *= 2;
  state->generation++;
}

/* The point for a step; what an earlier attempt did there and after it is forgotten, because it is done again. */
static size_t point_of(even_state *state, uint32_t step) {
  if (state->point_count == 0 || step < state->first_step) {
    clear_points(state, 0);
    state->first_step = step;
    state->stride = 1;
  }
  while ((step - state->first_step) / state->stride >= EVEN_STATE_POINTS) {
    merge_points(state);
  }
  size_t index = (step - state->first_step) / state->stride;
  if (index < state->point_count && state->points[index].used && state->points[index].attempt < state->attempt) {
    clear_points(state, index);
  }
  if (index >= state->point_count) {
    state->point_count = index + 1;
  }
  return index;
}

/* The next n of `left` steps' part of a sum. */
static uint64_t take_part(uint64_t *sum, uint32_t n, uint32_t left) {
  uint64_t part = n == left ? *sum : *sum / left * n;
  *sum -= part;
  return part;
}

/* How many of the steps from `first` on lie in the same point. */
static uint32_t within_point(const even_state *state, uint32_t first, uint32_t left) {
  uint32_t room = state->stride - (first - state->first_step) % state->stride;
  return left < room ? left : room;
}

static void add_to_course(even_state *state, int rank, even_state_steps all) {
  for (uint32_t n = 0; all.steps > 0; all.steps -= n) {
    uint32_t first = all.last - all.steps + 1;
    (void)point_of(state, first); /* settles the stride */
    n = within_point(state, first, all.steps);
    size_t index = point_of(state, first);
    even_point_rank *part = &state->point_ranks[index * (size_t)state->room + (size_t)rank];
    uint64_t duration = take_part(&all.duration_ns, n, all.steps);
    const even_point point = {.used = true,
                              .attempt = state->attempt,
                              .step = first + n - 1,
                              .end_ns = all.end_ns - all.duration_ns,
                              .losses = isfinite(all.loss) ? n : 0,
                              .loss_sum = isfinite(all.loss) ? all.loss * n : 0,
                              .predicted = isfinite(all.predicted_seconds) ? n : 0,
                              .predicted_sum = isfinite(all.predicted_seconds) ? all.predicted_seconds * n : 0,
                              .batches = n,
                              .batch_sum = take_part(&all.batch, n, all.steps)};
    add_point(&state->points[index], &point);
    part->steps += n;
    part->samples += take_part(&all.samples, n, all.steps);
    part->busy_ns += take_part(&all.busy_ns, n, all.steps);
    part->duration_ns += duration;
  }
}

bool even_state_gone(const even_state *state, int rank) {
  return state->rank[rank].gone_attempt == (uint32_t)state->attempt + 1;
}

int even_state_first(const even_state *state) {
  for (int rank = 0; rank < state->ranks; rank++) {
    if (!even_state_gone(state, rank)) {
      return rank;
    }
  }
  return 0;
}

static bool too_far(const even_state *state, uint32_t step) {
  return state->last_step >= 0 && (int64_t)step - state->last_step > FARTHEST_JUMP;
}

void even_state_merged(even_state *state, int rank, const even_state_steps *steps) {
  even_state_rank *at = &state->rank[rank];
  if (steps->steps == 0 || steps->steps > steps->last + 1 || too_far(state, steps->last - steps->steps + 1)) {
    return;
  }
  at->last_step = (long)steps->last;
  at->last_attempt = (uint32_t)state->attempt + 1;
  at->steps += steps->steps;
  at->samples += steps->samples;
  at->busy_ns += steps->busy_ns < steps->duration_ns ? steps->busy_ns : steps->duration_ns;
  at->wait_ns += steps->busy_ns < steps->duration_ns ? steps->duration_ns - steps->busy_ns : 0;
  add_to_course(state, rank, *steps);
  state->epoch = (long)steps->epoch;
  if (rank == even_state_first(state)) {
    state->attempt_steps += steps->steps;
  }
  if (steps->end_ns >= state->last_end_ns || state->last_step < 0) {
    state->last_end_ns = steps->end_ns;
    state->last_step = (long)steps->last;
  }
}

void even_state_step(even_state *state, int rank, const even_step_record *record) {
  even_state_rank *at = &state->rank[rank];
  size_t slot = record->step % EVEN_STATE_WINDOW;
  if (too_far(state, record->step)) {
    return;
  }
  at->window[slot] = *record;
  at->window_attempt[slot] = (uint32_t)state->attempt + 1;
  const even_state_steps one = {.last = record->step,
                                .steps = 1,
                                .epoch = record->epoch,
                                .end_ns = record->end_ns,
                                .duration_ns = record->duration_ns,
                                .busy_ns = record->busy_ns,
                                .samples = record->samples,
                                .batch = record->batch,
                                .loss = (double)record->loss,
                                .predicted_seconds = (double)record->predicted_seconds};
  even_state_merged(state, rank, &one);
}

/* The point that a step of an attempt belongs to; EVEN_STATE_POINTS: none, or the step was done again since. */
static size_t point_told_of(even_state *state, int attempt, uint32_t step) {
  if (state->point_count > 0 && step < state->first_step) {
    return EVEN_STATE_POINTS;
  }
  if (attempt >= state->attempt) {
    bool near = state->last_step < 0 || (int64_t)step - state->last_step <= EVEN_STATE_WINDOW;
    return near ? point_of(state, step) : EVEN_STATE_POINTS;
  }
  size_t index = (step - state->first_step) / state->stride;
  return index < state->point_count && state->points[index].attempt <= attempt ? index : EVEN_STATE_POINTS;
}

static void take_given_loss(even_state *state, const even_state_event *event) {
  state->generation += !state->loss_given; /* the loss of all points becomes another one */
  state->loss_given = true;
  state->given_loss = event->scalar;
  size_t index = isfinite(event->scalar) ? point_told_of(state, event->attempt, event->step) : EVEN_STATE_POINTS;
  if (index < EVEN_STATE_POINTS) {
    const even_point given = {.given = 1, .given_sum = event->scalar};
    add_point(&state->points[index], &given);
  }
}

static bool said_already(const even_state *state, const even_state_event *event) {
  if (event->event != EVEN_EVENT_SHARES && event->event != EVEN_EVENT_TOTAL_STEPS && event->event != EVEN_EVENT_EPOCH &&
      event->event != EVEN_EVENT_RESUME && event->event != EVEN_EVENT_CHECKPOINT) {
    return false;
  }
  uint64_t kept = state->event_count < EVEN_STATE_EVENTS ? state->event_count : EVEN_STATE_EVENTS;
  for (uint64_t back = 1; back <= kept; back++) {
    const even_state_event *other = &state->events[(state->event_count - back) % EVEN_STATE_EVENTS];
    if (other->event == event->event && other->attempt == event->attempt && other->step == event->step &&
        other->value == event->value && strcmp(other->words, event->words) == 0) {
      return true;
    }
  }
  return false;
}

bool even_state_event_add(even_state *state, const even_state_event *event) {
  if (event->event == EVEN_EVENT_TOTAL_STEPS) {
    state->total = event->value > 0 ? (long)event->value : -1;
  } else if (event->event == EVEN_EVENT_EPOCH) {
    state->epoch = (long)event->value;
  }
  if (said_already(state, event)) {
    return false;
  }
  if (event->event == EVEN_EVENT_SHARES) {
    state->shares_changed_at = event->step;
  } else if (event->event == EVEN_EVENT_CHECKPOINT) {
    state->checkpoints++;
  } else if (event->event == EVEN_EVENT_BALANCING) {
    state->on_fixed = event->value >= 0 && event->value <= 2 ? (int)event->value : 0;
    state->on_fixed_at = event->step;
    (void)snprintf(state->on_fixed_words, sizeof state->on_fixed_words, "%.39s", event->words);
  } else if (event->event == EVEN_EVENT_COMPRESSION) {
    (void)snprintf(state->compression_words, sizeof state->compression_words, "%.95s", event->words);
  } else if (event->event == EVEN_EVENT_MEMORY) {
    (void)snprintf(state->memory_words, sizeof state->memory_words, "%s", event->value > 0 ? event->words : "");
  } else if (event->event == EVEN_EVENT_LEFT_OUT) {
    (void)snprintf(state->left_out_words, sizeof state->left_out_words, "%s", event->value > 0 ? event->words : "");
  } else if (event->event == EVEN_EVENT_STRAGGLER_ENDED) {
    (void)snprintf(state->straggler_words, sizeof state->straggler_words, "%s", event->words);
  } else if (event->event == EVEN_EVENT_BATCH) {
    (void)snprintf(state->batch_words, sizeof state->batch_words, "%s (step %" PRIu32 ")", event->words, event->step);
  } else if (event->event == EVEN_EVENT_GENERATION) {
    (void)snprintf(state->lost_words, sizeof state->lost_words, "%s", event->words);
  } else if (event->event == EVEN_EVENT_RANK_ENDED && event->rank >= 0 && event->rank < state->ranks) {
    state->rank[event->rank].gone_attempt = (uint32_t)event->attempt + 1;
  } else if (event->event == EVEN_EVENT_STALL) {
    state->stall_at_ns = event->at_ns;
    state->stall_rank = event->rank;
    (void)snprintf(state->stall_words, sizeof state->stall_words, "%s", event->words);
  } else if (event->event == EVEN_EVENT_ATTEMPT) {
    state->on_fixed = 0; /* the ranks' balancers begin anew */
    state->memory_words[0] = state->left_out_words[0] = state->lost_words[0] = state->batch_words[0] = '\0';
    state->stall_at_ns = 0;
    even_faults_restart(state->faults);
  } else if (event->event == EVEN_EVENT_SCALAR && event->rank == even_state_first(state) &&
             strcmp(event->words, "loss") == 0) {
    take_given_loss(state, event);
  }
  even_faults_take(state->faults, event);
  even_state_event *slot = &state->events[state->event_count % EVEN_STATE_EVENTS];
  *slot = *event;
  slot->number = ++state->event_count;
  return true;
}

void even_state_straggler_add(even_state *state, const even_state_straggler *told) {
  uint64_t kept = state->straggler_count < EVEN_STATE_STRAGGLERS ? state->straggler_count : EVEN_STATE_STRAGGLERS;
  for (uint64_t back = 1; back <= kept; back++) {
    even_state_straggler *at = &state->stragglers[(state->straggler_count - back) % EVEN_STATE_STRAGGLERS];
    if (at->attempt == told->attempt && at->rank == told->rank && at->begin_step == told->begin_step) {
      *at = *told;
      return;
    }
  }
  state->stragglers[state->straggler_count++ % EVEN_STATE_STRAGGLERS] = *told;
}

const even_state_straggler *even_state_straggler_at(const even_state *state, size_t number) {
  uint64_t kept = state->straggler_count < EVEN_STATE_STRAGGLERS ? state->straggler_count : EVEN_STATE_STRAGGLERS;
  return number < kept ? &state->stragglers[(state->straggler_count - kept + number) % EVEN_STATE_STRAGGLERS] : NULL;
}

void even_state_usage(even_state *state, int rank, const even_rank_usage *usage) {
  even_state_rank *at = &state->rank[rank];
  if (at->usage_first.at_ns == 0 || usage->cpu_seconds < at->usage.cpu_seconds) {
    at->usage_first = *usage;
  }
  at->usage_before = at->usage;
  at->usage = *usage;
}

void even_state_calls_seen(even_state *state, int rank, uint64_t at_ns, const even_call_totals *totals) {
  even_state_calls *at = &state->rank[rank].calls;
  at->before = at->now;
  at->before_ns = at->at_ns;
  at->now = *totals;
  at->at_ns = at_ns;
  if (state->stall_rank == rank && at->before_ns > state->stall_at_ns && at->now.collectives > at->before.collectives) {
    state->stall_at_ns = 0; /* it goes on */
  }
}

bool even_state_stalls(const even_state *state) {
  return state->stall_at_ns != 0 && state->ended_ns == 0 && state->last_end_ns < state->stall_at_ns;
}
