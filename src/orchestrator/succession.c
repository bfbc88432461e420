/* The leader among the voters. */
#include "orchestrator/succession.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/stop.h"
#include "orchestrator/elastic.h"
#include "orchestrator/legacy.h"
#include "orchestrator/remote.h"
#include "orchestrator/succession_members.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/signals.h"
#include "os/socket.h"

#include <stdio.h>
#include <string.h>

static const uint64_t SETTLE_NS = 10000000000u;
static const uint64_t AGAIN_NS = 5000000000u; /* between two tries to start an agent */
static const uint64_t END_NS = 3000000000u;

static uint64_t patience_ns(const even_hosts *hosts) {
  return (uint64_t)(hosts->params.majority_seconds * 1e9);
}

/* ---- the group begins ---- */

even_status even_succession_vote(even_hosts *hosts, const even_voter_member *members, size_t count, int listener,
                                 bool returns) {
  even_voter_params params = {.size = sizeof params,
                              .self = hosts->self,
                              .listener = listener,
                              .members = members,
                              .count = count,
                              .first = hosts->self,
                              .returns = returns,
                              .folder = even_text_string(&hosts->members_folder),
                              .silence_ms = even_socket_silence()};
  memcpy(params.key, hosts->key, sizeof params.key);
  even_status status = even_voter_open(&params, &hosts->voter);
  explicit_bzero(params.key, sizeof params.key);
  hosts->voter_listener = listener;
  return status;
}

static even_status begin_voting(even_job *job, const even_voter_member *members, size_t count, int listener) {
  even_hosts *hosts = job->hosts;
  even_legacy_alone(hosts->params.before, false);
  even_status status = even_succession_vote(hosts, members, count, listener, false);
  if (status == EVEN_OK) {
    even_voter_announce(hosts->voter, hosts->port); /* for who would join, and came to another host */
  }
  status = status == EVEN_OK ? even_succession_bequeath(job) : status; /* who votes can lead from then on */
  for (size_t i = 1; status == EVEN_OK && i < hosts->count; i++) {
    if (hosts->agents[i].link != NULL) {
      status = even_succession_say(&hosts->agents[i], members, count, EVEN_MEMBER_BEGINS);
    }
  }
  return status == EVEN_OK ? even_voter_want(hosts->voter, members, count) : status;
}

even_status even_succession_open(even_job *job) {
  even_hosts *hosts = job->hosts;
  even_voter_member *members = NULL;
  size_t count = 0;
  int listener = -1;
  if (!hosts->params.replaces_leader || hosts->self != 0 || even_leadership_voters((unsigned)hosts->count) < 3) {
    return EVEN_OK;
  }
  hosts->self = 1;
  hosts->generation = 1; /* who leads first leads in this one, once they have agreed */
  hosts->next_member = hosts->count + 1;
  hosts->voting_ns = even_clock_ns();
  for (size_t i = 1; i < hosts->count; i++) {
    hosts->agents[i].member = i + 1;
  }
  /* an agent before this one may have left a log, of a group that nobody goes on with */
  even_text_format(&hosts->members_folder, "%s/members/%s-%d", job->run_folder.data, job->id, job->era);
  EVEN_TRY(even_text_status(&hosts->members_folder));
  EVEN_TRY(even_listener_open(hosts->params.address == NULL ? "0.0.0.0" : hosts->params.address, &hosts->voter_port,
                              &listener));
  even_status status = even_succession_list(hosts, &members, &count);
  if (status != EVEN_OK) {
    even_listener_close(listener);
    return status;
  }
  status = begin_voting(job, members, count, listener);
  even_free(members);
  return status;
}

static bool all_here(const even_hosts *hosts) {
  for (size_t i = 1; i < hosts->count; i++) {
    if (hosts->agents[i].link == NULL) {
      return false;
    }
  }
  return true;
}

/* ---- its end ---- */

void even_succession_finish(even_hosts *hosts) {
  if (hosts != NULL && hosts->voter != NULL) {
    even_voter_finish(hosts->voter);
  }
}

