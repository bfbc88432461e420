/* Jobs without an agent or a history. */
#include "cli/chaos_job_alone.h"

#include "../checkpoint/scratch.h"
#include "base/fail.h"
#include "cli/chaos_hosts.h"
#include "cli/job_setup.h"
#include "os/clock.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- what such a job does not come to ---- */

char alone_postponed[192];

void even_chaos_postpone(even_chaos_job *job, const char *why) {
  (void)job;
  (void)snprintf(alone_postponed, sizeof alone_postponed, "%s", why);
}

even_status even_job_read_hosts(const char *list, int ranks, even_host_wish **out, size_t *count) {
  (void)list;
  (void)ranks;
  (void)out;
  (void)count;
  return EVEN_ERR_STATE;
}

even_status even_job_find_way(const even_job_options *options, even_job_way *way) {
  (void)options;
  (void)way;
  return EVEN_ERR_STATE;
}

void even_job_way_free(even_job_way *way) {
  (void)way;
}

even_status even_job_patience(double *seconds) {
  (void)seconds;
  return EVEN_ERR_STATE;
}

/* ---- the job ---- */

void alone_open(alone *made, even_chaos_kind kind, uint64_t dice) {
  *made = (alone){.job = {.apart = true, .faults = 2, .ranks = ALONE_RANKS, .places = ALONE_RANKS, .steps = 100}};
  even_chaos_job *job = &made->job;
  job->plan = made->plan;
  job->done = made->done;
  job->victim = ALONE_RANKS - 1;
  job->hold_ns = (uint64_t)1000 * 1000000000u;
  job->host.filler_fd = job->host.port_fd = -1;
  made->plan[0] = made->plan[1] = (even_chaos_fault){.kind = kind, .rank = job->victim, .dice = dice};
  even_text_add(&job->folder, scratch_path("."));
  assert_int_equal(even_text_status(&job->folder), EVEN_OK);
}

void alone_next(alone *made, even_chaos_kind kind, uint64_t dice) {
  made->plan[made->job.next].kind = kind;
  made->plan[made->job.next].dice = dice;
}

void alone_close(alone *made) {
  even_chaos_job *job = &made->job;
  even_chaos_relent(job, true);
  even_chaos_clock_close(job);
  even_chaos_rank_close(job);
  even_chaos_checkpoints_close(job);
  even_text_free(&job->folder);
  even_text_free(&job->host.filler);
  if (made->rank.pid > 0) {
    (void)kill(made->rank.pid, SIGKILL);
    even_process_wait(made->rank.pid);
  }
}

void alone_start_rank(alone *made, char *const *variables) {
  static char program[] = "sleep";
  static char seconds[] = "1000";
  static char path[] = "PATH=/usr/bin:/bin";
  char *words[] = {program, seconds, NULL};
  char *environment[4] = {path, NULL, NULL, NULL};
  even_process process;
  for (size_t i = 0; variables != NULL && variables[i] != NULL && i < 2; i++) {
    environment[i + 1] = variables[i];
  }
  const even_process_params params = {.arguments = words, .environment = environment};
  assert_int_equal(even_process_start(&params, &process), EVEN_OK);
  (void)close(process.output);
  (void)close(process.error);
  assert_int_equal(even_process_stat_read(process.pid, &made->rank), 0);
  made->job.victim_pid = process.pid;
}

bool alone_inject(alone *made) {
  const size_t before = made->job.next;
  alone_postponed[0] = '\0';
  assert_int_equal(even_chaos_inject_to(&made->job, &made->rank), EVEN_OK);
  return made->job.next > before && made->done[before].injected;
}

bool alone_comes_to(pid_t pid, char wanted) {
  even_process_stat facts;
  for (uint64_t until = even_clock_ns() + (uint64_t)60 * 1000000000u; even_clock_ns() < until;) {
    assert_int_equal(even_process_stat_read(pid, &facts), 0);
    if (facts.state == wanted) {
      return true;
    }
    even_clock_sleep_ns(1000000);
  }
  return false;
}
