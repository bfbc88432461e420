/* Changes of a job's hosts: who asks for them, when the ranks save their state for them, and what they need. */
#include "orchestrator/elastic.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/aside_hosts.h"
#include "orchestrator/growth.h"
#include "orchestrator/hand_over.h"
#include "orchestrator/remote.h"
#include "orchestrator/succession.h"
#include "orchestrator/warm.h"
#include "os/clock.h"
#include "os/signals.h"

#include <stdio.h>
#include <string.h>

/* MOST_MISSED: attempts in a row that one host may keep from beginning. */
enum { TURN_MS = 50, MOST_ROUNDS = 8, MOST_MISSED = 3 };

static const uint64_t LONG_NS = 60000000000u;

even_status even_elastic_open(even_hosts *hosts) {
  return EVEN_NEW(&hosts->elastic);
}

void even_elastic_close(even_hosts *hosts) {
  even_elastic *elastic = hosts->elastic;
  for (size_t i = 0; elastic != NULL && i < EVEN_GUESTS_MOST; i++) {
    even_host_agent *guest = elastic->guests[i];
    if (guest != NULL && guest->came) {
      (void)even_fail(EVEN_ERR_STATE, "the job has ended");
      even_hosts_refuse(guest->link, even_error_last());
      even_link_flush(guest->link, 1000);
      even_hosts_bury(hosts, guest->link);
      even_device_list_free(&guest->devices);
      even_free(guest);
      elastic->guests[i] = NULL;
    }
  }
  if (elastic != NULL) {
    even_port_let_go(&elastic->move.port_held);
    even_guests_dismiss(hosts);
    even_warm_close(elastic->warm);
    elastic->warm = NULL;
    for (size_t i = 0; hosts->agents != NULL && i < hosts->count; i++) {
      even_device_list_free(&hosts->agents[i].next.devices);
    }
    even_drain_queue_close(hosts);
    even_control_close(&elastic->control, "the job has ended");
    even_text_free(&elastic->past.resume);
    even_text_free(&elastic->past.foreign);
    even_text_free(&elastic->past.lineage);
    even_text_free(&elastic->past.began);
    elastic->past = (even_elastic_past){.kept = false};
  }
}

/* ---- commands ---- */

static even_host_agent *find(const even_hosts *hosts, const char *name) {
  for (size_t i = 0; i < hosts->count; i++) {
    if (!hosts->agents[i].parted && strcmp(hosts->agents[i].name, name) == 0) {
      return &hosts->agents[i];
    }
  }
  return NULL;
}

static even_status no_such_host(const even_hosts *hosts, const char *name) {
  even_text list = EVEN_TEXT_EMPTY;
  for (size_t i = 0; i < hosts->count && list.length < 200; i++) {
    even_text_format(&list, "%s%.60s", i > 0 ? ", " : "", hosts->agents[i].name);
  }
  (void)even_fail(EVEN_ERR_NOT_FOUND, "the job has no host %.128s", name);
  even_status status = even_error_fix("its hosts: %s", even_text_string(&list));
  even_text_free(&list);
  return status;
}

static bool is_over(const even_job *job) {
  return job->draining != 0 || job->interrupted != 0;
}

/* Whether a host may be drained, whatever becomes of its ranks. */
static even_status may_leave(const even_job *job, const even_host_agent *agent) {
  if (agent->witness) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "host %s only votes (--witness): it has no ranks, and cannot be drained",
                    agent->name);
    return even_error_fix(
        "its machine may go: the job goes on, and starts its agent again when it is back. For another "
        "witness: end the job, and --witness OTHER --name NAME --resume auto");
  }
  EVEN_TRY(agent->index == 0 ? even_hand_over_may(job) : EVEN_OK);
  if (is_over(job)) {
    return even_fail(EVEN_ERR_STATE, "the job is about to end");
  }
  return job->progress.reader != NULL
             ? EVEN_OK
             : even_fail(EVEN_ERR_UNSUPPORTED, "the ranks of this job cannot be asked to save their state");
}

