/* Who is drained next. */
#include "orchestrator/drain_queue.h"

#include "base/fail.h"
#include "orchestrator/elastic.h"

#include <stdio.h>
#include <string.h>

static even_drain_queue *queue_of(const even_hosts *hosts) {
  return &hosts->elastic->queue;
}

bool even_drain_queue_has(const even_hosts *hosts, const char *name) {
  const even_drain_queue *queue = queue_of(hosts);
  for (size_t i = 0; i < queue->count; i++) {
    if (strcmp(queue->items[i].name, name) == 0) {
      return true;
    }
  }
  return false;
}

even_status even_drain_queue_add(even_hosts *hosts, const char *name, const json_t *command) {
  even_drain_queue *queue = queue_of(hosts);
  if (queue->count == EVEN_DRAIN_QUEUE_MOST) {
    (void)even_fail(EVEN_ERR_STATE, "host %s is being drained, and %d more wait for that", hosts->elastic->move.from,
                    EVEN_DRAIN_QUEUE_MOST);
    return even_error_fix("drain this one when these are done");
  }
  json_t *copy = json_deep_copy(command);
  if (copy == NULL) {
    return even_fail(EVEN_ERR_MEMORY, "no memory for a command");
  }
  (void)snprintf(queue->items[queue->count].name, sizeof queue->items[0].name, "%s", name);
  queue->items[queue->count].command = copy;
  queue->items[queue->count].told = false;
  queue->count++;
  return EVEN_OK;
}

static void tell_waiting(even_hosts *hosts) {
  even_drain_queue *queue = queue_of(hosts);
  char words[300];
  for (size_t i = 0; i < queue->count; i++) {
    if (!queue->items[i].told) {
      (void)snprintf(words, sizeof words, "host %.100s is drained once host %.100s is out of the job",
                     queue->items[i].name, hosts->elastic->move.from);
      even_control_say(&hosts->elastic->control, queue->items[i].name, words);
      queue->items[i].told = true;
    }
  }
}

/* The first goes out of it; its command is the caller's. */
static json_t *take_first(even_drain_queue *queue, char name[EVEN_HOSTS_NAME]) {
  json_t *command = queue->items[0].command;
  memcpy(name, queue->items[0].name, EVEN_HOSTS_NAME);
  queue->count--;
  memmove(&queue->items[0], &queue->items[1], queue->count * sizeof queue->items[0]);
  return command;
}

void even_drain_queue_tick(even_job *job) {
  even_hosts *hosts = job->hosts;
  char name[EVEN_HOSTS_NAME];
  bool waits = hosts->elastic->move.stage != EVEN_MOVE_NONE || job->changing;
  if (waits && !hosts->hands_over) { /* behind the host that leads none waits, and each is told so */
    tell_waiting(hosts);
    return;
  }
  if (queue_of(hosts)->count == 0) {
    return;
  }
  json_t *command = take_first(queue_of(hosts), name);
  if (even_elastic_drain(job, name, command) != EVEN_OK) {
    const even_error why = *even_error_last();
    even_job_notice(job, "host %s is not drained, and the job goes on as it is: %.300s", name, why.what);
    even_control_end(&hosts->elastic->control, name, why.status, why.what, why.fix);
    even_error_clear();
  }
  json_decref(command);
}

void even_drain_queue_close(even_hosts *hosts) {
  even_drain_queue *queue = queue_of(hosts);
  for (size_t i = 0; i < queue->count; i++) {
    json_decref(queue->items[i].command);
  }
  queue->count = 0;
}
