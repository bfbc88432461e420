/* Places of lost ranks (--recovery replace), without agents: set aside for a growing time; too few ranks, who wait with
 * their state saved. */
#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"
#include "orchestrator/place.h"

#include "base/fail.h"
#include "fault/generation.h"
#include "os/calls.h"
#include "os/clock.h"

#include "job_alone.h"
#include "support/clock_ahead.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 3, LOST = 1, NO_PROCESS = 0x7ffffff0 };

typedef struct bench {
  even_job job;
  even_agent_params params;
  even_job_rank ranks[RANKS];
  int snapshots[RANKS];
  size_t order[RANKS];
  even_device each_device[RANKS];
  even_device_list devices;
  even_generation *view;
  even_text said; /* to the user: "text|text|" */
} bench;

static bench own;

static void note(void *context, const char *text) {
  even_text_format(context, "%s|", text);
}

static even_status open_bench(void) {
  memset(&own, 0, sizeof own);
  own.devices = (even_device_list){.items = own.each_device, .count = RANKS};
  own.params = (even_agent_params){.shrink = true,
                                   .replace = true,
                                   .devices = &own.devices,
                                   .least_ranks = RANKS,
                                   .observer = {.context = &own.said, .notice = note}};
  own.job = (even_job){.params = &own.params,
                       .ranks = own.ranks,
                       .count = RANKS,
                       .local = RANKS,
                       .alive = RANKS,
                       .order = own.order,
                       .snapshots = own.snapshots,
                       .generation_fd = -1,
                       .oom = {.kernel_log = -1}};
  even_text_add(&own.job.run_folder, "/nowhere"); /* no process can be started */
  for (size_t i = 0; i < RANKS; i++) {
    (void)snprintf(own.each_device[i].name, sizeof own.each_device[i].name, "cpu:%zu", i);
    own.ranks[i].alive = true;
    own.ranks[i].pid = NO_PROCESS;
  }
  return job_alone_begin(&own.job, -1, &own.view);
}

static int set_up(void **state) {
  (void)state;
  clock_ahead_set(0);
  return open_bench() == EVEN_OK ? 0 : -1;
}

static int tear_down(void **state) {
  (void)state;
  even_os = even_os_real;
  even_generation_close(own.view);
  even_job_generations_close(&own.job);
  even_progress_close(&own.job.progress);
  even_text_free(&own.job.run_folder);
  even_text_free(&own.said);
  return 0;
}

static int times_said(const char *words) {
  int times = 0;
  for (const char *at = even_text_string(&own.said); (at = strstr(at, words)) != NULL; at++) {
    times++;
  }
  return times;
}

/* Rank 1 is killed, and the others are a generation without it. */
static void lose(void) {
  const bool gone[RANKS] = {[LOST] = true};
  own.ranks[LOST].alive = false;
  assert_int_equal(even_generation_lose(own.job.generation, gone), 1);
  even_job_replace_lost(&own.job, LOST);
}

static void a_place_that_fails_again_is_set_aside_for_longer_and_longer(void **state) {
  static const char tried[] = "rank 1: no process can take its place: ";
  static const struct {
    time_t wait;
    const char *said;
  } turns[] = {{10, "rank 1 (cpu:1) is set aside for 20 s: its process has ended 3 times|"},
               {20, "rank 1 (cpu:1) is set aside for 40 s: its process has ended 4 times|"},
               {40, "rank 1 (cpu:1) is set aside for 80 s: "},
               {80, "rank 1 (cpu:1) is set aside for 160 s: "},
               {160, "rank 1 (cpu:1) is set aside for 320 s: "},
               {320, "rank 1 (cpu:1) is set aside for 600 s: "},
               {600, "its process has ended 9 times|"}};
  (void)state;
  lose();
  assert_int_equal(times_said("set aside"), 0); /* the first time another comes at once */
  even_job_replace_tick(&own.job);
  assert_int_equal(times_said(tried), 1);
  assert_int_equal(times_said("rank 1 (cpu:1) is set aside for 10 s: its process has ended 2 times|"), 1);
  for (int i = 0; i < (int)(sizeof turns / sizeof turns[0]); i++) {
    clock_ahead_add((uint64_t)(turns[i].wait - 5) * 1000000000u);
    even_job_replace_tick(&own.job);
    assert_int_equal(times_said(tried), 1 + i); /* not yet */
    clock_ahead_add(UINT64_C(6000000000));
    even_job_replace_tick(&own.job);
    assert_int_equal(times_said(tried), 2 + i);
    assert_int_equal(times_said(turns[i].said), 1);
  }
  assert_int_equal(times_said("set aside for 600 s"), 2); /* never longer */
  assert_int_equal(own.job.stage, EVEN_JOB_RUNS);
}

