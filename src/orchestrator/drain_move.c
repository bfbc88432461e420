/* Draining a host: who takes its ranks, step by step, while the job goes on. */
#include "orchestrator/drain_move.h"
#include "orchestrator/aside_hosts.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/elastic.h"
#include "orchestrator/hand_over.h"
#include "orchestrator/places.h"
#include "orchestrator/remote.h"
#include "orchestrator/remote_start.h"
#include "orchestrator/warm.h"
#include "os/clock.h"
#include "os/port.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { MOST_RANKS_A_HOST = 1024 };

/* What ranks of other hosts have done comes with the next tick there, after what they print. */
static const uint64_t HEARSAY_NS = 2000000000u;

static even_move *move_of(const even_job *job) {
  return &job->hosts->elastic->move;
}

bool even_move_prepares(const even_job *job) {
  even_move_stage stage = move_of(job)->stage;
  return stage == EVEN_MOVE_REACHES || stage == EVEN_MOVE_STARTS;
}

/* ---- the hosts of the attempt that follows: those of the list that stay, then those that are reached for it ---- */

static bool is_reached(const even_host_agent *guest) {
  return guest != NULL && !guest->came;
}

static bool takes_part(const even_job *job, const even_host_agent *agent) {
  return even_elastic_stays(agent) && !agent->witness && strcmp(agent->name, move_of(job)->from) != 0;
}

/* The n-th of them, NULL: there are no more. */
static even_host_agent *member(const even_job *job, size_t n) {
  even_hosts *hosts = job->hosts;
  for (size_t i = 0; i < hosts->count; i++) {
    if ((i == 0 || takes_part(job, &hosts->agents[i])) && n-- == 0) {
      return &hosts->agents[i];
    }
  }
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    if (is_reached(hosts->elastic->guests[i]) && n-- == 0) {
      return hosts->elastic->guests[i];
    }
  }
  return NULL;
}

static size_t ranks_now(const even_job *job, const even_host_agent *agent) {
  return agent->index == 0 ? job->local : agent->count;
}

size_t even_move_ranks(const even_job *job, size_t host) {
  const even_host_agent *agent = &job->hosts->agents[host];
  return agent->next.placed && !even_move_prepares(job) ? agent->next.count : ranks_now(job, agent);
}

/* ---- giving up ---- */

static void forget_next(even_host_agent *agent) {
  even_device_list_free(&agent->next.devices);
  agent->next = (even_host_next){.asked = false};
}

static void tell_none(even_host_agent *agent) {
  if (agent->next.asked && agent->link != NULL &&
      even_link_send(agent->link, EVEN_MESSAGE_PLACES, "{}", NULL, 0) != EVEN_OK) {
    even_error_clear(); /* its processes are none of the next attempt's, and end then */
  }
}

/* The last error is why. */
static void give_up(even_hosts *hosts) {
  const even_error why = *even_error_last();
  even_elastic *elastic = hosts->elastic;
  for (size_t i = 0; i < hosts->count; i++) {
    tell_none(&hosts->agents[i]);
    forget_next(&hosts->agents[i]);
  }
  even_warm_close(elastic->warm);
  elastic->warm = NULL;
  even_guests_dismiss(hosts);
  elastic->move.stage = EVEN_MOVE_NONE;
  if (hosts->job != NULL) {
    even_job_notice(hosts->job, "host %s is not drained, and the job goes on as it is: %.300s", elastic->move.from,
                    why.what);
  }
  even_control_end(&elastic->control, elastic->move.from, why.status, why.what, why.fix);
  even_error_clear();
}

void even_move_failed(even_hosts *hosts) {
  even_move *move = &hosts->elastic->move;
  if (move->failure.status == EVEN_OK) {
    move->failure = *even_error_last(); /* the next tick acts on it: this may be a call of the host's own */
  }
}

void even_move_settle(even_job *job) {
  if (even_move_prepares(job)) {
    (void)even_fail(EVEN_ERR_STATE, "the job restarted meanwhile");
    (void)even_error_fix("drain it again");
    give_up(job->hosts);
  }
}

