/* From one leader to the next. */
#include "orchestrator/candidate.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/signals.h"
#include "os/socket.h"

#include <stdio.h>
#include <string.h>

enum { TURN_MS = 50, CONNECT_MS = 3000 };

static const uint64_t PATIENCE_NS = 300000000000u; /* until a leader says another one */
/* Beyond the silence after which hosts are lost: as long as another one usually takes; */
static const uint64_t TELL_NS = 2000000000u;
/* and a leader that lives, and is reached by the voters, has dropped this agent: it starts another one. */
static const uint64_t DROPPED_NS = 1000000000u;
static const uint64_t MOST_DROPPED_NS = 20000000000u; /* all that such a one tells comes each 5 s at least */
/* One to which nothing was left yet cannot lead: it waits only for as long as another one waits for the agents. */
static const uint64_t GATHER_NS = 20000000000u;

/* Where it did, or shall (hosts that would join look for any host of the job there), if that is free. Its listener is
 * the voter's, and closed where there is no voter: another one for the next try. */
static even_status listen_again(even_candidate *candidate) {
  if (candidate->voter != NULL || candidate->listener >= 0) {
    return EVEN_OK;
  }
  if (even_listener_open("0.0.0.0", &candidate->port, &candidate->listener) == EVEN_OK) {
    return EVEN_OK;
  }
  candidate->port = 0; /* somebody has that one */
  return even_listener_open("0.0.0.0", &candidate->port, &candidate->listener);
}

void even_candidate_open(even_candidate *candidate, const char *invitation) {
  json_t *content = NULL;
  *candidate = (even_candidate){.listener = -1, .patience_ns = PATIENCE_NS};
  if (even_json_parse("the leader's invitation", invitation, strlen(invitation), &content) != EVEN_OK) {
    even_error_clear(); /* whoever accepts it says so */
    return;
  }
  const char *digits = json_string_value(json_object_get(content, "key"));
  if (digits != NULL && strlen(digits) < sizeof candidate->key_digits &&
      even_tls_key_read(digits, candidate->key) == EVEN_OK) {
    memcpy(candidate->key_digits, digits, strlen(digits) + 1);
    json_int_t port = json_integer_value(json_object_get(content, "listens"));
    candidate->port = port > 0 && port < 65536 ? (int)port : 0;
    if (listen_again(candidate) != EVEN_OK) {
      even_error_clear(); /* tried again when it is to be a member */
    }
  } else {
    even_error_clear();
  }
  if (digits != NULL) {
    explicit_bzero((char *)digits, strlen(digits));
  }
  json_decref(content);
}

void even_candidate_close(even_candidate *candidate) {
  if (candidate->voter != NULL) {
    even_voter_view view;
    even_voter_look(candidate->voter, &view);
    even_voter_close(candidate->voter, even_leadership_ended(&view.newest));
  }
  if (candidate->listener >= 0) {
    even_listener_close(candidate->listener);
  }
  json_decref(candidate->estate);
  explicit_bzero(candidate->key, sizeof candidate->key);
  explicit_bzero(candidate->key_digits, sizeof candidate->key_digits);
  *candidate = (even_candidate){.listener = -1};
}

void even_candidate_settle(even_candidate *candidate) {
  if (candidate->voter == NULL && candidate->listener >= 0) {
    even_listener_close(candidate->listener);
    candidate->listener = -1;
  }
}

/* ---- what the leader says ---- */

static even_status read_members(const json_t *list, even_voter_member *members) {
  size_t at = 0;
  json_t *item = NULL;
  json_array_foreach(list, at, item) {
    const char *address = json_string_value(json_object_get(item, "address"));
    json_int_t id = json_integer_value(json_object_get(item, "id"));
    if (address == NULL || strlen(address) >= sizeof members[at].address || id < 1) {
      return even_fail(EVEN_ERR_INPUT, "a member without a number or an address");
    }
    members[at].id = (uint64_t)id;
    memcpy(members[at].address, address, strlen(address) + 1);
  }
  return EVEN_OK;
}