void even_succession_await_end(even_hosts *hosts) {
  uint64_t until = even_clock_ns() + END_NS;
  even_voter_view view = {.port = 0};
  even_succession_finish(hosts);
  while (hosts->voter != NULL && even_clock_ns() < until) {
    even_voter_look(hosts->voter, &view);
    if (!even_succession_leads(hosts, &view) || !view.quorum) {
      break;
    }
    even_clock_sleep_ns(5000000);
  }
}

void even_succession_close(even_hosts *hosts) {
  even_voter_view view = {.port = 0};
  if (hosts->voter != NULL && hosts->params.estate == NULL) {
    even_voter_look(hosts->voter, &view);
    even_voter_close(hosts->voter, even_leadership_ended(&view.newest));
  }
  hosts->voter = NULL;
  if (hosts->guards) {
    even_guardian_leave(&hosts->guardian);
    hosts->guards = false;
  }
  even_text_free(&hosts->members_folder);
}

/* ---- while the job runs ---- */

even_status even_succession_bequeath(even_job *job) {
  even_hosts *hosts = job->hosts;
  for (size_t i = 1; hosts->voter != NULL && i < hosts->count; i++) {
    even_text text = EVEN_TEXT_EMPTY;
    even_status status = even_estate_write(job, &text);
    if (status != EVEN_OK || hosts->agents[i].link == NULL) {
      even_text_free(&text);
      EVEN_TRY(status);
      continue;
    }
    EVEN_TRY(even_link_send_text(hosts->agents[i].link, EVEN_MESSAGE_ESTATE, &text, NULL, 0));
  }
  return EVEN_OK;
}

static bool starts(even_host_agent *agent) {
  agent->called_ns = even_clock_ns();
  even_host_agent_drop(agent);
  agent->returns = agent->member != 0;
  if (even_host_agent_launch(agent) != EVEN_OK) {
    even_error_clear(); /* again in a moment */
    agent->lost = true;
  }
  return !agent->lost;
}

/* Each answers who the members are in its turn: what came before has come then. */
even_status even_succession_confirm(even_job *job) {
  even_hosts *hosts = job->hosts;
  uint64_t until = even_clock_ns() + SETTLE_NS;
  const even_host_agent *silent = NULL;
  EVEN_TRY(even_succession_bequeath(job));
  hosts->members_said++;
  for (size_t i = 1; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    agent->confirms = agent->member != 0 && agent->fits && !agent->returns ? hosts->members_said : 0;
  }
  EVEN_TRY(even_succession_say_all(hosts));
  do {
    EVEN_TRY(even_stop_asked() ? even_succession_interrupted() : even_succession_turn(hosts));
    silent = NULL;
    for (size_t i = 1; i < hosts->count; i++) {
      const even_host_agent *agent = &hosts->agents[i];
      silent = agent->confirms != 0 && agent->link != NULL ? agent : silent;
    }
  } while (silent != NULL && even_clock_ns() < until);
  return silent == NULL ? EVEN_OK : even_fail(EVEN_ERR_TIMEOUT, "host %s does not answer", silent->name);
}

/* Of those that are lost each gets its try now and then; one that has come becomes the member again that it was. */
static void bring_back(even_job *job, bool witness_alone) {
  even_hosts *hosts = job->hosts;
  uint64_t now = even_clock_ns();
  hosts->failure.status = EVEN_OK; /* of one that did not come: it is tried again */
  for (size_t i = 1; hosts->params.shell != NULL && i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    if (agent->fallen || (witness_alone && !agent->witness)) {
      continue;
    }
    if (!agent->lost && agent->link == NULL && even_host_agent_shell_ended(agent)) {
      agent->lost = true;
    }
    if (agent->lost && (agent->called_ns == 0 || now - agent->called_ns > AGAIN_NS)) {
      bool first = agent->called_ns == 0;
      if (starts(agent) && first) {
        even_job_notice(job, "host %s: its agent is started again", agent->name);
      }
    }
    agent->called_ns = agent->fits ? 0 : agent->called_ns;
  }
}

static bool wants_number(const even_host_agent *agent) {
  return agent->member == 0 && !agent->cannot_vote && agent->fits && agent->link != NULL;
}