void even_move_done(even_hosts *hosts) {
  for (size_t i = 0; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    if (agent->next.placed && i > 0) {
      even_device_list_free(&agent->devices);
      agent->devices = agent->next.devices;
      agent->count = agent->next.count;
      agent->wish = (int)agent->count; /* also where its agent is started again */
      agent->next.devices = (even_device_list){NULL, 0};
    }
    if (i > 0) { /* this host's are taken by who counts them (even_hosts_own_devices) */
      forget_next(agent);
    }
  }
  even_guests_dismiss(hosts); /* one that was reached, and lost since */
  hosts->elastic->move.stage = EVEN_MOVE_NONE;
}

bool even_hosts_own_devices(even_hosts *hosts, even_device_list *out) {
  even_host_next *next = &hosts->agents[0].next;
  bool changed = next->placed;
  *out = next->devices;
  *next = (even_host_next){.asked = false};
  return changed;
}

/* ---- the command ---- */

typedef struct target {
  const char *name;
  size_t ranks; /* 0: left open */
} target;

static even_status read_targets(const json_t *command, target *out, size_t *count) {
  const json_t *list = json_object_get(command, "to");
  *count = json_array_size(list);
  if (*count > EVEN_GUESTS_MOST) {
    return even_fail(EVEN_ERR_USAGE, "--to names more than %d hosts", EVEN_GUESTS_MOST);
  }
  for (size_t i = 0; i < *count; i++) {
    const json_t *item = json_array_get(list, i);
    json_int_t ranks = json_integer_value(json_object_get(item, "ranks"));
    out[i] = (target){.name = even_json_text(item, "host"), .ranks = (size_t)ranks};
    if (!even_hosts_is_name(out[i].name, strlen(out[i].name)) && strchr(out[i].name, '#') == NULL) {
      return even_fail(EVEN_ERR_USAGE, "--to: \"%.100s\" is not the name of a host", out[i].name);
    }
    if (ranks < 0 || ranks > MOST_RANKS_A_HOST) {
      return even_fail(EVEN_ERR_USAGE, "--to: host %.100s cannot take %lld ranks", out[i].name, (long long)ranks);
    }
    for (size_t k = 0; k < i; k++) {
      if (strcmp(out[k].name, out[i].name) == 0) {
        return even_fail(EVEN_ERR_USAGE, "--to names host %.100s twice", out[i].name);
      }
    }
  }
  return EVEN_OK;
}

static size_t places_of(const even_job *job, const even_host_agent *agent) {
  even_device_list own = {job->params->devices->items + job->first, job->local};
  return agent->index == 0 ? even_host_places(&own) : agent->places;
}

static const even_device *first_device(const even_job *job, const even_host_agent *agent) {
  if (agent->index == 0) {
    return job->local > 0 ? job->params->devices->items + job->first : NULL;
  }
  return agent->devices.count > 0 ? agent->devices.items : NULL;
}

/* Where one has GPUs and the other has none, a rank of the one is no rank of the other. */
static bool are_alike(const even_device *one, const even_device *other) {
  return one == NULL || other == NULL || one->kind == other->kind;
}

/* Hosts of the list as those who share know them; one that is about to go, or only votes, has no place. */
static void list_hosts(const even_job *job, const even_host_agent *from, even_places_host *out) {
  for (size_t i = 0; i < job->hosts->count; i++) {
    const even_host_agent *agent = &job->hosts->agents[i];
    out[i] = (even_places_host){.name = agent->name, .leaves = agent == from};
    if (agent == from) {
      out[i].ranks = ranks_now(job, agent);
    } else if (i == 0 || (even_elastic_stays(agent) && !agent->witness && !agent->lost)) {
      out[i].ranks = ranks_now(job, agent);
      out[i].places = are_alike(first_device(job, agent), first_device(job, from)) ? places_of(job, agent) : 0;
    }
  }
}

static even_status no_way(const even_job *job, const char *name) {
  if (strchr(name, '#') != NULL || job->hosts->params.shell == NULL) {
    (void)even_fail(EVEN_ERR_NOT_FOUND, "the job has no host %.100s, and reaches none by ssh", name);
    return even_error_fix("let it join first (evenstep run --max-ranks, evenstep join), or name one of the job's");
  }
  return EVEN_OK;
}

