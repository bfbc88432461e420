/* Who the members of the voters' group are, as their leader says it. */
#include "orchestrator/succession_members.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_writer.h"
#include "orchestrator/legacy.h"
#include "os/socket.h"

#include <stdio.h>
#include <string.h>

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

even_status even_succession_list(const even_hosts *hosts, even_voter_member **out, size_t *count) {
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

even_status even_succession_say(even_host_agent *agent, const even_voter_member *members, size_t count,
                                even_member_start how) {
  const even_hosts *hosts = agent->hosts;
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_unsigned(&json, "self", agent->member);
  even_json_unsigned(&json, "first", hosts->self);
  even_json_unsigned(&json, "generation", hosts->generation);
  even_json_unsigned(&json, "number", hosts->members_said);
  even_json_string(&json, "folder", even_text_string(&hosts->members_folder));
  even_json_number(&json, "patience_seconds", hosts->params.majority_seconds);
  even_json_integer(&json, "silence_ms", even_socket_silence());
  even_json_bool(&json, "begins", how == EVEN_MEMBER_BEGINS);
  even_json_bool(&json, "joins", how == EVEN_MEMBER_JOINS);
  even_json_bool(&json, "returns", how == EVEN_MEMBER_RETURNS);
  even_json_bool(&json, "witness", agent->witness);
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

even_status even_succession_want(const even_hosts *hosts) {
  even_voter_member *members = NULL;
  size_t count = 0;
  even_status status = even_succession_list(hosts, &members, &count);
  if (even_leadership_voters((unsigned)count) > 1) {
    even_legacy_alone(hosts->params.before, false);
  }
  status = status == EVEN_OK ? even_voter_want(hosts->voter, members, count) : status;
  even_free(members);
  return status;
}

static even_member_start start_of(const even_host_agent *agent) {
  return agent->asked ? EVEN_MEMBER_RETURNS : agent->joins ? EVEN_MEMBER_JOINS : EVEN_MEMBER_NAMED;
}

even_status even_succession_say_all(even_hosts *hosts) {
  even_voter_member *members = NULL;
  size_t count = 0;
  even_status status = even_succession_list(hosts, &members, &count);
  for (size_t i = 1; status == EVEN_OK && i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    if (agent->link != NULL && agent->fits && agent->member != 0 && !agent->returns) {
      status = even_succession_say(agent, members, count, start_of(agent));
    }
  }
  status = status == EVEN_OK ? even_voter_know(hosts->voter, members, count) : status;
  even_free(members);
  return status;
}
