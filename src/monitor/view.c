/* Progress, numbers, one line a rank, the verdict. */
#include "monitor/view.h"

#include "monitor/faults.h"
#include "monitor/verdict.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FEWEST_COLUMNS = 20, MOST_RANKS_SHOWN = 16, SHARE_BAR = 16 };

#define COLOUR_BOLD "1"
#define COLOUR_GREEN "32"
#define COLOUR_YELLOW "33"
#define COLOUR_DIM "2"

typedef struct canvas {
  even_text *out;
  int columns;
  int device; /* of the ranks' lines, for the device with its host */
  bool colour;
  bool unicode;
} canvas;

/* "3 h 05 min", "12 s" into `out`; "?" for NAN. */
static void say_time(double seconds, char out[32]) {
  if (!isfinite(seconds)) {
    (void)snprintf(out, 32, "?");
  } else if (seconds < 100) {
    (void)snprintf(out, 32, "%.0f s", seconds);
  } else if (seconds < 6000) {
    (void)snprintf(out, 32, "%d min %02d s", (int)(seconds / 60), (int)fmod(seconds, 60));
  } else {
    (void)snprintf(out, 32, "%.0f h %02d min", floor(seconds / 3600), (int)fmod(seconds / 60, 60));
  }
}

static bool speaks_unicode(void) {
  const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const char *value = getenv(names[i]);
    if (value != NULL && value[0] != '\0') {
      return strstr(value, "UTF-8") != NULL || strstr(value, "utf8") != NULL;
    }
  }
  return false;
}

/* One line, cut to the width (a character of several bytes is one column). */
static void line(const canvas *on, const char *colour, const char *content) {
  size_t bytes = 0;
  for (int column = 0; content[bytes] != '\0' && column < on->columns; column++) {
    bytes++;
    while (((unsigned char)content[bytes] & 0xc0U) == 0x80U) {
      bytes++;
    }
  }
  if (on->colour && colour != NULL) {
    even_text_format(on->out, "\033[%sm", colour);
  }
  even_text_append(on->out, content, bytes);
  even_text_add(on->out, on->colour && colour != NULL ? "\033[0m\n" : "\n");
}

static void bar(const canvas *on, double fraction, int width, even_text *out) {
  int full = isfinite(fraction) ? (int)(fmin(1, fmax(0, fraction)) * width + 0.5) : 0;
  for (int i = 0; i < width; i++) {
    even_text_add(out, i < full ? (on->unicode ? "█" : "#") : (on->unicode ? "░" : "."));
  }
}

/* Appends "label value" unless the value is not known. */
static void add_number(even_text *out, const char *before, const char *format_after, double value) {
  if (isfinite(value)) {
    even_text_add(out, before);
    even_text_format(out, "%.4g%s", value, format_after);
  }
}

static void add_bytes(even_text *out, const char *before, double bytes, const char *after) {
  if (isfinite(bytes)) {
    double unit = bytes >= 1e9 ? 1e9 : bytes >= 1e6 ? 1e6 : 1e3;
    even_text_format(out, "%s%.3g %s%s", before, bytes / unit, unit >= 1e9 ? "GB" : unit >= 1e6 ? "MB" : "kB", after);
  }
}

static void head(const canvas *on, const even_state *state, const even_measure *measure, even_text *content) {
  char time[32];
  even_text_format(content, "%s  %s", state->run_name, even_phase_text(measure->phase));
  if (measure->attempt > 0) {
    even_text_format(content, " (restart %d)", measure->attempt);
  }
  if (measure->step >= 0) {
    even_text_format(content, "  step %ld", measure->step + 1);
    if (measure->total > 0) {
      even_text_format(content, "/%ld", measure->total);
    }
  }
  say_time(measure->elapsed_seconds, time);
  even_text_format(content, "  %s", time);
  if (isfinite(measure->eta_seconds)) {
    say_time(measure->eta_seconds, time);
    even_text_format(content, ", %s left", time);
  }
  line(on, COLOUR_BOLD, even_text_string(content));
}

static void progress(const canvas *on, const even_measure *measure, even_text *content) {
  if (measure->total <= 0) {
    return;
  }
  double fraction = fmin(1, (double)(measure->step + 1) / (double)measure->total);
  bar(on, fraction, on->columns - 6, content);
  even_text_format(content, " %3.0f%%", 100 * fraction);
  line(on, COLOUR_GREEN, even_text_string(content));
}

static void numbers(const canvas *on, const even_measure *measure, even_text *content) {
  add_number(content, "loss ", "  ", measure->loss);
  add_number(content, "", " samples/s", measure->samples_per_second);
  if (isfinite(measure->efficiency)) {
    even_text_format(content, " (%.0f%% of the best possible)", 100 * fmin(1, measure->efficiency));
  }
  add_number(content, "  ", " s a step", measure->step_seconds);
  if (content->length > 0) {
    line(on, NULL, even_text_string(content));
  }
}

