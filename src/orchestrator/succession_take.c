/* A host takes a leader's place: it waits for the agents of the others, and goes on with those that come. */
#include "base/fail.h"
#include "base/stop.h"
#include "orchestrator/adopt.h"
#include "orchestrator/succession.h"
#include "orchestrator/succession_members.h"
#include "os/clock.h"

#include <string.h>

enum { TURN_MS = 50, MEMBERS_AN_ERA = 1000000 };

static const uint64_t GATHER_NS = 20000000000u;
static const uint64_t GATHER_RANKS_NS = 8000000000u; /* while ranks wait, which do so for 15 s (generations.py) */

even_status even_succession_interrupted(void) {
  return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while hosts were waited for");
}

even_status even_succession_turn(even_hosts *hosts) {
  EVEN_TRY(even_loop_turn(&hosts->loop, TURN_MS));
  even_hosts_tick(hosts);
  return EVEN_OK;
}

bool even_succession_is_over(const even_hosts *hosts, const even_voter_view *view) {
  return even_leadership_superseded(&view->newest, hosts->generation);
}

even_status even_succession_fail_over(const even_voter_view *view) {
  if (even_leadership_ended(&view->newest)) {
    (void)even_fail(EVEN_ERR_PEER_LOST, "the job has ended on other hosts, one of which took this one's place");
    return even_error_fix("how, says logs/leader.log there, in the run folder of the same name");
  }
  (void)even_fail(EVEN_ERR_PEER_LOST,
                  "another host (%s) leads this job since generation %llu: this one's part has ended",
                  view->address[0] == '\0' ? "whose address is not known" : view->address,
                  (unsigned long long)view->newest.generation);
  return even_error_fix("its page and its history are there, in the run folder of the same name");
}

static bool all_came(const even_hosts *hosts) {
  for (size_t i = 1; i < hosts->count; i++) {
    const even_host_agent *agent = &hosts->agents[i];
    if (agent->link == NULL ? !agent->lost : agent->holds && agent->runs == NULL) {
      return false;
    }
  }
  return true;
}

static even_status gather(even_hosts *hosts) {
  uint64_t until = even_clock_ns() + (even_estate_goes_on(hosts->params.estate) ? GATHER_RANKS_NS : GATHER_NS);
  even_voter_view view = {.acts = true};
  hosts->gathering = true;
  while (!all_came(hosts) && even_clock_ns() < until) {
    if (even_stop_asked()) {
      return even_succession_interrupted();
    }
    even_voter_look(hosts->voter, &view);
    if (even_succession_is_over(hosts, &view)) {
      return even_succession_fail_over(&view);
    }
    EVEN_TRY(even_succession_turn(hosts));
  }
  hosts->gathering = false;
  return EVEN_OK;
}

/* Nothing of those that are left out is open: they never came, or have gone. A witness is started again by and by. */
static void leave_out_absent(even_hosts *hosts) {
  size_t kept = 1;
  for (size_t i = 1; i < hosts->count; i++) {
    if (hosts->agents[i].link != NULL || hosts->agents[i].witness) {
      hosts->agents[kept] = hosts->agents[i]; /* nothing watches them: they came by themselves */
      hosts->agents[kept].index = kept;
      hosts->agents[kept].lost = hosts->agents[i].link == NULL;
      kept++;
    }
  }
  hosts->count = kept;
}

even_status even_succession_take(even_hosts *hosts) {
  even_estate *estate = hosts->params.estate;
  hosts->voter = estate->voter;
  hosts->self = estate->self;
  hosts->voter_port = estate->voter_port;
  hosts->generation = estate->generation;
  hosts->next_member = estate->generation * MEMBERS_AN_ERA;
  even_text_add(&hosts->members_folder, even_estate_text(estate, "members_folder"));
  EVEN_TRY(even_text_status(&hosts->members_folder));
  for (size_t i = 1; i < hosts->count; i++) {
    even_estate_host was;
    bool known = even_estate_find(estate, hosts->agents[i].name, &was);
    hosts->agents[i].member = known ? was.member : 0;
    hosts->agents[i].came = known && was.came;
    hosts->agents[i].lost = strcmp(hosts->agents[i].name, even_estate_predecessor(estate)) == 0;
  }
  even_voter_announce(hosts->voter, hosts->port);
  EVEN_TRY(gather(hosts));
  if (even_adopt_may(hosts)) {
    EVEN_TRY(even_succession_want(hosts));
    return even_adopt_hosts(hosts);
  }
  even_estate_let_go(estate);
  leave_out_absent(hosts);
  EVEN_TRY(even_succession_want(hosts));
  for (size_t i = 1; i < hosts->count; i++) {
    EVEN_TRY(hosts->agents[i].lost ? EVEN_OK : even_hosts_ask_facts(&hosts->agents[i]));
  }
  return even_hosts_await_first(hosts); /* one that is lost meanwhile is one that was lost at another time */
}
