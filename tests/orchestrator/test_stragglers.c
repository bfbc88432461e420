/* Ranks that hold the others up, without agents: who is ended, when, and who never is. Rank 1 is a real process, ranks
 * 2 and 3 are another host's; their steps are written into rings as ranks do. */
#include "orchestrator/stragglers.h"

#include "base/fail.h"
#include "fault/generation_sets.h"
#include "orchestrator/boards.h"
#include "os/calls.h"
#include "os/clock.h"

#include "job_alone.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 5, SLOW = 1, THERE = 2, SPARE = 4, BATCH = 64 };

typedef struct bench {
  even_job job;
  even_agent_params params;
  even_job_rank ranks[RANKS];
  int snapshots[RANKS];
  size_t order[RANKS];
  even_device each_device[RANKS];
  even_device_list devices;
  even_hosts hosts;
  even_host_agent agents[2];
  even_link link;
  even_generation *view;
  even_telemetry *rings[RANKS];
  int telemetry_fd;
  double seconds[RANKS]; /* of a sample; a step takes 2 of them more */
  uint32_t step;
  uint64_t now_ns; /* of the steps */
  even_text said;  /* to the user: "text|text|" */
  even_text told;  /* to the observer */
} bench;

static bench own;
static pid_t child;
static int killed;

static void note(void *context, const char *text) {
  (void)context;
  even_text_format(&own.said, "%s|", text);
}

static void note_end(void *context, int rank, const char *words) {
  (void)context;
  even_text_format(&own.told, "%d %s|", rank, words);
}

static int note_kill(pid_t pid, int number) {
  killed += number == SIGKILL && pid == -child ? 1 : 0;
  return 0;
}

static even_status open_bench(even_on_straggler way, bool spare) {
  even_text_free(&own.said);
  even_text_free(&own.told);
  memset(&own, 0, sizeof own);
  own.telemetry_fd = -1;
  own.devices = (even_device_list){.items = own.each_device, .count = RANKS};
  own.params = (even_agent_params){.shrink = true,
                                   .replace = way == EVEN_ON_STRAGGLER_REPLACE,
                                   .spares = 1,
                                   .least_ranks = 1,
                                   .on_straggler = way,
                                   .straggler_seconds = 1e-9,
                                   .straggler_pause_seconds = 3600,
                                   .devices = &own.devices,
                                   .observer = {.notice = note, .straggler_ended = note_end}};
  own.link = (even_link){.fd = -1, .peer = "10.79.0.2"};
  own.agents[1] =
      (even_host_agent){.index = 1, .name = "there", .link = &own.link, .first = THERE, .count = 2, .busy = true};
  own.hosts = (even_hosts){.agents = own.agents, .count = 2};
  EVEN_TRY(even_telemetry_create_segment(RANKS, 0, &own.telemetry_fd));
  own.params.telemetry_fd = own.telemetry_fd;
  own.job = (even_job){.params = &own.params,
                       .ranks = own.ranks,
                       .count = RANKS,
                       .local = THERE,
                       .alive = RANKS,
                       .order = own.order,
                       .host = "here",
                       .groups = 1,
                       .most_groups = 1,
                       .master_address = "10.79.0.1",
                       .snapshots = own.snapshots,
                       .generation_fd = -1,
                       .oom = {.kernel_log = -1}};
  for (size_t i = 0; i < RANKS; i++) {
    own.seconds[i] = 0.01;
    own.ranks[i].alive = i < SPARE || spare;
    EVEN_TRY(even_telemetry_open(own.telemetry_fd, (int)i, &own.rings[i]));
  }
  own.ranks[SLOW].pid = child;
  EVEN_TRY(job_alone_begin(&own.job, own.telemetry_fd, &own.view));
  EVEN_TRY(even_stragglers_open(&own.job, &own.job.stragglers));
  even_stragglers_begin(own.job.stragglers);
  if (spare && way == EVEN_ON_STRAGGLER_REPLACE) {
    even_generation_offer(own.view, SPARE);
  }
  own.now_ns = even_clock_ns();
  return EVEN_OK;
}

