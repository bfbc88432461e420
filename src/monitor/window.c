/* Means over the last steps. */
#include "monitor/faults.h"

#include <math.h>
#include <signal.h>
#include <string.h>

/* The window: at least the last EVEN_WARM_STEPS, and those that ended in the last ten seconds. */
static const uint64_t WINDOW_NS = UINT64_C(10000000000);
static const double STALL_SECONDS = 10; /* and ten times the step */

static const struct {
  int number;
  const char *name;
} events[] = {{EVEN_EVENT_SHARES, "shares"},
              {EVEN_EVENT_CHECKPOINT, "checkpoint"},
              {EVEN_EVENT_TOTAL_STEPS, "total_steps"},
              {EVEN_EVENT_EPOCH, "epoch"},
              {EVEN_EVENT_RESUME, "resume"},
              {EVEN_EVENT_MESSAGE, "message"},
              {EVEN_EVENT_BALANCING, "balancing"},
              {EVEN_EVENT_JOINING, "joining"},
              {EVEN_EVENT_JOINED, "joined"},
              {EVEN_EVENT_SCALAR, "scalar"},
              {EVEN_EVENT_ATTEMPT, "attempt"},
              {EVEN_EVENT_RANK_STARTED, "rank_started"},
              {EVEN_EVENT_RANK_ENDED, "rank_ended"},
              {EVEN_EVENT_LOST, "lost_records"},
              {EVEN_EVENT_HANG, "hang"},
              {EVEN_EVENT_SPIKE, "loss_spike"},
              {EVEN_EVENT_GPU, "gpu"},
              {EVEN_EVENT_STRAGGLER, "straggler"},
              {EVEN_EVENT_STRAGGLER_ENDED, "straggler_ended"},
              {EVEN_EVENT_LINK, "link"},
              {EVEN_EVENT_COMPRESSION, "compression"},
              {EVEN_EVENT_STALL, "stall"},
              {EVEN_EVENT_GROUP, "group"},
              {EVEN_EVENT_MEMORY, "memory"},
              {EVEN_EVENT_LEFT_OUT, "left_out"},
              {EVEN_EVENT_GENERATION, "generation"},
              {EVEN_EVENT_NONFINITE, "nonfinite"},
              {EVEN_EVENT_PARAMETERS, "parameters"},
              {EVEN_EVENT_CHECKPOINTS_WAIT, "checkpoints_wait"},
              {EVEN_EVENT_SKIPPED, "skipped"},
              {EVEN_EVENT_BATCH, "batch"},
              {EVEN_EVENT_OPENING, "opening"},
              {EVEN_EVENT_OPENED, "opened"}};

const char *even_state_event_name(int event) {
  for (size_t i = 0; i < sizeof events / sizeof events[0]; i++) {
    if (events[i].number == event) {
      return events[i].name;
    }
  }
  return "unknown";
}

int even_state_event_number(const char *name) {
  for (size_t i = 0; i < sizeof events / sizeof events[0]; i++) {
    if (strcmp(events[i].name, name) == 0) {
      return events[i].number;
    }
  }
  return 0;
}

int even_state_span_number(const char *name) {
#define SPAN_NUMBER(unused, number, words)        \
  if (name != NULL && strcmp(name, words) == 0) { \
    return number;                                \
  }
  EVEN_SPAN_LIST(SPAN_NUMBER)
#undef SPAN_NUMBER
  return -1;
}

/* The step `back` steps before the last, as `rank` saw it in this attempt; NULL where it did not (yet). */
static const even_step_record *seen(const even_state *state, int rank, long step) {
  const even_state_rank *at = &state->rank[rank];
  size_t slot = (size_t)step % EVEN_STATE_WINDOW;
  bool same = at->window_attempt[slot] == (uint32_t)state->attempt + 1 && at->window[slot].step == (uint32_t)step;
  return same ? &at->window[slot] : NULL;
}

/* The last step that all ranks have told of: the rings are read one after the other, so that some ranks' records come
 * a moment before the others'. */
