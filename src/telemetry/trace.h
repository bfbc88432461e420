/* Calls of groups as events of a Chrome trace (Trace Event Format), and the names of what they are made of.
 * https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU */
#ifndef EVEN_TELEMETRY_TRACE_H
#define EVEN_TELEMETRY_TRACE_H

#include "base/json_writer.h"

#include <evenstep/telemetry.h>

/* "all_reduce", "?" for a number that is none. */
const char *even_call_name(int call);
/* The number of a name, 0 for none. */
int even_call_number(const char *name);
/* "F32", "SUM"; NULL for EVEN_CALL_NONE. */
const char *even_dtype_name(int dtype);
const char *even_op_name(int op);

/* Rows (tid) of a rank (pid): those below are of other kinds of work. */
enum { EVEN_TRACE_CALL_ROWS = 16 };

typedef struct even_trace_call {
  int rank; /* of the job */
  even_call_record record;
  const char *dtype;   /* NULL: none */
  const char *op;      /* NULL: none */
  const char *group;   /* the words of its event ("shm 4 torch/default"), NULL: not known */
  uint64_t arrived_ns; /* when the last of all ranks came to the collective; 0: not known */
  bool last;           /* of them this one */
  bool drawn;          /* an arrow to or from it, under the number `arrow` */
  uint64_t arrow;
} even_trace_call;

/* Each appends events; `origin_ns` is 0 on the trace's clock. */

/* One event of a collective, two of a message (from when it was asked for to when it was seen done: messages overlap),
 * and where `drawn`, one of an arrow: from the rank that came last to those that waited for it, and from sender to
 * receiver. */
void even_trace_call_write(even_json *json, uint64_t origin_ns, const even_trace_call *call);
/* A span on its row (1 + even_span), a step on row 0; an event on row EVEN_TRACE_EVENT_ROW. */
enum { EVEN_TRACE_EVENT_ROW = 1 + EVEN_SPAN_COUNT };
void even_trace_span_write(even_json *json, uint64_t origin_ns, int rank, const even_span_record *span);
void even_trace_step_write(even_json *json, uint64_t origin_ns, int rank, const even_step_record *step);
void even_trace_event_write(even_json *json, uint64_t origin_ns, int rank, const even_event_record *event);
/* What a row of a rank is called. `what`: "process_name" (row 0) or "thread_name". */
void even_trace_name_write(even_json *json, const char *what, int rank, int row, const char *name);
/* The name of a row of calls. */
void even_trace_row_name_write(even_json *json, int rank, int row);

#endif