static int close_bench(void **state) {
  (void)state;
  even_generation_close(own.view);
  even_stragglers_close(own.job.stragglers);
  even_job_generations_close(&own.job);
  even_progress_close(&own.job.progress);
  for (size_t i = 0; i < RANKS; i++) {
    even_telemetry_close(own.rings[i]);
  }
  if (own.telemetry_fd >= 0) {
    (void)close(own.telemetry_fd);
  }
  even_text_free(&own.said);
  even_text_free(&own.told);
  return 0;
}

static int set_up(void **state) {
  (void)state;
  killed = 0;
  child = fork();
  if (child == 0) {
    for (;;) {
      (void)pause();
    }
  }
  even_os.kill = note_kill;
  memset(&own, 0, sizeof own);
  return child > 0 ? 0 : -1;
}

static int tear_down(void **state) {
  int closed = close_bench(state);
  even_os = even_os_real;
  (void)kill(child, SIGKILL);
  (void)waitpid(child, NULL, 0);
  return closed;
}

/* Equal shares; a look after every `each` steps, as if a second had passed. */
static void steps(int count, int each) {
  for (int i = 0; i < count; i++) {
    double longest = 0;
    for (int r = 0; r < SPARE; r++) {
      double busy = own.seconds[r] * (2 + BATCH / SPARE);
      longest = busy > longest && own.ranks[r].alive ? busy : longest;
    }
    own.now_ns += (uint64_t)(longest * 1e9);
    for (int r = 0; r < SPARE; r++) {
      const even_step_record record = {.step = own.step,
                                       .end_ns = own.now_ns,
                                       .duration_ns = (uint64_t)(longest * 1e9),
                                       .busy_ns = (uint64_t)(1e9 * own.seconds[r] * (2 + BATCH / SPARE)),
                                       .samples = BATCH / SPARE,
                                       .batch = BATCH};
      if (own.ranks[r].alive) {
        even_telemetry_step(own.rings[r], &record);
      }
    }
    own.step++;
    if (own.step % (uint32_t)each == 0) {
      even_stragglers_look_now(own.job.stragglers);
      even_stragglers_tick(own.job.stragglers, &own.job);
    }
  }
}

static const char *said(void) {
  return even_text_string(&own.said);
}

static void expect_said(const char *words) {
  if (strstr(said(), words) == NULL) {
    fail_msg("\"%s\" not in \"%s\"", words, said());
  }
}

static void a_rank_without_which_steps_are_shorter_leaves(void **state) {
  (void)state;
  assert_int_equal(open_bench(EVEN_ON_STRAGGLER_LEAVE, false), EVEN_OK);
  steps(100, 10);
  assert_string_equal(said(), "");
  own.seconds[SLOW] = 0.04; /* four times slower: 720 ms beside 180, and 240 of three alone */
  steps(30, 10);
  assert_int_equal(killed, 0); /* not long enough, whatever the patience */
  steps(60, 10);
  assert_int_equal(killed, 1);
  assert_true(own.ranks[SLOW].slow);
  expect_said("rank 1 ( on here) holds the others up, and is ended: by the balancer's models steps take 7");
  expect_said(" ms without it (for ");
  assert_non_null(strstr(even_text_string(&own.told), "1 rank 1 ( on here) holds the others up"));
  even_fault_facts facts = even_job_facts(&own.job, SLOW);
  assert_non_null(facts.slow);
  own.seconds[2] = 0.04; /* another one: not within the pause */
  own.ranks[SLOW].alive = false;
  own.ranks[2].pid = child;
  steps(200, 10);
  assert_int_equal(killed, 1);
  expect_said("rank 2 () holds the others up, and is kept: another rank was ended less than 3600 s ago|");
}

static void one_that_helps_stays_however_slow(void **state) {
  (void)state;
  assert_int_equal(open_bench(EVEN_ON_STRAGGLER_LEAVE, false), EVEN_OK);
  own.params.shares_follow = true; /* with its share of samples steps are shorter than without it */
  steps(100, 10);
  own.seconds[SLOW] = 0.04;
  steps(300, 10);
  assert_int_equal(killed, 0);
  assert_string_equal(said(), "");
  own.params.shares_follow = false; /* a little slower: equal shares of three would take longer */
  own.seconds[SLOW] = 0.012;
  steps(300, 10);
  assert_int_equal(killed, 0);
  assert_string_equal(said(), "");
}

