/* Faults of the host: a full disk, a port that somebody else has. */
#include "base/fail.h"
#include "cli/chaos_hosts.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/filler.h"
#include "os/host.h"
#include "os/listener.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A larger disk is somebody else's, too. */
#define MOST_FREE_BYTES ((uint64_t)1 << 30)
/* So long the next attempt may take to begin, and its rank 0 to find that its port is taken. */
#define PORT_NS ((uint64_t)180 * 1000000000u)
/* Of the training: nothing lacks from the first on, nor longer than to the other. */
static const double LAST_LACK = 0.75;
static const double ALL_AGAIN = 0.85;
enum { LONGEST_LIST = 1 << 16 };

/* The part of the training that is made, as far as its history shows. */
static double progress(const even_chaos_job *job) {
  return (double)(even_chaos_last_step(job) + 1) / (double)job->steps;
}

bool even_chaos_may_lack(even_chaos_job *job) {
  if (progress(job) <= LAST_LACK) {
    return true;
  }
  even_chaos_tell_not(job, "the training comes to its end, and its last checkpoint could not be written");
  return false;
}

bool even_chaos_must_relent(const even_chaos_job *job) {
  return progress(job) > ALL_AGAIN;
}

/* ---- the disk ---- */

even_status even_chaos_fill_disk(even_chaos_job *job) {
  even_chaos_host *host = &job->host;
  even_disk disk;
  char words[192];
  uint64_t bytes = 0;
  if (host->full_until_ns != 0) {
    return EVEN_OK; /* one at a time */
  }
  EVEN_TRY(even_disk_read(even_text_string(&job->folder), &disk));
  if (disk.free_bytes > MOST_FREE_BYTES) {
    (void)snprintf(words, sizeof words,
                   "%.80s has %.1f GB free, and others may need them: give --runs-dir a disk of at most 1 GB",
                   disk.mount, (double)disk.free_bytes * 1e-9);
    even_chaos_tell_not(job, words);
    return EVEN_OK;
  }
  if (!even_chaos_may_lack(job)) {
    return EVEN_OK;
  }
  even_text_clear(&host->filler);
  even_text_format(&host->filler, "%s/chaos-filler", even_text_string(&job->folder));
  EVEN_TRY(even_text_status(&host->filler));
  EVEN_TRY(even_filler_open(even_text_string(&host->filler), &host->filler_fd));
  host->full_until_ns = even_clock_ns() + job->hold_ns;
  EVEN_TRY(even_filler_fill(host->filler_fd, &bytes));
  (void)snprintf(words, sizeof words, "the last %.1f MB of %.80s, " EVEN_CHAOS_HELD, (double)bytes * 1e-6, disk.mount,
                 (double)job->hold_ns * 1e-9);
  even_chaos_tell(job, words);
  return EVEN_OK;
}

static void empty_disk(even_chaos_host *host) {
  if (even_filler_close(even_text_string(&host->filler), host->filler_fd) != EVEN_OK) {
    even_error_clear(); /* the run's folder is gone, and the file with it */
  }
  host->filler_fd = -1;
  host->full_until_ns = 0;
}

/* ---- a stolen port ---- */

/* Where the ranks of the attempt under way have met: of a rank of another host, as one of this host knows it. */
static int meeting_port(const even_chaos_job *job, const even_process_stat *rank) {
  even_process_stat facts;
  int port = 0;
  if (even_chaos_host_of(job, job->victim) == 0) {
    return even_chaos_port_of(rank->pid, "MASTER_PORT");
  }
  for (int i = 0; i < job->places && port == 0; i++) {
    if (even_chaos_host_of(job, i) == 0 && even_chaos_find_rank(job, i, &facts)) {
      port = even_chaos_port_of(facts.pid, "MASTER_PORT");
    }
  }
  return port;
}

