/* How the threads of a rank sleep that wait for something to come over the network, UCX and MPI. */
#include "comm/engine.h"
#include "comm/ranks.h"
#include "comm/ucx/group.h"
#include "os/calls.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static const even_transport *beneath;
static bool is_mpi;

static void go_over(even_ucx_group *group, const even_transport *transport, void (*look)(void *)) {
  (void)pthread_mutex_lock(&group->lock);
  group->transport = transport;
  group->whole.look = look;
  group->whole.context = group;
  (void)pthread_mutex_unlock(&group->lock);
}

static long (*real_futex)(uint32_t *word, int operation, uint32_t value, const struct timespec *timeout);
static _Atomic(uint32_t *) turn; /* on which who does not listen sleeps */
static atomic_int woken;
static atomic_bool unwoken;

/* Whoever sleeps there without a wake sleeps for very long. */
static long sleep_until_woken(uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
  static const struct timespec very_long = {.tv_sec = 120};
  bool its = operation == FUTEX_WAIT && word == turn && !unwoken;
  long result = real_futex(word, operation, value, its ? &very_long : timeout);
  if (its && result == 0) {
    woken++;
  } else if (its && errno == ETIMEDOUT) {
    unwoken = true;
  }
  return result;
}

/* Over UCX, or over the library of MPI that is named. */
static void run_alone(const char *library, ranks_body *body) {
  ranks_setup setup = {.ranks = 1, .timeout_seconds = 300, .spin = 0, .engine = RANKS_NETWORK, .mpi = library};
  is_mpi = library != NULL;
  real_futex = even_os.futex; /* before there is a thread that reads it, and after the last */
  even_os.futex = sleep_until_woken;
  assert_int_equal(ranks_run(&setup, body, NULL, NULL), 0);
  even_os.futex = real_futex;
  turn = NULL;
}

/* ---- a wait that gets what it waits for while it looks around ---- */

static bool met;
static bool about_to_sleep;
static bool overslept;

static bool is_met(even_ucx_group *group, const void *context) {
  (void)group;
  (void)context;
  return met;
}

static bool arm_where_not_met(even_ucx_group *group) {
  about_to_sleep = true;
  overslept = overslept || met;
  return beneath->arm(group);
}

static void meet_it(void *comm) {
  met = about_to_sleep; /* once there is nothing else to do */
  even_comm_engine_of(comm)->stir(comm);
}

static int meet_in_a_look(even_comm *comm, void *argument) {
  even_ucx_group *group = even_ucx_of(comm);
  even_transport watched = *group->transport;
  (void)argument;
  beneath = group->transport;
  watched.arm = arm_where_not_met;
  go_over(group, &watched, meet_it);
  even_status status = even_ucx_wait_until(group, NULL, 0, is_met, NULL, NULL);
  go_over(group, beneath, NULL);
  RANKS_EXPECT(comm, status == EVEN_OK && met && !overslept);
  return 0;
}

static void who_is_stirred_while_it_looks_does_not_sleep(void **state) {
  run_alone(*state, meet_in_a_look);
}

/* ---- two threads that sleep ---- */

static atomic_int listeners;
static atomic_bool crowded;
static int looks_beside;
static bool arm_alone(even_ucx_group *group) {
  crowded = crowded || listeners > 0; /* what that thread is to hear would be taken away */
  return beneath->arm(group);
}

static void sleep_alone(even_ucx_group *group, uint64_t limit_ns, uint32_t idle) {
  listeners++;
  beneath->sleep(group, limit_ns, idle);
  listeners--;
}

/* Asked with the lock held, by one that does not sleep. */
static bool has_looked_beside_another(even_ucx_group *group, const void *context) {
  (void)context;
  looks_beside += group->sleepers > 0;
  return is_mpi ? crowded || looks_beside >= 5000 : unwoken || (looks_beside >= 5 && woken >= 3);
}

static void *wait_for_message(void *request) {
  bool came = even_comm_request_wait(request, 0, NULL) == EVEN_OK;
  return came ? request : NULL;
}

static int sleep_beside_another(even_comm *comm, void *argument) {
  even_ucx_group *group = even_ucx_of(comm);
  even_transport watched = *group->transport;
  even_comm_request *receive = NULL;
  even_comm_request *send = NULL;
  pthread_t thread;
  void *came = NULL;
  (void)argument;
  crowded = false;
  looks_beside = 0;
  woken = 0;
  unwoken = false;
  turn = (uint32_t *)&group->turn;
  beneath = group->transport;
  watched.arm = arm_alone;
  watched.sleep = sleep_alone;
  go_over(group, &watched, NULL);
  RANKS_EXPECT(comm, even_comm_receive_begin(comm, NULL, 0, 0, 7, &receive) == EVEN_OK);
  RANKS_EXPECT(comm, pthread_create(&thread, NULL, wait_for_message, receive) == 0);
  even_status status = even_ucx_wait_until(group, NULL, 0, has_looked_beside_another, NULL, NULL);
  RANKS_EXPECT(comm, status == EVEN_OK && even_comm_send_begin(comm, NULL, 0, 0, 7, &send) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_request_wait(send, 0, NULL) == EVEN_OK);
  (void)pthread_join(thread, &came);
  even_comm_request_free(send);
  even_comm_request_free(receive);
  go_over(group, beneath, NULL);
  RANKS_EXPECT(comm, came != NULL && crowded == is_mpi && !unwoken);
  return 0;
}

/* Who does not listen is woken after each sleep of the one that does. Over MPI, where nothing is heard in a sleep, each
 * sleeps for itself. */
static void one_thread_at_a_time_listens(void **state) {
  run_alone(*state, sleep_beside_another);
}

#define TESTS(library)                                                                         \
  {cmocka_unit_test_prestate(who_is_stirred_while_it_looks_does_not_sleep, (void *)(library)), \
   cmocka_unit_test_prestate(one_thread_at_a_time_listens, (void *)(library))}

int main(void) {
  static char mpi[] = FAKE_MPI_NUMBERS;
  const struct CMUnitTest over_mpi[] = TESTS(mpi);
  const struct CMUnitTest over_ucx[] = TESTS(NULL);
  int failed = cmocka_run_group_tests_name("MPI", over_mpi, NULL, NULL);
  return ranks_have_ucx() ? failed + cmocka_run_group_tests_name("UCX", over_ucx, NULL, NULL) : failed;
}
