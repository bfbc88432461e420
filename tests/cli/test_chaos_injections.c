/* The faults of `evenstep chaos` themselves: that each does what it says, to nobody else, once, and that it is undone.
 * Real files, processes, sockets and clocks; that of the disk is full by the table of calls. Those that its part on
 * another host does, too, have tests there (test_chaos_part.c). */
#include "../checkpoint/scratch.h"
#include "cli/chaos_job_alone.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/listener.h"
#include "support/fault.h"

#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <unistd.h>

#include <cmocka.h>

static alone made;

static int set_up(void **state) {
  return scratch_make(state);
}

static int tear_down(void **state) {
  fault_reset();
  alone_close(&made);
  return scratch_remove(state);
}

static bool has_words(const char *words) {
  return strstr(made.done[made.job.next - 1].words, words) != NULL;
}

/* ---- checkpoints ---- */

enum { LARGEST_FILE = 4096 };

static size_t read_model(int step, unsigned char *out) {
  char name[64];
  (void)snprintf(name, sizeof name, "checkpoints/step-%08d/model.safetensors", step);
  FILE *file = fopen(scratch_path(name), "rb");
  assert_non_null(file);
  const size_t got = fread(out, 1, LARGEST_FILE, file);
  assert_int_equal(fclose(file), 0);
  return got;
}

static void save_steps(int count) {
  char name[64];
  assert_int_equal(mkdir(scratch_path("checkpoints"), 0700), 0);
  for (int step = 1; step <= count; step++) {
    (void)snprintf(name, sizeof name, "checkpoints/step-%08d", step);
    assert_int_equal(save_sample(scratch_path(name), false, step), EVEN_OK);
  }
}

static int bits_that_differ(const unsigned char *a, const unsigned char *b, size_t bytes) {
  int count = 0;
  for (size_t i = 0; i < bytes; i++) {
    count += __builtin_popcount((unsigned)(a[i] ^ b[i]));
  }
  return count;
}

/* The newest checkpoint's file before and after, and that the one before it stays as it was. */
static void damage(even_chaos_kind kind, unsigned char before[LARGEST_FILE], unsigned char after[LARGEST_FILE],
                   size_t bytes[2]) {
  unsigned char older[2][LARGEST_FILE];
  alone_open(&made, kind, (uint64_t)77 << 8 | 5);
  alone_start_rank(&made, NULL);
  save_steps(2);
  bytes[0] = read_model(2, before);
  const size_t older_bytes = read_model(1, older[0]);
  assert_true(alone_inject(&made));
  bytes[1] = read_model(2, after);
  assert_int_equal(read_model(1, older[1]), older_bytes);
  assert_memory_equal(older[0], older[1], older_bytes);
  assert_true(has_words("step-00000002: model.safetensors"));
  assert_true(has_words("; rank 1 killed"));
  assert_true(alone_comes_to(made.rank.pid, 'Z'));
  assert_int_equal(even_chaos_held_at(&made.job, even_clock_ns()), 1); /* a restart takes the one before */
}

static void one_bit_of_the_newest_checkpoint_is_turned(void **state) {
  unsigned char before[LARGEST_FILE];
  unsigned char after[LARGEST_FILE];
  size_t bytes[2];
  (void)state;
  damage(EVEN_CHAOS_FLIP, before, after, bytes);
  assert_int_equal(bytes[0], bytes[1]);
  assert_int_equal(bits_that_differ(before, after, bytes[0]), 1);
  assert_int_equal(before[77] ^ after[77], 1u << 5);
}

static void the_newest_checkpoint_loses_half_of_a_file(void **state) {
  unsigned char before[LARGEST_FILE];
  unsigned char after[LARGEST_FILE];
  size_t bytes[2];
  (void)state;
  damage(EVEN_CHAOS_TORN, before, after, bytes);
  assert_int_equal(bytes[1], bytes[0] / 2);
  assert_memory_equal(before, after, bytes[1]);
}

static void the_only_checkpoint_is_left_alone(void **state) {
  unsigned char before[LARGEST_FILE];
  unsigned char after[LARGEST_FILE];
  (void)state;
  alone_open(&made, EVEN_CHAOS_FLIP, 5);
  alone_start_rank(&made, NULL);
  save_steps(1);
  const size_t bytes = read_model(1, before);
  assert_false(alone_inject(&made));
  assert_non_null(strstr(alone_postponed, "no two checkpoints"));
  assert_int_equal(read_model(1, after), bytes);
  assert_memory_equal(before, after, bytes);
  assert_true(alone_comes_to(made.rank.pid, 'S'));
}

