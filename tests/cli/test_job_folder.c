/* Run folders: locked while their job lives, what holds where a file system has no locks, and among hosts that share
 * one: it says that it is NFS, keeps locks of folders to each host, and waits go by a made-up clock. */
#include "base/fail.h"
#include "base/utf8.h"
#include "cli/job_setup.h"
#include "orchestrator/estate.h"
#include "orchestrator/legacy.h"
#include "os/calls.h"
#include "os/custody.h"
#include "os/folder.h"
#include "os/lease.h"
#include "support/fault.h"
#include "support/locks.h"
#include "support/nfs.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static char runs[64];
static even_job_options options;
static even_job_setup setup;

static int make_runs(void **state) {
  (void)state;
  (void)strcpy(runs, "/tmp/evenstep-runs-XXXXXX");
  options = (even_job_options){.runs_folder = runs, .name = "one"};
  setup = (even_job_setup){.lock = -1};
  return mkdtemp(runs) == NULL;
}

static void close_setup(void) {
  even_lease_release(setup.lease);
  even_folder_unlock(setup.lock);
  even_text_free(&setup.run_name);
  even_text_free(&setup.run_folder);
  setup = (even_job_setup){.lock = -1};
}

static int remove_runs(void **state) {
  char command[128];
  (void)state;
  close_setup();
  fault_reset();
  (void)unsetenv("EVENSTEP_HOST_ID");
  (void)snprintf(command, sizeof command, "rm -rf %s", runs);
  return system(command);
}

static void a_folder_in_use_is_refused(void **state) {
  (void)state;
  char path[96];
  int held = -1;
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
  assert_true(setup.lock >= 0);
  close_setup();
  (void)snprintf(path, sizeof path, "%s/one", runs);
  assert_int_equal(even_folder_lock(path, &held), EVEN_OK);
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_ERR_IN_USE);
  even_folder_unlock(held);
}

/* A test's own lock: of this process. */
static void who_has_it_is_told(void **state) {
  (void)state;
  char path[96];
  char own[64];
  int held = -1;
  bool told = locks_are_told(runs);
  (void)snprintf(path, sizeof path, "%s/one", runs);
  (void)snprintf(own, sizeof own, ": process %ld (", (long)getpid());
  assert_int_equal(mkdir(path, 0777), 0);
  assert_int_equal(even_folder_lock(path, &held), EVEN_OK);
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_ERR_IN_USE);
  const char *what = even_error_last()->what;
  assert_non_null(strstr(what, "one belongs to a job that is running"));
  if (told) {
    assert_non_null(strstr(what, "running on host "));
    assert_non_null(strstr(what, own));
    assert_non_null(strstr(what, program_invocation_short_name)); /* its command */
    assert_non_null(strstr(what, "), which began at 20"));
  }
  close_setup();
  fault_os_from(FAULT_read, 1, EIO); /* nothing of /proc can be read */
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_ERR_IN_USE);
  what = even_error_last()->what;
  assert_string_equal(what + strlen(what) - strlen("is running"), "is running");
  fault_reset();
  even_folder_unlock(held);
}

/* Its number may be another process's by now: here it lives, and has the folder no longer open. */
static void who_has_it_no_longer_is_not_told(void **state) {
  (void)state;
  char path[96];
  char byte = 0;
  int up[2];
  int down[2];
  (void)snprintf(path, sizeof path, "%s/one", runs);
  assert_int_equal(mkdir(path, 0777), 0);
  int held = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  assert_true(held >= 0);
  assert_int_equal(pipe(up), 0);
  assert_int_equal(pipe(down), 0);
  pid_t taker = fork();
  if (taker == 0) {
    bool taken = flock(held, LOCK_EX | LOCK_NB) == 0 && close(held) == 0 && close(down[1]) == 0;
    (void)!write(up[1], taken ? "y" : "n", 1);
    (void)!read(down[0], &byte, 1); /* until the test has ended */
    _exit(0);
  }
  assert_true(taker > 0);
  assert_int_equal(read(up[0], &byte, 1), 1);
  assert_int_equal(byte, 'y');
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_ERR_IN_USE);
  const char *what = even_error_last()->what;
  assert_string_equal(what + strlen(what) - strlen("is running"), "is running");
  for (int i = 0; i < 2; i++) {
    assert_int_equal(close(up[i]), 0);
    assert_int_equal(close(down[i]), 0);
  }
  assert_int_equal(waitpid(taker, NULL, 0), taker);
  assert_int_equal(close(held), 0);
}

/* Lustre mounted without locks, some file systems of FUSE. */
static void a_job_runs_where_nothing_can_be_locked(void **state) {
  static const int refusals[] = {ENOLCK, ENOSYS, EOPNOTSUPP};
  (void)state;
  for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
    fault_os_from(FAULT_flock, 1, refusals[i]);
    assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK); /* new, then one moved away */
    assert_int_equal(setup.lock, -1);
    close_setup();
  }
  options.resume = "auto";
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
}

