/* Signals stay pending meanwhile, for who ends the job then. */
#include "orchestrator/pace.h"

#include "base/fail.h"
#include "base/stop.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/succession.h"
#include "os/clock.h"
#include "os/signals.h"

enum { TURN_MS = 50 };

void even_pace_begin(even_job *job) {
  job->began_ns = even_clock_ns();
}

void even_pace_restart(even_job *job) {
  uint64_t lasted_ns = even_clock_ns() - job->began_ns;
  job->pause_ns = job->params->paced ? even_restarts_pause_ns(&job->restarts, lasted_ns) : 0;
  if (job->pause_ns > 0) {
    even_job_notice(job, "%d attempts in a row ended within a minute: the next one begins in %.0f s",
                    job->restarts.short_lived, (double)job->pause_ns * 1e-9);
  }
}

/* Of the loop of the job's own nothing is heard: it takes signals. */
static even_status turn(even_job *job) {
  const even_agent_observer *observer = &job->params->observer;
  if (job->hosts == NULL) {
    even_clock_sleep_ns((uint64_t)TURN_MS * 1000000u);
  } else {
    EVEN_TRY(even_loop_turn(&job->hosts->loop, TURN_MS));
    even_hosts_tick(job->hosts);
  }
  if (observer->tick != NULL) {
    observer->tick(observer->context);
  }
  return EVEN_OK;
}

/* Whether this machine's end is announced: what there is is saved, and no attempt follows. */
static bool ends(even_job *job) {
  even_job_drain_wait(job);
  const even_notice own = {.signal = job->own_notice.signal, .what = job->own_notice.what};
  if (own.signal != EVEN_DRAIN_ANNOUNCED) {
    return false;
  }
  even_job_drain_between(job, &own);
  return true;
}

even_status even_pace_wait(even_job *job) {
  uint64_t until_ns = even_clock_ns() + job->pause_ns;
  bool pauses = job->pause_ns > 0;
  job->pause_ns = 0;
  while (even_clock_ns() < until_ns && even_signals_end_pending() == 0 && !even_stop_asked() &&
         (job->hosts == NULL || !even_succession_is_superseded(job->hosts))) {
    if (ends(job)) {
      return EVEN_ERR_INTERRUPTED;
    }
    EVEN_TRY(turn(job));
  }
  return pauses && even_signals_end_pending() != 0 ? EVEN_ERR_INTERRUPTED : EVEN_OK;
}
