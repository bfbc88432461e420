/* evenstep agent: says what its host has, does its part of each attempt that the leader asks for. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/estate.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/hold.h"
#include "orchestrator/invitation.h"
#include "orchestrator/job_attempt.h"
#include "orchestrator/outlast.h"
#include "os/pipe.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { TURN_MS = 100 };

static void on_ready(void *context, even_link *link) {
  (void)link;
  even_follower_greet(context);
}

static void on_ended(void *context, even_link *link) {
  even_follower *follower = context;
  follower->gone = true;
  follower->closed = even_link_was_closed(link);
  even_follower_unlink(follower);
  even_parcels_lost(follower->parcels, 0);
  if (!follower->refused) {
    follower->why = *even_link_why(link);
  }
}

static even_status turn(even_follower *follower) {
  if (follower->open && follower->job.loop.fd >= 0) {
    EVEN_TRY(even_loop_turn(&follower->job.loop, TURN_MS));
    even_job_drain_tick(&follower->job);
  } else {
    EVEN_TRY(even_loop_turn(&follower->loop, TURN_MS));
    follower->ended = follower->ended || even_signals_end_pending() != 0;
  }
  even_link_tick(&follower->link, false);
  even_follower_say_places(follower);
  even_parcels_tick(follower->parcels);
  even_bring_take_tick(follower->brings);
  return EVEN_OK;
}

/* Nobody can take the leader's place: where its connection broke, nobody here knows which of the two was cut off. */
static void note_cut_off(const even_follower *follower) {
  char words[800];
  if (follower->candidate.voter != NULL || follower->start.run_folder == NULL) {
    return;
  }
  (void)snprintf(
      words, sizeof words, "the leader is lost, or this host is cut off from it (%.500s): the ranks here have ended%s",
      follower->why.what,
      follower->launched ? ""
                         : ", and their agent ends; a leader that lives goes on, and starts this host again when it "
                           "reaches it");
  even_estate_note_in(follower->start.run_folder, words);
}

/* The leader is gone, or is none any more: nothing of its attempt is left here. */
static even_status find_next(even_follower *follower, even_candidate_turn *turn) {
  note_cut_off(follower);
  even_follower_untell_notice(follower);
  even_link_close(&follower->link);
  even_warm_part_close(&follower->next);
  even_follower_close_job(follower);
  even_follower_close_parcels(follower);
  follower->wait_until_ns = 0;
  follower->waited = false;
  EVEN_TRY(even_candidate_await(&follower->candidate, &follower->loop, &follower->calls, &follower->link, turn));
  follower->gone = *turn != EVEN_CANDIDATE_SERVE;
  return EVEN_OK;
}

static even_status serve_leaders(even_follower *follower, bool *leads) {
  while (!follower->ended && !follower->refused) {
    even_candidate_turn next = EVEN_CANDIDATE_SERVE;
    EVEN_TRY(turn(follower));
    if (even_follower_must_seek(follower)) {
      EVEN_TRY(even_follower_seek(follower));
      continue;
    }
    if (follower->asked) {
      EVEN_TRY(even_follower_run_attempt(follower));
    }
    if (follower->leads || follower->gave_up) {
      next = follower->leads ? EVEN_CANDIDATE_LEAD : EVEN_CANDIDATE_END;
    } else if (even_follower_may_wait(follower)) {
      EVEN_TRY(even_follower_wait(follower));
    } else if (follower->checks != NULL) {
      EVEN_TRY(even_follower_answer_late(follower));
    } else if (!follower->ended && even_follower_is_leaderless(follower)) {
      EVEN_TRY(find_next(follower, &next));
    }
    *leads = next == EVEN_CANDIDATE_LEAD;
    if (next != EVEN_CANDIDATE_SERVE) {
      break;
    }
  }
  return EVEN_OK;
}

/* Those that may be asked where the leader is; the key is none of that. */
static even_status name_hosts(even_follower *follower, const char *line) {
  EVEN_TRY(even_json_parse("the leader's invitation", line, strlen(line), &follower->named));
  const char *digits = even_json_text(follower->named, "key");
  explicit_bzero((char *)(uintptr_t)digits, strlen(digits));
  return EVEN_OK;
}

/* Of an agent that the leader has started it is a pipe from there, which ranks would inherit, and which stays open for
 * as long as the leader lives: a script that reads it would wait. */
static even_status end_input(const even_follower *follower) {
  bool piped = follower->joins == NULL && !follower->launched;
  return piped ? even_pipe_empty_input() : EVEN_OK;
}

