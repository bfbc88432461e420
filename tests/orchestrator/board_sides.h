/* The boards of a job of two hosts, of the leader's and of the other one's agent, without these. */
#ifndef EVEN_TESTS_ORCHESTRATOR_BOARD_SIDES_H
#define EVEN_TESTS_ORCHESTRATOR_BOARD_SIDES_H

#include "base/text.h"
#include "orchestrator/boards.h"
#include "orchestrator/remote.h"

enum { RANKS = 4, HERE = 2, THERE = 4711 /* a number there, which is another process's here */ };

/* A host of two: ranks 0 and 1 are the leader's, 2 and 3 the other's. */
typedef struct side {
  even_job job;
  even_agent_params params;
  even_job_rank ranks[RANKS];
  int snapshots[RANKS];
  size_t order[RANKS];
  even_hosts hosts;
  even_host_agent agents[2];
  even_link link;
  even_generation *ranks_view;
  even_device each_device[RANKS];
  even_device_list devices;
  even_text said; /* to the user: "text|text|" */
} side;

extern side leader, other;

even_status open_side(side *own, bool leads);
void close_side(side *own);
/* A test's: both are open, and nobody is hurt by what is killed; replacing: lost ranks' places are taken. */
int set_up(void **state);
int set_up_replacing(void **state);
int tear_down(void **state);

even_status give(bool to_leader, const char *json);
/* The leader's generation, to the other host. */
even_status carry(uint32_t number);
/* What the other host's ranks have said, to the leader; whether there was anything. */
bool report(void);
void all_can_go_on(void);
void kill_rank(size_t rank);

#endif
