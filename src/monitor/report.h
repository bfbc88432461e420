/* The report of a run: its numbers beside what was predicted and beside another run; as JSON, as a page with the data
 * inside, as lines for a terminal. */
#ifndef EVEN_MONITOR_REPORT_H
#define EVEN_MONITOR_REPORT_H

#include "base/text.h"

#include <stdbool.h>

typedef struct even_report even_report;

typedef struct even_report_params {
  const char *folder; /* of the run */
  const char *other;  /* of the run to compare with, NULL: none */
  const char *plan;   /* what `evenstep plan` wrote; NULL: plan.json of the folder, where there is one */
} even_report_params;

/* Reads everything. Errors: EVEN_ERR_NOT_FOUND (no run), EVEN_ERR_CORRUPT (its database), EVEN_ERR_INPUT (the plan). */
even_status even_report_open(const even_report_params *params, even_report **out) EVEN_MUST_USE;
void even_report_close(even_report *report);

void even_report_json(even_report *report, even_text *out);
void even_report_page(even_report *report, even_text *out);
/* The run as a Chrome trace (timeline.h). */
even_status even_report_timeline(even_report *report, even_text *out) EVEN_MUST_USE;
void even_report_lines(even_report *report, bool colour, even_text *out);

/* Writes FOLDER/report.html from FOLDER/run.db. */
even_status even_report_write_page(const char *folder) EVEN_MUST_USE;

#endif