/* ---- the disk ---- */

static uint64_t free_bytes;

static int made_up_statvfs(const char *path, struct statvfs *out) {
  (void)path;
  *out = (struct statvfs){.f_frsize = 1, .f_blocks = free_bytes, .f_bavail = free_bytes};
  return 0;
}

/* After fault_os_from, which makes all calls real. */
static void disk_has(uint64_t bytes) {
  free_bytes = bytes;
  even_os.statvfs = made_up_statvfs;
}

static void a_disk_is_filled_and_given_back(void **state) {
  enum { PIECE = 65536 };
  (void)state;
  alone_open(&made, EVEN_CHAOS_DISK, 0);
  fault_os_from(FAULT_write, 4, ENOSPC);
  disk_has((uint64_t)1 << 20);
  assert_true(alone_inject(&made));
  assert_int_equal(scratch_size("chaos-filler"), 3 * PIECE);
  assert_true(has_words("the last 0.2 MB of "));
  assert_false(alone_inject(&made)); /* one at a time */
  fault_os_from(FAULT_write, 2, ENOSPC);
  assert_int_equal(even_chaos_host_look(&made.job), EVEN_OK); /* somebody has given room back */
  assert_int_equal(scratch_size("chaos-filler"), 4 * PIECE);
  even_chaos_relent(&made.job, false); /* it is not over */
  assert_true(scratch_has("chaos-filler"));
  made.job.host.full_until_ns = 1;
  even_chaos_relent(&made.job, false);
  assert_false(scratch_has("chaos-filler"));
}

static void a_disk_that_others_need_is_not_filled(void **state) {
  (void)state;
  alone_open(&made, EVEN_CHAOS_DISK, 0);
  fault_os_from(FAULT_write, 1, ENOSPC); /* where it is filled all the same, this machine's is not */
  disk_has(((uint64_t)1 << 30) + 1);
  assert_false(alone_inject(&made));
  assert_true(made.done[0].impossible && has_words("others may need them"));
  assert_false(scratch_has("chaos-filler"));
}

static void a_checkpoint_waits_for_the_disk(void **state) {
  (void)state;
  alone_open(&made, EVEN_CHAOS_DISK, 0);
  alone_start_rank(&made, NULL);
  save_steps(2);
  fault_os_from(FAULT_write, 1, ENOSPC);
  disk_has((uint64_t)1 << 20);
  assert_true(alone_inject(&made));
  fault_reset();
  alone_next(&made, EVEN_CHAOS_TORN, 0);
  assert_false(alone_inject(&made));
  assert_non_null(strstr(alone_postponed, "the disk is full"));
}

/* ---- a busy neighbour ---- */

static void neighbours_have_the_ranks_core_and_end(void **state) {
  pid_t pids[EVEN_BUSY_MOST];
  (void)state;
  alone_open(&made, EVEN_CHAOS_SLOW, 0);
  alone_start_rank(&made, NULL);
  assert_true(alone_inject(&made));
  const size_t count = made.job.busy_count;
  assert_in_range(count, 1, EVEN_BUSY_MOST);
  for (size_t i = 0; i < count; i++) {
    cpu_set_t where;
    pids[i] = made.job.busy[i];
    assert_int_equal(sched_getaffinity(pids[i], sizeof where, &where), 0);
    assert_true(CPU_COUNT(&where) == 1 && CPU_ISSET((size_t)made.rank.cpu, &where));
  }
  assert_false(alone_inject(&made)); /* one at a time */
  even_chaos_relent(&made.job, false);
  assert_int_equal(made.job.busy_count, count);
  even_chaos_relent(&made.job, true);
  for (size_t i = 0; i < count; i++) {
    assert_true(kill(pids[i], 0) != 0 && errno == ESRCH);
  }
}

/* ---- the clock of the day ---- */

typedef int (*clock_of_library)(clockid_t clock, struct timespec *out);
typedef int (*day_of_library)(struct timeval *out, void *zone);
typedef time_t (*time_of_library)(time_t *out);

/* The library as a process of the job has loaded it. */
typedef struct seen {
  void *library;
  clock_of_library clock;
  day_of_library day;
  time_of_library time;
} seen;

static void look_up(void *library, const char *name, void *out) {
  void *found = dlsym(library, name);
  assert_non_null(found);
  memcpy(out, &found, sizeof found);
}

