/* Another host's agent, for tests that have none: nothing runs, and nobody speaks for it. */
#ifndef EVEN_TESTS_ORCHESTRATOR_AN_AGENT_H
#define EVEN_TESTS_ORCHESTRATOR_AN_AGENT_H

#include "orchestrator/host_agent.h"

#include <stdio.h>

static inline even_host_agent an_agent(even_hosts *hosts, size_t index, const char *name) {
  even_host_agent agent = {.hosts = hosts,
                           .index = index,
                           .count = 1,
                           .fits = true,
                           .shell = {.pid = -1},
                           .input = -1,
                           .watches = {{.fd = -1}, {.fd = -1}}};
  (void)snprintf(agent.name, sizeof agent.name, "%s", name);
  return agent;
}

#endif
