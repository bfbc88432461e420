/* Which hosts a job begins with. After an agent that was killed (legacy.h) they are those that it had: one that it left
 * out is looked for while the others train, one that was drained has no part. */
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/aside_hosts.h"
#include "orchestrator/elastic.h"
#include "orchestrator/estate.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/legacy.h"

#include <stdio.h>

static const even_legacy_host *inherited(const even_hosts *hosts, size_t *count) {
  *count = 0;
  return hosts->params.before == NULL ? NULL : even_legacy_hosts(hosts->params.before, count);
}

static void add(even_hosts *hosts, const char *name, int wish, size_t place, bool witness) {
  even_host_agent *agent = &hosts->agents[hosts->count];
  *agent = (even_host_agent){.hosts = hosts,
                             .index = hosts->count++,
                             .place = hosts->params.shell == NULL ? (int)place : 0,
                             .wish = wish,
                             .witness = witness,
                             .shell = {.pid = -1},
                             .input = -1,
                             .watches = {{.fd = -1}, {.fd = -1}}};
  (void)snprintf(agent->name, sizeof agent->name, "%s", name);
}

even_status even_hosts_list(even_hosts *hosts) {
  size_t left = 0;
  const even_legacy_host *before = inherited(hosts, &left);
  size_t count = before == NULL ? hosts->params.count : 1 + left;
  hosts->room = even_elastic_room(hosts, count);
  EVEN_TRY(EVEN_NEW_ARRAY(&hosts->agents, hosts->room));
  hosts->count = 0;
  for (size_t i = 0; i < (before == NULL ? count : 1); i++) {
    const even_host_wish *wish = &hosts->params.hosts[i];
    add(hosts, wish->name, wish->ranks, i, wish->witness);
  }
  for (size_t i = 0; i < left; i++) {
    if (before[i].away) {
      even_elastic_seek(hosts, before[i].name, before[i].ranks);
    } else {
      add(hosts, before[i].name, before[i].wish, (size_t)before[i].place, false);
    }
  }
  return EVEN_OK;
}

/* As even_elastic_leaves_out, which knows more of the job, and decides then what it does meanwhile. */
static bool may_do_without(const even_hosts *hosts) {
  const even_hosts_params *params = &hosts->params;
  size_t count = 0;
  bool goes_on = params->estate != NULL || inherited(hosts, &count) != NULL;
  return goes_on && params->shell != NULL && (params->least_ranks > 0 || params->lost != EVEN_LOST_END);
}

static size_t ranks_of(const even_hosts *hosts, const even_host_agent *agent) {
  size_t count = 0;
  const even_legacy_host *before = inherited(hosts, &count);
  even_estate_host was = {.count = 0};
  size_t ranks = agent->index <= count ? before[agent->index - 1].ranks : 0; /* those that are away are the last */
  if (hosts->params.estate != NULL) {
    ranks = even_estate_find(hosts->params.estate, agent->name, &was) ? was.count : 0;
  }
  return ranks > 0 ? ranks : 1;
}

/* The last error is why nobody is waited for any more. */
static bool mark_absent(even_hosts *hosts) {
  const even_error error = *even_error_last();
  bool any = false;
  for (size_t i = 1; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    char why[512];
    if (agent->lacked == 0 && even_elastic_is_absent(agent, &error, why, sizeof why)) {
      even_host_agent_drop(agent);
      even_aside_host_close(agent);
      even_device_list_free(&agent->devices); /* of one that came, and was lost again */
      agent->count = 0;
      (void)snprintf(agent->lost_words, sizeof agent->lost_words, "%.300s", why);
      agent->lost = true;
      agent->lacked = ranks_of(hosts, agent);
      any = true;
    }
  }
  (void)even_error_restore(&error);
  return any;
}

even_status even_hosts_await_first(even_hosts *hosts) {
  for (;;) {
    even_status status = even_hosts_await(hosts);
    bool missed = (status == EVEN_ERR_PEER_LOST || status == EVEN_ERR_TIMEOUT) && may_do_without(hosts);
    if (!missed || !mark_absent(hosts)) {
      return status;
    }
    even_error_clear();
  }
}

size_t even_hosts_absent_ranks(const even_hosts *hosts) {
  size_t ranks = 0;
  for (size_t i = 1; hosts != NULL && i < hosts->count; i++) {
    ranks += hosts->agents[i].lacked;
  }
  for (size_t i = 0; hosts != NULL && i < hosts->elastic->left_count; i++) {
    ranks += hosts->elastic->left[i].in ? 0 : hosts->elastic->left[i].ranks;
  }
  return ranks;
}
