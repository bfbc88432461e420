/* The report as a table for a terminal. */
#include "monitor/faults.h"
#include "monitor/lagging.h"
#include "monitor/report_run.h"
#include "monitor/verdict.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { NAME_COLUMNS = 44, RANKS_IN_A_LINE = 4 };

static void value_of(double value, const char *unit, char out[64]) {
  if (isfinite(value)) {
    (void)snprintf(out, 64, fabs(value) >= 1000 ? "%.0f%s" : "%.4g%s", value, unit);
  } else {
    (void)snprintf(out, 64, "-");
  }
}

static void percent_of(double value, char out[64]) {
  if (isfinite(value)) {
    (void)snprintf(out, 64, "%.1f%%", 100 * value);
  } else {
    (void)snprintf(out, 64, "-");
  }
}

static void row(const even_report *report, even_text *out, const char *name, const char *mine, const char *theirs) {
  even_text_format(out, "  %-*s", NAME_COLUMNS, name);
  if (report->other.folder != NULL) {
    even_text_format(out, "%18s  %18s\n", mine, theirs);
  } else {
    even_text_format(out, "%18s\n", mine);
  }
}

static void number_row(const even_report *report, even_text *out, const char *name, double mine, double theirs,
                       const char *unit) {
  char left[64];
  char right[64];
  value_of(mine, unit, left);
  value_of(theirs, unit, right);
  row(report, out, name, left, right);
}

static void percent_row(const even_report *report, even_text *out, const char *name, double mine, double theirs) {
  char left[64];
  char right[64];
  percent_of(mine, left);
  percent_of(theirs, right);
  row(report, out, name, left, right);
}

static double rank_value(const even_report_run *run, int rank, bool wait) {
  if (run->folder == NULL || rank >= run->analysis.ranks) {
    return NAN;
  }
  return wait ? run->analysis.rank[rank].wait_fraction : run->analysis.rank[rank].share_samples;
}

static void rank_rows(const even_report *report, even_text *out) {
  const even_state *state = even_history_state(report->run.history);
  int ranks = report->run.analysis.ranks;
  for (int r = 0; r < ranks && r < 2 * RANKS_IN_A_LINE; r++) {
    char name[96];
    (void)snprintf(name, sizeof name, "rank %d (%s): samples of a step", r, state->rank[r].device);
    number_row(report, out, name, rank_value(&report->run, r, false), rank_value(&report->other, r, false), "");
    (void)snprintf(name, sizeof name, "rank %d (%s): waited", r, state->rank[r].device);
    percent_row(report, out, name, rank_value(&report->run, r, true), rank_value(&report->other, r, true));
  }
  if (ranks > 2 * RANKS_IN_A_LINE) {
    even_text_format(out, "  … and %d ranks more (--json lists all)\n", ranks - 2 * RANKS_IN_A_LINE);
  }
}

static void titles(const even_report *report, bool colour, even_text *out) {
  char mine[64];
  char theirs[64] = "";
  const even_state *state = even_history_state(report->run.history);
  (void)snprintf(mine, sizeof mine, "%.18s", state->run_name);
  if (report->other.folder != NULL) {
    (void)snprintf(theirs, sizeof theirs, "%.18s", even_history_state(report->other.history)->run_name);
  }
  even_text_add(out, colour ? "\033[1m" : "");
  row(report, out, "", mine, theirs);
  even_text_add(out, colour ? "\033[0m" : "");
  row(report, out, "policy", state->policy,
      report->other.folder != NULL ? even_history_state(report->other.history)->policy : "");
  row(report, out, "state", even_phase_text(report->run.measure.phase), even_phase_text(report->other.measure.phase));
}

/* What an exchange that is not the plain one saves, and what a step of the same run takes from end to end: only a run
 * without it would tell what the one does to the other. */