static void with_too_few_ranks_the_others_save_and_wait(void **state) {
  (void)state;
  assert_int_equal(even_generation_wished(own.view), EVEN_WISH_NOTHING);
  lose();
  for (int i = 0; i < 3; i++) {
    even_job_replace_tick(&own.job);
    assert_int_equal(even_generation_wished(own.view), EVEN_WISH_SAVE);
  }
  assert_int_equal(
      times_said("2 ranks are left, and --min-ranks is 3: the training saves its state after this step, and "
                 "waits for others|"),
      1);
  even_generation_stand(own.view, 0, 1);
  even_generation_stand(own.view, 2, 1);
  even_job_replace_tick(&own.job);
  assert_int_equal(even_generation_number(own.view), 1); /* nobody has come */
  own.ranks[LOST].alive = true;                          /* a process is there, and could join */
  even_generation_vacate(own.job.generation, LOST);
  even_generation_say(own.view, LOST, "");
  even_job_replace_tick(&own.job);
  assert_int_equal(even_generation_number(own.view), 1); /* but has not offered itself */
  even_generation_offer(own.view, LOST);
  even_job_replace_tick(&own.job);
  assert_int_equal(even_generation_number(own.view), 2);
  assert_true(even_generation_has(own.view, LOST, 2));
  assert_int_equal(times_said("generation 2: rank 1 joins ranks 0 and 2|"), 1);
  even_job_replace_tick(&own.job);
  assert_int_equal(even_generation_wished(own.view), EVEN_WISH_NOTHING);
}

/* Another leader has taken the job over: nothing travels between its hosts, and only the rank of the other one is left.
 */
static void whom_nobody_can_give_the_state_does_not_join(void **state) {
  const bool gone[RANKS] = {true, true, false};
  even_link link = {.fd = -1};
  even_host_agent agents[] = {{.index = 0},
                              {.index = 1, .first = 2, .count = 1, .link = &link, .busy = true, .follows = true}};
  even_hosts hosts = {.agents = agents, .count = 2};
  (void)state;
  own.params.least_ranks = 1;
  own.job.hosts = &hosts;
  own.job.most_groups = 2;
  own.ranks[2].elsewhere = true;
  own.ranks[0].alive = own.ranks[LOST].alive = false;
  assert_int_equal(even_generation_lose(own.job.generation, gone), 1);
  even_job_replace_lost(&own.job, 0);
  even_job_replace_lost(&own.job, LOST);
  own.ranks[LOST].alive = true; /* it was started under the leader of before */
  even_generation_vacate(own.job.generation, LOST);
  even_generation_say(own.view, LOST, "");
  even_generation_offer(own.view, LOST);
  even_generation_stand(own.view, 2, 1);
  even_job_replace_tick(&own.job);
  assert_int_equal(even_generation_number(own.view), 2); /* who stood goes on, as the members are */
  assert_false(even_generation_has(own.view, LOST, 2));
  assert_int_equal(even_generation_wished(own.view), EVEN_WISH_NOTHING);
  own.job.most_groups = 1; /* all on one host: from its memory */
  even_generation_stand(own.view, 2, 2);
  even_job_replace_tick(&own.job);
  assert_true(even_generation_has(own.view, LOST, 3));
  own.job.hosts = NULL;
}

