/* Checkpoints of ranks that died before they had written them: the agent writes them, on a disk that hangs for as long
 * as the test wants, and does all else meanwhile. The job has no agent and no processes. */
#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "checkpoint/snapshot.h"
#include "orchestrator/job_attempt.h"
#include "orchestrator/outlast.h"
#include "os/calls.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include "job_alone.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 3, NO_PROCESS = 0x7ffffff0, PATIENCE_SECONDS = 60 };

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
static void (*on_tick)(void);

/* ---- the disk ---- */

static pthread_t loop_thread;
static bool loop_waited; /* for the disk */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool hangs;
static int waiting; /* how many threads have come to it while it hung */

static void let_disk_hang(bool on) {
  (void)pthread_mutex_lock(&lock);
  hangs = on;
  waiting = on ? 0 : waiting;
  (void)pthread_cond_broadcast(&changed);
  (void)pthread_mutex_unlock(&lock);
}

static bool is_awaited(void) {
  (void)pthread_mutex_lock(&lock);
  bool any = waiting > 0;
  (void)pthread_mutex_unlock(&lock);
  return any;
}

static void await_writer(void) {
  assert_false(loop_waited);
  (void)pthread_mutex_lock(&lock);
  while (waiting == 0) {
    (void)pthread_cond_wait(&changed, &lock);
  }
  (void)pthread_mutex_unlock(&lock);
}

/* With which a checkpoint's folder begins. Nobody waits for ever, where the loop does not let them go on. */
static int make_folder(const char *path, mode_t mode) {
  struct timespec until;
  (void)clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += PATIENCE_SECONDS;
  (void)pthread_mutex_lock(&lock);
  if (hangs && pthread_equal(pthread_self(), loop_thread)) {
    loop_waited = true; /* it would stand here */
  }
  waiting += hangs ? 1 : 0;
  (void)pthread_cond_broadcast(&changed);
  while (hangs && !pthread_equal(pthread_self(), loop_thread) && pthread_cond_timedwait(&changed, &lock, &until) == 0) {
  }
  (void)pthread_mutex_unlock(&lock);
  return even_os_real.mkdir(path, mode);
}

/* ---- the job ---- */

static void note(void *context, const char *text) {
  even_text_format(context, "%s|", text);
}

static void tick(void *context) {
  (void)context;
  if (on_tick != NULL) {
    on_tick();
  }
}

static int kill_nobody(pid_t pid, int number) {
  (void)pid;
  (void)number;
  errno = ESRCH;
  return -1;
}

static void use_made_up_calls(void) {
  even_os.kill = kill_nobody;
  even_os.mkdir = make_folder;
}

/* But for its generations. */
static even_status make_bench(bench *to) {
  memset(to, 0, sizeof *to);
  to->devices = (even_device_list){.items = to->each_device, .count = RANKS};
  to->params = (even_agent_params){.shrink = true,
                                   .least_ranks = 1,
                                   .devices = &to->devices,
                                   .telemetry_fd = -1,
                                   .observer = {.context = &to->said, .notice = note, .tick = tick}};
  to->job = (even_job){.params = &to->params,
                       .ranks = to->ranks,
                       .count = RANKS,
                       .local = RANKS,
                       .alive = RANKS,
                       .order = to->order,
                       .snapshots = to->snapshots,
                       .loop = {.fd = -1},
                       .guardian = {.pid = -1, .pipe = -1},
                       .generation_fd = -1,
                       .oom = {.kernel_log = -1}};
  even_text_add(&to->job.run_folder, scratch);
  for (int i = 0; i < RANKS; i++) {
    (void)snprintf(to->each_device[i].name, sizeof to->each_device[i].name, "cpu:%d", i);
    to->ranks[i].alive = true;
    to->ranks[i].pid = NO_PROCESS + i;
  }
  even_status status = even_loop_open(&to->job.loop);
  return status == EVEN_OK ? even_guardian_start("EVENSTEP_TEST_MARK=none-such", &to->job.guardian) : status;
}

static void close_bench(bench *of) {
  even_job_snapshots_wait(&of->job);
  for (int i = 0; i < RANKS; i++) {
    even_job_snapshot_finish(&of->job, (size_t)i);
  }
  even_job_snapshots_wait(&of->job);
  even_generation_close(of->view);
  even_job_generations_close(&of->job);
  even_progress_close(&of->job.progress);
  even_guardian_stop(&of->job.guardian);
  even_loop_close(&of->job.loop);
  even_text_free(&of->job.run_folder);
  even_text_free(&of->said);
}

static int set_up(void **state) {
  if (scratch_make(state) != 0) {
    return -1;
  }
  use_made_up_calls();
  loop_thread = pthread_self();
  loop_waited = false;
  on_tick = NULL;
  let_disk_hang(false);
  return make_bench(&own) == EVEN_OK && job_alone_begin(&own.job, -1, &own.view) == EVEN_OK ? 0 : -1;
}

