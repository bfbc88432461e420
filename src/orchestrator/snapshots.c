/* Memory into which ranks copy their checkpoints. The agent holds it, too: what a rank has copied and dies before it is
 * written, the agent writes, one after the other, in a thread: a slow disk keeps it from nothing else. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/stop.h"
#include "checkpoint/snapshot.h"
#include "orchestrator/outlast.h"
#include "os/pipe.h"
#include "os/shared_memory.h"
#include "os/thread.h"

#include <stdatomic.h>

struct even_job_unwritten {
  even_job_unwritten *next; /* is begun when this one is done */
  size_t rank;
  unsigned turn; /* among those of that place: another process may have come, and ended, since */
  int fd;
  bool threaded;
  pthread_t thread;
  atomic_bool unwanted; /* asks that thread to end early */
  atomic_bool done;
  even_status status; /* of that, */
  even_error why;
  even_text folder; /* and where it lies; empty: its own process had written it */
};

even_status even_job_snapshots_open(even_job *job) {
  EVEN_TRY(EVEN_NEW_ARRAY(&job->snapshots, job->count));
  for (size_t i = 0; i < job->count; i++) {
    job->snapshots[i] = -1;
  }
  return EVEN_OK;
}

int even_job_snapshot_begin(even_job *job, size_t rank) {
  even_shared_memory memory;
  even_job_snapshot_finish(job, rank); /* of the process before */
  if (even_shared_memory_begin(EVEN_SNAPSHOT_LABEL, &memory) != EVEN_OK) {
    even_error_clear(); /* the rank makes one of its own, which ends with it */
  }
  job->snapshots[rank] = memory.fd;
  return memory.fd;
}

/* ---- one of them ---- */

static _Thread_local even_job_unwritten *served; /* by this thread */

static bool is_unwanted(void) {
  return atomic_load(&served->unwanted);
}

static void write_out(even_job_unwritten *one) {
  one->status = even_snapshot_finish(one->fd, &one->folder);
  one->why = *even_error_last();
  atomic_store_explicit(&one->done, true, memory_order_release);
}

static void *write_apart(void *context) {
  served = context;
  even_stop_when(is_unwanted);
  write_out(served);
  return NULL;
}

static void begin(even_job_unwritten *one) {
  one->threaded = even_thread_start(write_apart, one, &one->thread) == EVEN_OK;
  if (!one->threaded) {
    write_out(one); /* all else waits for it */
  }
}

/* Waits for it. */
static void conclude(even_job *job, even_job_unwritten *one) {
  if (one->threaded) {
    even_thread_join(one->thread);
  }
  if (one->status != EVEN_OK) {
    even_job_notice(job, "the last checkpoint that rank %zu took was not written: %s", one->rank, one->why.what);
  } else if (one->folder.length > 0) {
    even_job_notice(job, "rank %zu ended before its last checkpoint was written: the agent has written it: %s",
                    one->rank, one->folder.data);
  }
  even_text_free(&one->folder);
  even_pipe_close(one->fd);
  even_outlast_saved(job, one->rank, one->turn);
}

/* ---- all ---- */

/* Whether `turn` is that of another one of the place. */
static bool is_taken(const even_job *job, size_t rank, unsigned turn) {
  for (const even_job_unwritten *one = job->unwritten; one != NULL; one = one->next) {
    if (one->rank == rank && one->turn == turn) {
      return true;
    }
  }
  return false;
}

static void add(even_job *job, size_t rank, unsigned turn, int fd) {
  even_job_unwritten *one = NULL;
  even_job_unwritten **end = &job->unwritten;
  if (EVEN_NEW(&one) != EVEN_OK) {
    even_job_unwritten alone = {.rank = rank, .turn = turn, .fd = fd};
    write_out(&alone);
    conclude(job, &alone);
    return;
  }
  one->rank = rank;
  one->turn = turn;
  one->fd = fd;
  while (*end != NULL) {
    end = &(*end)->next;
  }
  *end = one;
  if (one == job->unwritten) {
    begin(one);
  }
}

void even_job_snapshot_take(even_job *job, size_t rank, unsigned turn, int fd) {
  const even_error kept = *even_error_last();
  add(job, rank, turn, fd);
  (void)even_error_restore(&kept);
}

void even_job_snapshot_finish(even_job *job, size_t rank) {
  const even_error kept = *even_error_last();
  const int fd = job->snapshots[rank];
  unsigned turn = 0;
  if (fd < 0) {
    return;
  }
  job->snapshots[rank] = -1;
  if (even_snapshot_is_left(fd)) {
    while (is_taken(job, rank, turn)) {
      turn++;
    }
    even_outlast_unwritten(job, rank, turn, fd);
    add(job, rank, turn, fd);
  } else {
    even_pipe_close(fd);
  }
  even_outlast_vacated(job, rank);
  (void)even_error_restore(&kept);
}

void even_job_snapshots_finish(even_job *job) {
  for (size_t i = 0; job->snapshots != NULL && i < job->count; i++) {
    even_job_snapshot_finish(job, i);
  }
}

static void conclude_first(even_job *job) {
  even_job_unwritten *first = job->unwritten;
  conclude(job, first);
  job->unwritten = first->next;
  even_free(first);
  if (job->unwritten != NULL) {
    begin(job->unwritten);
  }
}

void even_job_snapshots_turn(even_job *job) {
  const even_error kept = *even_error_last();
  while (job->unwritten != NULL && atomic_load_explicit(&job->unwritten->done, memory_order_acquire)) {
    conclude_first(job);
  }
  (void)even_error_restore(&kept);
}

void even_job_snapshots_wait(even_job *job) {
  const even_error kept = *even_error_last();
  while (job->unwritten != NULL) {
    conclude_first(job);
  }
  (void)even_error_restore(&kept);
}

void even_job_snapshots_give_up(even_job *job) {
  for (even_job_unwritten *one = job->unwritten; one != NULL; one = one->next) {
    atomic_store(&one->unwanted, true);
  }
}

void even_job_snapshots_close(even_job *job) {
  even_job_snapshots_wait(job);
  for (size_t i = 0; job->snapshots != NULL && i < job->count; i++) {
    even_pipe_close(job->snapshots[i]);
  }
  even_free(job->snapshots);
  job->snapshots = NULL;
}
