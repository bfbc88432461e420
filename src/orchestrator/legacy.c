/* Two places in shared memory, written in turn. */
#include "orchestrator/legacy.h"

#include "base/fail.h"
#include "orchestrator/aside.h"
#include "orchestrator/elastic.h"
#include "orchestrator/environment.h"
#include "orchestrator/job.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/process_stat.h"

#include <stdio.h>
#include <string.h>

enum { FOLDER_LOCK = EVEN_CUSTODY_STAYS }; /* a kind in custody: ranks that are yet to end write into the folder */

even_status even_legacy_open(even_legacy *out) {
  even_process_stat self;
  *out = (even_legacy){.memory = {.fd = -1}, .since_ns = even_clock_ns()};
  if (even_process_stat_read(0, &self) == 0) { /* else without /proc */
    out->starter = (long)self.pid;
    out->starter_start = self.start_time;
  }
  EVEN_TRY(even_shared_memory_create("evenstep-legacy", sizeof *out->page, &out->memory));
  out->page = out->memory.address;
  return EVEN_OK;
}

void even_legacy_close(even_legacy *legacy) {
  even_shared_memory_close(&legacy->memory);
  legacy->page = NULL;
}

void even_legacy_name(even_legacy *legacy, const char *run_name) {
  size_t bytes = strlen(run_name) + 1;
  if (bytes <= sizeof legacy->page->run_name) { /* no name of a folder is longer */
    memcpy(legacy->page->run_name, run_name, bytes);
    atomic_store(&legacy->page->named, true);
  }
}

static bool is_kept(const even_legacy *legacy) {
  return legacy != NULL && legacy->folder != NULL;
}

void even_legacy_keep_lock(const even_legacy *legacy, int lock) {
  if (is_kept(legacy) && lock >= 0 && even_custody_keep(legacy->folder, FOLDER_LOCK, 0, lock) != EVEN_OK) {
    even_error_clear(); /* it goes with this agent */
  }
}

int even_legacy_lock(const even_legacy *legacy) {
  return is_kept(legacy) ? even_custody_claim(legacy->folder, FOLDER_LOCK, 0) : -1;
}

const char *even_legacy_run_name(const even_legacy *legacy) {
  return atomic_load(&legacy->page->named) ? legacy->page->run_name : NULL;
}

static const even_legacy_job *last(const even_legacy *legacy) {
  return &legacy->page->jobs[atomic_load(&legacy->page->left) % 2];
}

bool even_legacy_is_left(const even_legacy *legacy) {
  return atomic_load(&legacy->page->left) > 0;
}

int even_legacy_restarts(const even_legacy *legacy) {
  const even_legacy_job *it = last(legacy);
  bool further = atomic_load(&legacy->page->saved) > it->restarts.since;
  return further ? 0 : even_restarts_count(&it->restarts, it->attempt - it->planned);
}

static void note_shares(even_legacy *legacy, bool shares) {
  if (shares) {
    atomic_store(&legacy->page->shares, true);
  }
}

void even_legacy_progress(even_legacy *legacy, const even_progress *progress) {
  uint64_t furthest = 0;
  int64_t saved = atomic_load(&legacy->page->saved);
  for (size_t i = 0; i < progress->count; i++) {
    const even_rank_progress *its = &progress->ranks[i];
    furthest = its->stepped && its->last_step + 1 > furthest ? its->last_step + 1 : furthest;
    saved = its->saved > saved ? its->saved : saved;
  }
  note_shares(legacy, even_progress_shares(progress));
  if (furthest != 0 && furthest != legacy->page->furthest) { /* also below it, from an older checkpoint */
    legacy->page->furthest = furthest;
    atomic_fetch_add(&legacy->page->advances, 1);
  }
  atomic_store(&legacy->page->saved, saved);
}

bool even_legacy_advanced(even_legacy *legacy, bool lives) {
  uint64_t advances = atomic_load(&legacy->page->advances);
  int64_t saved = atomic_load(&legacy->page->saved);
  bool advanced = saved > legacy->saved || (lives && advances != legacy->advances) || legacy->page->taken;
  legacy->page->taken = false;
  legacy->advances = advances;
  legacy->saved = saved;
  return advanced;
}