/* Marks those that are named, and adds those that are none of the job's: *count of them in all then. */
static even_status name_hosts(const even_job *job, const target *targets, size_t named, even_places_host *list,
                              size_t *count) {
  for (size_t k = 0; k < named; k++) {
    size_t at = 0;
    while (at < *count && strcmp(list[at].name, targets[k].name) != 0) {
      at++;
    }
    if (at == *count) {
      EVEN_TRY(no_way(job, targets[k].name));
      list[(*count)++] = (even_places_host){.name = targets[k].name};
    } else if (at > 0 && !list[at].leaves && (job->hosts->agents[at].lost || job->hosts->agents[at].leaves)) {
      return even_fail(EVEN_ERR_STATE, "host %s is about to leave the job itself", list[at].name);
    } else if (at > 0 && job->hosts->agents[at].witness) {
      return even_fail(EVEN_ERR_USAGE, "host %s only votes, and takes no ranks", list[at].name);
    }
    list[at].named = true;
    list[at].wish = targets[k].ranks;
  }
  return EVEN_OK;
}

/* With so few ranks the job could not go on. */
static even_status check_least(const even_job *job, const char *name, size_t left) {
  size_t least = job->hosts->params.least_ranks > 1 ? (size_t)job->hosts->params.least_ranks : 1;
  if (left >= least) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_STATE, "without host %s %zu rank%s would be left, and --min-ranks is %zu", name, left,
                  left == 1 ? "" : "s", least);
  return even_error_fix("name a host that takes its ranks (--to), or let another one join first: evenstep join");
}

static void tell_plan(even_job *job, const even_places_host *list, size_t count, size_t leave, size_t moved) {
  even_text to = EVEN_TEXT_EMPTY;
  even_elastic *elastic = job->hosts->elastic;
  char words[sizeof elastic->move.plan];
  for (size_t i = 0; i < count && to.length < 200; i++) {
    if (list[i].gets > 0) {
      even_text_format(&to, "%s%.60s (%zu)", to.length > 0 ? ", " : "", list[i].name, list[i].gets);
    }
  }
  if (moved == 0) {
    (void)snprintf(words, sizeof words,
                   "of host %.100s no rank moves: the others have no place left (--to HOST:N makes one)",
                   elastic->move.from);
  } else {
    (void)snprintf(words, sizeof words, "of host %.100s %zu of %zu rank%s move%s: to %.200s", elastic->move.from, moved,
                   leave, leave == 1 ? "" : "s", moved == 1 ? "s" : "", even_text_string(&to));
  }
  even_text_free(&to);
  even_job_notice(job, "%s", words);
  memcpy(elastic->move.plan, words, sizeof elastic->move.plan);
}

/* Of more ranks than a host has GPUs all would leave them (device.h). */
static even_status check_gpus(const even_job *job, const even_host_agent *agent, const even_places_host *host) {
  const even_device *device = first_device(job, agent);
  size_t gpus = places_of(job, agent);
  if (host->gets == 0 || device == NULL || device->kind != EVEN_DEVICE_CUDA || host->ranks + host->gets <= gpus) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_DEVICE, "host %s has %zu GPU%s, and would have %zu ranks", host->name, gpus,
                  gpus == 1 ? "" : "s", host->ranks + host->gets);
  return even_error_fix("give it fewer (--to HOST:N), or name another host");
}

/* What each is to have; new ones are started. */
static even_status take_plan(even_job *job, const even_places_host *list, size_t count) {
  even_hosts *hosts = job->hosts;
  for (size_t i = 0; i < hosts->count; i++) {
    EVEN_TRY(check_gpus(job, &hosts->agents[i], &list[i]));
  }
  for (size_t i = 0; i < hosts->count; i++) {
    hosts->agents[i].next.count = ranks_now(job, &hosts->agents[i]) + list[i].gets;
  }
  for (size_t i = hosts->count; i < count; i++) {
    if (list[i].gets == 0) {
      return even_fail(EVEN_ERR_USAGE, "no rank is left for host %s", list[i].name);
    }
    EVEN_TRY(even_guests_launch(hosts, list[i].name, list[i].gets));
  }
  return EVEN_OK;
}

