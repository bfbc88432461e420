/* Telemetry of ranks on other hosts: into the rings of this one, from which all who read it here have it. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/remote.h"
#include "telemetry/copy.h"

#include <inttypes.h>
#include <string.h>

static void shift(uint64_t *at, int64_t offset) {
  *at = (uint64_t)((int64_t)*at + offset);
}

static void pass_on(even_telemetry *ring, even_record *record, int64_t offset) {
  switch ((even_record_kind)record->kind) {
    case EVEN_RECORD_SPAN:
      shift(&record->as.span.start_ns, offset);
      even_telemetry_span(ring, &record->as.span);
      break;
    case EVEN_RECORD_STEP:
      shift(&record->as.step.end_ns, offset);
      even_telemetry_step(ring, &record->as.step);
      break;
    case EVEN_RECORD_EVENT:
      shift(&record->as.event.at_ns, offset);
      record->as.event.words[sizeof record->as.event.words - 1] = '\0';
      even_telemetry_event(ring, &record->as.event);
      break;
    case EVEN_RECORD_CALL:
      shift(&record->as.call.start_ns, offset);
      even_telemetry_call(ring, &record->as.call);
      break;
    case EVEN_RECORD_LEG:
      shift(&record->as.leg.at_ns, offset);
      even_telemetry_leg(ring, &record->as.leg);
      break;
    default:
      break;
  }
}

void even_remote_write_places(const even_telemetry_reader *reader, const even_record *records, size_t count,
                              even_text *out) {
  even_text_add(out, "{\"places\":[");
  for (size_t i = 0; i < count; i++) {
    uint32_t rank = records[i].rank;
    if (i == 0 || records[i - 1].rank != rank) {
      even_text_format(out, "%s[%" PRIu32 ",%" PRIu64 "]", i == 0 ? "" : ",", rank,
                       even_telemetry_reader_place(reader, (int)rank));
    }
  }
  even_text_add(out, "]}");
}

void even_remote_each_place(const json_t *places, void (*take)(void *context, int rank, uint64_t place),
                            void *context) {
  for (size_t i = 0; i < json_array_size(places); i++) {
    const json_t *one = json_array_get(places, i);
    json_int_t rank = json_integer_value(json_array_get(one, 0));
    json_int_t place = json_integer_value(json_array_get(one, 1));
    bool numbers = json_is_integer(json_array_get(one, 0)) && json_is_integer(json_array_get(one, 1));
    if (numbers && rank >= 0 && rank < EVEN_TELEMETRY_MOST_RANKS && place >= 0) {
      take(context, (int)rank, (uint64_t)place);
    }
  }
}

void even_remote_write_adopt(const even_job *job, const even_host_agent *agent, even_text *out) {
  bool any = false;
  even_text_format(out, "{\"host\":%zu,\"places\":[", agent->index);
  for (size_t rank = 0; rank < job->count && job->hosts->rings != NULL; rank++) {
    if (even_host_agent_has(agent, rank) && job->hosts->rings[rank] != NULL) {
      even_text_format(out, "%s[%zu,%" PRIu64 "]", any ? "," : "", rank,
                       even_telemetry_source(job->hosts->rings[rank]));
      any = true;
    }
  }
  even_text_add(out, "]}");
}

void even_remote_begin_places(const even_host_agent *agent) {
  const even_hosts *hosts = agent->hosts;
  for (size_t rank = 0; hosts->rings != NULL && rank < hosts->job->count; rank++) {
    if (even_host_agent_has(agent, rank)) {
      even_telemetry_copied(hosts->rings[rank], 0);
    }
  }
}

typedef struct copying {
  even_job *job;
  const even_host_agent *agent;
} copying;

static void note_place(void *context, int rank, uint64_t place) {
  const copying *made = context;
  if (even_host_agent_has(made->agent, (size_t)rank) && (size_t)rank < made->job->count) {
    even_telemetry_copied(made->job->hosts->rings[rank], place);
  }
}

even_status even_remote_take_records(even_job *job, const even_host_agent *agent, const even_message *message) {
  json_t *content = NULL;
  if (message->data_bytes % sizeof(even_record) != 0) {
    return even_fail(EVEN_ERR_INPUT, "%zu bytes of telemetry", message->data_bytes);
  }
  EVEN_TRY(even_json_parse("what another host says", message->json, message->json_bytes, &content));
  for (size_t at = 0; at < message->data_bytes && job->hosts->rings != NULL; at += sizeof(even_record)) {
    even_record record;
    memcpy(&record, message->data + at, sizeof record);
    if (even_host_agent_has(agent, record.rank)) {
      pass_on(job->hosts->rings[record.rank], &record, agent->link->offset_ns);
    }
  }
  if (job->hosts->rings != NULL) {
    even_remote_each_place(json_object_get(content, "places"), note_place, &(copying){job, agent});
  }
  json_decref(content);
  return EVEN_OK;
}
