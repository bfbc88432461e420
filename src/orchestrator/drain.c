/* Notice that the job, or one of its hosts, must end soon (--notice, --notice-from): the ranks save their state after
 * the step under way and end by themselves; who has not in time is ended as by that signal without notice. */
#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/reader.h"
#include "orchestrator/announcer.h"
#include "orchestrator/elastic.h"
#include "orchestrator/follower.h"
#include "orchestrator/job.h"
#include "orchestrator/job_attempt.h"
#include "orchestrator/outlast.h"
#include "os/clock.h"

#include <math.h>
#include <stdio.h>

static const double TOLD_AT_ONCE_SECONDS = 0.1;

const char *even_notice_words(const even_notice *notice) {
  return notice->what[0] != '\0' ? notice->what : even_signal_name(notice->signal);
}

const char *even_notice_option(const even_notice *notice) {
  return notice->signal == EVEN_DRAIN_ANNOUNCED ? "--notice-from" : "--notice";
}

/* A machine whose end was announced is shut down then: its first SIGTERM says nothing new, also where another host's
 * notice came before. */
static bool is_known(even_job *job, const even_notice *notice) {
  char what[EVEN_NOTICE_WORDS];
  double seconds = 0;
  bool drains = job->draining != 0 || job->own_notice.signal != 0;
  if (notice->signal != SIGTERM || !drains || job->shuts_down) {
    return false;
  }
  job->shuts_down = job->draining == EVEN_DRAIN_ANNOUNCED || job->own_notice.signal == EVEN_DRAIN_ANNOUNCED ||
                    even_announcer_due(job->announcer, &seconds, what);
  return job->shuts_down;
}

bool even_notice_is_one(const even_notice *notice) {
  return notice->signal == SIGTERM || notice->signal == SIGUSR1 || notice->signal == EVEN_DRAIN_ANNOUNCED;
}

static void tell_draining(even_job *job, const even_notice *notice, const char *whose, double seconds) {
  even_job_notice(job, "%s%s: the training saves its state after the step under way and ends, within %g s (%s)%s",
                  whose, even_notice_words(notice), seconds, even_notice_option(notice),
                  notice->signal == EVEN_DRAIN_ANNOUNCED ? "" : "; again: without waiting");
}

bool even_job_drain(even_job *job, const even_notice *notice, const char *whose) {
  double seconds = job->params->notice_seconds;
  bool runs = job->stage == EVEN_JOB_RUNS && job->alive > 0;
  if (seconds <= 0 || !even_notice_is_one(notice) || (!runs && job->follower == NULL)) {
    return false;
  }
  if (whose[0] == '\0' && is_known(job, notice)) {
    return true;
  }
  if (job->follower != NULL) { /* also between two attempts: the leader keeps it */
    bool taken = even_job_follower_drains(job, notice);
    job->shuts_down = job->shuts_down || (taken && notice->signal == SIGTERM);
    return taken;
  }
  if (job->draining != 0) {
    /* a further SIGTERM here ends it without waiting */
    return whose[0] != '\0' || notice->signal != SIGTERM;
  }
  if (job->progress.reader == NULL) {
    return false; /* nobody can be asked */
  }
  seconds = notice->seconds > 0 ? notice->seconds : seconds;
  bool own = whose[0] == '\0'; /* of another machine's end this one's SIGTERM is no sign */
  job->shuts_down = own && notice->signal == SIGTERM;
  job->draining = own || notice->signal != EVEN_DRAIN_ANNOUNCED ? notice->signal : SIGTERM;
  job->drain_until_ns = even_clock_ns() + (uint64_t)(seconds * 1e9);
  even_telemetry_reader_ask_end(job->progress.reader, true);
  tell_draining(job, notice, whose, seconds);
  return true;
}

void even_job_drain_between(even_job *job, const even_notice *notice) {
  bool saved = job->resume.length > 0;
  job->draining = notice->signal;
  even_job_notice(job,
                  "%s: no ranks run, and the training %s%s: the job ends (%s); --name and --resume auto go on with it",
                  even_notice_words(notice), saved ? "is saved in " : "has saved nothing yet",
                  even_text_string(&job->resume), even_notice_option(notice));
}

bool even_job_drain_late(even_job *job) {
  if (job->follower != NULL || job->draining == 0 || job->stage != EVEN_JOB_RUNS || job->alive == 0 ||
      even_clock_ns() < job->drain_until_ns) {
    return false;
  }
  even_job_notice(job, "the time of --notice is over, and %zu rank%s not ended", job->alive,
                  job->alive == 1 ? " has" : "s have");
  return true;
}

static void tell(void *context, const char *words) {
  even_job_notice(context, "%s", words);
}

/* Not where the guardian goes on with another agent, which would not know of it: there the kernel ends the command
 * alone. */
static void guard_session(void *context, pid_t leader, bool begins) {
  even_job *job = context;
  if (!even_outlast_holds(job)) {
    even_job_guard_command(job, leader, begins);
  }
}

