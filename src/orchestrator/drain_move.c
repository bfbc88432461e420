/* Draining a host: those that take its ranks are reached and get ready, step by step, while the job goes on. */
#include "orchestrator/drain_move.h"
#include "orchestrator/aside_hosts.h"
#include "orchestrator/drain_plan.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/elastic.h"
#include "orchestrator/hand_over.h"
#include "orchestrator/legacy.h"
#include "orchestrator/remote.h"
#include "orchestrator/remote_start.h"
#include "orchestrator/warm.h"
#include "os/clock.h"
#include "os/socket.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

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

size_t even_move_ranks(const even_job *job, size_t host) {
  const even_host_agent *agent = &job->hosts->agents[host];
  return agent->next.placed && !even_move_prepares(job) ? agent->next.count : even_move_ranks_now(job, agent);
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
  even_port_let_go(&elastic->move.port_held);
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
  if (job->hosts->hands_over) {
    (void)even_fail(EVEN_ERR_STATE, "host %s, which leads the job, is being drained", move->from);
    return even_error_fix("drain this one where another host leads then");
  }
  if (move->stage != EVEN_MOVE_NONE) {
    return even_drain_queue_add(job->hosts, from->name, command);
  }
  if (even_aside_hosts_any(job->hosts)) {
    (void)even_fail(EVEN_ERR_STATE, "places of the job are, or were, set aside, and ranks do not move then");
    return even_error_fix("drain it with --no-move: the other hosts go on with their own ranks");
  }
  even_port_let_go(&move->port_held);
  *move = (even_move){.stage = EVEN_MOVE_NONE, .number = move->number + 1};
  even_guests_dismiss(job->hosts); /* who was looked for is looked for afterwards */
  even_status status = even_move_plan(job, from, command);
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
                                             .keeper = even_legacy_keeper(job->params->legacy),
                                             .master_address = next->master_address,
                                             .interface = next->interface,
                                             .master_port = next->master_port,
                                             .attempt = next->attempt,
                                             .silence_ms = even_socket_silence(),
                                             .unseen_seconds = even_remote_unseen_seconds(job),
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
  EVEN_TRY(even_port_hold(&move->port, &move->port_held));
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
