/* Hosts leave a job that has members who vote: first their votes are taken from them. */
#include "base/fail.h"
#include "orchestrator/elastic.h"
#include "orchestrator/succession.h"
#include "orchestrator/succession_members.h"
#include "os/clock.h"

static bool goes(const even_host_agent *agent) {
  return agent->leaves && agent->link != NULL;
}

static void name_leaving(const even_hosts *hosts, even_text *out) {
  for (size_t i = 1; i < hosts->count; i++) {
    if (goes(&hosts->agents[i])) {
      even_text_format(out, "%s%.60s", out->length > 0 ? ", " : "", hosts->agents[i].name);
    }
  }
}

/* Once they are gone nobody asks for their votes any more. *spared: they vote still, and nobody misses that. */
static bool may_go(const even_hosts *hosts, bool *spared) {
  even_voter_view view;
  bool any = false;
  for (size_t i = 1; i < hosts->count; i++) {
    any = any || goes(&hosts->agents[i]);
  }
  even_voter_look(hosts->voter, &view);
  bool free = !any || view.newest.generation == 0 || view.exact;
  *spared = !free && even_leadership_spares(view.voters, view.staying);
  return free || *spared;
}

static even_status fail_unsettled(const even_hosts *hosts, const char *names) {
  (void)even_fail(EVEN_ERR_PEER_LOST,
                  "%s cannot leave: the other hosts have not agreed within %.0f s that it votes no more, and could "
                  "elect no leader without its vote",
                  names, hosts->params.majority_seconds);
  return even_error_fix(
      "the training is saved: start it on the hosts that are left: --hosts … --name NAME --resume "
      "auto. EVENSTEP_MAJORITY_PATIENCE says how long is waited");
}

static even_status await_votes(even_job *job, const char *names) {
  even_hosts *hosts = job->hosts;
  const uint64_t until = even_clock_ns() + (uint64_t)(hosts->params.majority_seconds * 1e9);
  bool told = false;
  bool spared = false;
  for (;;) {
    EVEN_TRY(even_succession_join(job));
    if (may_go(hosts, &spared)) {
      break;
    }
    if (even_clock_ns() > until) {
      return fail_unsettled(hosts, names);
    }
    if (!told) {
      told = true;
      even_job_notice(job,
                      "%s stays until the other hosts have agreed that it votes no more: without its vote they could "
                      "elect no leader (%.0f s; EVENSTEP_MAJORITY_PATIENCE)",
                      names, hosts->params.majority_seconds);
    }
    even_status status = even_succession_await(job);
    if (hosts->voter == NULL) {
      return even_succession_is_alone(hosts) ? EVEN_OK : status; /* the user says that nobody votes any more */
    }
    EVEN_TRY(status);
    EVEN_TRY(even_succession_turn(hosts));
  }
  if (spared) {
    even_job_notice(job, "%s leaves before the other hosts have agreed that it votes no more: they are enough without",
                    names);
  }
  return EVEN_OK;
}

even_status even_succession_release(even_job *job) {
  even_text names = EVEN_TEXT_EMPTY;
  if (job->hosts->voter == NULL) {
    return EVEN_OK;
  }
  name_leaving(job->hosts, &names);
  even_status status = await_votes(job, even_text_string(&names));
  even_text_free(&names);
  return status;
}
