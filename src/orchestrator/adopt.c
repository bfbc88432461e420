/* From the ranks of a leader that is lost to those of this one. */
#include "orchestrator/adopt.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/boards.h"
#include "orchestrator/estate.h"
#include "orchestrator/gifts.h"
#include "orchestrator/hold.h"
#include "orchestrator/remote.h"
#include "orchestrator/stragglers.h"
#include "orchestrator/succession.h"
#include "orchestrator/usages.h"

#include <stdio.h>
#include <string.h>

/* ---- before the job is open ---- */

static bool is_number(const json_t *object, const char *name, size_t wanted) {
  const json_t *value = json_object_get(object, name);
  return json_is_integer(value) && json_integer_value(value) == (json_int_t)wanted;
}

/* What an agent says of its ranks is what the old leader left. Generations of ranks are numbered by each leader: those
 * of two cannot be compared (tests/orchestrator/test_adopt_model.c). */
static bool is_same(const even_estate *estate, const even_estate_host *was, const json_t *runs) {
  const even_job *job = even_hold_job(estate->holds);
  const json_t *devices = json_object_get(json_object_get(runs, "facts"), "devices");
  return json_array_size(devices) == was->count && is_number(runs, "first_spare", was->first_spare) &&
         is_number(runs, "spares", was->spares) && is_number(runs, "led", even_hold_led(estate->holds)) &&
         is_number(runs, "attempt", (size_t)job->attempt) && is_number(runs, "world", job->count) &&
         is_number(runs, "groups", (size_t)job->most_groups) && is_number(runs, "first", was->first) &&
         is_number(runs, "count", was->count);
}

static const json_t *find_generation(const even_hosts *hosts, uint32_t number) {
  for (size_t i = 1; i < hosts->count; i++) {
    size_t at = 0;
    json_t *one = NULL;
    json_array_foreach(json_object_get(hosts->agents[i].runs, "generations"), at, one) {
      if (is_number(one, "number", number)) {
        return one;
      }
    }
  }
  return NULL;
}

/* The old leader may have told one host, and not another one. */
static bool catch_up(const even_hosts *hosts, const even_job *job, uint32_t newest) {
  while (even_generation_number(job->generation) < newest) {
    const json_t *next = find_generation(hosts, even_generation_number(job->generation) + 1);
    if (next == NULL || even_hold_follow(hosts->params.estate->holds, next) != EVEN_OK) {
      even_error_clear();
      return false;
    }
  }
  return !even_generation_refused(job->generation);
}

static bool has(const even_estate_host *was, size_t rank) {
  return (rank >= was->first && rank < was->first + was->count) ||
         (rank >= was->first_spare && rank < was->first_spare + was->spares);
}

/* Places of a job that hosts may join are nobody's until one takes them; this host may know of ranks there, and not of
 * their host: what was left to it is older. */
static bool is_known(const even_hosts *hosts, const even_job *job, size_t rank) {
  if (even_job_is_here(job, rank)) {
    return true;
  }
  for (size_t i = 1; i < hosts->count; i++) {
    even_estate_host was;
    if (even_estate_find(hosts->params.estate, hosts->agents[i].name, &was) && has(&was, rank)) {
      return true;
    }
  }
  return hosts->params.most_ranks > 0 &&
         !even_generation_has(job->generation, (int)rank, even_generation_number(job->generation));
}

static bool all_known(const even_hosts *hosts, const even_job *job) {
  bool known = true;
  for (size_t i = 0; known && i < job->count; i++) {
    known = is_known(hosts, job, i);
  }
  return known;
}

/* Whether a rank of this host is a member of the newest generation. Of a host that has come late, and whose processes
 * have not joined yet, it is not: then others may have made generations, and steps, of which nobody here was told. */
static bool is_of_newest(const even_job *job) {
  uint32_t newest = even_generation_number(job->generation);
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_is_here(job, i) && job->ranks[i].alive && even_generation_has(job->generation, (int)i, newest)) {
      return true;
    }
  }
  return false;
}

bool even_adopt_may(even_hosts *hosts) {
  const even_estate *estate = hosts->params.estate;
  if (!even_estate_goes_on(estate)) {
    return false;
  }
  const even_job *job = even_hold_job(estate->holds);
  uint32_t newest = even_generation_number(job->generation);
  for (size_t i = 1; i < hosts->count; i++) {
    const even_host_agent *agent = &hosts->agents[i];
    even_estate_host was;
    if (agent->witness) {
      continue;
    }
    if (!even_estate_find(estate, agent->name, &was) || was.first + was.count > job->count ||
        was.first_spare + was.spares > job->count || (agent->link != NULL && !is_same(estate, &was, agent->runs))) {
      return false;
    }
    uint32_t its = agent->link == NULL ? 0 : even_boards_newest_of(agent->runs);
    newest = its > newest ? its : newest;
  }
  return catch_up(hosts, job, newest) && is_of_newest(job) && all_known(hosts, job);
}

