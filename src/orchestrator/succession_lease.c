/* Whether this host leads still, and may act; and what becomes of its ranks where it may not. */
#include "base/fail.h"
#include "orchestrator/elastic.h"
#include "orchestrator/follower.h"
#include "orchestrator/legacy.h"
#include "orchestrator/succession.h"
#include "orchestrator/succession_members.h"
#include "os/clock.h"
#include "os/socket.h"

#include <signal.h>

static const uint64_t APART_NS = 20000000000u;
/* A leader that may not act: its guardian has had its time to hold the ranks; it is no moment any more; it lasts. */
static const uint64_t GUARDED_NS = 200000000u; /* beyond its time */
static const uint64_t MOMENT_NS = 2000000000u;

bool even_succession_leads(const even_hosts *hosts, const even_voter_view *view) {
  return view->newest.generation == hosts->generation && view->newest.leader == hosts->self;
}

void even_succession_name_missing(const even_hosts *hosts, even_text *out) {
  enum { SHOWN = 160 };
  for (size_t i = 1; i < hosts->count && out->length < SHOWN; i++) {
    const even_host_agent *agent = &hosts->agents[i];
    if (agent->link == NULL && !agent->fallen) {
      even_text_format(out, "%s%.60s", out->length > 0 ? ", " : "", agent->name);
    }
  }
}

void even_succession_tell_cut_off(even_job *job) {
  even_text missing = EVEN_TEXT_EMPTY;
  if (!job->hosts->cut_off) {
    even_succession_name_missing(job->hosts, &missing);
    even_job_notice(job,
                    "cut off from the majority of the hosts, which may go on with another leader: %s, and this host "
                    "waits%s%s (%.0f s; EVENSTEP_MAJORITY_PATIENCE); where they are lost for good, `evenstep drain "
                    "--lost` gives them up",
                    job->alive > 0 && job->stage == EVEN_JOB_RUNS ? "the ranks here are held" : "no ranks run here now",
                    missing.length > 0 ? " for " : "", even_text_string(&missing), job->hosts->params.majority_seconds);
    even_text_free(&missing);
  }
  job->hosts->cut_off = true;
}

/* Once when it becomes so. */
static void tell_standing(even_job *job, const even_voter_view *view) {
  even_hosts *hosts = job->hosts;
  if (view->newest.generation == 0) {
    if (!hosts->apart_told && even_clock_ns() - hosts->voting_ns > APART_NS) {
      hosts->apart_told = true;
      even_job_notice(job, "the hosts' agents do not reach one another: where this one is lost, the job is");
    }
  } else if (view->settled && !hosts->settled_told && view->voters > 1) {
    /* who votes alone takes the vote along */
    even_job_notice(job, "where this host is lost, another one takes its place (%u of %zu vote)%s", view->voters,
                    hosts->count, hosts->params.replaces_unasked ? "; --no-replace-leader turns that off" : "");
  }
  hosts->settled_told = hosts->settled_told || view->settled;
}

void even_succession_guard(even_job *job, bool guards) {
  if (job->hosts != NULL && job->hosts->voter != NULL) {
    even_voter_guard(job->hosts->voter, guards ? &job->guardian : NULL);
  }
}

static void tell_gave_up(even_job *job, even_voter *voter) {
  char why[EVEN_VOTER_WHY];
  if (even_voter_gave_up(voter, why)) {
    even_job_notice(job,
                    "this host could not go on with its part of the hosts' log of who leads (%s): for %.1f s it takes "
                    "no part, and another host may lead; then it tries again with what it has kept",
                    why, (double)even_leadership_times_of(even_socket_silence()).wait_ns * 1e-9);
  }
}

void even_succession_turns(even_job *job, bool begins) {
  even_voter *voter = job->hosts != NULL      ? job->hosts->voter
                      : job->follower != NULL ? even_job_follower_voter(job)
                                              : NULL;
  if (voter != NULL) {
    even_voter_turns(voter, begins);
    tell_gave_up(job, voter);
  }
}

