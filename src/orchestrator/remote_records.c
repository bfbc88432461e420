/* Telemetry of ranks on other hosts: into the rings of this one, from which all who read it here have it. */
#include "base/fail.h"
#include "orchestrator/remote.h"

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

even_status even_remote_take_records(even_job *job, const even_host_agent *agent, const even_message *message) {
  if (message->data_bytes % sizeof(even_record) != 0) {
    return even_fail(EVEN_ERR_INPUT, "%zu bytes of telemetry", message->data_bytes);
  }
  for (size_t at = 0; at < message->data_bytes && job->hosts->rings != NULL; at += sizeof(even_record)) {
    even_record record;
    memcpy(&record, message->data + at, sizeof record);
    if (even_host_agent_has(agent, record.rank)) {
      pass_on(job->hosts->rings[record.rank], &record, agent->link->offset_ns);
    }
  }
  return EVEN_OK;
}
