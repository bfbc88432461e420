/* The leader among the voters. */
#include "orchestrator/succession.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_writer.h"
#include "base/stop.h"
#include "orchestrator/remote.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/signals.h"
#include "os/socket.h"

#include <stdio.h>
#include <string.h>

enum { TURN_MS = 50, MEMBERS_AN_ERA = 1000000 };

static const uint64_t AGREE_NS = 60000000000u;
static const uint64_t GATHER_NS = 20000000000u;
static const uint64_t AWAIT_NS = 3600000000000u; /* as long as the others wait for a leader */

static bool is_loopback(const char *address) {
  return strncmp(address, "127.", 4) == 0;
}

/* Where this host is reached: as the agents reached it; one that came over loopback is on this machine. */
static void find_own_address(const even_hosts *hosts, char *out, size_t bytes) {
  (void)snprintf(out, bytes, "%s", hosts->params.address == NULL ? "127.0.0.1" : hosts->params.address);
  for (size_t i = 1; is_loopback(out) && i < hosts->count; i++) {
    if (hosts->agents[i].link != NULL) {
      even_socket_local(hosts->agents[i].link->fd, out, bytes);
    }
  }
}

static void name_member(const even_hosts *hosts, size_t i, const char *own, even_voter_member *out) {
  char address[48];
  const even_host_agent *agent = &hosts->agents[i];
  (void)snprintf(address, sizeof address, "%.47s", own);
  if (i > 0 && agent->link != NULL && !is_loopback(agent->link->peer) && agent->link->peer[0] != '\0') {
    (void)snprintf(address, sizeof address, "%.47s", agent->link->peer);
  }
  out->id = i == 0 ? hosts->self : agent->member;
  (void)snprintf(out->address, sizeof out->address, "%s:%d", address, i == 0 ? hosts->voter_port : agent->voter_port);
}

/* This host and all whose agents are members. */
static even_status list_members(const even_hosts *hosts, even_voter_member **out, size_t *count) {
  char own[64];
  EVEN_TRY(EVEN_NEW_ARRAY(out, hosts->count));
  *count = 0;
  find_own_address(hosts, own, sizeof own);
  for (size_t i = 0; i < hosts->count; i++) {
    if (i == 0 || (hosts->agents[i].member != 0 && hosts->agents[i].link != NULL)) {
      name_member(hosts, i, own, &(*out)[(*count)++]);
    }
  }
  return EVEN_OK;
}

static even_status say_members(even_host_agent *agent, const even_voter_member *members, size_t count, bool joins) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_unsigned(&json, "self", agent->member);
  even_json_unsigned(&json, "first", agent->hosts->self);
  even_json_bool(&json, "joins", joins);
  even_json_array(&json, "members");
  for (size_t i = 0; i < count; i++) {
    even_json_object(&json, NULL);
    even_json_unsigned(&json, "id", members[i].id);
    even_json_string(&json, "address", members[i].address);
    even_json_object_end(&json);
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
  return even_link_send_text(agent->link, EVEN_MESSAGE_MEMBERS, &text, NULL, 0);
}

/* Voters that cannot reach one another (a firewall) are no reason not to train; nobody takes this one's place then. */
static even_status agree(even_hosts *hosts) {
  uint64_t until = even_clock_ns() + AGREE_NS;
  even_voter_view view = {.acts = false};
  while (!view.acts && even_clock_ns() < until) {
    if (even_stop_asked()) {
      return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while hosts were waited for");
    }
    EVEN_TRY(even_loop_turn(&hosts->loop, TURN_MS));
    even_hosts_tick(hosts);
    even_voter_look(hosts->voter, &view);
  }
  hosts->generation = view.newest.generation;
  if (!view.acts) {
    even_voter_close(hosts->voter);
    hosts->voter = NULL;
    hosts->voters_apart = true;
  }
  return EVEN_OK;
}

static even_status begin_voting(even_hosts *hosts, const even_voter_member *members, size_t count, int listener) {
  even_voter_params params = {.size = sizeof params,
                              .self = hosts->self,
                              .listener = listener,
                              .members = members,
                              .count = count,
                              .first = hosts->self};
  memcpy(params.key, hosts->key, sizeof params.key);
  even_status status = even_voter_open(&params, &hosts->voter);
  explicit_bzero(params.key, sizeof params.key);
  for (size_t i = 1; status == EVEN_OK && i < hosts->count; i++) {
    status = say_members(&hosts->agents[i], members, count, false);
  }
  return status;
}

