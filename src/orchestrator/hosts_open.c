/* The leader's way to its hosts: starting their agents, taking their connections, checking what they have. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/stop.h"
#include "orchestrator/aside_hosts.h"
#include "orchestrator/bring.h"
#include "orchestrator/bring_back.h"
#include "orchestrator/copies.h"
#include "orchestrator/elastic.h"
#include "orchestrator/job.h"
#include "orchestrator/outlast.h"
#include "orchestrator/remote.h"
#include "orchestrator/remote_start.h"
#include "orchestrator/succession.h"
#include "os/clock.h"
#include "os/host.h"
#include "os/path.h"
#include "os/pipe.h"
#include "os/process.h"
#include "os/socket.h"

#include <evenstep/version.h>
#include <stdio.h>
#include <string.h>

enum { TICK_MS = 50, SPARE_PLACES = 16 };

static const uint64_t STRANGER_NS = 20000000000u;
static const uint64_t PAUSE_NS = 100000000u;

/* ---- connections ---- */

/* Frees it later: this may be a call of its own. */
void even_hosts_bury(even_hosts *hosts, even_link *link) {
  even_link_close(link);
  link->next = hosts->gone;
  hosts->gone = link;
}

static void free_gone(even_hosts *hosts) {
  while (hosts->gone != NULL) {
    even_link *link = hosts->gone;
    hosts->gone = link->next;
    even_free(link);
  }
}

static void fail_opening(even_hosts *hosts) {
  if (hosts->failure.status == EVEN_OK) {
    hosts->failure = *even_error_last();
  }
}

static even_host_stranger *place_of(even_hosts *hosts, const even_link *link) {
  for (size_t i = 0; i < hosts->places; i++) {
    if (hosts->strangers[i].link == link) {
      return &hosts->strangers[i];
    }
  }
  return NULL;
}

void even_hosts_leave_strangers(even_hosts *hosts, const even_link *link) {
  even_host_stranger *place = place_of(hosts, link);
  if (place != NULL) {
    place->link = NULL;
  }
}

static even_host_agent *agent_of(even_hosts *hosts, const even_link *link) {
  for (size_t i = 1; i < hosts->count; i++) {
    if (hosts->agents[i].link == link) {
      return &hosts->agents[i];
    }
  }
  return NULL;
}

void even_hosts_refuse(even_link *link, const even_error *error) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "what", error->what);
  even_json_string(&json, "fix", error->fix);
  even_json_object_end(&json);
  if (even_link_send_text(link, EVEN_MESSAGE_REFUSE, &text, NULL, 0) != EVEN_OK) {
    even_error_clear(); /* the end of the connection tells it, too */
  }
}

even_status even_hosts_check_version(const even_hosts *hosts, const json_t *greeting, const char *name) {
  const char *version = json_string_value(json_object_get(greeting, "evenstep"));
  if (version != NULL && strcmp(version, even_version()) == 0 &&
      json_integer_value(json_object_get(greeting, "protocol")) == EVEN_MESSAGE_PROTOCOL &&
      json_integer_value(json_object_get(greeting, "record_bytes")) == (json_int_t)sizeof(even_record)) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_UNSUPPORTED, "host %s has evenstep %.32s, this one %s", name,
                  version == NULL ? "of no version" : version, even_version());
  return even_error_fix("install one version on all hosts; %s is what runs there", hosts->params.program);
}

/* Who served another leader before has the number that it had in the voters' group. */
static json_int_t index_of(const even_hosts *hosts, const json_t *greeting) {
  json_int_t member = json_integer_value(json_object_get(greeting, "member"));
  bool voters = hosts->gathering && hosts->params.estate != NULL;
  for (size_t i = 1; voters && i < hosts->count; i++) {
    if ((json_int_t)hosts->agents[i].member == member) {
      return (json_int_t)i;
    }
  }
  return voters ? -1 : even_hosts_index_of(hosts, json_integer_value(json_object_get(greeting, "host")));
}