/* Only their names are known, and nobody starts a process on them. */
static even_status name_devices(even_host_agent *agent, const even_estate_host *was) {
  size_t at = 0;
  json_t *name = NULL;
  even_device_list_free(&agent->devices);
  EVEN_TRY(EVEN_NEW_ARRAY(&agent->devices.items, was->count));
  agent->devices.count = was->count;
  json_array_foreach(was->devices, at, name) {
    even_device *device = &agent->devices.items[at];
    *device = (even_device){.numa_node = -1, .cuda_index = -1, .efficiency = -1};
    (void)snprintf(device->name, sizeof device->name, "%s", json_string_value(name));
  }
  return EVEN_OK;
}

static even_status take_host(even_host_agent *agent, const even_estate_host *was) {
  agent->first = was->first;
  agent->count = was->count;
  agent->first_spare = was->first_spare;
  agent->spares = was->spares;
  if (agent->link != NULL) {
    return even_hosts_take_facts(agent, json_object_get(agent->runs, "facts"));
  }
  agent->lost = agent->fallen = true;
  (void)snprintf(agent->lost_words, sizeof agent->lost_words, "%s",
                 strcmp(agent->name, even_estate_predecessor(agent->hosts->params.estate)) == 0
                     ? "it led the job, and its agent is gone or cut off"
                     : "its agent did not come to the new leader");
  return name_devices(agent, was);
}

even_status even_adopt_hosts(even_hosts *hosts) {
  hosts->adopts = true;
  for (size_t i = 1; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    even_estate_host was;
    if (agent->witness) {
      agent->fits = agent->link != NULL;
    } else if (even_estate_find(hosts->params.estate, agent->name, &was)) {
      EVEN_TRY(take_host(agent, &was));
    }
  }
  return EVEN_OK;
}

long even_hosts_first_rank(const even_hosts *hosts, size_t host) {
  if (!hosts->adopts) {
    return -1;
  }
  return (long)(host == 0 ? even_hold_job(hosts->params.estate->holds)->first : hosts->agents[host].first);
}

even_status even_hosts_held_devices(const even_hosts *hosts, even_device_list *out) {
  const even_job *job = even_hold_job(hosts->params.estate->holds);
  *out = (even_device_list){0};
  EVEN_TRY(EVEN_NEW_ARRAY(&out->items, job->local));
  for (; out->count < job->local; out->count++) {
    const even_device *held = &job->params->devices->items[job->first + out->count];
    even_device *copy = &out->items[out->count];
    *copy = *held;
    copy->cpus = NULL;
    even_status status = EVEN_NEW_ARRAY(&copy->cpus, held->cpu_count + 1);
    if (status != EVEN_OK) {
      even_device_list_free(out);
      return status;
    }
    if (held->cpu_count > 0) {
      memcpy(copy->cpus, held->cpus, held->cpu_count * sizeof *held->cpus);
    }
  }
  return EVEN_OK;
}

size_t even_hosts_held_places(const even_hosts *hosts) {
  return hosts->adopts ? even_hold_job(hosts->params.estate->holds)->count : 0;
}

size_t even_hosts_held_spares(const even_hosts *hosts) {
  return hosts->adopts ? (size_t)even_hold_job(hosts->params.estate->holds)->params->spares : 0;
}

static bool waits(size_t first, size_t count, size_t number) {
  return number >= first && number < first + count;
}

int even_hosts_held_spare(const even_hosts *hosts, size_t number) {
  const even_job *job = hosts->adopts ? even_hold_job(hosts->params.estate->holds) : NULL;
  if (job == NULL || waits(job->first_spare, job->spares, number)) {
    return job == NULL ? -1 : 0;
  }
  for (size_t i = 1; i < hosts->count; i++) {
    if (waits(hosts->agents[i].first_spare, hosts->agents[i].spares, number)) {
      return (int)i;
    }
  }
  return -1;
}

bool even_adopt_due(const even_hosts *hosts) {
  return hosts != NULL && hosts->adopts;
}

int even_adopt_telemetry(even_hosts *hosts) {
  return even_hold_telemetry(hosts->params.estate->holds);
}

/* ---- the job ---- */

