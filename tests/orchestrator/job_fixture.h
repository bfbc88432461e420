/* Jobs of shell scripts, and what the observer saw of them. */
#ifndef EVEN_TESTS_ORCHESTRATOR_JOB_FIXTURE_H
#define EVEN_TESTS_ORCHESTRATOR_JOB_FIXTURE_H

#include "base/text.h"
#include "orchestrator/agent.h"

#include <evenstep/telemetry.h>

typedef struct job_fixture {
  char folder[64]; /* the test's own; the run folder is FOLDER/run, checkpoints in FOLDER/checkpoints */
  char run_folder[96];
  char checkpoints[96];
  even_device devices[2];
  even_device_list list;
  even_text seen; /* "attempt 0|started 0|line 1 text|gone 1|ended 1 kind code cause|notice text|" */
  void (*on_attempt)(struct job_fixture *job, int attempt);             /* may be NULL */
  void (*on_line)(struct job_fixture *job, int rank, const char *text); /* may be NULL */
  void (*on_tick)(struct job_fixture *job);                             /* may be NULL */
  void (*on_notice)(struct job_fixture *job, const char *text);         /* may be NULL */
  even_status (*check)(void *job);                                      /* may be NULL */
  int telemetry_fd;                                                     /* of open; -1 for none */
  pid_t pids[2];
  double *quota;
  const char *resume;
  even_agent_elsewhere elsewhere;
  int max_restarts;
  bool restart_always;
  double hang_seconds;
  bool restart_hung;
  double notice_seconds;
  const char *notice_from;
  double notice_every_seconds;
  bool shrink;
  bool replace;
  struct even_legacy *legacy;
  struct even_aside *aside;
} job_fixture;

void job_fixture_open(job_fixture *job);
void job_fixture_close(job_fixture *job);
/* Opens the job of a test. */
int job_fixture_setup(void **state);
/* Closes and frees it: no fault and no child is left of it, whatever happened. */
int job_fixture_teardown(void **state);
/* Runs `script` with sh as two ranks; $FOLDER is the test's folder. */
even_status job_fixture_run(job_fixture *job, const char *script, int *exit_code);
/* Writes an event into a rank's ring, as the rank would. */
void job_fixture_event(const job_fixture *job, int rank, even_event event);
void job_fixture_event_of(const job_fixture *job, int rank, even_event event, int64_t value);
/* Makes the empty file FOLDER/NAME. */
void job_fixture_touch(const job_fixture *job, const char *name);
bool job_fixture_saw(const job_fixture *job, const char *text);
/* Writes a whole checkpoint FOLDER/NAME with the library, as a script does that names no writer. */
void job_fixture_write_checkpoint(job_fixture *job, const char *name);
/* The same with another state. */
void job_fixture_write_checkpoint_in(job_fixture *job, const char *name, const char *state);
/* The same, as es.checkpoint does: of a training, written by a job. */
void job_fixture_write_checkpoint_of(job_fixture *job, const char *name, const char *lineage, const char *writer);

#endif
