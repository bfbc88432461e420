/* What agents of other hosts say, byte by byte: messages, and the JSON in those that start an attempt, or say who goes
 * on in it. */
#include "base/json_reader.h"
#include "orchestrator/boards.h"
#include "orchestrator/message.h"
#include "orchestrator/parcel_wire.h"
#include "orchestrator/remote_start.h"
#include "orchestrator/standing.h"
#include "orchestrator/usages.h"

#include <math.h>

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { RANKS = 4 };

/* Numbers that are amounts, of ranks that are there. */
static void check_usage(void *context, int rank, const even_rank_usage *usage, const even_gpu_sample *gpu) {
  (void)context;
  if (rank < 2 || rank >= RANKS || !isfinite(usage->cpu_seconds) || usage->cpu_seconds < 0 ||
      usage->throttled_seconds < 0 || (gpu != NULL && gpu->user_count > 1)) {
    abort();
  }
}

/* A job of two hosts, of two ranks each, none of which has a process: its leader's, or the other agent's. */
static even_job *new_job(bool leads) {
  static even_agent_params params = {.shrink = true, .observer = {.usage = check_usage}};
  static even_job_rank ranks[RANKS];
  static even_job jobs[2];
  even_job *job = &jobs[leads ? 0 : 1];
  if (job->generation != NULL) {
    even_job_standing_close(job);
    even_job_generations_close(job);
  }
  *job = (even_job){.params = &params,
                    .ranks = ranks,
                    .count = RANKS,
                    .first = leads ? 0 : 2,
                    .local = 2,
                    .groups = 2,
                    .most_groups = 2,
                    .master_address = "10.0.0.1",
                    .generation_fd = -1};
  if (even_job_generations_open(job) != EVEN_OK || even_job_generations_begin(job) != EVEN_OK ||
      even_job_standing_open(job) != EVEN_OK) {
    abort();
  }
  return job;
}

static void say_who_goes_on(const even_message *message) {
  static even_link link = {.fd = -1, .peer = "10.0.0.2"};
  even_host_agent agent = {.index = 1, .name = "there", .link = &link, .first = 2, .count = 2};
  json_t *content = NULL;
  if (even_json_parse("noise", message->json, message->json_bytes, &content) != EVEN_OK) {
    return;
  }
  even_job *leader = new_job(true);
  (void)!even_usages_take(leader, &agent, content);
  even_job *other = new_job(false);
  (void)!even_job_standing_take(leader, &agent, content);
  (void)!even_job_standing_take(other, NULL, content);
  (void)!even_boards_take(leader, &agent, content);
  if (even_boards_follow(other, content) == EVEN_OK && even_generation_number(other->generation) > 1) {
    abort();
  }
  json_decref(content);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  size_t at = 0;
  size_t used = 0;
  size_t wanted = 0;
  even_message message;
  while (even_message_next(data + at, size - at, &message, &used, &wanted) == EVEN_OK && used > 0) {
    even_remote_start start;
    if (used > size - at || wanted != used || message.json_bytes + message.data_bytes + EVEN_MESSAGE_HEAD != used ||
        message.data_bytes > even_message_most_data(message.kind)) {
      abort();
    }
    if (even_remote_start_read(message.json, message.json_bytes, &start) == EVEN_OK &&
        (start.first + start.count > start.world || start.command[0] == NULL || start.group >= start.groups)) {
      abort();
    }
    even_remote_start_free(&start);
    even_parcel_note note;
    if (even_parcel_note_read(&message, 8, &note) == EVEN_OK &&
        (note.parcel.to < 0 || note.parcel.to >= 8 || note.parcel.from < 0 || note.parcel.from >= 8 || note.host >= 8 ||
         note.parcel.bytes > INT64_MAX || note.at > INT64_MAX)) {
      abort();
    }
    say_who_goes_on(&message);
    at += used;
  }
  return 0;
}