even_status even_elastic_may_go(const even_job *job, const even_host_agent *agent) {
  size_t all = even_elastic_ranks(job) + even_guests_ranks(job->hosts);
  size_t left = all - (even_elastic_stays(agent) ? agent->count : 0);
  EVEN_TRY(may_leave(job, agent));
  if (left < even_elastic_least(job)) {
    (void)even_fail(EVEN_ERR_STATE, "without host %s %zu rank%s would be left, and --min-ranks is %zu", agent->name,
                    left, left == 1 ? "" : "s", even_elastic_least(job));
    return even_error_fix("let another host join first: evenstep join");
  }
  return EVEN_OK;
}

static bool any_leaves(const even_job *job) {
  if (job->hosts->hands_over) {
    return true;
  }
  for (size_t i = 1; i < job->hosts->count; i++) {
    if (job->hosts->agents[i].leaves) {
      return true;
    }
  }
  return false;
}

static bool is_due(const even_job *job) {
  const even_aside *aside = job->params->aside; /* other places take part */
  return (aside != NULL && aside->changed) || any_leaves(job) || even_guests_ranks(job->hosts) > 0;
}

/* Hosts that join while the others train end no attempt. */
static bool is_due_now(const even_job *job) {
  return any_leaves(job) || even_guests_ranks(job->hosts) > even_growth_waiting(job);
}

void even_elastic_ask(even_job *job) {
  if (job->stage != EVEN_JOB_RUNS || job->alive == 0 || job->progress.reader == NULL || job->changing || is_over(job) ||
      (even_move_prepares(job) && !any_leaves(job)) || !is_due_now(job)) {
    return;
  }
  even_telemetry_reader_ask_end(job->progress.reader, true);
  job->changing = true;
  job->hosts->elastic->told_ns = even_clock_ns();
}

even_status even_elastic_drain(even_job *job, const char *name, const json_t *command) {
  even_host_agent *agent = find(job->hosts, name);
  if (agent == NULL) {
    return no_such_host(job->hosts, name);
  }
  const even_move *move = &job->hosts->elastic->move;
  bool known = agent->leaves || even_drain_queue_has(job->hosts, name) ||
               (move->stage != EVEN_MOVE_NONE && strcmp(move->from, name) == 0);
  EVEN_TRY(may_leave(job, agent));
  return known ? EVEN_OK : even_move_begin(job, agent, command);
}

static even_status take_command(void *context, const json_t *command, char subject[EVEN_CONTROL_SUBJECT]) {
  even_job *job = ((even_hosts *)context)->job;
  const char *host = even_json_text(command, "host");
  if (job == NULL) {
    return even_fail(EVEN_ERR_STATE, "the job begins anew: try again in some seconds");
  }
  if (strcmp(even_json_text(command, "command"), "lost") == 0) {
    (void)snprintf(subject, EVEN_CONTROL_SUBJECT, "%s", EVEN_SUCCESSION_LOST);
    return even_succession_go_alone(job);
  }
  if (strcmp(even_json_text(command, "command"), "drain") != 0) {
    return even_fail(EVEN_ERR_INPUT, "no such command");
  }
  EVEN_TRY(even_elastic_drain(job, host, command));
  (void)snprintf(subject, EVEN_CONTROL_SUBJECT, "%s", host);
  return EVEN_OK;
}

void even_elastic_begin(even_job *job) {
  even_elastic *elastic = job->hosts->elastic;
  if (elastic->control.loop != NULL) {
    return;
  }
  if (even_control_open(&elastic->control, &job->hosts->loop, job->run_folder.data, take_command, job->hosts) !=
      EVEN_OK) {
    even_job_notice(job, "`evenstep drain` cannot reach this job: %s", even_error_last()->what);
    even_error_clear();
  }
}

/* ---- while an attempt runs ---- */

static void end_late(even_job *job) {
  even_elastic *elastic = job->hosts->elastic;
  even_job_notice(job, "the time of --notice is over, and %zu rank%s not ended: the job restarts", job->alive,
                  job->alive == 1 ? " has" : "s have");
  elastic->until_ns = 0;
  even_job_end_ranks(job, SIGTERM, false);
}

