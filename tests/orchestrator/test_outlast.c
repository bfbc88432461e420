/* Agents that are killed, each followed by another one: the ranks keep their processes, and whatever becomes of them
 * while nobody is there is known to the next. The test is the process that starts agents. */
#include "orchestrator/outlast.h"

#include "base/fail.h"
#include "job_fixture.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/process_stat.h"
#include "os/supervisor.h"
#include "support/fault.h"
#include "support/ports.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const uint64_t CLEAR_NS = 60000000000u;
enum { MOST_AGENTS = 10 };

typedef struct agents {
  int started;
  int kept;                       /* how often ranks outlasted one */
  void (*between)(job_fixture *); /* while there is none; may be NULL */
  void (*spoil)(long nth);        /* in the second one, before it begins; may be NULL, */
  long nth;
  bool dies_late; /* the first one, once the job is over */
  int over;       /* the job's exit code then; -1: it was not over */
  int code;       /* of the last */
} agents;

static bool there_is(const job_fixture *job, const char *name) {
  char path[160];
  (void)snprintf(path, sizeof path, "%s/%s", job->folder, name);
  return access(path, F_OK) == 0;
}

/* What the agent saw, for the test. */
static void keep_seen(const job_fixture *job) {
  char path[160];
  (void)snprintf(path, sizeof path, "%s/seen", job->folder);
  int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0 || write(file, even_text_string(&job->seen), job->seen.length) != (ssize_t)job->seen.length) {
    _exit(98);
  }
}

static void read_seen(job_fixture *job) {
  char path[160];
  (void)snprintf(path, sizeof path, "%s/seen", job->folder);
  even_text_clear(&job->seen);
  assert_int_equal(even_file_read(path, 1 << 20, &job->seen), EVEN_OK);
}

static void be_agent(job_fixture *job, even_supervisor *supervisor, even_legacy *legacy, const char *script,
                     const agents *run) {
  int code = -1;
  legacy->custody = &supervisor->custody;
  job->legacy = legacy;
  if (run->spoil != NULL && run->started == 1) {
    run->spoil(run->nth);
  }
  even_status status = job_fixture_run(job, script, &code);
  if (status != EVEN_OK) {
    (void)fprintf(stderr, "an agent fails: %s\n", even_error_last()->what);
  }
  fault_reset();
  keep_seen(job);
  if (run->dies_late && run->started == 0) {
    (void)raise(SIGKILL);
  }
  _exit(status == EVEN_OK ? code : 99);
}

static even_supervisor *starts; /* who starts agents */

static void run_agents(job_fixture *job, const char *script, agents *run) {
  even_supervisor supervisor;
  even_legacy legacy;
  even_process_end end = {.signal = SIGKILL};
  bool is_child = false;
  bool clear = false;
  assert_int_equal(even_legacy_open(&legacy), EVEN_OK);
  assert_int_equal(even_supervisor_open(&supervisor), EVEN_OK);
  starts = &supervisor;
  while (end.signal != 0 && run->started < MOST_AGENTS) {
    even_status status = even_supervisor_start(&supervisor, &is_child);
    if (is_child) {
      be_agent(job, &supervisor, &legacy, script, run);
    }
    assert_int_equal(status, EVEN_OK);
    run->started++;
    assert_int_equal(even_supervisor_wait(&supervisor, &end), EVEN_OK);
    run->over = -1;
    if (even_legacy_is_over(&legacy, &run->over)) {
      break;
    }
    if (end.signal != 0) {
      bool lives = even_legacy_is_whole(&legacy) && !supervisor.custody.broken;
      run->kept += lives ? 1 : 0;
      even_legacy_whole(&legacy, lives);
      if (!lives) {
        assert_int_equal(even_supervisor_clear(&supervisor, CLEAR_NS, &clear), EVEN_OK);
      } else if (run->between != NULL) {
        run->between(job);
      }
    }
  }
  run->code = end.code;
  assert_int_equal(even_supervisor_clear(&supervisor, CLEAR_NS, &clear), EVEN_OK);
  assert_true(clear); /* whoever runs has been left behind */
  even_supervisor_close(&supervisor);
  even_legacy_close(&legacy);
  read_seen(job);
}

