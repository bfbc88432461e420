/* Hosts that are to be drained once the one that is has left: one after the other, in the order in which the commands
 * came. */
#ifndef EVEN_ORCHESTRATOR_DRAIN_QUEUE_H
#define EVEN_ORCHESTRATOR_DRAIN_QUEUE_H

#include "orchestrator/hosts.h"

#include <evenstep/status.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

struct even_job;
struct even_hosts;

enum { EVEN_DRAIN_QUEUE_MOST = 8 }; /* commands that may wait for an answer (EVEN_CONTROL_CLIENTS) */

typedef struct even_drain_queue {
  struct {
    char name[EVEN_HOSTS_NAME];
    json_t *command;
    bool told; /* who typed it, that it waits */
  } items[EVEN_DRAIN_QUEUE_MOST];
  size_t count;
} even_drain_queue;

/* EVEN_ERR_STATE: no more may wait. */
even_status even_drain_queue_add(struct even_hosts *hosts, const char *name, const json_t *command) EVEN_MUST_USE;
/* Whether it waits already. */
bool even_drain_queue_has(const struct even_hosts *hosts, const char *name);
/* About ten times a second, while an attempt runs: begins with the next one where none is under way. One that cannot be
 * drained by then is not, and who typed it is told why. */
void even_drain_queue_tick(struct even_job *job);
/* The job ends, or another host leads: none of them is drained here. */
void even_drain_queue_close(struct even_hosts *hosts);

#endif