/* One that keeps ranks for this job would ask again; what a new leader waits for comes by itself (gathering). */
static even_status dismiss(const even_hosts *hosts, even_link *link) {
  const even_error why = *even_error_last();
  if (!hosts->gathering) {
    even_hosts_refuse(link, &why);
    even_link_flush(link, 1000);
  }
  return even_error_restore(&why);
}

static even_status take_greeting(even_hosts *hosts, even_link *link, const json_t *greeting) {
  json_int_t index = index_of(hosts, greeting);
  bool holds = json_is_true(json_object_get(greeting, "holds"));
  if (!hosts->gathering && json_integer_value(json_object_get(greeting, "member")) != 0) { /* who starts has none yet */
    even_status late =
        even_fail(EVEN_ERR_INPUT, "%s served another leader, and comes too late to this one", link->peer);
    return holds ? dismiss(hosts, link) : late;
  }
  even_host_agent *guest = hosts->gathering ? NULL : even_guests_launched(hosts, index);
  if (guest != NULL) {
    return even_guests_welcome(guest, link, greeting);
  }
  bool known = index >= 1 && index < (json_int_t)hosts->count;
  if (known && even_outlast_hosts_comes_anew(&hosts->agents[index], greeting)) {
    return even_outlast_hosts_renew(&hosts->agents[index], link);
  }
  if (!known || hosts->agents[index].link != NULL || hosts->agents[index].lost) {
    even_status unknown = even_fail(EVEN_ERR_INPUT, "%s says that it is host %lld, which is none that is waited for",
                                    link->peer, (long long)index);
    return holds ? dismiss(hosts, link) : unknown;
  }
  even_host_agent *agent = &hosts->agents[index];
  even_status status = even_hosts_check_version(hosts, greeting, agent->name);
  if (status != EVEN_OK) {
    fail_opening(hosts);
    even_hosts_refuse(link, &hosts->failure);
    even_link_flush(link, 1000);
    return even_error_restore(&hosts->failure);
  }
  even_hosts_leave_strangers(hosts, link);
  agent->link = link;
  agent->voter_port = (int)json_integer_value(json_object_get(greeting, "voter_port"));
  json_decref(agent->runs);
  agent->runs = NULL;
  agent->holds = holds;
  if (!holds) {
    even_remote_begin_places(agent);
  }
  return hosts->gathering ? EVEN_OK : even_hosts_ask_facts(agent);
}

even_status even_hosts_take_facts(even_host_agent *agent, const json_t *facts) {
  even_hosts *hosts = agent->hosts;
  const char *node = json_string_value(json_object_get(facts, "node"));
  (void)snprintf(agent->node, sizeof agent->node, "%s", node == NULL ? agent->name : node);
  (void)snprintf(agent->identity, sizeof agent->identity, "%s", even_json_text(facts, "identity"));
  even_hosts_name_agent(agent);
  even_status status = even_hosts_examine(agent, facts);
  if (status != EVEN_OK) {
    fail_opening(hosts);
    even_hosts_refuse(agent->link, &hosts->failure);
    even_link_flush(agent->link, 1000);
    return even_error_restore(&hosts->failure);
  }
  agent->fits = true;
  return EVEN_OK;
}

static even_status take_opening_message(even_hosts *hosts, even_link *link, const even_message *message) {
  json_t *content = NULL;
  even_host_agent *agent = agent_of(hosts, link);
  even_message_kind wanted = agent == NULL                         ? EVEN_MESSAGE_GREET
                             : agent->holds && agent->runs == NULL ? EVEN_MESSAGE_RUNS
                                                                   : EVEN_MESSAGE_FACTS;
  if (message->kind != wanted) {
    return even_fail(EVEN_ERR_INPUT, "%s: a message of kind %d where one of kind %d comes", link->peer,
                     (int)message->kind, (int)wanted);
  }
  EVEN_TRY(even_json_parse("what another host says", message->json, message->json_bytes, &content));
  if (wanted == EVEN_MESSAGE_RUNS) {
    return even_outlast_hosts_take(agent, content);
  }
  bool joins = agent == NULL && json_is_true(json_object_get(content, "joins"));
  even_status status = joins           ? even_guests_greet(hosts, link, content)
                       : agent == NULL ? take_greeting(hosts, link, content)
                                       : even_hosts_take_facts(agent, content);
  json_decref(content);
  return status;
}

