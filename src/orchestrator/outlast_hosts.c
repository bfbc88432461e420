/* Ranks that outlast their agent together with those of other hosts, whose agents live on. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/stop.h"
#include "orchestrator/elastic.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/outlast.h"
#include "orchestrator/remote.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

enum { TURN_MS = 50 };

/* For agents that ask several times a second; whoever ends the job meanwhile waits a moment for its ranks to be told.
 */
static const uint64_t MEET_NS = 20000000000u;
static const uint64_t ASKED_NS = 2000000000u;

/* ---- while the agent lives ---- */

/* Hosts that change, states that go from rank to rank, votes, copies on their way: the next agent would have to know
 * how far all that is. */
bool even_outlast_hosts_may(const even_job *job) {
  const even_agent_params *params = job->params;
  if (job->hosts == NULL) {
    return true;
  }
  const even_hosts_params *hosts = &job->hosts->params;
  return !params->shrink && params->spares == 0 && !params->grows && params->aside == NULL && hosts->most_ranks == 0 &&
         hosts->estate == NULL && !hosts->replaces_leader && hosts->copies == 0 && hosts->memory_copies == 0;
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
  if (hosts == NULL) {
    return true;
  }
  bool calm = hosts->elastic->move.stage == EVEN_MOVE_NONE && hosts->elastic->left_count == 0;
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
  uint64_t until = even_clock_ns() + MEET_NS;
  bool asked = false;
  bool over = false;
  const even_host_agent *missing = NULL;
  while ((missing = find_missing(hosts, &over)) != NULL) {
    if (over) {
      return even_fail(EVEN_ERR_PEER_LOST, "the ranks of host %s have ended meanwhile", missing->name);
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
                       missing->name, (int)(MEET_NS / 1000000000u));
    }
    EVEN_TRY(even_loop_turn(&hosts->loop, TURN_MS));
    even_hosts_tick(hosts);
  }
  return EVEN_OK;
}

/* What it has was compared when the attempt began; files may have been changed since. */
static even_status take_host(even_host_agent *agent, size_t first, int attempt) {
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
  if (!is_number(agent->runs, "first", first) || !is_number(agent->runs, "count", agent->count) ||
      !is_number(agent->runs, "attempt", (size_t)attempt) || agent->count == 0) {
    return even_fail(EVEN_ERR_PEER_LOST, "host %s keeps other ranks than it had", agent->name);
  }
  agent->first_spare = (size_t)json_integer_value(json_object_get(agent->runs, "world"));
  agent->fits = true;
  return EVEN_OK;
}

static even_status take_all(even_hosts *hosts) {
  size_t first = (size_t)json_integer_value(json_object_get(hosts->agents[1].runs, "first"));
  for (size_t i = 1; i < hosts->count; i++) {
    EVEN_TRY(take_host(&hosts->agents[i], first, even_legacy_attempt(hosts->params.before)));
    first += hosts->agents[i].count;
  }
  return is_number(hosts->agents[1].runs, "world", first)
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
  if (hosts->count < 2) {
    return EVEN_OK; /* the others were drained */
  }
  hosts->gathering = true;
  even_status status = await_all(hosts);
  hosts->gathering = false;
  status = status == EVEN_OK ? take_all(hosts) : status;
  if (status == EVEN_OK && hosts->params.returns) {
    status = even_hosts_announce(hosts); /* the same words again, to be removed at the end */
  }
  if (status != EVEN_OK) {
    const even_error kept = *even_error_last();
    let_go(hosts);
    if (status != EVEN_ERR_INTERRUPTED) {
      even_legacy_ask_again(hosts->params.before);
    }
    return even_error_restore(&kept);
  }
  return status;
}

even_status even_outlast_hosts_adopt(even_job *job) {
  even_hosts *hosts = job->hosts;
  if (hosts == NULL) {
    return EVEN_OK;
  }
  hosts->failure.status = EVEN_OK; /* of one that was lost again meanwhile, which is missed now */
  even_job_hosts_choose_address(job);
  for (size_t i = 1; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    char text[64];
    agent->busy = agent->follows = true;
    if (agent->link == NULL) {
      even_hosts_job_lost(agent);
      continue;
    }
    (void)snprintf(text, sizeof text, "{\"host\":%zu}", i);
    EVEN_TRY(even_link_send(agent->link, EVEN_MESSAGE_ADOPT, text, NULL, 0));
  }
  return EVEN_OK;
}
