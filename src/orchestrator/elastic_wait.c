/* A job of several hosts with fewer ranks than --min-ranks: it waits, its state saved, until hosts that are lost are
 * there again, or others join. */
#include "base/fail.h"
#include "base/stop.h"
#include "orchestrator/elastic.h"
#include "orchestrator/pauses.h"
#include "orchestrator/succession.h"
#include "orchestrator/succession_members.h"
#include "os/clock.h"

#include <math.h>
#include <stdio.h>

/* So many tries of a host are told; those that follow are all alike. */
enum { TURN_MS = 50, TOLD_TRIES = 6 };

/* Between two tries, each twice as long as the one before. Nothing trains meanwhile: the longest is short. */
static const uint64_t FIRST_PAUSE_NS = 2000000000u;
static const uint64_t LONGEST_PAUSE_NS = 60000000000u;
/* Nobody has asked for it: a job that cannot go on does not hold its hosts for ever. */
static const double UNASKED_SECONDS = 600;

bool even_elastic_leaves_out(const even_job *job) {
  const even_hosts_params *params = &job->hosts->params;
  bool waits = params->lost == EVEN_LOST_WAIT || !job->shares;
  bool comes = params->shell != NULL || params->returns; /* else nobody can be waited for */
  return params->least_ranks > 0 || (params->lost != EVEN_LOST_END && (!waits || comes));
}

/* Of hosts without which the job does not go on, and that are waited for. */
static size_t awaited_ranks(const even_job *job) {
  const even_hosts_params *params = &job->hosts->params;
  size_t ranks = 0;
  for (size_t i = 1;
       params->least_ranks == 0 && (params->lost == EVEN_LOST_WAIT || !job->shares) && i < job->hosts->count; i++) {
    ranks += job->hosts->agents[i].away ? job->hosts->agents[i].count : 0;
  }
  return ranks;
}

size_t even_elastic_least(const even_job *job) {
  size_t awaited = awaited_ranks(job);
  if (awaited > 0) {
    return even_elastic_ranks(job) + awaited;
  }
  return job->hosts->params.least_ranks > 1 ? (size_t)job->hosts->params.least_ranks : 1;
}

size_t even_elastic_next_ranks(const even_job *job) {
  return even_elastic_ranks(job) + even_guests_ranks(job->hosts);
}

void even_elastic_leave_out(even_job *job, even_host_agent *agent, const char *why) {
  const even_hosts_params *params = &job->hosts->params;
  agent->leaves = true;
  agent->away = (params->shell != NULL || params->returns) && !agent->came && !agent->witness;
  agent->tries = 0;
  agent->back_ns = even_clock_ns() + FIRST_PAUSE_NS;
  even_job_notice(job, "host %s is left out: %.400s", agent->name, why);
}

/* ---- one host ---- */

static void fail(even_job *job, even_host_agent *agent, const char *why) {
  char words[sizeof agent->lost_words];
  (void)snprintf(words, sizeof words, "%.300s", why);
  even_host_agent_drop(agent);
  agent->lost = true;
  agent->comes_back = false;
  uint64_t pause = even_pause_after(FIRST_PAUSE_NS, LONGEST_PAUSE_NS, ++agent->tries);
  agent->back_ns = even_clock_ns() + pause;
  job->hosts->failure.status = EVEN_OK; /* of this one alone, which is tried again */
  (void)snprintf(agent->lost_words, sizeof agent->lost_words, "%s", words);
  if (agent->tries <= TOLD_TRIES) {
    even_job_notice(job, "host %s does not come back: %s; its agent is started again %s %.0f s", agent->name, words,
                    agent->tries < TOLD_TRIES ? "in" : "every", (double)pause * 1e-9);
  }
}

static void start(even_job *job, even_host_agent *agent) {
  even_host_agent_drop(agent);
  agent->returns = agent->member != 0; /* as the same member, if its host has kept what it was */
  if (even_host_agent_launch(agent) != EVEN_OK) {
    fail(job, agent, even_error_last()->what);
    even_error_clear();
    return;
  }
  agent->comes_back = true;
  agent->back_ns = even_clock_ns() + (uint64_t)(job->hosts->params.patience_seconds * 1e9);
}

static void look_after(even_job *job, even_host_agent *agent) {
  const even_hosts_params *params = &job->hosts->params;
  const even_error *failure = &job->hosts->failure;
  char last[200];
  char words[300];
  if (agent->lost) {
    fail(job, agent, failure->status != EVEN_OK ? failure->what : agent->lost_words);
  } else if (agent->fits) {
    agent->leaves = agent->away = agent->comes_back = false;
    agent->tries = 0;
    even_job_notice(job, "host %s is back", agent->name);
  } else if (params->shell != NULL && agent->link == NULL && even_host_agent_shell_ended(agent)) {
    even_host_agent_last_words(agent, last, sizeof last);
    (void)snprintf(words, sizeof words, "its agent ended before it came here%s%s", last[0] == '\0' ? "" : ": ", last);
    fail(job, agent, words);
  } else if ((params->shell != NULL || agent->link != NULL) && even_clock_ns() > agent->back_ns) {
    (void)snprintf(words, sizeof words, "its agent did not %s within %g s",
                   agent->link == NULL ? "come here" : "say what it has", params->patience_seconds);
    fail(job, agent, words);
  }
}