static void what_may_be_in_use_there_is_refused(void **state) {
  (void)state;
  char path[96];
  options.resume = "auto";
  fault_os_from(FAULT_flock, 1, ENOLCK);
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
  close_setup();
  (void)snprintf(path, sizeof path, "%s/one/agent.json", runs);
  int file = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  assert_true(file >= 0);
  assert_int_equal(close(file), 0);
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "no locks"));
  assert_non_null(strstr(even_error_last()->fix, "one/agent.json"));
}

/* ---- agents of one job, one after the other ---- */

/* What the next one finds is what this process has. */
static void begin_agent(even_custody *starter, even_custody *agent) {
  int its = -1;
  assert_int_equal(even_custody_begin(starter, &its), EVEN_OK);
  *agent = (even_custody){.socket = -1, .count = starter->count};
  assert_true(starter->count <= 1);
  if (starter->count == 1) {
    agent->items = malloc(sizeof *agent->items);
    assert_non_null(agent->items);
    agent->items[0] = starter->items[0];
    agent->items[0].fd = fcntl(starter->items[0].fd, F_DUPFD_CLOEXEC, 0);
  }
  even_custody_join(agent, its);
}

/* It ends by itself, and another one follows; no rank outlasts either. */
static void agents_have_it_one_after_the_other(void **state) {
  (void)state;
  even_legacy legacy;
  even_custody starter;
  even_custody agent;
  char path[96];
  bool locked = false;
  (void)snprintf(path, sizeof path, "%s/one", runs);
  even_custody_open(&starter);
  assert_int_equal(even_legacy_open(&legacy), EVEN_OK);
  options.legacy = &legacy;
  for (int i = 0; i < 2; i++) {
    begin_agent(&starter, &agent);
    legacy.folder = &agent;
    assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
    assert_true(setup.lock >= 0);
    even_custody_hear(&starter);
    assert_int_equal((int)starter.count, 1);
    if (i == 0) {
      even_legacy_name(&legacy, "one");
      even_legacy_ask_again(&legacy);
    }
    even_job_leave_folder(&setup);
    even_custody_close(&agent);
    assert_int_equal(setup.lock, -1);
    assert_int_equal(even_folder_is_locked(path, &locked), EVEN_OK);
    assert_true(locked == (i == 0)); /* the last one's end is the job's, whoever has the lock, too */
    assert_true(even_legacy_asks_again(&legacy) == (i == 0));
    options.resume = "auto";
    close_setup();
  }
  even_custody_close(&starter);
  even_legacy_close(&legacy);
}

/* ---- a file system that other hosts see ---- */

static int no_locks_of_folders(int fd, int operation) {
  struct stat facts;
  return fstat(fd, &facts) == 0 && S_ISDIR(facts.st_mode) ? 0 : even_os_real.flock(fd, operation);
}

static int open_no_sign(const char *path, int flags, mode_t mode) {
  if (strstr(path, EVEN_LEASE_SIGN) != NULL && (flags & O_CREAT) == 0) {
    errno = EACCES;
    return -1;
  }
  return even_os_real.open(path, flags, mode);
}

static uint64_t slept_ns;
static char moves[96]; /* the sign of a job that lives, "" for none */

static int made_up_clock(clockid_t clock, struct timespec *out) {
  int failed = even_os_real.clock_gettime(clock, out);
  out->tv_sec += (time_t)(slept_ns / 1000000000u);
  return failed;
}

