/* Ranks that hang while others wait for them to come, without agents: one for which those wait that stand between two
 * steps, one that never comes so far that it could join, one that never comes to torch's init_process_group. What ranks
 * are at is written into rings as they do. */
#include "orchestrator/hangs.h"

#include "base/fail.h"
#include "fault/generation.h"
#include "orchestrator/job_attempt.h"
#include "orchestrator/waiting.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/process_threads.h"

#include "job_alone.h"
#include "support/clock_ahead.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* Turns of half a second; a limit of 1 s, and so 10 s where nothing is known. */
enum { RANKS = 4, HANGS = 0, STANDS = 1, LOST = 2, SPARE = 3, FIRST_PROCESS = 0x7ffffff0, TURNS = 60 };

typedef struct bench {
  even_job job;
  even_agent_params params;
  even_job_rank ranks[RANKS];
  int snapshots[RANKS];
  size_t order[RANKS];
  even_device each_device[RANKS];
  even_device_list devices;
  even_generation *view;
  even_telemetry *rings[RANKS];
  int telemetry_fd;
  even_text said; /* to the user: "text|text|" */
} bench;

static bench own;
static bool killed[RANKS];

static void note(void *context, const char *text) {
  even_text_format(context, "%s|", text);
}

static int note_kill(pid_t pid, int number) {
  int64_t rank = -(int64_t)pid - FIRST_PROCESS;
  if (number == SIGKILL && rank >= 0 && rank < RANKS) {
    killed[rank] = true;
  }
  return 0;
}

static even_status open_bench(void) {
  memset(&own, 0, sizeof own);
  own.devices = (even_device_list){.items = own.each_device, .count = RANKS};
  EVEN_TRY(even_telemetry_create_segment(RANKS, 64, &own.telemetry_fd));
  own.params = (even_agent_params){.shrink = true,
                                   .replace = true,
                                   .spares = 1,
                                   .least_ranks = 1,
                                   .devices = &own.devices,
                                   .telemetry_fd = own.telemetry_fd,
                                   .hang_seconds = 1,
                                   .restart_hung = true,
                                   .observer = {.context = &own.said, .notice = note}};
  own.job = (even_job){.params = &own.params,
                       .ranks = own.ranks,
                       .count = RANKS,
                       .local = RANKS,
                       .first_spare = SPARE,
                       .spares = 1,
                       .alive = RANKS,
                       .order = own.order,
                       .snapshots = own.snapshots,
                       .loop = {.fd = -1},
                       .guardian = {.pid = -1, .pipe = -1},
                       .generation_fd = -1,
                       .oom = {.kernel_log = -1}};
  even_text_add(&own.job.run_folder, "/nowhere"); /* no process can be started, and no stack be kept */
  for (int i = 0; i < RANKS; i++) {
    (void)snprintf(own.each_device[i].name, sizeof own.each_device[i].name, "cpu:%d", i);
    own.ranks[i].alive = true;
    own.ranks[i].pid = FIRST_PROCESS + i;
    EVEN_TRY(even_telemetry_open(own.telemetry_fd, i, &own.rings[i]));
  }
  EVEN_TRY(even_loop_open(&own.job.loop));
  EVEN_TRY(job_alone_begin(&own.job, own.telemetry_fd, &own.view));
  EVEN_TRY(even_hangs_open(&own.job, &own.job.hangs));
  even_hangs_begin(own.job.hangs);
  return EVEN_OK;
}

static int set_up(void **state) {
  (void)state;
  clock_ahead_set(0);
  memset(killed, 0, sizeof killed);
  even_os.kill = note_kill;
  return open_bench() == EVEN_OK ? 0 : -1;
}

static int tear_down(void **state) {
  (void)state;
  even_os = even_os_real;
  even_hangs_close(own.job.hangs);
  for (int i = 0; i < RANKS; i++) {
    even_telemetry_close(own.rings[i]);
  }
  even_generation_close(own.view);
  even_job_generations_close(&own.job);
  even_progress_close(&own.job.progress);
  even_loop_close(&own.job.loop);
  even_text_free(&own.job.run_folder);
  even_text_free(&own.said);
  return close(own.telemetry_fd);
}