even_status even_adopt_open(const even_agent_params *params, even_job **out) {
  even_job *job = even_hold_hand_over(params->estate->holds);
  *out = job;
  if (job->count != params->devices->count) {
    return even_fail(EVEN_ERR_MISMATCH, "%zu ranks run, and %zu devices are there", job->count, params->devices->count);
  }
  job->params = params;
  job->hosts = params->hosts;
  job->number = 0;
  EVEN_TRY(even_estate_continue(params->estate, job));
  even_text_clear(&job->run_folder);
  EVEN_TRY(even_job_make_folders(job));
  even_usages_hand_over(job->usages, job); /* whoever watches the job looks here by himself now */
  job->usages = NULL;
  EVEN_TRY(even_stragglers_open(job, &job->stragglers));
  even_stragglers_begin(job->stragglers);
  even_job_notice(job, "this host leads now (generation %llu): ranks that live keep their processes",
                  (unsigned long long)params->estate->generation);
  EVEN_TRY(even_job_hosts_open(job));
  EVEN_TRY(even_gifts_open(job)); /* hosts have other numbers under this leader */
  return even_gifts_begin(job);
}

static const even_host_agent *agent_of(const even_job *job, size_t rank) {
  return &job->hosts->agents[even_job_host_number(job, rank)];
}

/* Ranks for which no process was started there yet (replace.c). */
static bool is_vacant(const even_host_agent *agent, size_t rank) {
  size_t at = 0;
  json_t *one = NULL;
  json_array_foreach(json_object_get(agent->runs, "vacant"), at, one) {
    if (json_is_integer(one) && json_integer_value(one) == (json_int_t)rank) {
      return true;
    }
  }
  return false;
}

static void count_gone(even_job *job, size_t rank, int code) {
  job->ranks[rank].end.code = code;
  job->order[job->ended++] = rank;
}

/* Of a host that came all count as alive, and its agent tells at once which are not; of one that did not, those that
 * were members are lost now. */
static void count_elsewhere(even_job *job, size_t i, bool member) {
  const even_host_agent *agent = agent_of(job, i);
  bool vacant = !member && agent->link != NULL && is_vacant(agent, i);
  if (even_job_is_nobodys(job, i)) {
    count_gone(job, i, 0);
  } else if (vacant && job->places != NULL) {
    count_gone(job, i, 0);
    even_job_replace_give(job, i, 1);
  } else if (member || agent->link != NULL) {
    job->ranks[i].alive = true;
    job->alive++;
    if (!member && agent->came && job->places != NULL) {
      even_job_replace_give(job, i, 1); /* another process starts where this one ends before it has joined */
    }
  } else {
    count_gone(job, i, 1);
  }
}

static void count_in(even_job *job) {
  uint32_t number = even_generation_number(job->generation);
  for (size_t i = 0; i < job->count; i++) {
    bool member = even_generation_has(job->generation, (int)i, number);
    job->lost[i] = !member;
    even_job_replace_adopt(job, i, member);
    if (job->ranks[i].elsewhere) {
      count_elsewhere(job, i, member);
    } else if (!member && job->ranks[i].pid == 0 && job->places != NULL) {
      even_job_replace_give(job, i, 1);
    }
  }
}

static even_status tell_hosts(even_job *job) {
  uint32_t least = even_generation_number(job->generation);
  for (size_t i = 1; i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    char text[64];
    if (agent->witness || agent->link == NULL) {
      continue;
    }
    uint32_t its = even_boards_newest_of(agent->runs);
    least = its < least ? its : least;
    agent->busy = agent->follows = true;
    (void)snprintf(text, sizeof text, "{\"host\":%zu}", i);
    EVEN_TRY(even_link_send(agent->link, EVEN_MESSAGE_ADOPT, text, NULL, 0));
  }
  even_boards_adopt(job, least);
  even_boards_turn(job);
  return EVEN_OK;
}

/* Those that ended while nobody led, and those that went with their hosts. */
static void miss(even_job *job) {
  uint32_t number = even_generation_number(job->generation);
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_is_here(job, i) && job->ranks[i].alive && job->params->observer.rank_started != NULL) {
      job->params->observer.rank_started(job->params->observer.context, (int)i, job->ranks[i].pid);
    }
  }
  for (size_t i = 1; i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    if (!agent->witness && agent->link == NULL) {
      even_hosts_job_lost(agent);
      even_job_host_ended(job, agent->index, agent->lost_words);
    }
  }
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_is_here(job, i) && !job->ranks[i].alive && even_generation_has(job->generation, (int)i, number)) {
      even_job_act_on_end(job, &job->ranks[i]);
    }
  }
}

even_status even_adopt_ranks(even_job *job) {
  job->adopted = false;
  job->hosts->failure.status =
      EVEN_OK; /* of a host that was lost again meanwhile: it is one of those that are missed */
  EVEN_TRY(even_succession_await_vote(job));
  even_job_hosts_choose_address(job);
  count_in(job);
  EVEN_TRY(tell_hosts(job));
  miss(job);
  return even_succession_bequeath(job);
}