static even_status write_text(const even_text *text, char out[EVEN_LEGACY_TEXT]) {
  if (text->length >= EVEN_LEGACY_TEXT) {
    return even_fail(EVEN_ERR_INPUT, "a checkpoint names its training or its time in %zu bytes: they are at most %d",
                     text->length, EVEN_LEGACY_TEXT - 1);
  }
  memcpy(out, even_text_string(text), text->length + 1);
  return EVEN_OK;
}

static void add_host(even_legacy_job *it, const char *name, even_legacy_host facts) {
  if (it->host_count < EVEN_LEGACY_HOSTS) {
    even_legacy_host *host = &it->hosts[it->host_count++];
    *host = facts;
    (void)snprintf(host->name, sizeof host->name, "%s", name);
  }
}

static void write_hosts(const even_hosts *hosts, even_legacy_job *it) {
  it->host_count = 0;
  for (size_t i = 1; hosts != NULL && i < hosts->count; i++) {
    const even_host_agent *agent = &hosts->agents[i];
    if (!agent->came && !agent->witness) {
      size_t whole = agent->whole.count > 0 ? agent->whole.count : agent->count; /* also what is set aside */
      size_t ranks = whole > 0 ? whole : agent->lacked;
      add_host(it, agent->name, (even_legacy_host){.wish = agent->wish, .place = agent->place, .ranks = ranks});
    }
  }
  for (size_t i = 0; hosts != NULL && i < hosts->elastic->left_count; i++) {
    const even_elastic_left *left = &hosts->elastic->left[i];
    if (!left->in) {
      add_host(it, left->name, (even_legacy_host){.wish = (int)left->ranks, .ranks = left->ranks, .away = true});
    }
  }
}

const even_legacy_host *even_legacy_hosts(const even_legacy *legacy, size_t *count) {
  bool any = even_legacy_is_left(legacy);
  *count = any ? last(legacy)->host_count : 0;
  return any ? last(legacy)->hosts : NULL;
}

void even_legacy_aside(const even_legacy *legacy, even_aside *out) {
  if (even_legacy_is_left(legacy)) {
    even_aside_take(&last(legacy)->rests, out);
  }
}

even_status even_legacy_leave(even_legacy *legacy, const even_job *job) {
  if (legacy == NULL) {
    return EVEN_OK;
  }
  even_legacy_whole(legacy, even_legacy_is_whole(legacy) && job->adopted);
  atomic_store(&legacy->page->over, 0); /* it goes on, with other places */
  uint32_t next = atomic_load(&legacy->page->left) + 1;
  even_legacy_job *it = &legacy->page->jobs[next % 2];
  memcpy(it->id, job->id, sizeof it->id);
  it->group = job->group;
  it->attempt = job->attempt;
  it->planned = job->planned;
  it->restarts = job->restarts;
  it->groups = job->groups;
  it->era = job->era;
  it->turn = job->turn;
  note_shares(legacy, job->shares);
  it->shortages = job->shortages;
  even_aside_leave(job->params == NULL ? NULL : job->params->aside, &it->rests);
  write_hosts(job->hosts, it);
  EVEN_TRY(write_text(&job->foreign, it->foreign));
  EVEN_TRY(write_text(&job->lineage, it->lineage));
  EVEN_TRY(write_text(&job->began, it->began));
  atomic_store(&legacy->page->left, next);
  return EVEN_OK;
}

even_status even_legacy_leave_part(even_legacy *legacy, const even_job *job) {
  EVEN_TRY(even_legacy_leave(legacy, job));
  if (legacy != NULL) {
    even_legacy_job *it = &legacy->page->jobs[atomic_load(&legacy->page->left) % 2];
    it->planned = it->attempt;
  }
  return EVEN_OK;
}