static int tear_down(void **state) {
  on_tick = NULL;
  let_disk_hang(false);
  close_bench(&own);
  return scratch_remove(state);
}

static bool was_said(const char *words) {
  return strstr(even_text_string(&own.said), words) != NULL;
}

/* The agent has written it, by its words. */
static const char *find_written(size_t rank, const char *name) {
  char words[320];
  (void)snprintf(words, sizeof words,
                 "rank %zu ended before its last checkpoint was written: the agent has written it: %s|", rank,
                 scratch_path(name));
  return strstr(even_text_string(&own.said), words);
}

static bool is_whole(const char *name) {
  return even_checkpoint_verify(scratch_path(name), NULL) == EVEN_OK;
}

/* What a rank does: it copies a checkpoint to the memory that it was given. */
static void take(size_t rank, const char *name) {
  even_checkpoint_snapshot *snapshot = NULL;
  even_checkpoint_tensor tensors[3];
  const even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path(name)};
  sample_tensors(tensors, (int)rank);
  const even_checkpoint_file file = {
      .size = sizeof file, .name = "model.safetensors", .tensors = tensors, .tensor_count = 3};
  int fd = even_job_snapshot_begin(&own.job, rank);
  assert_true(fd >= 0);
  assert_int_equal(even_checkpoint_snapshot_open(fcntl(fd, F_DUPFD_CLOEXEC, 0), &snapshot), EVEN_OK);
  assert_int_equal(even_checkpoint_snapshot_take(snapshot, &params, &file, 1, "{\"step\":1}"), EVEN_OK);
  even_checkpoint_snapshot_close(snapshot);
}

/* It is killed, and the others go on: generation `number`. */
static void lose(size_t rank, uint32_t number) {
  const even_process_end end = {.pid = own.ranks[rank].pid, .signal = SIGKILL};
  for (int i = 0; i < RANKS; i++) {
    even_generation_say(own.view, i, "");
  }
  even_job_rank_ended(&own.job, &own.ranks[rank], &end);
  assert_int_equal(even_generation_number(own.view), number);
}

static void note_heard(void *context, int fd) {
  char byte = 0;
  *(bool *)context = read(fd, &byte, 1) == 1;
}

/* As a link's: what comes is read. */
static bool answers(void) {
  int ends[2] = {-1, -1};
  bool heard = false;
  even_loop_watch watch = {.fd = -1};
  assert_int_equal(pipe(ends), 0);
  assert_int_equal(even_loop_add(&own.job.loop, &watch, ends[0], note_heard, &heard), EVEN_OK);
  assert_int_equal(write(ends[1], "a", 1), 1);
  assert_int_equal(even_job_turn(&own.job), EVEN_OK);
  even_loop_remove(&own.job.loop, &watch);
  (void)close(ends[0]);
  (void)close(ends[1]);
  return heard;
}

static void turn_until_all_are_written(void) {
  while (own.job.unwritten != NULL) {
    assert_int_equal(even_job_turn(&own.job), EVEN_OK);
  }
}

/* ---- while others train ---- */

static void the_loop_goes_on_while_a_lost_ranks_checkpoint_is_written(void **state) {
  (void)state;
  int before = open_descriptors();
  take(0, "first");
  take(1, "second");
  let_disk_hang(true);
  lose(0, 1);
  await_writer();
  assert_true(answers());
  lose(1, 2); /* another one, meanwhile */
  assert_true(answers());
  take(0, "third"); /* who has come to the first one's place, */
  even_job_snapshot_finish(&own.job, 0);
  assert_true(answers());
  assert_false(loop_waited);
  assert_false(was_said("written"));
  assert_false(scratch_has("first"));
  let_disk_hang(false);
  turn_until_all_are_written();
  const char *said[] = {find_written(0, "first"), find_written(1, "second"), find_written(0, "third")};
  assert_true(said[0] != NULL && said[0] < said[1] && said[1] < said[2]); /* in their order */
  assert_true(is_whole("first") && is_whole("second") && is_whole("third"));
  assert_int_equal(open_descriptors(), before);
}

static void who_has_left_nothing_costs_no_thread(void **state) {
  (void)state;
  int before = open_descriptors();
  assert_true(even_job_snapshot_begin(&own.job, 0) >= 0);
  fault_os_from(FAULT_thread_create, 1, EAGAIN);
  use_made_up_calls();
  lose(0, 1);
  assert_int_equal(fault_os_calls(FAULT_thread_create), 0);
  assert_null(own.job.unwritten);
  assert_int_equal(open_descriptors(), before);
  assert_true(even_job_snapshot_begin(&own.job, 1) >= 0);
  assert_true(even_job_snapshot_begin(&own.job, 1) >= 0); /* the next process, of one that nobody missed */
  even_job_snapshot_finish(&own.job, 1);
  assert_int_equal(open_descriptors(), before);
}

