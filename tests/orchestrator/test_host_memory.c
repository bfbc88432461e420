/* A host's memory for checkpoints goes with its agent, however that ends, and no other's goes with it. */
#include "orchestrator/host_memory.h"

#include "base/fail.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "os/calls.h"
#include "os/custody.h"
#include "os/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/fault.h"

static even_host_memory *memory;

static int set_up(void **state) {
  memory = NULL;
  return scratch_make(state) == 0 && setenv("EVENSTEP_MEMORY_DIR", scratch, 1) == 0 ? 0 : -1;
}

static int tear_down(void **state) {
  even_host_memory_close(memory);
  return scratch_remove(state);
}

static void save_in(const even_host_memory *host, const char *name, int seed) {
  char path[256];
  (void)snprintf(path, sizeof path, "%s/%s", host->folder.data, name);
  assert_int_equal(save_sample(path, false, seed), EVEN_OK);
}

static void await_entries(int count) {
  for (int i = 0; i < 120000 && scratch_entries() != count; i++) {
    (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  }
  assert_int_equal(scratch_entries(), count);
}

static void it_is_this_users_alone_and_goes_with_what_is_in_it(void **state) {
  struct stat facts;
  (void)state;
  assert_int_equal(even_host_memory_open(&memory), EVEN_OK);
  assert_int_equal(stat(memory->folder.data, &facts), 0);
  assert_int_equal(facts.st_mode & 0777, 0700);
  save_in(memory, "step-00000001", 1);
  save_in(memory, "step-00000002", 2);
  char inside[256];
  (void)snprintf(inside, sizeof inside, "%s/step-00000001", memory->folder.data);
  assert_true(even_host_memory_has(memory, inside));
  assert_false(even_host_memory_has(memory, memory->folder.data));
  assert_false(even_host_memory_has(memory, scratch));
  assert_false(even_host_memory_has(NULL, inside));
  even_host_memory_close(memory);
  memory = NULL;
  assert_int_equal(scratch_entries(), 0);
}

/* Waits to be killed with memory of its own. */
static pid_t start_agent(bool with_keeper) {
  int ends[2];
  char byte = 0;
  assert_int_equal(pipe(ends), 0);
  pid_t pid = fork();
  if (pid == 0) {
    even_host_memory *mine = NULL;
    bool made = even_host_memory_open(&mine) == EVEN_OK;
    if (made) {
      save_in(mine, "step-00000001", 1);
    }
    if (made && !with_keeper) {
      (void)kill(mine->keeper.pid, SIGKILL);
      (void)waitpid(mine->keeper.pid, NULL, 0);
    }
    (void)!write(ends[1], made ? "y" : "n", 1);
    for (;;) {
      (void)pause();
    }
  }
  (void)close(ends[1]);
  assert_int_equal(read(ends[0], &byte, 1), 1);
  assert_int_equal(byte, 'y');
  (void)close(ends[0]);
  return pid;
}

static void end_agent(pid_t pid) {
  assert_int_equal(kill(pid, SIGKILL), 0);
  assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void a_killed_agents_memory_goes(void **state) {
  (void)state;
  assert_int_equal(even_host_memory_open(&memory), EVEN_OK);
  save_in(memory, "step-00000007", 7);
  pid_t pid = start_agent(true);
  assert_int_equal(scratch_entries(), 2);
  end_agent(pid);
  await_entries(1);
  char path[256];
  (void)snprintf(path, sizeof path, "%s/step-00000007", memory->folder.data);
  assert_int_equal(even_checkpoint_verify(path, NULL), EVEN_OK);
}

/* Its agent is killed, and the next one has what it had: the folder stays until that one lets it go. */
static void the_next_agent_may_have_it(void **state) {
  (void)state;
  even_custody custody;
  even_keeper keeper;
  int childs = -1;
  int ends[2];
  struct {
    pid_t keeper;
    char folder[256];
  } told;
  assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
  even_custody_open(&custody);
  assert_int_equal(even_custody_begin(&custody, &childs), EVEN_OK);
  pid_t agent = fork();
  if (agent == 0) {
    even_custody_join(&custody, childs);
    if (even_host_memory_open(&memory) == EVEN_OK && even_custody_keep(&custody, 1, 0, memory->lock) == EVEN_OK &&
        even_custody_keep(&custody, 2, 0, memory->keeper.pipe) == EVEN_OK) {
      told.keeper = memory->keeper.pid;
      (void)snprintf(told.folder, sizeof told.folder, "%s", memory->folder.data);
      (void)!write(ends[1], &told, sizeof told);
    }
    (void)raise(SIGKILL);
    _exit(1);
  }
  (void)close(childs);
  assert_int_equal(read(ends[0], &told, sizeof told), sizeof told);
  assert_int_equal(waitpid(agent, NULL, 0), agent);
  even_custody_hear(&custody);
  even_keeper_take(told.keeper, even_custody_claim(&custody, 2, 0), &keeper);
  assert_int_equal(even_host_memory_take(told.folder, even_custody_claim(&custody, 1, 0), &keeper, &memory), EVEN_OK);
  save_in(memory, "step-00000003", 3);
  even_host_memory *other = NULL; /* of another job: it removes no living agent's */
  assert_int_equal(even_host_memory_open(&other), EVEN_OK);
  even_host_memory_close(other);
  assert_int_equal(scratch_entries(), 1);
  int held = dup(memory->keeper.pipe);
  even_host_memory_close(memory);
  memory = NULL;
  assert_int_equal(scratch_entries(), 0);
  (void)close(held);
  (void)close(ends[0]);
  (void)close(ends[1]);
  even_custody_close(&custody);
}

static even_status take_over(void *context) {
  const even_keeper none = {.pid = -1, .pipe = -1};
  even_host_memory *taken = NULL;
  (void)context;
  EVEN_TRY(even_host_memory_take("/nowhere", -1, &none, &taken));
  even_host_memory_close(taken);
  return EVEN_OK;
}

static void what_cannot_be_had_is_let_go(void **state) {
  (void)state;
  assert_true(fault_each_allocation(take_over, NULL) >= 2);
}

static void what_died_with_its_keeper_goes_with_the_next(void **state) {
  (void)state;
  pid_t lives = start_agent(true);
  pid_t dies = start_agent(false);
  end_agent(dies);
  assert_int_equal(scratch_entries(), 2); /* nobody is there to remove it */
  assert_int_equal(even_host_memory_open(&memory), EVEN_OK);
  assert_int_equal(scratch_entries(), 2); /* that of the living, and this one */
  end_agent(lives);
  await_entries(1);
}

static int rivals; /* agents that still are to come between a folder and its lock */
static int rival_lock;

/* One removes the folder at once, one is about to. */
static int swept_mkdir(const char *path, mode_t mode) {
  int failed = mkdir(path, mode);
  if (failed == 0 && rivals == 2) {
    failed = rmdir(path);
  } else if (failed == 0 && rivals == 1) {
    rival_lock = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    failed = flock(rival_lock, LOCK_EX);
  }
  rivals -= rivals > 0;
  return failed;
}

static void another_agent_may_sweep_meanwhile(void **state) {
  char again[256];
  (void)state;
  rivals = 2;
  even_os.mkdir = swept_mkdir;
  assert_int_equal(even_host_memory_open(&memory), EVEN_OK);
  assert_int_equal(rivals, 0);
  assert_true(memory->lock >= 0);
  save_in(memory, "step-00000001", 1);
  assert_int_equal(scratch_entries(), 2); /* this one's, and what the other one removes */
  assert_int_equal(close(rival_lock), 0);
  (void)snprintf(again, sizeof again, "%s", memory->folder.data);
  even_host_memory_close(memory);
  memory = NULL;
  assert_int_not_equal(access(again, F_OK), 0);
  assert_int_equal(scratch_entries(), 1);
}

static int lost_mkdir(const char *path, mode_t mode) {
  return mkdir(path, mode) == 0 ? rmdir(path) : -1;
}

static void folders_that_never_stay_are_told(void **state) {
  (void)state;
  even_os.mkdir = lost_mkdir;
  assert_int_equal(even_host_memory_open(&memory), EVEN_ERR_IN_USE);
  assert_null(memory);
}

static int refused_once(const char *path) {
  static bool refused;
  if (!refused) {
    refused = true;
    errno = ENOTEMPTY; /* something was written there meanwhile */
    return -1;
  }
  return rmdir(path);
}

static void what_is_written_while_it_goes_goes_too(void **state) {
  (void)state;
  even_os.rmdir = refused_once; /* the keeper's, too: it is forked after this */
  assert_int_equal(even_host_memory_open(&memory), EVEN_OK);
  even_host_memory_close(memory);
  memory = NULL;
  assert_int_equal(scratch_entries(), 0);
}

static void a_place_that_cannot_be_had_is_told(void **state) {
  (void)state;
  assert_int_equal(setenv("EVENSTEP_MEMORY_DIR", scratch_path("absent"), 1), 0);
  assert_int_equal(even_host_memory_open(&memory), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->fix, "EVENSTEP_MEMORY_DIR"));
  assert_int_equal(setenv("EVENSTEP_MEMORY_DIR", scratch, 1), 0);
  fault_os_from(FAULT_pipe2, 1, EMFILE);
  assert_int_not_equal(even_host_memory_open(&memory), EVEN_OK);
  assert_int_equal(scratch_entries(), 0);
}

int main(void) {
#define MEMORY_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      MEMORY_TEST(it_is_this_users_alone_and_goes_with_what_is_in_it),
      MEMORY_TEST(a_killed_agents_memory_goes),
      MEMORY_TEST(the_next_agent_may_have_it),
      MEMORY_TEST(what_cannot_be_had_is_let_go),
      MEMORY_TEST(what_died_with_its_keeper_goes_with_the_next),
      MEMORY_TEST(another_agent_may_sweep_meanwhile),
      MEMORY_TEST(folders_that_never_stay_are_told),
      MEMORY_TEST(what_is_written_while_it_goes_goes_too),
      MEMORY_TEST(a_place_that_cannot_be_had_is_told),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
