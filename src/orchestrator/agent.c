/* The job from its first attempt to its exit code: attempts, the cause of a failure, restarts. */
#include "orchestrator/agent.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/adopt.h"
#include "orchestrator/aside.h"
#include "orchestrator/copies.h"
#include "orchestrator/elastic.h"
#include "orchestrator/estate.h"
#include "orchestrator/hangs.h"
#include "orchestrator/job.h"
#include "orchestrator/job_attempt.h"
#include "orchestrator/outlast.h"
#include "orchestrator/pace.h"
#include "orchestrator/remote.h"
#include "orchestrator/resume.h"
#include "orchestrator/standing.h"
#include "orchestrator/stragglers.h"
#include "orchestrator/succession.h"
#include "orchestrator/usages.h"
#include "os/clock.h"
#include "os/descriptors.h"
#include "os/path.h"
#include "os/priority.h"
#include "os/random.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { RESTART_WORDS = 96 };

void even_job_notice(even_job *job, const char *format, ...) {
  va_list arguments;
  char text[EVEN_JOB_NOTICE];
  if (job->params->observer.notice == NULL) {
    return;
  }
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  job->params->observer.notice(job->params->observer.context, text);
}

void even_job_interrupted(even_job *job, int signal) {
  if (job->interrupted != 0) {
    return;
  }
  job->interrupted = signal;
  even_succession_finish(job->hosts); /* whatever ends this agent from now on, no other host goes on */
  if (job->params->observer.interrupted != NULL) {
    job->params->observer.interrupted(job->params->observer.context, signal);
  }
}

static even_rank_end kind_of(const even_fault_facts *facts) {
  if (facts->lost != NULL) {
    return EVEN_RANK_LOST;
  }
  if (facts->out_of_memory) {
    return EVEN_RANK_OUT_OF_MEMORY;
  }
  if (facts->stopped_by_agent && (facts->signal != 0 || facts->code != 0)) {
    return EVEN_RANK_STOPPED_BY_AGENT;
  }
  if (facts->leave != EVEN_LEAVE_NONE) {
    return EVEN_RANK_LEFT;
  }
  return facts->signal != 0 ? EVEN_RANK_SIGNALLED : EVEN_RANK_EXITED;
}

/* A rank that ran out of memory has fewer samples from the next attempt on, where others can take the rest. */
static void note_shortage(even_job *job, const even_fault_facts *facts) {
  const even_shortage *one = NULL;
  size_t ranks = job->count - (size_t)job->params->spares;
  if (job->follower != NULL || ranks < 2 || !even_fault_is_of_memory(facts)) {
    return;
  }
  even_shortages_note(&job->shortages, facts->host, facts->device, facts->samples, facts->batch, &one);
  if (one == NULL) {
    return;
  }
  job->smaller = true;
  if (even_legacy_leave(job->params->legacy, job) != EVEN_OK) {
    even_error_clear(); /* whoever is started in this agent's place does not know of it */
  }
  if (job->hosts != NULL && even_succession_bequeath(job) != EVEN_OK) {
    even_error_clear(); /* lack of memory: the next attempt's estate says it */
  }
  if (one->most > 0) {
    even_job_notice(job,
                    "rank %d (%s) ran out of memory: it has at most %u of %u samples a step from the next attempt on",
                    facts->rank, facts->device, one->most, one->batch);
  } else {
    even_job_notice(job,
                    "rank %d (%s) ran out of memory before its first step: the next attempt gives it 1/%u of what "
                    "it would begin with",
                    facts->rank, facts->device, one->part);
  }
}

static even_status report_end(even_job *job, even_fault_facts *facts) {
  even_text cause = EVEN_TEXT_EMPTY;
  even_text excerpt = EVEN_TEXT_EMPTY;
  even_status status = even_fault_explain(facts, &cause, &excerpt);
  if (status == EVEN_OK && job->params->observer.rank_ended != NULL) {
    job->params->observer.rank_ended(job->params->observer.context, facts->rank, kind_of(facts),
                                     facts->signal != 0 ? facts->signal : facts->code, cause.data, excerpt.data);
  }
  even_text_free(&cause);
  even_text_free(&excerpt);
  note_shortage(job, facts);
  return status;
}

