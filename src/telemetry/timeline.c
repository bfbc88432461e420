/* A rank's own timeline file: a thread reads the ring and appends events. */
#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/futex.h"
#include "os/host.h"
#include "os/pipe.h"
#include "os/stream.h"
#include "os/thread.h"
#include "telemetry/trace.h"

#include <evenstep/telemetry.h>
#include <stdio.h>
#include <string.h>

static const uint64_t EVERY_NS = 250000000;
enum { RECORDS_AT_ONCE = 256, ROWS = EVEN_TRACE_CALL_ROWS + EVEN_ROW_MOST + 1 };

typedef struct group_name {
  uint32_t mark;
  char words[EVEN_EVENT_WORDS_BYTES];
} group_name;

struct even_timeline {
  even_telemetry_reader *reader;
  even_output output;
  char *path;
  int rank;
  uint32_t process_mark;
  pthread_t thread;
  _Atomic uint32_t ends;
  /* the thread's: */
  even_text text; /* of one round */
  bool begun;     /* an event was written: a comma comes before the next */
  bool named[ROWS];
  group_name *groups;
  size_t group_count;
  uint64_t written;
  uint64_t lost;
  even_status broken;
  even_error error;
};

/* ---- events ---- */

static even_json begin_event(even_timeline *timeline) {
  even_text_add(&timeline->text, timeline->begun ? ",\n" : "[");
  timeline->begun = true;
  return even_json_begin(&timeline->text, 0);
}

static void name_row(even_timeline *timeline, int row) {
  static const char *const span_names[EVEN_SPAN_COUNT] = {
#define SPAN_NAME(name, number, words) words,
      EVEN_SPAN_LIST(SPAN_NAME)
#undef SPAN_NAME
  };
  if (timeline->named[row]) {
    return;
  }
  timeline->named[row] = true;
  even_json json = begin_event(timeline);
  if (row >= EVEN_TRACE_CALL_ROWS) {
    even_trace_row_name_write(&json, timeline->rank, row - EVEN_TRACE_CALL_ROWS);
  } else {
    const char *name = row == 0 ? "steps" : row == EVEN_TRACE_EVENT_ROW ? "events" : span_names[row - 1];
    even_trace_name_write(&json, "thread_name", timeline->rank, row, name);
  }
}

/* Whose file this is, and how its clock is set: files of several hosts are laid on one axis by it. */
static void write_head(even_timeline *timeline) {
  even_host_names names;
  char title[192];
  char identity[256];
  if (even_host_names_read(&names) != EVEN_OK) {
    names.host[0] = '\0';
  }
  even_host_identity(identity, sizeof identity);
  (void)snprintf(title, sizeof title, "rank %d on %s", timeline->rank, names.host);
  even_json json = begin_event(timeline);
  even_trace_name_write(&json, "process_name", timeline->rank, 0, title);
  json = begin_event(timeline);
  even_json_object(&json, NULL);
  even_json_string(&json, "name", "evenstep_clock");
  even_json_string(&json, "ph", "M");
  even_json_integer(&json, "pid", timeline->rank);
  even_json_integer(&json, "tid", 0);
  even_json_object(&json, "args");
  even_json_string(&json, "host", identity);
  even_json_number(&json, "since_1970_us", (double)(int64_t)(even_clock_wall_ns() - even_clock_ns()) / 1e3);
  even_json_object_end(&json);
  even_json_object_end(&json);
}

static void keep_group(even_timeline *timeline, const even_event_record *event) {
  if (even_realloc((void **)&timeline->groups, timeline->group_count + 1, sizeof *timeline->groups) == EVEN_OK) {
    group_name *made = &timeline->groups[timeline->group_count++];
    made->mark = (uint32_t)event->value;
    memcpy(made->words, event->words, sizeof made->words);
  }
}

static const char *name_of(const even_timeline *timeline, uint32_t mark) {
  for (size_t i = timeline->group_count; i > 0; i--) {
    if (timeline->groups[i - 1].mark == mark) {
      return timeline->groups[i - 1].words;
    }
  }
  return NULL;
}

static void write_call(even_timeline *timeline, const even_call_record *record) {
  const even_trace_call call = {.rank = timeline->rank,
                                .record = *record,
                                .dtype = even_dtype_name(record->dtype),
                                .op = even_op_name(record->op),
                                .group = name_of(timeline, record->group)};
  name_row(timeline, EVEN_TRACE_CALL_ROWS + record->row);
  if (!even_call_is_message(record->call)) {
    even_json json = begin_event(timeline);
    even_trace_call_write(&json, 0, &call);
    return;
  }
  even_json json = begin_event(timeline); /* the two ends of a message, one after the other */
  even_trace_call_write(&json, 0, &call);
}

