/* The roll, and the way back from it to a job that runs. */
#include "orchestrator/outlast.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/copies.h"
#include "orchestrator/follower.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/job_attempt.h"
#include "orchestrator/place.h"
#include "orchestrator/standing.h"
#include "orchestrator/succession.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "os/process_stat.h"
#include "os/shared_memory.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define MAGIC 0x6c6c6f726e657665u
enum { PATH_BYTES = 4096, MOST_UNWRITTEN = 4 };

/* What a page, a head and a rank of this size mean: another agent's program may be another one by now. */
enum { LAYOUT = 3 };

/* Before two halves, each a head and its ranks, written in turn: who is killed while it writes one leaves the other. */
typedef struct roll_page {
  uint64_t magic;
  uint32_t layout;
  uint64_t count;
  _Atomic uint32_t written; /* how often: the half that counts is this % 2 */
} roll_page;

typedef struct roll_head {
  uint64_t since_ns; /* the attempt's start */
  uint64_t suspected;
  int32_t guardian;
  int32_t master_port;
  uint32_t ended; /* how many have a place in that order */
  bool did_without;
  char resume[PATH_BYTES];
  even_copies_left copies;
} roll_head;

typedef struct roll_rank {
  int32_t pid;
  uint64_t start_time;
  uint32_t order; /* 1: it ended first; 0: it has not */
  bool alive;
  bool stopped_by_agent;
  bool stood_still;
  bool lost;
  struct even_job_place place; /* nothing where nobody takes one */
  even_process_end end;
} roll_rank;

struct even_outlast {
  even_legacy *legacy;
  even_shared_memory memory;
  roll_page *page;
  roll_head *head; /* of the half that counts, */
  roll_rank *ranks;
  even_loop_watch watch; /* news of ranks that an earlier agent has started */
  bool failed;           /* something could not be kept: told once */
};

static even_custody *custody_of(const even_job *job) {
  return job->params->legacy->custody;
}

/* ---- the roll ---- */

static size_t half_of(size_t count) {
  return sizeof(roll_head) + count * sizeof(roll_rank);
}

static size_t bytes_of(size_t count) {
  return sizeof(roll_page) + 2 * half_of(count);
}

static roll_head *place_of(const even_outlast *outlast, uint32_t written) {
  unsigned char *first = (unsigned char *)outlast->memory.address + sizeof(roll_page);
  return (roll_head *)(void *)(first + (written % 2) * half_of((size_t)outlast->page->count));
}

static roll_rank *ranks_of(roll_head *head) {
  return (roll_rank *)(void *)(head + 1);
}

static void place_parts(even_outlast *outlast) {
  outlast->head = place_of(outlast, atomic_load(&outlast->page->written));
  outlast->ranks = ranks_of(outlast->head);
}

static even_status call_roll(const even_job *job, even_outlast *out) {
  int fd = even_custody_claim(custody_of(job), EVEN_OUTLAST_ROLL, 0);
  if (fd < 0) {
    return even_fail(EVEN_ERR_STATE, "the agent before has left ranks that run, and no roll of them");
  }
  EVEN_TRY(even_shared_memory_adopt(fd, &out->memory));
  out->page = out->memory.address;
  if (out->memory.bytes < sizeof(roll_page) || out->page->magic != MAGIC || out->page->layout != LAYOUT) {
    return even_fail(EVEN_ERR_MISMATCH,
                     "the agent before has left ranks that run, and a roll of them that this one cannot read");
  }
  if (out->page->count != job->count || out->memory.bytes < bytes_of(job->count)) {
    return even_fail(EVEN_ERR_MISMATCH, "the agent before has left ranks that run, and its job is not of %zu ranks",
                     job->count);
  }
  place_parts(out);
  return EVEN_OK;
}

static even_status begin_roll(const even_job *job, even_outlast *out) {
  EVEN_TRY(even_shared_memory_create("evenstep-roll", bytes_of(job->count), &out->memory));
  out->page = out->memory.address;
  out->page->magic = MAGIC;
  out->page->layout = LAYOUT;
  out->page->count = job->count;
  place_parts(out);
  return EVEN_OK;
}

