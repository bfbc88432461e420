/* Hosts that come to join a job that runs: what they are asked, and why they are refused. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/elastic.h"
#include "orchestrator/growth.h"
#include "orchestrator/remote.h"
#include "os/clock.h"
#include "os/socket.h"

#include <stdio.h>
#include <string.h>

even_host_agent *even_guests_find(const even_hosts *hosts, const even_link *link) {
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    even_host_agent *guest = hosts->elastic->guests[i];
    if (guest != NULL && guest->link == link) {
      return guest;
    }
  }
  return NULL;
}

size_t even_guests_ranks(const even_hosts *hosts) {
  even_move_stage stage = hosts->elastic->move.stage;
  bool prepares = stage == EVEN_MOVE_REACHES || stage == EVEN_MOVE_STARTS;
  size_t ranks = 0;
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    const even_host_agent *guest = hosts->elastic->guests[i];
    ranks += guest != NULL && guest->fits && (guest->came || !prepares) ? guest->count : 0;
  }
  return ranks;
}

void even_guests_forget(even_host_agent *guest) {
  even_elastic *elastic = guest->hosts->elastic;
  even_host_agent_drop(guest); /* of one that was started from here */
  even_device_list_free(&guest->next.devices);
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    if (elastic->guests[i] == guest) {
      elastic->guests[i] = NULL;
    }
  }
  even_device_list_free(&guest->devices);
  even_free(guest);
}

/* One that does not say what it has keeps a place no longer than a job waits for its own hosts. */
static bool is_late(const even_host_agent *guest) {
  return guest->came && !guest->fits &&
         even_clock_ns() - guest->asked_ns > (uint64_t)(guest->hosts->params.patience_seconds * 1e9);
}

void even_guests_tick(even_hosts *hosts) {
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    even_host_agent *guest = hosts->elastic->guests[i];
    if (guest != NULL && is_late(guest)) {
      (void)even_fail(EVEN_ERR_TIMEOUT, "this host did not say within %g s what it has",
                      hosts->params.patience_seconds);
      even_hosts_refuse(guest->link, even_error_last());
      even_link_flush(guest->link, 1000);
      even_error_clear();
      even_hosts_bury(hosts, guest->link);
      guest->link = NULL;
      even_guests_forget(guest);
    } else if (guest != NULL && guest->link != NULL) {
      even_link_tick(guest->link, false);
    }
  }
}

void even_guests_ended(even_host_agent *guest, even_link *link) {
  even_hosts *hosts = guest->hosts;
  if (guest->comes_back) { /* who looks for it lets it go */
    (void)snprintf(guest->lost_words, sizeof guest->lost_words, "%.300s", even_link_why(link)->what);
    even_hosts_bury(hosts, link);
    guest->link = NULL;
    guest->fits = false;
    guest->lost = true;
    return;
  }
  if (!guest->came) { /* who waits for it says so, and lets it go */
    if (hosts->elastic->move.stage == EVEN_MOVE_ASKED && hosts->job != NULL) {
      even_job_notice(hosts->job, "host %s, which was to take ranks, is lost: %.300s", guest->name,
                      even_link_why(link)->what);
    }
    (void)even_error_restore(even_link_why(link));
    if (strncmp(even_error_last()->what, "host ", 5) != 0) {
      (void)even_error_prefix("host %s", guest->name);
    }
    even_move_failed(hosts);
    even_error_clear();
    even_hosts_bury(hosts, link);
    guest->link = NULL;
    guest->fits = false;
    guest->lost = true;
    return;
  }
  if (guest->fits && hosts->job != NULL) {
    even_job_notice(hosts->job, "host %s, which was about to join, is lost: %.300s", guest->name,
                    even_link_why(link)->what);
  }
  even_hosts_bury(hosts, link);
  guest->link = NULL;
  even_guests_forget(guest);
}

/* Tells it, and is the reason for which its connection ends. */
static even_status refuse(even_link *link) {
  const even_error why = *even_error_last();
  even_hosts_refuse(link, &why);
  even_link_flush(link, 1000);
  return even_error_restore(&why);
}

