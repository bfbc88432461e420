/* The process that starts agents: nobody finds what it keeps for the next one once there is to be none. */
#include "base/fail.h"
#include "cli/job.h"
#include "orchestrator/job.h"
#include "orchestrator/legacy.h"
#include "orchestrator/outlast.h"
#include "os/calls.h"
#include "os/folder.h"
#include "os/listener.h"
#include "os/signals.h"
#include "support/fault.h"

#include <arpa/inet.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

/* What agents tell this process. */
typedef struct shared {
  int port;   /* at which the other hosts' agents ask for the next one here */
  int swept;  /* how often processes of the job were looked for, */
  int heard;  /* and somebody would have been found at that port then */
  int agents; /* that were started */
  int free;   /* and how often the run folder was nobody's when one was */
} shared;

static shared *facts;
static pid_t own;
static char said[1024];
static even_status failed;
static bool replaced;
static even_job_options options;

/* ---- in place of the rest of the program ---- */

void even_cli_say(void *context, const char *words) {
  (void)context;
  (void)snprintf(said + strlen(said), sizeof said - strlen(said), "%s\n", words);
}

int even_cli_fail_of(even_status status) {
  failed = status;
  return even_status_exit_code(status);
}

bool even_job_replaces_leader(const even_job_options *of) {
  (void)of;
  return replaced;
}

/* ---- the scene ---- */

static bool somebody_listens(int port) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool there = connect(fd, (struct sockaddr *)&at, sizeof at) == 0;
  (void)close(fd);
  return there;
}

/* Each process of the machine, when those of the job are looked for to be ended. */
static int look(pid_t pid, unsigned flags) {
  if (getpid() == own && facts->port != 0) {
    facts->swept++;
    facts->heard += facts->swept == 1 && somebody_listens(facts->port) ? 1 : 0;
  }
  return even_os_real.pidfd_open(pid, flags);
}

