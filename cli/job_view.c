/* Lines above the live view, both through outlets that never hold the agent's loop. */
#include "cli/job_view.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "cli/command.h"
#include "os/clock.h"
#include "os/terminal.h"

#include <stdlib.h>
#include <string.h>

enum { OUTPUT, ERROR, OUTLET_BYTES = 1 << 20 };
static const uint64_t second_ns = 1000000000u;
static const uint64_t draw_every_ns = 250000000u;
/* A reader that is merely slow is waited for, a quarter of the time at most; one that pauses is not. */
static const uint64_t wait_each_second_ns = 250000000u;
static const uint64_t last_patience_ns = 3000000000u;
static const char *const rank_colours[] = {"36", "33", "35", "32", "34", "31"};

even_status even_job_view_open(even_job_view *view, bool quiet, bool json, const bool *shown, int ranks,
                               const char *run_folder) {
  memset(view, 0, sizeof *view);
  view->output = json ? ERROR : OUTPUT; /* standard output is the JSON's alone then */
  view->streams[OUTPUT].colour = even_cli_colour(stdout);
  view->streams[ERROR].colour = even_cli_colour(stderr);
  view->quiet = quiet;
  view->shown = shown;
  view->ranks = ranks;
  view->logs = run_folder;
  (void)fflush(stdout);
  (void)fflush(stderr);
  EVEN_TRY(even_outlet_open(fileno(stdout), OUTLET_BYTES, &view->streams[OUTPUT].outlet));
  view->streams[ERROR].outlet = view->streams[OUTPUT].outlet; /* one file: what is printed first stands first */
  if (!even_outlet_same(fileno(stdout), fileno(stderr))) {
    even_status status = even_outlet_open(fileno(stderr), OUTLET_BYTES, &view->streams[ERROR].outlet);
    if (status != EVEN_OK) {
      even_outlet_close(view->streams[OUTPUT].outlet);
      view->streams[OUTPUT].outlet = view->streams[ERROR].outlet = NULL;
      return status;
    }
  }
  return EVEN_OK;
}

static bool add(even_job_view *view, even_job_stream *stream, const even_text *text) {
  uint64_t now = even_clock_ns();
  if (even_text_status(text) != EVEN_OK || text->length == 0) {
    return true;
  }
  if (even_outlet_add(stream->outlet, text->data, text->length, 0)) {
    return true;
  }
  if (now >= view->refill_ns) {
    view->refill_ns = now + second_ns;
    view->wait_ns = wait_each_second_ns;
  }
  if (view->wait_ns == 0 || stream->left_out > 0) {
    return false;
  }
  bool taken = even_outlet_add(stream->outlet, text->data, text->length, view->wait_ns);
  uint64_t waited = even_clock_ns() - now;
  view->wait_ns -= waited < view->wait_ns ? waited : view->wait_ns;
  return taken;
}

/* Takes the live view from the screen, as before anything else is printed. */
static void clear(even_job_view *view) {
  even_text text = EVEN_TEXT_EMPTY;
  if (view->drawn_lines > 0) {
    even_text_format(&text, "\r\033[%dA\033[J", view->drawn_lines);
    if (add(view, &view->streams[OUTPUT], &text)) {
      view->drawn_lines = 0;
    }
    even_text_free(&text);
  }
}

/* Says what was left out, once the reader goes on. */
static bool catch_up(even_job_view *view, even_job_stream *stream) {
  even_text text = EVEN_TEXT_EMPTY;
  if (stream->left_out == 0) {
    return true;
  }
  if (even_outlet_waiting(stream->outlet) > OUTLET_BYTES / 2) {
    return false;
  }
  clear(view);
  even_text_format(&text, "evenstep: %ld lines are left out here, for their reader paused; the ranks' are in %s/logs\n",
                   stream->left_out, view->logs);
  if (even_outlet_add(stream->outlet, even_text_string(&text), text.length, 0)) {
    stream->left_out = 0;
  }
  even_text_free(&text);
  return stream->left_out == 0;
}

static int count_lines(const even_text *text) {
  int lines = 0;
  for (size_t i = 0; i < text->length; i++) {
    lines += text->data[i] == '\n';
  }
  return lines;
}