static void without_a_thread_or_memory_it_is_written_at_once(void **state) {
  (void)state;
  int before = open_descriptors();
  take(0, "first");
  fault_os(FAULT_thread_create, 1, EAGAIN);
  use_made_up_calls();
  lose(0, 1);
  assert_true(is_whole("first"));
  turn_until_all_are_written();
  fault_reset();
  use_made_up_calls();
  take(1, "second");
  fault_allocation(1);
  even_job_snapshot_finish(&own.job, 1);
  assert_true(find_written(0, "first") != NULL && find_written(1, "second") != NULL && is_whole("second"));
  assert_int_equal(open_descriptors(), before);
}

static void what_cannot_be_written_is_told(void **state) {
  (void)state;
  int before = open_descriptors();
  take(0, "first");
  assert_int_equal(save_sample(scratch_path("first"), false, 1), EVEN_OK); /* by its own process, at last */
  take(1, "no/such/folder");
  lose(0, 1);
  lose(1, 2);
  turn_until_all_are_written();
  assert_false(was_said("the agent has written it"));
  assert_true(was_said("the last checkpoint that rank 1 took was not written: "));
  assert_int_equal(open_descriptors(), before);
}

/* ---- at the attempt's end ---- */

static int ticks;

/* The disk hangs from here on. */
static even_status end_with(even_status status) {
  for (int i = 0; i < RANKS; i++) {
    own.ranks[i].alive = false;
  }
  own.job.alive = 0;
  ticks = 0;
  let_disk_hang(true);
  status = even_job_finish_attempt(&own.job, status);
  assert_false(loop_waited);
  assert_null(own.job.unwritten);
  return status;
}

static void end_attempt(void) {
  assert_int_equal(end_with(EVEN_OK), EVEN_OK);
}

static void let_go_on_once_it_waits(void) {
  if (is_awaited() && ++ticks == 2) {
    let_disk_hang(false);
  }
}

static void an_attempt_that_ends_waits_for_them(void **state) {
  (void)state;
  take(0, "first");
  take(1, "second");
  on_tick = let_go_on_once_it_waits;
  end_attempt();
  assert_true(ticks >= 2);
  assert_true(is_whole("first") && is_whole("second"));
  assert_non_null(find_written(1, "second"));
}

/* By an error of its own, and not of a rank: signs of life go out all the same. */
static void an_attempt_that_fails_waits_for_them_too(void **state) {
  (void)state;
  take(0, "first");
  on_tick = let_go_on_once_it_waits;
  own.job.failure = (even_error){.status = EVEN_ERR_SYSTEM, .what = "of a turn before"};
  assert_int_equal(end_with(even_fail(EVEN_ERR_PEER_LOST, "another host leads")), EVEN_ERR_PEER_LOST);
  assert_true(ticks >= 2);
  assert_string_equal(even_error_last()->what, "another host leads");
  assert_true(is_whole("first"));
  take(1, "second");
  assert_int_equal(end_with(EVEN_OK), EVEN_ERR_SYSTEM); /* that is the news then */
  assert_true(ticks >= 2);
  assert_string_equal(even_error_last()->what, "of a turn before");
  assert_true(is_whole("second"));
}

static int ends_by;

static void interrupt_and_let_go_on(void) {
  if (is_awaited() && ++ticks == 1) {
    even_job_end_by_user(&own.job, ends_by);
  } else if (ticks == 2) { /* the agent knows of it */
    let_disk_hang(false);
  }
}

static void ends_without_them(int before, int signal) {
  own.job.interrupted = before; /* while the attempt ran */
  ends_by = signal;
  take(0, "first");
  take(1, "second");
  on_tick = interrupt_and_let_go_on;
  end_attempt();
  assert_true(was_said("the last checkpoint that rank 0 took was not written: interrupted while "));
  assert_true(was_said("the last checkpoint that rank 1 took was not written: interrupted while "));
  assert_false(is_whole("first") || is_whole("second"));
}

static void who_is_interrupted_then_waits_for_none(void **state) {
  (void)state;
  ends_without_them(0, SIGINT);
}

static void who_is_asked_once_more_waits_for_none(void **state) {
  (void)state;
  ends_without_them(SIGTERM, SIGTERM);
}

/* ---- when the agent is killed ---- */

/* As the process that starts agents has it. */
static even_custody custody;
static even_legacy legacy;

/* An agent to which that is left. */
static void leave_to(bench *agent, even_custody *its) {
  int child = -1;
  assert_int_equal(even_custody_begin(&custody, &child), EVEN_OK);
  even_custody_join(its, child);
  legacy.custody = its;
  agent->params.legacy = &legacy;
  assert_int_equal(even_outlast_open(&agent->job), EVEN_OK);
}