/* ---- what is left ---- */

/* Then the ranks go with this agent, as without all this. */
void even_outlast_forgo(even_job *job) {
  even_outlast *outlast = job->outlast;
  even_legacy_whole(outlast->legacy, false);
  if (!outlast->failed) {
    outlast->failed = true;
    even_job_notice(job, "where %s agent is killed from now on, its ranks end with it: %s",
                    job->follower == NULL ? "the job's" : "this host's", even_error_last()->what);
  }
  even_error_clear();
}

static void keep(even_job *job, even_outlast_kind kind, size_t number, int fd) {
  if (fd >= 0 && !job->outlast->failed &&
      even_custody_keep(custody_of(job), (uint32_t)kind, (uint32_t)number, fd) != EVEN_OK) {
    even_outlast_forgo(job);
  }
}

static void drop(even_job *job, uint32_t kind, size_t number) {
  if (!job->outlast->failed && even_custody_drop(custody_of(job), kind, (uint32_t)number) != EVEN_OK) {
    even_outlast_forgo(job);
  }
}

static void watch(even_job *job, pid_t pid) {
  if (pid > 0 && !job->outlast->failed && even_custody_watch(custody_of(job), pid) != EVEN_OK) {
    even_outlast_forgo(job);
  }
}

static bool may_be(const even_job *job) {
  return job->params->legacy != NULL && job->params->legacy->custody != NULL &&
         (job->follower != NULL || even_outlast_hosts_may(job));
}

static void news_ready(void *context, int fd) {
  even_job *job = context;
  even_process_end end;
  (void)fd;
  while (even_custody_next(custody_of(job), &end)) {
    even_job_take_end(job, &end);
  }
}

static even_status open_roll(even_job *job, even_outlast *outlast) {
  EVEN_TRY(job->adopted ? call_roll(job, outlast) : begin_roll(job, outlast));
  return even_loop_add(&job->loop, &outlast->watch, custody_of(job)->socket, news_ready, job);
}

even_status even_outlast_open(even_job *job) {
  even_outlast *outlast = NULL;
  if (!may_be(job)) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW(&outlast));
  *outlast = (even_outlast){.legacy = job->params->legacy, .memory = {.fd = -1}, .watch = {.fd = -1}};
  job->outlast = outlast;
  return open_roll(job, outlast);
}

void even_outlast_keep_memory(even_job *job) {
  if (job->outlast == NULL) {
    return;
  }
  const even_host_memory *memory = job->params->memory;
  even_legacy_page *page = job->outlast->legacy->page;
  if (memory == NULL) {
    page->memory[0] = '\0';
    return;
  }
  if (memory->folder.length >= sizeof page->memory) {
    (void)even_fail(EVEN_ERR_INPUT, "%s is too long a name for a folder in memory", memory->folder.data);
    even_outlast_forgo(job);
    return;
  }
  if (strcmp(page->memory, memory->folder.data) != 0) { /* else the agent before has left the same */
    page->keeper = memory->keeper.pid;
    memcpy(page->memory, memory->folder.data, memory->folder.length + 1);
  }
  keep(job, EVEN_OUTLAST_MEMORY, 0, memory->lock);
  keep(job, EVEN_OUTLAST_KEEPER, 0, memory->keeper.pipe);
}

/* By which other hosts come to the next agent. */
static void keep_way(even_job *job) {
  if (job->hosts != NULL) {
    char *key = job->outlast->legacy->page->key;
    memcpy(key, job->hosts->key_digits, sizeof job->hosts->key_digits);
    keep(job, EVEN_OUTLAST_LISTENER, 0, job->hosts->listener);
  }
}

void even_outlast_keep(even_job *job) {
  if (job->outlast != NULL) {
    even_outlast_keep_memory(job);
    keep(job, EVEN_OUTLAST_ROLL, 0, job->outlast->memory.fd);
    keep(job, EVEN_OUTLAST_TELEMETRY, 0, job->params->telemetry_fd);
    keep(job, EVEN_OUTLAST_GENERATION, 0, job->generation_fd);
    keep(job, EVEN_OUTLAST_STANDING, 0, even_job_standing_fd(job));
    keep_way(job);
    even_outlast_guarded(job);
  }
}

