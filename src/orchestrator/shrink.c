/* A rank was killed: whether the others go on without it, in their processes (--recovery shrink). */
#include "base/alloc.h"
#include "base/fail.h"
#include "fault/generation.h"
#include "orchestrator/job.h"
#include "os/file.h"
#include "os/pipe.h"

#include <stdio.h>
#include <string.h>

even_status even_job_generations_open(even_job *job) {
  if (!job->params->shrink) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&job->lost, job->count));
  EVEN_TRY(even_generation_create((int)job->count, &job->generation_fd));
  EVEN_TRY(even_generation_open(job->generation_fd, &job->generation));
  return even_job_replace_open(job);
}

void even_job_generations_close(even_job *job) {
  even_job_replace_close(job);
  even_generation_close(job->generation);
  even_pipe_close(job->generation_fd);
  even_free(job->lost);
  job->generation = NULL;
  job->generation_fd = -1;
  job->lost = NULL;
}

even_status even_job_generations_begin(even_job *job) {
  bool *members = NULL;
  if (job->generation == NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&members, job->count));
  even_job_replace_begin(job, members);
  even_generation_begin(job->generation, members);
  even_free(members);
  memset(job->lost, 0, job->count * sizeof *job->lost);
  return EVEN_OK;
}

void even_job_generations_refuse(even_job *job) {
  if (job->generation != NULL) {
    even_generation_refuse(job->generation);
  }
}

bool even_job_lost(const even_job *job, size_t rank) {
  return job->lost != NULL && job->lost[rank];
}

void even_job_name_members(const even_job *job, even_text *out) {
  size_t members = even_job_members(job);
  size_t named = 0;
  even_text_add(out, members == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].alive && !even_job_is_outside(job, i)) {
      named++;
      even_text_format(out, "%s%zu", named == 1 ? "" : named == members ? " and " : ", ", i);
    }
  }
}

/* Why those that live do not go on; false: they do. */
static bool hindered(const even_job *job, const bool *gone, even_text *why) {
  int rank = -1;
  char words[EVEN_GENERATION_WORDS];
  size_t members = even_job_members(job);
  int least = job->params->least_ranks > 1 ? job->params->least_ranks : 1;
  if (job->places == NULL && members < (size_t)least) {
    even_text_format(why, "%zu are left, and --min-ranks is %d", members, least);
    return true;
  }
  if (!even_generation_able(job->generation, gone, &rank, words)) {
    even_text_format(why, "rank %d: %s", rank, words);
    return true;
  }
  return false;
}

/* All that do not live: also those that ended well, for whom nobody waits any more. */
static bool *gone_of(const even_job *job) {
  bool *gone = NULL;
  if (EVEN_NEW_ARRAY(&gone, job->count) != EVEN_OK) {
    return NULL;
  }
  for (size_t i = 0; i < job->count; i++) {
    gone[i] = !job->ranks[i].alive || even_job_is_outside(job, i);
  }
  return gone;
}

void even_job_left_well(even_job *job) {
  if (job->generation == NULL || job->stage != EVEN_JOB_RUNS || even_job_members(job) == 0 ||
      even_generation_number(job->generation) == 0) {
    return;
  }
  bool *gone = gone_of(job);
  if (gone != NULL) {
    (void)even_generation_lose(job->generation, gone);
    even_free(gone);
  }
}

bool even_job_goes_on_without(even_job *job, size_t rank) {
  even_text words = EVEN_TEXT_EMPTY;
  bool missed = job->ranks[rank].end.signal != 0 || even_job_is_new(job, rank);
  if (job->generation == NULL || job->stage != EVEN_JOB_RUNS || !missed || job->ranks[rank].stopped_by_agent ||
      even_job_members(job) == 0) {
    return false;
  }
  bool *gone = gone_of(job);
  if (gone == NULL) {
    return false;
  }
  bool goes_on = !hindered(job, gone, &words);
  if (goes_on) {
    job->lost[rank] = true;
    even_job_replace_ask(job);
    uint32_t number = even_generation_lose(job->generation, gone);
    (void)even_process_signal_group(job->ranks[rank].pid, SIGKILL); /* workers that it has left */
    even_job_name_members(job, &words);
    even_job_tell_end(job, rank);
    even_job_notice(job, "generation %u: %s go%s on without rank %zu", number, even_text_string(&words),
                    even_job_members(job) == 1 ? "es" : "", rank);
    even_job_snapshot_finish(job, rank); /* the others go on meanwhile */
    even_job_replace_lost(job, rank);
  } else {
    even_job_notice(job, "the others cannot go on without rank %zu: %s", rank, even_text_string(&words));
  }
  even_free(gone);
  even_text_free(&words);
  return goes_on;
}
