/* Processes that are forked while their rank is in the middle of a call, with messages under way, on every engine: the
 * child neither hangs nor gives back or says anything for the rank, which goes on undisturbed. */
#include "base/fail.h"
#include "comm/ranks.h"

#include <evenstep/flight.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define FLOATS 500000 /* 2 MB: in pieces, also between hosts */
#define CHILDREN 8
#define HANGS_SECONDS 200 /* a child that is not done then never is */

typedef struct worker {
  even_comm *comm;
  atomic_bool enough;
  float *data;
  even_status status;
} worker;

/* Until all ranks have forked enough. */
static void *call_on(void *argument) {
  worker *own = argument;
  do {
    memset(own->data, 0, FLOATS * sizeof *own->data);
    own->data[0] = atomic_load(&own->enough) ? 1 : 0;
    own->status = even_comm_all_reduce(own->comm, own->data, FLOATS, EVEN_F32, EVEN_SUM);
  } while (own->status == EVEN_OK && own->data[0] < (float)even_comm_ranks(own->comm));
  return NULL;
}

/* What it may do besides: open a group of its own, but over MPI, which is its parent's. */
static int open_own(const char *mpi) {
  float value = 3;
  even_comm *own = ranks_open_alone(0);
  RANKS_EXPECT(own, own != NULL && even_comm_all_reduce(own, &value, 1, EVEN_F32, EVEN_SUM) == EVEN_OK && value == 3);
  even_comm_close(own);
  if (mpi != NULL) {
    const even_comm_params params = {.size = sizeof params, .ranks = 1, .timeout_seconds = 60};
    const even_comm_network network = {.size = sizeof network, .library = mpi};
    RANKS_EXPECT(NULL, even_comm_open_mpi(&params, &network, &own) == EVEN_ERR_STATE && own == NULL);
    RANKS_EXPECT(NULL, strstr(even_error_last()->what, "was forked from one that had started MPI") != NULL);
  }
  return 0;
}

/* What a forked process may do with a group that it finds: it is refused, or nothing comes of it. */
static int be_child(even_comm *comm, even_comm_request *begun, const char *mpi) {
  float value = 1;
  size_t bytes[4] = {0};
  char text[2048];
  even_flight_call flight[4];
  even_comm_request *request = NULL;
  (void)alarm(HANGS_SECONDS);
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, strstr(even_error_last()->what, "was forked from rank") != NULL);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_comm_all_gather(comm, &value, &value, bytes, EVEN_U8) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_comm_send_begin(comm, &value, sizeof value, 0, 1, &request) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_comm_request_done(begun));
  RANKS_EXPECT(comm, even_comm_request_wait(begun, 0, NULL) == EVEN_ERR_STATE);
  even_comm_request_free(begun);
  even_comm_set_timeout(comm, 0.001);
  even_comm_set_stop_grace(comm, 0.001);
  even_comm_set_site(comm, "a child");
  (void)even_comm_flight(comm, even_comm_rank(comm), flight, 4);
  even_comm_describe(comm, text, sizeof text);
  even_comm_revoke(comm);
  even_comm_leave(comm);
  even_comm_close(comm);
  return open_own(mpi);
}

static int fork_in_the_middle(even_comm *comm, void *argument) {
  static float data[FLOATS];
  worker own = {.comm = comm, .data = data};
  int ranks = even_comm_ranks(comm);
  int next = (even_comm_rank(comm) + 1) % ranks;
  int before = (even_comm_rank(comm) + ranks - 1) % ranks;
  int sent = even_comm_rank(comm);
  int came = -1;
  even_comm_request *begun = NULL;
  even_comm_request *sending = NULL;
  pthread_t thread;
  RANKS_EXPECT(comm, even_comm_receive_begin(comm, &came, sizeof came, before, 7, &begun) == EVEN_OK);
  RANKS_EXPECT(comm, pthread_create(&thread, NULL, call_on, &own) == 0);
  int wrong = 0;
  for (int i = 0; i < CHILDREN; i++) {
    int ended = -1;
    pid_t child = fork();
    if (child == 0) {
      _exit(be_child(comm, begun, argument));
    }
    wrong += child < 0 || waitpid(child, &ended, 0) != child || ended != 0;
  }
  atomic_store(&own.enough, true);
  RANKS_EXPECT(comm, pthread_join(thread, NULL) == 0 && own.status == EVEN_OK);
  RANKS_EXPECT(comm, wrong == 0);
  RANKS_EXPECT(comm, even_comm_send_begin(comm, &sent, sizeof sent, next, 7, &sending) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_request_wait(begun, 0, NULL) == EVEN_OK && came == before);
  RANKS_EXPECT(comm, even_comm_request_wait(sending, 0, NULL) == EVEN_OK);
  even_comm_request_free(begun);
  even_comm_request_free(sending);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  return 0;
}

static void test_in_shared_memory(void **state) {
  ranks_setup setup = {.ranks = 2, .timeout_seconds = 100, .spin = -1};
  (void)state;
  assert_int_equal(ranks_run(&setup, fork_in_the_middle, NULL, NULL), 0);
}

static void test_over_ucx(void **state) {
  ranks_setup setup = {.ranks = 2, .timeout_seconds = 100, .spin = -1, .engine = RANKS_NETWORK};
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  assert_int_equal(ranks_run(&setup, fork_in_the_middle, NULL, NULL), 0);
}

static void test_over_mpi(void **state) {
  static char library[] = FAKE_MPI_NUMBERS;
  static const int host_of[] = {0, 0, 1};
  ranks_setup alone = {.ranks = 2, .timeout_seconds = 100, .spin = -1, .engine = RANKS_NETWORK, .mpi = library};
  ranks_setup hosts = {.ranks = 3,
                       .timeout_seconds = 100,
                       .spin = -1,
                       .engine = RANKS_HOSTS,
                       .host_of = host_of,
                       .lanes = 2,
                       .mpi = library};
  (void)state;
  assert_int_equal(ranks_run(&alone, fork_in_the_middle, library, NULL), 0);
  assert_int_equal(ranks_run(&hosts, fork_in_the_middle, library, NULL), 0);
}

static void test_over_hosts(void **state) {
  static const int host_of[] = {0, 0, 1};
  ranks_setup setup = {
      .ranks = 3, .timeout_seconds = 100, .spin = -1, .engine = RANKS_HOSTS, .host_of = host_of, .lanes = 2};
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  assert_int_equal(ranks_run(&setup, fork_in_the_middle, NULL, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_in_shared_memory),
      cmocka_unit_test(test_over_ucx),
      cmocka_unit_test(test_over_mpi),
      cmocka_unit_test(test_over_hosts),
  };
  return cmocka_run_group_tests_name("forks", tests, NULL, NULL);
}
