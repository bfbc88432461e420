/* Who waits in torch's init_process_group, from the rings and from the leader. */
#include "orchestrator/openings.h"

#include "base/fail.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/hosts.h"
#include "os/clock.h"

#include <inttypes.h>
#include <string.h>

static const uint64_t say_ns = 1000000000u;
/* So long what the leader has said holds. */
static const uint64_t fresh_ns = 5000000000u;

void even_job_openings_begin(even_job *job) {
  memset(&job->openings, 0, sizeof job->openings);
}

bool even_job_opens(const even_job *job, size_t rank) {
  const even_rank_progress *its = &job->progress.ranks[rank];
  return job->ranks[rank].alive && !job->ranks[rank].stands && !even_job_is_outside(job, rank) &&
         its->opening > its->opened;
}

bool even_job_opening_misses(const even_job *job, size_t rank) {
  return job->ranks[rank].alive && !even_job_is_outside(job, rank) &&
         job->progress.ranks[rank].opening < job->openings.time;
}

static void take_larger(even_job_openings *own, int64_t time, size_t waiting) {
  own->time = time > own->time ? time : own->time;
  own->waiting = waiting > own->waiting ? waiting : own->waiting;
}

void even_job_openings_look(even_job *job) {
  even_job_openings *own = &job->openings;
  size_t waiting = 0;
  even_progress_read(&job->progress);
  own->time = 0;
  own->waiting = 0;
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_opens(job, i)) {
      take_larger(own, job->progress.ranks[i].opening, ++waiting);
    }
  }
  if (own->heard_ns != 0 && even_clock_ns() - own->heard_ns < fresh_ns) {
    take_larger(own, own->heard_time, own->heard_waiting);
  }
}

/* ---- between hosts ---- */

bool even_job_openings_write(even_job *job, uint64_t now_ns, even_text *out) {
  bool missed = false;
  if (now_ns - job->openings.said_ns < say_ns) {
    return false;
  }
  job->openings.said_ns = now_ns;
  even_job_openings_look(job);
  for (size_t i = 0; i < job->count; i++) {
    missed = missed || (job->ranks[i].elsewhere && even_job_opening_misses(job, i));
  }
  if (missed) {
    even_text_format(out, "{\"time\":%" PRId64 ",\"waiting\":%zu}", job->openings.time, job->openings.waiting);
  }
  return missed;
}

void even_job_openings_tick(even_job *job) {
  even_text text = EVEN_TEXT_EMPTY;
  if (job->hosts == NULL || job->stage != EVEN_JOB_RUNS || !even_job_openings_write(job, even_clock_ns(), &text)) {
    return;
  }
  for (size_t i = 1; even_text_status(&text) == EVEN_OK && i < job->hosts->count; i++) {
    const even_host_agent *agent = &job->hosts->agents[i];
    if (agent->busy && agent->link != NULL &&
        even_link_send(agent->link, EVEN_MESSAGE_OPENING, text.data, NULL, 0) != EVEN_OK) {
      even_error_clear(); /* lack of memory: it is said again in a moment */
    }
  }
  even_text_free(&text);
}

even_status even_job_openings_take(even_job *job, const json_t *content, uint64_t now_ns) {
  const json_t *time = json_object_get(content, "time");
  const json_t *waiting = json_object_get(content, "waiting");
  if (!json_is_integer(time) || json_integer_value(time) < 1 || !json_is_integer(waiting) ||
      json_integer_value(waiting) < 1 || json_integer_value(waiting) > (json_int_t)job->count) {
    return even_fail(EVEN_ERR_INPUT, "who waits in init_process_group, of no ranks that could");
  }
  job->openings.heard_time = json_integer_value(time);
  job->openings.heard_waiting = (size_t)json_integer_value(waiting);
  job->openings.heard_ns = now_ns;
  return EVEN_OK;
}