static void on_ready(void *context, even_link *link) {
  (void)context;
  (void)link; /* the greeting is the other end's */
}

static even_status on_message(void *context, even_link *link, const even_message *message) {
  even_hosts *hosts = context;
  even_host_agent *agent = agent_of(hosts, link);
  even_host_agent *guest = even_guests_find(hosts, link);
  if (guest != NULL) {
    return even_guests_take(guest, message);
  }
  if (agent == NULL || !agent->fits) {
    return take_opening_message(hosts, link, message);
  }
  return even_parcels_know(message->kind) ? even_parcels_take(hosts->parcels, (int)agent->index, message)
                                          : even_hosts_job_message(agent, message);
}

/* Anybody may connect; that one who has not the key cannot go on is no news. */
static void on_ended(void *context, even_link *link) {
  even_hosts *hosts = context;
  even_host_stranger *stranger = place_of(hosts, link);
  even_host_agent *agent = agent_of(hosts, link);
  if (stranger != NULL) {
    hosts->without_key = hosts->without_key || even_link_why(link)->status == EVEN_ERR_PERMISSION;
    stranger->link = NULL;
    even_hosts_bury(hosts, link);
  } else if (agent != NULL) {
    const even_error *why = even_link_why(link);
    (void)snprintf(agent->lost_words, sizeof agent->lost_words, "%.300s", why->what);
    bool begun = (agent->fits || agent->renewed) && (hosts->job != NULL || hosts->back != NULL);
    agent->lost = !hosts->gathering;
    agent->fits = agent->renewed = false;
    bool opens = hosts->job == NULL && hosts->params.estate == NULL;
    bool needed = !agent->witness || opens; /* one that only votes is started again by and by */
    if (!begun && !hosts->gathering && needed) {
      (void)even_fail(EVEN_ERR_PEER_LOST, "host %s: %.400s", agent->name, why->what);
      fail_opening(hosts);
    }
    even_hosts_bury(hosts, link);
    agent->link = NULL;
    even_parcels_lost(hosts->parcels, (int)agent->index);
    if (begun) {
      even_hosts_job_lost(agent);
    }
  } else if (even_guests_find(hosts, link) != NULL) {
    even_guests_ended(even_guests_find(hosts, link), link);
  }
}

/* A free place, or that of who has been here longest without proving that it has the key: agents try again. */
static even_host_stranger *make_room(even_hosts *hosts) {
  even_host_stranger *oldest = NULL;
  for (size_t i = 0; i < hosts->places; i++) {
    even_host_stranger *stranger = &hosts->strangers[i];
    if (stranger->link == NULL) {
      return stranger;
    }
    if (!stranger->link->was_ready && (oldest == NULL || stranger->since_ns < oldest->since_ns)) {
      oldest = stranger;
    }
  }
  if (oldest != NULL) {
    even_hosts_bury(hosts, oldest->link);
    oldest->link = NULL;
  }
  return oldest;
}

static void take_connection(void *context, int fd) {
  even_hosts *hosts = context;
  const even_link_calls calls = {.context = hosts, .ready = on_ready, .message = on_message, .ended = on_ended};
  int made = -1;
  if (even_socket_accept(fd, &made) != EVEN_OK) {
    even_error_clear();
    even_loop_remove(&hosts->loop, &hosts->listener_watch); /* no descriptor is free: not at once again */
    hosts->listen_ns = even_clock_ns() + PAUSE_NS;
    return;
  }
  if (made < 0) {
    return;
  }
  even_host_stranger *place = make_room(hosts);
  if (place == NULL || EVEN_NEW(&place->link) != EVEN_OK) {
    even_pipe_close(made);
    even_error_clear();
    return;
  }
  place->since_ns = even_clock_ns();
  if (even_link_open(place->link, &hosts->loop, made, true, hosts->key, &calls) != EVEN_OK) {
    even_hosts_bury(hosts, place->link);
    place->link = NULL;
    even_error_clear();
  }
}

