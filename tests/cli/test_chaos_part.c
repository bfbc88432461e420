/* The part of `evenstep chaos` on another host: whose processes it touches, what it says, and that it holds nothing
 * when it has ended. */
#include "base/fail.h"
#include "cli/chaos_hosts.h"
#include "os/clock.h"

#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- what a part does not come to ---- */

even_status even_chaos_damage(even_chaos_job *job, const even_process_stat *rank) {
  (void)job;
  (void)rank;
  return EVEN_ERR_STATE;
}

even_status even_chaos_fill_disk(even_chaos_job *job) {
  return even_chaos_damage(job, NULL);
}

even_status even_chaos_turn_clock(even_chaos_job *job) {
  return even_chaos_damage(job, NULL);
}

even_status even_chaos_rob(even_chaos_job *job, const even_process_stat *rank) {
  return even_chaos_damage(job, rank);
}

even_status even_chaos_cut(even_chaos_job *job) {
  return even_chaos_damage(job, NULL);
}

even_status even_chaos_inject_there(even_chaos_job *job, const even_process_stat *rank) {
  return even_chaos_damage(job, rank);
}

bool even_chaos_kill_agent_there(even_chaos_job *job, int host, char *words, size_t bytes) {
  (void)job;
  (void)host;
  (void)words;
  (void)bytes;
  return false;
}

bool even_chaos_find_victim(even_chaos_job *job, bool trains, even_process_stat *out) {
  (void)job;
  (void)trains;
  (void)out;
  return false;
}

bool even_chaos_find_rank(const even_chaos_job *job, int rank, even_process_stat *out) {
  (void)job;
  (void)rank;
  (void)out;
  return false;
}

bool even_chaos_trains(const even_chaos_job *job) {
  (void)job;
  return false;
}

bool even_chaos_has_stepped(const even_chaos_job *job, int rank) {
  (void)job;
  (void)rank;
  return false;
}

int even_chaos_ranks_led(const even_chaos_job *job) {
  (void)job;
  return 0;
}

int even_chaos_host_of(const even_chaos_job *job, int rank) {
  (void)job;
  (void)rank;
  return 0;
}

const char *even_chaos_host_name(int host) {
  (void)host;
  return "";
}

const char *even_chaos_host_called(const even_chaos_job *job, int host) {
  (void)job;
  return even_chaos_host_name(host);
}

bool even_chaos_is_on(const even_chaos_job *job, pid_t pid, int host) {
  (void)job;
  (void)pid;
  (void)host;
  return false;
}

void even_chaos_add_ranks_on(even_chaos_job *job, int host) {
  (void)job;
  (void)host;
}

void even_chaos_add_victim(even_chaos_job *job, pid_t pid) {
  (void)job;
  (void)pid;
}

even_chaos_process even_chaos_owner_of(const char *folder, pid_t killed) {
  (void)folder;
  (void)killed;
  return (even_chaos_process){.pid = 0};
}

bool even_chaos_is_voted_for(const even_chaos_job *job) {
  (void)job;
  return false;
}

bool even_chaos_has_twin(const even_chaos_job *job) {
  (void)job;
  return false;
}

bool even_chaos_may_lack(even_chaos_job *job) {
  (void)job;
  return true;
}

bool even_chaos_must_relent(const even_chaos_job *job) {
  (void)job;
  return false;
}

void even_chaos_host_relent(even_chaos_job *job, bool all) {
  (void)job;
  (void)all;
}

void even_chaos_network_relent(even_chaos_job *job, bool all) {
  (void)job;
  (void)all;
}

void even_chaos_hosts_relent(even_chaos_job *job, bool all) {
  (void)job;
  (void)all;
}

void even_chaos_tell_children(const char *name, int fd) {
  (void)name;
  (void)fd;
}

void even_chaos_postpone(even_chaos_job *job, const char *why) {
  (void)job;
  (void)why;
}

