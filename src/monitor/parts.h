/* What the parts of a living run's monitor share. */
#ifndef EVEN_MONITOR_PARTS_H
#define EVEN_MONITOR_PARTS_H

#include "monitor/database.h"
#include "monitor/monitor.h"
#include "monitor/server.h"
#include "monitor/spike.h"

#include <pthread.h>

enum { EVEN_MONITOR_RECORDS_AT_ONCE = 512, EVEN_MONITOR_CALLS_A_TICK = 4096 };

/* Spans of one kind and step are summed before they are kept: communication has one for each bucket. */
typedef struct even_pending_span {
  bool used;
  bool changed; /* since the history's table open_spans has it */
  even_span_record record;
} even_pending_span;

struct even_monitor {
  pthread_mutex_t lock; /* state: between tick and the server's thread */
  even_state *state;
  even_telemetry_reader *reader;
  even_database *database; /* NULL: history stopped */
  even_error trouble;      /* to be reported by the next tick; status EVEN_OK: none */
  even_server *server;
  even_pending_span (*pending)[EVEN_SPAN_COUNT];
  uint64_t *places;     /* of the rings, as the history has them */
  uint64_t noted_lost;  /* of the state's lost records, as many are in the history */
  even_record *records; /* EVEN_MONITOR_RECORDS_AT_ONCE */
  char *folder;
  char token[EVEN_SERVER_TOKEN_DIGITS + 1];
  char url[160];
  uint64_t committed_ns;
  bool begins;               /* the attempt has made few steps */
  bool continues;            /* the next attempt that is told of is the one that runs */
  uint64_t committed_events; /* of the state's, as many are in the history for good */
  uint64_t looked_ns;
  long calls_a_tick; /* at most so many records of calls are kept in one */
  long calls_taken;
  uint64_t lost; /* records, and calls beyond that, not told of yet */
  uint64_t calls_left_out;
  uint64_t told_lost_ns;
  even_spikes spikes;
  even_monitor_limits limits;
  even_gpu_watch *gpus; /* NULL: none */
  struct even_lagging *lagging;
  struct even_links *links;
  uint32_t link_since; /* about the step since which one is slow */
  void (*notice)(void *context, const char *text);
  void *notice_context;
  char first_notice[512]; /* for the first tick; "": none */
};

/* All with the lock held, or where the server does not run. */

/* ---- records.c ---- */

/* What came of writing to the history: it waits on a full disk, and stops at any other failure; the run goes on. */
void even_monitor_history(even_monitor *monitor, even_status status);
#define EVEN_HISTORY(call)                   \
  do {                                       \
    if (monitor->database != NULL) {         \
      even_monitor_history(monitor, (call)); \
    }                                        \
  } while (0)
/* Ends the batch under way. */
void even_monitor_commit(even_monitor *monitor);
/* An event of the agent's own. */
void even_monitor_note(even_monitor *monitor, int event, int rank, int64_t value, const char *words);
void even_monitor_note_event(even_monitor *monitor, const even_state_event *event);
/* Takes what the rings hold into the state and the history. Bounded: writers faster than this reader must not hold the
 * agent's loop. Whether there may be more. */
bool even_monitor_drain(even_monitor *monitor);
/* All that the ranks wrote before they ended, with the spans that were still being summed: a record that one had only
 * begun when it was killed holds up nothing. */
void even_monitor_drain_ended(even_monitor *monitor);

/* ---- routes.c ---- */

/* Opens the server that params asks for, or none. */
even_status even_monitor_serve(even_monitor *monitor, const even_monitor_params *params) EVEN_MUST_USE;
/* runs/NAME/agent.json tells `evenstep top` and scripts where the living run is found. It holds the token: mode 0600.
 */
even_status even_monitor_agent_file_write(even_monitor *monitor) EVEN_MUST_USE;
/* One that cannot be removed stays: whoever reads it looks whether the job lives. */
void even_monitor_agent_file_remove(even_monitor *monitor);

#endif
