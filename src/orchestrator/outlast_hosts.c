/* Ranks that outlast their agent together with those of other hosts, whose agents live on. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/stop.h"
#include "orchestrator/aside_hosts.h"
#include "orchestrator/boards.h"
#include "orchestrator/copies.h"
#include "orchestrator/elastic.h"
#include "orchestrator/gifts.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/outlast.h"
#include "orchestrator/remote.h"
#include "orchestrator/succession.h"
#include "orchestrator/succession_members.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

enum { TURN_MS = 50 };

/* For agents that ask several times a second; whoever ends the job meanwhile waits a moment for its ranks to be told.
 */
static const uint64_t MEET_NS = 20000000000u;
static const uint64_t MEET_VOTING_NS = 10000000000u; /* where others give up after 20 s, and elect another one before */
static const uint64_t ASKED_NS = 2000000000u;

/* ---- while the agent lives ---- */

/* Hosts that change, states that go from rank to rank: the next agent would have to know how far all that is. */
static bool are_settled(const even_hosts_params *hosts) {
  return hosts->most_ranks == 0 && hosts->estate == NULL;
}

bool even_outlast_hosts_would(const even_hosts *hosts) {
  return hosts->params.before != NULL && hosts->params.before->custody != NULL && are_settled(&hosts->params) &&
         !hosts->params.replaces_leader;
}

bool even_outlast_hosts_may(const even_job *job) {
  if (job->hosts == NULL) {
    return true;
  }
  bool recovers =
      job->params->shrink || job->params->replace; /* then ranks outlast it under another leader (adopt.h) */
  return !job->params->grows && are_settled(&job->hosts->params) && !(job->hosts->params.replaces_leader && recovers);
}

/* Spares, whose processes are there and are nobody's before a rank is lost. */
static bool all_wait(const even_job *job) {
  bool all = true;
  bool any = false;
  for (size_t i = 0; all && i < job->count; i++) {
    bool outside = even_job_is_outside(job, i) && (job->follower == NULL || even_job_is_here(job, i));
    all = !outside || job->ranks[i].alive;
    any = any || outside;
  }
  return all && (!any || (job->params->spares > 0 && (job->follower != NULL || even_job_replace_is_full(job))));
}

bool even_outlast_hosts_have_state(const even_job *job) {
  return all_wait(job) && !even_gifts_travel(job) && !even_gifts_any_lacks(job);
}

/* Where none of its ranks lives any more its agent clears up. */
static bool has_ranks(const even_job *job, const even_host_agent *agent) {
  bool any = false;
  for (size_t i = agent->first; !any && i < agent->first + agent->count; i++) {
    any = job->ranks[i].alive;
  }
  return any;
}

bool even_outlast_hosts_calm(const even_job *job) {
  const even_hosts *hosts = job->hosts;
  if (job->most_groups > 1 && !even_outlast_hosts_have_state(job)) {
    return false;
  }
  if (hosts == NULL) {
    return true;
  }
  bool calm = hosts->elastic->move.stage == EVEN_MOVE_NONE && hosts->elastic->left_count == 0 &&
              even_succession_may_return(hosts);
  for (size_t i = 1; calm && i < hosts->count; i++) {
    const even_host_agent *agent = &hosts->agents[i];
    calm = agent->link != NULL && agent->fits && agent->busy && !agent->lost && !agent->leaves && !agent->came &&
           has_ranks(job, agent);
  }
  for (size_t i = 0; calm && i < EVEN_GUESTS_MOST; i++) {
    calm = hosts->elastic->guests[i] == NULL;
  }
  return calm;
}

/* ---- the next one ---- */

static bool is_number(const json_t *object, const char *name, size_t wanted) {
  const json_t *value = json_object_get(object, name);
  return json_is_integer(value) && json_integer_value(value) == (json_int_t)wanted;
}

/* 0: it is none. */
static size_t number_of(const json_t *object, const char *name) {
  json_int_t number = json_integer_value(json_object_get(object, name));
  return number > 0 ? (size_t)number : 0;
}

/* One that has not come yet, or first one that came, and has no ranks any more (*over). NULL: all have come. */
static const even_host_agent *find_missing(const even_hosts *hosts, bool *over) {
  const even_host_agent *missing = NULL;
  for (size_t i = 1; !*over && i < hosts->count; i++) {
    const even_host_agent *agent = &hosts->agents[i];
    *over = agent->link != NULL && !agent->holds;
    missing = *over || agent->link == NULL || agent->runs == NULL ? agent : missing;
  }
  return missing;
}