void even_job_tell_end(even_job *job, size_t rank) {
  even_oom_watch_read(&job->oom);
  even_progress_read(&job->progress);
  even_fault_facts facts = even_job_facts(job, rank);
  if (report_end(job, &facts) != EVEN_OK) {
    even_error_clear(); /* the notice of who goes on says what is left to say */
  }
}

/* Of those without whom nobody went on; where one of these failed only for lack of others, of all. `count`: nobody. */
static size_t find_culprit(const even_job *job, const even_fault_facts *ends, even_fault_facts *room) {
  size_t count = 0;
  for (size_t i = 0; i < job->count; i++) {
    if (!even_job_lost(job, job->order[i])) {
      room[count++] = ends[i];
    }
  }
  size_t found = even_fault_culprit(room, count);
  if (found == count) {
    return job->count;
  }
  if (count < job->count && even_fault_is_secondary(&room[found])) {
    return even_fault_culprit(ends, job->count);
  }
  for (size_t i = 0; i < job->count; i++) {
    if (ends[i].rank == room[found].rank) {
      return i;
    }
  }
  return job->count;
}

static size_t world(const even_job *job) {
  return job->count - (size_t)job->params->spares;
}

/* With --recovery the first who was lost, without whom the others went on; else who ended the attempt. NULL: it may be
 * the fault of no place, or nobody knows. */
static const even_fault_facts *find_place(const even_job *job, const even_fault_facts *ends, size_t culprit) {
  size_t first = even_job_lost(job, job->order[0]) ? 0 : culprit;
  size_t count = first == culprit ? job->count : 1;
  bool its = even_fault_is_of_place(ends, count, first) && (size_t)ends[first].rank < world(job);
  return its ? &ends[first] : NULL;
}

/* Reports every rank's end, the one that began it first. *culprit == count: all ended well. *place: whose place
 * may be at fault. */
static even_status report_ends(even_job *job, even_fault_facts *ends, size_t *culprit, even_fault_facts *its,
                               const even_fault_facts **place) {
  even_fault_facts *room = NULL;
  EVEN_TRY(EVEN_NEW_ARRAY(&room, job->count));
  even_oom_watch_read(&job->oom);
  even_progress_read(&job->progress);
  for (size_t i = 0; i < job->count; i++) {
    ends[i] = even_job_facts(job, job->order[i]);
  }
  *culprit = find_culprit(job, ends, room);
  even_free(room);
  *place = find_place(job, ends, *culprit);
  if (*culprit < job->count) {
    /* what it failed of came before our signal */
    ends[*culprit].stopped_by_agent = ends[*culprit].stopped_by_agent && job->interrupted != 0;
    if (ends[*culprit].signal == 0 && ends[*culprit].code == 0 && !ends[*culprit].stood_still &&
        ends[*culprit].hung == NULL && ends[*culprit].slow == NULL && ends[*culprit].lost == NULL &&
        ends[*culprit].leave == EVEN_LEAVE_NONE) {
      ends[*culprit].leave = EVEN_LEAVE_EARLY;
    }
    *its = ends[*culprit];
    EVEN_TRY(report_end(job, &ends[*culprit]));
  }
  for (size_t i = 0; i < job->count; i++) {
    if (i != *culprit && !even_job_lost(job, job->order[i])) { /* of a lost one was told when it was lost */
      EVEN_TRY(report_end(job, &ends[i]));
    }
  }
  return EVEN_OK;
}

static const char *place_of_resume(const even_job *job) {
  return job->resume.length > 0 ? job->resume.data : "the beginning: there is no whole checkpoint of it";
}

/* For a failure, in its whole life. */
static int restarts_made(const even_job *job) {
  return job->attempt - job->planned;
}

static int restarts_that_count(const even_job *job) {
  return even_restarts_count(&job->restarts, restarts_made(job));
}

static void name_restart(const even_job *job, char *out, size_t bytes) {
  even_restarts_name(&job->restarts, restarts_made(job), job->params->max_restarts, out, bytes);
}

/* Whether an end is worth a restart though no checkpoint was written since the attempt began. */
static bool is_no_error_of_the_script(const even_job *job, const even_fault_facts *culprit) {
  /* Whoever took the lost rank's place has ended since by our signal: its own end is not seen any more. */
  bool for_lack = job->did_without && even_fault_is_secondary(culprit);
  return for_lack || culprit->signal != 0 || culprit->lost != NULL || culprit->stood_still || culprit->hung != NULL ||
         culprit->slow != NULL || culprit->out_of_memory || job->smaller ||
         even_fault_blames_place(culprit) != EVEN_PLACE_SPARED;
}