void even_elastic_tick(even_job *job) {
  if (job->hosts == NULL || job->stage != EVEN_JOB_RUNS || job->alive == 0) {
    return;
  }
  even_elastic *elastic = job->hosts->elastic;
  even_move_tick(job);
  even_drain_queue_tick(job);
  even_elastic_heed(job);
  even_elastic_look_back(job);
  even_elastic_ask(job);
  uint64_t now = even_clock_ns();
  if (job->changing && elastic->told_ns != 0 && now - elastic->told_ns > LONG_NS) {
    elastic->told_ns = 0;
    even_job_notice(job,
                    "the hosts change once the training has saved its state: %.0f s ago it was asked to, and it is "
                    "still waited for (scripts without es.prepare never do)",
                    (double)LONG_NS * 1e-9);
  }
  if (elastic->until_ns != 0 && now > elastic->until_ns) {
    end_late(job);
  }
}

bool even_elastic_failed(even_host_agent *agent, const char *why) {
  if (!agent->came) {
    return false;
  }
  (void)snprintf(agent->lost_words, sizeof agent->lost_words, "%.300s", why);
  agent->leaves = true;
  even_hosts_job_lost(agent);
  return true;
}

void even_elastic_forget(even_job *job) {
  job->changing = false;
  if (job->hosts != NULL) {
    job->hosts->elastic->until_ns = 0;
  }
}

bool even_elastic_has_saved(const even_job *job) {
  return job->changing && job->draining == 0 && job->saved > 0;
}

/* ---- between two attempts ---- */

/* Nothing of an attempt is left on any host. */
static even_status await_settled(even_job *job) {
  uint64_t since_ns = even_clock_ns();
  while (!even_job_hosts_settled(job, since_ns)) {
    EVEN_TRY(even_loop_turn(&job->hosts->loop, TURN_MS));
    even_hosts_tick(job->hosts);
  }
  return EVEN_OK;
}

/* Starts the agents of lost hosts again; those that nobody can start are left out. */
static even_status launch(even_job *job, bool *any) {
  even_hosts *hosts = job->hosts;
  *any = false;
  for (size_t i = 1; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    if (!agent->lost || agent->leaves || agent->witness) { /* a witness is started again by and by */
      continue;
    }
    if (agent->came) {
      even_elastic_leave_out(job, agent, "it came by itself, and may join again");
      continue;
    }
    even_host_agent_drop(agent);
    agent->returns = agent->member != 0; /* as the same member, if its host has kept what it was */
    even_status status = even_host_agent_launch(agent);
    if (status == EVEN_ERR_PEER_LOST && even_elastic_leaves_out(job)) {
      even_elastic_leave_out(job, agent, even_error_last()->what);
      even_error_clear();
      continue;
    }
    EVEN_TRY(status);
    even_job_notice(job, "host %s: its agent is %s again", agent->name,
                    hosts->params.shell == NULL ? "waited for" : "started");
    *any = true;
  }
  return EVEN_OK;
}

/* Why one did not come: the error that ended the waiting may be another one's. */
static void say_absent(even_host_agent *agent, const even_error *error, bool ended, char *out, size_t bytes) {
  char last[200];
  size_t length = strlen(agent->name);
  const char *its = strncmp(error->what, "host ", 5) == 0 ? error->what + 5 : "";
  if (strncmp(its, agent->name, length) == 0 && (its[length] == ' ' || its[length] == ':')) {
    (void)snprintf(out, bytes, "%.400s", error->what);
  } else if (agent->lost) {
    (void)snprintf(out, bytes, "%s", agent->lost_words);
  } else if (ended) {
    even_host_agent_last_words(agent, last, sizeof last);
    (void)snprintf(out, bytes, "its agent ended before it came here%s%s", last[0] == '\0' ? "" : ": ", last);
  } else {
    (void)snprintf(out, bytes, "its agent did not %s within %g s",
                   agent->link == NULL ? "come here" : "say what it has", agent->hosts->params.patience_seconds);
  }
}

bool even_elastic_is_absent(even_host_agent *agent, const even_error *error, char *why, size_t bytes) {
  bool ended = agent->hosts->params.shell != NULL && agent->link == NULL && even_host_agent_shell_ended(agent);
  bool absent =
      !agent->witness && !agent->leaves && !agent->fits && (error->status == EVEN_ERR_TIMEOUT || ended || agent->lost);
  if (absent) {
    say_absent(agent, error, ended, why, bytes);
  }
  return absent;
}

static bool leave_out_absent(even_job *job) {
  even_hosts *hosts = job->hosts;
  const even_error error = *even_error_last();
  bool any = false;
  for (size_t i = 1; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    char why[512];
    if (even_elastic_is_absent(agent, &error, why, sizeof why)) {
      even_elastic_leave_out(job, agent, why);
      agent->lost = true;
      any = true;
    }
  }
  (void)even_error_restore(&error);
  return any;
}