/* Of an agent whose ranks all run. The n-th one's is FOLDER/agent-n, which who wants to kill it waits for. */
static void say_who(job_fixture *job) {
  char name[32];
  int number = 1;
  for (; number <= MOST_AGENTS; number++) {
    char next[32];
    (void)snprintf(name, sizeof name, "agent-%d", number);
    (void)snprintf(next, sizeof next, "killed-%d", number);
    if (!there_is(job, next)) {
      break;
    }
  }
  if (!there_is(job, name)) {
    char path[160];
    char hidden[160];
    char pid[16];
    (void)snprintf(path, sizeof path, "%s/%s", job->folder, name);
    (void)snprintf(hidden, sizeof hidden, "%s/hidden", job->folder);
    int length = snprintf(pid, sizeof pid, "%d", (int)getpid());
    int file = open(hidden, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0 || write(file, pid, (size_t)length) != length || close(file) != 0 || rename(hidden, path) != 0) {
      _exit(97);
    }
  }
}

/* In a rank's script. */
#define AWAIT(name) "until [ -e $FOLDER/" name " ]; do sleep 0.01; done; "
/* The agent is gone before the next place is open: it could take that, too. */
#define KILL_AGENT(n) AWAIT("agent-" n) "kill -9 $(cat $FOLDER/agent-" n "); touch $FOLDER/killed-" n "; "
#define NAME_OWN "echo $$ >> $FOLDER/pids-$RANK; "

static void expect_one_process(const job_fixture *job, int rank) {
  char path[160];
  even_text content = EVEN_TEXT_EMPTY;
  (void)snprintf(path, sizeof path, "%s/pids-%d", job->folder, rank);
  assert_int_equal(even_file_read(path, 4096, &content), EVEN_OK);
  const char *end = strchr(even_text_string(&content), '\n');
  assert_non_null(end);
  assert_int_equal(end[1], '\0');
  even_text_free(&content);
}

static void ranks_keep_their_processes(void **state) {
  job_fixture *job = *state;
  agents run = {.started = 0};
  job->on_tick = say_who;
  run_agents(job,
             NAME_OWN "[ $RANK = 0 ] && { " KILL_AGENT("1") "echo between; " KILL_AGENT("2")
                 KILL_AGENT("3") "touch $FOLDER/on; }; " AWAIT("on")
                     AWAIT("agent-4") "echo after $RANK; echo wrong >&2; exit 0",
             &run);
  assert_int_equal(run.code, 0);
  assert_int_equal(run.started, 4);
  assert_int_equal(run.kept, 3);
  expect_one_process(job, 0);
  expect_one_process(job, 1);
  assert_true(job_fixture_saw(job, "attempt 0|"));
  assert_false(job_fixture_saw(job, "attempt 1|"));
  assert_true(job_fixture_saw(job, "the agent before was killed: ranks 0 and 1 train on|"));
  assert_true(job_fixture_saw(job, "line 0 after 0|"));
  assert_true(job_fixture_saw(job, "line 1 after 1|"));
  assert_true(job_fixture_saw(job, "wrong|"));
  even_text log = EVEN_TEXT_EMPTY;
  char path[160];
  (void)snprintf(path, sizeof path, "%s/logs/rank-0.log", job->run_folder);
  assert_int_equal(even_file_read(path, 1 << 16, &log), EVEN_OK);
  assert_non_null(strstr(even_text_string(&log), "between\n"));
  assert_non_null(strstr(even_text_string(&log), "after 0\n"));
  even_text_free(&log);
}

/* The process that the file names, once it has named itself. */
static pid_t await_name(const char *path) {
  pid_t pid = 0;
  while (pid <= 1) {
    even_text content = EVEN_TEXT_EMPTY;
    if (even_file_read(path, 64, &content) == EVEN_OK && strchr(even_text_string(&content), '\n') != NULL) {
      pid = (pid_t)atoi(even_text_string(&content));
    } else {
      even_clock_sleep_ns(1000000);
    }
    even_text_free(&content);
  }
  return pid;
}

static void await_end(job_fixture *job, const char *file) {
  char path[160];
  even_process_stat facts;
  (void)snprintf(path, sizeof path, "%s/%s", job->folder, file);
  pid_t pid = await_name(path);
  while (even_process_stat_read(pid, &facts) == 0 && facts.state != 'Z') {
    even_clock_sleep_ns(1000000);
  }
}