/* For the rank's first init_process_group. */
static void tell_of_opening(int rank, even_event event) {
  const even_event_record record = {.event = (uint32_t)event, .value = 1, .at_ns = even_clock_ns()};
  even_telemetry_event(own.rings[rank], &record);
}

static bool was_said(const char *words) {
  return strstr(even_text_string(&own.said), words) != NULL;
}

static void make_a_step(int rank) {
  const even_step_record step = {.step = 1};
  static const even_activity way[] = {EVEN_ACTIVITY_DATA, EVEN_ACTIVITY_FORWARD, EVEN_ACTIVITY_COLLECTIVE,
                                      EVEN_ACTIVITY_OPTIMIZER, EVEN_ACTIVITY_SCRIPT};
  for (size_t i = 0; i < sizeof way / sizeof way[0]; i++) {
    even_telemetry_enter(own.rings[rank], way[i]);
  }
  even_telemetry_step(own.rings[rank], &step);
}

/* Until that is said, or as many turns are over; `active` goes on meanwhile (-1: nobody), and so does the next. */
static void turn_until(const char *words, int active) {
  for (int i = 0; i < TURNS && !was_said(words); i++) {
    clock_ahead_add(500000000u);
    for (int rank = active; active >= 0 && rank <= LOST && own.ranks[rank].alive; rank++) {
      make_a_step(rank);
    }
    assert_int_equal(even_job_turn(&own.job), EVEN_OK);
  }
}

/* Rank 2 is killed, the spare has offered itself, and rank 1 stands after its step. */
static void lose_one_and_stand(void) {
  const bool gone[RANKS] = {[LOST] = true};
  for (int rank = HANGS; rank <= STANDS; rank++) {
    make_a_step(rank);
    even_telemetry_enter(own.rings[rank], EVEN_ACTIVITY_SCRIPT);
  }
  own.ranks[LOST].alive = false;
  own.job.alive--;
  assert_int_equal(even_generation_lose(own.job.generation, gone), 1);
  even_job_replace_lost(&own.job, LOST);
  even_generation_offer(own.view, SPARE);
  assert_int_equal(even_job_turn(&own.job), EVEN_OK);
  assert_int_equal(even_generation_wished(own.view), EVEN_WISH_STAND);
  even_telemetry_enter(own.rings[STANDS], EVEN_ACTIVITY_COLLECTIVE);
  even_generation_stand(own.view, STANDS, 1);
}

static void who_hangs_while_others_stand_is_told_and_ended(void **state) {
  (void)state;
  lose_one_and_stand();
  turn_until("stacks of rank 0", -1);
  assert_true(was_said("rank 0 (cpu:0, process 2147483632) hangs: no progress for 1"));
  assert_true(
      was_said("in the script's own code (limit 10 s, as nothing is known of how long this takes); "
               "1 rank waits for it|"));
  assert_false(was_said("rank 1 (cpu:1, process"));
  assert_true(killed[HANGS] && !killed[STANDS] && !killed[SPARE]);
  assert_int_equal(own.job.stage, EVEN_JOB_RUNS); /* the others go on without it */
}

/* However long that takes; and it counts for nothing afterwards. */
static void who_stands_does_not_hang(void **state) {
  (void)state;
  lose_one_and_stand();
  for (int i = 0; i < TURNS; i++) {
    clock_ahead_add(500000000u);
    make_a_step(HANGS);
    assert_int_equal(even_job_turn(&own.job), EVEN_OK);
  }
  assert_false(was_said("hangs"));
  even_generation_stand(own.view, HANGS, 1);
  assert_int_equal(even_job_turn(&own.job), EVEN_OK);
  assert_true(was_said("generation 2: rank 3 joins ranks 0 and 1|"));
  make_a_step(STANDS);
  even_telemetry_enter(own.rings[STANDS], EVEN_ACTIVITY_DATA);
  even_telemetry_enter(own.rings[STANDS], EVEN_ACTIVITY_FORWARD);
  for (int i = 0; i < TURNS && !was_said("hangs"); i++) {
    clock_ahead_add(500000000u);
    make_a_step(HANGS);
    make_a_step(SPARE);
    assert_int_equal(even_job_turn(&own.job), EVEN_OK);
  }
  assert_true(was_said("rank 1 (cpu:1, process 2147483633) hangs: no progress for 1"));
  assert_true(was_said("s in compute (forward) (limit 1 s; p99 here "));
}

