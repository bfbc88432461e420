/* A run as a Chrome trace, for chrome://tracing and https://ui.perfetto.dev: a process a rank, a row a kind of work. */
#ifndef EVEN_MONITOR_TIMELINE_H
#define EVEN_MONITOR_TIMELINE_H

#include "base/text.h"
#include "monitor/history.h"

/* Appends the whole JSON: spans, steps and events of the run's database, and of a run with --timeline its collectives
 * and messages (telemetry/trace.h). Times are microseconds since the run's first record. Errors: EVEN_ERR_CORRUPT,
 * EVEN_ERR_MEMORY. */
even_status even_timeline_write(even_history *history, even_text *out) EVEN_MUST_USE;

#endif
