/* Notice that the job, or one of its hosts, must end soon (--notice): the ranks save their state after the step under
 * way and end by themselves; who has not in time is ended as by that signal without notice. */
#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/reader.h"
#include "orchestrator/elastic.h"
#include "orchestrator/follower.h"
#include "orchestrator/job.h"
#include "os/clock.h"

bool even_job_drain(even_job *job, int number, const char *whose) {
  double seconds = job->params->notice_seconds;
  if (seconds <= 0 || (number != SIGTERM && number != SIGUSR1) || job->stage != EVEN_JOB_RUNS || job->alive == 0) {
    return false;
  }
  if (job->follower != NULL) {
    return even_job_follower_drains(job, number);
  }
  if (job->draining != 0) {
    return whose[0] != '\0' || number == SIGUSR1; /* a further SIGTERM here ends it without waiting */
  }
  if (job->progress.reader == NULL) {
    return false; /* nobody can be asked */
  }
  job->draining = number;
  job->drain_until_ns = even_clock_ns() + (uint64_t)(seconds * 1e9);
  even_telemetry_reader_ask_end(job->progress.reader, true);
  even_job_notice(
      job,
      "%s%s: the training saves its state after the step under way and ends, within %g s (--notice); again: "
      "without waiting",
      whose, even_signal_name(number), seconds);
  return true;
}

bool even_job_drain_late(even_job *job) {
  if (job->follower != NULL || job->draining == 0 || job->stage != EVEN_JOB_RUNS ||
      even_clock_ns() < job->drain_until_ns) {
    return false;
  }
  even_job_notice(job, "the time of --notice is over, and %zu rank%s not ended", job->alive,
                  job->alive == 1 ? " has" : "s have");
  return true;
}

void even_job_drain_ended(even_job *job, even_job_rank *rank) {
  if ((job->draining != 0 || job->changing) && rank->end.signal == 0 && rank->end.code == EVEN_SAVED_AND_ENDED) {
    rank->end.code = 0;
    job->saved++;
  }
}

void even_job_drain_forget(even_job *job) {
  job->draining = 0;
  job->saved = 0;
  even_elastic_forget(job);
  if (job->progress.reader != NULL) {
    even_telemetry_reader_ask_end(job->progress.reader, false);
  }
}

int even_job_drain_code(even_job *job) {
  char *path = NULL;
  if (job->saved == 0) {
    return 0; /* the training came to its end meanwhile */
  }
  if (job->params->checkpoint_folder != NULL &&
      even_checkpoint_find_newest(job->params->checkpoint_folder, false, &path) != EVEN_OK) {
    even_error_clear();
  }
  even_job_notice(job, "the training is saved%s%s and has ended; --name and --resume auto go on with it",
                  path == NULL ? "" : " in ", path == NULL ? "" : path);
  even_free(path);
  return EVEN_SAVED_AND_ENDED;
}