/* ---- an agent is killed, and the next one reads what that had noted of a place last ---- */

static void who_was_let_in_and_not_noted_is_a_member(void **state) {
  const bool joining[RANKS] = {[LOST] = true};
  const struct even_job_place noted = {.outside = true, .filled = true};
  (void)state;
  own.params.least_ranks = 1;
  lose();
  own.ranks[LOST].alive = true;
  assert_int_equal(even_generation_grow(own.job.generation, joining), 2);
  even_job_replace_restore(&own.job, LOST, &noted, true);
  assert_int_equal(even_job_members(&own.job), RANKS);
  assert_true(even_job_is_new(&own.job, LOST));
  for (int rank = 0; rank < RANKS; rank++) {
    even_generation_say(own.view, rank, "");
  }
  own.ranks[LOST].alive = false;
  own.ranks[LOST].end = (even_process_end){.pid = NO_PROCESS, .signal = 9};
  assert_false(even_job_outside_ended(&own.job, LOST)); /* else the others would wait for it for ever */
  assert_true(even_job_goes_on_without(&own.job, LOST));
  assert_int_equal(even_generation_number(own.view), 3);
}

static void who_is_gone_and_not_noted_has_its_place_taken(void **state) {
  const struct even_job_place noted[] = {{.outside = false}, {.outside = true, .filled = true}};
  const bool gone[RANKS] = {[LOST] = true};
  (void)state;
  own.params.least_ranks = 1;
  own.ranks[LOST].alive = false;
  assert_int_equal(even_generation_lose(own.job.generation, gone), 1);
  own.job.lost[LOST] = true; /* as a member, and as one that had not joined yet */
  even_job_replace_restore(&own.job, LOST, &noted[0], false);
  assert_true(even_job_is_outside(&own.job, LOST));
  even_job_replace_tick(&own.job);
  assert_int_equal(times_said("rank 1: no process can take its place: "), 1);
  own.job.lost[LOST] = false;
  own.ranks[LOST].pid = NO_PROCESS;
  even_job_replace_restore(&own.job, LOST, &noted[1], false);
  even_job_replace_tick(&own.job);
  assert_int_equal(times_said("rank 1: no process can take its place: "), 2);
  own.ranks[LOST].pid = NO_PROCESS;
  own.job.follower = (even_follower *)&own; /* of an agent that serves another one that decides, */
  even_job_replace_restore(&own.job, LOST, &noted[1], false);
  own.job.follower = NULL;
  even_job_replace_tick(&own.job);
  assert_int_equal(times_said("rank 1: no process can take its place: "), 2);
}

static void a_place_that_rests_does_so_under_the_next_agent(void **state) {
  (void)state;
  own.params.least_ranks = 1;
  const struct even_job_place noted = {
      .outside = true, .filled = true, .endings = 3, .again_ns = even_clock_ns() + UINT64_C(20000000000)};
  lose();
  own.job.lost[LOST] = true;
  even_job_replace_restore(&own.job, LOST, &noted, false);
  clock_ahead_add(UINT64_C(15000000000));
  even_job_replace_tick(&own.job);
  assert_int_equal(times_said("no process can take its place"), 0);
  clock_ahead_add(UINT64_C(6000000000));
  even_job_replace_tick(&own.job);
  assert_int_equal(times_said("no process can take its place"), 1);
  assert_int_equal(times_said("rank 1 (cpu:1) is set aside for 40 s: its process has ended 4 times|"), 1);
}

/* The rank's process has ended by this exception; "": without a word. */
static bool goes_on_after(size_t rank, const char *exception) {
  even_text *tail = &own.ranks[rank].output.streams[1].tail;
  even_text_clear(tail);
  even_text_format(tail, "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\n%s\n",
                   exception);
  own.ranks[rank].alive = false;
  own.ranks[rank].end = (even_process_end){.pid = NO_PROCESS, .code = 1};
  bool goes_on = even_job_goes_on_without(&own.job, rank);
  even_text_free(tail);
  return goes_on;
}

