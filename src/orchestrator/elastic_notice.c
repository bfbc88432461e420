/* A host has notice that it must end soon (--notice, --notice-from): the others go on without it, or all end. */
#include "base/fail.h"
#include "orchestrator/elastic.h"
#include "os/clock.h"

#include <signal.h>
#include <stdio.h>

static void tell_leaving(even_job *job, const even_host_agent *agent) {
  even_job_notice(job,
                  "host %s leaves: the training saves its state after the step under way, and goes on with %zu rank%s",
                  agent->name, even_elastic_ranks(job), even_elastic_ranks(job) == 1 ? "" : "s");
}

/* Ctrl-C where `evenstep join` was typed. */
static void let_go(even_job *job, even_host_agent *agent) {
  if (even_elastic_may_go(job, agent) != EVEN_OK) {
    even_job_notice(job, "host %s would leave, and may not: %s", agent->name, even_error_last()->what);
    even_error_clear();
    return;
  }
  agent->leaves = true;
  even_elastic_ask(job);
  tell_leaving(job, agent);
}

static double seconds_of(const even_job *job, const even_notice *notice) {
  return notice->seconds > 0 ? notice->seconds : job->params->notice_seconds;
}

/* Whether the others go on without it; its time counts from `since_ns`. */
static bool leave(even_job *job, even_host_agent *agent, const even_notice *notice, uint64_t since_ns) {
  if (job->hosts->params.least_ranks == 0 || !(job->params->notice_seconds > 0)) {
    return false;
  }
  if (even_elastic_may_go(job, agent) != EVEN_OK) {
    even_error_clear(); /* then all end, as they do without --min-ranks */
    return false;
  }
  double seconds = seconds_of(job, notice);
  uint64_t until = since_ns + (uint64_t)(seconds * 1e9);
  even_elastic *elastic = job->hosts->elastic;
  elastic->until_ns = elastic->until_ns == 0 || until < elastic->until_ns ? until : elastic->until_ns;
  agent->leaves = true;
  even_elastic_ask(job);
  even_job_notice(job,
                  "host %s: %s: the training saves its state after the step under way, within %g s (%s), and "
                  "goes on with %zu rank%s without that host",
                  agent->name, even_notice_words(notice), seconds, even_notice_option(notice), even_elastic_ranks(job),
                  even_elastic_ranks(job) == 1 ? "" : "s");
  return true;
}

static bool is_running(const even_job *job) {
  return job->stage == EVEN_JOB_RUNS && job->alive > 0;
}

/* Where the job cannot go on without it, all end. */
static void heed(even_job *job, even_host_agent *agent, const even_notice *notice, uint64_t since_ns) {
  char whose[EVEN_HOSTS_NAME + 16];
  bool ends = job->draining != 0;
  if (leave(job, agent, notice, since_ns)) {
    return;
  }
  (void)snprintf(whose, sizeof whose, "host %s: ", agent->name);
  if (even_job_drain(job, notice, whose) && !ends) {
    job->drain_until_ns = since_ns + (uint64_t)(seconds_of(job, notice) * 1e9);
  }
}

static void keep(even_job *job, even_host_agent *agent, const even_notice *notice) {
  if (agent->notice.signal != 0 || !(job->params->notice_seconds > 0) || !even_notice_is_one(notice)) {
    return;
  }
  agent->notice = (even_host_notice){.signal = notice->signal, .seconds = notice->seconds, .at_ns = even_clock_ns()};
  (void)snprintf(agent->notice.what, sizeof agent->notice.what, "%s", notice->what);
  even_job_notice(job, "host %s: %s: no ranks run now, and it is heeded before the next ones do", agent->name,
                  even_notice_words(notice));
}

void even_elastic_notice(even_job *job, even_host_agent *agent, const even_notice *notice) {
  if (agent->came && notice->signal == SIGINT) {
    let_go(job, agent);
  } else if (is_running(job)) {
    heed(job, agent, notice, even_clock_ns());
  } else {
    keep(job, agent, notice);
  }
}

void even_elastic_heed_between(even_job *job) {
  for (size_t i = 1; i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    if (agent->notice.signal == 0 || job->hosts->params.least_ranks == 0) {
      continue;
    }
    if (even_elastic_may_go(job, agent) != EVEN_OK) {
      even_error_clear(); /* then all end, once there are ranks that can save their state */
      continue;
    }
    agent->leaves = true;
    agent->notice.signal = 0;
    even_job_notice(job, "host %s has notice: the job goes on with %zu rank%s without that host", agent->name,
                    even_elastic_ranks(job), even_elastic_ranks(job) == 1 ? "" : "s");
  }
}

/* Of a machine that is there still when its time is over, the new ranks have that once more: ended in their first tick
 * they would have saved nothing, and the job would end as if nobody had given notice. */
static uint64_t counts_from(const even_job *job, const even_notice *notice, uint64_t came_ns) {
  uint64_t now = even_clock_ns();
  return now - came_ns < (uint64_t)(seconds_of(job, notice) * 1e9) ? came_ns : now;
}

void even_elastic_heed(even_job *job) {
  for (size_t i = 1; is_running(job) && i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    const even_host_notice kept = agent->notice;
    const even_notice notice = {.signal = kept.signal, .seconds = kept.seconds, .what = kept.what};
    agent->notice.signal = 0;
    if (kept.signal != 0 && !agent->lost) { /* of one that is lost there is nothing to be saved in time */
      heed(job, agent, &notice, counts_from(job, &notice, kept.at_ns));
    }
  }
}