/* Ranks that may still come. */
static size_t room_of(const even_hosts *hosts) {
  size_t taken = even_elastic_ranks(hosts->job) + even_guests_ranks(hosts);
  return (size_t)hosts->params.most_ranks > taken ? (size_t)hosts->params.most_ranks - taken : 0;
}

static even_status check_room(const even_hosts *hosts, size_t wish) {
  size_t room = room_of(hosts);
  if (room == 0) {
    (void)even_fail(EVEN_ERR_STATE, "the job is full: it has all of its --max-ranks %d", hosts->params.most_ranks);
    return even_error_fix("start it with more, or drain another host first: evenstep drain HOST");
  }
  if (wish > room) {
    (void)even_fail(EVEN_ERR_STATE, "%zu ranks do not fit: the job takes %zu more (--max-ranks %d)", wish, room,
                    hosts->params.most_ranks);
    return even_error_fix("evenstep join -n %zu", room);
  }
  return EVEN_OK;
}

/* This host has just taken the lead, or the hosts change: who would join asks again. */
static bool is_early(const even_hosts *hosts) {
  return hosts->job == NULL && hosts->params.most_ranks > 0;
}

static even_status check_moment(const even_hosts *hosts) {
  const even_job *job = hosts->job;
  if (hosts->params.most_ranks == 0) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "this job takes no further hosts");
    return even_error_fix("start it with --max-ranks N");
  }
  if (job != NULL && (job->draining != 0 || job->interrupted != 0)) {
    (void)even_fail(EVEN_ERR_STATE, "the job is about to end");
    return even_error_fix("join it when it was started again");
  }
  return EVEN_OK;
}

static even_host_agent **place_for(even_hosts *hosts) {
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    if (hosts->elastic->guests[i] == NULL) {
      return &hosts->elastic->guests[i];
    }
  }
  return NULL;
}

static size_t count_guests(const even_hosts *hosts) {
  size_t count = 0;
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    count += hosts->elastic->guests[i] != NULL;
  }
  return count;
}

static even_status check(even_hosts *hosts, const even_link *link, const json_t *greeting) {
  json_int_t wish = json_integer_value(json_object_get(greeting, "ranks"));
  EVEN_TRY(even_hosts_check_version(hosts, greeting, link->peer));
  EVEN_TRY(check_moment(hosts));
  if (is_early(hosts)) {
    return EVEN_OK;
  }
  EVEN_TRY(check_room(hosts, wish > 0 ? (size_t)wish : 0));
  if (hosts->count + count_guests(hosts) >= EVEN_HOSTS_MOST) {
    return even_fail(EVEN_ERR_STATE, "the job has %d hosts, or is about to, and takes no more", EVEN_HOSTS_MOST);
  }
  return place_for(hosts) != NULL
             ? EVEN_OK
             : even_fail(EVEN_ERR_STATE, "%d hosts are about to join: try again when they have", EVEN_GUESTS_MOST);
}

static even_status ask(even_host_agent *guest) {
  guest->asked_ns = even_clock_ns();
  return even_hosts_ask_facts(guest);
}

/* As a host does that does not know who leads (voter_links.c). */
static even_status point_nowhere(even_link *link) {
  char text[32];
  (void)snprintf(text, sizeof text, "{\"silence_ms\":%d}", even_socket_silence());
  return even_link_send(link, EVEN_MESSAGE_LEADER, text, NULL, 0);
}

