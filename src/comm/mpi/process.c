/* Starting MPI, and leaving it. */
#include "comm/mpi/process.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"
#include "os/exit.h"
#include "os/thread.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

/* How long the exit of a process in which a group has failed waits for the others. */
#define LAST_MEETING_NS ((uint64_t)10 * 1000000000u)
#define NAP_NS ((uint64_t)200 * 1000u)

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t calls = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t listed = PTHREAD_MUTEX_INITIALIZER;
static even_mpi_process process;
static bool started;
static bool ours;
static _Atomic uint32_t mark; /* of the process that started it */
static _Atomic bool failed;
static even_ucx_group *groups;

void even_mpi_enter(void) {
  if (process.serial) {
    (void)pthread_mutex_lock(&calls);
  }
}

void even_mpi_leave(void) {
  if (process.serial) {
    (void)pthread_mutex_unlock(&calls);
  }
}

void even_mpi_words(int code, char *text, size_t bytes) {
  char words[1024] = ""; /* MPI_MAX_ERROR_STRING: 256 or 512 */
  int length = 0;
  if (process.mpi->error_string(code, words, &length) != 0 || words[0] == '\0') {
    (void)snprintf(words, sizeof words, "error %d", code);
  }
  words[strcspn(words, "\n")] = '\0';
  (void)snprintf(text, bytes, "%.*s", (int)bytes - 1, words);
}

even_status even_mpi_fail(const char *what, int code) {
  char words[256];
  even_mpi_words(code, words, sizeof words);
  return even_fail(EVEN_ERR_SYSTEM, "MPI %s (%s)", what, words);
}

/* ---- the end ---- */

void even_mpi_group_add(even_ucx_group *group) {
  (void)pthread_mutex_lock(&listed);
  group->next = groups;
  groups = group;
  (void)pthread_mutex_unlock(&listed);
}

void even_mpi_group_remove(even_ucx_group *group) {
  (void)pthread_mutex_lock(&listed);
  even_ucx_group **at = &groups;
  while (*at != NULL && *at != group) {
    at = &(*at)->next;
  }
  if (*at != NULL) {
    *at = group->next;
  }
  (void)pthread_mutex_unlock(&listed);
}

void even_mpi_has_failed(void) {
  atomic_store(&failed, true);
}

void even_mpi_on_finalize(void) {
  for (;;) {
    (void)pthread_mutex_lock(&listed);
    even_ucx_group *group = groups;
    (void)pthread_mutex_unlock(&listed);
    if (group == NULL) {
      return;
    }
    (void)even_fail(EVEN_ERR_STATE, "MPI was finalized while a group over it was open");
    even_ucx_lose_transport(group);
  }
}

static void *finalize(void *argument) {
  _Atomic bool *done = argument;
  (void)process.mpi->finalize();
  atomic_store(done, true);
  return NULL;
}

/* MPI_Finalize waits for all processes. After a failure others may never come to it: then this one ends without it, and
 * mpirun, which sees that, ends the job. */
static void finalize_in_time(void) {
  static _Atomic bool done; /* also after this process has given it up */
  pthread_t thread;
  uint64_t began = even_clock_ns();
  if (even_thread_start(finalize, &done, &thread) != EVEN_OK) {
    return;
  }
  while (!atomic_load(&done) && even_clock_ns() - began < LAST_MEETING_NS) {
    even_clock_sleep_ns(NAP_NS);
  }
  if (atomic_load(&done)) {
    even_thread_join(thread);
  }
}

static void finalize_at_exit(void) {
  int over = 0;
  if (mark != even_process_mark() || process.mpi->finalized(&over) != 0 || over != 0) {
    return;
  }
  even_mpi_on_finalize();
  if (atomic_load(&failed)) {
    finalize_in_time();
  } else {
    (void)process.mpi->finalize();
  }
}

/* ---- starting ---- */

static even_status init(const even_mpi *mpi, int *threads) {
  int code = mpi->init_thread(NULL, NULL, mpi->any_thread, threads);
  if (code != 0) {
    return even_mpi_fail("cannot start", code);
  }
  ours = true;
  if (even_at_exit(finalize_at_exit) != EVEN_OK) {
    (void)mpi->finalize();
    return even_error_last()->status;
  }
  return EVEN_OK;
}

static even_status check_threads(const even_mpi *mpi, int threads) {
  if (threads >= mpi->one_thread_at_a_time) {
    process.serial = threads < mpi->any_thread;
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_UNSUPPORTED, "this process has started MPI for one thread alone (%s)", mpi->version);
  return even_error_fix(
      "start it with MPI_THREAD_MULTIPLE (mpi4py does unless mpi4py.rc.threads is False), or let Evenstep start it");
}

static even_status find_place(const even_mpi *mpi) {
  int code = ours ? mpi->calls->world_returns_errors(mpi) : 0;
  code = code != 0 ? code : mpi->calls->comm_rank(mpi, mpi->world, &process.rank);
  code = code != 0 ? code : mpi->calls->comm_size(mpi, mpi->world, &process.ranks);
  code = code != 0 ? code : mpi->calls->largest_tag(mpi, &process.largest_tag);
  code = code != 0 ? code : mpi->calls->watch_finalize(mpi);
  return code == 0 ? EVEN_OK : even_mpi_fail("does not say where this process is", code);
}

