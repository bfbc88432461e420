/* The leader's job and the ranks on other hosts: what they do comes as messages, and what they shall do goes as such.
 */
#include "orchestrator/remote.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/bring.h"
#include "orchestrator/copies.h"
#include "orchestrator/elastic.h"
#include "orchestrator/growth.h"
#include "orchestrator/remote_start.h"
#include "orchestrator/returns.h"
#include "orchestrator/succession.h"
#include "os/clock.h"
#include "os/socket.h"

#include <stdio.h>
#include <string.h>

enum { MOST_ROUNDS = 8 };

/* For the other hosts to clear up after an attempt, from the last word that they write; they kill after the same times
 * as this one. */
static const uint64_t SETTLE_NS = 60000000000u;

static even_status hosts_turn(even_hosts *hosts) {
  EVEN_TRY(even_loop_turn(&hosts->loop, 0));
  return EVEN_OK;
}

static void hosts_ready(void *context, int fd) {
  even_job *job = context;
  (void)fd;
  if (hosts_turn(job->hosts) != EVEN_OK) {
    job->failure = job->failure.status == EVEN_OK ? *even_error_last() : job->failure;
  }
}

/* ---- opening ---- */

/* Spares that shall wait on that host. */
static size_t spares_of(const even_agent_params *params, size_t host) {
  size_t spares = 0;
  for (int i = 0; i < params->spares - params->kept; i++) {
    spares += (params->spare_hosts == NULL ? 0 : (size_t)params->spare_hosts[i]) == host ? 1 : 0;
  }
  return spares;
}

static void place_ranks(even_job *job) {
  even_hosts *hosts = job->hosts;
  size_t next = job->local;
  size_t spare = job->first_spare + job->spares;
  for (size_t i = 1; !job->adopted && i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    agent->first = next;
    next += agent->count;
    agent->first_spare = spare;
    agent->spares = spares_of(job->params, i);
    spare += agent->spares;
  }
}

static bool is_loopback(const char *address) {
  return strncmp(address, "127.", 4) == 0;
}

/* How good what an agent came by is: 0: over loopback, on this machine, and no measure; 1: on this machine, over an
 * address that others may not reach (a bridge's of containers); 2: of another machine. */
static int read_way(const even_link *link, char *address, size_t bytes) {
  char peer[64];
  even_socket_local(link->fd, address, bytes);
  even_socket_peer(link->fd, peer, sizeof peer);
  if (address[0] == '\0' || is_loopback(address)) {
    return 0;
  }
  return strcmp(address, peer) == 0 ? 1 : 2;
}

/* The better of two: what this one came by is the address then. */
static void look_at_way(const even_host_agent *agent, int *best, char address[EVEN_JOB_ADDRESS]) {
  char its[EVEN_JOB_ADDRESS];
  int way = agent == NULL || agent->link == NULL ? 0 : read_way(agent->link, its, sizeof its);
  if (way > *best) {
    memcpy(address, its, sizeof its);
    *best = way;
  }
}

void even_job_hosts_find_address(const even_job *job, const char *without, char address[EVEN_JOB_ADDRESS],
                                 char interface[EVEN_JOB_INTERFACE]) {
  const even_hosts *hosts = job->hosts;
  int best = 0;
  for (size_t i = 1; i < hosts->count; i++) {
    bool leaves = without != NULL && strcmp(hosts->agents[i].name, without) == 0;
    look_at_way(leaves ? NULL : &hosts->agents[i], &best, address);
  }
  for (size_t i = 0; hosts->elastic != NULL && i < EVEN_GUESTS_MOST; i++) {
    const even_host_agent *guest = hosts->elastic->guests[i];
    look_at_way(guest != NULL && guest->fits ? guest : NULL, &best, address);
  }
  if (hosts->params.address != NULL) {
    (void)snprintf(address, EVEN_JOB_ADDRESS, "%s", hosts->params.address);
  }
  even_socket_interface(address, interface, EVEN_JOB_INTERFACE);
}

void even_job_hosts_choose_address(even_job *job) {
  even_job_hosts_find_address(job, NULL, job->master_address, job->interface);
}

static even_status open_rings(even_job *job) {
  if (job->params->telemetry_fd < 0) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&job->hosts->rings, job->count));
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_is_here(job, i)) {
      continue;
    }
    EVEN_TRY(even_telemetry_open(job->params->telemetry_fd, (int)i, &job->hosts->rings[i]));
  }
  return EVEN_OK;
}