even_status even_guests_greet(even_hosts *hosts, even_link *link, const json_t *greeting) {
  json_int_t wish = json_integer_value(json_object_get(greeting, "ranks"));
  if (check(hosts, link, greeting) != EVEN_OK) {
    return refuse(link);
  }
  if (is_early(hosts)) {
    return point_nowhere(link);
  }
  even_host_agent **place = place_for(hosts);
  EVEN_TRY(EVEN_NEW(place));
  even_host_agent *guest = *place;
  *guest = (even_host_agent){.hosts = hosts,
                             .index = hosts->count + (size_t)(place - hosts->elastic->guests), /* until it is let in */
                             .wish = (int)wish,
                             .came = true,
                             .link = link,
                             .voter_port = (int)json_integer_value(json_object_get(greeting, "voter_port")),
                             .shell = {.pid = -1},
                             .input = -1,
                             .watches = {{.fd = -1}, {.fd = -1}}};
  (void)snprintf(guest->name, sizeof guest->name, "%.100s", link->peer);
  even_hosts_leave_strangers(hosts, link);
  return ask(guest);
}

/* ---- hosts that are started from here ---- */

even_status even_guests_launch(even_hosts *hosts, const char *name, size_t ranks) {
  even_host_agent **place = place_for(hosts);
  if (place == NULL || hosts->count + count_guests(hosts) >= EVEN_HOSTS_MOST) {
    return even_fail(EVEN_ERR_STATE, "too many hosts are about to join, or have");
  }
  EVEN_TRY(EVEN_NEW(place));
  even_host_agent *guest = *place;
  *guest = (even_host_agent){.hosts = hosts,
                             .index = hosts->count + (size_t)(place - hosts->elastic->guests), /* until it is let in */
                             .wish = (int)ranks,
                             .next = {.count = ranks},
                             .shell = {.pid = -1},
                             .input = -1,
                             .watches = {{.fd = -1}, {.fd = -1}}};
  (void)snprintf(guest->name, sizeof guest->name, "%s", name);
  return even_host_agent_launch(guest);
}

even_host_agent *even_guests_named(const even_hosts *hosts, const char *name) {
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    even_host_agent *guest = hosts->elastic->guests[i];
    if (guest != NULL && !guest->came && strcmp(guest->name, name) == 0) {
      return guest;
    }
  }
  return NULL;
}

even_host_agent *even_guests_launched(const even_hosts *hosts, json_int_t index) {
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    even_host_agent *guest = hosts->elastic->guests[i];
    if (guest != NULL && !guest->came && !guest->lost && guest->link == NULL && (json_int_t)guest->index == index) {
      return guest;
    }
  }
  return NULL;
}

even_status even_guests_welcome(even_host_agent *guest, even_link *link, const json_t *greeting) {
  if (even_hosts_check_version(guest->hosts, greeting, guest->name) != EVEN_OK) {
    if (!guest->comes_back) {
      even_move_failed(guest->hosts);
    }
    return refuse(link);
  }
  even_hosts_leave_strangers(guest->hosts, link);
  guest->link = link;
  return ask(guest);
}

void even_guests_dismiss(even_hosts *hosts) {
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    even_host_agent *guest = hosts->elastic->guests[i];
    if (guest != NULL && !guest->came) {
      if (guest->link != NULL) {
        (void)!even_link_send(guest->link, EVEN_MESSAGE_END, NULL, NULL, 0);
        even_link_flush(guest->link, 1000);
      }
      even_guests_forget(guest);
    }
  }
}

/* ---- hosts that come by themselves ---- */

static bool is_called(const even_hosts *hosts, const even_host_agent *guest, const char *name) {
  for (size_t i = 0; i < hosts->count; i++) {
    if (strcmp(hosts->agents[i].name, name) == 0) {
      return true;
    }
  }
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    const even_host_agent *other = hosts->elastic->guests[i];
    if (other != NULL && other != guest && strcmp(other->name, name) == 0) {
      return true;
    }
  }
  return false;
}

/* By what it calls itself, where that is a name, else by its address; where another one is called so (one machine plays
 * several, or images of one), with a number. */
static void name_guest(even_host_agent *guest) {
  char name[EVEN_HOSTS_NAME];
  const char *called = even_hosts_is_name(guest->node, strlen(guest->node)) ? guest->node : guest->link->peer;
  (void)snprintf(name, sizeof name, "%.100s", called);
  for (int number = 1; is_called(guest->hosts, guest, name); number++) {
    (void)snprintf(name, sizeof name, "%.100s#%d", called, number);
  }
  memcpy(guest->name, name, sizeof guest->name);
}