static long window_end(const even_state *state) {
  long end = state->last_step;
  bool all_gone = even_state_gone(state, even_state_first(state));
  for (int rank = 0; rank < state->ranks; rank++) {
    const even_state_rank *at = &state->rank[rank];
    bool near = (all_gone || !even_state_gone(state, rank)) && at->last_attempt == (uint32_t)state->attempt + 1 &&
                state->last_step - at->last_step < EVEN_STATE_WINDOW / 2;
    end = near && at->last_step < end ? at->last_step : end;
  }
  return end;
}

/* The first step of the window that ends with `end`. The first step of an attempt, which pays for
 * all that is done once, counts only while there is nothing else. */
static long window_begin(const even_state *state, long end) {
  long begin = end;
  int first_rank = even_state_first(state);
  for (long step = end; step >= 0 && step > end - EVEN_STATE_WINDOW / 2 - 1; step--) {
    const even_step_record *record = seen(state, first_rank, step);
    if (record == NULL) {
      break;
    }
    if (end - step >= EVEN_WARM_STEPS && state->last_end_ns - record->end_ns > WINDOW_NS) {
      break;
    }
    bool first = step == 0 || (step - 1 > end - EVEN_STATE_WINDOW / 2 && seen(state, first_rank, step - 1) == NULL);
    if (first && end - step >= 2) {
      break;
    }
    begin = step;
  }
  return begin;
}

void even_measure_pressure(const even_rank_usage *before, const even_rank_usage *now, even_measure_rank *out) {
  out->run_wait_fraction = out->major_faults_per_second = NAN;
  out->swap_bytes = now->pressure.swap_bytes;
  out->clock_fraction = now->pressure.clock;
  if (before->at_ns == 0 || now->at_ns <= before->at_ns) {
    return;
  }
  double wait = fmax(0, now->pressure.wait_seconds - before->pressure.wait_seconds);
  double ran = fmax(0, now->cpu_seconds - before->cpu_seconds);
  double faults = fmax(0, now->pressure.major_faults - before->pressure.major_faults); /* NAN: 0 */
  bool known = isfinite(now->pressure.wait_seconds) && isfinite(before->pressure.wait_seconds);
  out->run_wait_fraction = known && wait + ran > 0 ? wait / (wait + ran) : NAN;
  out->major_faults_per_second = faults / ((double)(now->at_ns - before->at_ns) / 1e9);
}

static void measure_usage(const even_state_rank *at, even_measure_rank *out) {
  const even_rank_usage *now = &at->usage;
  const even_rank_usage *before = &at->usage_before;
  out->cpu_cores = out->rss_bytes = out->throttled_fraction = NAN;
  out->run_wait_fraction = out->major_faults_per_second = out->swap_bytes = out->clock_fraction = NAN;
  if (now->at_ns == 0) {
    return;
  }
  out->rss_bytes = now->rss_bytes;
  even_measure_pressure(before, now, out);
  if (before->at_ns != 0 && now->at_ns > before->at_ns && now->cpu_seconds >= before->cpu_seconds) {
    double seconds = (double)(now->at_ns - before->at_ns) / 1e9;
    out->cpu_cores = (now->cpu_seconds - before->cpu_seconds) / seconds;
    out->throttled_fraction = fmax(0, (now->throttled_seconds - before->throttled_seconds) / seconds);
    if (!isfinite(now->throttled_seconds) || !isfinite(before->throttled_seconds)) {
      out->throttled_fraction = NAN;
    }
  }
}

/* Numbers of processes are the host's: in a container none of them is a rank's, and nobody can be told apart. */
static double others_of(const even_state *state, const even_state_rank *at) {
  const even_gpu_sample *gpu = &at->gpu;
  double others = 0;
  bool known = at->elsewhere && gpu->user_count > 0; /* its agent has told them apart */
  for (int i = 0; i < gpu->user_count; i++) {
    bool own = false;
    for (int r = 0; r < state->ranks; r++) {
      own = own ||
            (state->rank[r].pid != 0 && !state->rank[r].elsewhere && (long)state->rank[r].pid == gpu->users[i].pid);
    }
    known = known || own;
    others += own ? 0 : gpu->users[i].percent / 100;
  }
  return gpu->user_count == 0 || known ? others : (double)NAN;
}

