/* The addresses of an invitation, one after the other, until the leader answers at one. */
#include "orchestrator/invitation.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "os/signals.h"
#include "os/socket.h"

#include <stdlib.h>
#include <string.h>

enum { CONNECT_MS = 3000, TURN_MS = 100, BETWEEN_TRIES_MS = 250, MOST_PATIENCE = 3600 };

/* Who looks for the leader, and how. */
typedef struct search {
  const json_t *invitation;
  unsigned char key[EVEN_TLS_KEY_BYTES];
  even_loop *loop;
  const even_link_calls *calls;
  even_link *link;
} search;

static even_status await_up(const search *one) {
  for (int waited_ms = 0; waited_ms < CONNECT_MS && !even_link_is_up(one->link) && !one->link->ended_told;
       waited_ms += TURN_MS) {
    EVEN_TRY(even_loop_turn(one->loop, TURN_MS));
    even_link_tick(one->link, false);
  }
  return EVEN_OK;
}

static even_status try_address(const search *one, const char *address, int port) {
  int fd = -1;
  EVEN_TRY(even_socket_connect(address, port, CONNECT_MS, &fd));
  EVEN_TRY(even_link_open(one->link, one->loop, fd, false, one->key, one->calls));
  even_status status = await_up(one);
  if (status == EVEN_OK && even_link_is_up(one->link)) {
    return EVEN_OK;
  }
  if (status == EVEN_OK) {
    (void)(one->link->ended_told
               ? even_error_restore(even_link_why(one->link))
               : even_fail(EVEN_ERR_TIMEOUT, "%s, port %d, does not answer as a leader does", address, port));
  }
  const even_error kept = *even_error_last();
  even_link_close(one->link);
  (void)even_error_restore(&kept);
  return even_error_prefix("the leader at %s", address);
}

/* Where ssh says from where it came, that first. */
static bool is_preferred(const char *address) {
  const char *connection = getenv("SSH_CONNECTION");
  size_t length = strlen(address);
  return connection != NULL && strncmp(connection, address, length) == 0 && connection[length] == ' ';
}

static even_status try_addresses(const search *one) {
  const json_t *addresses = json_object_get(one->invitation, "addresses");
  int port = (int)json_integer_value(json_object_get(one->invitation, "port"));
  even_error first = {.status = EVEN_OK};
  for (int round = 0; round < 2; round++) {
    for (size_t i = 0; i < json_array_size(addresses); i++) {
      const char *address = json_string_value(json_array_get(addresses, i));
      if (address == NULL || is_preferred(address) != (round == 0)) {
        continue;
      }
      if (try_address(one, address, port) == EVEN_OK) {
        return EVEN_OK;
      }
      first = first.status == EVEN_OK ? *even_error_last() : first;
    }
  }
  return first.status != EVEN_OK ? even_error_restore(&first)
                                 : even_fail(EVEN_ERR_INPUT, "the invitation names no address of a leader");
}

/* A leader that is busy (it starts hundreds of agents) may take its time to answer; it holds the other end of standard
 * input for as long as it wants this agent. */
static even_status find_leader(const search *one) {
  const int standard_input = 0;
  double patience = json_number_value(json_object_get(one->invitation, "patience_seconds"));
  uint64_t until =
      even_clock_ns() + (uint64_t)((patience > 0 && patience <= (double)MOST_PATIENCE ? patience : 0) * 1e9);
  even_status status = try_addresses(one);
  while (status != EVEN_OK && even_clock_ns() < until && even_pipe_is_held(standard_input) &&
         even_signals_end_pending() == 0) {
    even_error_clear();
    EVEN_TRY(even_loop_turn(one->loop, BETWEEN_TRIES_MS)); /* nothing is in it: a pause */
    status = try_addresses(one);
  }
  return status;
}

even_status even_invitation_accept(const char *line, even_loop *loop, const even_link_calls *calls, even_link *link,
                                   int *host) {
  search one = {.loop = loop, .calls = calls, .link = link};
  json_t *invitation = NULL;
  EVEN_TRY(even_json_parse("the leader's invitation", line, strlen(line), &invitation));
  one.invitation = invitation;
  const char *digits = json_string_value(json_object_get(invitation, "key"));
  *host = (int)json_integer_value(json_object_get(invitation, "host"));
  even_status status = even_tls_key_read(digits == NULL ? "" : digits, one.key);
  if (status == EVEN_OK) {
    status = find_leader(&one);
  }
  explicit_bzero(one.key, sizeof one.key);
  if (digits != NULL) {
    explicit_bzero((char *)digits, strlen(digits));
  }
  json_decref(invitation);
  return status;
}