bool even_outlast_holds(const even_job *job) {
  return job->outlast != NULL && !job->outlast->failed;
}

void even_outlast_close(even_job *job) {
  even_outlast *outlast = job->outlast;
  if (outlast == NULL) {
    return;
  }
  even_legacy_whole(outlast->legacy, false);
  if (even_custody_drop_all(custody_of(job)) != EVEN_OK) {
    even_error_clear(); /* nothing of it is whole: the next agent has it dropped */
  }
  even_loop_remove(&job->loop, &outlast->watch);
  even_shared_memory_close(&outlast->memory);
  even_free(outlast);
  job->outlast = NULL;
}

void even_outlast_chosen(even_job *job) {
  if (job->outlast != NULL && job->port_held.holds) {
    keep(job, EVEN_OUTLAST_PORT, 0, job->port_held.fd);
  } else if (job->outlast != NULL) {
    drop(job, EVEN_OUTLAST_PORT, 0);
  }
}

void even_outlast_starting(even_job *job, size_t rank) {
  if (job->outlast != NULL) {
    even_legacy_whole(job->outlast->legacy, false);
    job->outlast->ranks[rank] = (roll_rank){.pid = 0};
  }
}

void even_outlast_started(even_job *job, size_t rank, const even_process *process) {
  if (job->outlast == NULL) {
    return;
  }
  keep(job, EVEN_OUTLAST_OUTPUT, rank, process->output);
  keep(job, EVEN_OUTLAST_ERROR, rank, process->error);
  keep(job, EVEN_OUTLAST_SNAPSHOT, rank, job->snapshots[rank]);
  watch(job, process->pid);
}

void even_outlast_ended(even_job *job, size_t rank) {
  if (job->outlast == NULL || job->ranks[rank].elsewhere) {
    return;
  }
  drop(job, EVEN_OUTLAST_OUTPUT, rank);
  drop(job, EVEN_OUTLAST_ERROR, rank);
  drop(job, 0, (size_t)job->ranks[rank].pid);
}

void even_outlast_vacated(even_job *job, size_t rank) {
  if (job->outlast != NULL) {
    drop(job, EVEN_OUTLAST_SNAPSHOT, rank);
  }
}

/* What one place has beyond that goes with this agent. */
static bool is_left(const even_job *job, unsigned turn) {
  return job->outlast != NULL && turn < MOST_UNWRITTEN;
}

static size_t unwritten(const even_job *job, size_t rank, unsigned turn) {
  return rank + turn * job->count;
}

void even_outlast_unwritten(even_job *job, size_t rank, unsigned turn, int fd) {
  if (is_left(job, turn)) {
    keep(job, EVEN_OUTLAST_UNWRITTEN, unwritten(job, rank, turn), fd);
  }
}

void even_outlast_saved(even_job *job, size_t rank, unsigned turn) {
  if (is_left(job, turn)) {
    drop(job, EVEN_OUTLAST_UNWRITTEN, unwritten(job, rank, turn));
  }
}

void even_outlast_guarded(even_job *job) {
  if (job->outlast != NULL) {
    drop(job, 0, (size_t)job->outlast->head->guardian); /* 0 at first: nobody's number */
    job->outlast->head->guardian = (int32_t)job->guardian.pid;
    job->outlast->legacy->page->votes.guardian = job->guardian.pid;
    if (job->guardian.pid < 0) {
      drop(job, EVEN_OUTLAST_GUARDIAN, 0); /* of the one that is gone */
    }
    keep(job, EVEN_OUTLAST_GUARDIAN, 0, job->guardian.pipe);
    keep(job, EVEN_OUTLAST_LIMIT, 0, job->guardian.page == NULL ? -1 : job->guardian.page_fd);
    watch(job, job->guardian.pid);
  }
}