/* In the other place, as each attempt's: who is killed meanwhile has parted with nobody. */
void even_legacy_part(even_legacy *legacy, const char *host, bool away) {
  if (legacy == NULL || !even_legacy_is_left(legacy)) {
    return;
  }
  uint32_t next = atomic_load(&legacy->page->left) + 1;
  even_legacy_job *it = &legacy->page->jobs[next % 2];
  *it = *last(legacy);
  size_t kept = 0;
  for (size_t i = 0; i < it->host_count; i++) {
    even_legacy_host one = it->hosts[i];
    bool its = strcmp(one.name, host) == 0;
    one.wish = its ? (int)one.ranks : one.wish; /* as of all that are looked for */
    one.away = one.away || its;
    if (!its || away) {
      it->hosts[kept++] = one;
    }
  }
  it->host_count = kept;
  atomic_store(&legacy->page->left, next);
}

static even_status read_text(const char *from, even_text *out) {
  even_text_clear(out);
  even_text_add(out, from);
  return even_text_status(out);
}

int even_legacy_attempt(const even_legacy *legacy) {
  return last(legacy)->attempt;
}

const char *even_legacy_job_id(const even_legacy *legacy) {
  return even_legacy_is_left(legacy) ? last(legacy)->id : NULL;
}

pid_t even_legacy_keeper(const even_legacy *legacy) {
  return legacy != NULL && legacy->starter > 0 ? (pid_t)legacy->starter : even_os.getpid();
}

bool even_legacy_mark(const even_legacy *legacy, char out[EVEN_SWEEP_MARK]) {
  if (!even_legacy_is_left(legacy)) {
    return false;
  }
  const even_legacy_job *left = last(legacy);
  const even_rank_place place = {.job = left->id,
                                 .group = left->group,
                                 .groups = left->groups,
                                 .era = left->era,
                                 .keeper = even_legacy_keeper(legacy)};
  even_environment_mark(&place, out);
  return true;
}

/* The era is another one: agents of other hosts that served the killed one sweep what is of theirs. */
even_status even_legacy_take(const even_legacy *legacy, even_job *job) {
  EVEN_TRY(even_legacy_continue(legacy, job));
  job->attempt++;
  job->era++;
  return EVEN_OK;
}

void even_legacy_whole(even_legacy *legacy, bool whole) {
  atomic_store(&legacy->page->whole, whole);
}

void even_legacy_finish(even_legacy *legacy, int exit_code) {
  if (legacy != NULL) {
    atomic_store(&legacy->page->over, exit_code + 1);
  }
}

void even_legacy_ask_again(const even_legacy *legacy) {
  atomic_store(&legacy->page->whole, false);
  legacy->page->again = true;
}

bool even_legacy_asks_again(even_legacy *legacy) {
  bool asked = legacy->page->again;
  legacy->page->again = false;
  return asked;
}

void even_legacy_alone(const even_legacy *legacy, bool alone) {
  if (legacy != NULL) {
    atomic_store(&legacy->page->alone, alone);
  }
}

bool even_legacy_is_alone(const even_legacy *legacy) {
  return atomic_load(&legacy->page->alone);
}

bool even_legacy_has_asked(const even_legacy *legacy) {
  return legacy != NULL && legacy->page->again;
}

bool *even_legacy_taken(even_legacy *legacy) {
  return &legacy->page->taken;
}

bool even_legacy_is_over(const even_legacy *legacy, int *exit_code) {
  int over = atomic_load(&legacy->page->over);
  *exit_code = over > 0 ? over - 1 : *exit_code;
  return over > 0;
}

bool even_legacy_is_whole(const even_legacy *legacy) {
  return even_legacy_is_left(legacy) && atomic_load(&legacy->page->whole);
}

even_status even_legacy_continue(const even_legacy *legacy, even_job *job) {
  const even_legacy_job *it = last(legacy);
  memcpy(job->id, it->id, sizeof job->id);
  job->attempt = it->attempt;
  job->planned = it->planned;
  job->restarts = it->restarts;
  job->era = it->era;
  job->turn = it->turn;
  job->shares = atomic_load(&legacy->page->shares);
  job->trained = true; /* in the attempt that the agent was killed in its ranks may have met */
  job->shortages = it->shortages;
  EVEN_TRY(read_text(it->foreign, &job->foreign));
  EVEN_TRY(read_text(it->lineage, &job->lineage));
  return read_text(it->began, &job->began);
}
