/* Waiting for peers, with a clock and a futex of the test's own: who counts as dead, and how long a call may wait. */
#include "comm/group.h"
#include "os/calls.h"
#include "support/fault.h"

#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
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

static int stalls;

static void take_stall(void *context, const char *words) {
  stalls++;
  (void)strncpy(context, words, 255);
}

/* Each stage waits 0.8 s; the inspector speaks after 0.5 s of the call, and not again in its later stages. */
static void a_long_wait_is_told_once(void **state) {
  char words[256] = "";
  (void)state;
  atomic_store(&comm.timeout_ns, even_comm_limit_ns(100.0));
  even_os.clock_gettime = clock_of_the_test;
  even_os.futex = sleep_of_the_test;
  stalls = 0;
  for (int call = 0; call < 3; call++) {
    even_shared_on_stall(&comm, call == 0 ? 100 : 0.5, call < 2 ? take_stall : NULL, words);
    assert_int_equal(even_call_begin(&comm, EVEN_CALL_BARRIER, 0, 0, 0, 0, NULL, NULL, 0), EVEN_OK);
    assert_int_equal(even_call_next(&comm), EVEN_OK);
    assert_int_equal(even_call_next(&comm), EVEN_OK);
    assert_int_equal(even_call_end(&comm, even_call_next(&comm)), EVEN_OK);
    assert_int_equal(stalls, call == 0 ? 0 : 1);
  }
  assert_non_null(strstr(words, "rank 0 has waited "));
  assert_non_null(strstr(words, " s for rank 1 (process 0) in barrier"));
}

static int yields;
static int sleeps;
static int comes_after;         /* so many yields */
static uint64_t others_turn_ns; /* what each of them takes */

static int yield_of_the_test(void) {
  now_ns += others_turn_ns;
  if (++yields == comes_after) {
    atomic_store(&controls[1].sequence, comm.stage);
  }
  return 0;
}

static long wake_at_once(uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
  (void)word;
  (void)operation;
  (void)value;
  sleeps += timeout != NULL;
  atomic_store(&controls[1].sequence, comm.stage);
  return 0;
}

static void one_stage(int after, uint64_t turn_ns, int wanted_yields, int wanted_sleeps) {
  yields = sleeps = 0;
  comes_after = after;
  others_turn_ns = turn_ns;
  assert_int_equal(even_stage(&comm, &comm.progress), EVEN_OK);
  assert_int_equal(yields, wanted_yields);
  assert_int_equal(sleeps, wanted_sleeps);
}

/* Ranks that share cores: who waits lets the others go on, and sleeps where that takes long. */
static void a_rank_yields_to_ranks_and_not_to_strangers(void **state) {
  (void)state;
  atomic_store(&comm.timeout_ns, even_comm_limit_ns(100.0));
  even_os.clock_gettime = clock_of_the_test;
  even_os.futex = wake_at_once;
  even_os.sched_yield = yield_of_the_test;
  comm.progress = (even_comm_patience){.polls = 20, .least = 1, .most = 20, .yields = true};
  one_stage(7, 1000, 7, 0);
  one_stage(0, 1000, 20, 1); /* nobody came: less is tried the next time, */
  one_stage(0, 1000, 10, 1);
  one_stage(3, 1000, 3, 0);   /* until somebody comes again */
  one_stage(0, 300000, 4, 1); /* and never for longer than a millisecond in all */
  one_stage(1, 300000, 1, 0);
  one_stage(0, 5000000, 1, 1); /* a stranger had the core */
  for (int wait = 0; wait < 64; wait++) {
    one_stage(0, 1000, 0, 1);
  }
  one_stage(1, 1000, 1, 0);
  one_stage(1, 5000000, 1, 0); /* again: for twice as long */
  for (int wait = 0; wait < 120; wait++) {
    one_stage(0, 1000, 0, 1);
  }
}

static pid_t start_idle_child(void) {
  pid_t child = fork();
  if (child == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* ends also where the test fails */
    for (;;) {
      (void)pause();
    }
  }
  return child;
}

/* How rank 1 is, seen one look later. */
static even_peer_state look(void) {
  now_ns += EVEN_COMM_LOOK_NS;
  return even_peers_look(&comm, 1, now_ns);
}

static void who_is_about_to_say_its_start_lives(void **state) {
  (void)state;
  pid_t child = start_idle_child();
  assert_int_equal(look(), EVEN_PEER_LIVES); /* has not come */
  atomic_store(&controls[1].process, (uint32_t)child);
  assert_int_equal(look(), EVEN_PEER_LIVES); /* between its two words */
  atomic_store(&controls[1].start_time, 1u);
  assert_int_equal(look(), EVEN_PEER_GONE); /* another process has its number */
  atomic_store(&controls[1].start_time, 0u);
  (void)kill(child, SIGKILL);
  (void)waitpid(child, NULL, 0);
  assert_int_equal(look(), EVEN_PEER_GONE);
  assert_int_equal(even_peers_look(&comm, 1, now_ns),
                   EVEN_PEER_GONE); /* at once again: nobody has to wait for a look */
}

