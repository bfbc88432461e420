/* From one leader to the next. */
#include "orchestrator/candidate.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/signals.h"
#include "os/socket.h"

#include <stdio.h>
#include <string.h>

enum { TURN_MS = 50, CONNECT_MS = 3000 };

static const uint64_t WAIT_NS = 3600000000000u;
/* A leader that lives, and is reached by the voters, has dropped this agent: it starts another one. */
static const uint64_t DROPPED_NS = 5000000000u;

void even_candidate_open(even_candidate *candidate, const char *invitation) {
  json_t *content = NULL;
  *candidate = (even_candidate){.listener = -1};
  if (even_json_parse("the leader's invitation", invitation, strlen(invitation), &content) != EVEN_OK) {
    even_error_clear(); /* whoever accepts it says so */
    return;
  }
  const char *digits = json_string_value(json_object_get(content, "key"));
  if (digits != NULL && strlen(digits) < sizeof candidate->key_digits &&
      even_tls_key_read(digits, candidate->key) == EVEN_OK &&
      even_listener_open("0.0.0.0", &candidate->port, &candidate->listener) == EVEN_OK) {
    memcpy(candidate->key_digits, digits, strlen(digits) + 1);
  } else {
    even_error_clear();
  }
  if (digits != NULL) {
    explicit_bzero((char *)digits, strlen(digits));
  }
  json_decref(content);
}

void even_candidate_close(even_candidate *candidate) {
  even_voter_close(candidate->voter);
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
                              .joins = json_is_true(json_object_get(content, "joins"))};
  memcpy(params.key, candidate->key, sizeof params.key);
  candidate->listener = -1; /* it is the voter's now, also where that fails */
  even_status status = even_voter_open(&params, &candidate->voter);
  explicit_bzero(params.key, sizeof params.key);
  return status;
}

static even_status take_members(even_candidate *candidate, const json_t *content) {
  const json_t *list = json_object_get(content, "members");
  size_t count = json_array_size(list);
  even_voter_member *members = NULL;
  candidate->self = (uint64_t)json_integer_value(json_object_get(content, "self"));
  if (candidate->listener < 0 || count == 0 || count > EVEN_VOTER_MOST) {
    return EVEN_OK; /* it is a member already, or cannot be one */
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&members, count));
  even_status status = read_members(list, members);
  if (status == EVEN_OK) {
    status = begin(candidate, content, members, count);
  }
  even_free(members);
  return status;
}

even_status even_candidate_take(even_candidate *candidate, const even_message *message) {
  json_t *content = NULL;
  if (message->kind == EVEN_MESSAGE_ESTATE) {
    EVEN_TRY(even_estate_read(message->json, message->json_bytes, &content));
    json_decref(candidate->estate);
    candidate->estate = content;
    return EVEN_OK;
  }
  EVEN_TRY(even_json_parse("who the members are", message->json, message->json_bytes, &content));
  even_status status = take_members(candidate, content);
  json_decref(content);
  return status;
}

/* ---- the next leader ---- */

bool even_candidate_superseded(even_candidate *candidate) {
  even_voter_view view;
  if (candidate->voter == NULL) {
    return false;
  }
  even_voter_look(candidate->voter, &view);
  if (candidate->generation == 0) {
    candidate->generation = view.newest.generation; /* that of the leader that named the members */
  }
  return view.newest.generation > candidate->generation;
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

even_status even_candidate_await(even_candidate *candidate, even_loop *loop, const even_link_calls *calls,
                                 even_link *link, even_candidate_turn *turn) {
  uint64_t begun = even_clock_ns();
  uint64_t alone = begun; /* since when nobody is to be expected */
  even_voter_view view;
  *turn = EVEN_CANDIDATE_END;
  while (candidate->voter != NULL && candidate->estate != NULL && even_signals_end_pending() == 0) {
    uint64_t now = even_clock_ns();
    (void)even_candidate_superseded(candidate); /* which generation that leader was of */
    even_voter_look(candidate->voter, &view);
    bool next = view.newest.generation > candidate->generation;
    if (next && view.newest.leader == candidate->self) {
      candidate->generation = view.newest.generation;
      *turn = EVEN_CANDIDATE_LEAD;
      return EVEN_OK;
    }
    if (next && view.port > 0 && view.address[0] != '\0') {
      uint64_t generation = candidate->generation;
      candidate->generation = view.newest.generation;
      if (connect_to(candidate, &view, loop, calls, link) == EVEN_OK) {
        *turn = EVEN_CANDIDATE_SERVE;
        return EVEN_OK;
      }
      candidate->generation = generation;
      even_error_clear(); /* that one may be gone, too */
      even_link_close(link);
    }
    bool hope = view.voters > 1; /* else the one that votes is the leader that is gone */
    if (next || (hope && (!view.quorum || !view.linked))) {
      alone = now;
    }
    if (now - alone > DROPPED_NS || now - begun > WAIT_NS) {
      return EVEN_OK;
    }
    EVEN_TRY(even_loop_turn(loop, TURN_MS)); /* nothing is in it: a pause */
  }
  return EVEN_OK;
}

even_status even_candidate_inherit(even_candidate *candidate, even_estate **out) {
  EVEN_TRY(EVEN_NEW(out));
  **out = (even_estate){.voter = candidate->voter,
                        .self = candidate->self,
                        .voter_port = candidate->port,
                        .generation = candidate->generation,
                        .content = candidate->estate};
  memcpy((*out)->key_digits, candidate->key_digits, sizeof candidate->key_digits);
  candidate->voter = NULL;
  candidate->estate = NULL;
  return EVEN_OK;
}