static even_status begin(even_candidate *candidate, const json_t *content, const even_voter_member *members,
                         size_t count) {
  even_voter_params params = {.size = sizeof params,
                              .self = candidate->self,
                              .listener = candidate->listener,
                              .members = members,
                              .count = count,
                              .first = (uint64_t)json_integer_value(json_object_get(content, "first")),
                              .joins = json_is_true(json_object_get(content, "joins")),
                              .witness = json_is_true(json_object_get(content, "witness")),
                              .waits = candidate->estate == NULL,
                              .returns = json_is_true(json_object_get(content, "returns")),
                              .folder = json_string_value(json_object_get(content, "folder")),
                              .silence_ms = even_socket_silence()};
  memcpy(params.key, candidate->key, sizeof params.key);
  candidate->listener = -1; /* it is the voter's now, also where that fails */
  even_status status = even_voter_open(&params, &candidate->voter);
  explicit_bzero(params.key, sizeof params.key);
  return status;
}

/* Where it cannot be a member the job goes on without, and its leader knows. */
static even_status answer(even_candidate *candidate, even_link *link, const json_t *content, even_status status) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_unsigned(&json, "member", (uint64_t)json_integer_value(json_object_get(content, "self")));
  even_json_unsigned(&json, "number", (uint64_t)json_integer_value(json_object_get(content, "number")));
  even_json_string(&json, "trouble", status == EVEN_OK ? NULL : even_error_last()->what);
  if (status != EVEN_OK && candidate->key_digits[0] != '\0' && listen_again(candidate) != EVEN_OK) {
    even_error_clear(); /* tried again when it is to be a member */
  }
  even_json_integer(&json, "port", candidate->port);
  even_json_object_end(&json);
  even_error_clear();
  return even_link_send_text(link, EVEN_MESSAGE_VOTES, &text, NULL, 0);
}

/* Who was started again and has forgotten its log is none of those that began: with a log of its own making it would
 * vote anew where it has voted. */
static even_status become_member(even_candidate *candidate, const json_t *content, const even_voter_member *members,
                                 size_t count) {
  uint64_t self = (uint64_t)json_integer_value(json_object_get(content, "self"));
  bool joins = json_is_true(json_object_get(content, "joins"));
  bool returns = json_is_true(json_object_get(content, "returns"));
  if (candidate->voter != NULL && joins && self != candidate->self) {
    even_voter_close(candidate->voter, true); /* the leader counts with that one no more */
    candidate->voter = NULL;
  }
  if (candidate->voter != NULL && self == candidate->self) {
    return even_voter_know(candidate->voter, members, count);
  }
  if (candidate->voter != NULL) {
    return even_fail(EVEN_ERR_INPUT, "it is member %llu, and not %llu", (unsigned long long)candidate->self,
                     (unsigned long long)self);
  }
  if (candidate->key_digits[0] == '\0') {
    return even_fail(EVEN_ERR_INPUT, "its agent was started without the key with which the others are called");
  }
  if ((!joins && !returns && !json_is_true(json_object_get(content, "begins"))) ||
      (!returns && self == candidate->forgotten)) {
    return even_fail(EVEN_ERR_NOT_FOUND, "member %llu has forgotten its log", (unsigned long long)self);
  }
  EVEN_TRY(listen_again(candidate));
  candidate->self = self;
  candidate->generation = (uint64_t)json_integer_value(json_object_get(content, "generation"));
  candidate->forgotten = returns ? self : candidate->forgotten;
  EVEN_TRY(begin(candidate, content, members, count));
  candidate->forgotten = 0;
  return EVEN_OK;
}

/* A witness hears it here alone (hosts_facts.c). */
static even_status take_silence(const even_link *link, const json_t *silence_ms) {
  json_int_t wish = json_integer_value(silence_ms);
  if (!json_is_integer(silence_ms) || wish < EVEN_SOCKET_SHORTEST_SILENCE_MS || wish > EVEN_SOCKET_LONGEST_SILENCE_MS) {
    return even_fail(EVEN_ERR_INPUT, "a silence of %lld ms, after which hosts are lost", (long long)wish);
  }
  if ((int)wish == even_socket_silence()) {
    return EVEN_OK;
  }
  even_socket_silence_set((int)wish);
  return even_socket_watch(link->fd);
}

