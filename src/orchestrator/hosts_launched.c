/* A leader whose agents another program has started (srun, mpirun, Kubernetes): they come by themselves, and nobody
 * here can start one. */
#include "base/fail.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/launched.h"

#include <stdio.h>
#include <string.h>

static void forget(even_text *words) {
  if (words->data != NULL) {
    explicit_bzero(words->data, words->length);
  }
  even_text_free(words);
}

even_status even_hosts_announce(even_hosts *hosts) {
  const char *path = hosts->params.rendezvous;
  if (hosts->params.shell != NULL || path == NULL) {
    return EVEN_OK;
  }
  even_status status = even_hosts_invitation(hosts, 0, hosts->params.key == NULL, &hosts->announced);
  if (status == EVEN_OK) {
    status = even_rendezvous_write(path, &hosts->announced, hosts->params.unnamed);
  }
  if (status != EVEN_OK) {
    forget(&hosts->announced);
  }
  return status;
}

void even_hosts_announce_tick(even_hosts *hosts) {
  bool awaited = !hosts->begun || hosts->params.returns;
  for (size_t i = 1; !awaited && hosts->announced.length > 0 && i < hosts->count; i++) {
    awaited = !hosts->agents[i].lost && !hosts->agents[i].fits;
  }
  if (!awaited && hosts->announced.length > 0) {
    even_hosts_unannounce(hosts);
  }
}

void even_hosts_unannounce(even_hosts *hosts) {
  const even_error kept = *even_error_last();
  if (hosts->announced.length > 0) {
    (void)!even_rendezvous_remove(hosts->params.rendezvous, &hosts->announced); /* its key opens nothing any more */
    (void)even_error_restore(&kept);
  }
  forget(&hosts->announced);
}

json_int_t even_hosts_index_of(const even_hosts *hosts, json_int_t place) {
  for (size_t i = 1; i < hosts->count; i++) {
    if (hosts->agents[i].place != 0 && hosts->agents[i].place == place) {
      return (json_int_t)i;
    }
  }
  return hosts->params.shell == NULL && hosts->params.estate == NULL ? -1 : place;
}

void even_hosts_name_agent(even_host_agent *agent) {
  const even_hosts *hosts = agent->hosts;
  bool taken = strcmp(agent->node, hosts->agents[0].name) == 0;
  if (hosts->params.shell != NULL || !even_hosts_is_name(agent->node, strlen(agent->node))) {
    return;
  }
  for (size_t i = 1; i < hosts->count; i++) {
    const even_host_agent *other = &hosts->agents[i];
    taken = taken || (other != agent && other->fits && strcmp(agent->node, other->node) == 0);
  }
  if (taken) { /* one machine plays several */
    (void)snprintf(agent->name, sizeof agent->name, "%.100s#%zu", agent->node, agent->index);
  } else {
    (void)snprintf(agent->name, sizeof agent->name, "%s", agent->node);
  }
}

/* The file may be gone: it is there only while anybody may look for it. */
static even_status announce_again(even_host_agent *agent) {
  even_hosts *hosts = agent->hosts;
  if (hosts->announced.length > 0 || even_hosts_announce(hosts) == EVEN_OK) {
    return EVEN_OK;
  }
  (void)even_error_prefix("host %s is lost, and where another agent there would find this one cannot be written",
                          agent->name);
  return even_error_means(EVEN_ERR_PEER_LOST);
}

even_status even_hosts_await_again(even_host_agent *agent) {
  const even_hosts_params *params = &agent->hosts->params;
  if (!params->returns && !params->restarts) {
    (void)even_fail(EVEN_ERR_PEER_LOST, "host %s is lost (%.300s), and only what started its agent can start another",
                    agent->name, agent->lost_words);
    return even_error_fix("start the job again: --name NAME --resume auto goes on from its newest whole checkpoint");
  }
  EVEN_TRY(announce_again(agent));
  agent->lost = false;
  agent->notice.signal = 0; /* it was the one's before */
  agent->fits = false;
  return EVEN_OK;
}

void even_hosts_missing(even_host_agent *agent, even_status status, const char *how) {
  const even_hosts *hosts = agent->hosts;
  (void)even_fail(status, "host %s: %s%s", agent->name, how,
                  hosts->without_key ? " (somebody came who does not have this job's key)" : "");
  if (hosts->params.rendezvous != NULL) {
    (void)even_error_fix(
        "do all hosts see %s, and the key of this job alone? --rendezvous names the folder, --address "
        "where this host is reached",
        hosts->params.rendezvous);
  } else {
    (void)even_error_fix("do all hosts have this job's key, and reach port %d here?", hosts->port);
  }
}
