/* The clock of the day of a disturbed job: a library is loaded into its processes (LD_PRELOAD) that adds what this
 * process says, in memory that they share. The monotonic clock stays what it is, as where an administrator or NTP sets
 * the time. */
#include "base/fail.h"
#include "cli/chaos.h"
#include "cli/chaos_clock_library.h"
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
  status = status == EVEN_OK ? even_shared_memory_grow(&offsets, ((size_t)ranks + 1) * sizeof(int64_t)) : status;
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
  if (!agent) {
    (void)snprintf(whose, sizeof whose, "rank %d", job->victim);
  }
  __atomic_store_n(&job->host.clocks[agent ? 0 : job->victim + 1], hours * hour_ns, __ATOMIC_RELEASE);
  (void)snprintf(words, sizeof words, "the clock of %s is %" PRId64 " hours %s from now on", whose,
                 hours < 0 ? -hours : hours, hours < 0 ? "slow" : "fast");
  even_chaos_tell(job, words);
  return EVEN_OK;
}