static even_status watch_listener(even_hosts *hosts) {
  return even_loop_add(&hosts->loop, &hosts->listener_watch, hosts->listener, take_connection, hosts);
}

/* Somebody waits for its word: one of an attempt, or that it has a checkpoint, which no step follows before, or of
 * which it has. Between these it may be busy for long, and is waited for otherwise. */
static bool is_watched(const even_host_agent *agent) {
  return agent->busy || even_bring_state(agent, NULL) == EVEN_BRING_UNDER_WAY || even_bring_back_awaits(agent);
}

void even_hosts_tick(even_hosts *hosts) {
  uint64_t now = even_clock_ns();
  free_gone(hosts);
  if (hosts->listener_watch.fd < 0 && now >= hosts->listen_ns && watch_listener(hosts) != EVEN_OK) {
    even_error_clear(); /* again with the next tick */
  }
  for (size_t i = 0; i < hosts->places; i++) {
    even_host_stranger *stranger = &hosts->strangers[i];
    if (stranger->link != NULL && now - stranger->since_ns > STRANGER_NS) {
      even_hosts_bury(hosts, stranger->link);
      stranger->link = NULL;
    } else if (stranger->link != NULL) {
      even_link_tick(stranger->link, false);
    }
  }
  for (size_t i = 1; i < hosts->count; i++) {
    if (hosts->agents[i].link != NULL) {
      even_link_tick(hosts->agents[i].link, is_watched(&hosts->agents[i]));
    }
  }
  even_guests_tick(hosts);
  even_hosts_announce_tick(hosts);
  even_parcels_tick(hosts->parcels);
}

static even_link *way_to(void *context, int host) {
  const even_hosts *hosts = context;
  return (size_t)host < hosts->count && hosts->agents[host].fits ? hosts->agents[host].link : NULL;
}

even_status even_hosts_open_parcels(even_hosts *hosts) {
  const even_parcels_params params = {
      .size = sizeof params, .self = 0, .count = (int)hosts->room, .context = hosts, .way = way_to};
  even_parcels_close(hosts->parcels);
  hosts->parcels = NULL;
  return even_parcels_open(&params, &hosts->parcels);
}

/* ---- opening ---- */

static void agent_failed(even_host_agent *agent, even_status status, const char *how) {
  char words[300];
  if (agent->hosts->params.shell == NULL) {
    even_hosts_missing(agent, status, how);
    fail_opening(agent->hosts);
    return;
  }
  even_host_agent_last_words(agent, words, sizeof words);
  (void)even_fail(status, "host %s: %s%s%s", agent->name, how, words[0] == '\0' ? "" : ": ", words);
  even_host_agent_say_way(agent, words);
  fail_opening(agent->hosts);
}

static bool look_at_agents(even_hosts *hosts, bool late) {
  bool all = true;
  for (size_t i = 1; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    if (agent->lost || (agent->witness && hosts->job != NULL)) {
      continue; /* while a job runs: who waits for it starts it again */
    }
    all = all && agent->fits;
    bool started = hosts->params.shell != NULL;
    if (started && !agent->fits && agent->link == NULL && even_host_agent_shell_ended(agent)) {
      agent_failed(agent, EVEN_ERR_PEER_LOST, "its agent ended before it came here");
    } else if (!agent->fits && late) {
      char how[100];
      (void)snprintf(how, sizeof how, "its agent did not %s within %g s (EVENSTEP_HOSTS_PATIENCE)",
                     agent->link == NULL ? "come here" : "say what it has", hosts->params.patience_seconds);
      agent_failed(agent, EVEN_ERR_TIMEOUT, how);
    }
  }
  return all;
}

even_status even_hosts_await(even_hosts *hosts) {
  uint64_t until = even_clock_ns() + (uint64_t)(hosts->params.patience_seconds * 1e9);
  while (hosts->failure.status == EVEN_OK && !look_at_agents(hosts, even_clock_ns() > until)) {
    if (even_stop_asked()) {
      return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while hosts were waited for");
    }
    EVEN_TRY(even_loop_turn(&hosts->loop, TICK_MS));
    even_hosts_tick(hosts);
  }
  if (hosts->failure.status != EVEN_OK) {
    even_error failure = hosts->failure;
    hosts->failure.status = EVEN_OK;
    return even_error_restore(&failure);
  }
  return EVEN_OK;
}