static bool is_same(const even_host_agent *agent, const char *identity) {
  return identity[0] != '\0' && strcmp(agent->identity, identity) == 0;
}

/* One that is lost, or leaves, may come again: what is left of it is gone when it does. */
static even_status check_alone(const even_host_agent *guest) {
  const even_hosts *hosts = guest->hosts;
  bool there = strcmp(even_json_text(hosts->facts, "identity"), guest->identity) == 0 && guest->identity[0] != '\0';
  for (size_t i = 1; i < hosts->count; i++) {
    const even_host_agent *agent = &hosts->agents[i];
    there = there || (agent->link != NULL && !agent->lost && !agent->leaves && is_same(agent, guest->identity));
  }
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    const even_host_agent *other = hosts->elastic->guests[i];
    there = there || (other != NULL && other != guest && other->fits && is_same(other, guest->identity));
  }
  if (!there) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_STATE, "this host is in the job already");
  return even_error_fix("`evenstep drain` it first, where it shall have another number of ranks");
}

static even_status examine(even_host_agent *guest, const json_t *facts, bool *again) {
  const even_hosts *hosts = guest->hosts;
  (void)snprintf(guest->identity, sizeof guest->identity, "%s", even_json_text(facts, "identity"));
  (void)snprintf(guest->node, sizeof guest->node, "%s", even_json_text(facts, "node"));
  if (!guest->came) {
    EVEN_TRY(check_alone(guest));
    return even_hosts_examine(guest, facts);
  }
  EVEN_TRY(check_moment(hosts));
  EVEN_TRY(check_alone(guest));
  name_guest(guest);
  EVEN_TRY(even_growth_check(guest, facts));
  EVEN_TRY(even_hosts_examine(guest, facts));
  size_t room = room_of(hosts);
  if (guest->wish == 0 && guest->count > room && room > 0) { /* it left the number to us */
    guest->wish = (int)room;
    *again = true;
    return EVEN_OK;
  }
  return check_room(hosts, guest->count);
}

static void let_in(even_host_agent *guest) {
  guest->fits = true;
  if (!guest->came) {
    return; /* who waits for it sees it */
  }
  even_job *job = guest->hosts->job;
  guest->grows = even_growth_may(job);
  if (guest->grows) {
    return; /* with the next tick, or once the ranks have said whether they can go on among others */
  }
  even_elastic_ask(job);
  even_job_notice(job,
                  "host %s has come with %zu rank%s: it joins when the training has saved its state after the step "
                  "under way",
                  guest->name, guest->count, guest->count == 1 ? "" : "s");
}

even_status even_guests_take(even_host_agent *guest, const even_message *message) {
  json_t *facts = NULL;
  bool again = false;
  if (guest->fits && message->kind == EVEN_MESSAGE_PLACED) {
    EVEN_TRY(even_json_parse("what another host says", message->json, message->json_bytes, &facts));
    even_move_hear(guest, facts);
    json_decref(facts);
    return EVEN_OK;
  }
  if (guest->fits) {
    return EVEN_OK; /* a line of its agent's own: there is no attempt in which it had a part */
  }
  if (message->kind != EVEN_MESSAGE_FACTS) {
    return even_fail(EVEN_ERR_INPUT, "%s: a message of kind %d of a host that is about to join", guest->name,
                     (int)message->kind);
  }
  EVEN_TRY(even_json_parse("what another host says", message->json, message->json_bytes, &facts));
  even_status status = examine(guest, facts, &again);
  json_decref(facts);
  if (status != EVEN_OK) {
    return refuse(guest->link);
  }
  if (again) {
    even_device_list_free(&guest->devices);
    guest->count = 0;
    return ask(guest);
  }
  let_in(guest);
  return EVEN_OK;
}