static void end_rank_1(job_fixture *job) {
  job_fixture_touch(job, "alone");
  await_end(job, "pids-1");
}

static void who_ends_alone_is_known(void **state) {
  job_fixture *job = *state;
  agents run = {.started = 0, .between = end_rank_1};
  job->on_tick = say_who;
  run_agents(job,
             NAME_OWN
             "[ $RANK = 0 ] && { " KILL_AGENT("1") "exec sleep 600; }; " AWAIT("alone") "echo last words >&2; exit 3",
             &run);
  assert_int_equal(run.code, 3);
  assert_int_equal(run.kept, 1);
  assert_int_equal(run.started, 2);
  assert_true(job_fixture_saw(job, "last words"));
  assert_true(job_fixture_saw(job, "ended 1 0 3 ")); /* EVEN_RANK_EXITED */
  assert_true(job_fixture_saw(job, "ended 0 3 "));   /* EVEN_RANK_STOPPED_BY_AGENT */
}

static void who_is_killed_alone_starts_the_attempt_again(void **state) {
  job_fixture *job = *state;
  agents run = {.started = 0, .between = end_rank_1};
  job->on_tick = say_who;
  job->max_restarts = 1;
  run_agents(job,
             "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && { echo anew; exit 0; }; " NAME_OWN
             "[ $RANK = 0 ] && { " KILL_AGENT("1") "exec sleep 600; }; " AWAIT("alone") "kill -9 $$",
             &run);
  assert_int_equal(run.code, 0);
  assert_int_equal(run.kept, 1);
  assert_true(job_fixture_saw(job, "rank 1 (process "));
  assert_true(job_fixture_saw(job, " has ended by SIGKILL: the others are ended|"));
  assert_true(job_fixture_saw(job, "attempt 0|"));
  assert_true(job_fixture_saw(job, "restart 1 of 1 from "));
  assert_true(job_fixture_saw(job, "line 0 anew|"));
  assert_true(job_fixture_saw(job, "line 1 anew|"));
}

static void look_at_port(job_fixture *job) {
  char path[160];
  even_text content = EVEN_TEXT_EMPTY;
  (void)snprintf(path, sizeof path, "%s/port", job->folder);
  assert_int_equal(even_file_read(path, 64, &content), EVEN_OK);
  assert_false(port_is_free(atoi(even_text_string(&content)))); /* no rank has bound it */
  even_text_free(&content);
}

static void no_other_job_is_given_their_port_meanwhile(void **state) {
  job_fixture *job = *state;
  agents run = {.started = 0, .between = look_at_port};
  job->on_tick = say_who;
  run_agents(job,
             "[ $RANK = 0 ] && { echo $MASTER_PORT > $FOLDER/port; " KILL_AGENT("1")
                 KILL_AGENT("2") "}; " AWAIT("agent-3") "exit 0",
             &run);
  assert_int_equal(run.code, 0);
  assert_int_equal(run.kept, 2);
}

static void end_both(job_fixture *job) {
  job_fixture_touch(job, "alone");
  await_end(job, "pids-0");
  await_end(job, "pids-1");
}

static void all_may_end_alone(void **state) {
  job_fixture *job = *state;
  agents run = {.started = 0, .between = end_both};
  job->on_tick = say_who;
  run_agents(job, NAME_OWN "[ $RANK = 0 ] && { " KILL_AGENT("1") "}; " AWAIT("alone") "echo done $RANK", &run);
  assert_int_equal(run.code, 0);
  assert_int_equal(run.started, 2);
  assert_true(job_fixture_saw(job, "line 0 done 0|"));
  assert_true(job_fixture_saw(job, "line 1 done 1|"));
}