/* One that has never been a member, or has forgotten its log, is a new one. */
static void number_new(even_host_agent *agent) {
  agent->joins = true;
  agent->asked = false;
  agent->member = agent->hosts->next_member++;
}

even_status even_succession_add(even_job *job, even_host_agent *agent) {
  even_hosts *hosts = job->hosts;
  if (hosts->voter == NULL) {
    return EVEN_OK;
  }
  number_new(agent);
  hosts->settled_told = false;
  EVEN_TRY(even_succession_bequeath(job));
  EVEN_TRY(even_succession_say_all(hosts));
  return even_succession_want(hosts);
}

void even_succession_keep_witness(even_job *job) {
  even_hosts *hosts = job->hosts;
  even_host_agent *agent = &hosts->agents[hosts->count - 1];
  if (!agent->witness || hosts->voter == NULL) {
    return;
  }
  bring_back(job, true);
  bool returns = agent->returns && agent->fits && agent->link != NULL;
  bool new = wants_number(agent) && all_here(hosts);
  if (!returns && !new) {
    return;
  }
  if (new) {
    number_new(agent);
  }
  agent->asked = returns;
  agent->returns = false;
  hosts->settled_told = false;
  if (even_succession_bequeath(job) != EVEN_OK || even_succession_say_all(hosts) != EVEN_OK ||
      (new && even_succession_want(hosts) != EVEN_OK)) {
    even_error_clear(); /* lack of memory: the next attempt names it anew */
  }
}

static even_status fail_alone(const even_hosts *hosts) {
  even_text missing = EVEN_TEXT_EMPTY;
  even_succession_name_missing(hosts, &missing);
  (void)even_fail(EVEN_ERR_PEER_LOST, "the majority of the hosts was not heard within %.0f s: %s did not come",
                  hosts->params.majority_seconds, even_text_string(&missing));
  even_text_free(&missing);
  return even_error_fix(
      "where one of them leads the job now, it goes on (logs/leader.log there); where they are lost for good, start it "
      "on "
      "the hosts that are left: --hosts … --name NAME --resume auto. EVENSTEP_MAJORITY_PATIENCE says how long is "
      "waited");
}

even_status even_succession_go_alone(even_job *job) {
  even_hosts *hosts = job->hosts;
  even_voter_view view = {.quorum = true};
  if (hosts->voter != NULL) {
    even_voter_look(hosts->voter, &view);
  }
  if (view.quorum || view.newest.generation == 0) {
    (void)even_fail(EVEN_ERR_STATE, "this job waits for no host that is lost");
    return even_error_fix("`evenstep drain HOST` takes out one that is there");
  }
  hosts->alone = true;
  return EVEN_OK;
}

/* Nobody else can lead from what is here, and nobody is asked any more. Ranks may run. */
static void leave_voters(even_job *job) {
  even_succession_guard(job, false);
  if (even_guardian_limit(&job->guardian, 0, 0) != EVEN_OK) {
    even_error_clear(); /* it is gone: another one is started, and told */
  }
  even_voter_close(job->hosts->voter, true);
  job->hosts->voter = NULL;
  if (job->hosts->params.estate != NULL) { /* of a second leader it was the estate's */
    job->hosts->params.estate->voter = NULL;
  }
  job->hosts->cut_off = false;
  job->hosts->lapsed_ns = 0;
}

/* As the user says. EVEN_ERR_PEER_LOST: the hosts change first (elastic.h). */
static even_status go_alone(even_job *job) {
  even_hosts *hosts = job->hosts;
  even_text missing = EVEN_TEXT_EMPTY;
  char words[400];
  bool any = false;
  even_succession_name_missing(hosts, &missing);
  leave_voters(job);
  for (size_t i = 1; i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    agent->member = 0;
    agent->returns = false;
    if (agent->link == NULL) {
      agent->lost = agent->leaves = any = true;
    }
  }
  (void)snprintf(words, sizeof words, "the job goes on without %s, and nobody takes this host's place any more",
                 missing.length > 0 ? even_text_string(&missing) : "other leaders");
  even_text_free(&missing);
  even_job_notice(job, "%s", words);
  even_control_end(&hosts->elastic->control, EVEN_SUCCESSION_LOST, EVEN_OK, words, "");
  hosts->alone = any;
  return any ? even_fail(EVEN_ERR_PEER_LOST, "%s", words) : EVEN_OK;
}

