/* Processes that are started before their attempt: shells here, which say when they wait and what they hear. */
#include "orchestrator/warm.h"

#include "base/fail.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* As a rank: says something, then that it waits; then what it reads, word for word. */
#define WAITS                                                                              \
  "echo rank $RANK of $WORLD_SIZE port $MASTER_PORT speeds=$EVENSTEP_SPEEDS.; printf 1 > " \
  "/proc/self/fd/${EVENSTEP_AWAITS#*,};"                                                   \
  "read -r line < /proc/self/fd/${EVENSTEP_AWAITS%,*} || exit 9; echo \"$line\""

typedef struct scene {
  even_loop loop;
  even_device devices[2];
  even_device_list own;
  char *command[4];
  int ignored;
  even_warm *warm;
} scene;

static int set_up(void **state) {
  scene *at = calloc(1, sizeof *at);
  assert_non_null(at);
  assert_int_equal(even_loop_open(&at->loop), EVEN_OK);
  at->devices[0] = (even_device){.name = "cpu:0", .cores = 1, .cuda_index = -1};
  at->devices[1] = (even_device){.name = "cpu:1", .cores = 1, .cuda_index = -1};
  at->own = (even_device_list){at->devices, 2};
  at->command[0] = (char *)(uintptr_t)"sh";
  at->command[1] = (char *)(uintptr_t)"-c";
  at->command[2] = (char *)(uintptr_t)WAITS;
  *state = at;
  return 0;
}

static int tear_down(void **state) {
  scene *at = *state;
  fault_reset();
  even_warm_close(at->warm);
  assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* nothing is left */
  assert_int_equal(errno, ECHILD);
  even_loop_close(&at->loop);
  free(at);
  return 0;
}

/* Ranks 2 and 3 of four, on the second of two hosts. */
static even_rank_place a_place(void) {
  return (even_rank_place){.rank = 2,
                           .first = 2,
                           .local = 2,
                           .group = 1,
                           .groups = 2,
                           .era = 1,
                           .master_address = "10.0.0.1",
                           .interface = "eth0",
                           .master_port = 4711,
                           .attempt = 1,
                           .telemetry_fd = -1,
                           .snapshot_fd = -1,
                           .generation_fd = -1,
                           .job = "0123",
                           .run_folder = "/nowhere"};
}

static even_status start(scene *at, char *const *environment) {
  const even_warm_params params = {.loop = &at->loop,
                                   .place = a_place(),
                                   .own = &at->own,
                                   .world = 4,
                                   .command = at->command,
                                   .environment = environment,
                                   .unpinned = true,
                                   .ignored = at->ignored};
  return even_warm_start(&params, &at->warm);
}

static void await(scene *at) {
  uint64_t until = even_clock_ns() + 120000000000u;
  while (even_warm_settled(at->warm) < 2) {
    assert_true(even_clock_ns() < until);
    assert_int_equal(even_loop_turn(&at->loop, 100), EVEN_OK);
  }
}

static void read_on(even_warm_process *process) {
  uint64_t until = even_clock_ns() + 120000000000u;
  even_pipe_state state = EVEN_PIPE_EMPTY;
  while (state != EVEN_PIPE_ENDED) {
    char buffer[512];
    size_t got = 0;
    assert_true(even_clock_ns() < until);
    state = even_pipe_read(process->process.output, buffer, sizeof buffer, &got);
    even_text_append(&process->said[0], buffer, got);
  }
}

static void finish(even_warm_process *process) {
  even_process_wait(process->process.pid);
  even_pipe_close(process->process.output);
  even_pipe_close(process->process.error);
  even_text_free(&process->said[0]);
  even_text_free(&process->said[1]);
}

static void who_waits_is_taken_and_hears_the_rest(void **state) {
  scene *at = *state;
  char *const before[] = {(char *)(uintptr_t)"EVENSTEP_SPEEDS=1,2,3", NULL};
  char *const then[] = {(char *)(uintptr_t)"EVENSTEP_SPEEDS=1,1,1,1", (char *)(uintptr_t)"OTHER=1", NULL};
  even_device devices[4] = {{.name = ""}};
  const even_device_list world = {devices, 4};
  even_warm_process process;
  assert_int_equal(start(at, before), EVEN_OK);
  await(at);
  assert_int_equal(even_warm_lost(at->warm), 0);
  even_rank_place place = a_place();
  place.rank = 3;
  place.devices = &world;
  place.resume = "/saved/step-7";
  place.memory = "/memory/of-this-attempt";
  place.sign_seen = true;
  place.telemetry_fd = 5;
  assert_true(even_warm_take(at->warm, &place, then, &process));
  read_on(&process);
  const char *said = even_text_string(&process.said[0]);
  assert_non_null(strstr(said, "rank 3 of 4 port 4711 speeds=.\n"));
  assert_non_null(strstr(said, "\"EVENSTEP_RESUME\":\"/saved/step-7\""));
  assert_non_null(strstr(said, "\"EVENSTEP_CHECKPOINT_MEMORY\":\"/memory/of-this-attempt\""));
  assert_non_null(strstr(said, "\"EVENSTEP_RUN_SIGN_SEEN\":\"1\""));
  assert_non_null(strstr(said, "\"EVENSTEP_SPEEDS\":\"1,1,1,1\""));
  assert_non_null(strstr(said, "/fd/5\""));
  assert_null(strstr(said, "SNAPSHOT"));
  assert_null(strstr(said, "OTHER"));
  assert_false(even_warm_take(at->warm, &place, then, &process)); /* it is taken once */
  finish(&process);
}