static void write_rank(const even_job *job, size_t rank, roll_rank *out) {
  const even_job_rank *own = &job->ranks[rank];
  out->pid = (int32_t)own->pid;
  out->start_time = own->start_time;
  out->alive = own->alive;
  out->stopped_by_agent = own->stopped_by_agent;
  out->stood_still = own->stood_still;
  out->lost = even_job_lost(job, rank);
  out->place = job->places == NULL ? (struct even_job_place){0} : job->places[rank];
  out->end = own->end;
  out->order = 0;
}

/* No process could be started there, and another one is due later: the next agent starts it. */
static bool is_awaited(const even_job *job, size_t rank) {
  return even_job_is_outside(job, rank) && !job->ranks[rank].alive && job->places[rank].again_ns != 0;
}

/* And none that lives here would end with this agent. One that serves a leader knows its own host's alone. */
static bool are_all_there(const even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    const even_job_rank *own = &job->ranks[i];
    bool unseen = job->follower != NULL && own->elsewhere;
    if ((own->pid == 0 && !unseen && !is_awaited(job, i)) || (own->alive && own->started_early)) {
      return false;
    }
  }
  return true;
}

/* Into the half that does not count yet. *fits: all of it has room there. */
static void write_roll(const even_job *job, roll_head *head, bool *fits) {
  roll_rank *ranks = ranks_of(head);
  head->guardian = job->outlast->head->guardian;
  head->since_ns = job->progress.since_ns;
  head->suspected = job->suspected;
  head->master_port = (int32_t)job->master_port;
  head->did_without = job->did_without;
  head->ended = (uint32_t)job->ended;
  even_copies_leave(job, &head->copies);
  for (size_t i = 0; i < job->count; i++) {
    write_rank(job, i, &ranks[i]);
  }
  for (size_t i = 0; i < job->ended; i++) {
    ranks[job->order[i]].order = (uint32_t)i + 1;
  }
  *fits = job->resume.length < sizeof head->resume;
  memcpy(head->resume, *fits ? even_text_string(&job->resume) : "", *fits ? job->resume.length + 1 : 1);
}

/* The place of this host among those that vote on who leads. */
static void leave_vote(even_job *job) {
  even_legacy_votes *votes = &job->outlast->legacy->page->votes;
  votes->count = 0;
  if (job->hosts != NULL && even_succession_leave(job->hosts, votes) != EVEN_OK) {
    even_outlast_forgo(job);
  } else if (votes->count > 0) {
    keep(job, EVEN_OUTLAST_VOTER, 0, job->hosts->voter_listener);
  }
}

void even_outlast_settle(even_job *job) {
  even_outlast *outlast = job->outlast;
  bool fits = false;
  if (outlast == NULL || outlast->failed) {
    return;
  }
  uint32_t next = atomic_load(&outlast->page->written) + 1;
  write_roll(job, place_of(outlast, next), &fits);
  bool calm = job->stage == EVEN_JOB_RUNS && job->draining == 0 && !job->changing && job->interrupted == 0 &&
              job->failure.status == EVEN_OK && even_outlast_hosts_calm(job) &&
              (job->follower == NULL || even_job_follower_is_calm(job));
  bool whole = fits && calm && are_all_there(job);
  if (!whole) { /* first: never with a roll that it does not go with */
    even_legacy_whole(outlast->legacy, false);
  }
  atomic_store(&outlast->page->written, next);
  place_parts(outlast);
  if (whole && !even_legacy_is_whole(outlast->legacy)) {
    leave_vote(job);
  }
  even_legacy_whole(outlast->legacy, whole && !outlast->failed);
}

/* ---- what was left ---- */

bool even_outlast_due(const even_legacy *legacy) {
  return legacy != NULL && legacy->custody != NULL && even_legacy_is_whole(legacy);
}

int even_outlast_telemetry(const even_legacy *legacy) {
  return even_custody_claim(legacy->custody, EVEN_OUTLAST_TELEMETRY, 0);
}

