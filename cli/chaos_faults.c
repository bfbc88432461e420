/* The faults of `evenstep chaos`. All are real: signals, busy neighbours, damaged files, bytes on sockets. */
#include "base/fail.h"
#include "cli/chaos_hosts.h"
#include "os/clock.h"

#include <signal.h>
#include <stdio.h>

/* So soon after a loss another one comes in the midst of it. */
#define TOGETHER_NS ((uint64_t)500 * 1000000u)
/* What a neighbour leaves of a core. */
static const double left_of_core = 0.3;

static even_chaos_done *done_of(even_chaos_job *job) {
  return &job->done[job->next];
}

static bool send_to(const even_process_stat *rank, int signal) {
  return even_process_signal_exactly(rank->pid, rank->start_time, signal);
}

/* Whether it takes the rank to which it comes, or may. */
static bool takes_its_rank(even_chaos_kind kind) {
  switch (kind) {
    case EVEN_CHAOS_KILL:
    case EVEN_CHAOS_STOP:
    case EVEN_CHAOS_FLIP:
    case EVEN_CHAOS_TORN:
    case EVEN_CHAOS_PORT:
    case EVEN_CHAOS_MEMORY:
      return true;
    default:
      return false;
  }
}

void even_chaos_tell(even_chaos_job *job, const char *words) {
  even_chaos_done *done = done_of(job);
  done->injected = true;
  done->at_ns = even_clock_ns();
  done->step = even_chaos_last_step(job);
  done->rank = job->victim;
  done->heard = job->agent.complaint.length;
  (void)snprintf(done->words, sizeof done->words, "%s", words);
  even_chaos_watch_begin(job);
  if (takes_its_rank(job->plan[job->next].kind)) {
    even_chaos_add_victim(job, job->victim_pid);
  }
  if (even_chaos_ends_attempt(job->plan[job->next].kind)) {
    job->ended_ns = done->at_ns;
  }
  job->next++;
}

void even_chaos_tell_not(even_chaos_job *job, const char *why) {
  even_chaos_done *done = done_of(job);
  done->impossible = true;
  (void)snprintf(done->words, sizeof done->words, "%s", why);
  job->next++;
}

static void kill_rank(even_chaos_job *job, const even_process_stat *rank) {
  char words[64];
  even_chaos_done *done = done_of(job);
  uint64_t before = even_clock_ns(); /* whoever is slow to go on here must not make others look faster */
  (void)snprintf(words, sizeof words, "rank %d (process %ld)", job->victim, (long)rank->pid);
  if (send_to(rank, SIGKILL)) {
    even_chaos_tell(job, words);
    done->at_ns = before;
  }
}

static void stop_rank(even_chaos_job *job, const even_process_stat *rank) {
  char words[64];
  even_chaos_done *done = done_of(job);
  if (job->stopped.until_ns != 0) {
    return; /* one at a time */
  }
  (void)snprintf(words, sizeof words, "rank %d (process %ld), " EVEN_CHAOS_HELD, job->victim, (long)rank->pid,
                 (double)job->hold_ns * 1e-9);
  uint64_t before = even_clock_ns();
  if (send_to(rank, SIGSTOP)) {
    job->stopped =
        (even_chaos_process){.pid = rank->pid, .start_time = rank->start_time, .until_ns = before + job->hold_ns};
    even_chaos_tell(job, words);
    done->at_ns = before;
  }
}

static even_status slow_rank(even_chaos_job *job, const even_process_stat *rank) {
  char words[64];
  if (job->busy_count > 0 || rank->cpu < 0) {
    return EVEN_OK;
  }
  EVEN_TRY(even_busy_start(rank->cpu, left_of_core, job->busy, &job->busy_count));
  job->busy_until_ns = even_clock_ns() + job->hold_ns;
  (void)snprintf(words, sizeof words, "rank %d, on core %d, " EVEN_CHAOS_HELD, job->victim, rank->cpu,
                 (double)job->hold_ns * 1e-9);
  even_chaos_tell(job, words);
  return EVEN_OK;
}

/* ---- one fault ---- */

bool even_chaos_ends_attempt(even_chaos_kind kind) {
  switch (kind) {
    case EVEN_CHAOS_SLOW:
    case EVEN_CHAOS_GARBAGE:
    case EVEN_CHAOS_DISK:
    case EVEN_CHAOS_CLOCK:
    case EVEN_CHAOS_TWIN:
      return false;
    default:
      return true;
  }
}

/* Whether it is the time for it. Most faults come while the job trains; of those that end attempts one in eight as soon
 * as all ranks have been started again, or while those that are left go on without another. */