static even_status start_once(const even_mpi *mpi) {
  int running = 0;
  int over = 0;
  int threads = 0;
  process.mpi = mpi;
  int code = mpi->initialized(&running);
  code = code != 0 ? code : mpi->finalized(&over);
  if (code == 0 && over != 0) {
    return even_fail(EVEN_ERR_STATE, "MPI has been finalized in this process: it cannot be started again");
  }
  if (code == 0 && running != 0) {
    code = mpi->query_thread(&threads);
  } else if (code == 0) {
    EVEN_TRY(init(mpi, &threads));
  }
  if (code != 0) {
    return even_mpi_fail("does not say whether it runs", code);
  }
  EVEN_TRY(check_threads(mpi, threads));
  return find_place(mpi);
}

even_status even_mpi_start(const char *library, const even_mpi_process **out) {
  const even_mpi *mpi = NULL;
  int over = 0;
  EVEN_TRY(even_mpi_library_get(library, &mpi));
  even_status status = EVEN_OK;
  *out = NULL;
  uint32_t starter = atomic_load(&mark);
  if (starter != 0 && starter != even_process_mark()) { /* before the lock, which a thread that is not there may hold */
    (void)even_fail(EVEN_ERR_STATE, "process %d was forked from one that had started MPI, which is the parent's",
                    (int)even_own_process());
    return even_error_fix("start the child by \"spawn\", outside of the job, or use shared memory there");
  }
  (void)pthread_mutex_lock(&starting);
  if (!started) {
    mark = even_process_mark();
    status = start_once(mpi);
    started = status == EVEN_OK;
  } else if (mpi->finalized(&over) == 0 && over != 0) {
    status = even_fail(EVEN_ERR_STATE, "MPI has been finalized in this process: it cannot be started again");
  }
  *out = status == EVEN_OK ? &process : NULL;
  (void)pthread_mutex_unlock(&starting);
  return status;
}

/* ---- a meeting of all processes ---- */

/* One that is under way. */
typedef struct meeting {
  struct meeting *next;
  even_mpi_handle request;
  unsigned char *mine; /* after it, all ranks' */
} meeting;

/* Of those that were given up: MPI, which cannot be kept from it, may still read and write their memory. */
static meeting *given_up;

static even_status open_meeting(const even_mpi_process *of, const void *mine, size_t bytes, meeting **out) {
  meeting *made = NULL;
  EVEN_TRY(EVEN_NEW(&made));
  even_status status = even_alloc((size_t)of->ranks + 1, bytes, (void **)&made->mine);
  if (status != EVEN_OK) {
    even_free(made);
    return status;
  }
  memcpy(made->mine, mine, bytes);
  *out = made;
  return EVEN_OK;
}

static void close_meeting(meeting *met) {
  even_free(met->mine);
  even_free(met);
}

static void give_up(meeting *met) {
  (void)pthread_mutex_lock(&listed);
  met->next = given_up;
  given_up = met;
  (void)pthread_mutex_unlock(&listed);
}

static even_status await_all(const even_mpi_process *of, meeting *met, uint64_t limit_ns) {
  int code = 0;
  int done = 0;
  uint64_t began = even_clock_ns();
  while (code == 0 && done == 0) {
    even_mpi_enter();
    code = of->mpi->calls->test(of->mpi, &met->request, &done);
    even_mpi_leave();
    if (code == 0 && done == 0) {
      if (even_clock_ns() - began >= limit_ns) {
        even_mpi_has_failed();
        (void)even_fail(EVEN_ERR_TIMEOUT, "Timed out: not all %d ranks of the MPI job came within %.3g s", of->ranks,
                        (double)limit_ns * 1e-9);
        return even_error_fix("see that all ranks that mpirun started open the group, or raise the timeout");
      }
      even_clock_sleep_ns(NAP_NS);
    }
  }
  return code == 0 ? EVEN_OK : even_mpi_fail("cannot gather", code);
}

even_status even_mpi_gather(const even_mpi_process *of, const void *mine, size_t bytes, void *all, uint64_t limit_ns) {
  meeting *met = NULL;
  if (bytes > INT_MAX) {
    return even_fail(EVEN_ERR_OVERFLOW, "%zu bytes of each rank cannot be gathered over MPI", bytes);
  }
  EVEN_TRY(open_meeting(of, mine, bytes, &met));
  even_mpi_enter();
  int code = of->mpi->calls->gather(of->mpi, met->mine, (int)bytes, met->mine + bytes, &met->request);
  even_mpi_leave();
  if (code != 0) {
    close_meeting(met);
    return even_mpi_fail("cannot gather", code);
  }
  even_status status = await_all(of, met, limit_ns);
  if (status != EVEN_OK) {
    give_up(met);
    return status;
  }
  memcpy(all, met->mine + bytes, bytes * (size_t)of->ranks);
  close_meeting(met);
  return EVEN_OK;
}
