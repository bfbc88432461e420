/* Lost hosts, from their agent's start to their part in an attempt that runs. */
#include "orchestrator/returns.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/gifts.h"
#include "orchestrator/pauses.h"
#include "orchestrator/remote_start.h"
#include "orchestrator/succession.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

/* Between two tries, each twice as long as the one before. */
static const uint64_t FIRST_PAUSE_NS = 10000000000u;
static const uint64_t LONGEST_PAUSE_NS = 600000000000u;

static uint64_t pause_after(unsigned tries) {
  return even_pause_after(FIRST_PAUSE_NS, LONGEST_PAUSE_NS, tries > 0 ? tries : 1);
}

static bool goes_on(const even_job *job) {
  return job->hosts != NULL && job->places != NULL && job->gifts != NULL && job->params->replace &&
         job->stage == EVEN_JOB_RUNS && job->alive > 0 && !job->changing && job->draining == 0 &&
         job->interrupted == 0 && even_succession_acts(job);
}

static bool is_awaited(const even_host_agent *agent) {
  const even_hosts_params *params = &agent->hosts->params;
  return (params->shell != NULL || params->returns || params->restarts) && !agent->witness && !agent->came &&
         !agent->leaves && !agent->parted && agent->count > 0;
}

/* It is lost as it was; `why` may be its own words. */
static void fail(even_job *job, even_host_agent *agent, const char *why) {
  char words[sizeof agent->lost_words];
  (void)snprintf(words, sizeof words, "%.300s", why);
  even_host_agent_drop(agent);
  agent->lost = true;
  agent->comes_back = false;
  uint64_t pause = pause_after(++agent->tries);
  agent->back_ns = even_clock_ns() + pause;
  job->hosts->failure.status = EVEN_OK; /* of this agent alone: nobody else is waited for while an attempt runs */
  (void)snprintf(agent->lost_words, sizeof agent->lost_words, "%s", words);
  even_job_notice(job, "host %s does not come back: %s; its agent is started again in %.0f s", agent->name, words,
                  (double)pause * 1e-9);
}

static void start(even_job *job, even_host_agent *agent) {
  uint64_t now = even_clock_ns();
  if (now < agent->back_ns) {
    return;
  }
  even_host_agent_drop(agent);
  if (even_host_agent_launch(agent) != EVEN_OK) {
    fail(job, agent, even_error_last()->what);
    even_error_clear();
    return;
  }
  agent->comes_back = true;
  agent->back_ns = now + (uint64_t)(job->hosts->params.patience_seconds * 1e9);
  even_job_notice(job, "host %s: its agent is %s again, and the others go on meanwhile", agent->name,
                  job->hosts->params.shell == NULL ? "waited for" : "started");
}

/* What the leader before called "localhost" is another machine here. */
static bool is_another(const even_host_agent *agent) {
  const even_hosts *hosts = agent->hosts;
  bool there = strcmp(even_json_text(hosts->facts, "identity"), agent->identity) == 0;
  for (size_t i = 1; i < hosts->count; i++) {
    const even_host_agent *other = &hosts->agents[i];
    there = there || (other != agent && other->link != NULL && strcmp(other->identity, agent->identity) == 0);
  }
  return there && agent->identity[0] != '\0' && hosts->params.estate != NULL;
}

/* It has come, and has what the script needs. */
static void give_part(even_job *job, even_host_agent *agent) {
  even_text text = EVEN_TEXT_EMPTY;
  if (is_another(agent)) {
    fail(job, agent, "that name is of a machine that is in the job already");
    return;
  }
  agent->fallen = false;
  agent->late = true;
  agent->follows = false;
  even_remote_start_write(job, agent->index, agent->first, agent->count, agent, &text);
  if (even_link_send_text(agent->link, EVEN_MESSAGE_START, &text, NULL, 0) != EVEN_OK) {
    fail(job, agent, even_error_last()->what);
    even_error_clear();
    return;
  }
  if (even_succession_add(job, agent) != EVEN_OK) {
    even_error_clear(); /* lack of memory: the next attempt names it anew */
  }
  agent->busy = true;
  agent->comes_back = false;
  agent->tries = 0;
  agent->back_ns = even_clock_ns() + FIRST_PAUSE_NS; /* where it is lost again */
  even_job_notice(job, "host %s is back: processes take the places of its %zu rank%s", agent->name, agent->count,
                  agent->count == 1 ? "" : "s");
}

static void look_after(even_job *job, even_host_agent *agent) {
  char last[200];
  char words[300];
  const even_error *failure = &job->hosts->failure;
  bool ended = job->hosts->params.shell != NULL && agent->link == NULL && even_host_agent_shell_ended(agent);
  if (agent->lost) {
    fail(job, agent, failure->status != EVEN_OK ? failure->what : agent->lost_words);
  } else if (agent->fits) {
    give_part(job, agent);
  } else if (ended) {
    even_host_agent_last_words(agent, last, sizeof last);
    (void)snprintf(words, sizeof words, "its agent ended before it came here%s%s", last[0] == '\0' ? "" : ": ", last);
    fail(job, agent, words);
  } else if (even_clock_ns() > agent->back_ns) {
    (void)snprintf(words, sizeof words, "its agent did not %s within %g s",
                   agent->link == NULL ? "come here" : "say what it has", job->hosts->params.patience_seconds);
    fail(job, agent, words);
  }
}

void even_returns_tick(even_job *job) {
  if (!goes_on(job)) {
    return;
  }
  for (size_t i = 1; i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    if (agent->comes_back) {
      look_after(job, agent);
    } else if (agent->lost && is_awaited(agent)) {
      start(job, agent);
    }
  }
}

bool even_returns_failed(even_host_agent *agent, const char *why) {
  even_job *job = agent->hosts->job;
  if (!agent->late || !agent->busy) {
    return false;
  }
  agent->busy = false;
  agent->lost = agent->comes_back = true; /* its connection, by which this came, is closed with the next tick */
  (void)snprintf(agent->lost_words, sizeof agent->lost_words, "%.300s", why);
  even_job_host_ended(job, agent->index, agent->lost_words);
  return true;
}

void even_returns_end(even_job *job) {
  if (job->hosts == NULL) {
    return;
  }
  for (size_t i = 1; i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    agent->tries = 0;
    agent->back_ns = 0;
    if (agent->comes_back && !agent->fits) {
      even_host_agent_drop(agent);
      agent->lost = true;
      job->hosts->failure.status = EVEN_OK;
    }
    agent->comes_back = false;
  }
}
