/* The leader's agent was killed where another host could take its place, and the next one on its host comes before one
 * does: it is the same member of the group, with the log that the one before has kept, and leads on in the same
 * generation once a majority has answered it. The others wait for that as for a leader that stands still
 * (even_voter_links_awaits), for the process that starts agents keeps the socket at which they call. The guardian of
 * the ranks here, which hold out for a moment without anybody that leads, is told by that member from then on, however
 * long it takes until their job is gone on with. */
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/legacy.h"
#include "orchestrator/outlast.h"
#include "orchestrator/succession.h"
#include "orchestrator/succession_members.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "os/socket.h"

#include <string.h>

/* By then another host leads, or none can: nobody waits for ranks that may not run for so long. */
static uint64_t longest_ns(void) {
  return even_leadership_times_of(even_socket_silence()).kill_ns;
}

bool even_succession_may_return(const even_hosts *hosts) {
  even_voter_view view;
  if (!hosts->params.replaces_leader) {
    return true;
  }
  bool all = hosts->voter != NULL && hosts->params.estate == NULL && hosts->generation == 1 && !hosts->alone &&
             !hosts->hands_over && !hosts->cut_off && hosts->lapsed_ns == 0 && hosts->count <= EVEN_LEGACY_HOSTS;
  for (size_t i = 1; all && i < hosts->count; i++) {
    const even_host_agent *agent = &hosts->agents[i];
    all = agent->member != 0 && agent->link != NULL && !agent->witness && !agent->returns && !agent->asked;
  }
  if (!all) {
    return false;
  }
  even_voter_look(hosts->voter, &view);
  return even_succession_leads(hosts, &view) && view.acts && view.settled;
}

even_status even_succession_leave(const even_hosts *hosts, even_legacy_votes *out) {
  even_voter_member *members = NULL;
  out->count = 0;
  if (hosts->voter == NULL) {
    return EVEN_OK;
  }
  if (hosts->members_folder.length >= sizeof out->folder) {
    return even_fail(EVEN_ERR_INPUT, "%s is too long a name for the folder of the members",
                     even_text_string(&hosts->members_folder));
  }
  size_t count = 0;
  EVEN_TRY(even_succession_list(hosts, &members, &count));
  memcpy(out->members, members, count * sizeof *members);
  even_free(members);
  out->generation = hosts->generation;
  out->next_member = hosts->next_member;
  out->port = hosts->voter_port;
  memcpy(out->folder, even_text_string(&hosts->members_folder), hosts->members_folder.length + 1);
  out->count = count;
  return EVEN_OK;
}

/* None could be started where it was left without. */
static even_status take_guardian(even_hosts *hosts, pid_t pid) {
  even_custody *custody = hosts->params.before->custody;
  int pipe = even_custody_claim(custody, EVEN_OUTLAST_GUARDIAN, 0);
  int limit = even_custody_claim(custody, EVEN_OUTLAST_LIMIT, 0);
  if (pid <= 0 || pipe < 0) {
    even_pipe_close(pipe);
    even_pipe_close(limit);
    return EVEN_OK;
  }
  even_status status = even_guardian_take(pid, pipe, limit, &hosts->guardian);
  hosts->guards = status == EVEN_OK;
  if (status != EVEN_OK) {
    even_guardian_leave(&hosts->guardian);
  }
  return status;
}

bool even_succession_give_guardian(even_hosts *hosts, even_guardian *out) {
  bool has = hosts != NULL && hosts->guards;
  if (has) {
    even_voter_guard(hosts->voter, NULL); /* its thread may be telling it */
    *out = hosts->guardian;
    hosts->guards = false;
    even_voter_guard(hosts->voter, out);
  }
  return has;
}

even_status even_succession_return(even_hosts *hosts) {
  const even_legacy_votes *votes = &hosts->params.before->page->votes;
  if (votes->count == 0) {
    return EVEN_OK;
  }
  int listener = even_custody_claim(hosts->params.before->custody, EVEN_OUTLAST_VOTER, 0);
  if (listener < 0 || votes->count != hosts->count) {
    even_pipe_close(listener);
    return even_fail(EVEN_ERR_STATE, "the agent before has left ranks that run, and no place among those that vote");
  }
  hosts->self = votes->members[0].id;
  hosts->generation = votes->generation;
  hosts->next_member = votes->next_member;
  hosts->voter_port = votes->port;
  hosts->voting_ns = even_clock_ns();
  for (size_t i = 1; i < hosts->count; i++) {
    hosts->agents[i].member = votes->members[i].id;
  }
  even_text_add(&hosts->members_folder, votes->folder);
  even_status status = even_text_status(&hosts->members_folder);
  status = status == EVEN_OK ? take_guardian(hosts, votes->guardian) : status;
  if (status != EVEN_OK) {
    even_pipe_close(listener);
    return status;
  }
  EVEN_TRY(even_succession_vote(hosts, votes->members, votes->count, listener, true));
  even_voter_guard(hosts->voter, hosts->guards ? &hosts->guardian : NULL);
  return EVEN_OK;
}

even_status even_succession_await_return(even_hosts *hosts) {
  const uint64_t until = even_clock_ns() + longest_ns();
  even_voter_view view;
  if (hosts->voter == NULL) {
    return EVEN_OK;
  }
  even_voter_announce(hosts->voter, hosts->port);
  for (;;) { /* who ends the job meanwhile ends its ranks, and tells the members, once this one leads */
    even_voter_look(hosts->voter, &view);
    if (even_succession_is_over(hosts, &view)) {
      return even_succession_fail_over(&view);
    }
    if (even_succession_leads(hosts, &view) && view.quorum && view.acts) {
      return EVEN_OK;
    }
    if (even_clock_ns() > until) {
      return even_fail(EVEN_ERR_PEER_LOST,
                       "the majority of the hosts was not heard within %.0f s after the agent before "
                       "was killed",
                       (double)longest_ns() * 1e-9);
    }
    EVEN_TRY(even_succession_turn(hosts));
  }
}

void even_succession_leave_to_others(even_hosts *hosts) {
  even_voter_close(hosts->voter, false);
  hosts->voter = NULL;
}
