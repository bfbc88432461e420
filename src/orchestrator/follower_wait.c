/* The leader's agent was killed, and another one may be started beside the ranks that outlast it there (outlast.h):
 * this host's train on, and the next agent is asked at the socket of the one before, which lives as long as one may
 * come. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/gifts.h"
#include "orchestrator/outlast.h"
#include "os/clock.h"
#include "os/socket.h"

#include <stdint.h>
#include <string.h>

enum { CONNECT_MS = 3000, CONNECT_VOTED_MS = 1000 };

/* Between two tries. */
static const uint64_t PAUSE_NS = 200000000u;

/* Where another host may take the leader's place they do for a moment, but where the agent was killed, and its host
 * lives. With --recovery the ranks are held meanwhile (follower_hold.c). */
static bool voters_wait(const even_follower *follower) {
  return follower->candidate.voter == NULL ||
         ((follower->closed || follower->wait_until_ns != 0) && follower->job.generation == NULL &&
          !even_candidate_superseded(&follower->candidate));
}

/* Who reaches the killed agent's host, and no majority, would not hear of another leader. The others elect one when
 * they have waited for the one before for so long; that one waits for this host's agent before it starts ranks
 * (succession_take.c), for longer than it takes here to miss them. Where the next agent comes, it and this host's may
 * be a majority again. */
static bool hears_nobody(even_follower *follower, uint64_t now) {
  even_voter_view view = {.quorum = true};
  if (follower->candidate.voter != NULL) {
    even_voter_look(follower->candidate.voter, &view);
  }
  follower->heard_ns = view.quorum ? now : follower->heard_ns;
  return now > follower->heard_ns &&
         now - follower->heard_ns > even_leadership_times_of(even_socket_silence()).silent_ns;
}

/* Then ranks of the killed agent's host have ended (leadership.h), and another host leads, or none can. */
static uint64_t longest_ns(const even_follower *follower) {
  uint64_t patience_ns = (uint64_t)(follower->start.outlast_seconds * 1e9);
  uint64_t kill_ns = even_leadership_times_of(even_socket_silence()).kill_ns;
  return follower->candidate.voter != NULL && kill_ns < patience_ns ? kill_ns : patience_ns;
}

bool even_follower_may_wait(const even_follower *follower) {
  const even_job *job = &follower->job;
  bool due = follower->gone || follower->wait_until_ns != 0;
  bool has = follower->running || follower->settled; /* that all have ended the leader may not have heard */
  return due && has && follower->start.outlast_seconds > 0 && !follower->waited && !follower->ended &&
         !follower->refused && follower->checks == NULL && voters_wait(follower) &&
         even_outlast_hosts_have_state(job) && job->stage == EVEN_JOB_RUNS &&
         (job->draining == 0 || job->ended == 0); /* else its ranks save their state and end */
}

static void begin(even_follower *follower) {
  even_warm_part_close(&follower->next); /* who asked for it is gone */
  even_gifts_close(&follower->job);      /* none is on its way */
  even_follower_close_parcels(follower);
  follower->job.parcels = NULL;
  even_follower_untell_notice(follower);
  follower->held = true;
  follower->heard_ns = even_clock_ns();
  follower->wait_until_ns = follower->heard_ns + longest_ns(follower);
  follower->look_ns = 0;
}

/* With the next turn the ranks are ended. */
static void give_up(even_follower *follower) {
  even_link_close(&follower->link);
  follower->gone = follower->waited = true;
  follower->wait_until_ns = 0;
}

/* At once where nobody listens there any more, or no way leads there. */
static even_status connect_again(even_follower *follower, const char *address, const json_t *invitation) {
  unsigned char key[EVEN_TLS_KEY_BYTES];
  int port = (int)json_integer_value(json_object_get(invitation, "port"));
  int fd = -1;
  EVEN_TRY(even_tls_key_read(even_json_text(invitation, "key"), key));
  bool voted = follower->candidate.voter != NULL; /* on who is reached instead */
  even_status status = even_socket_connect(address, port, voted ? CONNECT_VOTED_MS : CONNECT_MS, &fd);
  if (status == EVEN_OK) {
    status = even_link_open(&follower->link, &follower->loop, fd, false, key, &follower->calls);
  }
  explicit_bzero(key, sizeof key);
  return status;
}

static even_status look(even_follower *follower) {
  char address[sizeof follower->link.peer];
  json_t *invitation = NULL;
  memcpy(address, follower->link.peer, sizeof address);
  even_link_close(&follower->link);
  EVEN_TRY(even_json_parse("the leader's invitation", follower->invitation, strlen(follower->invitation), &invitation));
  even_status status = connect_again(follower, address, invitation);
  const char *digits = even_json_text(invitation, "key");
  explicit_bzero((char *)(uintptr_t)digits, strlen(digits));
  json_decref(invitation);
  return status;
}

even_status even_follower_wait(even_follower *follower) {
  uint64_t now = even_clock_ns();
  if (follower->wait_until_ns == 0) {
    begin(follower);
  }
  if (now > follower->wait_until_ns || hears_nobody(follower, now)) {
    give_up(follower);
  } else if (follower->gone && now >= follower->look_ns) {
    follower->look_ns = now + PAUSE_NS;
    follower->gone = look(follower) != EVEN_OK;
    if (!follower->gone) {
      even_follower_keep_link(follower);
    } else {
      even_error_clear(); /* why the leader was lost is the news */
      give_up(follower);
    }
  }
  return EVEN_OK;
}