/* Of a disk that hangs meanwhile the member that has returned is to know, as in a turn of the job's loop. */
static even_status read_own_facts(even_hosts *hosts) {
  if (hosts->voter != NULL) {
    even_voter_turns(hosts->voter, true);
  }
  even_status status = even_hosts_read_own_facts(hosts);
  if (hosts->voter != NULL) {
    even_voter_turns(hosts->voter, false);
  }
  return status;
}

static even_status open_all(even_hosts *hosts) {
  EVEN_TRY(even_elastic_open(hosts));
  EVEN_TRY(even_hosts_list(hosts));
  hosts->places = SPARE_PLACES + 2 * hosts->count;
  EVEN_TRY(EVEN_NEW_ARRAY(&hosts->strangers, hosts->places));
  EVEN_TRY(even_hosts_open_parcels(hosts));
  EVEN_TRY(even_hosts_make_key(hosts));
  if (even_outlast_due(hosts->params.before)) {
    EVEN_TRY(even_succession_return(hosts)); /* at once: another host may take its place else */
  }
  EVEN_TRY(read_own_facts(hosts)); /* before anybody waits for an answer: this takes its time */
  EVEN_TRY(even_loop_open(&hosts->loop));
  EVEN_TRY(even_hosts_listen(hosts));
  EVEN_TRY(watch_listener(hosts));
  if (hosts->params.estate != NULL) {
    return even_succession_take(hosts);
  }
  if (even_outlast_due(hosts->params.before)) {
    return even_outlast_hosts_meet(hosts);
  }
  EVEN_TRY(even_hosts_announce(hosts));
  for (size_t i = 1; i < hosts->count; i++) {
    EVEN_TRY(even_host_agent_launch(&hosts->agents[i]));
  }
  EVEN_TRY(even_hosts_await_first(hosts));
  if (!hosts->params.returns) {
    even_hosts_unannounce(hosts);
  }
  return EVEN_OK;
}

even_status even_hosts_open(const even_hosts_params *params, even_hosts **out) {
  even_hosts *hosts = NULL;
  *out = NULL;
  if (params->size != sizeof *params || params->count < (params->most_ranks > 0 ? 1 : 2) ||
      params->count > EVEN_HOSTS_MOST) {
    return even_fail(EVEN_ERR_ARGUMENT, "a job of %zu hosts", params->count);
  }
  EVEN_TRY(even_remote_check_words(params->words, params->word_count));
  struct sigaction pipe_before;
  EVEN_TRY(even_signals_pipe_ignore(&pipe_before));
  even_status made = EVEN_NEW(&hosts);
  if (made != EVEN_OK) {
    even_signals_pipe_restore(&pipe_before);
    return made;
  }
  if (params->estate == NULL) { /* else as it was told, whatever it is here: leases are reckoned with it */
    even_socket_silence_set((int)(params->silence_seconds * 1e3));
  }
  even_link_leaders_change(params->replaces_leader || params->estate != NULL);
  *hosts = (even_hosts){.params = *params,
                        .count = params->count,
                        .loop = {.fd = -1},
                        .listener = -1,
                        .pipe_before = pipe_before,
                        .listener_watch = {.fd = -1},
                        .job_watch = {.fd = -1}};
  even_status status = open_all(hosts);
  if (status != EVEN_OK) {
    const even_error kept = *even_error_last();
    if (even_outlast_due(params->before) && status != EVEN_ERR_INTERRUPTED) {
      even_succession_leave_to_others(hosts);
    }
    even_hosts_close(hosts);
    return even_error_restore(&kept);
  }
  hosts->begun = true;
  *out = hosts;
  return EVEN_OK;
}