/* With --min-ranks, or where hosts may join. */
static even_status revive(even_job *job) {
  bool any = true;
  for (int round = 0; any && round < MOST_ROUNDS; round++) {
    EVEN_TRY(launch(job, &any));
    even_status status = any ? even_hosts_await(job->hosts) : EVEN_OK;
    if (status == EVEN_ERR_INTERRUPTED || (status != EVEN_OK && !even_elastic_leaves_out(job))) {
      return status;
    }
    if (status != EVEN_OK && !leave_out_absent(job)) {
      return status;
    }
    even_error_clear();
  }
  return EVEN_OK;
}

static bool may_change(const even_job *job) {
  const even_hosts_params *params = &job->hosts->params;
  return params->least_ranks > 0 || params->most_ranks > 0;
}

/* Who leaves votes no more before it is gone; nor, first, does who is missing: else those that are left might have no
 * majority. */
static even_status take_votes(even_job *job) {
  even_hosts *hosts = job->hosts;
  if (hosts->voter == NULL || !any_leaves(job)) {
    return EVEN_OK;
  }
  EVEN_TRY(even_succession_join(job));
  for (size_t i = 1; i < hosts->count; i++) {
    if (hosts->agents[i].leaves) {
      hosts->agents[i].member = 0;
      hosts->agents[i].cannot_vote = true;
    }
  }
  return even_succession_release(job);
}

even_status even_elastic_settle(even_job *job, bool *changed) {
  *changed = false;
  if (job->hosts != NULL) {
    even_move_settle(job);
    even_elastic_heed_between(job);
  }
  for (size_t i = 1; job->hosts != NULL && i < job->hosts->count; i++) {
    job->hosts->agents[i].leaves = job->hosts->agents[i].leaves || job->hosts->agents[i].fallen;
  }
  bool numbered =
      job->hosts != NULL && job->hosts->adopts; /* under another leader: hosts and ranks have other numbers */
  if (job->hosts == NULL || (!may_change(job) && !is_due(job) && !numbered)) {
    return EVEN_OK;
  }
  EVEN_TRY(await_settled(job));
  if (job->hosts->hands_over) {
    EVEN_TRY(even_hand_over(job)); /* EVEN_OK: it goes on here, and whatever else was to change changes */
  }
  if (may_change(job)) {
    even_status status = even_succession_await(job); /* who hears few of the hosts leaves out none of them, */
    EVEN_TRY(even_succession_is_alone(job->hosts) ? EVEN_OK : status); /* unless the user says so */
    EVEN_TRY(revive(job));
  }
  if (even_elastic_next_ranks(job) < even_elastic_least(job)) {
    EVEN_TRY(even_elastic_may_wait(job) ? even_elastic_await_ranks(job) : even_elastic_too_few(job, 0));
  }
  *changed = is_due(job) || job->hosts->elastic->grown || numbered;
  job->hosts->alone = false;
  if (!*changed) {
    return EVEN_OK;
  }
  EVEN_TRY(take_votes(job));
  EVEN_TRY(even_elastic_rearrange(job));
  const even_device_list own = {job->params->devices->items + job->first, job->local};
  return job->params->aside == NULL ? EVEN_OK : even_aside_hosts_cut(job->hosts, job->params->aside, &own);
}

/* Whether another attempt may follow: one without the host, or one for which it is waited for again. */
static bool bears(even_job *job, even_host_agent *agent) {
  char why[400];
  if (++agent->missed <= MOST_MISSED) {
    return true;
  }
  (void)snprintf(why, sizeof why, "%d attempts in a row could not begin for want of it: %.300s", agent->missed,
                 agent->lost_words);
  if (!agent->came && !even_elastic_leaves_out(job)) {
    return false;
  }
  even_elastic_leave_out(job, agent, why);
  return true;
}

bool even_elastic_may_leave_out(const even_job *job, even_status status) {
  bool lost = false;
  for (size_t i = 1; job->hosts != NULL && i < job->hosts->count; i++) {
    lost = lost || (job->hosts->agents[i].lost && !job->hosts->agents[i].witness);
  }
  return lost && (may_change(job) || even_succession_is_alone(job->hosts)) && job->failure.status == EVEN_OK &&
         (status == EVEN_ERR_PEER_LOST || status == EVEN_ERR_TIMEOUT);
}