static even_status plan(even_job *job, even_host_agent *from, const json_t *command) {
  target targets[EVEN_GUESTS_MOST] = {{.name = ""}};
  even_places_host *list = NULL;
  size_t named = 0;
  size_t moved = 0;
  size_t count = job->hosts->count;
  bool stay = json_is_true(json_object_get(command, "stay"));
  EVEN_TRY(read_targets(command, targets, &named));
  EVEN_TRY(EVEN_NEW_ARRAY(&list, count + named));
  list_hosts(job, from, list);
  even_status status = name_hosts(job, targets, named, list, &count);
  if (status == EVEN_OK && from->index == 0 && count > job->hosts->count) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "host %s is none of the job's, and %s leads it", list[count - 1].name,
                    from->name);
    status = even_error_fix("name hosts of the job, or drain %s without --to, and then move ranks from the new leader",
                            from->name);
  }
  if (status == EVEN_OK && !stay) {
    status = even_places_share(list, count, &moved);
  }
  size_t leave = ranks_now(job, from);
  if (status == EVEN_OK) {
    status = check_least(job, from->name, even_elastic_ranks(job) + even_guests_ranks(job->hosts) - leave + moved);
  }
  if (status == EVEN_OK) {
    (void)snprintf(move_of(job)->from, sizeof move_of(job)->from, "%s", from->name);
    status = take_plan(job, list, count);
  }
  if (status == EVEN_OK && !stay) {
    tell_plan(job, list, count, leave, moved);
  }
  even_free(list);
  return status;
}

static void enter(even_job *job, even_move_stage stage) {
  move_of(job)->stage = stage;
  move_of(job)->since_ns = even_clock_ns();
}

/* Ranks that have not come past es.prepare may never come there: nobody waits for others that do. */
static bool all_have_joined(even_job *job) {
  even_progress_read(&job->progress);
  for (size_t i = 0; i < job->count; i++) {
    if (!even_job_lost(job, i) && !job->progress.ranks[i].joined) {
      return false;
    }
  }
  return true;
}

even_status even_move_begin(even_job *job, even_host_agent *from, const json_t *command) {
  even_move *move = move_of(job);
  if (move->stage != EVEN_MOVE_NONE) {
    (void)even_fail(EVEN_ERR_STATE, "host %s is being drained", move->from);
    return even_error_fix("drain this one when that is done");
  }
  if (even_aside_hosts_any(job->hosts)) {
    (void)even_fail(EVEN_ERR_STATE, "places of the job are, or were, set aside, and ranks do not move then");
    return even_error_fix("drain it with --no-move: the other hosts go on with their own ranks");
  }
  *move = (even_move){.stage = EVEN_MOVE_NONE, .number = move->number + 1};
  even_status status = plan(job, from, command);
  if (status != EVEN_OK) {
    const even_error kept = *even_error_last();
    even_guests_dismiss(job->hosts);
    return even_error_restore(&kept);
  }
  if (from->index == 0) {
    enter(job, EVEN_MOVE_ASKED);
    even_hand_over_begin(job);
    return EVEN_OK;
  }
  move->warm = !json_is_true(json_object_get(command, "cold")) && job->params->cpu_quota == NULL &&
               even_guests_ranks(job->hosts) == 0;
  enter(job, EVEN_MOVE_REACHES);
  return EVEN_OK;
}

/* ---- new hosts ---- */

/* False: not yet. An error: one does not come. */
static even_status are_reached(const even_job *job, bool *all) {
  *all = true;
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    even_host_agent *guest = job->hosts->elastic->guests[i];
    char words[300];
    if (!is_reached(guest) || guest->fits) {
      continue;
    }
    *all = false;
    if (guest->link == NULL && even_host_agent_shell_ended(guest)) {
      even_host_agent_last_words(guest, words, sizeof words);
      return even_fail(EVEN_ERR_PEER_LOST, "host %s: its agent ended before it came here%s%s", guest->name,
                       words[0] == '\0' ? "" : ": ", words);
    }
  }
  return EVEN_OK;
}

/* ---- places and processes ---- */

/* This job as it will be. */
static void make_next(const even_job *job, even_agent_params *params, even_job *next) {
  const even_move *move = move_of(job);
  const even_host_agent *agent = NULL;
  *params = *job->params;
  params->cpu_quota = NULL;
  params->shown = NULL;
  *next = *job;
  next->params = params;
  next->attempt = move->attempt;
  next->era = move->era;
  next->master_port = move->port;
  next->resume = (even_text)EVEN_TEXT_EMPTY;
  next->count = 0;
  next->groups = 0;
  for (size_t n = 0; (agent = member(job, n)) != NULL; n++) {
    next->count += agent->next.count;
    next->groups++;
  }
  next->most_groups = next->groups;
}