static void rank_line(const canvas *on, const even_measure *measure, const even_gpu_sample *gpu, int number,
                      even_text *content) {
  const even_measure_rank *rank = &measure->rank[number];
  even_text_clear(content);
  even_text_format(content, "rank %-2d %-*s ", number, on->device, rank->device);
  if (isfinite(rank->share_samples)) {
    double fraction = measure->batch > 0 ? rank->share_samples / measure->batch : NAN;
    if (on->columns >= 64) {
      bar(on, fraction, SHARE_BAR, content);
      even_text_add(content, " ");
    }
    even_text_format(content, "share %5.1f  wait %3.0f%%", rank->share_samples, 100 * rank->wait_fraction);
  } else {
    even_text_add(content, rank->pid != 0 ? "no step yet" : "not running");
  }
  if (isfinite(rank->cpu_cores)) {
    even_text_format(content, "  cpu %3.0f%%", 100 * rank->cpu_cores);
  }
  if (isfinite(rank->rss_bytes)) {
    even_text_format(content, "  %.0f MB", rank->rss_bytes / 1e6);
  }
  if (gpu->at_ns != 0) {
    add_number(content, "  gpu ", "%", gpu->utilization_percent);
    add_number(content, "  ", " MHz", gpu->clock_mhz);
    add_number(content, "  ", " C", gpu->temperature_celsius);
  }
  if (isfinite(rank->collective_bytes_per_second)) {
    add_bytes(content, "  comm ", rank->collective_bytes_per_second, "/s");
    add_bytes(content, ", bus ", rank->bus_bandwidth, "/s");
  }
  line(on, isfinite(rank->share_samples) ? NULL : COLOUR_DIM, even_text_string(content));
}

/* The verdict may be long: it is wrapped at blanks. */
static void wrapped(const canvas *on, const char *colour, const char *content) {
  char piece[512];
  while (*content != '\0') {
    size_t length = strlen(content);
    if (length > (size_t)on->columns) {
      length = (size_t)on->columns;
      while (length > 0 && content[length] != ' ') {
        length--;
      }
      if (length == 0) {
        length = (size_t)on->columns;
      }
    }
    (void)snprintf(piece, sizeof piece, "%.*s", (int)length, content);
    line(on, colour, piece);
    content += length;
    content += strspn(content, " ");
  }
}

static int widest_device(const even_measure *measure) {
  int widest = 8;
  for (int r = 0; r < measure->ranks && r < MOST_RANKS_SHOWN; r++) {
    int width = (int)strlen(measure->rank[r].device);
    widest = width > widest ? width : widest;
  }
  return widest;
}

void even_view_draw(even_state *state, uint64_t now_ns, int columns, bool colour, even_text *out) {
  even_measure measure;
  even_verdict verdict;
  even_text content = EVEN_TEXT_EMPTY;
  canvas on = {.out = out,
               .columns = columns < FEWEST_COLUMNS ? FEWEST_COLUMNS
                          : columns > 400          ? 400
                                                   : columns,
               .colour = colour,
               .unicode = speaks_unicode()};
  even_state_measure(state, now_ns, &measure);
  on.device = widest_device(&measure);
  even_verdict_find(&measure, &verdict);
  head(&on, state, &measure, &content);
  even_text_clear(&content);
  progress(&on, &measure, &content);
  even_text_clear(&content);
  numbers(&on, &measure, &content);
  for (int r = 0; r < measure.ranks && r < MOST_RANKS_SHOWN; r++) {
    rank_line(&on, &measure, &state->rank[r].gpu, r, &content);
  }
  even_text_clear(&content);
  if (measure.ranks > MOST_RANKS_SHOWN) {
    even_text_format(&content, "and %d ranks more (the page shows all)", measure.ranks - MOST_RANKS_SHOWN);
    line(&on, COLOUR_DIM, even_text_string(&content));
    even_text_clear(&content);
  }
  if (state->lost_words[0] != '\0') {
    wrapped(&on, COLOUR_YELLOW, state->lost_words);
  }
  if (even_faults_lasting(state) != NULL) {
    wrapped(&on, COLOUR_YELLOW, even_faults_lasting(state));
  }
  if (even_state_stalls(state)) {
    even_text_format(&content, "a collective stands still: %s", state->stall_words);
    wrapped(&on, COLOUR_YELLOW, even_text_string(&content));
    even_text_clear(&content);
  }
  even_text_add(&content, verdict.limit);
  if (verdict.advice[0] != '\0') {
    even_text_format(&content, "; %s", verdict.advice);
  }
  wrapped(&on, verdict.kind == EVEN_VERDICT_BALANCED ? COLOUR_GREEN : COLOUR_YELLOW, even_text_string(&content));
  if (even_text_status(&content) != EVEN_OK) {
    out->status = even_text_status(&content);
  }
  even_text_free(&content);
}