static void tell_goes_on(even_job *job) {
  size_t ranks = even_elastic_next_ranks(job);
  if (ranks < even_elastic_least(job)) {
    return; /* it waits, which is told there */
  }
  even_job_notice(job,
                  "the job goes on with %zu rank%s and the same global batch%s (EVENSTEP_LOST_HOST=wait: it waits; "
                  "end: it ends)",
                  ranks, ranks == 1 ? "" : "s",
                  job->hosts->params.shell == NULL ? "" : ", and starts that host's agent again meanwhile");
}

bool even_elastic_begins_without(even_job *job) {
  bool any = false;
  for (size_t i = 1; job->hosts != NULL && i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    if (agent->lacked > 0) {
      agent->count = agent->lacked;
      agent->lacked = 0;
      even_elastic_leave_out(job, agent, agent->lost_words);
      any = true;
    }
  }
  if (any) {
    job->hosts->elastic->grown = true; /* also where all come meanwhile: they have no ranks yet */
  }
  if (any && !may_change(job)) {
    tell_goes_on(job);
  }
  return any;
}

/* Hosts never change but for this: the agents of lost ones were started again, and have not come. A leader that is cut
 * off itself leaves out nobody. */
static bool leaves_out_unasked(even_job *job, even_status status) {
  bool leaves = job->hosts != NULL && !may_change(job) && even_elastic_leaves_out(job) &&
                job->failure.status == EVEN_OK && (status == EVEN_ERR_PEER_LOST || status == EVEN_ERR_TIMEOUT) &&
                !even_succession_is_superseded(job->hosts) && !even_succession_is_cut(job->hosts) &&
                leave_out_absent(job);
  if (leaves) {
    tell_goes_on(job);
  }
  return leaves;
}

bool even_elastic_tries_again(even_job *job, even_status status) {
  if (leaves_out_unasked(job, status)) {
    return true;
  }
  bool borne = even_elastic_may_leave_out(job, status);
  for (size_t i = 1; borne && i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    borne = !agent->lost || agent->leaves || agent->witness || bears(job, agent);
  }
  return borne;
}

static void hand_over(even_text *from, even_text *to) {
  even_text_free(to);
  *to = *from;
  *from = (even_text)EVEN_TEXT_EMPTY;
}

static even_elastic_past *past_of(const even_job *job) {
  if (job->hosts != NULL) {
    return &job->hosts->elastic->past;
  }
  return job->params->aside != NULL ? &job->params->aside->past : NULL;
}

void even_elastic_keep(even_job *job) {
  even_elastic_past *past = past_of(job);
  if (past == NULL) {
    return; /* nothing changes without */
  }
  memcpy(past->id, job->id, sizeof past->id);
  past->attempt = job->attempt;
  past->planned = job->planned;
  past->restarts = job->restarts;
  past->turn = job->turn;
  past->shares = job->shares;
  past->trained = job->trained;
  past->shortages = job->shortages;
  past->notice = job->own_notice;
  past->era =
      job->hosts == NULL ? job->era : job->era + 1; /* what an agent that left sweeps behind it is nobody's any more */
  hand_over(&job->resume, &past->resume);
  hand_over(&job->foreign, &past->foreign);
  hand_over(&job->lineage, &past->lineage);
  hand_over(&job->began, &past->began);
  past->kept = true;
}

bool even_elastic_take(even_job *job) {
  even_elastic_past *past = past_of(job);
  if (past == NULL || !past->kept) {
    return false;
  }
  memcpy(job->id, past->id, sizeof job->id);
  job->attempt = past->attempt;
  job->planned = past->planned;
  job->restarts = past->restarts;
  job->turn = past->turn;
  job->shares = past->shares;
  job->trained = past->trained;
  job->shortages = past->shortages;
  job->own_notice = past->notice;
  job->era = past->era;
  hand_over(&past->resume, &job->resume);
  hand_over(&past->foreign, &job->foreign);
  hand_over(&past->lineage, &job->lineage);
  hand_over(&past->began, &job->began);
  past->kept = false;
  return true;
}