static void who_never_comes_to_join_is_told_and_ended_alone(void **state) {
  (void)state;
  turn_until("stacks of rank 3", HANGS);
  assert_true(was_said("rank 3 (cpu:3, process 2147483635) hangs: no progress for 1"));
  assert_true(was_said("s in start ("));
  assert_true(was_said("(limit 10 s, as nothing is known of how long this takes)|"));
  assert_true(killed[SPARE] && own.ranks[SPARE].hung);
  assert_false(killed[HANGS] || killed[STANDS] || killed[LOST]);
  assert_int_equal(own.job.stage, EVEN_JOB_RUNS);
}

static void who_is_only_to_be_told_of_is_not_ended(void **state) {
  (void)state;
  own.params.restart_hung = false;
  even_hangs_close(own.job.hangs);
  assert_int_equal(even_hangs_open(&own.job, &own.job.hangs), EVEN_OK);
  even_hangs_begin(own.job.hangs);
  turn_until("stacks of rank 3", HANGS);
  assert_true(was_said("rank 3 (cpu:3, process 2147483635) hangs: no progress for 1"));
  assert_false(killed[SPARE]);
  even_generation_offer(own.view, SPARE);
  turn_until("rank 3 goes on: it was slow, and did not hang|", HANGS);
  assert_true(was_said("rank 3 goes on: it was slow, and did not hang|"));
}

static void a_spare_that_waits_does_not_hang(void **state) {
  (void)state;
  even_generation_offer(own.view, SPARE);
  turn_until("hangs", HANGS);
  assert_false(was_said("hangs"));
}

/* A spare is no member: torch's group does not wait for it. */
static void who_never_comes_to_init_process_group_is_told(void **state) {
  (void)state;
  own.params.restart_hung = false;
  even_hangs_close(own.job.hangs);
  assert_int_equal(even_hangs_open(&own.job, &own.job.hangs), EVEN_OK);
  even_hangs_begin(own.job.hangs);
  turn_until("hangs", -1); /* nobody waits: whatever all are at takes as long as it takes */
  assert_false(was_said("hangs"));
  tell_of_opening(0, EVEN_EVENT_OPENING);
  tell_of_opening(2, EVEN_EVENT_OPENING);
  for (int i = 0; i < 19; i++) { /* and counts for nothing once somebody does */
    clock_ahead_add(500000000u);
    assert_int_equal(even_job_turn(&own.job), EVEN_OK);
  }
  assert_false(was_said("hangs"));
  turn_until("stacks of rank 1", -1);
  assert_true(was_said("rank 1 (cpu:1, process 2147483633) hangs: no progress for 1"));
  assert_true(
      was_said("s in start (the script's own code) (limit 10 s, as nothing is known of how long this takes); "
               "2 ranks wait for it in init_process_group|"));
  assert_false(was_said("rank 0 (cpu:0, process") || was_said("rank 2 (cpu:2, process"));
  assert_false(was_said("rank 3 (cpu:3, process"));
  tell_of_opening(1, EVEN_EVENT_OPENING);
  turn_until("goes on", -1);
  assert_true(was_said("rank 1 goes on: it was slow, and did not hang|"));
}

static void say_that_all_wait(even_host_agent *agent, bool all) {
  json_t *word = json_pack("{s:b}", "all", all);
  assert_int_equal(even_job_waiting_take(&own.job, agent, word, even_clock_ns()), EVEN_OK);
  json_decref(word);
}