/* After a failed attempt: whether to start again, and from where. */
static even_status plan_restart(even_job *job, const even_fault_facts *culprit, bool *again) {
  even_text before = EVEN_TEXT_EMPTY;
  char words[RESTART_WORDS];
  *again = false;
  if (job->params->max_restarts == 0) {
    return EVEN_OK;
  }
  even_text_add(&before, even_text_string(&job->resume));
  even_status status = even_text_status(&before);
  if (status == EVEN_OK) {
    status = even_job_find_resume(job, true);
  }
  bool progress = strcmp(even_text_string(&before), even_text_string(&job->resume)) != 0;
  even_text_free(&before);
  if (status != EVEN_OK && status != EVEN_ERR_INTERRUPTED && restarts_that_count(job) >= job->params->max_restarts) {
    even_job_notice(job, "no restart is left (--max-restarts %d), and no newer checkpoint was found: %s",
                    job->params->max_restarts, even_error_last()->what);
    even_error_clear(); /* the rank's end is the job's */
    return EVEN_OK;
  }
  EVEN_TRY(status);
  (void)even_restarts_reach(&job->restarts, restarts_made(job), job->resume_step);
  if (restarts_that_count(job) >= job->params->max_restarts) {
    even_job_notice(job, "no restart is left (--max-restarts %d): none of them has led to a newer checkpoint",
                    job->params->max_restarts);
    return EVEN_OK;
  }
  if (!progress && !is_no_error_of_the_script(job, culprit) && !job->params->restart_always) {
    even_job_notice(job,
                    "not restarted: the script ended by an error of its own and no checkpoint was written since it "
                    "began (--max-restarts N restarts all the same)");
    return EVEN_OK;
  }
  *again = true;
  job->attempt++;
  name_restart(job, words, sizeof words);
  even_job_notice(job, "%s from %s%s", words, place_of_resume(job), even_job_resume_place(job));
  even_pace_restart(job);
  return EVEN_OK;
}

/* All ranks have saved their state, for the hosts to change. */
static even_status plan_change(even_job *job) {
  EVEN_TRY(even_job_find_resume(job, true));
  (void)even_restarts_reach(&job->restarts, restarts_made(job), job->resume_step);
  job->attempt++;
  job->planned++;
  job->restarts.short_lived = 0; /* it has not failed */
  even_job_notice(job, "the hosts change: the job goes on from %s", place_of_resume(job));
  return EVEN_OK;
}

static int exit_code_of(const even_fault_facts *facts) {
  if (facts->leave != EVEN_LEAVE_NONE || facts->stood_still || facts->hung != NULL || facts->slow != NULL ||
      facts->lost != NULL) {
    return even_status_exit_code(EVEN_ERR_RANK_FAILED); /* its own is 0, or of our signal */
  }
  return facts->signal != 0 ? 128 + facts->signal : facts->code;
}

static const char *reason_of(const even_fault_facts *facts) {
  if (facts->hung != NULL) {
    return "it hung";
  }
  return facts->signal != 0 ? even_signal_name(facts->signal) : "its device is at fault";
}

static void tell_aside(even_job *job, const even_aside_place *one, const even_fault_facts *facts, size_t ranks) {
  even_job_notice(job,
                  "place %zu (%s)%s%s is set aside for %.0f s: its rank was the first to fail in %d attempts in a row "
                  "(%s); the job goes on with %zu rank%s",
                  one->place, one->device, one->host[0] == '\0' ? "" : " of host ", one->host,
                  (double)(one->until_ns - even_clock_ns()) * 1e-9, EVEN_ASIDE_ATTEMPTS, reason_of(facts), ranks,
                  ranks == 1 ? "" : "s");
}

/* Its rank ended the attempt, and maybe the one before: which places take part in the next one. `facts` NULL: nobody's.
 */