even_status even_succession_open(even_hosts *hosts) {
  even_voter_member *members = NULL;
  size_t count = 0;
  int listener = -1;
  if (!hosts->params.replaces_leader || even_leadership_voters((unsigned)hosts->count) < 3) {
    return EVEN_OK;
  }
  hosts->self = 1;
  hosts->next_member = hosts->count + 1;
  for (size_t i = 1; i < hosts->count; i++) {
    hosts->agents[i].member = i + 1;
  }
  EVEN_TRY(even_listener_open(hosts->params.address == NULL ? "0.0.0.0" : hosts->params.address, &hosts->voter_port,
                              &listener));
  even_status status = list_members(hosts, &members, &count);
  if (status != EVEN_OK) {
    even_listener_close(listener);
    return status;
  }
  status = begin_voting(hosts, members, count, listener);
  even_free(members);
  return status == EVEN_OK ? agree(hosts) : status;
}

void even_succession_close(even_hosts *hosts) {
  if (hosts->params.estate == NULL) {
    even_voter_close(hosts->voter);
  }
  hosts->voter = NULL;
}

/* ---- taking a leader's place ---- */

static bool superseded(const even_hosts *hosts, const even_voter_view *view) {
  return view->newest.generation > hosts->generation;
}

static even_status fail_superseded(const even_voter_view *view) {
  (void)even_fail(EVEN_ERR_PEER_LOST,
                  "another host (%s) leads this job since generation %llu: this one's part has ended",
                  view->address[0] == '\0' ? "whose address is not known" : view->address,
                  (unsigned long long)view->newest.generation);
  return even_error_fix("its page and its history are there, in the run folder of the same name");
}

static bool all_here(const even_hosts *hosts) {
  for (size_t i = 1; i < hosts->count; i++) {
    if (hosts->agents[i].link == NULL) {
      return false;
    }
  }
  return true;
}

static even_status gather(even_hosts *hosts) {
  uint64_t until = even_clock_ns() + GATHER_NS;
  even_voter_view view = {.acts = true};
  hosts->gathering = true;
  while (!all_here(hosts) && even_clock_ns() < until) {
    if (even_stop_asked()) {
      return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while hosts were waited for");
    }
    even_voter_look(hosts->voter, &view);
    if (superseded(hosts, &view)) {
      return fail_superseded(&view);
    }
    EVEN_TRY(even_loop_turn(&hosts->loop, TURN_MS));
    even_hosts_tick(hosts);
  }
  hosts->gathering = false;
  return EVEN_OK;
}

/* Nothing of those that are left out is open: they never came, or have gone. */
static void leave_out_absent(even_hosts *hosts) {
  size_t kept = 1;
  for (size_t i = 1; i < hosts->count; i++) {
    if (hosts->agents[i].link != NULL) {
      hosts->agents[kept] = hosts->agents[i];
      hosts->agents[kept].index = kept;
      kept++;
    }
  }
  hosts->count = kept;
}

static even_status want_members(const even_hosts *hosts) {
  even_voter_member *members = NULL;
  size_t count = 0;
  even_status status = list_members(hosts, &members, &count);
  status = status == EVEN_OK ? even_voter_want(hosts->voter, members, count) : status;
  even_free(members);
  return status;
}

even_status even_succession_take(even_hosts *hosts) {
  even_estate *estate = hosts->params.estate;
  hosts->voter = estate->voter;
  hosts->self = estate->self;
  hosts->voter_port = estate->voter_port;
  hosts->generation = estate->generation;
  hosts->next_member = estate->generation * MEMBERS_AN_ERA;
  for (size_t i = 1; i < hosts->count; i++) {
    hosts->agents[i].member = even_estate_member(estate, hosts->agents[i].name);
  }
  even_voter_announce(hosts->voter, hosts->port);
  EVEN_TRY(gather(hosts));
  leave_out_absent(hosts);
  EVEN_TRY(want_members(hosts));
  for (size_t i = 1; i < hosts->count; i++) {
    EVEN_TRY(even_hosts_ask_facts(&hosts->agents[i]));
  }
  return even_hosts_await(hosts);
}