even_status even_outlast_memory(const even_legacy *legacy, even_host_memory **out) {
  even_keeper keeper;
  *out = NULL;
  if (legacy->page->memory[0] == '\0') {
    return EVEN_OK;
  }
  int lock = even_custody_claim(legacy->custody, EVEN_OUTLAST_MEMORY, 0);
  even_keeper_take(legacy->page->keeper, even_custody_claim(legacy->custody, EVEN_OUTLAST_KEEPER, 0), &keeper);
  return even_host_memory_take(legacy->page->memory, lock, &keeper, out);
}

int even_outlast_generation(even_job *job) {
  return even_custody_claim(custody_of(job), EVEN_OUTLAST_GENERATION, 0);
}

int even_outlast_standing(even_job *job) {
  return even_custody_claim(custody_of(job), EVEN_OUTLAST_STANDING, 0);
}

int even_outlast_listener(const even_legacy *legacy) {
  return even_custody_claim(legacy->custody, EVEN_OUTLAST_LISTENER, 0);
}

/* Once the roll is called. */
even_status even_outlast_guardian(even_job *job) {
  if (even_succession_give_guardian(job->hosts, &job->guardian)) {
    return EVEN_OK;
  }
  int pipe = even_custody_claim(custody_of(job), EVEN_OUTLAST_GUARDIAN, 0);
  int limit = even_custody_claim(custody_of(job), EVEN_OUTLAST_LIMIT, 0);
  if (job->outlast->head->guardian >= 0 && pipe >= 0) { /* else none could be started */
    return even_guardian_take((pid_t)job->outlast->head->guardian, pipe, limit, &job->guardian);
  }
  even_pipe_close(pipe);
  even_pipe_close(limit);
  return EVEN_OK;
}

static void take_facts(even_job *job, size_t rank, const roll_rank *from) {
  even_job_rank *own = &job->ranks[rank];
  own->pid = (pid_t)from->pid;
  own->start_time = from->start_time;
  own->alive = from->alive;
  own->stopped_by_agent = from->stopped_by_agent;
  own->stood_still = from->stood_still;
  own->end = from->end;
  if (from->order > 0 && from->order <= job->count) {
    job->order[from->order - 1] = rank;
  }
}

static even_status take_rank(even_job *job, size_t rank, const roll_rank *from) {
  even_job_rank *own = &job->ranks[rank];
  take_facts(job, rank, from);
  if (own->elsewhere) { /* its host says what has become of it */
    job->alive += own->alive ? 1 : 0;
    return EVEN_OK;
  }
  int output = even_custody_claim(custody_of(job), EVEN_OUTLAST_OUTPUT, (uint32_t)rank);
  int error = even_custody_claim(custody_of(job), EVEN_OUTLAST_ERROR, (uint32_t)rank);
  job->snapshots[rank] = even_custody_claim(custody_of(job), EVEN_OUTLAST_SNAPSHOT, (uint32_t)rank);
  if (output < 0 || error < 0) {
    even_pipe_close(output);
    even_pipe_close(error);
    return own->alive ? even_fail(EVEN_ERR_STATE, "the output of rank %zu was not kept", rank) : EVEN_OK;
  }
  if (!own->alive) { /* the agent was killed while it read what it had said last */
    EVEN_TRY(even_job_read_output(job, rank, output, error));
    even_rank_output_finish(&own->output);
    even_outlast_ended(job, rank);
    return EVEN_OK;
  }
  job->alive++;
  if (job->params->observer.rank_started != NULL) {
    job->params->observer.rank_started(job->params->observer.context, (int)rank, own->pid);
  }
  return even_job_read_output(job, rank, output, error);
}

/* What the agent before had not written to its end. */
static void take_unwritten(even_job *job, size_t rank) {
  for (unsigned turn = 0; turn < MOST_UNWRITTEN; turn++) {
    int fd = even_custody_claim(custody_of(job), EVEN_OUTLAST_UNWRITTEN, (uint32_t)unwritten(job, rank, turn));
    if (fd >= 0) {
      even_job_snapshot_take(job, rank, turn, fd);
    }
  }
}