void even_job_hosts_count(even_job *job) {
  job->groups = job->hosts == NULL ? 1 : (int)even_hosts_count(job->hosts);
  job->most_groups = job->params->grows ? (int)job->hosts->room : job->groups;
  job->first_spare = job->count - (size_t)job->params->spares;
  job->spares = spares_of(job->params, 0);
  job->local = job->first_spare;
  for (size_t i = 1; i < (size_t)job->groups; i++) {
    job->local -= job->hosts->agents[i].count;
  }
}

even_status even_job_hosts_open(even_job *job) {
  if (job->hosts == NULL) {
    return EVEN_OK;
  }
  job->hosts->job = job;
  job->warm = &job->hosts->elastic->warm;
  job->parcels = job->hosts->parcels;
  place_ranks(job);
  for (size_t i = 0; i < job->hosts->count; i++) {
    even_host_data_tell(&job->hosts->agents[i]);
  }
  even_elastic_begin(job);
  EVEN_TRY(open_rings(job));
  return even_loop_add(&job->loop, &job->hosts->job_watch, job->hosts->loop.fd, hosts_ready, job);
}

void even_job_hosts_close(even_job *job) {
  even_hosts *hosts = job->hosts;
  if (hosts == NULL) {
    return;
  }
  even_loop_remove(&job->loop, &hosts->job_watch);
  for (size_t i = 0; hosts->rings != NULL && i < job->count; i++) {
    even_telemetry_close(hosts->rings[i]);
  }
  even_free((void *)hosts->rings);
  hosts->rings = NULL;
  hosts->job = NULL;
}

bool even_job_is_here(const even_job *job, size_t rank) {
  return (rank >= job->first && rank < job->first + job->local) ||
         (rank >= job->first_spare && rank < job->first_spare + job->spares);
}

bool even_host_agent_has(const even_host_agent *agent, size_t rank) {
  return (rank >= agent->first && rank < agent->first + agent->count) ||
         (rank >= agent->first_spare && rank < agent->first_spare + agent->spares);
}

static const even_host_agent *host_of(const even_job *job, size_t rank) {
  for (size_t i = 1; job->hosts != NULL && i < job->hosts->count; i++) {
    const even_host_agent *agent = &job->hosts->agents[i];
    if (even_host_agent_has(agent, rank)) {
      return agent;
    }
  }
  return NULL;
}

size_t even_job_host_number(const even_job *job, size_t rank) {
  const even_host_agent *agent = host_of(job, rank);
  return agent == NULL ? 0 : agent->index;
}

bool even_job_is_nobodys(const even_job *job, size_t rank) {
  return job->params->grows && !even_job_is_here(job, rank) && host_of(job, rank) == NULL;
}

bool even_job_host_reached(const even_job *job, size_t rank) {
  const even_host_agent *agent = host_of(job, rank);
  if (agent == NULL) {
    return !even_job_is_nobodys(job, rank);
  }
  return agent->link != NULL && agent->busy && agent->follows;
}

even_status even_job_host_fill(even_job *job, size_t rank) {
  const even_host_agent *agent = host_of(job, rank);
  char text[32];
  if (agent == NULL || !even_job_host_reached(job, rank)) {
    return even_fail(EVEN_ERR_PEER_LOST, "its host is lost");
  }
  (void)snprintf(text, sizeof text, "{\"rank\":%zu}", rank);
  EVEN_TRY(even_link_send(agent->link, EVEN_MESSAGE_FILL, text, NULL, 0));
  job->ranks[rank].alive = true;
  job->alive++;
  return EVEN_OK;
}

void even_job_host_end_rank(even_job *job, size_t rank, bool standing) {
  const even_host_agent *agent = host_of(job, rank);
  char text[96];
  (void)snprintf(text, sizeof text, "{\"number\":%d,\"rank\":%zu,\"standing\":%s}", SIGKILL, rank,
                 standing ? "true" : "false");
  if (agent != NULL && agent->link != NULL && agent->busy &&
      even_link_send(agent->link, EVEN_MESSAGE_SIGNAL, text, NULL, 0) != EVEN_OK) {
    even_error_clear(); /* it is asked again, where the rank still stands */
  }
}

const char *even_job_host_name(const even_job *job, size_t rank) {
  const even_host_agent *agent = host_of(job, rank);
  return agent == NULL ? job->host : agent->name;
}

/* ---- an attempt ---- */

