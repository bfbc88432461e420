/* One run of a report, and the report itself. */
#ifndef EVEN_MONITOR_REPORT_RUN_H
#define EVEN_MONITOR_REPORT_RUN_H

#include "base/json_writer.h"
#include "monitor/analysis.h"
#include "monitor/prediction.h"
#include "monitor/report.h"

typedef struct even_report_run {
  char *folder;
  even_history *history;
  even_analysis analysis;
  even_measure measure; /* of the steady steps, not of the last ones */
  bool living;
  even_prediction prediction; /* of the plan */
} even_report_run;

struct even_report {
  even_report_run run;
  even_report_run other; /* folder NULL: none */
  bool has_difference;
  double difference; /* of the parameters, relative; NAN: see the words */
  long difference_step;
  char difference_words[400];
};

even_status even_report_run_open(const char *folder, const char *plan, even_report_run *out) EVEN_MUST_USE;
void even_report_run_close(even_report_run *run);
void even_report_run_json(even_json *json, const char *key, const even_report_run *run);
/* "the first 10 of 200 steps are left out …" */
void even_report_warmup_words(const even_report_run *run, char *out, size_t bytes);

#endif