static void compression_line(const even_report_run *run, const char *words, even_text *out) {
  const even_analysis *analysis = &run->analysis;
  double least = INFINITY;
  for (int r = 0; r < analysis->ranks; r++) {
    if (isfinite(analysis->rank[r].wait_fraction)) {
      least = fmin(least, fmax(0, analysis->rank[r].wait_fraction));
    }
  }
  even_text_format(out, "  %s", words);
  if (isfinite(analysis->step_seconds)) {
    even_text_format(out, "; a step takes %.4g ms (median)", 1e3 * analysis->step_seconds);
  }
  if (isfinite(analysis->step_seconds) && isfinite(least)) {
    even_text_format(out, ", no rank waits less than %.0f%% of it", 100 * least);
  }
  even_text_add(out, "\n");
}

static void closing(const even_report *report, bool colour, even_text *out) {
  char words[400];
  even_verdict verdict;
  double speedup = report->run.analysis.samples_per_second / report->other.analysis.samples_per_second;
  if (report->other.folder != NULL && isfinite(speedup)) {
    even_text_format(out, "\n  %s%.2f times the samples per second of %s%s\n", colour ? "\033[1;32m" : "", speedup,
                     even_history_state(report->other.history)->run_name, colour ? "\033[0m" : "");
  }
  if (report->has_difference && isfinite(report->difference)) {
    even_text_format(out, "  parameters after step %ld: relative difference %.2e in the norm over all (%s)\n",
                     report->difference_step, report->difference, report->difference_words);
  } else if (report->has_difference) {
    even_text_format(out, "  %s\n", report->difference_words);
  }
  even_verdict_find(&report->run.measure, &verdict);
  even_text_format(out, "\n  %s%s%s\n", verdict.limit, verdict.advice[0] != '\0' ? "; " : "", verdict.advice);
  const even_state *state = even_history_state(report->run.history);
  even_lagging_lines(state, out);
  if (state->on_fixed != 0) {
    even_text_format(out, "  balancing was measured slower than %s (%s): went back at step %" PRIu32 "\n",
                     state->on_fixed == 1 ? "equal shares" : "the profile's split", state->on_fixed_words,
                     state->on_fixed_at);
  }
  const char *const told[] = {state->straggler_words, state->lost_words, state->batch_words, state->memory_words,
                              state->left_out_words};
  for (size_t i = 0; i < sizeof told / sizeof told[0]; i++) {
    if (told[i][0] != '\0') {
      even_text_format(out, "  %s\n", told[i]);
    }
  }
  if (state->compression_words[0] != '\0') {
    compression_line(&report->run, state->compression_words, out);
  }
  even_faults_lines(state, out);
  even_report_warmup_words(&report->run, words, sizeof words);
  even_text_format(out, "  %s%s%s\n", colour ? "\033[2m" : "", words, colour ? "\033[0m" : "");
}

void even_report_lines(even_report *report, bool colour, even_text *out) {
  const even_analysis *mine = &report->run.analysis;
  const even_analysis *theirs = &report->other.analysis;
  titles(report, colour, out);
  number_row(report, out, "samples per second (median)", mine->samples_per_second, theirs->samples_per_second, "");
  number_row(report, out, "step (median)", 1e3 * mine->step_seconds, 1e3 * theirs->step_seconds, " ms");
  rank_rows(report, out);
  number_row(report, out, "best possible, samples per second", mine->best_samples_per_second,
             theirs->best_samples_per_second, "");
  percent_row(report, out, "achieved of the best possible", mine->efficiency, theirs->efficiency);
  if (report->run.prediction.known || report->other.prediction.known) {
    number_row(report, out, "predicted before the run, samples per second",
               report->run.prediction.known ? report->run.prediction.samples_per_second : NAN,
               report->other.prediction.known ? report->other.prediction.samples_per_second : NAN, "");
  }
  number_row(report, out, "last loss", mine->last_loss, theirs->last_loss, "");
  closing(report, colour, out);
}