static void look_at(even_job *job, even_host_agent *agent) {
  if (agent->lost && !agent->leaves && !agent->witness) { /* while the others were waited for */
    even_elastic_leave_out(job, agent, agent->lost_words);
  } else if (agent->away && agent->comes_back) {
    look_after(job, agent);
  } else if (agent->away && even_clock_ns() >= agent->back_ns) {
    start(job, agent);
  }
}

/* ---- all of them ---- */

bool even_elastic_lacks(const even_job *job) {
  return job->hosts != NULL && job->follower == NULL && !job->adopted &&
         even_elastic_next_ranks(job) < even_elastic_least(job);
}

double even_elastic_patience(const even_job *job) {
  const even_hosts_params *params = &job->hosts->params;
  bool asked = params->least_ranks > 0 || params->lost == EVEN_LOST_WAIT;
  return !isnan(params->least_seconds) ? params->least_seconds : asked ? (double)INFINITY : UNASKED_SECONDS;
}

bool even_elastic_may_wait(const even_job *job) {
  const even_hosts_params *params = &job->hosts->params;
  bool any = params->most_ranks > 0;
  for (size_t i = 1; i < job->hosts->count; i++) {
    any = any || job->hosts->agents[i].away;
  }
  return any && even_elastic_patience(job) > 0;
}

static void say_least(const even_job *job, char *out, size_t bytes) {
  bool asked = job->hosts->params.least_ranks > 0;
  const char *why = job->hosts->params.lost == EVEN_LOST_WAIT
                        ? "with EVENSTEP_LOST_HOST=wait the job needs"
                        : "a script not seen to train with a loader of es.prepare needs";
  (void)snprintf(out, bytes, "%s %zu", asked ? "--min-ranks is" : why, even_elastic_least(job));
}

even_status even_elastic_too_few(const even_job *job, double waited_seconds) {
  size_t ranks = even_elastic_ranks(job);
  char waited[80] = "";
  if (waited_seconds > 0) {
    (void)snprintf(waited, sizeof waited, "; no others came within %g s (EVENSTEP_MIN_RANKS_PATIENCE)", waited_seconds);
  }
  char least[96];
  say_least(job, least, sizeof least);
  (void)even_fail(EVEN_ERR_PEER_LOST, "%zu rank%s left on the hosts that can be reached, and %s%s", ranks,
                  ranks == 1 ? " is" : "s are", least, waited);
  return even_error_fix("when the hosts are back, go on with --name NAME --resume auto");
}

static void add_awaited(const even_job *job, even_text *out) {
  char where[96];
  size_t away = 0;
  for (size_t i = 1; i < job->hosts->count; i++) {
    const even_host_agent *agent = &job->hosts->agents[i];
    if (agent->away && out->length < 200) {
      even_text_format(out, "%s%.60s", away++ == 0 ? "" : ", ", agent->name);
    }
  }
  even_text_add(out, away == 0 ? "" : away == 1 ? " is back" : " are back");
  if (job->hosts->params.most_ranks > 0) {
    even_hosts_where(job->hosts, where, sizeof where);
    even_text_format(out, "%shosts join: evenstep join %s", away == 0 ? "" : ", or ", where);
  }
}

static void tell(even_job *job) {
  double patience = even_elastic_patience(job);
  even_text awaited = EVEN_TEXT_EMPTY;
  char limit[80] = "";
  char least[96];
  size_t ranks = even_elastic_ranks(job);
  add_awaited(job, &awaited);
  if (isfinite(patience)) {
    (void)snprintf(limit, sizeof limit, "up to %g s (EVENSTEP_MIN_RANKS_PATIENCE), ", patience);
  }
  say_least(job, least, sizeof least);
  even_job_notice(job, "%zu rank%s left, and %s: the job waits, %s%s%s%suntil %s", ranks, ranks == 1 ? " is" : "s are",
                  least, job->resume.length > 0 ? "saved in " : "", even_text_string(&job->resume),
                  job->resume.length > 0 ? ", " : "", limit, even_text_string(&awaited));
  even_text_free(&awaited);
}

static even_status turn(even_job *job) {
  even_hosts *hosts = job->hosts;
  const even_agent_observer *observer = &job->params->observer;
  EVEN_TRY(even_elastic_heed_waiting(job));
  if (even_stop_asked()) {
    return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while hosts were waited for");
  }
  if (even_succession_is_superseded(hosts)) {
    EVEN_TRY(even_succession_await(job)); /* says who leads now */
  }
  EVEN_TRY(even_loop_turn(&hosts->loop, TURN_MS));
  even_hosts_tick(hosts);
  for (size_t i = 1; i < hosts->count; i++) {
    look_at(job, &hosts->agents[i]);
  }
  even_succession_keep_witness(job);
  if (observer->tick != NULL) {
    observer->tick(observer->context);
  }
  return EVEN_OK;
}

even_status even_elastic_await_ranks(even_job *job) {
  double seconds = even_elastic_patience(job);
  uint64_t since = even_clock_ns();
  tell(job);
  while (even_elastic_next_ranks(job) < even_elastic_least(job)) {
    if ((double)(even_clock_ns() - since) * 1e-9 > seconds) {
      return even_elastic_too_few(job, seconds);
    }
    EVEN_TRY(turn(job));
  }
  job->hosts->failure.status = EVEN_OK; /* of whom nobody waits for any more */
  return EVEN_OK;
}