/* ---- while the job runs ---- */

even_status even_succession_bequeath(even_job *job) {
  even_hosts *hosts = job->hosts;
  if (hosts->voters_apart) {
    hosts->voters_apart = false;
    even_job_notice(job, "the hosts' agents do not reach one another: where this one is lost, the job is");
  }
  for (size_t i = 1; hosts->voter != NULL && i < hosts->count; i++) {
    even_text text = EVEN_TEXT_EMPTY;
    even_status status = even_estate_write(job, &text);
    if (status != EVEN_OK || hosts->agents[i].link == NULL) {
      even_text_free(&text);
      EVEN_TRY(status);
      continue;
    }
    EVEN_TRY(even_link_send_text(hosts->agents[i].link, EVEN_MESSAGE_ESTATE, &text, NULL, 0));
  }
  return EVEN_OK;
}

static void tell_cut_off(even_job *job) {
  if (!job->hosts->cut_off) {
    even_job_notice(job,
                    "cut off from the majority of the hosts, which may go on with another leader: no ranks run here "
                    "now, and this host waits");
  }
  job->hosts->cut_off = true;
}

void even_succession_check(even_job *job) {
  even_hosts *hosts = job->hosts;
  even_voter_view view;
  if (hosts->voter == NULL) {
    return;
  }
  even_voter_look(hosts->voter, &view);
  if (superseded(hosts, &view)) {
    if (job->failure.status == EVEN_OK) {
      (void)fail_superseded(&view);
      job->failure = *even_error_last();
    }
  } else if (!view.acts && !hosts->cut_off) {
    tell_cut_off(job);
    even_job_end_ranks(job, SIGKILL, true);
  }
}

even_status even_succession_await(even_job *job) {
  even_hosts *hosts = job->hosts;
  even_voter_view view;
  uint64_t until = even_clock_ns() + AWAIT_NS;
  for (;;) {
    if (hosts->voter == NULL) {
      return EVEN_OK;
    }
    even_voter_look(hosts->voter, &view);
    if (superseded(hosts, &view)) {
      return fail_superseded(&view);
    }
    if (view.acts && view.quorum) { /* a lease is for what runs, and not for something new */
      break;
    }
    if (!view.acts) {
      tell_cut_off(job);
    }
    if (even_stop_asked()) {
      return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while the other hosts were waited for");
    }
    if (even_clock_ns() > until) {
      (void)even_fail(EVEN_ERR_PEER_LOST, "the majority of the hosts was not heard within an hour");
      return even_error_fix(
          "another host may lead the job (logs/leader.log there); else start it again: --resume auto");
    }
    EVEN_TRY(even_loop_turn(&hosts->loop, TURN_MS));
    even_hosts_tick(hosts);
  }
  if (hosts->cut_off) {
    even_job_notice(job, "the majority of the hosts is heard again");
  }
  hosts->cut_off = false;
  return EVEN_OK;
}

bool even_succession_is_cut(even_hosts *hosts) {
  even_voter_view view;
  if (hosts->voter == NULL) {
    return false;
  }
  even_voter_look(hosts->voter, &view);
  for (size_t i = 1; !view.quorum && i < hosts->count; i++) {
    hosts->agents[i].lost = hosts->agents[i].lost || hosts->agents[i].link == NULL;
  }
  return !view.quorum;
}

even_status even_succession_join(even_hosts *hosts) {
  even_voter_member *members = NULL;
  size_t count = 0;
  bool any = false;
  if (hosts->voter == NULL) {
    return EVEN_OK;
  }
  for (size_t i = 1; i < hosts->count; i++) {
    hosts->agents[i].joins = hosts->agents[i].member == 0;
    if (hosts->agents[i].joins) {
      hosts->agents[i].member = hosts->next_member++;
      any = true;
    }
  }
  if (!any) {
    return EVEN_OK;
  }
  even_status status = list_members(hosts, &members, &count);
  for (size_t i = 1; status == EVEN_OK && i < hosts->count; i++) {
    if (hosts->agents[i].joins && hosts->agents[i].link != NULL) {
      status = say_members(&hosts->agents[i], members, count, true);
    }
  }
  status = status == EVEN_OK ? even_voter_want(hosts->voter, members, count) : status;
  even_free(members);
  return status;
}