static void judge_place(even_job *job, const even_fault_facts *facts) {
  even_aside *aside = job->params->aside;
  const even_aside_place *one = NULL;
  if (aside == NULL) {
    return;
  }
  size_t ranks = world(job);
  size_t least = (size_t)job->params->least_ranks;
  size_t host = 0;
  int local = facts == NULL ? -1 : facts->rank;
  if (facts != NULL && job->hosts != NULL) {
    host = even_job_host_number(job, (size_t)facts->rank);
    const even_host_agent *agent = &job->hosts->agents[host];
    local -= (int)(host == 0 ? job->first : agent->first);
    least = (host == 0 ? job->local : agent->count) < 2 ? ranks : least; /* no host does without all of its own */
  }
  even_aside_failed(aside, job->hosts == NULL ? "" : job->hosts->agents[host].name, local,
                    facts == NULL ? "" : facts->device, ranks, least, even_clock_ns(), &one);
  if (one != NULL) {
    tell_aside(job, one, facts, ranks - 1);
  }
  while ((one = even_aside_return(aside, even_clock_ns())) != NULL) {
    even_job_notice(job, "place %zu (%s)%s%s takes part again", one->place, one->device,
                    one->host[0] == '\0' ? "" : " of host ", one->host);
  }
}

/* What follows an attempt that came to its end; *again: another one. */
static even_status judge(even_job *job, even_fault_facts *ends, int *exit_code, bool *again) {
  size_t culprit = job->count;
  even_fault_facts its = {.rank = -1};
  const even_fault_facts *place = NULL;
  EVEN_TRY(report_ends(job, ends, &culprit, &its, &place));
  even_job_note_progress(job);
  if (job->interrupted != 0) {
    *exit_code = 128 + job->interrupted;
    return EVEN_OK;
  }
  if (culprit == job->count && even_elastic_has_saved(job)) {
    *again = true;
    return plan_change(job);
  }
  if (culprit == job->count) {
    *exit_code = even_job_drain_code(job);
    return EVEN_OK;
  }
  *exit_code = exit_code_of(&its);
  if (job->draining != 0) {
    even_job_notice(job, "not restarted: the job was to end");
    return EVEN_OK;
  }
  EVEN_TRY(plan_restart(job, &its, again));
  if (*again) {
    judge_place(job, place);
  }
  return EVEN_OK;
}

/* One attempt, and what is done before the next one; *changed: for which the job must be opened anew. */
static even_status run_once(even_job *job, even_fault_facts *ends, int *exit_code, bool *again, bool *changed) {
  if (even_elastic_begins_without(job) || even_elastic_lacks(job)) { /* its leader was lost, and hosts with it */
    *again = true;
    return even_elastic_settle(job, changed);
  }
  even_pace_begin(job);
  even_status ran = even_job_run_attempt(job);
  if (even_elastic_tries_again(job, ran)) {
    even_error_clear();
    *again = true;
    return even_elastic_settle(job, changed);
  }
  EVEN_TRY(ran);
  EVEN_TRY(judge(job, ends, exit_code, again));
  EVEN_TRY(even_pace_wait(job));
  if (*again && job->hosts == NULL && job->params->aside != NULL && job->params->aside->changed) {
    *changed = true;
    return EVEN_OK;
  }
  return *again ? even_elastic_settle(job, changed) : EVEN_OK;
}

/* *changed: it goes on with other hosts. */
static even_status run_attempts(even_job *job, even_fault_facts *ends, int *exit_code, bool *changed) {
  bool again = true;
  while (again && !*changed) {
    again = false;
    if (job->params->observer.attempt != NULL) {
      job->params->observer.attempt(job->params->observer.context, job->attempt);
    }
    EVEN_TRY(even_legacy_leave(job->params->legacy, job));
    bool asked = !job->adopted && even_signals_end_pending() != 0; /* while checkpoints were read: none has to start */
    even_status status = asked ? EVEN_ERR_INTERRUPTED : run_once(job, ends, exit_code, &again, changed);
    if (status == EVEN_ERR_INTERRUPTED && even_job_ended_between(job, exit_code)) {
      return EVEN_OK;
    }
    EVEN_TRY(status);
  }
  return EVEN_OK;
}

static even_status check(const even_agent_params *params) {
  if (params->devices == NULL || params->devices->count == 0 || params->command == NULL || params->command[0] == NULL ||
      params->run_folder == NULL || params->max_restarts < 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "a job needs devices, a command and a run folder");
  }
  return EVEN_OK;
}

