/* All-reduces by a chain: whom a rank waits for, and that it is named where it dies or does not come in the middle. */
#include "base/fail.h"
#include "comm/group.h"
#include "comm/ranks.h"
#include "os/clock.h"

#include <evenstep/comm_costs.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- whom a rank waits for ---- */

enum { RANKS = 4, PIECES = 30, SLOTS = 8 };

/* Whom `rank` waits for where ranks have added and taken so many pieces; RANKS: nobody. */
static int waited_for(int rank, const uint32_t *added, const uint32_t *taken) {
  static even_comm_control controls[RANKS];
  const uint32_t begin = UINT32_MAX - 10; /* numbers go round in the middle */
  even_comm comm = {.ranks = RANKS,
                    .rank = rank,
                    .controls = controls,
                    .chain = {.begin = begin,
                              .pieces = PIECES,
                              .slots = SLOTS,
                              .added = added[rank],
                              .taken = taken[rank],
                              .under_way = true}};
  for (int r = 0; r < RANKS; r++) {
    atomic_store(&controls[r].chain_added, begin + added[r]);
    atomic_store(&controls[r].chain_taken, begin + (r < RANKS - 1 ? taken[r] : 0));
  }
  return even_chain_missing(&comm);
}

static void who_holds_all_up_is_waited_for(void **state) {
  static const struct {
    uint32_t added[RANKS];
    uint32_t taken[RANKS];
    int wanted[RANKS];
  } cases[] = {
      {{0, 0, 0, 0}, {0}, {RANKS, 0, 0, 0}},                         /* the first has not begun */
      {{8, 0, 0, 0}, {0}, {1, RANKS, 1, 1}},                         /* the second has not, and there is no more room */
      {{13, 5, 5, 5}, {5, 5, 5}, {1, RANKS, 1, 1}},                  /* nor in the middle */
      {{13, 13, 13, 5}, {5, 5, 5}, {3, 3, 3, RANKS}},                /* the last */
      {{13, 13, 13, 13}, {13, 13, 5}, {2, 2, RANKS, 2}},             /* one that does not take what is there */
      {{13, 13, 13, 13}, {5, 13, 13}, {RANKS, 0, 0, 0}},             /* the first itself */
      {{13, 12, 12, 12}, {10, 12, 12}, {RANKS, RANKS, 1, 1}},        /* who can do something waits for nobody */
      {{30, 30, 30, 29}, {29, 29, 29}, {3, 3, 3, RANKS}},            /* the end */
      {{30, 30, 30, 30}, {29, 30, 30}, {RANKS, RANKS, RANKS, RANKS}} /* those that are through do not ask */
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    for (int rank = 0; rank < RANKS; rank++) {
      bool through = cases[i].added[rank] == PIECES && (rank == RANKS - 1 || cases[i].taken[rank] == PIECES);
      if (!through) {
        assert_int_equal(waited_for(rank, cases[i].added, cases[i].taken), cases[i].wanted[rank]);
      }
    }
  }
}

/* ---- in the middle of a call ---- */

enum { ELEMENTS = 1 << 20 }; /* 16 pieces: more than are under way at once */

static even_status force_chain(even_comm *comm) {
  const even_comm_choosing params = {.size = sizeof params, .way = "chain"};
  return even_comm_choose(comm, &params);
}

static void be_killed(void) {
  (void)raise(SIGKILL);
}

static even_comm *comms[RANKS]; /* of threads; else each process has its own alone */

/* What all have done, as it was at one moment: it only grows. */
static uint32_t progress(const even_comm *comm) {
  uint32_t sum = 0;
  for (int rank = 0; rank < RANKS; rank++) {
    sum += atomic_load(&comm->controls[rank].chain_added) - comm->chain.begin;
    sum += atomic_load(&comm->controls[rank].chain_taken) - comm->chain.begin;
  }
  return sum;
}