static even_status ask_host(const even_job *next, even_host_agent *agent, size_t group, size_t first) {
  const even_move *move = move_of(next);
  even_text part = EVEN_TEXT_EMPTY;
  even_text text = EVEN_TEXT_EMPTY;
  even_remote_start_write(next, group, first, agent->next.count, NULL, &part);
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "number", move->number);
  even_json_bool(&json, "warm", move->warm);
  even_json_raw(&json, "part", even_text_string(&part));
  even_json_object_end(&json);
  even_status status = even_text_status(&part);
  even_text_free(&part);
  if (status != EVEN_OK || agent->link == NULL) {
    even_text_free(&text);
    return status != EVEN_OK ? status : even_fail(EVEN_ERR_PEER_LOST, "host %s is lost", agent->name);
  }
  agent->next.asked = true;
  return even_link_send_text(agent->link, EVEN_MESSAGE_PLACES, &text, NULL, 0);
}

static even_status start_own(even_job *job, const even_job *next) {
  even_host_next *own = &job->hosts->agents[0].next;
  even_device_list now = {job->params->devices->items + job->first, job->local};
  if (own->count != job->local) {
    EVEN_TRY(own->count > 0 ? even_device_select(NULL, (int)own->count, &own->devices) : EVEN_OK);
    own->placed = true;
  }
  const even_warm_params params = {.loop = &job->hosts->loop,
                                   .place = {.local = (int)own->count,
                                             .groups = next->groups,
                                             .era = next->era,
                                             .master_address = next->master_address,
                                             .interface = next->interface,
                                             .master_port = next->master_port,
                                             .attempt = next->attempt,
                                             .max_restarts = job->params->max_restarts,
                                             .telemetry_fd = -1,
                                             .snapshot_fd = -1,
                                             .generation_fd = -1,
                                             .job = job->id,
                                             .run_folder = job->run_folder.data},
                                   .own = own->placed ? &own->devices : &now,
                                   .world = next->count,
                                   .command = job->params->command,
                                   .environment = job->params->environment,
                                   .unpinned = job->params->unpinned,
                                   .descriptors = job->descriptors_before,
                                   .ignored = job->params->notice_seconds > 0 ? SIGUSR1 : 0};
  if (move_of(job)->warm && own->count > 0 && even_warm_start(&params, &job->hosts->elastic->warm) != EVEN_OK) {
    even_error_clear(); /* they are started when their attempt begins, as without */
  }
  return EVEN_OK;
}

static even_status ask_all(even_job *job) {
  even_move *move = move_of(job);
  even_agent_params params;
  even_job next;
  even_host_agent *agent = NULL;
  size_t first = 0;
  EVEN_TRY(even_port_free(&move->port));
  move->attempt = job->attempt + 1;
  move->era = job->era + 1;
  make_next(job, &params, &next);
  (void)snprintf(next.master_address, sizeof next.master_address, "127.0.0.1"); /* where there is no other host */
  even_job_hosts_find_address(job, move->from, next.master_address, next.interface);
  for (size_t n = 0; (agent = member(job, n)) != NULL; n++) {
    EVEN_TRY(n == 0 ? start_own(job, &next) : ask_host(&next, agent, n, first));
    first += agent->next.count;
  }
  return EVEN_OK;
}

static even_status hear_devices(even_host_agent *agent, const json_t *content) {
  even_host_next *next = &agent->next;
  even_device_list devices = {NULL, 0};
  EVEN_TRY(even_host_facts_devices(content, &devices));
  if (devices.count != next->count) {
    (void)even_fail(EVEN_ERR_INPUT, "host %s names %zu devices for %zu ranks", agent->name, devices.count, next->count);
    even_device_list_free(&devices);
    return EVEN_ERR_INPUT;
  }
  even_device_list_free(&next->devices);
  next->devices = devices;
  next->placed = true;
  return EVEN_OK;
}