static void one_that_recovers_in_time_stays(void **state) {
  (void)state;
  assert_int_equal(open_bench(EVEN_ON_STRAGGLER_LEAVE, false), EVEN_OK);
  steps(100, 10);
  for (int i = 0; i < 5; i++) {
    own.seconds[SLOW] = 0.04;
    steps(30, 10);
    own.seconds[SLOW] = 0.01;
    steps(60, 10);
  }
  assert_int_equal(killed, 0);
}

static void what_others_need_is_kept_with_the_reason(void **state) {
  (void)state;
  assert_int_equal(open_bench(EVEN_ON_STRAGGLER_LEAVE, false), EVEN_OK);
  own.params.least_ranks = 4;
  steps(100, 10);
  own.seconds[SLOW] = 0.04;
  steps(200, 10);
  assert_int_equal(killed, 0);
  expect_said("rank 1 () holds the others up, and is kept: 3 are left, and --min-ranks is 4|");
  size_t length = own.said.length;
  steps(200, 10);
  assert_int_equal(own.said.length, length); /* said once */
  own.params.least_ranks = 1;
  even_generation_say(own.view, 2, "LBFGS makes several backward passes in one step");
  steps(20, 10);
  assert_int_equal(killed, 0);
  expect_said("kept: rank 2: LBFGS makes several backward passes in one step|");
  even_generation_say(own.view, 2, "");
  own.job.draining = SIGTERM; /* the job ends anyway */
  steps(200, 10);
  assert_int_equal(killed, 0);
  own.job.draining = 0;
  own.job.undecided_ns = 1; /* or what became of another one is not known */
  steps(200, 10);
  assert_int_equal(killed, 0);
  own.job.undecided_ns = 0;
  steps(200, 10);
  assert_int_equal(killed, 1);
}

/* Its host's last one: the host goes by `evenstep drain`. */
static void the_last_one_of_a_host_is_kept(void **state) {
  (void)state;
  assert_int_equal(open_bench(EVEN_ON_STRAGGLER_LEAVE, false), EVEN_OK);
  own.job.hosts = &own.hosts;
  own.job.most_groups = 2; /* of which one has come */
  own.ranks[0].alive = false;
  for (size_t i = THERE; i < SPARE; i++) {
    own.ranks[i].elsewhere = true;
  }
  steps(100, 10);
  own.seconds[SLOW] = 0.04;
  steps(200, 10);
  assert_int_equal(killed, 0);
  expect_said("kept: it is the last one of its host (`evenstep drain here` lets that go)|");
}

/* An attempt that outlasted its leader: nobody of another host can give the state of training (replace.c). */
static void one_whose_place_would_stay_empty_is_kept(void **state) {
  (void)state;
  assert_int_equal(open_bench(EVEN_ON_STRAGGLER_REPLACE, false), EVEN_OK);
  own.job.hosts = &own.hosts;
  own.job.most_groups = 2;
  for (size_t i = THERE; i < SPARE; i++) {
    own.ranks[i].elsewhere = true;
  }
  own.ranks[0].alive = false;
  steps(100, 10);
  own.seconds[SLOW] = 0.04;
  steps(200, 10);
  assert_int_equal(killed, 0);
  expect_said("kept: a process in its place could not get the state of training there under this leader|");
  own.ranks[0].alive = true; /* from this one it can */
  steps(300, 10);
  assert_int_equal(killed, 1);
}

static void a_slow_rank_is_replaced_by_who_waits(void **state) {
  (void)state;
  assert_int_equal(open_bench(EVEN_ON_STRAGGLER_REPLACE, true), EVEN_OK);
  own.params.shares_follow = true;
  steps(100, 10);
  assert_int_equal(killed, 0);
  own.seconds[SLOW] = 0.04;
  steps(100, 10);
  assert_int_equal(killed, 1);
  expect_said(" ms with the process that waits for a place (for ");
  assert_true(even_stragglers_rest_ns(own.job.stragglers, SLOW) > 0);
  assert_int_equal(even_stragglers_rest_ns(own.job.stragglers, SPARE), 0);
}

