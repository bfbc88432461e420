/* What this host brings to its job: the key, and where hosts find it. */
#include "base/fail.h"
#include "orchestrator/estate.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/outlast.h"
#include "os/listener.h"
#include "os/random.h"

#include <stdio.h>
#include <string.h>

even_status even_hosts_make_key(even_hosts *hosts) {
  if (hosts->params.key != NULL) {
    (void)snprintf(hosts->key_digits, sizeof hosts->key_digits, "%s", hosts->params.key);
  } else if (even_outlast_due(hosts->params.before)) {
    memcpy(hosts->key_digits, hosts->params.before->page->key, sizeof hosts->key_digits);
  } else if (hosts->params.estate != NULL) {
    memcpy(hosts->key_digits, hosts->params.estate->key_digits, sizeof hosts->key_digits);
  } else {
    EVEN_TRY(even_random_hex(hosts->key_digits, 2 * EVEN_TLS_KEY_BYTES));
  }
  return even_tls_key_read(hosts->key_digits, hosts->key);
}

/* Where the agent before did, which was killed, and whose ranks are gone on with; at the port of a leader that is lost
 * this host's own member may answer already, and points to this one. */
even_status even_hosts_listen(even_hosts *hosts) {
  hosts->listener = even_outlast_due(hosts->params.before) ? even_outlast_listener(hosts->params.before) : -1;
  if (hosts->listener >= 0) {
    return even_listener_port(hosts->listener, &hosts->port);
  }
  const char *where = hosts->params.address == NULL ? "0.0.0.0" : hosts->params.address;
  const even_estate *estate = hosts->params.estate;
  int join = estate == NULL ? 0 : even_estate_join_port(estate);
  hosts->port = estate == NULL ? hosts->params.port : join;
  even_status status = even_listener_open(where, &hosts->port, &hosts->listener);
  if (status != EVEN_OK && estate != NULL) {
    even_error_clear();
    hosts->port = 0;
    status = even_listener_open(where, &hosts->port, &hosts->listener);
  }
  if (status != EVEN_OK && hosts->params.address != NULL) {
    (void)even_error_fix("--address is one of this host's own (`ip -4 addr` shows them)%s",
                         hosts->port == 0 ? "" : ", with a port that is free (`ss -ltnp` names who has it)");
  } else if (status != EVEN_OK) {
    (void)even_error_fix("choose another port, or end the program that has it (`ss -ltnp` names it)");
  }
  hosts->join_port = hosts->params.most_ranks == 0 ? 0 : join > 0 ? join : hosts->port;
  return status;
}
