/* Prints lines above the live view without garbling either. */
#include "cli/job_view.h"

#include "cli/command.h"
#include "os/clock.h"
#include "os/terminal.h"

#include <stdlib.h>
#include <string.h>

static const uint64_t draw_every_ns = 250000000u;
static const char *const rank_colours[] = {"36", "33", "35", "32", "34", "31"};

void even_job_view_open(even_job_view *view, bool quiet, bool json, const bool *shown, int ranks) {
  memset(view, 0, sizeof *view);
  view->output = json ? stderr : stdout; /* standard output is the JSON's alone then */
  view->error = stderr;
  view->colour_output = even_cli_colour(view->output);
  view->colour_error = even_cli_colour(view->error);
  view->quiet = quiet;
  view->shown = shown;
  view->ranks = ranks;
}

void even_job_view_clear(even_job_view *view) {
  if (view->drawn_lines > 0) {
    (void)fflush(stdout);
    (void)fprintf(view->terminal, "\r\033[%dA\033[J", view->drawn_lines);
    (void)fflush(view->terminal);
    view->drawn_lines = 0;
  }
}

static void prefix(FILE *stream, bool colour, int rank) {
  const size_t count = sizeof rank_colours / sizeof rank_colours[0];
  if (colour) {
    (void)fprintf(stream, "\033[%sm[rank %d]\033[0m ", rank_colours[(size_t)rank % count], rank);
  } else {
    (void)fprintf(stream, "[rank %d] ", rank);
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

void even_job_view_line(even_job_view *view, int rank, bool error, const char *text, size_t length) {
  FILE *stream = error ? view->error : view->output;
  if (!view->shown[rank]) {
    return;
  }
  even_job_view_clear(view);
  after_last_return(&text, &length);
  if (view->ranks > 1) {
    prefix(stream, error ? view->colour_error : view->colour_output, rank);
  }
  (void)fwrite(text, 1, length, stream);
  (void)fputc('\n', stream);
  (void)fflush(stream);
}

void even_job_view_notice(even_job_view *view, const char *text) {
  even_job_view_clear(view);
  (void)fprintf(view->error, "evenstep: %s\n", text);
}

void even_job_view_attempt(even_job_view *view) {
  view->failed = false;
}

static void print_excerpt(FILE *stream, const char *excerpt) {
  while (*excerpt != '\0') {
    size_t length = strcspn(excerpt, "\n");
    (void)fprintf(stream, "  | %.*s\n", (int)length, excerpt);
    excerpt += length + (excerpt[length] != '\0');
  }
}

void even_job_view_end(even_job_view *view, int rank, even_rank_end end, int code, const char *cause,
                       const char *excerpt) {
  if ((end == EVEN_RANK_EXITED && code == 0) || end == EVEN_RANK_STOPPED_BY_AGENT) {
    return;
  }
  even_job_view_clear(view);
  if (view->failed) { /* the first one is why; the others followed */
    (void)fprintf(view->error, "evenstep: then %s\n", cause);
    return;
  }
  view->failed = true;
  (void)fprintf(view->error, view->colour_error ? "\033[1;31mevenstep: %s\033[0m\n" : "evenstep: %s\n", cause);
  if (!view->shown[rank]) {
    print_excerpt(view->error, excerpt);
  }
}

static int count_lines(const even_text *text) {
  int lines = 0;
  for (size_t i = 0; i < text->length; i++) {
    lines += text->data[i] == '\n';
  }
  return lines;
}

void even_job_view_live(even_job_view *view, even_live_call *live, void *context) {
  int rows = 0;
  int columns = 0;
  const char *kind = getenv("TERM");
  if (even_terminal_size(fileno(stdout), &rows, &columns) && kind != NULL && strcmp(kind, "dumb") != 0) {
    view->terminal = stdout;
    view->live = live;
    view->live_context = context;
  }
}

static void draw(even_job_view *view) {
  int rows = 0;
  int columns = 0;
  if (!even_terminal_size(fileno(view->terminal), &rows, &columns)) {
    return;
  }
  even_text_clear(&view->picture);
  view->live(view->live_context, columns, even_cli_colour(view->terminal), &view->picture);
  int lines = count_lines(&view->picture);
  even_job_view_clear(view);
  if (even_text_status(&view->picture) == EVEN_OK && lines > 0 && lines < rows) { /* a taller one could not be erased */
    (void)fputs(view->picture.data, view->terminal);
    (void)fflush(view->terminal);
    view->drawn_lines = lines;
  }
}

void even_job_view_tick(even_job_view *view) {
  uint64_t now = even_clock_ns();
  if (view->live != NULL && (now >= view->next_draw_ns || view->drawn_lines == 0)) { /* lines were printed over it */
    view->next_draw_ns = now + draw_every_ns;
    draw(view);
  }
}

void even_job_view_close(even_job_view *view) {
  if (view->live != NULL) {
    draw(view);
  }
  even_text_free(&view->picture);
}
