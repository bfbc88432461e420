/* Events of a Chrome trace: "X" complete, "b" and "e" the ends of what overlaps, "s" and "f" of an arrow, "M" names. */
#include "telemetry/trace.h"

#include <evenstep/types.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- names ---- */

static const char *const call_names[EVEN_RECORDED_COUNT] = {
#define CALL_NAME(name, number, text) [number] = text,
    EVEN_CALL_LIST(CALL_NAME)
#undef CALL_NAME
};

const char *even_call_name(int call) {
  return call > 0 && call < EVEN_RECORDED_COUNT ? call_names[call] : "?";
}

int even_call_number(const char *name) {
  for (int call = 1; call < EVEN_RECORDED_COUNT; call++) {
    if (strcmp(call_names[call], name) == 0) {
      return call;
    }
  }
  return 0;
}

const char *even_dtype_name(int dtype) {
  switch (dtype) {
#define DTYPE_NAME(name, number, bytes) \
  case number:                          \
    return #name;
    EVEN_DTYPE_LIST(DTYPE_NAME)
#undef DTYPE_NAME
    case EVEN_CALL_NONE:
      return NULL;
    default:
      return "?";
  }
}

const char *even_op_name(int op) {
  static const char *const names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};
  if (op == EVEN_CALL_NONE) {
    return NULL;
  }
  return op >= 0 && (size_t)op < sizeof names / sizeof names[0] ? names[op] : "?";
}

/* ---- events ---- */

static double microseconds(uint64_t ns, uint64_t origin_ns) {
  return (double)(int64_t)(ns - origin_ns) / 1e3;
}

static void begin(even_json *json, const char *name, const char *phase, int rank, int row) {
  even_json_object(json, NULL);
  even_json_string(json, "name", name);
  even_json_string(json, "ph", phase);
  even_json_integer(json, "pid", rank);
  even_json_integer(json, "tid", row);
}

void even_trace_name_write(even_json *json, const char *what, int rank, int row, const char *name) {
  begin(json, what, "M", rank, row);
  even_json_object(json, "args");
  even_json_string(json, "name", name);
  even_json_object_end(json);
  even_json_object_end(json);
}

void even_trace_row_name_write(even_json *json, int rank, int row) {
  char name[48];
  switch (row) {
    case EVEN_ROW_ENGINE:
      (void)snprintf(name, sizeof name, "communication thread");
      break;
    case EVEN_ROW_LATER:
      (void)snprintf(name, sizeof name, "asynchronous calls");
      break;
    case EVEN_ROW_FIRST:
      (void)snprintf(name, sizeof name, "calls");
      break;
    default:
      if (row >= EVEN_ROW_GPU) {
        (void)snprintf(name, sizeof name, "calls on cuda:%d", row - EVEN_ROW_GPU);
      } else {
        (void)snprintf(name, sizeof name, "calls of thread %d", row - EVEN_ROW_FIRST + 1);
      }
      break;
  }
  even_trace_name_write(json, "thread_name", rank, EVEN_TRACE_CALL_ROWS + row, name);
}

static const char *const span_names[EVEN_SPAN_COUNT] = {
#define SPAN_NAME(name, number, words) words,
    EVEN_SPAN_LIST(SPAN_NAME)
#undef SPAN_NAME
};

void even_trace_span_write(even_json *json, uint64_t origin_ns, int rank, const even_span_record *span) {
  begin(json, span_names[span->span], "X", rank, 1 + (int)span->span);
  even_json_number(json, "ts", microseconds(span->start_ns, origin_ns));
  even_json_number(json, "dur", (double)span->duration_ns / 1e3);
  even_json_object(json, "args");
  even_json_unsigned(json, "step", span->step);
  if (span->bytes > 0) {
    even_json_unsigned(json, "bytes", span->bytes);
  }
  even_json_object_end(json);
  even_json_object_end(json);
}

void even_trace_step_write(even_json *json, uint64_t origin_ns, int rank, const even_step_record *step) {
  char name[48];
  (void)snprintf(name, sizeof name, "step %" PRIu32, step->step);
  begin(json, name, "X", rank, 0);
  even_json_number(json, "ts", microseconds(step->end_ns - step->duration_ns, origin_ns));
  even_json_number(json, "dur", (double)step->duration_ns / 1e3);
  even_json_object(json, "args");
  even_json_unsigned(json, "samples", step->samples);
  even_json_object_end(json);
  even_json_object_end(json);
}

void even_trace_event_write(even_json *json, uint64_t origin_ns, int rank, const even_event_record *event) {
  begin(json, event->event == EVEN_EVENT_STALL ? "stall" : "event", "i", rank, EVEN_TRACE_EVENT_ROW);
  even_json_string(json, "s", "p");
  even_json_number(json, "ts", microseconds(event->at_ns, origin_ns));
  even_json_object(json, "args");
  even_json_string(json, "words", event->words);
  even_json_object_end(json);
  even_json_object_end(json);
}

static bool is_message(const even_call_record *record) {
  return even_call_is_message(record->call);
}

