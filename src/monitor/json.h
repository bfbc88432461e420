/* The state as the JSON that the page, `--json` and other programs read. docs/monitoring.md lists the members. */
#ifndef EVEN_MONITOR_JSON_H
#define EVEN_MONITOR_JSON_H

#include "monitor/state.h"

/* Each appends one JSON document; a failed append shows in even_text_status. */
void even_monitor_json_summary(const even_state *state, const even_measure *measure, even_text *out);
/* The course after step `since` (-1: from its beginning), the whole of it in at most `limit` points (0: all kept). The
 * first point may be one that the client has: it may have grown. A client whose last answer had another `generation` or
 * `stride` fetches all anew. */
void even_monitor_json_steps(const even_state *state, long since, size_t limit, even_text *out);
/* Seconds of each kind of span, a rank: a step as measured, and in all. */
void even_monitor_json_spans(const even_state *state, const even_measure *measure, even_text *out);
/* Events with numbers above `since`. */
void even_monitor_json_events(const even_state *state, uint64_t since, even_text *out);

#endif