static even_status await_all(even_hosts *hosts) {
  const uint64_t most = hosts->voter == NULL ? MEET_NS : MEET_VOTING_NS;
  uint64_t until = even_clock_ns() + most;
  bool asked = false;
  bool over = false;
  const even_host_agent *missing = NULL;
  while ((missing = find_missing(hosts, &over)) != NULL) {
    if (over) {
      return even_fail(EVEN_ERR_PEER_LOST, "the ranks of host %s have ended meanwhile", missing->name);
    }
    if (even_succession_is_superseded(hosts)) {
      return even_fail(EVEN_ERR_PEER_LOST, "another host leads this job by now");
    }
    uint64_t now = even_clock_ns();
    if (!asked && even_stop_asked()) {
      asked = true;
      until = now + ASKED_NS < until ? now + ASKED_NS : until;
    }
    if (now > until && asked) {
      return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while host %s was waited for with its ranks", missing->name);
    }
    if (now > until) {
      return even_fail(EVEN_ERR_PEER_LOST, "host %s did not come with its ranks to the next agent within %d s",
                       missing->name, (int)(most / 1000000000u));
    }
    EVEN_TRY(even_loop_turn(&hosts->loop, TURN_MS));
    even_hosts_tick(hosts);
  }
  return EVEN_OK;
}

/* What it has was compared when the attempt began; files may have been changed since. */
static even_status take_host(even_host_agent *agent, size_t first, int attempt, const even_aside *aside) {
  const json_t *facts = json_object_get(agent->runs, "facts");
  even_device_list devices = {NULL, 0};
  EVEN_TRY(even_host_facts_devices(facts, &devices));
  even_device_list_free(&agent->devices);
  agent->devices = devices;
  agent->count = devices.count;
  agent->first = first;
  agent->places = (size_t)json_integer_value(json_object_get(facts, "places"));
  (void)snprintf(agent->node, sizeof agent->node, "%s", even_json_text(facts, "node"));
  (void)snprintf(agent->identity, sizeof agent->identity, "%s", even_json_text(facts, "identity"));
  even_hosts_name_agent(agent);
  EVEN_TRY(even_aside_host_cut(agent, aside));
  if (!is_number(agent->runs, "first", first) || !is_number(agent->runs, "count", agent->count) ||
      !is_number(agent->runs, "attempt", (size_t)attempt) || agent->count == 0) {
    return even_fail(EVEN_ERR_PEER_LOST, "host %s keeps other ranks than it had", agent->name);
  }
  agent->first_spare = number_of(agent->runs, "first_spare");
  agent->spares = number_of(agent->runs, "spares");
  agent->fits = true;
  return EVEN_OK;
}

/* ---- another host's agent was killed, and the next one comes (outlast_part.h) ---- */

bool even_outlast_hosts_comes_anew(const even_host_agent *agent, const json_t *greeting) {
  const even_job *job = agent->hosts->job;
  return job != NULL && !agent->hosts->gathering && even_outlast_hosts_may(job) && agent->link != NULL &&
         (agent->fits || agent->renewed) && agent->busy && !agent->lost &&
         json_is_true(json_object_get(greeting, "holds")) && strcmp(even_json_text(greeting, "job"), job->id) == 0 &&
         is_number(greeting, "attempt", (size_t)job->attempt);
}

even_status even_outlast_hosts_renew(even_host_agent *agent, even_link *link) {
  even_hosts *hosts = agent->hosts;
  even_link *before = agent->link;
  even_link_read(before); /* what it had said last */
  if (agent->link != before || agent->lost || !agent->busy) {
    return even_fail(EVEN_ERR_PEER_LOST, "host %s has ended its part of the attempt", agent->name);
  }
  even_hosts_leave_strangers(hosts, link);
  even_hosts_bury(hosts, before);
  even_copies_anew(agent);
  even_parcels_lost(hosts->parcels, (int)agent->index);
  json_decref(agent->runs);
  agent->runs = NULL;
  agent->link = link;
  agent->holds = agent->renewed = true;
  agent->fits = false;
  return EVEN_OK;
}

/* How far the attempt's end has gone it may not have heard. */
static even_status tell_stage(const even_host_agent *agent) {
  const even_job *job = agent->hosts->job;
  char text[96];
  if (job->stage == EVEN_JOB_RUNS || job->stage == EVEN_JOB_SETTLES) {
    return EVEN_OK;
  }
  int number = job->stage == EVEN_JOB_KILLED ? SIGKILL : job->stage == EVEN_JOB_ASKED ? SIGINT : SIGTERM;
  (void)snprintf(text, sizeof text, "{\"number\":%d,\"groups\":%s,\"ends\":true}", number,
                 number == SIGTERM ? "false" : "true");
  return even_link_send(agent->link, EVEN_MESSAGE_SIGNAL, text, NULL, 0);
}

static even_status say_adopt(const even_host_agent *agent) {
  even_text text = EVEN_TEXT_EMPTY;
  even_remote_write_adopt(agent->hosts->job, agent, &text);
  return even_link_send_text(agent->link, EVEN_MESSAGE_ADOPT, &text, NULL, 0);
}

