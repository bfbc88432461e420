/* Memory into which ranks copy their checkpoints. The agent holds it, too: what a rank has copied and dies before it is
 * written, the agent writes. */
#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/snapshot.h"
#include "orchestrator/outlast.h"
#include "os/pipe.h"
#include "os/shared_memory.h"

even_status even_job_snapshots_open(even_job *job) {
  EVEN_TRY(EVEN_NEW_ARRAY(&job->snapshots, job->count));
  for (size_t i = 0; i < job->count; i++) {
    job->snapshots[i] = -1;
  }
  return EVEN_OK;
}

int even_job_snapshot_begin(even_job *job, size_t rank) {
  even_shared_memory memory;
  if (even_shared_memory_begin(EVEN_SNAPSHOT_LABEL, &memory) != EVEN_OK) {
    even_error_clear(); /* the rank makes one of its own, which ends with it */
  }
  job->snapshots[rank] = memory.fd;
  return memory.fd;
}

void even_job_snapshot_finish(even_job *job, size_t rank) {
  even_text folder = EVEN_TEXT_EMPTY;
  if (job->snapshots[rank] < 0) {
    return;
  }
  const even_error kept = *even_error_last();
  even_status status = even_snapshot_finish(job->snapshots[rank], &folder);
  if (status == EVEN_OK && folder.length > 0) {
    even_job_notice(job, "rank %zu ended before its last checkpoint was written: the agent has written it: %s", rank,
                    folder.data);
  } else if (status != EVEN_OK) {
    even_job_notice(job, "the last checkpoint that rank %zu took was not written: %s", rank, even_error_last()->what);
  }
  even_text_free(&folder);
  even_pipe_close(job->snapshots[rank]);
  job->snapshots[rank] = -1;
  even_outlast_written(job, rank);
  (void)even_error_restore(&kept);
}

void even_job_snapshots_finish(even_job *job) {
  for (size_t i = 0; job->snapshots != NULL && i < job->count; i++) {
    even_job_snapshot_finish(job, i);
  }
}

void even_job_snapshots_close(even_job *job) {
  for (size_t i = 0; job->snapshots != NULL && i < job->count; i++) {
    even_pipe_close(job->snapshots[i]);
  }
  even_free(job->snapshots);
  job->snapshots = NULL;
}