static even_status take_members(even_candidate *candidate, even_link *link, const json_t *content) {
  const json_t *list = json_object_get(content, "members");
  size_t count = json_array_size(list);
  even_voter_member *members = NULL;
  double patience = json_number_value(json_object_get(content, "patience_seconds"));
  if (patience >= 0 && patience <= 1e6) {
    candidate->patience_ns = (uint64_t)(patience * 1e9);
  }
  EVEN_TRY(take_silence(link, json_object_get(content, "silence_ms")));
  even_link_leaders_change(true);
  if (count == 0 || count > EVEN_VOTER_MOST) {
    return answer(candidate, link, content, even_fail(EVEN_ERR_INPUT, "a group of %zu members", count));
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&members, count));
  even_status status = read_members(list, members);
  if (status == EVEN_OK) {
    status = answer(candidate, link, content, become_member(candidate, content, members, count));
  }
  even_free(members);
  return status;
}

even_status even_candidate_take(even_candidate *candidate, even_link *link, const even_message *message) {
  json_t *content = NULL;
  if (message->kind == EVEN_MESSAGE_ESTATE) {
    EVEN_TRY(even_estate_read(message->json, message->json_bytes, &content));
    json_decref(candidate->estate);
    candidate->estate = content;
    candidate->left_ns = even_clock_ns();
    if (candidate->voter != NULL) {
      even_voter_lead(candidate->voter);
    }
    return EVEN_OK;
  }
  EVEN_TRY(even_json_parse("who the members are", message->json, message->json_bytes, &content));
  even_status status = take_members(candidate, link, content);
  json_decref(content);
  return status;
}

/* ---- the next leader ---- */

bool even_candidate_superseded(const even_candidate *candidate) {
  even_voter_view view;
  if (candidate->voter == NULL) {
    return false;
  }
  even_voter_look(candidate->voter, &view);
  return even_leadership_superseded(&view.newest, candidate->generation);
}

static even_status connect_to(const even_candidate *candidate, const even_voter_view *view, even_loop *loop,
                              const even_link_calls *calls, even_link *link) {
  int fd = -1;
  EVEN_TRY(even_socket_connect(view->address, view->port, CONNECT_MS, &fd));
  EVEN_TRY(even_link_open(link, loop, fd, false, candidate->key, calls));
  for (int waited_ms = 0; waited_ms < CONNECT_MS && !even_link_is_up(link) && !link->ended_told; waited_ms += TURN_MS) {
    EVEN_TRY(even_loop_turn(loop, TURN_MS));
    even_link_tick(link, false);
  }
  return even_link_is_up(link) ? EVEN_OK : even_fail(EVEN_ERR_TIMEOUT, "%s does not answer", view->address);
}

/* Where the hosts of all others that are known have refused for so long: nobody is left that could lead, or say that
 * the job has ended. One that leads all the same is not known here; where it starts hosts again (not one that has taken
 * a leader's place), it starts an agent of its own on this one. */
static bool is_deserted(const even_voter_view *view, uint64_t begun, uint64_t now) {
  const uint64_t deserted_ns = 5 * (uint64_t)even_socket_silence() * 1000000u;
  uint64_t since = view->deserted_ns > begun ? view->deserted_ns : begun;
  return view->deserted_ns != 0 && now > since + deserted_ns;
}

static void say_waiting(const even_candidate *candidate) {
  char words[200];
  (void)snprintf(words, sizeof words,
                 "the leader is lost, and the majority of the hosts is not heard: %s, and this host waits (%.0f s; "
                 "EVENSTEP_MAJORITY_PATIENCE)",
                 candidate->pause != NULL ? "the ranks here wait" : "no ranks run here",
                 (double)candidate->patience_ns * 1e-9);
  even_estate_note(candidate->estate, words);
}

