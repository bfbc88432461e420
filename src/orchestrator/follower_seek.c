/* A host that would join a job, on its way to the leader: it asks the hosts that were named one after the other, until
 * one says where the leader is, and that one takes it. While another host takes a lost leader's place none may know. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/invitation.h"
#include "os/clock.h"
#include "os/signals.h"
#include "os/socket.h"

#include <string.h>

enum { PAUSE_MS = 500 };

/* Longer than another host takes to gather the others (succession_take.c), and, by the hosts' silence S, to lead: 2.5 S
 * until one that stands still is lost, S/2 to an election, S from there (leadership.h). */
static uint64_t seek_ns(void) {
  const uint64_t least_ns = 30000000000u;
  const uint64_t gather_ns = 20000000000u;
  uint64_t seek = gather_ns + 4 * (uint64_t)even_socket_silence() * 1000000u;
  return seek > least_ns ? seek : least_ns;
}

static bool may_seek_on(const even_follower *follower) {
  return even_clock_ns() - follower->seek_since_ns < seek_ns();
}

static even_status ask(even_follower *follower, const char *address, json_int_t port) {
  even_text line = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&line, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "key", follower->candidate.key_digits);
  even_json_integer(&json, "port", port);
  even_json_array(&json, "addresses");
  even_json_string(&json, NULL, address);
  even_json_array_end(&json);
  even_json_object_end(&json);
  even_status status = even_text_status(&line);
  even_link_close(&follower->link);
  if (status == EVEN_OK) {
    status = even_invitation_accept(line.data, &follower->loop, &follower->calls, &follower->link, &follower->host);
    status = follower->refused ? EVEN_OK : status; /* who has said why may be gone already */
    follower->gone = false;                        /* connections that came to nothing were */
  }
  if (line.data != NULL) {
    explicit_bzero(line.data, line.length);
  }
  even_text_free(&line);
  return status;
}

/* The host that is the next in turn, of those that the user named. */
static even_status ask_next(even_follower *follower) {
  const json_t *addresses = json_object_get(follower->named, "addresses");
  size_t count = json_array_size(addresses);
  const char *address = json_string_value(json_array_get(addresses, count == 0 ? 0 : ++follower->asked_hosts % count));
  if (address == NULL) {
    return even_fail(EVEN_ERR_INPUT, "the invitation names no address of a host");
  }
  return ask(follower, address, json_integer_value(json_object_get(follower->named, "port")));
}

static even_status nobody_knows(void) {
  (void)even_fail(EVEN_ERR_PEER_LOST, "the hosts of the job do not know who leads it at this moment");
  return even_error_fix("try again in some seconds");
}

/* Where nobody said anything its connection has ended. */
static even_status go_where_pointed(even_follower *follower) {
  json_t *pointed = follower->pointed;
  follower->pointed = NULL;
  const char *address = even_json_text(pointed, "address");
  json_int_t port = json_integer_value(json_object_get(pointed, "port"));
  bool known = address[0] != '\0' && port > 0 && port < 65536 && may_seek_on(follower);
  bool broke = pointed == NULL && follower->why.status != EVEN_OK;
  even_status status = known   ? ask(follower, address, port)
                       : broke ? even_error_restore(&follower->why)
                               : nobody_knows();
  json_decref(pointed);
  return status;
}

/* An address whose host is gone says so at once, and hosts may point at one another for a moment. */
static even_status pause_here(even_follower *follower) {
  even_link_close(&follower->link);
  EVEN_TRY(even_loop_turn(&follower->loop, PAUSE_MS)); /* nothing is in it */
  follower->ended = even_signals_end_pending() != 0;
  return EVEN_OK;
}

bool even_follower_must_seek(const even_follower *follower) {
  return follower->joins != NULL && !follower->taken && !follower->refused && !follower->ended &&
         (follower->pointed != NULL || follower->gone);
}

even_status even_follower_seek(even_follower *follower) {
  if (follower->seek_since_ns == 0) {
    follower->seek_since_ns = even_clock_ns();
  } else {
    EVEN_TRY(pause_here(follower));
  }
  even_status status = follower->ended ? EVEN_OK : go_where_pointed(follower);
  while (status != EVEN_OK && status != EVEN_ERR_PERMISSION && may_seek_on(follower)) {
    even_error_clear();
    EVEN_TRY(pause_here(follower));
    status = follower->ended ? EVEN_OK : ask_next(follower);
  }
  return status;
}
