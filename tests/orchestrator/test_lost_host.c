/* What a job does without a host that is lost, and of whom nobody said what is to be done (elastic_wait.c,
 * elastic_back.c); hosts are entries of its list. */
#include "orchestrator/elastic.h"

#include "base/alloc.h"
#include "checkpoint/scratch.h"
#include "orchestrator/bring.h"
#include "orchestrator/remote.h"
#include "os/calls.h"
#include "os/clock.h"
#include "support/clock_ahead.h"

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define SECOND_NS UINT64_C(1000000000)

typedef struct scene {
  even_hosts hosts;
  even_host_agent agents[4];
  even_rank_progress ranks[2];
  even_agent_params params;
  even_job job;
} scene;

static char *const shell[] = {(char *)(uintptr_t)"/nonexistent/shell", NULL};

/* A job on this host and three others, of which the first is away. */
static int open_scene(void **state) {
  scene *at = NULL;
  assert_int_equal(EVEN_NEW(&at), EVEN_OK);
  at->hosts = (even_hosts){.agents = at->agents,
                           .count = 4,
                           .job = &at->job,
                           .listener = -1,
                           .params = {.patience_seconds = 600, .least_seconds = (double)NAN}};
  for (size_t i = 0; i < 4; i++) {
    at->agents[i] = (even_host_agent){.hosts = &at->hosts, .index = i, .count = 1, .fits = true, .shell = {.pid = -1}};
    (void)snprintf(at->agents[i].name, sizeof at->agents[i].name, "host%zu", i);
  }
  at->agents[1].leaves = at->agents[1].away = true;
  at->job =
      (even_job){.params = &at->params, .hosts = &at->hosts, .local = 1, .progress = {.ranks = at->ranks, .count = 2}};
  assert_int_equal(even_loop_open(&at->hosts.loop), EVEN_OK);
  assert_int_equal(even_elastic_open(&at->hosts), EVEN_OK);
  *state = at;
  return 0;
}

static int close_scene(void **state) {
  scene *at = *state;
  even_os = even_os_real;
  at->hosts.agents = NULL;
  even_elastic_close(&at->hosts);
  even_free(at->hosts.elastic);
  even_loop_close(&at->hosts.loop);
  even_free(at);
  return 0;
}

static void expect(scene *at, even_lost_host lost, bool shares, bool by_ssh, bool leaves_out, size_t least) {
  at->hosts.params.lost = lost;
  at->hosts.params.shell = by_ssh ? shell : NULL;
  at->job.shares = shares;
  assert_true(even_elastic_leaves_out(&at->job) == leaves_out && even_elastic_least(&at->job) == least);
}

/* Without --min-ranks: whether a lost host may be left out, and how many ranks must be left then. */
static void who_has_a_global_batch_goes_on_and_others_wait(void **state) {
  scene *at = *state;
  expect(at, EVEN_LOST_GO_ON, true, false, true, 1);
  expect(at, EVEN_LOST_GO_ON, false, true, true, 4);
  expect(at, EVEN_LOST_GO_ON, false, false, false, 4); /* nobody can be waited for */
  expect(at, EVEN_LOST_WAIT, true, true, true, 4);
  expect(at, EVEN_LOST_END, true, true, false, 1);
  at->hosts.params.least_ranks = 3;
  expect(at, EVEN_LOST_END, false, true, true, 3);
}

static void expect_patience(scene *at, even_lost_host lost, int least_ranks, double said, double seconds) {
  at->hosts.params.lost = lost;
  at->hosts.params.least_ranks = least_ranks;
  at->hosts.params.least_seconds = said;
  assert_true(even_elastic_patience(&at->job) == seconds);
  assert_true(even_elastic_may_wait(&at->job) == (seconds > 0));
}

static void who_was_not_told_to_wait_does_not_wait_for_ever(void **state) {
  scene *at = *state;
  expect_patience(at, EVEN_LOST_GO_ON, 0, (double)NAN, 600);
  expect_patience(at, EVEN_LOST_WAIT, 0, (double)NAN, (double)INFINITY);
  expect_patience(at, EVEN_LOST_GO_ON, 2, (double)NAN, (double)INFINITY);
  expect_patience(at, EVEN_LOST_GO_ON, 0, 7, 7);
  expect_patience(at, EVEN_LOST_WAIT, 0, 7, 7);
  expect_patience(at, EVEN_LOST_GO_ON, 2, 0, 0);
}

static void nobody_goes_on_without_a_witness_that_is_lost(void **state) {
  scene *at = *state;
  char why[64];
  const even_error late = {.status = EVEN_ERR_TIMEOUT};
  at->hosts.params.least_ranks = 1;
  at->agents[3].lost = true;
  at->agents[3].fits = false;
  assert_true(even_elastic_is_absent(&at->agents[3], &late, why, sizeof why));
  assert_true(even_elastic_may_leave_out(&at->job, EVEN_ERR_PEER_LOST));
  at->agents[3].witness = true;
  assert_false(even_elastic_is_absent(&at->agents[3], &late, why, sizeof why));
  assert_false(even_elastic_may_leave_out(&at->job, EVEN_ERR_PEER_LOST));
}

