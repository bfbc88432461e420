/* evenstep agent: says what its host has, does its part of each attempt that the leader asks for. */
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/invitation.h"

enum { TURN_MS = 100 };

static void on_ready(void *context, even_link *link) {
  (void)link;
  even_follower_greet(context);
}

static void on_ended(void *context, even_link *link) {
  even_follower *follower = context;
  follower->gone = true;
  even_parcels_lost(follower->parcels, 0);
  if (!follower->refused) {
    follower->why = *even_link_why(link);
  }
}

static even_status turn(even_follower *follower) {
  if (follower->open && follower->job.loop.fd >= 0) {
    EVEN_TRY(even_loop_turn(&follower->job.loop, TURN_MS));
  } else {
    EVEN_TRY(even_loop_turn(&follower->loop, TURN_MS));
    follower->ended = follower->ended || even_signals_end_pending() != 0;
  }
  even_link_tick(&follower->link, false);
  even_parcels_tick(follower->parcels);
  even_bring_take_tick(follower->brings);
  return EVEN_OK;
}

/* The leader is gone, or is none any more: nothing of its attempt is left here. */
static even_status find_next(even_follower *follower, const even_link_calls *calls, even_candidate_turn *turn) {
  even_link_close(&follower->link);
  even_follower_close_job(follower);
  even_follower_close_parcels(follower);
  EVEN_TRY(even_candidate_await(&follower->candidate, &follower->loop, calls, &follower->link, turn));
  follower->gone = *turn != EVEN_CANDIDATE_SERVE;
  return EVEN_OK;
}

static even_status serve_leaders(even_follower *follower, const even_link_calls *calls, bool *leads) {
  while (!follower->ended && !follower->refused) {
    even_candidate_turn next = EVEN_CANDIDATE_SERVE;
    EVEN_TRY(turn(follower));
    if (follower->asked) {
      even_follower_run_attempt(follower);
    }
    if (!follower->ended && (follower->gone || even_candidate_superseded(&follower->candidate))) {
      EVEN_TRY(find_next(follower, calls, &next));
    }
    *leads = next == EVEN_CANDIDATE_LEAD;
    if (next != EVEN_CANDIDATE_SERVE) {
      break;
    }
  }
  return EVEN_OK;
}

static even_status serve(even_follower *follower, const char *line, bool *met, even_estate **estate) {
  bool leads = false;
  const even_link_calls calls = {
      .context = follower, .ready = on_ready, .message = even_follower_hear, .ended = on_ended};
  EVEN_TRY(even_loop_open(&follower->loop));
  EVEN_TRY(even_invitation_accept(line, &follower->loop, &calls, &follower->link, &follower->host));
  follower->gone = false; /* connections that came to nothing were */
  even_status status = serve_leaders(follower, &calls, &leads);
  *met = follower->taken;
  EVEN_TRY(status);
  if (leads) {
    return even_candidate_inherit(&follower->candidate, estate);
  }
  return follower->ended ? EVEN_OK : even_error_restore(&follower->why);
}

even_status even_hosts_serve(const char *invitation, const even_join_wish *joins, bool *met, even_estate **estate,
                             int *exit_code) {
  even_follower *follower = NULL;
  struct sigaction pipe_before;
  *met = false;
  EVEN_TRY(EVEN_NEW(&follower));
  even_status ignored = even_signals_pipe_ignore(&pipe_before);
  if (ignored != EVEN_OK) {
    even_free(follower);
    return ignored;
  }
  follower->joins = joins;
  follower->link.fd = -1;
  follower->loop.fd = -1;
  follower->telemetry_fd = -1;
  follower->candidate.listener = -1;
  if (estate != NULL) {
    *estate = NULL;
    even_candidate_open(&follower->candidate, invitation);
  }
  even_status status = serve(follower, invitation, met, estate);
  const even_error kept = *even_error_last();
  even_link_close(&follower->link);
  even_follower_close_job(follower);
  even_follower_close_parcels(follower);
  even_text_free(&follower->brought);
  even_candidate_close(&follower->candidate);
  even_loop_close(&follower->loop);
  even_remote_start_free(&follower->start);
  even_device_list_free(&follower->own);
  even_signals_pipe_restore(&pipe_before);
  even_free(follower);
  *exit_code = status == EVEN_OK ? 0 : even_status_exit_code(status);
  (void)even_error_restore(&kept);
  return status;
}