/* As the rank, or as the agent (NULL). */
static seen load(const char *rank) {
  seen out;
  if (rank == NULL) {
    (void)unsetenv("RANK");
  } else {
    (void)setenv("RANK", rank, 1);
  }
  out.library = dlopen(getenv("LD_PRELOAD"), RTLD_NOW | RTLD_LOCAL);
  assert_non_null(out.library);
  look_up(out.library, "clock_gettime", &out.clock);
  look_up(out.library, "gettimeofday", &out.day);
  look_up(out.library, "time", &out.time);
  return out;
}

static int64_t ns_of(struct timespec time) {
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* By all three ways, in whole hours; a test takes less than half of one. */
static void expect_hours(const seen *process, int hours) {
  struct timespec now;
  struct timespec theirs;
  struct timeval day;
  assert_int_equal(clock_gettime(CLOCK_REALTIME, &now), 0);
  assert_int_equal(process->clock(CLOCK_REALTIME, &theirs), 0);
  assert_in_range(theirs.tv_nsec, 0, 999999999);
  assert_int_equal((ns_of(theirs) - ns_of(now) + (hours < 0 ? -1 : 1) * (int64_t)1800 * 1000000000) / 3600 / 1000000000,
                   hours);
  assert_int_equal(process->day(&day, NULL), 0);
  assert_in_range(day.tv_sec - theirs.tv_sec, 0, 600);
  assert_in_range(process->time(NULL) - theirs.tv_sec, 0, 600);
  /* waits and time limits go on as if nothing were */
  assert_int_equal(clock_gettime(CLOCK_MONOTONIC, &now), 0);
  assert_int_equal(process->clock(CLOCK_MONOTONIC, &theirs), 0);
  assert_in_range(ns_of(theirs) - ns_of(now), 0, (int64_t)600 * 1000000000);
}

/* What a program that is started in the job takes for the time. */
static int64_t time_of_a_program(void) {
  char said[64] = "";
  FILE *program = popen("date +%s", "r");
  assert_non_null(program);
  assert_non_null(fgets(said, sizeof said, program));
  assert_int_equal(pclose(program), 0);
  return strtoll(said, NULL, 10);
}

enum { OF_AGENT = 1, SLOW = 2 };

static uint64_t by_hours(int hours) {
  return (uint64_t)(hours - 1) << 8;
}

static void the_clock_jumps_while_a_process_runs(void **state) {
  (void)state;
  if (getenv("LD_PRELOAD") != NULL) {
    skip();
  }
  alone_open(&made, EVEN_CHAOS_CLOCK, by_hours(7));
  assert_int_equal(even_chaos_clock_open(&made.job, ALONE_RANKS), EVEN_OK);
  seen process = load("1");
  expect_hours(&process, 0);
  assert_true(alone_inject(&made));
  assert_true(has_words("the clock of rank 1 is 7 hours fast from now on"));
  expect_hours(&process, 7);
  assert_in_range(time_of_a_program() - (int64_t)time(NULL), 7 * 3600 - 600, 7 * 3600 + 600);
  alone_next(&made, EVEN_CHAOS_CLOCK, by_hours(48) | SLOW);
  assert_true(alone_inject(&made));
  expect_hours(&process, -48);
  assert_int_equal(dlclose(process.library), 0);
  process = load(NULL);
  expect_hours(&process, 0); /* nobody else's has jumped */
  assert_int_equal(dlclose(process.library), 0);
  even_chaos_clock_close(&made.job);
  assert_null(getenv("LD_PRELOAD"));
  assert_null(getenv("EVENSTEP_CHAOS_CLOCK"));
}

static void the_agents_clock_jumps_alone(void **state) {
  (void)state;
  if (getenv("LD_PRELOAD") != NULL) {
    skip();
  }
  alone_open(&made, EVEN_CHAOS_CLOCK, by_hours(3) | OF_AGENT);
  assert_int_equal(even_chaos_clock_open(&made.job, ALONE_RANKS), EVEN_OK);
  assert_true(alone_inject(&made));
  assert_true(has_words("the clock of the agent is 3 hours fast"));
  seen process = load(NULL);
  expect_hours(&process, 3);
  assert_int_equal(dlclose(process.library), 0);
  process = load("0");
  expect_hours(&process, 0);
  assert_int_equal(dlclose(process.library), 0);
}

/* ---- the agent, and ports ---- */

/* As an agent: for each port that it is told it ends the rank before and starts one that is to meet there; "end": it
 * only ends it. It says the rank's number. */
static const char agent_script[] =
    "while read -r port; do\n"
    "  if [ -n \"$rank\" ]; then kill -9 \"$rank\" 2>/dev/null; wait \"$rank\"; fi\n"
    "  MASTER_PORT=$port MASTER_ADDR=127.0.0.1 sleep 1000 >/dev/null 2>&1 &\n"
    "  rank=$!\n"
    "  echo \"$rank\"\n"
    "done 2>/dev/null\n";

/* `first`: below a process that has started it, as `evenstep run` does. */
static void start_agent(bool first) {
  const char *below[] = {"sh", "-c", "exec 3<&0; sh -c \"$0\" <&3 & wait", agent_script, NULL};
  const char *itself[] = {"sh", "-c", agent_script, NULL};
  const char **words = first ? below : itself;
  assert_int_equal(even_dialogue_start_typed((char *const *)(uintptr_t)words, &made.job.agent), EVEN_OK);
}

static even_process_stat begin_attempt(int port) {
  char word[16];
  const char *line = NULL;
  even_process_stat rank;
  (void)snprintf(word, sizeof word, "%d", port);
  assert_int_equal(even_dialogue_say(&made.job.agent, word), EVEN_OK);
  assert_int_equal(even_dialogue_hear(&made.job.agent, 60000, &line), EVEN_OK);
  assert_non_null(line);
  assert_int_equal(even_process_stat_read((pid_t)strtol(line, NULL, 10), &rank), 0);
  return rank;
}

/* A free one, for a moment. */
static int free_port(void) {
  int port = 0;
  int fd = -1;
  assert_int_equal(even_listener_open("127.0.0.1", &port, &fd), EVEN_OK);
  even_listener_close(fd);
  return port;
}

static bool is_free(int port) {
  int fd = -1;
  const bool opened = even_listener_open("127.0.0.1", &port, &fd) == EVEN_OK;
  if (opened) {
    even_listener_close(fd);
  }
  return opened;
}

/* As chaos looks at its job, again and again, a minute at most. */
static bool looked_until(bool (*holds)(void)) {
  for (uint64_t until = even_clock_ns() + (uint64_t)60 * 1000000000u; even_clock_ns() < until;) {
    assert_int_equal(even_chaos_host_look(&made.job), EVEN_OK);
    if (holds()) {
      return true;
    }
    even_clock_sleep_ns(1000000);
  }
  return false;
}

static bool is_stolen(void) {
  return made.job.host.port_fd >= 0;
}

static bool is_of_no_use(void) {
  return made.job.host.port_until_ns == 1;
}

static void rob(bool first) {
  int ports[3];
  alone_open(&made, EVEN_CHAOS_PORT, 0);
  start_agent(first);
  for (int i = 0; i < 3; i++) {
    ports[i] = free_port();
  }
  assert_true(ports[0] != ports[1] && ports[1] != ports[2] && ports[0] != ports[2]);
  made.rank = begin_attempt(ports[0]);
  made.job.victim_pid = made.rank.pid;
  for (uint64_t until = even_clock_ns() + (uint64_t)60 * 1000000000u;
       !alone_inject(&made) && even_clock_ns() < until;) { /* it becomes the program just now */
    even_clock_sleep_ns(1000000);
  }
  assert_int_equal(made.job.next, 1);
  made.rank.pid = 0; /* the agent's */
  assert_int_equal(even_chaos_host_look(&made.job), EVEN_OK);
  assert_true(is_free(ports[1]) && !is_stolen()); /* no attempt has begun */
  (void)begin_attempt(ports[1]);
  assert_true(looked_until(is_stolen));
  assert_false(is_free(ports[1]));
  assert_true(has_words("before the ranks of the next attempt met there"));
  even_chaos_relent(&made.job, false);
  assert_false(is_free(ports[1])); /* it is not over */
  (void)begin_attempt(ports[2]);
  assert_true(looked_until(is_of_no_use));
  even_chaos_relent(&made.job, false);
  assert_true(is_free(ports[1]));
  even_dialogue_end(&made.job.agent);
}

static void the_next_attempts_port_is_taken(void **state) {
  (void)state;
  rob(true);
}

/* With EVENSTEP_RESTART_AGENT=0 the first process is the agent itself. */
static void so_it_is_where_the_first_process_is_the_agent(void **state) {
  (void)state;
  rob(false);
}

static void the_agent_is_killed_and_is_to_be_started_again(void **state) {
  (void)state;
  alone_open(&made, EVEN_CHAOS_AGENT, 0);
  start_agent(false);
  assert_true(alone_inject(&made));
  assert_true(made.job.agent_killed);
  assert_int_equal(made.done[0].tended, EVEN_CHAOS_RESUMED_BY_US);
  assert_true(alone_comes_to(made.job.agent.process.pid, 'Z'));
  even_dialogue_end(&made.job.agent);
}

/* All that has come to a socket that listens, until the other end is closed. */
static size_t take(int listener, unsigned char *out, size_t room) {
  size_t got = 0;
  ssize_t more = 0;
  const int fd = accept(listener, NULL, NULL);
  assert_true(fd >= 0);
  while (got < room && (more = read(fd, out + got, room - got)) > 0) {
    got += (size_t)more;
  }
  assert_true(more >= 0);
  assert_int_equal(close(fd), 0);
  return got;
}

/* This process is the agent. */
static void garbage_comes_to_each_port_of_the_job(void **state) {
  enum { BYTES = 4096, LIKE_TLS = 1 };
  static unsigned char got[2][BYTES + 1];
  char variable[32];
  char address[] = "MASTER_ADDR=127.0.0.1";
  int ports[2] = {0, 0};
  int fds[2];
  (void)state;
  alone_open(&made, EVEN_CHAOS_GARBAGE, (uint64_t)LIKE_TLS << 20);
  made.job.agent.process.pid = getpid();
  for (int i = 0; i < 2; i++) {
    assert_int_equal(even_listener_open("127.0.0.1", &ports[i], &fds[i]), EVEN_OK);
  }
  (void)snprintf(variable, sizeof variable, "MASTER_PORT=%d", ports[0]);
  char *variables[] = {variable, address, NULL};
  alone_start_rank(&made, variables);
  assert_true(alone_inject(&made));
  assert_true(has_words("(MASTER_PORT)") && has_words("(the agent)") && has_words(": bytes like TLS"));
  for (int i = 0; i < 2; i++) {
    assert_int_equal(take(fds[i], got[i], BYTES + 1), BYTES);
    assert_memory_equal(got[i], "\x16\x03\x01\x02\x00", 5);
    even_listener_close(fds[i]);
  }
}

/* ---- a gradient ---- */

static void a_rank_is_asked_for_a_gradient_and_says_when_it_was(void **state) {
  enum { ASKED = 1, DONE };
  (void)state;
  alone_open(&made, EVEN_CHAOS_NAN, 0);
  alone_start_rank(&made, NULL);
  assert_int_equal(even_chaos_rank_open(&made.job, ALONE_RANKS), EVEN_OK);
  assert_false(alone_inject(&made));
  assert_int_equal(made.job.rank.gradients[0], 0);
  assert_int_equal(made.job.rank.gradients[1], ASKED);
  assert_false(alone_inject(&made)); /* it has made no backward since */
  made.job.rank.gradients[1] = DONE;
  assert_true(alone_inject(&made));
  assert_true(has_words("a gradient of rank 1 was NaN in one backward"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(one_bit_of_the_newest_checkpoint_is_turned, set_up, tear_down),
      cmocka_unit_test_setup_teardown(the_newest_checkpoint_loses_half_of_a_file, set_up, tear_down),
      cmocka_unit_test_setup_teardown(the_only_checkpoint_is_left_alone, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_disk_is_filled_and_given_back, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_disk_that_others_need_is_not_filled, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_checkpoint_waits_for_the_disk, set_up, tear_down),
      cmocka_unit_test_setup_teardown(neighbours_have_the_ranks_core_and_end, set_up, tear_down),
      cmocka_unit_test_setup_teardown(the_clock_jumps_while_a_process_runs, set_up, tear_down),
      cmocka_unit_test_setup_teardown(the_agents_clock_jumps_alone, set_up, tear_down),
      cmocka_unit_test_setup_teardown(the_next_attempts_port_is_taken, set_up, tear_down),
      cmocka_unit_test_setup_teardown(so_it_is_where_the_first_process_is_the_agent, set_up, tear_down),
      cmocka_unit_test_setup_teardown(the_agent_is_killed_and_is_to_be_started_again, set_up, tear_down),
      cmocka_unit_test_setup_teardown(garbage_comes_to_each_port_of_the_job, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_rank_is_asked_for_a_gradient_and_says_when_it_was, set_up, tear_down),
  };
  return cmocka_run_group_tests_name("cli_chaos_injections", tests, NULL, NULL);
}