/* Starts the agents of lost hosts again; *any: there were such. */
static even_status launch_lost(even_job *job, bool *any) {
  even_hosts *hosts = job->hosts;
  *any = false;
  for (size_t i = 1; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    if (agent->lost && !agent->witness) {
      even_host_agent_drop(agent);
      agent->returns = agent->member != 0; /* as the same member, if its host has kept what it was */
      EVEN_TRY(even_host_agent_launch(agent));
      even_job_notice(job, "host %s: its agent is %s again", agent->name,
                      job->hosts->params.shell == NULL ? "waited for" : "started");
      *any = true;
    }
  }
  return EVEN_OK;
}

/* While some are waited for, others may be lost. */
static even_status revive(even_job *job) {
  bool any = false;
  for (int round = 0; round < MOST_ROUNDS; round++) {
    EVEN_TRY(launch_lost(job, &any));
    if (!any) {
      return EVEN_OK;
    }
    EVEN_TRY(even_hosts_await(job->hosts));
  }
  for (size_t i = 1; i < job->hosts->count; i++) {
    if (job->hosts->agents[i].lost && !job->hosts->agents[i].witness) {
      return even_fail(EVEN_ERR_PEER_LOST, "host %s is lost again and again: %s", job->hosts->agents[i].name,
                       job->hosts->agents[i].lost_words);
    }
  }
  return EVEN_OK;
}

static bool any_lost(const even_hosts *hosts) {
  for (size_t i = 1; i < hosts->count; i++) {
    if (hosts->agents[i].lost && !hosts->agents[i].witness) {
      return true;
    }
  }
  return false;
}

/* A leader that reaches few of the hosts waits, whatever else it could do. */
static even_status reach_all(even_job *job) {
  even_status status = EVEN_OK;
  int round = 0;
  do {
    EVEN_TRY(even_succession_await(job));
    status = revive(job);
    status = status == EVEN_OK ? even_succession_join(job) : status;
    bool again = status == EVEN_OK && any_lost(job->hosts) && ++round < MOST_ROUNDS;
    if (!again && (status == EVEN_OK || status == EVEN_ERR_INTERRUPTED || !even_succession_is_cut(job->hosts))) {
      return status;
    }
  } while (true);
}

static bool any_hangs(const even_hosts *hosts) {
  bool any = false;
  for (size_t i = 1; i < hosts->count; i++) {
    any = any || (hosts->agents[i].lost && even_bring_hangs(&hosts->agents[i]));
  }
  return any;
}

/* A checkpoint takes its time to come, in which a host may be lost: that one is reached again, as before it began, but
 * one whose disk hangs once more alone. Where hosts may be left out that is decided elsewhere. */
static even_status bring_all(even_job *job) {
  for (int round = 1;; round++) {
    EVEN_TRY(reach_all(job));
    EVEN_TRY(even_succession_bequeath(job));
    even_status status = even_bring_to_all(job);
    if (status == EVEN_OK) {
      EVEN_TRY(even_succession_await(job)); /* others may have gone on without this host meanwhile */
    }
    bool again = (status == EVEN_OK || status == EVEN_ERR_PEER_LOST) && any_lost(job->hosts) && round < MOST_ROUNDS &&
                 !even_elastic_may_leave_out(job, EVEN_ERR_PEER_LOST) && job->failure.status == EVEN_OK;
    if (again && status != EVEN_OK && any_hangs(job->hosts)) {
      return even_error_fix(
          "look at the disk there, or leave that host out of --hosts: --name NAME --resume auto goes "
          "on from the newest whole checkpoint");
    }
    if (!again) {
      return status;
    }
    even_error_clear();
  }
}

even_status even_job_hosts_begin(even_job *job) {
  if (job->hosts == NULL) {
    return EVEN_OK;
  }
  job->hosts->signals.said = 0;
  EVEN_TRY(even_succession_open(job));
  EVEN_TRY(bring_all(job));
  even_job_hosts_choose_address(job);
  for (size_t i = 1; i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    if (agent->witness) {
      continue;
    }
    even_text text = EVEN_TEXT_EMPTY;
    if (agent->link == NULL) {
      return even_fail(EVEN_ERR_PEER_LOST, "host %s is lost: %s", agent->name, agent->lost_words);
    }
    agent->late = false;
    even_remote_start_write(job, agent->index, agent->first, agent->count, agent, &text);
    EVEN_TRY(even_link_send_text(agent->link, EVEN_MESSAGE_START, &text, NULL, 0));
    agent->busy = agent->follows = true;
    agent->missed = 0;
    for (size_t rank = 0; rank < job->count; rank++) {
      if (even_host_agent_has(agent, rank)) {
        job->ranks[rank].alive = true;
        job->alive++;
      }
    }
  }
  return EVEN_OK;
}