/* None is asked where the agent before had one (*left: its ranks run). */
static even_status find_leader(even_follower *follower, const char *line) {
  if (even_outlast_due(follower->legacy)) {
    even_status resumed = end_input(follower);
    resumed = resumed == EVEN_OK ? even_follower_resume(follower) : resumed;
    if (resumed != EVEN_OK) {
      even_legacy_ask_again(follower->legacy);
      return resumed;
    }
    return even_follower_run_attempt(follower);
  }
  even_status status =
      even_invitation_accept(line, &follower->loop, &follower->calls, &follower->link, &follower->host);
  EVEN_TRY(follower->refused ? EVEN_OK : status); /* a leader that has said why may be gone already */
  follower->gone = false;                         /* connections that came to nothing were */
  return end_input(follower);                     /* by which a leader that was sought says whether it waits still */
}

static even_status serve(even_follower *follower, const char *line, bool *met, even_estate **estate) {
  bool leads = false;
  follower->calls =
      (even_link_calls){.context = follower, .ready = on_ready, .message = even_follower_hear, .ended = on_ended};
  EVEN_TRY(even_loop_open(&follower->loop));
  EVEN_TRY(follower->joins == NULL ? EVEN_OK : name_hosts(follower, line));
  even_status status = find_leader(follower, line);
  EVEN_TRY(status);
  status = serve_leaders(follower, &leads);
  *met = follower->taken;
  EVEN_TRY(status);
  if (leads) {
    EVEN_TRY(even_candidate_inherit(&follower->candidate, estate));
    (*estate)->notice = follower->job.own_notice;
    (*estate)->memory = follower->kept.host;
    follower->kept.host = NULL;
    return EVEN_OK;
  }
  return follower->ended ? EVEN_OK : even_error_restore(&follower->why);
}

static void release(even_follower *follower) {
  even_link_close(&follower->link);
  even_warm_part_close(&follower->next);
  even_follower_close_job(follower);
  even_follower_close_parcels(follower);
  even_bring_kept_free(&follower->kept);
  even_text_free(&follower->facts);
  even_follower_forget_left(follower);
  json_decref(follower->checks);
  json_decref(follower->pointed);
  json_decref(follower->named);
  even_loop_close(&follower->loop);
  even_remote_start_free(&follower->start);
  even_device_list_free(&follower->own);
  even_device_list_free(&follower->whole);
  even_free(follower);
}

void even_hold_free(even_follower *follower) {
  if (follower == NULL) {
    return;
  }
  if (follower->running) {
    follower->leads = false;
    even_follower_end_ranks(follower);
    even_status status = EVEN_OK;
    while (status == EVEN_OK && even_job_attempt_lives(&follower->job)) {
      status = even_job_turn(&follower->job);
    }
    if (even_job_finish_attempt(&follower->job, status) != EVEN_OK) {
      even_error_clear(); /* what is left its guardian ends */
    }
    follower->running = false;
  }
  release(follower);
}

/* Its ranks wait for what it does. */
static bool leads_with_ranks(const even_follower *follower, even_estate **estate) {
  return follower->running && estate != NULL && *estate != NULL;
}

even_status even_hosts_serve(const char *invitation, const even_join_wish *joins, bool *met, even_estate **estate,
                             struct even_legacy *legacy, int *exit_code) {
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
  follower->met = met;
  follower->invitation = invitation;
  follower->legacy = legacy;
  follower->kept.changed = even_follower_kept_changed;
  follower->kept.context = follower;
  even_outlast_part_open(&follower->part);
  follower->launched = joins == NULL && estate == NULL;
  follower->link.fd = -1;
  follower->loop.fd = -1;
  follower->telemetry_fd = -1;
  follower->candidate.listener = -1;
  if (estate != NULL) {
    *estate = NULL;
  }
  if (estate != NULL && !even_outlast_due(legacy)) { /* else nobody takes the leader's place */
    even_candidate_open(&follower->candidate, invitation);
  }
  even_status status = serve(follower, invitation, met, estate);
  const even_error kept = *even_error_last();
  even_candidate_close(&follower->candidate);
  if (status == EVEN_OK && leads_with_ranks(follower, estate)) {
    (*estate)->holds = follower;
  } else {
    release(follower);
  }
  even_signals_pipe_restore(&pipe_before);
  *exit_code = status == EVEN_OK ? 0 : even_status_exit_code(status);
  (void)even_error_restore(&kept);
  return status;
}