static even_status take_answer(even_host_agent *agent, const json_t *content) {
  json_int_t status = json_integer_value(json_object_get(content, "status"));
  if (status != EVEN_OK) {
    (void)even_fail(status > EVEN_OK && status <= EVEN_ERR_INTERRUPTED ? (even_status)status : EVEN_ERR_SYSTEM,
                    "host %s: %.400s", agent->name, even_json_text(content, "what"));
    return even_error_fix("%s", even_json_text(content, "fix"));
  }
  if (json_object_get(content, "devices") != NULL) {
    return hear_devices(agent, content);
  }
  agent->next.settled = true;
  return EVEN_OK;
}

void even_move_hear(even_host_agent *agent, const json_t *content) {
  json_int_t number = json_integer_value(json_object_get(content, "number"));
  if (!agent->next.asked || number != agent->hosts->elastic->move.number) {
    return; /* of one that was given up */
  }
  if (take_answer(agent, content) != EVEN_OK) {
    even_move_failed(agent->hosts);
    even_error_clear();
  }
}

/* *placed: all have devices; *settled: their processes wait, or will not. */
static void look(const even_job *job, bool *placed, bool *settled) {
  const even_move *move = move_of(job);
  const even_host_agent *agent = NULL;
  const even_warm *own = job->hosts->elastic->warm;
  *placed = true;
  *settled = own == NULL || even_warm_settled(own) == job->hosts->agents[0].next.count;
  for (size_t n = 1; (agent = member(job, n)) != NULL; n++) {
    *placed = *placed && agent->next.placed;
    *settled = *settled && (!move->warm || agent->next.settled);
  }
}

static void ask_training(even_job *job, bool late) {
  even_move *move = move_of(job);
  double seconds = (double)(even_clock_ns() - move->since_ns) * 1e-9;
  char words[300];
  enter(job, EVEN_MOVE_ASKED);
  for (size_t i = 1; i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    agent->leaves = agent->leaves || strcmp(agent->name, move->from) == 0;
  }
  if (move->warm) {
    (void)snprintf(words, sizeof words, "%s after %.1f s",
                   late ? "not all processes that are to go on have come to es.prepare"
                        : "the processes that are to go on wait in es.prepare",
                   seconds);
    even_job_notice(job, "%s", words);
    even_control_say(&job->hosts->elastic->control, move->from, words);
  }
  even_elastic_ask(job);
  even_job_notice(job,
                  "host %s is drained: the training saves its state after the step under way, and goes on with %zu "
                  "rank%s",
                  move->from, even_elastic_ranks(job) + even_guests_ranks(job->hosts),
                  even_elastic_ranks(job) + even_guests_ranks(job->hosts) == 1 ? "" : "s");
}

static even_status step(even_job *job) {
  even_move *move = move_of(job);
  uint64_t patience_ns = (uint64_t)(job->hosts->params.patience_seconds * 1e9);
  bool late = even_clock_ns() - move->since_ns > patience_ns;
  bool all = false;
  bool settled = false;
  if (job->draining != 0 || job->interrupted != 0) {
    return even_fail(EVEN_ERR_STATE, "the job is about to end");
  }
  if (move->failure.status != EVEN_OK) {
    return even_error_restore(&move->failure);
  }
  if (move->stage == EVEN_MOVE_REACHES) {
    EVEN_TRY(are_reached(job, &all));
    bool joined = !move->warm || all_have_joined(job);
    if (all && (joined || even_clock_ns() - move->since_ns > HEARSAY_NS)) {
      move->warm = move->warm && joined;
      enter(job, EVEN_MOVE_STARTS);
      return ask_all(job);
    }
  } else {
    look(job, &all, &settled);
    if (all && (settled || late)) {
      ask_training(job, !settled);
      return EVEN_OK;
    }
  }
  return late ? even_fail(EVEN_ERR_TIMEOUT, "the hosts that are to take its ranks did not answer within %g s",
                          job->hosts->params.patience_seconds)
              : EVEN_OK;
}

void even_move_tick(even_job *job) {
  even_move *move = move_of(job);
  if (move->plan[0] != '\0') { /* who typed the command is heard by now */
    even_control_say(&job->hosts->elastic->control, move->from, move->plan);
    move->plan[0] = '\0';
  }
  if (even_move_prepares(job) && step(job) != EVEN_OK) {
    give_up(job->hosts);
  }
}
