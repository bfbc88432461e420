/* A host has notice that it must end soon (--notice, --notice-from): the others go on without it, or all end. */
#include "base/fail.h"
#include "orchestrator/elastic.h"
#include "orchestrator/succession.h"
#include "os/clock.h"
#include "os/signals.h"

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
  if (agent->notice.signal != 0 || (job != NULL && !(job->params->notice_seconds > 0)) || !even_notice_is_one(notice)) {
    return;
  }
  agent->notice = (even_host_notice){.signal = notice->signal, .seconds = notice->seconds, .at_ns = even_clock_ns()};
  (void)snprintf(agent->notice.what, sizeof agent->notice.what, "%s", notice->what);
  if (job != NULL) {
    even_job_notice(job, "host %s: %s: no ranks run now, and it is heeded before the next ones do", agent->name,
                    even_notice_words(notice));
  }
}

void even_elastic_notice(even_job *job, even_host_agent *agent, const even_notice *notice) {
  if (agent->witness) { /* it has no ranks: when it is gone it is started again */
    return;
  }
  if (job == NULL) {
    keep(job, agent, notice);
  } else if (agent->came && notice->signal == SIGINT) {
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
    bool heeds = job->params->notice_seconds > 0 && job->hosts->params.least_ranks > 0;
    if (agent->notice.signal == 0 || !heeds) {
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

/* ---- while the job waits for ranks ---- */

static even_status end_waiting(even_job *job, int signal, const char *what) {
  even_job_drain_between(job, &(even_notice){.signal = signal, .what = what});
  return even_fail(EVEN_ERR_INTERRUPTED, "the job was to end while hosts were waited for");
}

/* As one that is lost it may be waited for, when the machine may be there again. The others vote without it first: it
 * counts among them for as long as it is there. */
static even_status leave_waiting(even_job *job, even_host_agent *agent) {
  const even_notice notice = {
      .signal = agent->notice.signal, .seconds = agent->notice.seconds, .what = agent->notice.what};
  uint64_t until = agent->notice.at_ns + (uint64_t)(seconds_of(job, &notice) * 1e9);
  (void)snprintf(agent->lost_words, sizeof agent->lost_words, "it has notice (%s)", even_notice_words(&notice));
  even_elastic_leave_out(job, agent, agent->lost_words);
  agent->back_ns = until > agent->back_ns ? until : agent->back_ns;
  agent->member = 0;
  agent->cannot_vote = true;
  EVEN_TRY(even_succession_join(job));
  even_elastic_say_goodbye(agent);
  agent->lost = true;
  return even_elastic_may_wait(job) ? EVEN_OK : even_elastic_too_few(job, 0);
}

even_status even_elastic_heed_waiting(even_job *job) {
  const even_hosts_params *params = &job->hosts->params;
  even_job_drain_wait(job);
  const even_notice own = {.signal = job->own_notice.signal, .what = job->own_notice.what};
  bool heeds = job->params->notice_seconds > 0;
  int pending = heeds ? even_signals_notice_pending() : 0;
  if (heeds && even_notice_is_one(&own)) { /* Ctrl-C of a host that had joined, and leads now, is none */
    return end_waiting(job, own.signal, own.what);
  }
  if (pending != 0) {
    return end_waiting(job, pending, "");
  }
  for (size_t i = 1; i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    bool may = params->least_ranks > 0 || ((params->shell != NULL || params->returns) && !agent->came);
    if (agent->notice.signal != 0 && agent->fits && !agent->leaves && may) {
      EVEN_TRY(leave_waiting(job, agent));
    }
  }
  return EVEN_OK;
}