/* The text under construction goes out, whole or not at all. */
static void print(even_job_view *view, even_job_stream *stream) {
  if (stream->outlet == view->streams[OUTPUT].outlet) {
    stream = &view->streams[OUTPUT]; /* one file has one count of what is left out */
  }
  clear(view);
  if (!catch_up(view, stream) || !add(view, stream, &view->line)) {
    stream->left_out += count_lines(&view->line);
  }
  even_text_clear(&view->line);
}

static void prefix(even_text *text, bool colour, int rank, const char *label) {
  const char *on = label == NULL ? "" : " on ";
  label = label == NULL ? "" : label;
  const size_t count = sizeof rank_colours / sizeof rank_colours[0];
  if (colour) {
    even_text_format(text, "\033[%sm[rank %d%s%s]\033[0m ", rank_colours[(size_t)rank % count], rank, on, label);
  } else {
    even_text_format(text, "[rank %d%s%s] ", rank, on, label);
  }
}

/* A progress bar overwrites its line with '\r': what stood last is what counts. */
static void after_last_return(const char **text, size_t *length) {
  while (*length > 0 && (*text)[*length - 1] == '\r') {
    (*length)--;
  }
  const char *last = memrchr(*text, '\r', *length);
  if (last != NULL) {
    *length -= (size_t)(last + 1 - *text);
    *text = last + 1;
  }
}

static void show_line(even_job_view *view, int rank, bool error, const char *text, size_t length) {
  even_job_stream *stream = &view->streams[error ? ERROR : view->output];
  after_last_return(&text, &length);
  if (view->ranks > 1) {
    prefix(&view->line, stream->colour, rank, view->labels == NULL ? NULL : view->labels[rank]);
  }
  even_text_append(&view->line, text, length);
  even_text_add(&view->line, "\n");
  print(view, stream);
}

typedef struct rank_of_view {
  even_job_view *view;
  int rank;
} rank_of_view;

static void show_error_line(void *context, const char *text, size_t length) {
  const rank_of_view *of = context;
  show_line(of->view, of->rank, true, text, length);
}

static bool is_shown(const even_job_view *view, int rank) {
  return view->shown[rank] || (view->shown[0] && rank == view->main);
}

void even_job_view_line(even_job_view *view, int rank, bool error, const char *text, size_t length) {
  rank_of_view of = {view, rank};
  if (!is_shown(view, rank)) {
    return;
  }
  if (error && view->interruptions != NULL) {
    even_interruption_take(&view->interruptions[rank], text, length, show_error_line, &of);
  } else {
    show_line(view, rank, error, text, length);
  }
}

void even_job_view_notice(even_job_view *view, const char *text) {
  even_text_format(&view->line, "evenstep: %s\n", text);
  print(view, &view->streams[ERROR]);
}

void even_job_view_result(even_job_view *view, const char *text) {
  even_text_format(&view->line, "%s\n", text);
  print(view, &view->streams[OUTPUT]);
}

void even_job_view_ranks(even_job_view *view, const bool *shown, const char *const *labels, int ranks) {
  view->shown = shown;
  view->labels = labels;
  view->ranks = ranks;
}

void even_job_view_main(even_job_view *view, int rank) {
  bool all_along = view->shown[rank > 0 ? rank : view->main];
  view->main = rank;
  if (!view->shown[0] || all_along) {
    return;
  }
  const char *host = view->labels == NULL || view->labels[rank] == NULL ? NULL : view->labels[rank];
  even_text_format(&view->line,
                   "evenstep: rank %d%s%s is the main rank %s, and its output is shown (%s/logs/rank-%d.log%s)\n", rank,
                   host == NULL ? "" : " on ", host == NULL ? "" : host, rank == 0 ? "again" : "now", view->logs, rank,
                   host == NULL ? "" : " there");
  print(view, &view->streams[ERROR]);
}

void even_job_view_attempt(even_job_view *view) {
  view->failed = false;
  view->main = 0;
}

void even_job_view_interrupted(even_job_view *view) {
  if (view->interruptions == NULL && EVEN_NEW_ARRAY(&view->interruptions, (size_t)view->ranks) != EVEN_OK) {
    even_error_clear(); /* all is shown then */
  }
}

static void end_interruption(even_job_view *view, int rank) {
  rank_of_view of = {view, rank};
  if (view->interruptions != NULL) {
    even_interruption_end(&view->interruptions[rank], show_error_line, &of);
  }
}