/* One host's agent sees its own ranks wait; that those of all others do, too, its leader tells it. */
static void who_waits_for_other_hosts_hangs_only_where_these_wait_too(void **state) {
  (void)state;
  make_a_step(0);
  make_a_step(0);
  even_telemetry_enter(own.rings[0], EVEN_ACTIVITY_COLLECTIVE);
  own.ranks[1].elsewhere = own.ranks[2].elsewhere = true;
  own.ranks[SPARE].alive = false;
  turn_until("hangs", -1);
  assert_false(was_said("hangs"));
  assert_true(own.job.waiting.own);
  say_that_all_wait(NULL, true);
  say_that_all_wait(NULL, false);
  turn_until("hangs", -1);
  assert_false(was_said("hangs"));
  say_that_all_wait(NULL, true);
  clock_ahead_add(3000000000u); /* what is not said again does not hold */
  turn_until("hangs", -1);
  assert_false(was_said("hangs"));
  say_that_all_wait(NULL, true);
  turn_until("stacks of rank 0", -1);
  assert_true(was_said("rank 0 (cpu:0, process 2147483632) hangs: no progress for "));
  assert_true(was_said("s in collective (limit 1 s; p99 here "));
  assert_true(was_said("; all ranks of all hosts wait in collectives|"));
  assert_false(was_said("rank 1 (cpu:1") || was_said("rank 2 (cpu:2"));
  json_t *odd = json_pack("{s:i}", "all", 1);
  assert_int_equal(even_job_waiting_take(&own.job, NULL, odd, even_clock_ns()), EVEN_ERR_INPUT);
  json_decref(odd);
}

/* The leader says so once all hosts have, and takes it back with the first that goes on. */
static void the_leader_says_that_all_wait(void **state) {
  (void)state;
  even_host_agent agents[3] = {{.count = 1}, {.count = 1, .busy = true}, {.count = 1, .busy = true}};
  even_hosts hosts = {.agents = agents, .count = 3};
  own.job.hosts = &hosts;
  even_job_waiting_begin(&own.job);
  even_job_waiting_say(&own.job, true, even_clock_ns());
  assert_false(own.job.waiting.all);
  say_that_all_wait(&agents[1], true);
  even_job_waiting_say(&own.job, true, even_clock_ns());
  assert_false(own.job.waiting.all);
  say_that_all_wait(&agents[2], true);
  even_job_waiting_say(&own.job, true, even_clock_ns());
  assert_true(own.job.waiting.all);
  say_that_all_wait(&agents[1], false);
  even_job_waiting_say(&own.job, true, even_clock_ns());
  assert_false(own.job.waiting.all);
  agents[1].busy = false; /* it has no ranks any more */
  even_job_waiting_say(&own.job, true, even_clock_ns());
  assert_true(own.job.waiting.all);
  even_job_waiting_say(&own.job, false, even_clock_ns());
  assert_false(own.job.waiting.all);
  own.job.hosts = NULL;
}

typedef struct reader {
  pid_t pid;
  bool helped; /* by a process that nobody waits for, and that has read more than the reader ever will */
  pid_t helper;
  int ask[2];
  int answer[2];
} reader;

static void help(int zeros, int answer) {
  static char got[1 << 20];
  int done[2];
  (void)signal(SIGCHLD, SIG_IGN);
  (void)!pipe(done);
  pid_t pid = fork();
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int i = 0; i < 64; i++) {
      (void)!read(zeros, got, sizeof got);
    }
    (void)!write(done[1], "x", 1);
    for (;;) {
      (void)pause();
    }
  }
  (void)!read(done[0], got, 1);
  (void)!write(answer, &pid, sizeof pid);
}

/* The rank, for which rank 0 waits, is a process that does nothing that takes CPU time, and reads at each turn, as from
 * storage that is slow. */
static void start_reader(reader *it, int rank) {
  assert_int_equal(pipe(it->ask) + pipe(it->answer), 0);
  it->pid = fork();
  if (it->pid == 0) {
    static char got[65536];
    char byte;
    int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    (void)setsid();
    (void)close(it->ask[1]);
    if (it->helped) {
      help(zeros, it->answer[1]);
    }
    do {
      (void)!read(zeros, got, sizeof got);
      (void)!write(it->answer[1], "x", 1);
    } while (read(it->ask[0], &byte, 1) == 1);
    _exit(0);
  }
  assert_true(it->pid > 0);
  if (it->helped) {
    assert_int_equal(read(it->answer[0], &it->helper, sizeof it->helper), sizeof it->helper);
  }
  own.ranks[rank].pid = it->pid;
  tell_of_opening(0, EVEN_EVENT_OPENING);
}

