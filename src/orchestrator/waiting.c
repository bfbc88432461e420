/* Which hosts' ranks all wait, from agent to agent. */
#include "orchestrator/waiting.h"

#include "base/fail.h"
#include "orchestrator/follower.h"

#include <string.h>

static const uint64_t SAY_NS = 1000000000u;
/* So long what was said holds. */
static const uint64_t FRESH_NS = 3000000000u;

void even_job_waiting_begin(even_job *job) {
  memset(&job->waiting, 0, sizeof job->waiting);
  for (size_t i = 1; job->hosts != NULL && i < job->hosts->count; i++) {
    job->hosts->agents[i].waiting_ns = 0;
  }
}

static bool is_fresh(uint64_t said_ns, uint64_t now_ns) {
  return said_ns != 0 && now_ns - said_ns < FRESH_NS;
}

bool even_job_waiting_elsewhere(const even_job *job, uint64_t now_ns) {
  if (job->hosts == NULL) {
    return is_fresh(job->waiting.heard_ns, now_ns);
  }
  for (size_t i = 1; i < job->hosts->count; i++) {
    const even_host_agent *agent = &job->hosts->agents[i];
    if (agent->busy && agent->count > 0 && !is_fresh(agent->waiting_ns, now_ns)) {
      return false;
    }
  }
  return true;
}

static void tell_hosts(const even_job *job, const even_text *text) {
  for (size_t i = 1; i < job->hosts->count; i++) {
    const even_host_agent *agent = &job->hosts->agents[i];
    if (agent->busy && agent->link != NULL &&
        even_link_send(agent->link, EVEN_MESSAGE_WAITING, text->data, NULL, 0) != EVEN_OK) {
      even_error_clear(); /* lack of memory: it is said again in a moment */
    }
  }
}

void even_job_waiting_say(even_job *job, bool own, uint64_t now_ns) {
  even_job_waiting *said = &job->waiting;
  even_text text = EVEN_TEXT_EMPTY;
  said->own = own;
  if ((job->hosts == NULL && job->follower == NULL) || (job->follower != NULL && !even_job_follower_is_heard(job))) {
    return;
  }
  bool all = own && (job->follower != NULL || even_job_waiting_elsewhere(job, now_ns));
  bool due = all != said->all || (all && now_ns - said->said_ns >= SAY_NS);
  if (!due) {
    return;
  }
  said->all = all;
  said->said_ns = now_ns;
  even_text_format(&text, "{\"all\":%s}", all ? "true" : "false");
  if (job->follower != NULL) {
    even_job_follower_send(job, EVEN_MESSAGE_WAITING, &text);
  } else if (even_text_status(&text) == EVEN_OK) {
    tell_hosts(job, &text);
  }
  even_text_free(&text);
}

even_status even_job_waiting_take(even_job *job, even_host_agent *agent, const json_t *content, uint64_t now_ns) {
  const json_t *all = json_object_get(content, "all");
  if (!json_is_boolean(all)) {
    return even_fail(EVEN_ERR_INPUT, "who waits in collectives, and it does not say whether all do");
  }
  uint64_t *heard = agent != NULL ? &agent->waiting_ns : &job->waiting.heard_ns;
  *heard = json_is_true(all) ? now_ns : 0;
  return EVEN_OK;
}