/* *serves: there is another leader, and the link to it is up. */
static even_status try_next(even_candidate *candidate, const even_voter_view *view, even_loop *loop,
                            const even_link_calls *calls, even_link *link, bool *serves) {
  uint64_t generation = candidate->generation;
  *serves = false;
  if (view->port == 0 || view->address[0] == '\0') {
    return EVEN_OK;
  }
  candidate->generation = view->newest.generation;
  *serves = connect_to(candidate, view, loop, calls, link) == EVEN_OK;
  if (!*serves) {
    candidate->generation = generation;
    even_error_clear(); /* that one may be gone, too */
    even_link_close(link);
  }
  return EVEN_OK;
}

even_status even_candidate_await(even_candidate *candidate, even_loop *loop, const even_link_calls *calls,
                                 even_link *link, even_candidate_turn *turn) {
  const uint64_t silence_ns = (uint64_t)even_socket_silence() * 1000000u;
  const uint64_t dropped_ns = (silence_ns < MOST_DROPPED_NS ? silence_ns : MOST_DROPPED_NS) + DROPPED_NS;
  uint64_t begun = even_clock_ns();
  uint64_t alone = begun; /* since when nobody is to be expected */
  uint64_t heard = begun;
  bool told = false;
  bool serves = false;
  even_voter_view view;
  *turn = EVEN_CANDIDATE_END;
  /* Ranks that are held hear of a signal by their own job's turns, which keeps it as notice. */
  while (candidate->voter != NULL && (candidate->pause != NULL || even_signals_end_pending() == 0)) {
    uint64_t now = even_clock_ns();
    even_voter_look(candidate->voter, &view);
    if (view.newest.generation == 0 || even_leadership_ended(&view.newest)) {
      return EVEN_OK; /* nobody has ever led by the log, or the job has ended */
    }
    bool next = view.newest.generation > candidate->generation;
    if (next && view.newest.leader == candidate->self && candidate->estate != NULL) {
      candidate->generation = view.newest.generation;
      *turn = EVEN_CANDIDATE_LEAD;
      return EVEN_OK;
    }
    EVEN_TRY(next ? try_next(candidate, &view, loop, calls, link, &serves) : EVEN_OK);
    if (serves) {
      *turn = EVEN_CANDIDATE_SERVE;
      return EVEN_OK;
    }
    bool hope = view.voters > 1; /* else the one that votes is the leader that is gone */
    alone = next || (hope && (!view.quorum || !view.linked)) ? now : alone;
    heard = view.quorum ? now : heard;
    if (now - heard > silence_ns + TELL_NS && !told) {
      say_waiting(candidate);
      told = true;
    }
    if (now - begun > candidate->patience_ns) {
      even_estate_note(candidate->estate,
                       "there is no leader, and no majority of the hosts that could make one: its part has ended");
      return EVEN_OK;
    }
    if (is_deserted(&view, begun, now)) {
      even_estate_note(candidate->estate,
                       "the hosts of all other agents say that nobody listens there: this host's part has ended, too");
      return EVEN_OK;
    }
    if (now - alone > dropped_ns || (candidate->estate == NULL && now - begun > GATHER_NS)) {
      return EVEN_OK;
    }
    if (candidate->pause != NULL && !candidate->pause(candidate->pause_context)) {
      return EVEN_OK;
    }
    EVEN_TRY(candidate->pause != NULL ? EVEN_OK : even_loop_turn(loop, TURN_MS)); /* nothing is in it: a pause */
  }
  return EVEN_OK;
}

even_status even_candidate_inherit(even_candidate *candidate, even_estate **out) {
  EVEN_TRY(EVEN_NEW(out));
  **out = (even_estate){.voter = candidate->voter,
                        .self = candidate->self,
                        .voter_port = candidate->port,
                        .generation = candidate->generation,
                        .content = candidate->estate,
                        .left_ns = candidate->left_ns};
  memcpy((*out)->key_digits, candidate->key_digits, sizeof candidate->key_digits);
  candidate->voter = NULL;
  candidate->estate = NULL;
  return EVEN_OK;
}
