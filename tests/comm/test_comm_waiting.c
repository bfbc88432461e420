/* Waiting for peers, with a clock and a futex of the test's own: who counts as dead, and how long a call may wait. */
#include "comm/group.h"
#include "os/calls.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static even_comm_header header;
static even_comm_control controls[2];
static even_comm comm;
static uint64_t now_ns;

static int clock_of_the_test(clockid_t clock, struct timespec *out) {
  (void)clock;
  *out = (struct timespec){(time_t)(now_ns / 1000000000u), (long)(now_ns % 1000000000u)};
  return 0;
}

/* Each sleep takes 0.4 s; after every second one the peer has come. */
static long sleep_of_the_test(uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
  static int sleeps;
  (void)word;
  (void)operation;
  (void)value;
  if (timeout != NULL) {
    now_ns += 400000000u;
    if (++sleeps % 2 == 0) {
      atomic_store(&controls[1].sequence, comm.stage);
    }
  }
  return 0;
}

static int set_up(void **state) {
  (void)state;
  header = (even_comm_header){0};
  controls[0] = controls[1] = (even_comm_control){0};
  comm = (even_comm){.ranks = 2, .header = &header, .controls = controls};
  atomic_flag_clear(&comm.busy);
  atomic_store(&controls[0].process, (uint32_t)getpid());
  now_ns = 1000000000u;
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

static void the_timeout_is_of_the_whole_call(void **state) {
  (void)state;
  atomic_store(&comm.timeout_ns, even_comm_limit_ns(1.0));
  even_os.clock_gettime = clock_of_the_test;
  even_os.futex = sleep_of_the_test;
  for (int call = 0; call < 3; call++) { /* each waits 0.8 s */
    assert_int_equal(even_call_begin(&comm, EVEN_CALL_BARRIER, 0, 0, 0, 0, NULL, NULL, 0), EVEN_OK);
    assert_int_equal(even_call_end(&comm, even_call_next(&comm)), EVEN_OK);
  }
  assert_int_equal(even_call_begin(&comm, EVEN_CALL_BARRIER, 0, 0, 0, 0, NULL, NULL, 0), EVEN_OK);
  assert_int_equal(even_call_next(&comm), EVEN_OK);
  assert_int_equal(even_call_end(&comm, even_call_next(&comm)), EVEN_ERR_TIMEOUT); /* 1.6 s in one call */
}

static void who_is_about_to_say_its_start_lives(void **state) {
  (void)state;
  pid_t child = fork();
  if (child == 0) {
    (void)alarm(60); /* ends also where the test fails */
    (void)pause();
    _exit(0);
  }
  assert_true(even_peers_alive(&comm, 1)); /* has not come */
  atomic_store(&controls[1].process, (uint32_t)child);
  assert_true(even_peers_alive(&comm, 1)); /* between its two words */
  atomic_store(&controls[1].start_time, 1u);
  assert_false(even_peers_alive(&comm, 1)); /* another process has its number */
  atomic_store(&controls[1].start_time, 0u);
  (void)kill(child, SIGKILL);
  (void)waitpid(child, NULL, 0);
  assert_false(even_peers_alive(&comm, 1));
}

static void counts_are_asked_for(void **state) {
  float data[4] = {0};
  (void)state;
  comm.kernels = even_kernels_best();
  assert_int_equal(even_comm_reduce_scatter(&comm, data, data, NULL, EVEN_F32, EVEN_SUM), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_all_gather(&comm, data, data, NULL, EVEN_F32), EVEN_ERR_ARGUMENT);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(the_timeout_is_of_the_whole_call, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_is_about_to_say_its_start_lives, set_up, tear_down),
      cmocka_unit_test_setup_teardown(counts_are_asked_for, set_up, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
