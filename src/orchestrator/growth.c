/* Hosts that join, from their coming to their part in an attempt that runs. */
#include "orchestrator/growth.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/elastic.h"
#include "orchestrator/remote.h"
#include "orchestrator/remote_start.h"
#include "orchestrator/succession.h"

#include <stdio.h>
#include <string.h>

bool even_growth_may(const even_job *job) {
  return job->params->grows && job->places != NULL && job->stage == EVEN_JOB_RUNS && job->alive > 0 && !job->changing &&
         job->draining == 0 && job->interrupted == 0 && job->hosts->elastic->move.stage == EVEN_MOVE_NONE;
}

/* Ranks that go on in their processes are connected by UCX; with a host that has none the job would have to restart. */
even_status even_growth_check(const even_host_agent *guest, const json_t *facts) {
  const even_hosts *hosts = guest->hosts;
  const char *ours = even_json_text(json_object_get(hosts->facts, "packages"), "ucx");
  const json_t *theirs = json_object_get(facts, "packages");
  if (hosts->job == NULL || !hosts->job->params->grows || ours[0] == '\0' || json_object_get(theirs, "ucx") == NULL ||
      even_json_text(theirs, "ucx")[0] != '\0') {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_MISMATCH, "host %s has no UCX, which connects the ranks of this job (%s): %s", guest->name,
                  ours, even_json_text(theirs, "no_ucx"));
  return even_error_fix("apt-get install libucx0, or pip install 'evenstep[ucx]', on that host");
}

/* ---- places ---- */

/* It came by itself, or led the job, and is lost with all its ranks: when it joins again it gets other places, or the
 * same. */
static bool has_left(const even_job *job, const even_host_agent *agent) {
  for (size_t i = 0; i < agent->count; i++) {
    if (job->ranks[agent->first + i].alive) {
      return false;
    }
  }
  return (agent->came || agent->fallen) && agent->lost && agent->link == NULL;
}

static bool is_free(const even_job *job, size_t place) {
  size_t host = even_job_host_number(job, place);
  const even_host_agent *agent = &job->hosts->agents[host];
  return even_job_is_nobodys(job, place) ||
         (host > 0 && place >= agent->first && place < agent->first + agent->count && has_left(job, agent));
}

size_t even_growth_places(const even_job *job, size_t count) {
  size_t row = 0;
  for (size_t i = 0; i < job->count; i++) {
    row = is_free(job, i) ? row + 1 : 0;
    if (row == count) {
      return i + 1 - count;
    }
  }
  return job->count;
}

/* Those that had them have none any more. */
static void vacate(even_job *job, size_t first, size_t count) {
  for (size_t i = 1; i < job->hosts->count; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    if (agent->first < first + count && first < agent->first + agent->count) {
      agent->count = 0;
    }
  }
}

/* ---- taking in ---- */

/* Where the others reach the first host is known only now, where nobody came to it before. */
static void choose_address(even_job *job) {
  if (strncmp(job->master_address, "127.", 4) == 0) {
    even_job_hosts_choose_address(job);
  }
}

static even_status give_part(even_job *job, even_host_agent *agent) {
  even_text text = EVEN_TEXT_EMPTY;
  even_remote_start_write(job, agent->index, agent->first, agent->count, agent, &text);
  return even_link_send_text(agent->link, EVEN_MESSAGE_START, &text, NULL, 0);
}

/* What is lost on the way is a host of the job that is lost. */
static void take_in(even_job *job, even_host_agent *guest, size_t first) {
  const even_agent_observer *observer = &job->params->observer;
  vacate(job, first, guest->count);
  even_host_agent *agent = even_elastic_take_in(job->hosts, guest);
  agent->grows = false;
  agent->late = true;
  agent->follows = false;
  agent->first = first;
  agent->first_spare = job->count;
  agent->spares = 0;
  choose_address(job);
  even_job_replace_give(job, first, agent->count);
  if (observer->host_joined != NULL) {
    observer->host_joined(observer->context, agent->name, (int)first, &agent->devices);
  }
  if (even_succession_add(job, agent) != EVEN_OK) { /* first: the next leader must know whose its ranks are */
    even_error_clear();                             /* lack of memory: the next attempt names it anew */
  }
  if (give_part(job, agent) != EVEN_OK) {
    even_job_notice(job, "host %s cannot be told to take part: %s", agent->name, even_error_last()->what);
    even_error_clear();
    return;
  }
  agent->busy = true;
  even_job_notice(job, "host %s joins with %zu rank%s: processes start there while the others train", agent->name,
                  agent->count, agent->count == 1 ? "" : "s");
}

static void leave_to_restart(even_job *job, even_host_agent *guest, const char *why) {
  guest->grows = false;
  even_job_notice(job,
                  "host %s cannot join the ranks where they are: %s: it joins when the training has saved its state "
                  "after the step under way",
                  guest->name, why);
  even_elastic_ask(job);
}

/* Whether the members can go on among others; else why not. *known: all of them have said so. */
static bool members_can(const even_job *job, even_text *why, bool *known) {
  bool *others = NULL;
  int rank = -1;
  char words[EVEN_GENERATION_WORDS];
  even_generation_words said;
  *known = even_job_members(job) > 0 && EVEN_NEW_ARRAY(&others, job->count) == EVEN_OK;
  for (size_t i = 0; *known && i < job->count; i++) {
    others[i] = !job->ranks[i].alive || even_job_is_outside(job, i);
    if (!others[i]) {
      even_generation_hear(job->generation, (int)i, &said);
      *known = said.said;
    }
  }
  bool can = *known && even_generation_able(job->generation, others, &rank, words);
  if (*known && !can) {
    even_text_format(why, "rank %d: %s", rank, words);
  }
  even_free(others);
  even_error_clear();
  return can;
}

/* Hosts that an attempt may have; one that outlasted its leader was begun by another list of them. */
static size_t room_for(const even_job *job) {
  size_t most = (size_t)job->most_groups;
  return most < job->hosts->room ? most : job->hosts->room;
}

static void look_after(even_job *job, even_host_agent *guest) {
  even_text why = EVEN_TEXT_EMPTY;
  bool known = false;
  bool can = members_can(job, &why, &known);
  size_t first = even_growth_places(job, guest->count);
  if (known && !can) {
    leave_to_restart(job, guest, even_text_string(&why));
  } else if (first == job->count || job->hosts->count >= room_for(job)) {
    leave_to_restart(job, guest, "too many have come and gone since the job was started");
  } else if (can) {
    take_in(job, guest, first);
  }
  even_text_free(&why);
}

size_t even_growth_waiting(const even_job *job) {
  size_t ranks = 0;
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    const even_host_agent *guest = job->hosts->elastic->guests[i];
    ranks += guest != NULL && guest->fits && guest->grows ? guest->count : 0;
  }
  return ranks;
}

void even_growth_tick(even_job *job) {
  for (size_t i = 0; i < EVEN_GUESTS_MOST && even_growth_may(job) && even_succession_acts(job); i++) {
    even_host_agent *guest = job->hosts->elastic->guests[i];
    if (guest != NULL && guest->fits && guest->grows) {
      look_after(job, guest);
    }
  }
}