/* The agent holds a pipe for each of a rank's streams, its log and its checkpoints' memory; a few more of its own,
 * while it starts one, or sweeps. The page's connections come and go meanwhile: a restart must find room beside them.
 */
static even_status make_room(even_job *job) {
  enum { OF_A_RANK = 4, ITS_OWN = 16, SPARE = 128 };
  bool tight = false;
  even_status status =
      even_descriptors_raise(OF_A_RANK * (uint64_t)job->count + ITS_OWN, SPARE, &job->descriptors_before, &tight);
  if (tight) {
    even_job_notice(job,
                    "the hard limit on open files (`ulimit -Hn`) leaves little room beside %zu ranks: while many read "
                    "the page, a restart may find none",
                    job->count);
  }
  if (status != EVEN_OK) {
    (void)even_error_prefix("%zu ranks", job->count);
    (void)even_error_fix(
        "start fewer ranks, or raise the hard limit (`ulimit -Hn` as root, LimitNOFILE= of a service, --ulimit nofile= "
        "of a container)");
  }
  return status;
}

/* With the job of an agent that was killed, whose ranks are no more. */
static even_status go_on_after_killed(even_job *job) {
  char words[RESTART_WORDS];
  EVEN_TRY(even_legacy_take(job->params->legacy, job));
  EVEN_TRY(even_job_find_resume(job, true));
  (void)even_restarts_reach(&job->restarts, restarts_made(job) - 1, job->resume_step);
  name_restart(job, words, sizeof words);
  even_job_notice(job, "the agent before was killed: %s from %s", words, place_of_resume(job));
  even_elastic_tell_sought(job);
  return EVEN_OK;
}

/* With another leader's job, as after any failure of a host. */
static even_status go_on_under_another(even_job *job) {
  char words[RESTART_WORDS];
  EVEN_TRY(even_estate_take(job->params->estate, job));
  EVEN_TRY(even_job_find_resume(job, true));
  const char *from = place_of_resume(job);
  const even_estate *estate = job->params->estate;
  bool handed = even_estate_is_handed(estate);
  (void)even_restarts_reach(&job->restarts, restarts_made(job) - (handed ? 0 : 1), job->resume_step);
  if (restarts_that_count(job) > job->params->max_restarts) {
    return even_fail(EVEN_ERR_PEER_LOST, "the leader is lost, and no restart is left (--max-restarts %d)",
                     job->params->max_restarts);
  }
  if (handed) {
    even_job_notice(job, "this host leads now (generation %llu), for host %s is drained: the job goes on from %s%s",
                    (unsigned long long)estate->generation, even_estate_predecessor(estate), from,
                    even_job_resume_place(job));
    return EVEN_OK;
  }
  name_restart(job, words, sizeof words);
  even_job_notice(job, "this host leads now (generation %llu): %s from %s%s", (unsigned long long)estate->generation,
                  words, from, even_job_resume_place(job));
  return EVEN_OK;
}

/* Of one that serves another the leader says both. */
static even_status find_beginning(even_job *job) {
  if (job->follower != NULL || even_elastic_take(job)) {
    return EVEN_OK;
  }
  if (job->params->estate != NULL) {
    return go_on_under_another(job);
  }
  if (job->adopted) {
    return even_legacy_continue(job->params->legacy, job);
  }
  if (job->params->legacy != NULL && even_legacy_is_left(job->params->legacy)) {
    return go_on_after_killed(job);
  }
  if (job->params->id != NULL) {
    (void)snprintf(job->id, sizeof job->id, "%s", job->params->id);
  } else {
    EVEN_TRY(even_random_hex(job->id, EVEN_JOB_ID));
  }
  EVEN_TRY(even_job_find_foreign(job));
  EVEN_TRY(even_job_find_resume(job, false));
  (void)even_restarts_reach(&job->restarts, 0, job->resume_step);
  return EVEN_OK;
}

