/* Reads the rings beside the monitor, which has a place of its own in them. */
#include "orchestrator/progress.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"

#include <string.h>

enum { RECORDS = 128 };

even_status even_progress_open(int telemetry_fd, size_t ranks, even_progress *out) {
  *out = (even_progress){.count = ranks};
  EVEN_TRY(EVEN_NEW_ARRAY(&out->ranks, ranks));
  if (telemetry_fd < 0) {
    return EVEN_OK;
  }
  EVEN_TRY(even_telemetry_reader_open(telemetry_fd, &out->reader));
  if ((size_t)even_telemetry_reader_ranks(out->reader) < ranks) {
    return even_fail(EVEN_ERR_ARGUMENT, "the telemetry segment has rings for %d ranks, the job has %zu",
                     even_telemetry_reader_ranks(out->reader), ranks);
  }
  return EVEN_OK;
}

void even_progress_close(even_progress *progress) {
  even_telemetry_reader_close(progress->reader);
  even_free(progress->ranks);
  *progress = (even_progress){.reader = NULL};
}

void even_progress_begin(even_progress *progress) {
  memset(progress->ranks, 0, progress->count * sizeof *progress->ranks);
  progress->since_ns = even_clock_ns();
}

static void take_event(even_rank_progress *rank, const even_event_record *event) {
  rank->joining = rank->joining || event->event == EVEN_EVENT_JOINING;
  rank->joined = rank->joined || event->event == EVEN_EVENT_JOINED;
  if (event->event == EVEN_EVENT_CHECKPOINT) {
    rank->saved = event->value > rank->saved ? event->value : rank->saved;
  } else if (event->event == EVEN_EVENT_OPENING) {
    rank->opening = event->value;
  } else if (event->event == EVEN_EVENT_OPENED) {
    rank->opening = rank->opened = event->value;
  }
}

/* Its events may be overwritten by now. */
static void is_at_work(even_rank_progress *rank) {
  rank->joined = true;
  rank->opened = rank->opening;
}

static void take(even_progress *progress, const even_record *record) {
  even_rank_progress *rank = &progress->ranks[record->rank];
  switch (record->kind) {
    case EVEN_RECORD_STEP:
      if (record->as.step.end_ns >= progress->since_ns) {
        is_at_work(rank);
        rank->stepped = true;
        rank->last_step = record->as.step.step;
        rank->samples = record->as.step.samples;
        rank->batch = record->as.step.batch;
        rank->shared = rank->shared || rank->batch > 0;
      }
      break;
    case EVEN_RECORD_SPAN:
      if (record->as.span.start_ns >= progress->since_ns) {
        is_at_work(rank);
      }
      break;
    case EVEN_RECORD_EVENT:
      if (record->as.event.at_ns >= progress->since_ns) {
        take_event(rank, &record->as.event);
      }
      break;
    default:
      break;
  }
}

void even_progress_read(even_progress *progress) {
  even_record records[RECORDS];
  size_t got = progress->reader == NULL ? 0 : RECORDS;
  while (got == RECORDS) {
    got = even_telemetry_reader_drain(progress->reader, records, RECORDS, NULL);
    for (size_t i = 0; i < got; i++) {
      if (records[i].rank < progress->count) {
        take(progress, &records[i]);
      }
    }
  }
}

bool even_progress_steps(const even_progress *progress) {
  bool steps = false;
  for (size_t i = 0; i < progress->count; i++) {
    steps = steps || progress->ranks[i].stepped;
  }
  return steps;
}

bool even_progress_shares(const even_progress *progress) {
  bool shares = false;
  for (size_t i = 0; i < progress->count; i++) {
    shares = shares || progress->ranks[i].shared;
  }
  return shares;
}

void even_progress_forget(even_progress *progress, size_t rank) {
  even_progress_read(progress);
  progress->ranks[rank] = (even_rank_progress){.joined = false};
}