static bool is_member(const even_job *job, size_t rank) {
  return job->generation == NULL ||
         even_generation_has(job->generation, (int)rank, even_generation_number(job->generation));
}

/* Where the agent was killed in a change of members, what the ranks have seen counts: the newest generation. The roll
 * may not know yet of one that was lost, or that was let in. */
static void place_member(even_job *job, size_t rank, const roll_rank *from) {
  bool member = is_member(job, rank);
  bool outside = from->place.outside;
  bool left = !member && !from->alive && !outside && (from->end.signal != 0 || from->end.code != 0);
  if (job->lost != NULL) {
    job->lost[rank] = left || (from->lost && !(member && outside));
    job->did_without = job->did_without || left;
  }
  if (even_job_lost(job, rank) && !from->alive) {
    even_job_snapshot_finish(job, rank); /* the agent was killed before it came to that */
  }
  even_job_replace_restore(job, rank, &from->place, member);
}

/* Of one that is not there any more, and of which nobody knows how it ended; and of one that somebody has stopped
 * while nobody could be told. */
static void miss(even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    even_process_stat facts;
    even_job_rank *own = &job->ranks[i];
    bool there = own->alive && !own->elsewhere && even_process_stat_read(own->pid, &facts) == 0 &&
                 (own->start_time == 0 || own->start_time == facts.start_time); /* else its number is another's */
    if (own->alive && !own->elsewhere && !there) {
      const even_process_end end = {.pid = own->pid, .signal = SIGKILL}; /* most likely */
      even_job_take_end(job, &end);
    } else if (there && facts.state == 'T' && !own->stands) {
      const even_process_end stop = {.pid = own->pid, .stopped = true, .signal = SIGSTOP}; /* most likely */
      even_job_take_end(job, &stop);
    }
  }
}

static void tell(even_job *job) {
  even_text left = EVEN_TEXT_EMPTY;
  if (even_job_members(job) == 0) {
    even_job_notice(job, "the agent before was killed, and its ranks have ended");
    return;
  }
  even_job_name_members(job, &left);
  even_job_notice(job, "the agent before was killed: %s train%s on", even_text_string(&left),
                  even_job_members(job) == 1 ? "s" : "");
  even_text_free(&left);
}

even_status even_outlast_adopt(even_job *job) {
  const even_outlast *outlast = job->outlast;
  const roll_head *head = outlast->head;
  even_job_begin_watch(job);
  job->adopted = false;
  job->progress.since_ns = job->began_ns = head->since_ns; /* of the same clock */
  job->suspected = head->suspected;
  job->did_without = head->did_without;
  job->master_port = head->master_port;
  job->port_held.fd = even_custody_claim(custody_of(job), EVEN_OUTLAST_PORT, 0);
  job->port_held.holds = job->port_held.fd >= 0;
  job->ended = head->ended <= job->count ? head->ended : job->count;
  even_text_add(&job->resume, head->resume);
  EVEN_TRY(even_text_status(&job->resume));
  for (size_t i = 0; i < job->count; i++) {
    EVEN_TRY(take_rank(job, i, &outlast->ranks[i]));
    take_unwritten(job, i);
  }
  for (size_t i = 0; i < job->count; i++) {
    place_member(job, i, &outlast->ranks[i]);
  }
  tell(job);
  even_job_tell_main_rank(job);
  EVEN_TRY(even_copies_take(job, &head->copies));
  EVEN_TRY(even_outlast_hosts_adopt(job));
  if (job->generation != NULL) {
    even_generation_retell(job->generation);
  }
  for (size_t i = 0, ended = job->ended; i < ended; i++) { /* as long as nobody has drawn the conclusion */
    even_job_rank *own = &job->ranks[job->order[i]];
    if (!even_job_lost(job, job->order[i]) && is_member(job, job->order[i])) {
      even_job_act_on_end(job, own);
    }
  }
  news_ready(job, -1);
  miss(job);
  even_job_guard_again(job);
  return EVEN_OK;
}
