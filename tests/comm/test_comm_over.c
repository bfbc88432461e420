/* What going on without lost ranks rests on: a group ends where whoever opened it says that it is over, whatever its
 * engine sees of the others; and who comes out of a barrier knows that all came to it. */
#include "comm/ranks.h"
#include "support/fault.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

/* Ranks 0, 2 and 3 on one host, 1 and 4 on another. */
static const int HOST_OF[] = {0, 1, 0, 0, 1};
enum { RANKS = 5, VALUES = 20000 };

/* In what the others are when it is over. */
typedef enum awaited {
  A_COLLECTIVE,
  A_MESSAGE,        /* from the victim */
  A_MESSAGE_POLLED, /* the same; whether it is done is asked again and again */
} awaited;

/* What the ranks share beside the group. */
typedef struct sight {
  _Atomic bool over;
  _Atomic int waiting;
  _Atomic int victim_process;
  _Atomic uint32_t entered[RANKS]; /* so many barriers */
  int victim;
  int delay_us;
  bool stands; /* the victim is stopped, and nobody sees it; else it is in no call */
  awaited in;
} sight;

static sight *shared;

static bool is_over(void *context) {
  return atomic_load(&((const sight *)context)->over);
}

static void pause_us(int us) {
  const struct timespec pause = {.tv_sec = us / 1000000, .tv_nsec = (long)(us % 1000000) * 1000};
  (void)nanosleep(&pause, NULL);
}

/* No thread of the engine's own looks at the group: those who wait have to. */
static void start_no_threads(int rank) {
  (void)rank;
  fault_os_from(FAULT_thread_create, 1, EAGAIN);
}

static int run(ranks_engine engine, int lanes, ranks_body *body, int *results) {
  bool messages = shared->in != A_COLLECTIVE;
  ranks_setup setup = {.ranks = RANKS,
                       .arena_bytes = 4096,
                       .timeout_seconds = 300,
                       .spin = -1,
                       .engine = engine,
                       .host_of = HOST_OF,
                       .lanes = lanes,
                       .silent = !messages,
                       .enter = messages ? start_no_threads : NULL,
                       .over = is_over,
                       .over_context = shared};
  return ranks_run(&setup, body, NULL, results);
}

/* ---- over ---- */

static void *say_over(void *unused) {
  (void)unused;
  while (atomic_load(&shared->waiting) < RANKS - 1) {
    pause_us(1000);
  }
  pause_us(100000); /* they are in the call, or will find it over at once: the same */
  atomic_store(&shared->over, true);
  return NULL;
}

static even_status wait_in(even_comm *comm, float *values, even_comm_request *request) {
  if (request == NULL) {
    return even_comm_all_reduce(comm, values, VALUES, EVEN_F32, EVEN_SUM);
  }
  while (shared->in == A_MESSAGE_POLLED && !even_comm_request_done(request)) {
    pause_us(1000);
  }
  return even_comm_request_wait(request, 0, NULL);
}

static int wait_for_the_victim(even_comm *comm, void *unused) {
  float values[VALUES] = {0};
  pthread_t teller;
  (void)unused;
  even_comm_set_stop_grace(comm, INFINITY);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (even_comm_rank(comm) == shared->victim) {
    atomic_store(&shared->victim_process, (int)getpid());
    if (shared->stands) {
      (void)raise(SIGSTOP); /* until it is killed */
    }
    while (!atomic_load(&shared->over) ||
           atomic_load(&shared->waiting) > 0) { /* it is in no call until they have left */
      pause_us(1000);
    }
    RANKS_EXPECT(comm, even_comm_barrier(comm) != EVEN_OK);
    return 0;
  }
  bool tells = even_comm_rank(comm) == (shared->victim + 1) % RANKS;
  RANKS_EXPECT(comm, !tells || pthread_create(&teller, NULL, say_over, NULL) == 0);
  even_comm_request *request = NULL;
  if (shared->in != A_COLLECTIVE) { /* before it may be over */
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, values, sizeof values, shared->victim, 1, &request) == EVEN_OK);
  }
  (void)atomic_fetch_add(&shared->waiting, 1);
  even_status status = wait_in(comm, values, request);
  even_comm_request_free(request);
  RANKS_EXPECT(comm, status == EVEN_ERR_REVOKED);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_REVOKED);
  even_comm_leave(comm);
  (void)atomic_fetch_sub(&shared->waiting, 1);
  if (tells) {
    RANKS_EXPECT(comm, pthread_join(teller, NULL) == 0);
    while (shared->stands && atomic_load(&shared->waiting) > 0) { /* they leave while it stands */
      pause_us(1000);
    }
    return shared->stands ? kill((pid_t)atomic_load(&shared->victim_process), SIGKILL) : 0;
  }
  return 0;
}

