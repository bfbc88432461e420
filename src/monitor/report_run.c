/* Reads one run and its prediction; its numbers as JSON. */
#include "monitor/report_run.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "monitor/faults.h"
#include "monitor/lagging.h"
#include "os/folder.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static even_status find_plan(const char *plan, even_report_run *run) {
  const char *policy = even_history_state(run->history)->policy;
  even_text own = EVEN_TEXT_EMPTY;
  if (plan != NULL) {
    return even_prediction_read(plan, policy, &run->prediction);
  }
  even_text_format(&own, "%s/plan.json", run->folder);
  even_status status = even_text_status(&own);
  if (status == EVEN_OK && even_path_exists(even_text_string(&own))) {
    status = even_prediction_read(even_text_string(&own), policy, &run->prediction);
  }
  even_text_free(&own);
  return status;
}

static void usage_of_all(const even_state_rank *at, even_measure_rank *out) {
  double seconds = (double)(at->usage.at_ns - at->usage_first.at_ns) / 1e9;
  if (at->usage_first.at_ns == 0 || seconds <= 0) {
    return;
  }
  out->cpu_cores = (at->usage.cpu_seconds - at->usage_first.cpu_seconds) / seconds;
  even_measure_pressure(&at->usage_first, &at->usage, out);
  out->throttled_fraction = (at->usage.throttled_seconds - at->usage_first.throttled_seconds) / seconds;
}

/* The numbers of all steady steps in place of those of the last. */
static void measure_all(even_report_run *run) {
  even_state *state = even_history_state(run->history);
  even_measure *measure = &run->measure;
  even_state_measure(state, run->living ? state->last_end_ns : state->ended_ns, measure);
  if (run->analysis.steady_steps == 0) {
    return;
  }
  measure->window_steps = (int)run->analysis.steady_steps;
  measure->step_seconds = run->analysis.mean_step_seconds;
  measure->batch = run->analysis.batch;
  measure->samples_per_second = run->analysis.samples_per_second;
  measure->shares_moving = false;
  for (int r = 0; r < state->ranks; r++) {
    even_measure_rank *rank = &measure->rank[r];
    const even_state_rank *at = &state->rank[r];
    rank->busy_seconds = run->analysis.rank[r].busy_seconds;
    rank->share_samples = run->analysis.rank[r].share_samples;
    for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
      rank->spans[span] =
          at->steps > 0 && at->span_ns[span] > 0 ? (double)at->span_ns[span] / 1e9 / (double)at->steps : NAN;
    }
    usage_of_all(at, rank);
  }
  even_measure_derive(measure);
  for (int r = 0; r < state->ranks; r++) {
    measure->rank[r].wait_fraction = run->analysis.rank[r].wait_fraction;
    measure->rank[r].samples_per_busy_second = run->analysis.rank[r].samples_per_busy_second;
  }
  measure->best_samples_per_second = run->analysis.best_samples_per_second;
  measure->efficiency = run->analysis.efficiency;
  measure->step_seconds = run->analysis.step_seconds;
}

even_status even_report_run_open(const char *folder, const char *plan, even_report_run *out) {
  memset(out, 0, sizeof *out);
  EVEN_TRY(even_duplicate(folder, &out->folder));
  EVEN_TRY(even_history_open(folder, &out->history));
  out->living = !even_history_ended(out->history) && even_history_alive(folder);
  if (!out->living) {
    even_history_give_up(out->history);
  }
  EVEN_TRY(even_analysis_make(out->history, &out->analysis));
  EVEN_TRY(find_plan(plan, out));
  measure_all(out);
  return EVEN_OK;
}

void even_report_run_close(even_report_run *run) {
  even_analysis_free(&run->analysis);
  even_history_close(run->history);
  even_free(run->folder);
  memset(run, 0, sizeof *run);
}

void even_report_warmup_words(const even_report_run *run, char *out, size_t bytes) {
  const even_analysis *of = &run->analysis;
  if (of->steady_steps == 0) {
    (void)snprintf(out, bytes, "No step was measured.");
  } else {
    (void)snprintf(out, bytes,
                   "Medians over %ld steady steps; the first steps of each attempt (a fifth, at most 10) are left out: "
                   "they pay for what is done once. The best possible is the sum over the ranks of samples per busy "
                   "second, while all run.",
                   of->steady_steps);
  }
}

void even_report_run_json(even_json *json, const char *key, const even_report_run *run) {
  const even_analysis *of = &run->analysis;
  const even_state *state = even_history_state(run->history);
  char words[400];
  even_report_warmup_words(run, words, sizeof words);
  even_json_object(json, key);
  even_json_string(json, "run", state->run_name);
  even_json_string(json, "folder", run->folder);
  even_json_string(json, "policy", state->policy);
  even_json_string(json, "state", even_phase_text(run->measure.phase));
  even_json_integer(json, "steps", of->steps);
  even_json_integer(json, "steady_steps", of->steady_steps);
  even_json_string(json, "warmup_words", words);
  even_json_number(json, "elapsed_seconds", run->measure.elapsed_seconds);
  even_json_number(json, "batch", of->batch);
  even_json_number(json, "step_seconds", of->step_seconds);
  even_json_number(json, "samples_per_second", of->samples_per_second);
  even_json_number(json, "best_samples_per_second", of->best_samples_per_second);
  even_json_number(json, "efficiency", of->efficiency);
  even_json_number(json, "first_loss", of->first_loss);
  even_json_number(json, "last_loss", of->last_loss);
  even_json_unsigned(json, "checkpoints", state->checkpoints);
  even_json_integer(json, "restarts", state->attempt);
  even_faults_json(json, state);
  even_lagging_json(json, state);
  if (run->prediction.known) {
    even_json_object(json, "predicted");
    even_json_number(json, "samples_per_second", run->prediction.samples_per_second);
    even_json_number(json, "step_seconds", run->prediction.step_seconds);
    even_json_number(json, "bound_samples_per_second", run->prediction.bound);
    even_json_object_end(json);
  } else {
    even_json_null(json, "predicted");
  }
  even_json_array(json, "ranks");
  for (int r = 0; r < of->ranks; r++) {
    even_json_object(json, NULL);
    even_json_integer(json, "rank", r);
    even_json_string(json, "device", state->rank[r].device);
    even_json_number(json, "share_samples", of->rank[r].share_samples);
    even_json_number(json, "busy_seconds", of->rank[r].busy_seconds);
    even_json_number(json, "wait_fraction", of->rank[r].wait_fraction);
    even_json_number(json, "samples_per_busy_second", of->rank[r].samples_per_busy_second);
    even_json_number(json, "throttled_fraction", run->measure.rank[r].throttled_fraction);
    even_json_object_end(json);
  }
  even_json_array_end(json);
  even_json_object_end(json);
}
