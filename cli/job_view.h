/* What the user sees of a job: the ranks' lines with their prefix, notices, causes, and the live view at the
 * bottom of a terminal. It never stops the job: while its reader pauses, lines are left out, and counted. */
#ifndef EVEN_CLI_JOB_VIEW_H
#define EVEN_CLI_JOB_VIEW_H

#include "base/text.h"
#include "cli/interruption.h"
#include "orchestrator/agent.h"
#include "os/outlet.h"

#include <stdio.h>

/* Fills `out` with the live view, lines that end in newlines. */
typedef void even_live_call(void *context, int columns, bool colour, even_text *out);

/* Where lines go: standard output or standard error. */
typedef struct even_job_stream {
  even_outlet *outlet; /* that of the other stream where both are one file */
  bool colour;
  long left_out; /* lines since the reader pauses */
} even_job_stream;

typedef struct even_job_view {
  even_job_stream streams[2]; /* standard output, standard error */
  int output;                 /* which of them takes the ranks' standard output */
  bool quiet;
  const bool *shown;         /* a rank each; 0 stands for whoever is the main one */
  int main;                  /* that is now */
  const char *const *labels; /* a rank each: the host that its lines name, NULL for none; NULL: no rank has one */
  int ranks;
  const char *logs;                 /* the folder with everything that the ranks printed */
  uint64_t wait_ns;                 /* how long readers may be waited for until refill_ns */
  uint64_t refill_ns;               /* when that is allowed anew */
  uint64_t last_ns;                 /* until when they are waited for at the end, 0 before it */
  bool failed;                      /* the first cause of an attempt was shown */
  even_interruption *interruptions; /* a rank each, once the user ends the job; else NULL */
  even_live_call *live;             /* NULL: none (not a terminal) */
  void *live_context;
  even_text picture;
  even_text line;  /* under construction */
  int drawn_lines; /* of the picture on the screen now */
  uint64_t next_draw_ns;
} even_job_view;

/* From here to close, nobody else prints to standard output and standard error. `run_folder` outlives the view. */
even_status even_job_view_open(even_job_view *view, bool quiet, bool json, const bool *shown, int ranks,
                               const char *run_folder) EVEN_MUST_USE;
/* Keeps a live view at the bottom of standard output where that is a terminal. */
void even_job_view_live(even_job_view *view, even_live_call *live, void *context);
void even_job_view_attempt(even_job_view *view);
/* Ranks are others now; as in even_job_view_open. */
void even_job_view_ranks(even_job_view *view, const bool *shown, const char *const *labels, int ranks);
/* Another rank is the main one now; as in the agent's observer. */
void even_job_view_main(even_job_view *view, int rank);
/* The user ends the job: tracebacks of that alone are not shown from now on. */
void even_job_view_interrupted(even_job_view *view);
void even_job_view_line(even_job_view *view, int rank, bool error, const char *text, size_t length);
/* A line to standard error. */
void even_job_view_notice(even_job_view *view, const char *text);
/* A line to standard output as it is, such as the outcome in JSON. */
void even_job_view_result(even_job_view *view, const char *text);
void even_job_view_end(even_job_view *view, int rank, even_rank_end end, int code, const char *cause,
                       const char *excerpt);
/* Draws the live view anew when it is time. */
void even_job_view_tick(even_job_view *view);
/* The ranks have ended: waits a while for a reader that paused, draws the live view a last time and leaves it there. */
void even_job_view_settle(even_job_view *view);
/* Waits a while for the readers to take what is left; false when one still pauses: a plain write to it would hang. */
bool even_job_view_close(even_job_view *view);

#endif