/* Whether all others can do no more before this rank has. */
static bool all_wait_for(const even_comm *comm) {
  const uint32_t before = progress(comm);
  bool wait = true;
  for (int rank = 0; rank < RANKS; rank++) {
    even_comm other = {.ranks = RANKS, .rank = rank, .controls = comm->controls, .chain = comm->chain};
    other.chain.added = atomic_load(&comm->controls[rank].chain_added) - comm->chain.begin;
    other.chain.taken = atomic_load(&comm->controls[rank].chain_taken) - comm->chain.begin;
    wait = wait && (rank == comm->rank || even_chain_missing(&other) == comm->rank);
  }
  return wait && progress(comm) == before;
}

/* What happens to rank `who` when it adds its data for the `when`-th time. */
typedef struct mishap {
  void (*what)(void);
  int who;
  int when;
  bool threads;
  even_status wanted;
} mishap;

static const mishap *ahead;
static int additions;
static uint64_t began;
static atomic_bool told; /* who is late touches no other's group any more */

/* Until one of the others gives it up. That may wait no longer than since the beginning and a little more; it is told
 * so when nobody is waited for but this rank, however slow the others were. */
static void be_late(void) {
  even_comm *own = comms[ahead->who];
  while (even_group_whole(own) && !all_wait_for(own)) {
    (void)sched_yield();
  }
  even_comm_set_timeout(comms[(ahead->who + 1) % RANKS], (double)(even_clock_ns() - began) * 1e-9 + 0.3);
  atomic_store(&told, true);
  while (even_group_whole(own)) {
    (void)sched_yield();
  }
}

static void add_until_then(void *const *targets, size_t target_count, const void *const *sources, size_t source_count,
                           size_t count, double divisor) {
  if (++additions == ahead->when) {
    ahead->what();
  }
  even_kernels_best()->reduce[EVEN_F32][EVEN_MAX](targets, target_count, sources, source_count, count, divisor);
}

static int meet_with(even_comm *comm, void *unused) {
  even_kernels kernels = *even_kernels_best();
  float *data = calloc(ELEMENTS, sizeof *data);
  (void)unused;
  comms[even_comm_rank(comm)] = comm;
  RANKS_EXPECT(comm, data != NULL && force_chain(comm) == EVEN_OK);
  kernels.reduce[EVEN_F32][EVEN_MAX] = add_until_then;
  comm->kernels = even_comm_rank(comm) == ahead->who ? &kernels : comm->kernels;
  even_status status = EVEN_OK;
  for (int call = 0; call < 3 && status == EVEN_OK; call++) {
    status = even_comm_all_reduce(comm, data, ELEMENTS, EVEN_F32, EVEN_MAX);
  }
  free(data);
  while (ahead->what == be_late && !atomic_load(&told)) {
    (void)sched_yield();
  }
  RANKS_EXPECT(comm, status == ahead->wanted);
  RANKS_EXPECT(comm, even_comm_rank(comm) == ahead->who || even_error_last()->rank == ahead->who);
  return 0;
}

static void meet(const mishap *one) {
  int results[RANKS_MOST];
  ranks_setup setup = {.ranks = RANKS, .timeout_seconds = 600, .spin = -1, .threads = one->threads};
  ahead = one;
  additions = 0;
  atomic_store(&told, false);
  began = even_clock_ns();
  (void)ranks_run(&setup, meet_with, NULL, results);
  for (int rank = 0; rank < RANKS; rank++) {
    assert_int_equal(results[rank], one->what == be_killed && rank == one->who ? RANKS_KILLED : 0);
  }
}

static void who_dies_is_named(void **state) {
  (void)state;
  for (int who = 1; who < RANKS; who++) {
    meet(&(mishap){be_killed, who, 1, false, EVEN_ERR_PEER_LOST});
    meet(&(mishap){be_killed, who, 21, false, EVEN_ERR_PEER_LOST}); /* in the second call */
  }
}

static void who_does_not_come_is_named(void **state) {
  (void)state;
  for (int who = 1; who < RANKS; who++) {
    meet(&(mishap){be_late, who, 21, true, EVEN_ERR_TIMEOUT});
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(who_holds_all_up_is_waited_for),
      cmocka_unit_test(who_dies_is_named),
      cmocka_unit_test(who_does_not_come_is_named),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