static int made_up_sleep(const struct timespec *time) {
  static time_t second = 2000000000;
  second++;
  const struct timespec times[2] = {{second, 0}, {second, 0}};
  slept_ns += (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec;
  return moves[0] == '\0' ? 0 : utimensat(AT_FDCWD, moves, times, 0);
}

static int make_shared_runs(void **state) {
  if (make_runs(state) != 0) {
    return -1;
  }
  even_os.fstatfs = statfs_of_nfs;
  even_os.flock = no_locks_of_folders;
  even_os.clock_gettime = made_up_clock;
  even_os.nanosleep = made_up_sleep;
  slept_ns = 0;
  moves[0] = '\0';
  return setenv("EVENSTEP_HOST_ID", "a", 1);
}

static void sign_path(const char *name, char out[96]) {
  (void)snprintf(out, 96, "%s/%s/%s", runs, name, EVEN_LEASE_SIGN);
}

/* Its host is lost: nobody renews it. */
static void leave_sign(const char *name, const char *owner) {
  char text[256];
  char path[96];
  char folder[80];
  (void)snprintf(folder, sizeof folder, "%s/%s", runs, name);
  assert_int_equal(mkdir(folder, 0777), 0);
  sign_path(name, path);
  int length = snprintf(text, sizeof text, "b pid:[1]\nfar\n4711\n%s\n1\n0123\n", owner);
  int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  assert_true(fd >= 0);
  assert_int_equal(write(fd, text, (size_t)length), length);
  assert_int_equal(close(fd), 0);
}

static void a_job_of_another_host_is_not_disturbed(void **state) {
  (void)state;
  char path[96];
  leave_sign("one", "somebody");
  sign_path("one", path);
  (void)strcpy(moves, path);
  for (int i = 0; i < 2; i++) { /* and what has the name is not moved away */
    options.resume = i == 0 ? NULL : "auto";
    assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_ERR_IN_USE);
    assert_non_null(strstr(even_error_last()->what, "host far (process 4711)"));
    assert_non_null(strstr(even_error_last()->fix, "--name"));
    assert_int_equal(setup.lock, -1);
    assert_null(setup.lease);
    assert_int_equal(access(path, F_OK), 0);
    close_setup();
  }
  assert_true(slept_ns < EVEN_LEASE_NS);
}

static void what_a_lost_host_left_is_taken_in_time(void **state) {
  (void)state;
  char path[96];
  leave_sign("one", "somebody");
  options.resume = "auto";
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
  assert_true(slept_ns >= EVEN_LEASE_NS);
  assert_non_null(setup.lease);
  close_setup();
  sign_path("one", path);
  assert_int_equal(access(path, F_OK), -1); /* a job that has ended keeps nobody waiting */
  slept_ns = 0;
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
  assert_int_equal(slept_ns, 0);
}

static int rename_a_held_one(const char *from, const char *to) {
  char path[128];
  (void)snprintf(path, sizeof path, "%s/%s", from, EVEN_LEASE_SIGN);
  assert_int_equal(access(path, F_OK), 0); /* another host's job would have it else */
  return even_os_real.rename(from, to);
}

static void a_folder_that_is_moved_away_has_no_sign(void **state) {
  (void)state;
  char path[96];
  even_os.rename = rename_a_held_one;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
    if (i == 0) {
      close_setup();
    }
  }
  sign_path("one", path);
  assert_int_equal(access(path, F_OK), 0);
  sign_path("one.1", path);
  assert_int_equal(access(path, F_OK), -1);
  assert_int_equal(slept_ns, 0);
}

static void a_next_leader_waits_for_nobody(void **state) {
  (void)state;
  static const char job[] = "0123456789abcdef0123456789abcdef";
  even_estate estate = {.generation = 2, .content = json_pack("{s:s}", "job", job)};
  assert_non_null(estate.content);
  options.estate = &estate;
  leave_sign("one", job);
  leave_sign("one.1", "somebody");
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
  assert_string_equal(setup.id, job);
  assert_non_null(strstr(setup.run_folder.data, "/one"));
  assert_null(strstr(setup.run_folder.data, "/one."));
  close_setup();
  char path[96];
  sign_path("one", path);
  assert_int_equal(access(path, F_OK), -1);
  options.name = "two"; /* another job's: the next name */
  leave_sign("two", "somebody");
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
  assert_non_null(strstr(setup.run_folder.data, "/two.1"));
  assert_int_equal(slept_ns, 0);
  json_decref(estate.content);
}

/* Another process: one that lives would have it still. */
static void a_sign_is_left_to_the_next_agent(void **state) {
  (void)state;
  even_legacy legacy;
  char path[96];
  int code = -1;
  sign_path("one", path);
  assert_int_equal(even_legacy_open(&legacy), EVEN_OK);
  options.legacy = &legacy;
  pid_t agent = fork();
  if (agent == 0) {
    bool made = even_job_run_folder(&options, "train.py", &setup) == EVEN_OK && setup.lease != NULL;
    even_legacy_ask_again(&legacy);
    even_job_leave_folder(&setup);
    _exit(made && setup.lease == NULL ? 0 : 1);
  }
  assert_int_equal(waitpid(agent, &code, 0), agent);
  assert_int_equal(code, 0);
  assert_int_equal(access(path, F_OK), 0);
  assert_true(even_legacy_asks_again(&legacy));
  options.resume = "auto";
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
  assert_non_null(setup.lease);
  assert_int_equal(slept_ns, 0);
  even_job_leave_folder(&setup);
  assert_int_equal(access(path, F_OK), -1);
  even_legacy_close(&legacy);
}

static void a_job_whose_sign_cannot_be_read_is_not_disturbed(void **state) {
  (void)state;
  leave_sign("one", "somebody");
  options.resume = "auto";
  even_os.open = open_no_sign;
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "the sign of another job"));
  assert_null(setup.lease);
}