bool even_succession_is_alone(const even_hosts *hosts) {
  return hosts->alone && hosts->voter == NULL;
}

/* Whether it may act because a majority has answered what was asked since then: those that have just been lost may have
 * answered before. */
static bool has_answered(const even_voter_view *view, uint64_t since_ns) {
  return view->acts && view->answered_ns > since_ns;
}

static even_status await_acting(even_job *job, bool starts) {
  even_hosts *hosts = job->hosts;
  even_voter_view view;
  const uint64_t since = even_clock_boot_ns();
  const uint64_t begun = even_clock_ns();
  for (;;) {
    if (hosts->voter == NULL) {
      return EVEN_OK;
    }
    even_voter_look(hosts->voter, &view);
    if (even_succession_is_over(hosts, &view)) {
      return even_succession_fail_over(&view);
    }
    if (view.newest.generation == 0) {
      return EVEN_OK; /* they have not agreed yet: nobody can take this one's place */
    }
    if (view.quorum && has_answered(&view, since) && (!starts || even_clock_boot_ns() >= view.starts_ns)) {
      break; /* a lease is for what runs, and not for something new */
    }
    if (hosts->alone) {
      return go_alone(job);
    }
    if (!view.acts) {
      even_succession_tell_cut_off(job);
    }
    if (even_stop_asked()) {
      return even_succession_interrupted();
    }
    if (even_clock_ns() - begun > patience_ns(hosts)) {
      return fail_alone(hosts);
    }
    if (!view.quorum) {
      bring_back(job, false);
      EVEN_TRY(even_succession_join(job));
    }
    EVEN_TRY(even_succession_turn(hosts));
  }
  even_succession_guard(job, true);
  if (hosts->cut_off) {
    even_job_notice(job, "the majority of the hosts is heard again");
  }
  even_succession_stay(hosts);
  hosts->cut_off = false;
  hosts->lapsed_ns = 0;
  return EVEN_OK;
}

even_status even_succession_await(even_job *job) {
  return await_acting(job, true);
}

even_status even_succession_await_vote(even_job *job) {
  return await_acting(job, false);
}

bool even_succession_leaves_out(even_job *job, uint64_t since_ns) {
  even_hosts *hosts = job->hosts;
  even_voter_view view;
  if (hosts == NULL || hosts->voter == NULL) {
    return true;
  }
  even_voter_look(hosts->voter, &view);
  if (view.newest.generation == 0) {
    return true; /* they have not agreed yet: nobody can take this one's place */
  }
  if (hosts->left_out_ns < since_ns) {
    hosts->left_out_ns = even_clock_ns();
    if (even_succession_want(hosts) != EVEN_OK) {
      even_error_clear(); /* lack of memory: again with the next turn */
      hosts->left_out_ns = 0;
    }
    return false;
  }
  return even_succession_leads(hosts, &view) && view.acts && view.exact;
}

bool even_succession_is_cut(even_hosts *hosts) {
  even_voter_view view;
  uint64_t since = even_clock_boot_ns();
  /* by then a majority that is lost is known to be */
  uint64_t known_ns = even_leadership_times_of(even_socket_silence()).heard_ns + 1000000000u;
  if (hosts->voter == NULL) {
    return false;
  }
  do {
    even_clock_sleep_ns(10000000);
    even_voter_look(hosts->voter, &view);
  } while (view.quorum && !has_answered(&view, since) && even_clock_boot_ns() - since < known_ns);
  if (view.quorum || view.newest.generation == 0) {
    return false;
  }
  for (size_t i = 1; i < hosts->count; i++) {
    hosts->agents[i].lost = hosts->agents[i].lost || hosts->agents[i].link == NULL;
  }
  return true;
}

/* ---- agents that were started again ---- */