/* To those of another leader there is nothing to say: their connection closes. */
static void say_end(even_host_agent *agent) {
  if (agent->link != NULL && !even_succession_is_superseded(agent->hosts)) {
    (void)!even_link_send(agent->link, EVEN_MESSAGE_END, NULL, NULL, 0);
    even_link_flush(agent->link, 1000);
  }
}

/* One that has not come, or not said what it has: nothing of the job is there. Its end is that of its connection, or of
 * its standard input, also where it is busy; a shell that waits for its host ends with its own process alone. */
static bool is_awaited(const even_host_agent *agent) {
  return agent->hosts->params.shell != NULL && !agent->fits && !agent->lost;
}

/* Agents that were told the end leave by themselves; those without a shell close their connection. */
static void wait_for_shells(even_hosts *hosts) {
  uint64_t until = even_clock_ns() + 3000000000u;
  bool any = true;
  while (any && even_clock_ns() < until) {
    any = false;
    for (size_t i = 1; i < hosts->count; i++) {
      even_host_agent *agent = &hosts->agents[i];
      any = any || (agent->shell.pid > 0 && !is_awaited(agent) && !even_host_agent_shell_ended(agent));
      any = any || (hosts->params.shell == NULL && agent->link != NULL);
    }
    if (hosts->params.shell == NULL) {
      even_hosts_tick(hosts); /* tells of closed connections */
    }
    if (any && even_loop_turn(&hosts->loop, TICK_MS) != EVEN_OK) {
      break;
    }
  }
}

void even_hosts_close(even_hosts *hosts) {
  if (hosts == NULL) {
    return;
  }
  const even_error kept = *even_error_last();
  even_hosts_unannounce(hosts);
  even_succession_await_end(hosts);   /* first: who is not told of the end must not go on with the job */
  even_parcels_close(hosts->parcels); /* who offered them, or would take them, is gone */
  hosts->parcels = NULL;
  even_copies_close(hosts->copies);
  even_elastic_close(hosts);
  for (size_t i = 1; hosts->agents != NULL && i < hosts->count; i++) {
    say_end(&hosts->agents[i]);
    even_pipe_close(hosts->agents[i].input); /* one that waits for its invitation */
    hosts->agents[i].input = -1;
  }
  if (hosts->agents != NULL && hosts->loop.fd >= 0) {
    wait_for_shells(hosts);
  }
  for (size_t i = 1; hosts->agents != NULL && i < hosts->count; i++) {
    even_host_agent_drop(&hosts->agents[i]);
    json_decref(hosts->agents[i].runs);
    even_device_list_free(&hosts->agents[i].devices);
    even_aside_host_close(&hosts->agents[i]);
    free_gone(hosts);
  }
  for (size_t i = 0; hosts->strangers != NULL && i < hosts->places; i++) {
    if (hosts->strangers[i].link != NULL) {
      even_link_close(hosts->strangers[i].link);
      even_free(hosts->strangers[i].link);
    }
  }
  even_free(hosts->strangers);
  free_gone(hosts);
  even_succession_linger(hosts);
  even_succession_close(hosts);
  even_loop_remove(&hosts->loop, &hosts->listener_watch);
  even_pipe_close(hosts->listener);
  even_loop_close(&hosts->loop);
  json_decref(hosts->facts);
  json_decref(hosts->data);
  if (hosts->agents != NULL) {
    even_aside_host_close(&hosts->agents[0]);
  }
  even_free(hosts->agents);
  even_free(hosts->elastic);
  even_signals_pipe_restore(&hosts->pipe_before);
  explicit_bzero(hosts->key, sizeof hosts->key);
  explicit_bzero(hosts->key_digits, sizeof hosts->key_digits);
  even_free(hosts);
  (void)even_error_restore(&kept);
}

size_t even_hosts_count(const even_hosts *hosts) {
  return hosts->count - (hosts->agents[hosts->count - 1].witness ? 1 : 0);
}

const char *even_hosts_name(const even_hosts *hosts, size_t host) {
  return hosts->agents[host].name;
}

const even_device_list *even_hosts_devices(const even_hosts *hosts, size_t host) {
  return &hosts->agents[host].devices;
}