/* Where nobody waits a new process takes its place: once, for what is slow then is not the process. */
static void a_new_process_is_tried_once(void **state) {
  (void)state;
  assert_int_equal(open_bench(EVEN_ON_STRAGGLER_REPLACE, false), EVEN_OK);
  own.params.straggler_pause_seconds = 1e-9;
  steps(100, 10);
  own.seconds[SLOW] = 0.04;
  steps(100, 10);
  assert_int_equal(killed, 1);
  expect_said(" ms with one as fast as it was before (for ");
  assert_int_equal(even_stragglers_rest_ns(own.job.stragglers, SLOW), 0);
  even_stragglers_begin_rank(own.job.stragglers, SLOW);
  own.seconds[SLOW] = 0.01;
  steps(100, 10);
  own.seconds[SLOW] = 0.04;
  steps(300, 10);
  assert_int_equal(killed, 1);
}

/* Ranks that are members no more: that they were as fast as ever says nothing of those who go on, for whom the whole
 * machine is slower now. */
static void who_has_left_is_no_measure_for_the_others(void **state) {
  (void)state;
  assert_int_equal(open_bench(EVEN_ON_STRAGGLER_REPLACE, false), EVEN_OK);
  own.params.shares_follow = true;
  steps(100, 10);
  own.ranks[0].alive = own.ranks[3].alive = false;
  steps(20, 10);
  own.seconds[SLOW] = own.seconds[2] = 0.018;
  steps(200, 10);
  assert_int_equal(killed, 0);
  own.seconds[SLOW] = 0.072; /* and this one beside the other one */
  steps(200, 10);
  assert_int_equal(killed, 1);
}

static void nobody_is_ended_who_makes_no_steps(void **state) {
  (void)state;
  assert_int_equal(open_bench(EVEN_ON_STRAGGLER_LEAVE, false), EVEN_OK);
  steps(100, 10);
  own.seconds[SLOW] = 0.04;
  steps(20, 10);
  for (int i = 0; i < 1000; i++) { /* all stand still: dead or not is for others to say */
    even_stragglers_look_now(own.job.stragglers);
    even_stragglers_tick(own.job.stragglers, &own.job);
  }
  assert_int_equal(killed, 0);
}

static void steps_of_ranks_that_train_apart_are_not_compared(void **state) {
  (void)state;
  assert_int_equal(open_bench(EVEN_ON_STRAGGLER_LEAVE, false), EVEN_OK);
  even_generation_train_apart(own.view);
  steps(100, 10);
  own.seconds[SLOW] = 0.04;
  steps(300, 10);
  assert_int_equal(killed, 0);
}

static void without_the_wish_nobody_looks(void **state) {
  (void)state;
  assert_int_equal(open_bench(EVEN_ON_STRAGGLER_KEEP, false), EVEN_OK);
  assert_null(own.job.stragglers);
  even_stragglers_tick(NULL, &own.job);
  even_stragglers_begin_rank(NULL, 0);
  assert_int_equal(even_stragglers_rest_ns(NULL, 0), 0);
}

#define BENCH_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      BENCH_TEST(a_rank_without_which_steps_are_shorter_leaves),
      BENCH_TEST(one_that_helps_stays_however_slow),
      BENCH_TEST(one_that_recovers_in_time_stays),
      BENCH_TEST(what_others_need_is_kept_with_the_reason),
      BENCH_TEST(the_last_one_of_a_host_is_kept),
      BENCH_TEST(one_whose_place_would_stay_empty_is_kept),
      BENCH_TEST(a_slow_rank_is_replaced_by_who_waits),
      BENCH_TEST(a_new_process_is_tried_once),
      BENCH_TEST(who_has_left_is_no_measure_for_the_others),
      BENCH_TEST(nobody_is_ended_who_makes_no_steps),
      BENCH_TEST(steps_of_ranks_that_train_apart_are_not_compared),
      BENCH_TEST(without_the_wish_nobody_looks),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