static even_status go_on(even_host_agent *agent) {
  even_job *job = agent->hosts->job;
  if (!is_number(agent->runs, "first", agent->first) || !is_number(agent->runs, "count", agent->count) ||
      !is_number(agent->runs, "world", job->count) || number_of(agent->runs, "spares") != agent->spares ||
      !is_number(agent->runs, "attempt", (size_t)job->attempt)) {
    return even_fail(EVEN_ERR_PEER_LOST, "host %s keeps other ranks than it had", agent->name);
  }
  agent->fits = true;
  agent->renewed = false;
  agent->waiting_ns = 0;
  EVEN_TRY(say_adopt(agent));
  EVEN_TRY(even_boards_catch_up(job, agent, even_boards_newest_of(agent->runs)));
  EVEN_TRY(tell_stage(agent));
  EVEN_TRY(even_hosts_say_signals(agent, (uint64_t)json_integer_value(json_object_get(agent->runs, "signals"))));
  even_job_notice(job, "host %s: its agent was killed, and another one goes on with its %zu rank%s, which train%s on",
                  agent->name, agent->count, agent->count == 1 ? "" : "s", agent->count == 1 ? "s" : "");
  return EVEN_OK;
}

even_status even_outlast_hosts_take(even_host_agent *agent, json_t *runs) {
  json_decref(agent->runs);
  agent->runs = runs;
  even_hosts_note_signals(agent->hosts, (uint64_t)json_integer_value(json_object_get(runs, "signals")));
  return agent->renewed && agent->hosts->job != NULL ? go_on(agent) : EVEN_OK;
}

/* ---- all have come ---- */

static even_status take_all(even_hosts *hosts) {
  size_t first = (size_t)json_integer_value(json_object_get(hosts->agents[1].runs, "first"));
  even_aside aside = {.count = 0};
  even_legacy_aside(hosts->params.before, &aside);
  for (size_t i = 1; i < hosts->count; i++) {
    EVEN_TRY(take_host(&hosts->agents[i], first, even_legacy_attempt(hosts->params.before), &aside));
    first += hosts->agents[i].count;
  }
  return is_number(hosts->agents[1].runs, "world", first + number_of(hosts->agents[1].runs, "all_spares"))
             ? EVEN_OK
             : even_fail(EVEN_ERR_PEER_LOST, "the other hosts keep other ranks than they had");
}

/* Without a word: an agent that is told the end ends, and these shall come to the next one. */
static void let_go(even_hosts *hosts) {
  for (size_t i = 1; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    agent->fits = false;
    if (agent->link != NULL) {
      even_hosts_bury(hosts, agent->link);
      agent->link = NULL;
    }
  }
}

even_status even_outlast_hosts_meet(even_hosts *hosts) {
  if (hosts->count < 2) { /* the others were drained */
    EVEN_TRY(even_succession_await_return(hosts));
    return hosts->voter == NULL ? EVEN_OK : even_succession_want(hosts);
  }
  hosts->gathering = true;
  even_status status = even_succession_await_return(hosts); /* first: who may not act asks nobody for anything */
  status = status == EVEN_OK ? await_all(hosts) : status;
  hosts->gathering = false;
  status = status == EVEN_OK ? take_all(hosts) : status;
  if (status == EVEN_OK && hosts->voter != NULL) {
    status = even_succession_want(hosts); /* as before */
  }
  if (status == EVEN_OK && hosts->params.returns) {
    status = even_hosts_announce(hosts); /* the same words again, to be removed at the end */
  }
  if (status != EVEN_OK) {
    const even_error kept = *even_error_last();
    let_go(hosts);
    if (status != EVEN_ERR_INTERRUPTED) {
      even_succession_leave_to_others(hosts);
      even_legacy_ask_again(hosts->params.before);
    }
    return even_error_restore(&kept);
  }
  return status;
}

/* Where the spares of all hosts wait, as this agent has found the places for them, and as they have them. */
static even_status compare_spares(const even_job *job) {
  size_t next = job->first_spare + job->spares;
  for (size_t i = 1; i < job->hosts->count; i++) {
    const even_host_agent *agent = &job->hosts->agents[i];
    if (agent->spares > 0 && agent->first_spare != next) {
      return even_fail(EVEN_ERR_MISMATCH, "host %s keeps other spares than it had", agent->name);
    }
    next += agent->spares;
  }
  return next == job->count ? EVEN_OK : even_fail(EVEN_ERR_MISMATCH, "the other hosts keep other spares than they had");
}

even_status even_outlast_hosts_adopt(even_job *job) {
  even_hosts *hosts = job->hosts;
  if (hosts == NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(compare_spares(job));
  hosts->failure.status = EVEN_OK; /* of one that was lost again meanwhile, which is missed now */
  even_job_hosts_choose_address(job);
  if (job->generation != NULL) {
    even_boards_adopt(job, even_generation_number(job->generation));
  }
  EVEN_TRY(even_gifts_begin(job));
  for (size_t i = 1; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    agent->busy = agent->follows = true;
    if (agent->link == NULL) {
      even_hosts_job_lost(agent);
      continue;
    }
    EVEN_TRY(say_adopt(agent));
    EVEN_TRY(even_boards_catch_up(job, agent, even_boards_newest_of(agent->runs)));
  }
  return EVEN_OK;
}