/* Ranks that do not step in es.prepare would never save their state for it. */
static void a_lost_host_is_looked_for_where_ranks_can_be_asked_to_save(void **state) {
  scene *at = *state;
  even_elastic *elastic = at->hosts.elastic;
  at->hosts.params.shell = shell;
  even_elastic_look_for(&at->hosts, &at->agents[1]);
  assert_int_equal(elastic->left_count, 1);
  elastic->left[0].next_ns = 0;
  at->ranks[0].joined = at->ranks[1].joined = true;
  even_elastic_look_back(&at->job);
  assert_int_equal(elastic->left[0].tries, 0);
  at->ranks[1].stepped = true;
  even_elastic_look_back(&at->job);
  assert_int_equal(elastic->left[0].tries, 1); /* there is no such shell */
  assert_null(elastic->guests[0]);
}

/* One with notice, which left while ranks were waited for, is there no sooner for their having come. */
static void a_host_is_not_started_before_the_time_of_its_notice_is_over(void **state) {
  scene *at = *state;
  even_elastic_left *left = &at->hosts.elastic->left[0];
  uint64_t until = even_clock_ns() + 600000000000u;
  at->hosts.params.shell = shell;
  at->agents[1].back_ns = until;
  assert_true(even_elastic_look_for(&at->hosts, &at->agents[1]));
  assert_true(left->next_ns == until);
  at->agents[1].comes_back = true; /* until then it was waited for */
  assert_true(even_elastic_look_for(&at->hosts, &at->agents[1]));
  assert_true(left->next_ns < until);
}

/* An attempt is over, and a host still writes what a rank of it had taken, for longer than it may clear up. */
static void a_host_that_writes_a_checkpoint_is_waited_for(void **state) {
  static const char writes[] = "{\"writes\":true}";
  const even_message message = {.kind = EVEN_MESSAGE_SETTLED, .json = writes, .json_bytes = sizeof writes - 1};
  scene *at = *state;
  even_host_agent *agent = &at->agents[2];
  agent->busy = true;
  agent->input = agent->watches[0].fd = agent->watches[1].fd = -1;
  clock_ahead_set(0);
  uint64_t since_ns = even_clock_ns();
  for (int i = 0; i < 3; i++) {
    clock_ahead_add(50 * SECOND_NS);
    assert_false(even_job_hosts_settled(&at->job, since_ns));
    assert_int_equal(even_hosts_job_message(agent, &message), EVEN_OK);
    assert_true(agent->busy && !agent->lost);
  }
  clock_ahead_add(61 * SECOND_NS); /* without a word */
  assert_true(even_job_hosts_settled(&at->job, since_ns));
  assert_true(agent->lost);
  agent->busy = true;
  assert_int_equal(even_hosts_job_message(agent, &message), EVEN_OK);
  assert_false(even_job_hosts_settled(&at->job, since_ns));
  at->job.interrupted = SIGINT;
  assert_true(even_job_hosts_settled(&at->job, since_ns));
}

static void hear_end(void *context, even_link *link) {
  (void)link;
  *(bool *)context = true;
}

/* As between two attempts, when an agent may be busy for long. */
static void an_agent_that_stands_still_is_lost_also_while_it_takes_a_checkpoint(void **state) {
  const uint64_t hour_ns = 3600000000000u;
  scene *at = *state;
  bool ended = false;
  even_link link = {.loop = &at->hosts.loop,
                    .fd = open("/dev/null", O_RDWR | O_CLOEXEC),
                    .watch = {.fd = -1},
                    .peer = "10.79.0.2",
                    .calls = {.context = &ended, .ended = hear_end},
                    .heard_ns = even_clock_ns()};
  assert_true(link.fd >= 0);
  assert_int_equal(scratch_make(NULL), 0);
  assert_int_equal(save_sample(scratch_path("step-1"), false, 1), EVEN_OK);
  at->agents[2].link = &link;
  clock_ahead_set(hour_ns);
  even_hosts_tick(&at->hosts);
  assert_false(ended);
  link.heard_ns = even_clock_ns();
  assert_int_equal(even_bring_begin(&at->job, &at->agents[2], scratch_path("step-1"), false, false), EVEN_OK);
  clock_ahead_add(hour_ns);
  even_hosts_tick(&at->hosts);
  assert_true(ended);
  assert_int_equal(even_link_why(&link)->status, EVEN_ERR_TIMEOUT);
  even_bring_drop(&at->agents[2]);
  at->agents[2].link = NULL;
  even_link_close(&link);
  assert_int_equal(scratch_remove(NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(who_has_a_global_batch_goes_on_and_others_wait, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(who_was_not_told_to_wait_does_not_wait_for_ever, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(nobody_goes_on_without_a_witness_that_is_lost, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(a_lost_host_is_looked_for_where_ranks_can_be_asked_to_save, open_scene,
                                      close_scene),
      cmocka_unit_test_setup_teardown(a_host_is_not_started_before_the_time_of_its_notice_is_over, open_scene,
                                      close_scene),
      cmocka_unit_test_setup_teardown(a_host_that_writes_a_checkpoint_is_waited_for, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(an_agent_that_stands_still_is_lost_also_while_it_takes_a_checkpoint, open_scene,
                                      close_scene),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