static int begin(void **state) {
  (void)state;
  own = getpid();
  facts = mmap(NULL, sizeof *facts, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (facts == MAP_FAILED) {
    return -1;
  }
  said[0] = '\0';
  failed = EVEN_OK;
  replaced = false;
  options = (even_job_options){.recovery = "restart", .max_restarts = 1};
  even_os.pidfd_open = look;
  return 0;
}

static int end(void **state) {
  (void)state;
  fault_reset();
  return munmap(facts, sizeof *facts);
}

/* An attempt whose ranks another agent could go on with, and where other hosts would find that one. */
static void leave_ranks(even_legacy *legacy) {
  static even_job job;
  int listener = -1;
  (void)snprintf(job.id, sizeof job.id, "%032d", (int)own); /* no other test's */
  if (even_listener_open("127.0.0.1", &facts->port, &listener) != EVEN_OK ||
      even_custody_keep(legacy->custody, EVEN_OUTLAST_LISTENER, 0, listener) != EVEN_OK ||
      even_legacy_leave(legacy, &job) != EVEN_OK) {
    _exit(99);
  }
  even_legacy_whole(legacy, true);
}

static void be_killed(void) {
  (void)kill(getpid(), SIGKILL);
}

/* The exit code. */
static int supervise(void (*agent)(even_legacy *)) {
  int code = -1;
  if (even_job_supervise(&options, &code)) {
    facts->agents++;
    agent(options.legacy);
    _exit(98);
  }
  return code;
}

/* ---- there is a next agent, without ranks that it could go on with ---- */

static char folder[64];

/* Nobody has started it yet. */
static pid_t look_at_folder(void) {
  bool locked = false;
  if (facts->agents > 0) {
    facts->free += even_folder_is_locked(folder, &locked) == EVEN_OK && locked ? 0 : 1;
  }
  return even_os_real.fork();
}

static void has_the_folder(even_legacy *legacy) {
  int held = even_legacy_lock(legacy);
  int lock = -1;
  even_status status = held < 0 ? even_folder_lock(folder, &lock) : even_folder_lock_again(folder, held, &lock);
  if (status != EVEN_OK || lock < 0 || (facts->agents > 1) != (held >= 0) || legacy->custody != NULL) {
    _exit(99);
  }
  even_legacy_keep_lock(legacy, lock);
  if (facts->agents == 1) {
    be_killed();
  }
  _exit(0);
}

static void agents_have_the_folder_where_no_rank_outlasts_one(void **state) {
  bool locked = true;
  (void)state;
  (void)strcpy(folder, "/tmp/evenstep-restart-XXXXXX");
  assert_non_null(mkdtemp(folder));
  assert_int_equal(setenv("EVENSTEP_RESTART_AGENT", "anew", 1), 0);
  even_os.fork = look_at_folder;
  int code = supervise(has_the_folder);
  (void)unsetenv("EVENSTEP_RESTART_AGENT");
  assert_int_equal(code, 0);
  assert_int_equal(facts->agents, 2);
  assert_int_equal(facts->free, 0);
  assert_int_equal(even_folder_is_locked(folder, &locked), EVEN_OK);
  assert_false(locked);
  assert_int_equal(rmdir(folder), 0);
}

/* ---- of several hosts, where another one may take this one's place ---- */

static bool alone;

/* Its ranks end with it. */
static void leads(even_legacy *legacy) {
  leave_ranks(legacy);
  even_legacy_whole(legacy, false);
  even_legacy_alone(legacy, alone);
  if (facts->agents == 1) {
    be_killed();
  }
  _exit(0);
}

static void another_host_leads_unless_this_one_votes_alone(void **state) {
  (void)state;
  replaced = true;
  options.hosts = "a,b,c";
  assert_int_equal(supervise(leads), 128 + SIGKILL);
  assert_int_equal(facts->agents, 1);
  assert_non_null(strstr(said, "another host leads from now on"));
  alone = true;
  *facts = (shared){.port = 0};
  said[0] = '\0';
  assert_int_equal(supervise(leads), 0);
  assert_int_equal(facts->agents, 2);
  assert_non_null(strstr(said, "another one is started in 1 s, once its ranks are gone"));
  *facts = (shared){.port = 0};
  said[0] = '\0';
  options.max_restarts = 0;
  assert_int_equal(supervise(leads), 128 + SIGKILL);
  assert_int_equal(facts->agents, 1);
  assert_non_null(strstr(said, "no restart is left (--max-restarts 0)"));
  assert_null(strstr(said, "another host leads"));
  alone = false;
}

/* ---- there is no next agent ---- */

static void refuses(even_legacy *legacy) {
  leave_ranks(legacy);
  _exit(3);
}

static void is_killed(even_legacy *legacy) {
  leave_ranks(legacy);
  be_killed();
}

static void is_killed_at_the_end(even_legacy *legacy) {
  leave_ranks(legacy);
  even_legacy_finish(legacy, 5);
  be_killed();
}

static void is_killed_when_asked(even_legacy *legacy) {
  leave_ranks(legacy);
  (void)kill(own, SIGTERM);
  while (even_signals_end_pending() == 0) { /* until it was passed on */
    (void)usleep(1000);
  }
  be_killed();
}

static void nobody_is_found_where_ranks_are_ended(void **state) {
  static const struct {
    void (*agent)(even_legacy *);
    int restarts;
    bool no_next; /* it cannot be started */
    int code;
  } ways[] = {{refuses, 1, false, 3},
              {is_killed_at_the_end, 1, false, 5},
              {is_killed, 0, false, 128 + SIGKILL},
              {is_killed_when_asked, 1, false, 128 + SIGTERM},
              {is_killed, 1, true, 0}};
  (void)state;
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
    *facts = (shared){.port = 0};
    options.max_restarts = ways[i].restarts;
    fault_os(FAULT_fork, ways[i].no_next ? 2 : 0, EAGAIN);
    even_os.pidfd_open = look;
    int code = supervise(ways[i].agent);
    assert_int_equal(code, ways[i].no_next ? even_status_exit_code(failed) : ways[i].code);
    assert_int_equal(failed, ways[i].no_next ? EVEN_ERR_SYSTEM : EVEN_OK);
    assert_int_equal(facts->agents, 1);
    assert_true(facts->swept > 0);
    assert_int_equal(facts->heard, 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(agents_have_the_folder_where_no_rank_outlasts_one, begin, end),
      cmocka_unit_test_setup_teardown(another_host_leads_unless_this_one_votes_alone, begin, end),
      cmocka_unit_test_setup_teardown(nobody_is_found_where_ranks_are_ended, begin, end),
  };
  return cmocka_run_group_tests_name("cli_job_restart", tests, NULL, NULL);
}
