/* What agents of other hosts say, byte by byte: messages, and the JSON in those that greet, tell what a host has, start
 * an attempt, say who goes on in it, who the members are, who waits in init_process_group, what is left to the next
 * leader, what still runs. What a job hears of another host's ranks, and what makes an agent look at files, is
 * hearing_fuzz.c's. */
#include "base/alloc.h"
#include "base/json_reader.h"
#include "orchestrator/adopt.h"
#include "orchestrator/boards.h"
#include "orchestrator/candidate.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/message.h"
#include "orchestrator/openings.h"
#include "orchestrator/parcel_wire.h"
#include "orchestrator/remote_start.h"
#include "orchestrator/standing.h"
#include "orchestrator/succession.h"
#include "orchestrator/usages.h"

#include <math.h>

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { RANKS = 4, MEMBER = 7 };

static even_follower held; /* an agent whose ranks may outlast their leader: `held.job` is the other agent's */

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
  static even_job leader;
  even_job *job = leads ? &leader : &held.job;
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

static json_t *parsed(const char *text) {
  json_t *out = NULL;
  if (even_json_parse("what is so", text, strlen(text), &out) != EVEN_OK) {
    abort();
  }
  return out;
}

/* Of what an agent greets with, and what its host has. */
static void meet(even_host_agent *agent, const json_t *content) {
  static json_t *ours;
  even_device_list devices;
  if (ours == NULL) {
    ours = parsed(
        "{\"folder\":true,\"machine\":\"m\",\"files\":{\"t.py\":\"1\"},\"below\":{\"a/b.py\":\"2\"},"
        "\"packages\":{\"python\":\"3\",\"torch\":\"2\",\"modules\":{\"numpy\":\"1\"},\"ucx\":\"1\"},"
        "\"data\":{\"d\":{\"kind\":\"file\",\"bytes\":4,\"sum\":\"0\"},\"f\":{\"kind\":\"folder\","
        "\"empty\":false}}}");
  }
  (void)!even_hosts_check_version(agent->hosts, content, agent->name);
  (void)!even_host_facts_compare(ours, content, agent->name, "/work");
  (void)!even_host_data_compare(json_object_get(ours, "data"), json_object_get(content, "data"), agent->name, true);
  if (even_host_facts_devices(content, &devices) == EVEN_OK && devices.count > EVEN_TELEMETRY_MOST_RANKS) {
    abort();
  }
  even_device_list_free(&devices);
}

/* Of what a leader leaves. */
static void inherit(const even_estate *estate) {
  even_estate_host was;
  even_text names = EVEN_TEXT_EMPTY;
  char **words = NULL;
  size_t count = 0;
  static const even_agent_params params = {.max_restarts = 3};
  even_job job = {.params = &params};
  int port = even_estate_join_port(estate);
  const char *own = even_estate_own_name(estate);
  if (even_estate_hosts(estate, &names) != EVEN_OK || even_estate_predecessor(estate) == NULL || port < 0 ||
      port > UINT16_MAX || own == NULL || even_estate_words(estate, "arguments", &words, &count) != EVEN_OK) {
    abort();
  }
  (void)even_estate_witness(estate);
  if (even_estate_find(estate, own, &was) &&
      (was.first > UINT32_MAX || was.first_spare > UINT32_MAX || was.spares > UINT32_MAX)) {
    abort();
  }
  double quota = even_estate_quota(estate, own, 0);
  if (!isnan(quota) && !(quota > 0 && quota <= 1)) {
    abort();
  }
  (void)!even_estate_take(estate, &job);
  if (job.shortages.count > EVEN_SHORTAGES_MOST || strlen(job.id) != 32) {
    abort();
  }
  even_text_free(&job.foreign);
  even_text_free(&job.lineage);
  even_text_free(&job.began);
  even_text_free(&job.resume);
  even_text_free(&names);
  even_free((void *)words);
}

/* Of what an agent says of ranks that outlasted their leader, which this host's did, too. */
static void find_running(even_host_agent *agent, json_t *content) {
  static json_t *left;
  static even_estate estate = {.self = MEMBER, .holds = &held};
  static even_link link = {.fd = -1, .peer = "10.0.0.2"};
  even_host_agent agents[2] = {{.name = "here"}, *agent};
  even_hosts hosts = {.params = {.estate = &estate}, .agents = agents, .count = 2};
  if (left == NULL) {
    left = parsed(
        "{\"hosts\":[{\"name\":\"here\",\"member\":7,\"first\":2,\"devices\":[\"cpu\",\"cpu\"]},"
        "{\"name\":\"there\",\"member\":8,\"first\":0,\"devices\":[\"cpu\",\"cpu\"]}]}");
  }
  estate.content = left;
  agents[1].hosts = &hosts;
  agents[1].link = &link;
  agents[1].runs = content;
  even_job *job = new_job(false);
  job->ranks[2].alive = true;
  if (even_adopt_may(&hosts) && even_generation_refused(job->generation)) {
    abort();
  }
  job->ranks[2].alive = false;
}

static void say_who_votes(even_host_agent *agent, const even_message *message, const json_t *content) {
  static const even_agent_params params = {.max_restarts = 3};
  even_candidate candidate = {.listener = -1};
  even_link link = {.fd = -1, .peer = "10.0.0.2"};
  even_job job = {.params = &params, .hosts = agent->hosts};
  const even_message members = {.kind = EVEN_MESSAGE_MEMBERS, .json = message->json, .json_bytes = message->json_bytes};
  (void)!even_candidate_take(&candidate, &link, &members);
  if (candidate.voter != NULL) { /* it has no key with which it could be one */
    abort();
  }
  even_candidate_close(&candidate);
  agent->member = MEMBER;
  even_succession_take_votes(&job, agent, content);
  if (agent->voter_port < 0 || agent->voter_port > UINT16_MAX) {
    abort();
  }
}

static void read_others(const even_message *message) {
  json_t *content = NULL;
  even_estate estate = {.self = MEMBER};
  even_remote_start start = {.job = ""};
  even_hosts hosts = {.params = {.program = "evenstep"}, .count = 1};
  even_host_agent agent = {.index = 1, .name = "there", .hosts = &hosts};
  if (even_estate_read(message->json, message->json_bytes, &estate.content) == EVEN_OK) {
    inherit(&estate);
    json_decref(estate.content);
  }
  if (even_json_parse("noise", message->json, message->json_bytes, &content) != EVEN_OK) {
    return;
  }
  meet(&agent, content);
  if (even_remote_start_of(json_object_get(content, "part"), &start) == EVEN_OK && /* PLACES */
      start.first + start.count > start.world) {
    abort();
  }
  even_remote_start_free(&start);
  find_running(&agent, content);
  say_who_votes(&agent, message, content);
  json_decref(content);
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
  if (even_job_openings_take(other, content, 1) == EVEN_OK &&
      (other->openings.heard_time < 1 || other->openings.heard_waiting < 1 || other->openings.heard_waiting > RANKS)) {
    abort();
  }
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
    read_others(&message);
    at += used;
  }
  return 0;
}