even_status even_chaos_rob(even_chaos_job *job, const even_process_stat *rank) {
  even_chaos_host *host = &job->host;
  char words[96];
  int port = meeting_port(job, rank);
  if (host->robbed_port != 0 || host->port_until_ns != 0 || port == 0 || !even_chaos_kill_victim(job, rank)) {
    return EVEN_OK;
  }
  host->robbed_port = port;
  host->robbed = &job->done[job->next];
  host->robbed_until_ns = even_clock_ns() + PORT_NS;
  (void)snprintf(words, sizeof words, "rank %d (process %ld) killed; its successors were faster than the thief",
                 job->victim, (long)rank->pid);
  even_chaos_tell(job, words);
  return EVEN_OK;
}

/* Another port than `not_port` at which a process below this one is to meet others, so many generations down: the first
 * process has the agent, and that the ranks. 0: none is. */
static int port_below(pid_t parent, int generations, int not_port) {
  char path[64];
  even_text list = EVEN_TEXT_EMPTY;
  int port = 0;
  (void)snprintf(path, sizeof path, "/proc/%ld/task/%ld/children", (long)parent, (long)parent);
  if (even_file_read(path, LONGEST_LIST, &list) != EVEN_OK) {
    even_error_clear();
  }
  char *end = NULL;
  for (const char *at = even_text_string(&list); port == 0; at = end) {
    pid_t pid = (pid_t)strtol(at, &end, 10);
    if (end == at) {
      break;
    }
    port = even_chaos_port_of(pid, "MASTER_PORT");
    port = port == not_port ? 0 : port;
    port = port == 0 && generations > 1 ? port_below(pid, generations - 1, not_port) : port;
  }
  even_text_free(&list);
  return port;
}

/* The port at which the ranks of the attempt that has begun are to meet; 0: none has. */
static int next_port(const even_chaos_job *job) {
  enum { TO_RANKS = 2 };
  return port_below(job->agent.process.pid, TO_RANKS, job->host.robbed_port);
}

static even_status steal(even_chaos_job *job) {
  even_chaos_host *host = &job->host;
  int port = next_port(job);
  int fd = -1;
  int before = -1;
  if (port == 0) {
    return EVEN_OK;
  }
  if (even_chaos_enter(job, job->agent.process.pid, &before) != EVEN_OK) {
    even_error_clear(); /* it ends just now */
    return EVEN_OK;
  }
  if (even_listener_open("127.0.0.1", &port, &fd) == EVEN_OK) {
    host->port_fd = fd;
    host->port_until_ns = even_clock_ns() + PORT_NS;
    (void)snprintf(host->robbed->words, sizeof host->robbed->words,
                   "port %d, before the ranks of the next attempt met there", port);
  } else {
    even_error_clear();
  }
  host->stolen_port = port;
  host->robbed_port = 0;
  return even_chaos_leave(before);
}

/* ---- at each look ---- */

even_status even_chaos_host_look(even_chaos_job *job) {
  even_chaos_host *host = &job->host;
  uint64_t bytes = 0;
  if (host->full_until_ns != 0) { /* a checkpoint that was not written has given room back */
    EVEN_TRY(even_filler_fill(host->filler_fd, &bytes));
  }
  if (host->robbed_port != 0) {
    EVEN_TRY(steal(job));
  } else if (host->port_until_ns != 0) {
    int port = next_port(job);
    if (port != 0 && port != host->stolen_port) { /* the job has another one by now */
      host->port_until_ns = 1;
    }
  }
  return EVEN_OK;
}

void even_chaos_host_relent(even_chaos_job *job, bool all) {
  even_chaos_host *host = &job->host;
  uint64_t now = even_clock_ns();
  if (host->full_until_ns != 0 && (all || now >= host->full_until_ns || even_chaos_must_relent(job))) {
    empty_disk(host);
  }
  if (host->robbed_port != 0 && (all || now >= host->robbed_until_ns)) {
    host->robbed_port = 0;
  }
  if (host->port_until_ns != 0 && (all || now >= host->port_until_ns)) {
    even_listener_close(host->port_fd);
    host->port_until_ns = 0;
  }
}