even_status even_job_open(even_job *job) {
  job->hurries = even_priority_raise(); /* whoever waits for a lost rank waits for this thread's word */
  EVEN_TRY(make_room(job));
  even_succession_turns(job, job->adopted); /* ranks run: up to the loop a disk may hang as in a turn of it */
  EVEN_TRY(even_job_make_folders(job));
  EVEN_TRY(find_beginning(job));
  even_host_name(job->host, sizeof job->host);
  EVEN_TRY(EVEN_NEW_ARRAY(&job->ranks, job->count));
  EVEN_TRY(EVEN_NEW_ARRAY(&job->order, job->count));
  EVEN_TRY(even_job_snapshots_open(job));
  EVEN_TRY(even_progress_open(job->params->telemetry_fd, job->count, &job->progress));
  EVEN_TRY(even_hangs_open(job, &job->hangs));
  EVEN_TRY(even_stragglers_open(job, &job->stragglers));
  EVEN_TRY(even_usages_open(job, &job->usages));
  EVEN_TRY(even_process_adopt_orphans());
  EVEN_TRY(even_signals_open(&job->signals));
  EVEN_TRY(even_loop_open(&job->loop));
  EVEN_TRY(even_outlast_open(job));
  EVEN_TRY(even_job_generations_open(job));
  EVEN_TRY(even_job_standing_open(job));
  EVEN_TRY(even_job_guard_open(job));
  even_outlast_keep(job);
  EVEN_TRY(even_loop_add(&job->loop, &job->signal_watch, job->signals.fd, even_job_signals_ready, job));
  return even_job_hosts_open(job);
}

void even_job_close(even_job *job) {
  even_succession_turns(job, false); /* where it could not be opened */
  if (job->hurries) {
    even_priority_lower();
  }
  even_job_flights_forget(job);
  even_job_hosts_close(job);
  even_outlast_close(job);
  even_slowdown_close(&job->slow);
  even_job_snapshots_close(job);
  even_succession_guard(job, false);
  even_job_drain_close(job); /* the guardian would wait for a command that nobody reaps */
  even_job_guard_close(job);
  even_oom_watch_close(&job->oom);
  even_progress_close(&job->progress);
  even_hangs_close(job->hangs);
  job->hangs = NULL; /* the rest of the ranks' output is yet to come */
  even_stragglers_close(job->stragglers);
  even_usages_close(job->usages);
  even_job_generations_close(job);
  even_job_standing_close(job);
  even_loop_close(&job->loop);
  (job->reopens ? even_signals_leave : even_signals_close)(&job->signals); /* unread ones are the next one's */
  if (job->descriptors_before != 0) {
    (void)even_descriptors_limit(job->descriptors_before);
  }
  even_job_forget_attempt(job);
  even_free(job->ranks);
  even_free(job->order);
  even_text_free(&job->run_folder);
  even_text_free(&job->resume);
  even_text_free(&job->foreign);
  even_text_free(&job->lineage);
  even_text_free(&job->began);
  even_text_free(&job->fetched);
}

static even_status open_and_run(even_job *job, even_status opened, int *exit_code) {
  bool changed = false;
  even_fault_facts *ends = NULL;
  even_status status = opened == EVEN_OK ? EVEN_NEW_ARRAY(&ends, job->count) : opened;
  if (status == EVEN_OK) {
    status = run_attempts(job, ends, exit_code, &changed);
  }
  if (status == EVEN_OK && changed) {
    even_elastic_keep(job);
    job->reopens = true;
  } else {
    even_copies_tell(job);
  }
  if (status == EVEN_OK && !changed) {
    even_legacy_finish(job->params->legacy, *exit_code);
  }
  even_free(ends);
  even_job_close(job);
  return status;
}

even_status even_agent_run(const even_agent_params *params, int *exit_code) {
  EVEN_TRY(check(params));
  if (params->estate != NULL && even_adopt_due(params->hosts)) {
    even_job *kept = NULL;
    even_status opened = even_adopt_open(params, &kept);
    return open_and_run(kept, opened, exit_code);
  }
  even_job job = {.params = params,
                  .count = params->devices->count,
                  .local = params->devices->count,
                  .master_address = "127.0.0.1",
                  .hosts = params->hosts,
                  .loop = {.fd = -1},
                  .signals = {.fd = -1},
                  .guardian = {.pid = -1, .pipe = -1},
                  .generation_fd = -1,
                  .oom = {.kernel_log = -1},
                  .own_notice = params->estate == NULL ? (even_host_notice){0} : params->estate->notice,
                  .adopted = even_outlast_due(params->legacy)};
  even_job_hosts_count(&job);
  return open_and_run(&job, even_job_open(&job), exit_code);
}