/* A rank that has ended well before the agent was killed is nobody's loss, and is not told of as alive. */
static void who_ended_before_stays_ended(void **state) {
  job_fixture *job = *state;
  agents run = {.started = 0};
  job->on_tick = say_who;
  run_agents(job,
             NAME_OWN
             "[ $RANK = 1 ] && exit 0; until [ -s $FOLDER/pids-1 ] && ! kill -0 $(cat $FOLDER/pids-1) 2> /dev/null; "
             "do sleep 0.01; done; "
             "sleep 0.3; " KILL_AGENT("1") AWAIT("agent-2") "echo on",
             &run);
  assert_int_equal(run.code, 0);
  assert_int_equal(run.kept, 1);
  assert_true(job_fixture_saw(job, "the agent before was killed: rank 0 trains on|"));
  assert_true(job_fixture_saw(job, "line 0 on|"));
}

/* Nobody is to go on with it, or to start it again. */
static void a_job_that_was_over_is(void **state) {
  job_fixture *job = *state;
  agents run = {.dies_late = true};
  run_agents(job, "exit $((RANK * 5))", &run);
  assert_int_equal(run.started, 1);
  assert_int_equal(run.over, 5);
}

static void kill_guardian(job_fixture *job) {
  char path[160];
  even_text content = EVEN_TEXT_EMPTY;
  (void)snprintf(path, sizeof path, "%s/guardian", job->folder);
  assert_int_equal(even_file_read(path, 64, &content), EVEN_OK);
  assert_int_equal(kill((pid_t)atoi(even_text_string(&content)), SIGKILL), 0);
  even_text_free(&content);
}

/* As if an agent of another program had written it. */
static void write_another_layout(job_fixture *job) {
  enum { LAYOUT_AT = 8 };
  const uint32_t layout = 1;
  bool any = false;
  (void)job;
  for (size_t i = 0; i < starts->custody.count; i++) {
    const even_custody_item *item = &starts->custody.items[i];
    if (item->kind == EVEN_OUTLAST_ROLL) {
      any = pwrite(item->fd, &layout, sizeof layout, LAYOUT_AT) == (ssize_t)sizeof layout;
    }
  }
  assert_true(any);
}

/* Nor is it read as what it is not: its ranks are ended. */
static void a_roll_that_cannot_be_read_is_refused(void **state) {
  job_fixture *job = *state;
  agents run = {.started = 0, .between = write_another_layout};
  job->on_tick = say_who;
  run_agents(job, "[ $RANK = 0 ] && { " KILL_AGENT("1") "}; exec sleep 600", &run);
  assert_int_equal(run.kept, 1);
  assert_int_equal(run.started, 2);
  assert_int_equal(run.code, 99);
}

static pid_t starter;
static char guardians_file[160];

/* The first that the first agent starts is its guardian. */
static pid_t note_guardian(void) {
  pid_t pid = even_os_real.fork();
  FILE *file = pid > 0 && getpid() != starter ? fopen(guardians_file, "wx") : NULL;
  if (file != NULL) {
    (void)fprintf(file, "%d", (int)pid);
    (void)fclose(file);
  }
  return pid;
}

static void a_guardian_that_is_killed_alone_is_replaced(void **state) {
  job_fixture *job = *state;
  agents run = {.started = 0, .between = kill_guardian};
  (void)snprintf(guardians_file, sizeof guardians_file, "%s/guardian", job->folder);
  starter = getpid();
  job->on_tick = say_who;
  even_os.fork = note_guardian;
  run_agents(job, NAME_OWN "[ $RANK = 0 ] && { " KILL_AGENT("1") "}; " AWAIT("agent-2") "sleep 0.3; echo on $RANK",
             &run);
  even_os.fork = even_os_real.fork;
  assert_int_equal(run.code, 0);
  assert_int_equal(run.kept, 1);
  assert_true(job_fixture_saw(job, "another one watches now|"));
}

static job_fixture *unguarded;

/* Once both ranks run, the first agent gets no other guardian. */
static pid_t refuse_guardian(void) {
  if (unguarded != NULL && getpid() != starter && there_is(unguarded, "both")) {
    job_fixture_touch(unguarded, "refused");
    errno = EAGAIN;
    return -1;
  }
  return note_guardian();
}

static void allow_guardian(long nth) {
  (void)nth;
  unguarded = NULL;
}

/* An agent whose guardian could not be replaced: it has drawn all conclusions of that by then. */
static void say_who_once_refused(job_fixture *job) {
  if (there_is(job, "refused")) {
    say_who(job);
  }
}