void even_hosts_note_signals(even_hosts *hosts, uint64_t passed) {
  even_hosts_signals *signals = &hosts->signals;
  if (passed > signals->said) {
    *signals = (even_hosts_signals){.said = passed};
  }
}

static void write_forwarded(const even_hosts_signals *signals, uint64_t serial, char *out, size_t bytes) {
  (void)snprintf(out, bytes, "{\"number\":%d,\"serial\":%llu}", signals->last[serial % EVEN_HOSTS_SIGNALS],
                 (unsigned long long)serial);
}

even_status even_hosts_say_signals(const even_host_agent *agent, uint64_t passed) {
  const even_hosts_signals *signals = &agent->hosts->signals;
  uint64_t kept = signals->said > EVEN_HOSTS_SIGNALS ? signals->said - EVEN_HOSTS_SIGNALS : 0;
  for (uint64_t serial = (passed > kept ? passed : kept) + 1; serial <= signals->said; serial++) {
    char text[96];
    write_forwarded(signals, serial, text, sizeof text);
    if (signals->last[serial % EVEN_HOSTS_SIGNALS] != 0) {
      EVEN_TRY(even_link_send(agent->link, EVEN_MESSAGE_SIGNAL, text, NULL, 0));
    }
  }
  return EVEN_OK;
}

void even_job_hosts_signal(even_job *job, int number, bool groups, bool ends) {
  char text[96];
  if (job->hosts == NULL) {
    return;
  }
  if (ends) {
    (void)snprintf(text, sizeof text, "{\"number\":%d,\"groups\":%s,\"ends\":true}", number, groups ? "true" : "false");
  } else {
    even_hosts_signals *signals = &job->hosts->signals;
    signals->last[++signals->said % EVEN_HOSTS_SIGNALS] = number;
    write_forwarded(signals, signals->said, text, sizeof text);
  }
  for (size_t i = 1; i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    bool later = agent->renewed && !ends; /* with those before it, which it would take for known (outlast_hosts.c) */
    if (agent->busy && agent->link != NULL && !later &&
        even_link_send(agent->link, EVEN_MESSAGE_SIGNAL, text, NULL, 0) != EVEN_OK) {
      even_error_clear(); /* its deadline ends it then */
    }
  }
}

void even_job_hosts_tick(even_job *job) {
  if (job->hosts != NULL) {
    even_hosts_tick(job->hosts);
    even_succession_check(job);
    even_copies_tick(job);
    even_returns_tick(job);
    even_growth_tick(job);
  }
}

bool even_job_hosts_reaped(even_job *job, pid_t pid) {
  for (size_t i = 1; job->hosts != NULL && i < job->hosts->count; i++) {
    if (job->hosts->agents[i].shell.pid == pid) {
      job->hosts->agents[i].shell.pid = -1;
      return true;
    }
  }
  return false;
}

bool even_job_hosts_settled(even_job *job, uint64_t since_ns) {
  bool all = true;
  for (size_t i = 1; job->hosts != NULL && i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    bool writes = agent->writes_ns > since_ns && job->interrupted == 0; /* else nobody waits for a disk */
    uint64_t said_ns = writes ? agent->writes_ns : since_ns;
    if (agent->busy && even_clock_ns() - said_ns > SETTLE_NS) {
      even_job_notice(job, "host %s did not say that its part of the attempt is cleared up: its agent is left",
                      agent->name);
      even_host_agent_drop(agent);
      agent->lost = true;
      agent->busy = false;
    }
    all = all && !agent->busy;
  }
  return all;
}

void even_hosts_job_lost(even_host_agent *agent) {
  even_job *job = agent->hosts->job;
  bool busy = agent->busy;
  agent->busy = false;
  if (job == NULL) {
    return; /* it is about to begin: who looks for its checkpoint (bring_back.h) sees it */
  }
  if (!even_succession_is_superseded(agent->hosts)) { /* else it has gone to the next leader */
    even_job_notice(job, "host %s is lost: %s", agent->name, agent->lost_words);
  }
  if (busy) {
    even_job_host_ended(job, agent->index, agent->lost_words);
  }
}