static void end_reader(reader *it) {
  assert_int_equal(kill(it->pid, SIGKILL), 0);
  assert_int_equal(waitpid(it->pid, NULL, 0), it->pid);
  assert_int_equal(close(it->ask[0]) + close(it->ask[1]) + close(it->answer[0]) + close(it->answer[1]), 0);
}

/* It reads for so many turns. Whether this kernel counts that. */
static bool read_for(reader *it, int turns) {
  bool counted = true;
  for (int i = 0; i < turns; i++) {
    char byte;
    assert_int_equal(read(it->answer[0], &byte, 1), 1);
    counted = counted && even_process_session_work(it->pid).moved_bytes > 0;
    clock_ahead_add(500000000u);
    assert_int_equal(even_job_turn(&own.job), EVEN_OK);
    assert_int_equal(write(it->ask[1], "x", 1), 1);
  }
  return counted;
}

/* Two have not come: one reads, and the other may wait for that, as for a download, for as long; and half a limit
 * longer, for what is its own. */
static void who_reads_is_slow_and_does_not_hang(void **state) {
  reader it = {.helped = false};
  (void)state;
  start_reader(&it, 1);
  if (read_for(&it, TURNS)) { /* else this kernel does not count what is read */
    assert_false(was_said("hangs"));
    tell_of_opening(1, EVEN_EVENT_OPENING);
    (void)read_for(&it, 9);
    assert_false(was_said("hangs"));
    turn_until("hangs", -1);
    assert_true(was_said("rank 2 (cpu:2, process 2147483634) hangs: no progress for "));
    assert_true(was_said("2 ranks wait for it in init_process_group|"));
    assert_false(was_said("rank 1 (cpu:1, process"));
  }
  end_reader(&it);
}

static void whose_helper_ends_has_not_gone_back(void **state) {
  reader it = {.helped = true};
  (void)state;
  start_reader(&it, 1);
  tell_of_opening(2, EVEN_EVENT_OPENING);
  if (read_for(&it, 16)) {
    assert_int_equal(kill(it.helper, SIGKILL), 0);
    (void)read_for(&it, TURNS);
    assert_false(was_said("hangs"));
  }
  end_reader(&it);
}

/* An hour in which the agent could not run, and the rank as little, is none in which the rank did nothing. */
static void time_that_passed_for_nobody_makes_no_one_idle(void **state) {
  reader it = {.helped = false};
  (void)state;
  start_reader(&it, 1);
  tell_of_opening(2, EVEN_EVENT_OPENING);
  if (read_for(&it, 16)) {
    clock_ahead_add(UINT64_C(3600) * 1000000000u);
    (void)read_for(&it, TURNS);
    assert_false(was_said("hangs"));
  }
  end_reader(&it);
}

/* Where it is to be ended, the attempt ends: nobody can go on without it before es.prepare. */
static void who_never_comes_to_init_process_group_is_ended(void **state) {
  (void)state;
  for (int rank = HANGS; rank <= LOST; rank++) {
    even_generation_say(own.view, rank, "it is not training yet");
  }
  tell_of_opening(0, EVEN_EVENT_OPENING);
  tell_of_opening(1, EVEN_EVENT_OPENING);
  turn_until("cannot go on", -1);
  assert_true(was_said("the others cannot go on without the rank that hangs: rank "));
  assert_true(own.ranks[LOST].hung && !own.ranks[HANGS].hung && !own.ranks[STANDS].hung);
  assert_int_equal(own.job.stage, EVEN_JOB_TERMINATED);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(who_waits_for_other_hosts_hangs_only_where_these_wait_too, set_up, tear_down),
      cmocka_unit_test_setup_teardown(the_leader_says_that_all_wait, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_hangs_while_others_stand_is_told_and_ended, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_stands_does_not_hang, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_never_comes_to_join_is_told_and_ended_alone, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_is_only_to_be_told_of_is_not_ended, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_spare_that_waits_does_not_hang, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_never_comes_to_init_process_group_is_told, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_reads_is_slow_and_does_not_hang, set_up, tear_down),
      cmocka_unit_test_setup_teardown(whose_helper_ends_has_not_gone_back, set_up, tear_down),
      cmocka_unit_test_setup_teardown(time_that_passed_for_nobody_makes_no_one_idle, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_never_comes_to_init_process_group_is_ended, set_up, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
