/* The state as OpenMetrics text, for Prometheus and its kin. */
#ifndef EVEN_MONITOR_METRICS_H
#define EVEN_MONITOR_METRICS_H

#include "monitor/state.h"

#define EVEN_METRICS_CONTENT_TYPE "application/openmetrics-text; version=1.0.0; charset=utf-8"

/* OpenMetrics 1.0 (https://prometheus.io/docs/specs/om/open_metrics_spec/). What is not known yet is left out. */
void even_monitor_metrics(even_state *state, uint64_t now_ns, even_text *out);

#endif
