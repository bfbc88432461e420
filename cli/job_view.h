/* What the user sees of a job: the ranks' lines with their prefix, notices, causes, and the live view at the
 * bottom of a terminal. */
#ifndef EVEN_CLI_JOB_VIEW_H
#define EVEN_CLI_JOB_VIEW_H

#include "base/text.h"
#include "orchestrator/agent.h"

#include <stdio.h>

/* Fills `out` with the live view, lines that end in newlines. */
typedef void even_live_call(void *context, int columns, bool colour, even_text *out);

typedef struct even_job_view {
  FILE *output; /* the ranks' standard output */
  FILE *error;  /* their standard error, notices and causes */
  bool colour_output;
  bool colour_error;
  bool quiet;
  const bool *shown; /* a rank each */
  int ranks;
  bool failed;          /* the first cause of an attempt was shown */
  even_live_call *live; /* NULL: none (not a terminal) */
  void *live_context;
  FILE *terminal; /* where it is drawn */
  even_text picture;
  int drawn_lines; /* of it on the screen now */
  uint64_t next_draw_ns;
} even_job_view;

void even_job_view_open(even_job_view *view, bool quiet, bool json, const bool *shown, int ranks);
/* Keeps a live view at the bottom of standard output where that is a terminal. */
void even_job_view_live(even_job_view *view, even_live_call *live, void *context);
void even_job_view_attempt(even_job_view *view);
void even_job_view_line(even_job_view *view, int rank, bool error, const char *text, size_t length);
void even_job_view_notice(even_job_view *view, const char *text);
void even_job_view_end(even_job_view *view, int rank, even_rank_end end, int code, const char *cause,
                       const char *excerpt);
/* Draws the live view anew when it is time. */
void even_job_view_tick(even_job_view *view);
/* Takes the live view from the screen, as before anything else is printed. */
void even_job_view_clear(even_job_view *view);
/* Draws it a last time and leaves it there. */
void even_job_view_close(even_job_view *view);

#endif