/* Nobody takes the place of another world's rank: each of these is another one. */
static void another_place_is_not_this_one(void **state) {
  scene *at = *state;
  even_device devices[5] = {{.name = ""}};
  const even_device_list world = {devices, 4};
  const even_device_list larger = {devices, 5};
  even_warm_process process;
  assert_int_equal(start(at, NULL), EVEN_OK);
  await(at);
  even_rank_place others[11];
  for (size_t i = 0; i < 11; i++) {
    others[i] = a_place();
    others[i].devices = &world;
  }
  others[0].devices = &larger;
  others[1].rank = 1; /* of the other host */
  others[2].groups = 3;
  others[3].era = 2;
  others[4].master_port = 4712;
  others[5].attempt = 2;
  others[6].master_address = "10.0.0.2";
  others[7].interface = "eth1";
  others[8].job = "0124";
  others[9].joins = true;
  others[10].first = 1;
  for (size_t i = 0; i < 11; i++) {
    assert_false(even_warm_take(at->warm, &others[i], NULL, &process));
  }
  even_rank_place place = a_place();
  place.devices = &world;
  assert_true(even_warm_take(at->warm, &place, NULL, &process));
  read_on(&process);
  finish(&process);
  assert_false(even_warm_take(NULL, &place, NULL, &process));
}

static void who_ends_before_is_not_taken(void **state) {
  scene *at = *state;
  even_device devices[4] = {{.name = ""}};
  const even_device_list world = {devices, 4};
  even_warm_process process;
  at->command[2] = (char *)(uintptr_t)"exit 3";
  assert_int_equal(start(at, NULL), EVEN_OK);
  await(at);
  assert_int_equal(even_warm_lost(at->warm), 2);
  even_rank_place place = a_place();
  place.devices = &world;
  assert_false(even_warm_take(at->warm, &place, NULL, &process));
}

/* As by the job, whose children they all are: their numbers may be others' then. */
static void who_was_reaped_is_left_alone(void **state) {
  scene *at = *state;
  at->command[2] = (char *)(uintptr_t)"exit 3";
  assert_int_equal(start(at, NULL), EVEN_OK);
  for (int i = 0; i < 2; i++) {
    pid_t pid = waitpid(-1, NULL, 0);
    assert_true(even_warm_reaped(at->warm, pid));
    assert_false(even_warm_reaped(at->warm, pid));
  }
  assert_int_equal(even_warm_settled(at->warm), 2);
  assert_false(even_warm_reaped(NULL, 1));
}

static bool is_pipe_to_write(int fd) {
  struct stat about;
  int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && (flags & O_ACCMODE) == O_WRONLY && fstat(fd, &about) == 0 && S_ISFIFO(about.st_mode);
}

/* Of this process only those pipes are closed that let them go on; each then ends by itself. */
static void the_end_of_the_pipe_ends_who_is_not_needed(void **state) {
  enum { MOST = 256 };
  scene *at = *state;
  bool before[MOST];
  int closed = 0;
  for (int fd = 0; fd < MOST; fd++) {
    before[fd] = is_pipe_to_write(fd);
  }
  assert_int_equal(start(at, NULL), EVEN_OK);
  await(at);
  int nothing = open("/dev/null", O_WRONLY | O_CLOEXEC);
  assert_true(nothing >= 0);
  for (int fd = 0; fd < MOST; fd++) {
    if (!before[fd] && is_pipe_to_write(fd)) {
      assert_int_equal(dup3(nothing, fd, O_CLOEXEC), fd); /* its number is still the library's to close */
      closed++;
    }
  }
  (void)close(nothing);
  assert_int_equal(closed, 2);
  for (int i = 0; i < 2; i++) {
    int how = 0;
    pid_t pid = waitpid(-1, &how, 0);
    assert_true(even_warm_reaped(at->warm, pid));
    assert_true(WIFEXITED(how));
    assert_int_equal(WEXITSTATUS(how), 9);
  }
}

/* As ranks of a job with --notice, which may hear of it before their script can. */
static void a_signal_that_is_to_be_ignored_ends_none(void **state) {
  scene *at = *state;
  at->command[2] = (char *)(uintptr_t)"kill -USR1 $$; " WAITS;
  at->ignored = SIGUSR1;
  assert_int_equal(start(at, NULL), EVEN_OK);
  await(at);
  assert_int_equal(even_warm_lost(at->warm), 0);
  even_warm_close(at->warm);
  at->ignored = 0;
  assert_int_equal(start(at, NULL), EVEN_OK);
  await(at);
  assert_int_equal(even_warm_lost(at->warm), 2);
}

static even_status start_once(void *context) {
  scene *at = context;
  even_status status = start(at, NULL);
  even_warm_close(at->warm);
  at->warm = NULL;
  return status;
}

static void each_lack_of_memory_leaves_nothing(void **state) {
  assert_in_range(fault_each_allocation(start_once, *state), 4, 2000);
}

int main(void) {
#define WARM_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      WARM_TEST(who_waits_is_taken_and_hears_the_rest),
      WARM_TEST(another_place_is_not_this_one),
      WARM_TEST(who_ends_before_is_not_taken),
      WARM_TEST(who_was_reaped_is_left_alone),
      WARM_TEST(the_end_of_the_pipe_ends_who_is_not_needed),
      WARM_TEST(a_signal_that_is_to_be_ignored_ends_none),
      WARM_TEST(each_lack_of_memory_leaves_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