static void measure_gpu(const even_state *state, const even_state_rank *at, even_measure_rank *out) {
  bool any = at->gpu.at_ns != 0;
  out->gpu_clock_mhz = any ? at->gpu.clock_mhz : (double)NAN;
  out->gpu_celsius = any ? at->gpu.temperature_celsius : (double)NAN;
  out->gpu_busy = any ? at->gpu.utilization_percent / 100 : (double)NAN;
  out->gpu_others = any ? others_of(state, at) : (double)NAN;
  out->gpu_slowed = any && at->gpu.slowed;
}

static void measure_spans(const even_state_rank *at, long begin, long end, even_measure_rank *out) {
  double sums[EVEN_SPAN_COUNT] = {0};
  double bytes = 0;
  int steps = 0;
  for (long step = begin; step <= end; step++) {
    size_t slot = (size_t)step % EVEN_STATE_WINDOW;
    if (at->span_step[slot] != (uint32_t)step + 1) {
      continue;
    }
    steps++;
    bytes += (double)at->communication_window[slot];
    for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
      sums[span] += (double)at->span_window[slot][span] / 1e9;
    }
  }
  out->communication_bytes = steps > 0 ? bytes / steps : NAN;
  for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
    out->spans[span] = steps > 0 && at->span_ns[span] > 0 ? sums[span] / steps : NAN;
  }
}

static void measure_calls(const even_state_rank *at, even_measure_rank *out) {
  const even_state_calls *calls = &at->calls;
  double seconds = (double)(calls->at_ns - calls->before_ns) / 1e9;
  uint64_t made = calls->now.collectives - calls->before.collectives;
  out->collectives_per_second = out->collective_bytes_per_second = NAN;
  out->collective_fraction = out->bus_bandwidth = NAN;
  if (calls->before_ns == 0 || seconds <= 0 || made == 0) {
    return;
  }
  double inside = (double)(calls->now.ns - calls->before.ns) / 1e9;
  double moving = inside - (double)(calls->now.wait_ns - calls->before.wait_ns) / 1e9;
  out->collectives_per_second = (double)made / seconds;
  out->collective_bytes_per_second = (double)(calls->now.bytes - calls->before.bytes) / seconds;
  out->collective_fraction = inside / seconds;
  out->bus_bandwidth = moving > 0 ? (double)(calls->now.bus_bytes - calls->before.bus_bytes) / moving : NAN;
}

static void measure_rank(const even_state *state, int rank, long begin, long end, even_measure *out) {
  const even_state_rank *at = &state->rank[rank];
  even_measure_rank *to = &out->rank[rank];
  double busy = 0;
  double samples = 0;
  int steps = 0;
  *to = (even_measure_rank){
      .device = at->device, .model = at->model, .cores = at->cores, .quota = at->quota, .pid = (long)at->pid};
  for (long step = begin; begin >= 0 && step <= end; step++) {
    const even_step_record *record = seen(state, rank, step);
    if (record != NULL) {
      busy += (double)record->busy_ns / 1e9;
      samples += record->samples;
      steps++;
    }
  }
  to->busy_seconds = steps > 0 ? busy / steps : NAN;
  to->share_samples = steps > 0 ? samples / steps : NAN;
  measure_spans(at, begin, begin < 0 ? -2 : end, to);
  measure_usage(at, to);
  measure_gpu(state, at, to);
  measure_calls(at, to);
}