static even_custody_item *find_unwritten(void) {
  even_custody_hear(&custody);
  for (size_t i = 0; i < custody.count; i++) {
    if (custody.items[i].kind == EVEN_OUTLAST_UNWRITTEN) {
      return &custody.items[i];
    }
  }
  return NULL;
}

/* What a killed one leaves, but for its life: its thread is asked to end. */
static void kill_agent(void) {
  even_job_snapshots_give_up(&own.job);
  let_disk_hang(false);
  even_job_snapshots_wait(&own.job);
  assert_true(was_said("was not written: interrupted"));
}

static void start_ranks(int pipes[RANKS][2]) {
  for (int i = 0; i < RANKS; i++) {
    own.ranks[i].pid = getpid(); /* which runs, and is not hurt */
    assert_int_equal(pipe2(pipes[i], O_CLOEXEC | O_NONBLOCK), 0);
    const even_process process = {.pid = getpid(), .output = pipes[i][0], .error = pipes[i][0]};
    even_outlast_started(&own.job, (size_t)i, &process);
  }
}

static void the_next_agent_writes_what_a_killed_one_had_begun(void **state) {
  (void)state;
  static bench next;
  int pipes[RANKS][2];
  even_custody first = {.socket = -1};
  even_custody second = {.socket = -1};
  int before = open_descriptors();
  assert_int_equal(even_legacy_open(&legacy), EVEN_OK);
  even_custody_open(&custody);
  leave_to(&own, &first);
  even_outlast_keep(&own.job);
  take(0, "first");
  start_ranks(pipes);
  let_disk_hang(true);
  lose(0, 1);
  await_writer();
  assert_non_null(find_unwritten());
  assert_int_equal(find_unwritten()->number, 0);
  second.count = custody.count;
  assert_int_equal(EVEN_NEW_ARRAY(&second.items, second.count), EVEN_OK);
  for (size_t i = 0; i < second.count; i++) { /* a child has copies */
    second.items[i] = custody.items[i];
    second.items[i].fd = custody.items[i].fd < 0 ? -1 : fcntl(custody.items[i].fd, F_DUPFD_CLOEXEC, 0);
  }
  kill_agent();
  assert_int_equal(mkdir(scratch_path("logs"), 0777), 0);
  assert_int_equal(make_bench(&next), EVEN_OK);
  for (int i = 0; i < RANKS; i++) {
    next.snapshots[i] = -1;
  }
  next.job.adopted = true;
  leave_to(&next, &second);
  assert_int_equal(even_progress_open(-1, RANKS, &next.job.progress), EVEN_OK);
  assert_int_equal(even_job_generations_open(&next.job), EVEN_OK);
  assert_int_equal(even_outlast_adopt(&next.job), EVEN_OK);
  while (next.job.unwritten != NULL) {
    assert_int_equal(even_job_turn(&next.job), EVEN_OK);
  }
  assert_non_null(strstr(even_text_string(&next.said), "ranks 1 and 2 train on|"));
  assert_non_null(strstr(even_text_string(&next.said), "the agent has written it: "));
  assert_true(is_whole("first"));
  assert_null(find_unwritten());
  assert_int_equal(next.snapshots[0], -1);
  even_outlast_close(&own.job);
  even_outlast_close(&next.job);
  even_guardian_stop(&next.job.guardian); /* of the ranks that are gone on with */
  even_oom_watch_close(&next.job.oom);
  even_job_forget_attempt(&next.job);
  close_bench(&next);
  for (int i = 0; i < RANKS; i++) {
    (void)close(pipes[i][0]);
    (void)close(pipes[i][1]);
  }
  even_custody_close(&first);
  even_custody_close(&second);
  even_custody_close(&custody);
  even_legacy_close(&legacy);
  assert_int_equal(open_descriptors(), before);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(the_loop_goes_on_while_a_lost_ranks_checkpoint_is_written, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_has_left_nothing_costs_no_thread, set_up, tear_down),
      cmocka_unit_test_setup_teardown(without_a_thread_or_memory_it_is_written_at_once, set_up, tear_down),
      cmocka_unit_test_setup_teardown(what_cannot_be_written_is_told, set_up, tear_down),
      cmocka_unit_test_setup_teardown(an_attempt_that_ends_waits_for_them, set_up, tear_down),
      cmocka_unit_test_setup_teardown(an_attempt_that_fails_waits_for_them_too, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_is_interrupted_then_waits_for_none, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_is_asked_once_more_waits_for_none, set_up, tear_down),
      cmocka_unit_test_setup_teardown(the_next_agent_writes_what_a_killed_one_had_begun, set_up, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