void even_succession_stay(even_hosts *hosts) {
  if (hosts->alone) {
    even_control_end(&hosts->elastic->control, EVEN_SUCCESSION_LOST, EVEN_ERR_STATE,
                     "the majority of the hosts is heard again: none was left out", "");
  }
  hosts->alone = false;
}

bool even_succession_is_superseded(const even_hosts *hosts) {
  even_voter_view view;
  if (hosts == NULL || hosts->voter == NULL) {
    return false;
  }
  even_voter_look(hosts->voter, &view);
  return even_succession_is_over(hosts, &view);
}

even_status even_succession_refuse_superseded(const even_hosts *hosts) {
  even_voter_view view;
  if (hosts == NULL || hosts->voter == NULL) {
    return EVEN_OK;
  }
  even_voter_look(hosts->voter, &view);
  return even_succession_is_over(hosts, &view) ? even_succession_fail_over(&view) : EVEN_OK;
}

bool even_succession_acts(const even_job *job) {
  const even_hosts *hosts = job->hosts;
  even_voter_view view;
  if (hosts == NULL || hosts->voter == NULL) {
    return true;
  }
  even_voter_look(hosts->voter, &view);
  return view.acts || (!even_succession_is_over(hosts, &view) && !even_succession_leads(hosts, &view));
}

/* It acts again, and its guardian has let the ranks go. */
static void go_on(even_job *job) {
  even_hosts *hosts = job->hosts;
  uint64_t held = 0;
  if (hosts->lapsed_ns == 0 || even_guardian_holds(&job->guardian, &held)) {
    return;
  }
  if (held != hosts->held_ns) {
    even_job_notice(job,
                    "this agent could not say that it may lead (it stood still, or most others were not heard): the "
                    "ranks here were held meanwhile, and go on");
  } else if (hosts->cut_off) {
    even_job_notice(job, "the majority of the hosts is heard again");
  }
  hosts->held_ns = held;
  hosts->lapsed_ns = 0;
  hosts->cut_off = false;
}

/* It leads, as far as it knows, and may not act: another one may lead by now. Its ranks must not run. */
static void lapse(even_job *job) {
  even_hosts *hosts = job->hosts;
  uint64_t now = even_clock_ns();
  uint64_t held = 0;
  bool holds = even_guardian_holds(&job->guardian, &held);
  const even_leadership_times times = even_leadership_times_of(even_socket_silence());
  hosts->lapsed_ns = hosts->lapsed_ns == 0 ? now : hosts->lapsed_ns;
  uint64_t since = now - hosts->lapsed_ns;
  if (since > MOMENT_NS && !hosts->cut_off) {
    even_succession_tell_cut_off(job);
  }
  if (job->stage != EVEN_JOB_KILLED &&
      (since > times.kill_ns - times.lease_ns || (!holds && since > times.guard_ns - times.lease_ns + GUARDED_NS))) {
    even_job_end_ranks(job, SIGKILL, true);
  }
}

/* Who starts agents here goes on with the job then, as with one of two hosts. */
static void leave_whether_alone(const even_hosts *hosts, const even_voter_view *view) {
  bool alone = hosts->voter == NULL || (even_succession_leads(hosts, view) && view->settled && view->voters == 1);
  if (alone) {
    even_legacy_alone(hosts->params.before, true);
  } /* that it is so no longer is left before another one is to vote (even_succession_want) */
}

void even_succession_check(even_job *job) {
  even_hosts *hosts = job->hosts;
  even_voter_view view = {.port = 0};
  if (hosts->voter != NULL) {
    even_voter_look(hosts->voter, &view);
  }
  leave_whether_alone(hosts, &view);
  if (hosts->voter == NULL) {
    return;
  }
  tell_standing(job, &view);
  even_succession_guard(job, true);
  if (even_succession_is_over(hosts, &view)) {
    if (job->failure.status == EVEN_OK) {
      (void)even_succession_fail_over(&view);
      job->failure = *even_error_last();
    }
  } else if (even_succession_leads(hosts, &view) && !view.acts) {
    lapse(job);
  } else if (even_succession_leads(hosts, &view)) {
    if (view.quorum) {
      even_succession_stay(hosts);
    }
    go_on(job);
    even_succession_keep_witness(job);
  }
}
