/* Hosts that were left out of a job that goes on without them: their agents are started again from time to time, and
 * one that has come takes part from the next save on. */
#include "base/fail.h"
#include "orchestrator/elastic.h"
#include "orchestrator/pauses.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

/* Between two tries, each twice as long as the one before: whoever is back costs a save and a restart. */
static const uint64_t FIRST_PAUSE_NS = 5000000000u;
static const uint64_t LONGEST_PAUSE_NS = 600000000000u;

static uint64_t pause_after(unsigned tries) {
  return even_pause_after(FIRST_PAUSE_NS, LONGEST_PAUSE_NS, tries + 1);
}

static even_elastic_left *find(even_elastic *elastic, const char *name) {
  for (size_t i = 0; i < elastic->left_count; i++) {
    if (strcmp(elastic->left[i].name, name) == 0) {
      return &elastic->left[i];
    }
  }
  return NULL;
}

void even_elastic_seek(even_hosts *hosts, const char *name, size_t ranks) {
  even_elastic *elastic = hosts->elastic;
  even_elastic_left *left = find(elastic, name);
  if (left == NULL && elastic->left_count < EVEN_GUESTS_MOST) {
    left = &elastic->left[elastic->left_count++];
    (void)snprintf(left->name, sizeof left->name, "%s", name);
    left->tries = 0;
  }
  if (left != NULL) {
    left->in = false;
    left->ranks = ranks;
    left->next_ns = even_clock_ns() + pause_after(left->tries);
  }
}

bool even_elastic_look_for(even_hosts *hosts, const even_host_agent *agent) {
  bool sought = agent->away && hosts->params.shell != NULL && agent->count > 0;
  if (sought) {
    even_elastic_seek(hosts, agent->name, agent->count);
  }
  even_elastic_left *left = sought ? find(hosts->elastic, agent->name) : NULL;
  if (left != NULL && !agent->comes_back && agent->back_ns > left->next_ns) {
    left->next_ns = agent->back_ns; /* the time of its notice may not be over */
  }
  return sought;
}

void even_elastic_tell_sought(even_job *job) {
  for (size_t i = 0; job->hosts != NULL && i < job->hosts->elastic->left_count; i++) {
    const even_elastic_left *left = &job->hosts->elastic->left[i];
    if (!left->in) {
      even_job_notice(job, "host %s stays left out, and its agent is started again meanwhile", left->name);
    }
  }
}

void even_elastic_is_back(even_hosts *hosts, const even_host_agent *agent) {
  even_elastic_left *left = find(hosts->elastic, agent->name);
  if (left != NULL) {
    left->in = true;
    left->tries++; /* one that is lost again is looked for later */
  }
}

static void fail(even_elastic_left *left, even_host_agent *guest) {
  if (guest != NULL) {
    even_guests_forget(guest);
  }
  left->next_ns = even_clock_ns() + pause_after(++left->tries);
  even_error_clear();
}

static void start(even_job *job, even_elastic_left *left) {
  even_hosts *hosts = job->hosts;
  if (even_clock_ns() < left->next_ns) {
    return;
  }
  even_status status = even_guests_launch(hosts, left->name, left->ranks);
  even_host_agent *guest = even_guests_named(hosts, left->name);
  if (status != EVEN_OK || guest == NULL) {
    fail(left, guest);
    return;
  }
  guest->comes_back = true;
  left->until_ns = even_clock_ns() + (uint64_t)(hosts->params.patience_seconds * 1e9);
}

static void look_after(even_job *job, even_elastic_left *left, even_host_agent *guest) {
  bool ended = guest->link == NULL && even_host_agent_shell_ended(guest);
  if (guest->fits && guest->comes_back) {
    guest->comes_back = false;
    even_elastic_ask(job);
    even_job_notice(job,
                    "host %s is back: the training saves its state after the step under way, and goes on with %zu "
                    "ranks",
                    left->name, even_elastic_next_ranks(job));
  } else if (guest->lost || (!guest->fits && (ended || even_clock_ns() > left->until_ns))) {
    fail(left, guest);
  }
}

void even_elastic_look_back(even_job *job) {
  even_elastic *elastic = job->hosts->elastic;
  if (elastic->left_count == 0 || job->follower != NULL || !even_progress_steps(&job->progress) || job->changing ||
      job->draining != 0 || job->interrupted != 0 || elastic->move.stage != EVEN_MOVE_NONE) {
    return;
  }
  for (size_t i = 0; i < elastic->left_count; i++) {
    even_elastic_left *left = &elastic->left[i];
    even_host_agent *guest = even_guests_named(job->hosts, left->name);
    if (guest != NULL) {
      look_after(job, left, guest);
    } else if (!left->in) {
      start(job, left);
    }
  }
}