static void over_for_all(ranks_engine engine, int lanes, int victim, bool stands, awaited in) {
  int results[RANKS];
  memset(shared, 0, sizeof *shared);
  shared->in = in;
  shared->victim = victim;
  shared->stands = stands;
  assert_int_equal(run(engine, lanes, wait_for_the_victim, results), stands ? 1 : 0);
  assert_int_equal(results[victim], stands ? RANKS_KILLED : 0);
}

static void who_waits_hears_that_it_is_over(void **state) {
  (void)state;
  over_for_all(RANKS_SHM, 0, 1, false, A_COLLECTIVE);
  over_for_all(RANKS_NETWORK, 0, 1, false, A_COLLECTIVE);
  over_for_all(RANKS_HOSTS, 1, 4, false, A_COLLECTIVE); /* one who leads nobody */
  over_for_all(RANKS_HOSTS, 2, 1, false, A_COLLECTIVE);
}

static void also_who_waits_for_a_message(void **state) {
  (void)state;
  over_for_all(RANKS_SHM, 0, 1, false, A_MESSAGE);
  over_for_all(RANKS_SHM, 0, 1, false, A_MESSAGE_POLLED);
  over_for_all(RANKS_NETWORK, 0, 1, false, A_MESSAGE);
  over_for_all(RANKS_NETWORK, 0, 1, false, A_MESSAGE_POLLED);
  over_for_all(RANKS_HOSTS, 1, 2, false, A_MESSAGE); /* of rank 0's host, not of rank 1's */
}

static void also_where_one_stands_still(void **state) {
  (void)state;
  over_for_all(RANKS_NETWORK, 0, 2, true, A_COLLECTIVE);
  over_for_all(RANKS_HOSTS, 2, 1, true, A_COLLECTIVE); /* a leader */
  over_for_all(RANKS_HOSTS, 2, 3, true, A_COLLECTIVE);
}

/* ---- barriers ---- */

static void *die_soon(void *unused) {
  (void)unused;
  pause_us(shared->delay_us);
  (void)raise(SIGKILL);
  return NULL;
}

static int come_out_together(even_comm *comm, void *unused) {
  int own = even_comm_rank(comm);
  pthread_t death;
  (void)unused;
  if (own == shared->victim) {
    RANKS_EXPECT(comm, pthread_create(&death, NULL, die_soon, NULL) == 0);
  }
  for (uint32_t number = 1;; number++) {
    atomic_store(&shared->entered[own], number);
    if (even_comm_barrier(comm) != EVEN_OK) {
      return 0;
    }
    for (int rank = 0; rank < RANKS; rank++) {
      RANKS_EXPECT(comm, atomic_load(&shared->entered[rank]) >= number);
    }
  }
}

static void who_comes_out_knows_that_all_came(void **state) {
  static const ranks_engine engines[] = {RANKS_SHM, RANKS_NETWORK, RANKS_HOSTS};
  (void)state;
  srand(7);
  for (int round = 0; round < 30; round++) {
    int results[RANKS];
    memset(shared, 0, sizeof *shared);
    shared->victim = round % RANKS;
    shared->delay_us = rand() % 20000;
    assert_int_equal(run(engines[round % 3], 1 + round % 2, come_out_together, results), 1);
    assert_int_equal(results[shared->victim], RANKS_KILLED);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(who_waits_hears_that_it_is_over),
      cmocka_unit_test(also_who_waits_for_a_message),
      cmocka_unit_test(also_where_one_stands_still),
      cmocka_unit_test(who_comes_out_knows_that_all_came),
  };
  if (!ranks_have_ucx()) {
    return 77; /* skipped, as CMakeLists.txt says */
  }
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return shared == MAP_FAILED ? 1 : cmocka_run_group_tests(tests, NULL, NULL);
}