void even_succession_take_votes(even_job *job, even_host_agent *agent, const json_t *content) {
  const char *trouble = json_string_value(json_object_get(content, "trouble"));
  json_int_t port = json_integer_value(json_object_get(content, "port"));
  if (agent->member == 0 || (uint64_t)json_integer_value(json_object_get(content, "member")) != agent->member) {
    return; /* of an earlier one */
  }
  bool returned = agent->asked;
  agent->asked = false;
  if ((uint64_t)json_integer_value(json_object_get(content, "number")) == agent->confirms) {
    agent->confirms = 0; /* others are of what it was told before */
  }
  agent->voter_port = port > 0 && port < 65536 ? (int)port : agent->voter_port;
  if (trouble != NULL) {
    agent->member = 0;
    agent->cannot_vote = !returned; /* who has only forgotten becomes a new one */
    if (!returned) {
      even_job_notice(job, "host %s: its agent cannot take this one's place: %.300s", agent->name, trouble);
    }
  } else if (returned && all_here(job->hosts) && even_succession_want(job->hosts) != EVEN_OK) {
    even_error_clear(); /* lack of memory: the next attempt wants it anew */
  }
}

static bool any_asked(const even_hosts *hosts) {
  for (size_t i = 1; i < hosts->count; i++) {
    if (hosts->agents[i].asked && hosts->agents[i].link != NULL) {
      return true;
    }
  }
  return false;
}

static bool any_returns(const even_hosts *hosts) {
  for (size_t i = 1; i < hosts->count; i++) {
    if (hosts->agents[i].returns && hosts->agents[i].fits && hosts->agents[i].link != NULL) {
      return true;
    }
  }
  return false;
}

/* As the members that they were; who has forgotten it has no number afterwards. */
static even_status ask_returning(even_job *job, bool *any) {
  even_hosts *hosts = job->hosts;
  even_voter_member *members = NULL;
  size_t count = 0;
  uint64_t until = even_clock_ns() + SETTLE_NS;
  if (!any_returns(hosts)) {
    return EVEN_OK;
  }
  EVEN_TRY(even_succession_bequeath(job)); /* first: who votes may have to lead */
  EVEN_TRY(even_succession_list(hosts, &members, &count));
  even_status status = EVEN_OK;
  for (size_t i = 1; status == EVEN_OK && i < hosts->count; i++) {
    even_host_agent *agent = &hosts->agents[i];
    if (agent->returns && agent->fits && agent->link != NULL) {
      status = even_succession_say(agent, members, count, EVEN_MEMBER_RETURNS);
      agent->returns = false;
      agent->asked = true;
      *any = true;
    }
  }
  even_free(members);
  while (status == EVEN_OK && any_asked(hosts) && even_clock_ns() < until) {
    status = even_stop_asked() ? even_succession_interrupted() : even_succession_turn(hosts);
  }
  return status;
}

/* So that what is lost next costs no majority that there would be a moment later. */
static even_status await_settled(even_hosts *hosts) {
  uint64_t until = even_clock_ns() + SETTLE_NS;
  even_voter_view view;
  even_voter_look(hosts->voter, &view);
  while (view.newest.generation != 0 && view.quorum && !view.settled && even_clock_ns() < until) {
    EVEN_TRY(even_stop_asked() ? even_succession_interrupted() : even_succession_turn(hosts));
    even_voter_look(hosts->voter, &view);
  }
  return EVEN_OK;
}

even_status even_succession_join(even_job *job) {
  even_hosts *hosts = job->hosts;
  bool any = false;
  if (hosts->voter == NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(ask_returning(job, &any));
  for (size_t i = 1; i < hosts->count; i++) {
    hosts->agents[i].joins = wants_number(&hosts->agents[i]);
    if (hosts->agents[i].joins) {
      number_new(&hosts->agents[i]);
      any = true;
    }
  }
  if (any) {
    hosts->settled_told = false;
    EVEN_TRY(even_succession_bequeath(job));
    EVEN_TRY(even_succession_say_all(hosts));
  }
  even_voter_view view;
  even_voter_look(hosts->voter, &view);
  if (!view.quorum) {
    return EVEN_OK; /* who shall be left out is for later: who is not here may be on its way */
  }
  EVEN_TRY(even_succession_want(hosts));
  return await_settled(hosts);
}
