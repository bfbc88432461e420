/* The clock of the day of a disturbed job: a library is loaded into its processes (LD_PRELOAD) that adds what this
 * process says, in memory that they share. The monotonic clock stays what it is, as where an administrator or NTP sets
 * the time. */
#include "base/fail.h"
#include "cli/chaos.h"
#include "cli/chaos_clock_library.h"
#include "os/net_namespace.h"
#include "os/shared_memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const int64_t hour_ns = (int64_t)3600 * 1000000000;
static even_shared_memory library;
static even_shared_memory offsets;

static bool has_clock_faults(const even_chaos_job *job) {
  for (size_t i = 0; i < job->faults; i++) {
    if (job->plan[i].kind == EVEN_CHAOS_CLOCK) {
      return true;
    }
  }
  return false;
}

void even_chaos_tell_children(const char *name, int fd) {
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)getpid(), fd);
  (void)setenv(name, path, 1);
}

even_status even_chaos_clock_open(even_chaos_job *job, int ranks) {
  if (!has_clock_faults(job) || getenv("LD_PRELOAD") != NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(even_shared_memory_begin("evenstep-chaos-clock", &library));
  even_status status = even_shared_memory_begin("evenstep-chaos-offsets", &offsets);
  if (status != EVEN_OK) {
    even_shared_memory_close(&library);
    return status;
  }
  status = even_shared_memory_grow(&library, even_chaos_clock_library_bytes);
  size_t clocks = 1 + (size_t)ranks + EVEN_CHAOS_HOSTS - 1;
  status = status == EVEN_OK ? even_shared_memory_grow(&offsets, clocks * sizeof(int64_t)) : status;
  if (status != EVEN_OK) {
    even_shared_memory_close(&library);
    even_shared_memory_close(&offsets);
    return status;
  }
  memcpy(library.address, even_chaos_clock_library, even_chaos_clock_library_bytes);
  job->host.clocks = offsets.address;
  even_chaos_tell_children("LD_PRELOAD", library.fd);
  even_chaos_tell_children("EVENSTEP_CHAOS_CLOCK", offsets.fd);
  return EVEN_OK;
}

void even_chaos_clock_close(even_chaos_job *job) {
  if (job->host.clocks != NULL) {
    (void)unsetenv("LD_PRELOAD");
    (void)unsetenv("EVENSTEP_CHAOS_CLOCK");
    even_shared_memory_close(&library);
    even_shared_memory_close(&offsets);
    job->host.clocks = NULL;
  }
}

static void turn(even_chaos_job *job, int which, int64_t hours) {
  __atomic_store_n(&job->host.clocks[which], hours * hour_ns, __ATOMIC_RELEASE);
}

/* The agent and all ranks of a host have another clock than those of the others. */
static void turn_host(even_chaos_job *job, int host, int64_t hours) {
  const even_state *state = even_history_state(job->history);
  turn(job, host == 0 ? 0 : job->places + host, hours);
  for (int i = 0; i < job->places && i < state->ranks; i++) {
    if (state->rank[i].pid > 0 &&
        even_net_namespace_same(state->rank[i].pid, job->network->holders[host].process.pid)) {
      turn(job, i + 1, hours);
    }
  }
}

even_status even_chaos_turn_clock(even_chaos_job *job) {
  const even_chaos_fault *fault = &job->plan[job->next];
  char whose[48] = "the agent";
  char words[128];
  if (job->host.clocks == NULL) {
    even_chaos_tell_not(job, "LD_PRELOAD is set already: the clock's library cannot be loaded");
    return EVEN_OK;
  }
  bool agent = (fault->dice & 1u) != 0;
  int64_t hours = 1 + (int64_t)((fault->dice >> 8) % 48);
  if ((fault->dice & 2u) != 0) {
    hours = -hours;
  }
  if (job->network != NULL) {
    int first = job->succeeded ? 1 : 0; /* that one is lost */
    int host = first + (int)((fault->dice >> 16) % (uint64_t)(job->network->hosts - first));
    (void)snprintf(whose, sizeof whose, "host %d", host + 1);
    turn_host(job, host, hours);
  } else {
    if (!agent) {
      (void)snprintf(whose, sizeof whose, "rank %d", job->victim);
    }
    turn(job, agent ? 0 : job->victim + 1, hours);
  }
  (void)snprintf(words, sizeof words, "the clock of %s is %" PRId64 " hours %s from now on", whose,
                 hours < 0 ? -hours : hours, hours < 0 ? "slow" : "fast");
  even_chaos_tell(job, words);
  return EVEN_OK;
}