const char *even_chaos_led_folder(const even_chaos_job *job) {
  (void)job;
  return "";
}

long even_chaos_last_step(const even_chaos_job *job) {
  (void)job;
  return -1;
}

void even_chaos_read_history(even_chaos_job *job) {
  (void)job;
}

int even_cli_fail_of(even_status status) {
  return (int)status;
}

/* ---- a job ---- */

static even_chaos_job job;
static pid_t rank;

static int begin(void **state) {
  (void)state;
  rank = 0;
  return even_chaos_part_open(&job) == EVEN_OK ? 0 : -1;
}

static int end(void **state) {
  (void)state;
  even_chaos_part_close(&job);
  if (rank > 0) {
    (void)kill(rank, SIGKILL);
    (void)waitpid(rank, NULL, 0);
  }
  return 0;
}

/* A process as an agent starts a rank: of this program, which waits to be killed. It is up once it has said so: what
 * its loader maps before would lack where it is to get no more memory. */
static void start_rank(const char *run) {
  static char program[] = "/proc/self/exe";
  static char role[] = "rank";
  static char number[] = "RANK=1";
  char name[80];
  char said;
  char *words[] = {program, role, NULL};
  char *variables[] = {name, number, NULL};
  even_process process;
  (void)snprintf(name, sizeof name, "TORCHELASTIC_RUN_ID=%s", run);
  const even_process_params params = {.arguments = words, .environment = variables};
  assert_int_equal(even_process_start(&params, &process), EVEN_OK);
  rank = process.pid;
  struct pollfd up = {.fd = process.output, .events = POLLIN};
  assert_int_equal(poll(&up, 1, 60000), 1);
  assert_int_equal(read(process.output, &said, 1), 1);
  (void)close(process.output);
  (void)close(process.error);
}

static even_chaos_answer ask(const char *line) {
  even_chaos_act act;
  even_chaos_answer found;
  assert_int_equal(even_chaos_act_read(line, &act), EVEN_OK);
  assert_int_equal(even_chaos_part_act(&job, &act, &found), EVEN_OK);
  return found;
}

static even_chaos_answer inject(const char *kind, const char *run, double seconds) {
  char line[128];
  (void)snprintf(line, sizeof line, "do %s %s 1 %ld %g 7", kind, run, (long)rank, seconds);
  return ask(line);
}

static char state_of_rank(void) {
  even_process_stat facts;
  assert_int_equal(even_process_stat_read(rank, &facts), 0);
  return facts.state;
}

static bool comes_to(char wanted) {
  for (uint64_t until = even_clock_ns() + (uint64_t)60 * 1000000000u; even_clock_ns() < until;) {
    if (state_of_rank() == wanted) {
      return true;
    }
    even_clock_sleep_ns(1000000);
  }
  return false;
}

static void nobody_elses_process_is_touched(void **state) {
  static const char *const kinds[] = {"kill", "stop", "slow", "agent", "garbage", "out-of-memory", "twin"};
  char line[64];
  (void)state;
  start_rank("another");
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    assert_int_equal(inject(kinds[i], "ours", 100).said, EVEN_CHAOS_SAID_LATER);
  }
  (void)snprintf(line, sizeof line, "lives ours %ld", (long)rank);
  assert_int_equal(ask(line).said, EVEN_CHAOS_SAID_NO);
  (void)snprintf(line, sizeof line, "lives another %ld", (long)rank);
  assert_int_equal(ask(line).said, EVEN_CHAOS_SAID_YES);
  assert_true(comes_to('S'));
}

static void a_rank_is_killed_once(void **state) {
  (void)state;
  start_rank("ours");
  const even_chaos_answer found = inject("kill", "ours", 5);
  assert_int_equal(found.said, EVEN_CHAOS_SAID_DONE);
  assert_non_null(strstr(found.words, "rank 1 (process "));
  assert_true(comes_to('Z'));
  assert_int_equal(inject("kill", "ours", 5).said, EVEN_CHAOS_SAID_LATER);
}