static int no_room(int fd) {
  (void)fd;
  errno = ENOSPC;
  return -1;
}

static void a_job_runs_where_no_sign_can_be_made(void **state) {
  (void)state;
  even_os.fsync = no_room;
  options.name = NULL;
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
  assert_null(setup.lease);
  assert_true(setup.lock >= 0);
}

static void assert_name_refused(const char *name, const char *what) {
  options.name = name;
  assert_int_equal(even_job_check_name(&options), EVEN_ERR_USAGE);
  assert_non_null(strstr(even_error_last()->what, what));
  assert_null(strchr(even_error_last()->what, '\n'));
  assert_true(even_error_last()->fix[0] != '\0');
}

static void a_name_is_one_line_and_fits(void **state) {
  (void)state;
  char name[256];
  memset(name, 'n', sizeof name);
  name[201] = '\0';
  assert_name_refused("a\nb", "control character as its byte 2 (0x0a)");
  assert_name_refused("\033[31mred", "(0x1b)");
  assert_name_refused("a\177", "(0x7f)");
  assert_name_refused("a/b", "no name for a folder");
  assert_name_refused(name, "201 bytes");
  name[200] = '\0';
  options.name = name;
  assert_int_equal(even_job_check_name(&options), EVEN_OK);
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
  options.name = "my run; $(x) \"\xc3\xbc\" 100%s";
  assert_int_equal(even_job_check_name(&options), EVEN_OK);
}

static void assert_taken(const char *script, const char *begin) {
  options.name = NULL;
  assert_int_equal(even_job_run_folder(&options, script, &setup), EVEN_OK);
  options.name = setup.run_name.data;
  assert_int_equal(even_job_check_name(&options), EVEN_OK);
  assert_int_equal(strncmp(options.name, begin, strlen(begin)), 0);
  assert_true(even_utf8_valid(options.name));
  close_setup();
}

/* Also where the script's own is none: the agent that goes on with the job is told it, and --name takes it. */
static void a_name_that_nobody_gave_can_be_given(void **state) {
  (void)state;
  static const char *const scripts[] = {"a\nb.py", "x/.hidden.py", "..", "\033[31mred\177.sh", "folder/", "train.py"};
  static const char *const begins[] = {"a_b-", "_hidden-", "_.-", "_[31mred_.sh-", "folder_-", "train-"};
  for (size_t i = 0; i < sizeof scripts / sizeof scripts[0]; i++) {
    assert_taken(scripts[i], begins[i]);
  }
  char name[256];
  for (size_t letters = 170; letters < 254; letters++) { /* then characters of two bytes */
    memset(name, 'n', sizeof name);
    for (size_t at = letters; at < 254; at += 2) {
      memcpy(name + at, "\xc3\xbc", 2);
    }
    name[letters + (254 - letters) / 2 * 2] = '\0';
    assert_taken(name, "nnn");
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_folder_in_use_is_refused, make_runs, remove_runs),
      cmocka_unit_test_setup_teardown(who_has_it_is_told, make_runs, remove_runs),
      cmocka_unit_test_setup_teardown(who_has_it_no_longer_is_not_told, make_runs, remove_runs),
      cmocka_unit_test_setup_teardown(a_job_runs_where_nothing_can_be_locked, make_runs, remove_runs),
      cmocka_unit_test_setup_teardown(what_may_be_in_use_there_is_refused, make_runs, remove_runs),
      cmocka_unit_test_setup_teardown(agents_have_it_one_after_the_other, make_runs, remove_runs),
      cmocka_unit_test_setup_teardown(a_sign_is_left_to_the_next_agent, make_shared_runs, remove_runs),
      cmocka_unit_test_setup_teardown(a_job_of_another_host_is_not_disturbed, make_shared_runs, remove_runs),
      cmocka_unit_test_setup_teardown(what_a_lost_host_left_is_taken_in_time, make_shared_runs, remove_runs),
      cmocka_unit_test_setup_teardown(a_folder_that_is_moved_away_has_no_sign, make_shared_runs, remove_runs),
      cmocka_unit_test_setup_teardown(a_next_leader_waits_for_nobody, make_shared_runs, remove_runs),
      cmocka_unit_test_setup_teardown(a_job_whose_sign_cannot_be_read_is_not_disturbed, make_shared_runs, remove_runs),
      cmocka_unit_test_setup_teardown(a_job_runs_where_no_sign_can_be_made, make_shared_runs, remove_runs),
      cmocka_unit_test_setup_teardown(a_name_is_one_line_and_fits, make_runs, remove_runs),
      cmocka_unit_test_setup_teardown(a_name_that_nobody_gave_can_be_given, make_runs, remove_runs),
  };
  return cmocka_run_group_tests_name("cli_job_folder", tests, NULL, NULL);
}