static void add_excerpt(even_text *text, const char *excerpt) {
  while (*excerpt != '\0') {
    size_t length = strcspn(excerpt, "\n");
    even_text_format(text, "  | %.*s\n", (int)length, excerpt);
    excerpt += length + (excerpt[length] != '\0');
  }
}

void even_job_view_end(even_job_view *view, int rank, even_rank_end end, int code, const char *cause,
                       const char *excerpt) {
  even_job_stream *stream = &view->streams[ERROR];
  end_interruption(view, rank);
  if ((end == EVEN_RANK_EXITED && code == 0) || end == EVEN_RANK_STOPPED_BY_AGENT) {
    return;
  }
  if (view->failed) { /* the first one is why; the others followed */
    even_text_format(&view->line, "evenstep: then %s\n", cause);
  } else {
    view->failed = true;
    even_text_format(&view->line, stream->colour ? "\033[1;31mevenstep: %s\033[0m\n" : "evenstep: %s\n", cause);
    if (!is_shown(view, rank)) {
      add_excerpt(&view->line, excerpt);
    }
  }
  print(view, stream);
}

void even_job_view_live(even_job_view *view, even_live_call *live, void *context) {
  int rows = 0;
  int columns = 0;
  const char *kind = getenv("TERM");
  if (even_terminal_size(fileno(stdout), &rows, &columns) && kind != NULL && strcmp(kind, "dumb") != 0) {
    view->live = live;
    view->live_context = context;
  }
}

static void draw(even_job_view *view) {
  even_job_stream *stream = &view->streams[OUTPUT];
  int rows = 0;
  int columns = 0;
  if (even_outlet_waiting(stream->outlet) > 0 || !even_terminal_size(fileno(stdout), &rows, &columns)) {
    return; /* a picture that waits behind others is old when it is seen */
  }
  even_text_clear(&view->picture);
  view->live(view->live_context, columns, stream->colour, &view->picture);
  int lines = count_lines(&view->picture);
  clear(view);
  /* a taller one could not be erased */
  if (lines > 0 && lines < rows && catch_up(view, stream) && add(view, stream, &view->picture)) {
    view->drawn_lines = lines;
  }
}

void even_job_view_tick(even_job_view *view) {
  uint64_t now = even_clock_ns();
  (void)catch_up(view, &view->streams[OUTPUT]);
  (void)catch_up(view, &view->streams[ERROR]);
  if (view->live != NULL && (now >= view->next_draw_ns || view->drawn_lines == 0)) { /* lines were printed over it */
    view->next_draw_ns = now + draw_every_ns;
    draw(view);
  }
}

/* All waiting at the end together stays below the last patience. */
static bool drain(even_job_view *view, even_job_stream *stream) {
  uint64_t now = even_clock_ns();
  view->last_ns = view->last_ns == 0 ? now + last_patience_ns : view->last_ns;
  return even_outlet_drain(stream->outlet, now < view->last_ns ? view->last_ns - now : 0);
}

void even_job_view_settle(even_job_view *view) {
  for (int rank = 0; rank < view->ranks; rank++) {
    end_interruption(view, rank); /* of ranks whose end was not told */
  }
  for (int i = OUTPUT; i <= ERROR; i++) {
    if (view->streams[i].left_out > 0 && drain(view, &view->streams[i])) {
      (void)catch_up(view, &view->streams[i]);
    }
  }
  if (view->live != NULL) {
    draw(view);
    view->live = NULL;
    view->drawn_lines = 0;
  }
}

bool even_job_view_close(even_job_view *view) {
  even_outlet *output = view->streams[OUTPUT].outlet;
  even_outlet *error = view->streams[ERROR].outlet;
  if (output == NULL) {
    return true;
  }
  bool drained = drain(view, &view->streams[OUTPUT]);
  drained = drain(view, &view->streams[ERROR]) && drained;
  if (error != output) {
    even_outlet_close(error);
  }
  even_outlet_close(output);
  view->streams[OUTPUT].outlet = view->streams[ERROR].outlet = NULL;
  even_text_free(&view->picture);
  even_text_free(&view->line);
  even_free(view->interruptions);
  view->interruptions = NULL;
  return drained;
}
