/* What the plan that EVENSTEP_USE_PLAN names says of the devices of a job. */
#ifndef EVEN_CLI_RUN_PLAN_H
#define EVEN_CLI_RUN_PLAN_H

#include "base/text.h"
#include "cli/job.h"
#include "cli/plan_file.h"

typedef struct even_run_plan {
  const char *path; /* NULL: none that counts */
  even_plan plan;
  even_text left_out;
  even_text devices; /* of the others, as --devices takes them */
} even_run_plan;

/* Of a job on this host alone that is told nothing of its ranks. A file that is no plan is none: the ranks refuse it.
 * Before even_job_supervise, so that all agents of the job have the same. */
void even_run_plan_read(const even_job_options *options, even_run_plan *out);
/* In the agent (GPUs' drivers bear no fork once they were asked): where the plan was made on the devices that the job
 * would get, and steps are shorter without some of these, options->devices are the others, of `from`. A line on
 * standard error says so when the job begins. */
void even_run_plan_follow(const even_run_plan *from, even_job_options *options);
void even_run_plan_free(even_run_plan *from);

#endif
