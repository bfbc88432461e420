/* With --recovery, a host's ranks outlast their leader: they wait, as for any generation, until the next one says who
 * goes on. They apply no step meanwhile, for some of those with whom they would are gone. */
#include "base/fail.h"
#include "orchestrator/boards.h"
#include "orchestrator/estate.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/gifts.h"
#include "orchestrator/hold.h"
#include "orchestrator/job_attempt.h"
#include "orchestrator/remote.h"
#include "orchestrator/usages.h"
#include "os/pipe.h"

#include <string.h>

/* All that live and are members could go on without others. Who waits for the state of training could not: under the
 * next leader nobody knows any more who gives it to whom. */
static bool could_go_on(const even_job *job) {
  uint32_t number = even_generation_number(job->generation);
  if (even_gifts_travel(job) || even_gifts_any_lacks(job)) {
    return false;
  }
  for (size_t i = 0; i < job->count; i++) {
    even_generation_words words;
    even_generation_hear(job->generation, (int)i, &words);
    if (even_job_is_here(job, i) && job->ranks[i].alive && even_generation_has(job->generation, (int)i, number) &&
        (!words.said || words.why[0] != '\0')) {
      return false;
    }
  }
  return !even_generation_refused(job->generation);
}

/* Of notice of this host the leader may not have heard; where ranks have ended for it, it has. */
bool even_follower_may_hold(const even_follower *follower) {
  const even_job *job = &follower->job;
  const even_candidate *candidate = &follower->candidate;
  even_voter_view view;
  if (!follower->running || follower->ended || follower->gave_up || follower->checks != NULL ||
      candidate->voter == NULL || candidate->estate == NULL || job->generation == NULL || job->stage != EVEN_JOB_RUNS ||
      job->alive == 0 || (job->draining != 0 && job->ended > 0)) {
    return false;
  }
  even_voter_look(candidate->voter, &view);
  return view.newest.generation > 0 && !even_leadership_ended(&view.newest) && view.voters > 1 && could_go_on(job);
}

/* Turns the job meanwhile; false: there is nothing left to wait for. */
static bool await_turn(void *context) {
  even_follower *follower = context;
  even_job *job = &follower->job;
  if (even_job_turn(job) != EVEN_OK) {
    job->failure = job->failure.status == EVEN_OK ? *even_error_last() : job->failure; /* its next turn says so */
    follower->stopped = true;
  }
  follower->stopped =
      follower->stopped || follower->ended || !even_job_attempt_lives(job) || job->stage != EVEN_JOB_RUNS;
  return !follower->stopped;
}

even_status even_follower_outlast(even_follower *follower) {
  even_candidate_turn next = EVEN_CANDIDATE_END;
  even_link_close(&follower->link);
  even_warm_part_close(&follower->next); /* who asked for it is gone, and the next one knows nothing of it */
  even_gifts_close(&follower->job);      /* under the next leader hosts have other numbers */
  even_follower_close_parcels(follower);
  follower->job.parcels = NULL;
  follower->led = follower->held ? follower->led : follower->candidate.generation;
  even_follower_untell_notice(follower);
  follower->held = true;
  follower->stopped = false;
  follower->candidate.pause = await_turn;
  follower->candidate.pause_context = follower;
  even_status status =
      even_candidate_await(&follower->candidate, &follower->loop, &follower->calls, &follower->link, &next);
  follower->candidate.pause = NULL;
  follower->gone = next != EVEN_CANDIDATE_SERVE;
  follower->leads = next == EVEN_CANDIDATE_LEAD;
  if (next == EVEN_CANDIDATE_END && !follower->stopped) {
    follower->gave_up = true;
    even_follower_end_ranks(follower);
  }
  return status;
}

void even_follower_yield(even_follower *follower, const json_t *asks) {
  json_decref(follower->checks);
  follower->checks = json_deep_copy(asks);
  even_follower_end_ranks(follower);
}

/* What was on its way to an agent that was killed nobody has read: the records are in their rings still. */
static void send_again(void *context, int rank, uint64_t place) {
  const even_follower *follower = context;
  if (follower->reader != NULL) {
    even_telemetry_reader_go_on(follower->reader, rank, place);
  }
}

even_status even_follower_adopted(even_follower *follower, const json_t *content) {
  const json_t *number = json_object_get(content, "host");
  if (!follower->held || !json_is_integer(number)) {
    return even_fail(EVEN_ERR_INPUT, "a leader goes on with an attempt that does not run here");
  }
  follower->host = (int)json_integer_value(number);
  EVEN_TRY(even_follower_open_parcels(follower));
  follower->job.parcels = follower->parcels;
  follower->job.number = follower->host;
  even_gifts_close(&follower->job); /* of an agent that has taken a killed one's place */
  EVEN_TRY(even_gifts_open(&follower->job));
  EVEN_TRY(even_gifts_begin(&follower->job));
  even_remote_each_place(json_object_get(content, "places"), send_again, follower);
  follower->held = false;
  follower->wait_until_ns = 0;
  follower->taken = true;
  even_follower_interface(follower, follower->job.interface); /* where another agent has opened the job, it is new */
  even_follower_known(follower);
  even_boards_retell(&follower->job);
  even_usages_retell(follower->job.usages);
  even_follower_say_untold(follower);
  even_follower_say_ranks(follower);
  if (!follower->running) {
    even_follower_say_settled(follower);
  }
  return EVEN_OK;
}

/* ---- of one that leads ---- */

const even_job *even_hold_job(const even_follower *follower) {
  return &follower->job;
}

uint64_t even_hold_led(const even_follower *follower) {
  return follower->led;
}

const char *even_hold_facts(const even_follower *follower) {
  return even_text_string(&follower->facts);
}

int even_hold_telemetry(even_follower *follower) {
  int fd = follower->telemetry_fd;
  follower->telemetry_fd = -1;
  return fd;
}

even_status even_hold_follow(even_follower *follower, const json_t *generation) {
  return even_boards_follow(&follower->job, generation);
}

even_job *even_hold_hand_over(even_follower *follower) {
  even_job *job = &follower->job;
  even_loop_remove(&job->loop, &follower->watch);
  even_telemetry_reader_close(follower->reader);
  follower->reader = NULL;
  follower->running = false;
  follower->open = false; /* whoever runs the job closes it */
  follower->handed_over = true;
  job->follower = NULL;
  job->adopted = true;
  job->late = false; /* whoever leads has all ranks of an attempt start */
  return job;
}