/* A question of which nothing is heard is given up by its time. */
static void hear_answers(void *context, int fd) {
  even_job *job = context;
  (void)fd;
  if (even_loop_turn(&job->asking, 0) != EVEN_OK) {
    even_error_clear();
  }
}

static even_status open_asking(even_job *job) {
  EVEN_TRY(even_loop_open(&job->asking));
  even_status status = even_loop_add(&job->loop, &job->asking_watch, job->asking.fd, hear_answers, job);
  if (status != EVEN_OK) {
    even_loop_close(&job->asking);
  }
  return status;
}

static void close_asking(even_job *job) {
  even_loop_remove(&job->loop, &job->asking_watch);
  even_loop_close(&job->asking);
}

static even_status begin_asking(even_job *job) {
  const even_announcer_params params = {.place = job->params->notice_from,
                                        .loop = &job->asking,
                                        .seconds = job->params->notice_seconds,
                                        .every_seconds = job->params->notice_every_seconds,
                                        .tell = tell,
                                        .session = guard_session,
                                        .context = job};
  EVEN_TRY(open_asking(job));
  even_status status = even_announcer_open(&params, &job->announcer);
  if (job->announcer == NULL) {
    close_asking(job);
  }
  return status;
}

static void open_announcer(even_job *job) {
  if (begin_asking(job) != EVEN_OK) {
    even_job_notice(job, "nobody is asked whether this machine ends soon: %s", even_error_last()->what);
    even_error_clear();
  }
  job->unannounced = job->announcer == NULL;
}

double even_job_notice_left(const even_job *job) {
  const even_host_notice *own = &job->own_notice;
  double since = (double)(even_clock_ns() - own->at_ns) * 1e-9;
  double seconds = own->seconds > 0 ? own->seconds : job->params->notice_seconds;
  if (since < TOLD_AT_ONCE_SECONDS) {
    return own->seconds;
  }
  return since < seconds ? ceil((seconds - since) * 10) / 10 : 0; /* to be read, as below */
}

/* This host's, which nobody could be told when it came. */
static void heed_own(even_job *job) {
  const even_host_notice own = job->own_notice;
  if (own.signal == 0 || job->draining != 0) {
    return;
  }
  if (job->follower != NULL) {
    even_job_follower_say_notice(job);
    return;
  }
  const even_notice notice = {.signal = own.signal, .seconds = even_job_notice_left(job), .what = own.what};
  job->shuts_down = false;
  job->own_notice.signal = 0;
  if (!even_job_drain(job, &notice, "")) { /* it leads now; but no ranks run yet */
    job->own_notice = own;
  }
}

/* Asks on; whether an end is announced that is not heeded yet. */
static bool ask(even_job *job, double *seconds, char what[EVEN_NOTICE_WORDS]) {
  if (job->params->notice_from == NULL || job->params->notice_seconds <= 0 || job->unannounced) {
    return false;
  }
  if (job->announcer == NULL) {
    open_announcer(job);
  }
  even_announcer_tick(job->announcer);
  if (job->draining != 0 || !even_announcer_due(job->announcer, seconds, what)) {
    return false;
  }
  *seconds = ceil(*seconds * 10) / 10; /* to be read; a tenth of a second is nobody's */
  return true;
}

void even_job_drain_tick(even_job *job) {
  char what[EVEN_NOTICE_WORDS];
  even_notice notice = {.signal = EVEN_DRAIN_ANNOUNCED, .what = what};
  heed_own(job);
  bool announced = ask(job, &notice.seconds, what);
  bool heard = job->follower == NULL || even_job_follower_is_heard(job); /* else the next leader is told */
  if (heard && announced) {
    (void)even_job_drain(job, &notice, "");
  }
}

void even_job_drain_wait(even_job *job) {
  char what[EVEN_NOTICE_WORDS];
  even_host_notice *own = &job->own_notice;
  double seconds = 0;
  if (job->announcer != NULL) {
    hear_answers(job, job->asking.fd);
  }
  if (even_announcer_session(job->announcer) > 0) {
    even_job_reap(job);
  }
  const even_notice before = {.signal = own->signal, .what = own->what};
  if (ask(job, &seconds, what) && !even_notice_is_one(&before)) {
    *own = (even_host_notice){.signal = EVEN_DRAIN_ANNOUNCED, .seconds = seconds, .at_ns = even_clock_ns()};
    (void)snprintf(own->what, sizeof own->what, "%s", what);
  }
}

void even_job_drain_close(even_job *job) {
  if (job->announcer != NULL) {
    even_announcer_close(job->announcer);
    close_asking(job);
  }
  job->announcer = NULL;
}

void even_job_drain_ended(even_job *job, even_job_rank *rank) {
  if ((job->draining != 0 || job->changing) && rank->end.signal == 0 && rank->end.code == EVEN_SAVED_AND_ENDED) {
    rank->end.code = 0;
    job->saved++;
  }
}

void even_job_drain_forget(even_job *job) {
  if (job->draining != 0) { /* else it is yet to be told */
    job->own_notice.signal = 0;
  }
  job->draining = 0;
  job->shuts_down = false;
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