static void change(pid_t child, int number, int wanted) {
  int status = 0;
  (void)kill(child, number);
  assert_int_equal(waitpid(child, &status, WUNTRACED | WCONTINUED), child);
  assert_true(wanted == SIGSTOP ? WIFSTOPPED(status) : WIFCONTINUED(status));
}

static void who_is_stopped_is_lost_after_a_grace(void **state) {
  (void)state;
  pid_t child = start_idle_child();
  atomic_store(&controls[1].process, (uint32_t)child);
  atomic_store(&comm.stop_grace_ns, 100000000u);
  change(child, SIGSTOP, SIGSTOP);
  for (int looks = 0; looks < 6; looks++) { /* the first begins the count */
    assert_int_equal(look(), looks < 6 - 1 ? EVEN_PEER_LIVES : EVEN_PEER_STANDS);
  }
  assert_int_equal(look(), EVEN_PEER_STANDS);
  /* Nobody looked for long: the whole job was stopped, and this rank goes on a little earlier than that one. */
  now_ns += 3600 * (uint64_t)1000000000u;
  assert_int_equal(look(), EVEN_PEER_LIVES);
  assert_int_equal(look(), EVEN_PEER_LIVES);
  assert_int_equal(look(), EVEN_PEER_LIVES);
  assert_int_equal(look(), EVEN_PEER_STANDS); /* it alone stands */
  change(child, SIGCONT, SIGCONT);
  assert_int_equal(look(), EVEN_PEER_LIVES);
  for (int looks = 0; looks < 4; looks++) { /* short stops do not add up */
    change(child, SIGSTOP, SIGSTOP);
    assert_int_equal(look(), EVEN_PEER_LIVES);
    assert_int_equal(look(), EVEN_PEER_LIVES);
    change(child, SIGCONT, SIGCONT);
    assert_int_equal(look(), EVEN_PEER_LIVES);
  }
  atomic_store(&comm.stop_grace_ns, even_comm_limit_ns((double)INFINITY));
  change(child, SIGSTOP, SIGSTOP);
  for (int looks = 0; looks < 100; looks++) {
    assert_int_equal(look(), EVEN_PEER_LIVES);
  }
  (void)kill(child, SIGKILL);
  (void)waitpid(child, NULL, 0);
}

/* Of several who wait for one peer only one looks in a while; what that one does not act upon, the others do. */
static void a_stop_is_seen_by_who_did_not_look(void **state) {
  static even_comm patient;
  (void)state;
  patient = (even_comm){.ranks = 2, .header = &header, .controls = controls};
  atomic_store(&patient.stop_grace_ns, even_comm_limit_ns((double)INFINITY));
  atomic_store(&comm.stop_grace_ns, even_comm_limit_ns(0.15));
  pid_t child = start_idle_child();
  atomic_store(&controls[1].process, (uint32_t)child);
  change(child, SIGSTOP, SIGSTOP);
  for (uint64_t looks = 0; looks < 10; looks++) {
    now_ns += EVEN_COMM_LOOK_NS;
    assert_int_equal(even_peers_look(&patient, 1, now_ns), EVEN_PEER_LIVES);
    assert_int_equal(
        even_peers_look(&comm, 1, now_ns + EVEN_COMM_LOOK_NS / 10),
        looks * EVEN_COMM_LOOK_NS + EVEN_COMM_LOOK_NS / 10 < 150000000u ? EVEN_PEER_LIVES : EVEN_PEER_STANDS);
  }
  assert_int_equal(even_peers_look(&patient, 1, now_ns += EVEN_COMM_LOOK_NS), EVEN_PEER_LIVES);
  change(child, SIGCONT, SIGCONT);
  assert_int_equal(even_peers_look(&patient, 1, now_ns += EVEN_COMM_LOOK_NS), EVEN_PEER_LIVES);
  assert_int_equal(even_peers_look(&comm, 1, now_ns), EVEN_PEER_LIVES);
  (void)kill(child, SIGKILL);
  (void)waitpid(child, NULL, 0);
}

static void counts_are_asked_for(void **state) {
  float data[4] = {0};
  (void)state;
  comm.kernels = even_kernels_best();
  assert_int_equal(even_comm_reduce_scatter(&comm, data, data, NULL, EVEN_F32, EVEN_SUM), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_comm_all_gather(&comm, data, data, NULL, EVEN_F32), EVEN_ERR_ARGUMENT);
}

static void a_users_polls_end_where_the_dead_would_not_be_seen(void **state) {
  (void)state;
  assert_int_equal(even_comm_polls_of(0), 0);
  assert_int_equal(even_comm_polls_of(7), 7);
  assert_int_equal(even_comm_polls_of(INT_MAX), 1 << 20);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(the_timeout_is_of_the_whole_call, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_long_wait_is_told_once, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_rank_yields_to_ranks_and_not_to_strangers, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_is_about_to_say_its_start_lives, set_up, tear_down),
      cmocka_unit_test_setup_teardown(who_is_stopped_is_lost_after_a_grace, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_stop_is_seen_by_who_did_not_look, set_up, tear_down),
      cmocka_unit_test_setup_teardown(counts_are_asked_for, set_up, tear_down),
      cmocka_unit_test(a_users_polls_end_where_the_dead_would_not_be_seen),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