static bool is_time(even_chaos_job *job) {
  enum { ONE_IN = 8 };
  const even_chaos_fault *fault = &job->plan[job->next];
  bool ends = even_chaos_ends_attempt(fault->kind);
  if (ends && even_chaos_has_twin(job)) {
    return false; /* what ends it must be known */
  }
  if (fault->kind == EVEN_CHAOS_AGENT && job->host.full_until_ns != 0) {
    return false; /* a job that starts on a full disk has no history to see it by */
  }
  if (fault->kind == EVEN_CHAOS_AGENT && !job->succeeds && job->cut_until_ns != 0) {
    return false; /* nor does one start where a host cannot be reached */
  }
  if (!ends && fault->kind != EVEN_CHAOS_TWIN) {
    return true;
  }
  if (ends && (fault->dice >> 16) % ONE_IN == 0) {
    even_process_stat facts;
    if (job->recovers && job->ended_ns != 0 && even_clock_ns() - job->ended_ns < TOGETHER_NS) {
      return true;
    }
    for (int i = 0; i < even_chaos_ranks_led(job); i++) {
      if (!even_chaos_find_rank(job, i, &facts)) {
        return job->recovers && even_chaos_trains(job);
      }
    }
    return true;
  }
  return even_chaos_trains(job);
}

/* Whether only a rank that trains shows the fault. */
static bool is_of_training(even_chaos_kind kind) {
  return kind == EVEN_CHAOS_NAN || kind == EVEN_CHAOS_MEMORY;
}

even_status even_chaos_inject(even_chaos_job *job) {
  even_process_stat rank;
  const even_chaos_kind kind = job->plan[job->next].kind;
  if (!is_time(job) || !even_chaos_find_victim(job, is_of_training(kind), &rank)) {
    return EVEN_OK;
  }
  job->victim_pid = rank.pid;
  const bool there = even_chaos_host_of(job, job->victim) > 0;
  if (takes_its_rank(kind) && !there) {
    even_chaos_remember(job, &rank);
  }
  return there && kind != EVEN_CHAOS_AGENT && even_chaos_is_done_there(kind) ? even_chaos_inject_there(job, &rank)
                                                                             : even_chaos_inject_to(job, &rank);
}

even_status even_chaos_inject_to(even_chaos_job *job, const even_process_stat *rank) {
  switch (job->plan[job->next].kind) {
    case EVEN_CHAOS_KILL:
      kill_rank(job, rank);
      return EVEN_OK;
    case EVEN_CHAOS_STOP:
      stop_rank(job, rank);
      return EVEN_OK;
    case EVEN_CHAOS_SLOW:
      return slow_rank(job, rank);
    case EVEN_CHAOS_AGENT:
      even_chaos_kill_agent(job);
      return EVEN_OK;
    case EVEN_CHAOS_FLIP:
    case EVEN_CHAOS_TORN:
      return even_chaos_damage(job, rank);
    case EVEN_CHAOS_GARBAGE:
      return even_chaos_send_garbage(job, rank);
    case EVEN_CHAOS_DISK:
      return even_chaos_fill_disk(job);
    case EVEN_CHAOS_CLOCK:
      return even_chaos_turn_clock(job);
    case EVEN_CHAOS_PORT:
      return even_chaos_rob(job, rank);
    case EVEN_CHAOS_MEMORY:
      return even_chaos_starve(job, rank);
    case EVEN_CHAOS_NAN:
      even_chaos_spoil(job, rank);
      return EVEN_OK;
    case EVEN_CHAOS_TWIN:
      return even_chaos_start_twin(job, rank);
    case EVEN_CHAOS_CUT:
      return even_chaos_cut(job);
    case EVEN_CHAOS_KINDS:
      break;
  }
  return even_fail(EVEN_ERR_ARGUMENT, "there is no fault of the kind %d", (int)job->plan[job->next].kind);
}

void even_chaos_relent(even_chaos_job *job, bool all) {
  uint64_t now = even_clock_ns();
  if (job->stopped.until_ns != 0 && (all || now >= job->stopped.until_ns)) {
    (void)even_process_signal_exactly(job->stopped.pid, job->stopped.start_time, SIGCONT);
    job->stopped.until_ns = 0;
  }
  if (job->busy_count > 0 && (all || now >= job->busy_until_ns)) {
    for (size_t i = 0; i < job->busy_count; i++) {
      (void)even_process_signal(job->busy[i], SIGKILL);
      even_process_wait(job->busy[i]);
    }
    job->busy_count = 0;
  }
  even_chaos_host_relent(job, all);
  even_chaos_rank_relent(job, all);
  even_chaos_network_relent(job, all);
  even_chaos_hosts_relent(job, all);
}