/* One that has no agent above it: no other process is taken for that. */
static void who_is_no_agent_is_not_killed_for_one(void **state) {
  (void)state;
  start_rank("ours");
  assert_int_equal(inject("agent", "ours", 5).said, EVEN_CHAOS_SAID_LATER);
}

static void who_stands_still_is_let_go_at_the_end(void **state) {
  (void)state;
  start_rank("ours");
  assert_int_equal(inject("stop", "ours", 1000).said, EVEN_CHAOS_SAID_DONE);
  assert_true(comes_to('T'));
  assert_int_equal(inject("stop", "ours", 1000).said, EVEN_CHAOS_SAID_LATER); /* one at a time */
  even_chaos_part_close(&job);
  assert_true(comes_to('S'));
}

static void who_lacks_memory_is_fed_at_the_end(void **state) {
  struct rlimit before;
  struct rlimit now;
  (void)state;
  start_rank("ours");
  assert_int_equal(prlimit(rank, RLIMIT_AS, NULL, &before), 0);
  const even_chaos_answer found = inject("out-of-memory", "ours", 1000);
  assert_int_equal(found.said, EVEN_CHAOS_SAID_DONE);
  assert_int_equal(found.number, 0);
  assert_int_equal(prlimit(rank, RLIMIT_AS, NULL, &now), 0);
  assert_true(now.rlim_cur != before.rlim_cur);
  assert_int_equal(ask("look 0").said, EVEN_CHAOS_SAID_OPEN);
  even_chaos_part_close(&job);
  assert_int_equal(prlimit(rank, RLIMIT_AS, NULL, &now), 0);
  assert_true(now.rlim_cur == before.rlim_cur);
}

static void what_lack_did_is_told(void **state) {
  (void)state;
  start_rank("ours");
  assert_int_equal(inject("out-of-memory", "ours", 1000).said, EVEN_CHAOS_SAID_DONE);
  const even_chaos_answer borne = ask("feed 0");
  assert_int_equal(borne.said, EVEN_CHAOS_SAID_OVER);
  assert_int_equal(borne.lack, EVEN_CHAOS_LACK_BORNE);
  assert_int_equal(inject("out-of-memory", "ours", 1000).number, 1);
  assert_int_equal(kill(rank, SIGKILL), 0);
  assert_true(comes_to('Z'));
  const even_chaos_answer hurt = ask("feed 1");
  assert_int_equal(hurt.lack, EVEN_CHAOS_LACK_HURT);
  assert_non_null(strstr(hurt.words, "; it ended for it"));
}

static void what_is_not_known_is_over(void **state) {
  (void)state;
  assert_int_equal(ask("look 5").said, EVEN_CHAOS_SAID_OVER);
}

static int be_rank(void) {
  if (write(STDOUT_FILENO, "!", 1) != 1) {
    return 1;
  }
  for (;;) {
    (void)pause();
  }
}

int main(int count, char **words) {
  if (count > 1 && strcmp(words[1], "rank") == 0) {
    return be_rank();
  }
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(nobody_elses_process_is_touched, begin, end),
      cmocka_unit_test_setup_teardown(a_rank_is_killed_once, begin, end),
      cmocka_unit_test_setup_teardown(who_is_no_agent_is_not_killed_for_one, begin, end),
      cmocka_unit_test_setup_teardown(who_stands_still_is_let_go_at_the_end, begin, end),
      cmocka_unit_test_setup_teardown(who_lacks_memory_is_fed_at_the_end, begin, end),
      cmocka_unit_test_setup_teardown(what_lack_did_is_told, begin, end),
      cmocka_unit_test_setup_teardown(what_is_not_known_is_over, begin, end),
  };
  return cmocka_run_group_tests_name("cli_chaos_part", tests, NULL, NULL);
}