static void the_next_agent_starts_the_guardian_that_the_one_before_could_not(void **state) {
  job_fixture *job = *state;
  agents run = {.started = 0, .spoil = allow_guardian};
  (void)snprintf(guardians_file, sizeof guardians_file, "%s/guardian", job->folder);
  starter = getpid();
  unguarded = job;
  job->on_tick = say_who_once_refused;
  even_os.fork = refuse_guardian;
  run_agents(job,
             "[ $RANK = 1 ] && touch $FOLDER/up; [ $RANK = 0 ] && { " AWAIT("up") "touch $FOLDER/both; kill -9 $(cat "
             "$FOLDER/guardian); " KILL_AGENT("1") "}; " AWAIT("agent-2") "echo on $RANK",
             &run);
  even_os.fork = even_os_real.fork;
  assert_int_equal(run.code, 0);
  assert_int_equal(run.kept, 1);
  assert_true(job_fixture_saw(job, "notice the job has a guardian again (process "));
}

/* Where the process that starts agents cannot be told what to keep, the job runs as without it. */
static void what_cannot_be_kept_ends_with_its_agent(void **state) {
  job_fixture *job = *state;
  agents run = {.started = 0};
  job->on_tick = say_who;
  fault_os_from(FAULT_sendmsg, 3, ENOBUFS);
  run_agents(job,
             "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 0 ] && { " KILL_AGENT("1") "}; exec sleep 600",
             &run);
  fault_reset();
  assert_int_equal(run.code, 0);
  assert_int_equal(run.kept, 0);
  assert_int_equal(run.started, 2);
  assert_true(job_fixture_saw(job, "attempt 1|"));
  assert_true(job_fixture_saw(job, "where the job's agent is killed from now on, its ranks end with it: "));
}

static void spoil_allocation(long nth) {
  fault_allocation(nth);
}

static void spoil_call(long nth) {
  fault_os_any(nth, EMFILE);
}

/* Whatever the next agent cannot do: it goes on, or ends the ranks, and says so. */
static void disturb(job_fixture *job, void (*spoil)(long nth), long from, long step) {
  enum { TRIES = 16 };
  long ended = 0;
  for (long i = 0; i < TRIES; i++) {
    agents run = {.started = 0, .spoil = spoil, .nth = from + i * step};
    char command[320];
    (void)snprintf(command, sizeof command, "rm -rf %s/agent-* %s/killed-* %s/on", job->folder, job->folder,
                   job->folder);
    assert_int_equal(system(command), 0);
    run_agents(job, "[ $RANK = 0 ] && { " KILL_AGENT("1") "}; " AWAIT("agent-2") "exit 0", &run);
    assert_int_equal(run.started, 2);
    assert_int_equal(run.kept, 1);
    ended += run.code != 0 ? 1 : 0;
  }
  assert_true(ended > 0); /* the faults came */
}

static void what_the_next_one_cannot_do_leaves_nothing(void **state) {
  job_fixture *job = *state;
  job->on_tick = say_who;
  disturb(job, spoil_allocation, 1, 2);
  job->shrink = job->replace = true;
  disturb(job, spoil_allocation, 2, 2);
  disturb(job, spoil_call, 1, 7);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(ranks_keep_their_processes, job_fixture_setup, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(who_ends_alone_is_known, job_fixture_setup, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(a_roll_that_cannot_be_read_is_refused, job_fixture_setup, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(who_is_killed_alone_starts_the_attempt_again, job_fixture_setup,
                                      job_fixture_teardown),
      cmocka_unit_test_setup_teardown(no_other_job_is_given_their_port_meanwhile, job_fixture_setup,
                                      job_fixture_teardown),
      cmocka_unit_test_setup_teardown(all_may_end_alone, job_fixture_setup, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(a_job_that_was_over_is, job_fixture_setup, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(who_ended_before_stays_ended, job_fixture_setup, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(a_guardian_that_is_killed_alone_is_replaced, job_fixture_setup,
                                      job_fixture_teardown),
      cmocka_unit_test_setup_teardown(the_next_agent_starts_the_guardian_that_the_one_before_could_not,
                                      job_fixture_setup, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(what_cannot_be_kept_ends_with_its_agent, job_fixture_setup, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(what_the_next_one_cannot_do_leaves_nothing, job_fixture_setup,
                                      job_fixture_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
