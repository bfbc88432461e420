/* Leaves out devices without which steps are shorter, by a plan that was made on them. */
#include "cli/run_plan.h"

#include "base/fail.h"
#include "device/device.h"
#include "orchestrator/outlast.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ranks that are named by number would be others. */
static bool is_free(const even_job_options *options) {
  return options->devices == NULL && options->ranks == NULL && options->hosts == NULL && options->cpu_quota == NULL &&
         options->min_ranks == 0 && options->max_ranks == 0 && strpbrk(options->log_rank, "123456789") == NULL;
}

void even_run_plan_read(const even_job_options *options, even_run_plan *out) {
  const char *path = getenv("EVENSTEP_USE_PLAN");
  memset(out, 0, sizeof *out);
  if (path == NULL || *path == '\0' || !is_free(options)) {
    return;
  }
  if (even_plan_read(path, &out->plan) == EVEN_OK && even_plan_leaves_out(&out->plan, &out->left_out, &out->devices)) {
    out->path = path;
  }
  even_error_clear();
}

static bool is_of_these(const even_plan *plan) {
  even_device_list devices = {0};
  bool same = even_device_select(NULL, 0, &devices) == EVEN_OK && devices.count == plan->ranks;
  for (size_t i = 0; same && i < plan->ranks; i++) {
    same = strcmp(devices.items[i].name, plan->rank[i].device) == 0;
  }
  even_device_list_free(&devices);
  even_error_clear();
  return same;
}

void even_run_plan_follow(const even_run_plan *from, even_job_options *options) {
  if (from->path == NULL || !is_of_these(&from->plan)) {
    return;
  }
  options->devices = even_text_string(&from->devices);
  if (!options->quiet && !even_outlast_due(options->legacy)) {
    (void)fprintf(stderr,
                  "evenstep: without %s a step takes %.3g ms instead of %.3g, by %s (EVENSTEP_USE_PLAN): it runs on %s "
                  "alone; -n auto starts it on all\n",
                  even_text_string(&from->left_out), from->plan.without_seconds * 1e3,
                  from->plan.balanced_seconds * 1e3, from->path, options->devices);
  }
}

void even_run_plan_free(even_run_plan *from) {
  even_plan_free(&from->plan);
  even_text_free(&from->left_out);
  even_text_free(&from->devices);
}
