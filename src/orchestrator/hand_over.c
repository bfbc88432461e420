/* From the leader that is drained to the next one. The entry that names the next one is in the log of who leads before
 * that one begins; from the moment in which it is proposed this host starts no rank any more, whatever comes of it. */
#include "orchestrator/hand_over.h"

#include "base/fail.h"
#include "base/stop.h"
#include "orchestrator/bring.h"
#include "orchestrator/elastic.h"
#include "orchestrator/succession.h"
#include "orchestrator/succession_members.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

static const uint64_t TAKEN_NS = 20000000000u; /* until another one leads, */
static const uint64_t UP_NS = 10000000000u;    /* and takes agents */

static bool takes_ranks(const even_host_agent *agent) {
  return agent->link != NULL && !agent->lost && !agent->witness && even_elastic_stays(agent);
}

static size_t count_heirs(const even_hosts *hosts) {
  size_t count = 0;
  for (size_t i = 1; i < hosts->count; i++) {
    count += takes_ranks(&hosts->agents[i]);
  }
  return count;
}

even_status even_hand_over_may(const even_job *job) {
  const even_hosts *hosts = job->hosts;
  const char *name = hosts->agents[0].name;
  even_voter_view view;
  if (hosts->voter == NULL) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "host %s leads the job: it cannot be drained", name);
    return even_error_fix(
        "start jobs of three hosts and more with --replace-leader: then another host takes the lead first. This one: "
        "end it, and start it on another host: --name NAME --resume auto");
  }
  even_voter_look(hosts->voter, &view);
  if (!view.acts || !view.settled || view.voters < 2) {
    (void)even_fail(EVEN_ERR_STATE, "host %s leads the job, and no other host can take its place %s", name,
                    view.settled ? "any more: too few are left" : "at this moment");
    return even_error_fix(view.settled ? "let another host join first: evenstep join"
                                       : "try again when the job has said that another one takes its place");
  }
  if (count_heirs(hosts) == 0) {
    (void)even_fail(EVEN_ERR_STATE, "host %s leads the job, and no other host is here that stays", name);
    return even_error_fix("let another host join first: evenstep join");
  }
  return EVEN_OK;
}

void even_hand_over_begin(even_job *job) {
  size_t ranks = 0;
  for (size_t i = 1; i < job->hosts->count; i++) {
    const even_host_agent *agent = &job->hosts->agents[i];
    ranks += takes_ranks(agent) ? agent->next.count : 0;
  }
  job->hosts->hands_over = true;
  even_elastic_ask(job);
  even_job_notice(job,
                  "host %s, which leads the job, is drained: the training saves its state after the step under way, "
                  "and goes on with %zu rank%s where another host leads",
                  job->hosts->agents[0].name, ranks, ranks == 1 ? "" : "s");
}

/* What the next leader asks of each. One that had no number of its own keeps it open where it gets nothing. */
static void wish(even_hosts *hosts, int before[EVEN_HOSTS_MOST]) {
  for (size_t i = 1; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    before[i] = agent->wish;
    if (agent->next.count > agent->count) {
      agent->wish = (int)agent->next.count;
    }
    agent->next.count = 0;
  }
}

static even_status leave_all(even_job *job) {
  int before[EVEN_HOSTS_MOST];
  even_hosts *hosts = job->hosts;
  wish(hosts, before);
  hosts->handed = true;
  even_status status = even_succession_confirm(job);
  hosts->handed = status == EVEN_OK;
  for (size_t i = 1; status != EVEN_OK && i < hosts->count; i++) {
    hosts->agents[i].wish = before[i];
  }
  return status;
}

static even_status prepare(even_job *job) {
  EVEN_TRY(even_hand_over_may(job));
  EVEN_TRY(even_bring_to_those_here(job)); /* the next leader's disk may lack the checkpoint */
  return leave_all(job);
}

static void give_up(even_job *job) {
  const even_error why = *even_error_last();
  even_hosts *hosts = job->hosts;
  hosts->hands_over = false;
  hosts->elastic->move.stage = EVEN_MOVE_NONE;
  even_job_notice(job, "host %s is not drained, and the job goes on here: %.300s", hosts->agents[0].name, why.what);
  even_control_end(&hosts->elastic->control, hosts->agents[0].name, why.status, why.what, why.fix);
  even_error_clear();
}

/* Until another one leads, and then until it takes agents: this one's members' log may be needed until then. */
static even_status await_next(even_hosts *hosts, even_voter_view *view) {
  uint64_t until = even_clock_ns() + TAKEN_NS;
  bool over = false;
  do {
    EVEN_TRY(even_stop_asked() ? even_succession_interrupted() : even_succession_turn(hosts));
    even_voter_look(hosts->voter, view);
    if (!over && even_succession_is_over(hosts, view)) {
      over = true;
      until = even_clock_ns() + UP_NS;
    }
  } while (even_clock_ns() < until && (!over || (view->port == 0 && !even_leadership_ended(&view->newest))));
  if (!over) {
    (void)even_fail(EVEN_ERR_PEER_LOST, "host %s is drained, and no other host has taken the lead within %.0f s",
                    hosts->agents[0].name, (double)TAKEN_NS * 1e-9);
    return even_error_fix("where one does yet, it goes on (logs/leader.log there); else: --name NAME --resume auto");
  }
  return EVEN_OK;
}

static even_status say_done(even_hosts *hosts, const even_voter_view *view) {
  char words[300];
  (void)snprintf(words, sizeof words,
                 "host %.100s is out of the job, which another host (%.60s) leads since generation %llu",
                 hosts->agents[0].name, view->address[0] == '\0' ? "whose address is not known" : view->address,
                 (unsigned long long)view->newest.generation);
  even_control_end(&hosts->elastic->control, hosts->agents[0].name, EVEN_OK, words, "");
  (void)even_fail(EVEN_ERR_PEER_LOST, "%s", words);
  return even_error_fix("it goes on there: what it says is in logs/leader.log of the run folder of the same name");
}

/* To a host that has all that it needs, and stays; else to one that leaves, too, and to no witness. */
static void give(even_hosts *hosts) {
  uint64_t heirs[EVEN_VOTER_MOST];
  size_t count = 0;
  for (int round = 0; round < 2; round++) {
    for (size_t i = 1; i < hosts->count && count < EVEN_VOTER_MOST; i++) {
      const even_host_agent *agent = &hosts->agents[i];
      bool able = agent->link != NULL && !agent->witness && agent->member != 0 && agent->confirms == 0;
      if (able && takes_ranks(agent) == (round == 0)) {
        heirs[count++] = agent->member;
      }
    }
  }
  even_voter_hand_over(hosts->voter, heirs, count);
}

even_status even_hand_over(even_job *job) {
  even_hosts *hosts = job->hosts;
  even_voter_view view;
  if (prepare(job) != EVEN_OK) {
    if (even_stop_asked()) {
      return EVEN_ERR_INTERRUPTED;
    }
    give_up(job);
    return EVEN_OK;
  }
  give(hosts);
  EVEN_TRY(await_next(hosts, &view));
  return say_done(hosts, &view);
}