static const char illegal[] = "RuntimeError: CUDA error: an illegal memory access was encountered";
static const char broken[] = "RuntimeError: CUDA error: uncorrectable ECC error encountered";

static void a_broken_device_is_a_lost_rank_and_its_place_rests(void **state) {
  (void)state;
  own.params.least_ranks = 1;
  assert_true(goes_on_after(LOST, broken));
  assert_int_equal(even_generation_number(own.view), 1);
  assert_false(even_generation_has(own.view, LOST, 1));
  assert_int_equal(times_said("generation 1: ranks 0 and 2 go on without rank 1|"), 1);
  assert_int_equal(times_said("rank 1 (cpu:1) is set aside for 10 s: by its error its device is at fault|"), 1);
  assert_true(goes_on_after(2, broken)); /* each says it of its own */
  assert_int_equal(even_generation_number(own.view), 2);
}

static void what_may_be_the_scripts_is_survived_once_a_step(void **state) {
  (void)state;
  own.params.least_ranks = 1;
  own.job.progress.ranks[0].stepped = true;
  own.job.progress.ranks[0].last_step = 7;
  assert_true(goes_on_after(LOST, illegal));
  assert_int_equal(times_said("set aside"), 0); /* another process comes at once */
  own.job.progress.ranks[0].last_step = 8;
  assert_true(goes_on_after(2, "MemoryError"));
  assert_int_equal(even_generation_number(own.view), 2);
  own.ranks[2].alive = true; /* as if it had joined again */
  own.job.lost[2] = false;
  assert_false(goes_on_after(2, illegal));
  assert_int_equal(times_said("rank 2 has ended like one before it, and no step was made between"), 1);
  assert_int_equal(even_generation_number(own.view), 2);
}

static void an_error_of_the_script_is_nobodys_loss(void **state) {
  (void)state;
  own.params.least_ranks = 1;
  assert_false(goes_on_after(LOST, "ValueError: a bad sample"));
  assert_false(goes_on_after(LOST, "evenstep.EvenstepError: rank 0 died (EVEN_ERR_PEER_LOST)"));
  assert_int_equal(even_generation_number(own.view), 0);
}

static int main_ranks[4];
static int main_ranks_told;

static void note_main_rank(void *context, int rank) {
  (void)context;
  assert_true(main_ranks_told < 4);
  main_ranks[main_ranks_told++] = rank;
}

/* A rank's half line may be told once the generations are closed. */
static void the_last_output_names_no_other_main_rank(void **state) {
  const bool gone[RANKS] = {[0] = true};
  (void)state;
  main_ranks_told = 0;
  own.params.observer.main_rank = note_main_rank;
  assert_int_equal(even_generation_lose(own.job.generation, gone), 1);
  even_job_tell_main_rank(&own.job);
  assert_int_equal(main_ranks_told, 1);
  assert_int_equal(main_ranks[0], 1);
  even_job_generations_close(&own.job);
  even_job_tell_main_rank(&own.job);
  assert_int_equal(main_ranks_told, 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_place_that_fails_again_is_set_aside_for_longer_and_longer, set_up, tear_down),
      cmocka_unit_test_setup_teardown(with_too_few_ranks_the_others_save_and_wait, set_up, tear_down),
      cmocka_unit_test_setup_teardown(whom_nobody_can_give_the_state_does_not_join, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_was_let_in_and_not_noted_is_a_member, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_is_gone_and_not_noted_has_its_place_taken, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_place_that_rests_does_so_under_the_next_agent, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_broken_device_is_a_lost_rank_and_its_place_rests, set_up, tear_down),
      cmocka_unit_test_setup_teardown(what_may_be_the_scripts_is_survived_once_a_step, set_up, tear_down),
      cmocka_unit_test_setup_teardown(an_error_of_the_script_is_nobodys_loss, set_up, tear_down),
      cmocka_unit_test_setup_teardown(the_last_output_names_no_other_main_rank, set_up, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