static void measure_steps(const even_state *state, long begin, long end, even_measure *out) {
  double seconds = 0;
  double batch = 0;
  double predicted = 0;
  int predictions = 0;
  out->window_steps = 0;
  out->loss = NAN;
  for (long step = begin; begin >= 0 && step <= end; step++) {
    const even_step_record *record = NULL;
    for (int rank = 0; rank < state->ranks && record == NULL; rank++) {
      record = seen(state, rank, step);
    }
    if (record == NULL) {
      continue;
    }
    out->window_steps++;
    seconds += (double)record->duration_ns / 1e9;
    batch += record->batch;
    if (isfinite(record->loss)) {
      out->loss = (double)record->loss;
    }
    if (isfinite(record->predicted_seconds)) {
      predicted += (double)record->predicted_seconds;
      predictions++;
    }
  }
  out->loss = state->loss_given ? state->given_loss : out->loss;
  out->step_seconds = out->window_steps > 0 ? seconds / out->window_steps : NAN;
  out->batch = out->window_steps > 0 ? batch / out->window_steps : NAN;
  out->samples_per_second = seconds > 0 ? batch / seconds : NAN;
  out->predicted_step_seconds = predictions > 0 ? predicted / predictions : NAN;
}

static even_phase phase_of_end(int exit_code) {
  switch (exit_code) {
    case 0:
      return EVEN_PHASE_DONE;
    case 128 + SIGINT:
    case 128 + SIGTERM:
    case 128 + SIGHUP:
    case 75: /* its state saved, after notice (orchestrator/agent.h) */
      return EVEN_PHASE_INTERRUPTED;
    default:
      return EVEN_PHASE_FAILED;
  }
}

static even_phase phase_of(const even_state *state, const even_measure *measure) {
  if (state->ended_ns != 0) {
    return phase_of_end(state->exit_code);
  }
  if (state->attempt_steps == 0) {
    return EVEN_PHASE_STARTING;
  }
  if (measure->silent_seconds > fmax(STALL_SECONDS, 10 * measure->step_seconds)) {
    return EVEN_PHASE_STALLED;
  }
  for (int rank = 0; rank < measure->ranks; rank++) {
    if (!isfinite(measure->rank[rank].busy_seconds) &&
        !even_state_gone(state, rank)) { /* half the picture would be a wrong one */
      return EVEN_PHASE_WARMING;
    }
  }
  return state->attempt_steps < EVEN_WARM_STEPS ? EVEN_PHASE_WARMING : EVEN_PHASE_TRAINING;
}

void even_state_measure(even_state *state, uint64_t now_ns, even_measure *out) {
  uint64_t now = state->ended_ns != 0 ? state->ended_ns : now_ns;
  long end = window_end(state);
  long begin = window_begin(state, end);
  *out = (even_measure){.policy = state->policy,
                        .attempt = state->attempt,
                        .step = state->last_step,
                        .total = state->total,
                        .epoch = state->epoch,
                        .lost_records = state->lost_records,
                        .hang = even_faults_hang(state),
                        .link = even_faults_link(state),
                        .link_rank = state->faults[EVEN_FAULT_LINK].rank,
                        .ranks = state->ranks,
                        .rank = state->measure_ranks};
  out->elapsed_seconds = now > state->started_ns ? (double)(now - state->started_ns) / 1e9 : 0;
  out->silent_seconds = now > state->last_end_ns ? (double)(now - state->last_end_ns) / 1e9 : 0;
  measure_steps(state, begin, end, out);
  for (int rank = 0; rank < state->ranks; rank++) {
    measure_rank(state, rank, begin, end, out);
    out->samples_total += state->rank[rank].samples;
  }
  even_measure_derive(out);
  out->shares_moving = begin >= 0 && (long)state->shares_changed_at > (begin + end) / 2;
  out->phase = phase_of(state, out);
  out->eta_seconds = NAN;
  if (state->ended_ns == 0 && state->total > 0 && isfinite(out->step_seconds)) {
    out->eta_seconds = fmax(0, (double)(state->total - 1 - state->last_step) * out->step_seconds - out->silent_seconds);
  }
}
