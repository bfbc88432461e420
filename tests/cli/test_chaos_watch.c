/* When `evenstep chaos` takes a cut for noticed: by what the agent says of a host, or by the ends of ranks that had
 * work left; and whose cut nobody can notice. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/chaos_hosts.h"
#include "os/clock.h"
#include "os/net_namespace.h"

#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STEPS = 100 };

static even_chaos_network network;
static even_chaos_fault plan[1];
static even_chaos_done done[1];
static even_state_rank rank[2];
static even_state state = {.ranks = 2, .rank = rank};
static bool there,
    elsewhere;      /* whether the rank's process is found where the cut is, and another one on another host */
static bool remote; /* whether the ranks are on another host of the user's own */

even_state *even_history_state(even_history *history) {
  (void)history;
  return &state;
}

bool even_chaos_find_rank(const even_chaos_job *job, int number, even_process_stat *out) {
  (void)job;
  out->pid = rank[number].pid;
  return number == 0 ? there : elsewhere;
}

bool even_chaos_is_on(const even_chaos_job *job, pid_t pid, int host) {
  return pid != rank[1].pid && even_net_namespace_same(pid, job->network->holders[host].process.pid);
}

bool even_chaos_has_stepped(const even_chaos_job *job, int number) {
  (void)job;
  (void)number;
  return true;
}

int even_chaos_host_of(const even_chaos_job *job, int number) {
  (void)job;
  (void)number;
  return remote ? 1 : 0;
}

void even_chaos_read_history(even_chaos_job *job) {
  (void)job;
}

long even_chaos_last_step(const even_chaos_job *job) {
  (void)job;
  return state.last_step;
}

/* Its link is cut; the rank's process lives until it is killed, and another's on another host, if there is one, goes
 * on. */
static even_chaos_job cut(bool has_rank, bool has_others) {
  even_chaos_job job = {
      .plan = plan, .done = done, .faults = 1, .steps = STEPS, .victim = -1, .network = &network, .cut_host = 1};
  rank[0].pid = fork();
  if (rank[0].pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* also where an assertion fails */
    (void)pause();
    _exit(0);
  }
  assert_true(rank[0].pid > 0);
  rank[1].pid = getppid();
  there = has_rank;
  elsewhere = has_others;
  state.last_step = STEPS / 2;
  network.holders[1].process.pid = getpid(); /* which the rank shares a network with */
  plan[0].kind = EVEN_CHAOS_CUT;
  done[0] = (even_chaos_done){.injected = true, .at_ns = even_clock_ns()};
  even_chaos_watch_begin(&job);
  return job;
}

static void end_rank(void) {
  assert_int_equal(kill(rank[0].pid, SIGKILL), 0);
  assert_int_equal(waitpid(rank[0].pid, NULL, 0), rank[0].pid);
}

static void what_the_agent_says_is_notice(void **unused) {
  even_chaos_job job = cut(true, true);
  (void)unused;
  even_chaos_watch_look(&job);
  assert_ptr_equal(job.watch.of, &done[0]);
  even_text_add(&job.agent.complaint, "evenstep: host there is lost: nothing came back\n");
  even_chaos_watch_look(&job);
  assert_true(done[0].noticed_ns >= done[0].at_ns);
  assert_null(job.watch.of);
  assert_null(done[0].unnoticed);
  even_text_free(&job.agent.complaint);
  end_rank();
}

static void a_rank_that_ends_in_its_midst_is_notice(void **unused) {
  even_chaos_job job = cut(true, true);
  (void)unused;
  end_rank();
  even_chaos_watch_look(&job);
  assert_true(done[0].noticed_ns >= done[0].at_ns);
}

static void the_end_of_the_training_is_none(void **unused) {
  even_chaos_job job = cut(true, true);
  (void)unused;
  state.last_step = STEPS - 1;
  end_rank();
  even_chaos_watch_look(&job);
  assert_int_equal(done[0].noticed_ns, 0);
  assert_non_null(strstr(done[0].unnoticed, "come to its end"));
  assert_null(job.watch.of);
}

/* It was cut off before, and has not come back. */
static void a_host_without_processes_is_missed_by_nobody(void **unused) {
  even_chaos_job job = cut(false, true);
  (void)unused;
  assert_null(job.watch.of);
  assert_non_null(strstr(done[0].unnoticed, "lost already"));
  end_rank();
}

static void nor_is_one_whose_processes_are_elsewhere(void **unused) {
  (void)unused;
  even_chaos_job job = cut(true, true);
  network.holders[1].process.pid = -1;
  even_chaos_watch_begin(&job);
  assert_null(job.watch.of);
  assert_non_null(strstr(done[0].unnoticed, "lost already"));
  end_rank();
}

/* All others were cut off before, and have not come back. */
static void a_host_that_is_alone_has_nobody_to_miss(void **unused) {
  even_chaos_job job = cut(true, false);
  (void)unused;
  assert_null(job.watch.of);
  assert_non_null(strstr(done[0].unnoticed, "nobody to miss"));
  end_rank();
}

/* A process of that number here is nobody's rank. */
static void the_end_of_a_number_that_is_of_another_host_is_no_notice(void **unused) {
  (void)unused;
  remote = true;
  even_chaos_job job = cut(true, true);
  end_rank();
  even_chaos_watch_look(&job);
  assert_int_equal(done[0].noticed_ns, 0);
  even_text_add(&job.agent.complaint, "evenstep: host there is lost: nothing came back\n");
  even_chaos_watch_look(&job);
  assert_true(done[0].noticed_ns >= done[0].at_ns);
  even_text_free(&job.agent.complaint);
  remote = false;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(what_the_agent_says_is_notice),
      cmocka_unit_test(a_rank_that_ends_in_its_midst_is_notice),
      cmocka_unit_test(the_end_of_the_training_is_none),
      cmocka_unit_test(a_host_without_processes_is_missed_by_nobody),
      cmocka_unit_test(nor_is_one_whose_processes_are_elsewhere),
      cmocka_unit_test(a_host_that_is_alone_has_nobody_to_miss),
      cmocka_unit_test(the_end_of_a_number_that_is_of_another_host_is_no_notice),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
