#include "job_alone.h"

#include "base/fail.h"

even_status job_alone_begin(even_job *job, int telemetry_fd, even_generation **view) {
  for (size_t i = 0; i < job->count; i++) {
    job->snapshots[i] = -1;
    job->ranks[i].output =
        (even_rank_output){.rank = (int)i, .log = -1, .streams = {{.watch = {.fd = -1}}, {.watch = {.fd = -1}}}};
  }
  EVEN_TRY(even_progress_open(telemetry_fd, job->count, &job->progress));
  EVEN_TRY(even_job_generations_open(job));
  EVEN_TRY(even_job_generations_begin(job));
  EVEN_TRY(even_generation_open(job->generation_fd, view));
  for (size_t i = 0; i < job->count; i++) {
    even_generation_say(*view, (int)i, "");
  }
  return EVEN_OK;
}