static void write_record(even_timeline *timeline, const even_record *record) {
  even_json json;
  switch ((even_record_kind)record->kind) {
    case EVEN_RECORD_SPAN:
      name_row(timeline, 1 + (int)record->as.span.span);
      json = begin_event(timeline);
      even_trace_span_write(&json, 0, timeline->rank, &record->as.span);
      break;
    case EVEN_RECORD_STEP:
      name_row(timeline, 0);
      json = begin_event(timeline);
      even_trace_step_write(&json, 0, timeline->rank, &record->as.step);
      break;
    case EVEN_RECORD_EVENT:
      if (record->as.event.event == EVEN_EVENT_GROUP) {
        keep_group(timeline, &record->as.event);
      } else if (record->as.event.event == EVEN_EVENT_STALL || record->as.event.event == EVEN_EVENT_CHECKPOINT) {
        name_row(timeline, EVEN_TRACE_EVENT_ROW);
        json = begin_event(timeline);
        even_trace_event_write(&json, 0, timeline->rank, &record->as.event);
      }
      break;
    case EVEN_RECORD_CALL:
      write_call(timeline, &record->as.call);
      break;
    case EVEN_RECORD_LEG:
      break;
  }
}

/* ---- the thread ---- */

static void flush(even_timeline *timeline) {
  even_status status = even_text_status(&timeline->text);
  if (status == EVEN_OK && timeline->broken == EVEN_OK) {
    status = even_output_write(&timeline->output, even_text_string(&timeline->text), timeline->text.length);
  }
  if (status != EVEN_OK && timeline->broken == EVEN_OK) {
    timeline->broken = status;
    timeline->error = *even_error_of(status);
  }
  even_text_clear(&timeline->text);
}

static void drain(even_timeline *timeline) {
  even_record records[RECORDS_AT_ONCE];
  size_t count = RECORDS_AT_ONCE;
  while (count == RECORDS_AT_ONCE) {
    count = even_telemetry_reader_drain(timeline->reader, records, RECORDS_AT_ONCE, &timeline->lost);
    for (size_t i = 0; i < count && timeline->broken == EVEN_OK; i++) {
      if (timeline->written == EVEN_TIMELINE_MOST_RECORDS) {
        timeline->lost++;
        continue;
      }
      timeline->written++;
      write_record(timeline, &records[i]);
    }
    flush(timeline);
  }
}

static void write_tail(even_timeline *timeline) {
  even_json json = begin_event(timeline);
  even_json_object(&json, NULL);
  even_json_string(&json, "name", "evenstep_lost_records");
  even_json_string(&json, "ph", "M");
  even_json_integer(&json, "pid", timeline->rank);
  even_json_integer(&json, "tid", 0);
  even_json_object(&json, "args");
  even_json_unsigned(&json, "count", timeline->lost);
  even_json_object_end(&json);
  even_json_object_end(&json);
  even_text_add(&timeline->text, "]\n");
  flush(timeline);
}

static void *write_on(void *argument) {
  even_timeline *timeline = argument;
  while (atomic_load(&timeline->ends) == 0) {
    drain(timeline);
    even_futex_wait(&timeline->ends, 0, EVERY_NS);
  }
  even_telemetry_reader_writers(timeline->reader, false);
  drain(timeline);
  write_tail(timeline);
  return NULL;
}

/* ---- opening and closing ---- */

static void release(even_timeline *timeline) {
  if (timeline->output.fd >= 0) {
    even_pipe_close(timeline->output.fd);
  }
  even_telemetry_reader_close(timeline->reader);
  even_text_free(&timeline->text);
  even_free(timeline->groups);
  even_free(timeline->path);
  even_free(timeline);
}

static even_status open_parts(even_timeline *timeline, int fd, const char *path) {
  EVEN_TRY(even_duplicate(path, &timeline->path));
  EVEN_TRY(even_telemetry_reader_open(fd, &timeline->reader));
  EVEN_TRY(even_file_remove(path));
  EVEN_TRY(even_output_create(timeline->path, &timeline->output));
  write_head(timeline);
  flush(timeline);
  if (timeline->broken != EVEN_OK) {
    return even_error_restore(&timeline->error);
  }
  even_telemetry_reader_want_calls(timeline->reader, true);
  return even_thread_start(write_on, timeline, &timeline->thread);
}

even_status even_timeline_open(int fd, int rank, const char *path, even_timeline **out) {
  even_timeline *timeline = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&timeline));
  timeline->output.fd = -1;
  timeline->rank = rank;
  timeline->process_mark = even_process_mark();
  even_status status = open_parts(timeline, fd, path);
  if (status != EVEN_OK) {
    release(timeline);
    return status;
  }
  *out = timeline;
  return EVEN_OK;
}

even_status even_timeline_close(even_timeline *timeline) {
  even_error error;
  if (timeline == NULL || timeline->process_mark != even_process_mark()) {
    return EVEN_OK; /* the thread is the parent's */
  }
  atomic_store(&timeline->ends, 1U);
  even_futex_wake_all(&timeline->ends);
  even_thread_join(timeline->thread);
  even_status status = timeline->broken;
  error = timeline->error;
  release(timeline);
  return status == EVEN_OK ? EVEN_OK : even_error_restore(&error);
}