/* While the bytes moved: from when the last rank came, where that is known. */
static uint64_t moving_ns(const even_trace_call *call) {
  const even_call_record *record = &call->record;
  uint64_t end = record->start_ns + record->duration_ns;
  if (call->arrived_ns >= record->start_ns && call->arrived_ns < end) {
    return end - call->arrived_ns;
  }
  return record->duration_ns > record->wait_ns ? record->duration_ns - record->wait_ns : 0;
}

static void add_bandwidth(even_json *json, const even_trace_call *call) {
  const even_call_record *record = &call->record;
  uint64_t ns = moving_ns(call);
  if (ns > 0 && record->bytes > 0 && record->failed == 0) {
    double algorithm = (double)record->bytes / (double)ns; /* bytes a ns are GB a second */
    even_json_number(json, "algbw_GBps", algorithm);
    even_json_number(json, "busbw_GBps",
                     algorithm * even_call_bus_factor((even_recorded_call)record->call, (int)record->ranks));
  }
}

/* "shm 4 torch/default": what stands before the second blank is told elsewhere. */
static void add_group(even_json *json, const even_trace_call *call) {
  char engine[24] = "";
  const char *name = call->group == NULL ? NULL : strchr(call->group, ' ');
  name = name == NULL ? NULL : strchr(name + 1, ' ');
  if (name == NULL) {
    char mark[16];
    (void)snprintf(mark, sizeof mark, "%08" PRIx32, call->record.group);
    even_json_string(json, "group", mark);
    return;
  }
  (void)snprintf(engine, sizeof engine, "%.*s", (int)strcspn(call->group, " "), call->group);
  even_json_string(json, "group", name + 1);
  even_json_string(json, "engine", engine);
}

static void add_arguments(even_json *json, const even_trace_call *call) {
  const even_call_record *record = &call->record;
  even_json_object(json, "args");
  add_group(json, call);
  even_json_unsigned(json, "number", record->number);
  even_json_unsigned(json, "ranks", record->ranks);
  even_json_unsigned(json, "bytes", record->bytes);
  if (call->dtype != NULL) {
    even_json_string(json, "dtype", call->dtype);
  }
  if (call->op != NULL) {
    even_json_string(json, "op", call->op);
  }
  if (record->peer >= 0) {
    even_json_integer(json, is_message(record) ? "peer" : "root", record->peer);
  }
  if (is_message(record)) {
    even_json_unsigned(json, "tag", record->tag);
  }
  even_json_number(json, "waited_us", (double)record->wait_ns / 1e3);
  add_bandwidth(json, call);
  even_json_unsigned(json, "step", record->step);
  if (record->failed != 0) {
    even_json_bool(json, "failed", true);
  }
  even_json_object_end(json);
}

static void write_collective(even_json *json, uint64_t origin_ns, const even_trace_call *call) {
  const even_call_record *record = &call->record;
  begin(json, even_call_name(record->call), "X", call->rank, EVEN_TRACE_CALL_ROWS + record->row);
  even_json_string(json, "cat", "collective");
  even_json_number(json, "ts", microseconds(record->start_ns, origin_ns));
  even_json_number(json, "dur", (double)record->duration_ns / 1e3);
  add_arguments(json, call);
  even_json_object_end(json);
}

static void write_end(even_json *json, uint64_t at_ns, const even_trace_call *call, const char *phase,
                      uint64_t origin_ns) {
  const even_call_record *record = &call->record;
  char id[48];
  (void)snprintf(id, sizeof id, "%d.%" PRIx32 ".%" PRIu32, call->rank, record->group, record->number);
  begin(json, even_call_name(record->call), phase, call->rank, EVEN_TRACE_CALL_ROWS + record->row);
  even_json_string(json, "cat", "message");
  even_json_string(json, "id", id);
  even_json_number(json, "ts", microseconds(at_ns, origin_ns));
  if (phase[0] == 'b') {
    add_arguments(json, call);
  }
  even_json_object_end(json);
}

static void write_arrow(even_json *json, uint64_t origin_ns, const even_trace_call *call) {
  const even_call_record *record = &call->record;
  bool starts = is_message(record) ? record->call == EVEN_RECORDED_SEND : call->last;
  char id[24];
  (void)snprintf(id, sizeof id, "0x%" PRIx64, call->arrow);
  begin(json, is_message(record) ? "message" : "came last", starts ? "s" : "f", call->rank,
        EVEN_TRACE_CALL_ROWS + record->row);
  even_json_string(json, "cat", "arrow");
  even_json_string(json, "id", id);
  even_json_number(json, "ts",
                   microseconds(starts ? record->start_ns : record->start_ns + record->duration_ns, origin_ns));
  if (!starts) {
    even_json_string(json, "bp", "e");
  }
  even_json_object_end(json);
}

void even_trace_call_write(even_json *json, uint64_t origin_ns, const even_trace_call *call) {
  if (is_message(&call->record)) {
    write_end(json, call->record.start_ns, call, "b", origin_ns);
    write_end(json, call->record.start_ns + call->record.duration_ns, call, "e", origin_ns);
  } else {
    write_collective(json, origin_ns, call);
  }
  if (call->drawn) {
    write_arrow(json, origin_ns, call);
  }
}
