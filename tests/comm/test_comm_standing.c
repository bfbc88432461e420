/* Ranks that are alone on their hosts and stand still, as somebody else tells those that wait for them
 * (even_peers_ask_standing): who is named, and when nobody is. */
#include "comm/peers.h"
#include "comm/ranks.h"

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
#include <unistd.h>

#include <cmocka.h>

/* Each is alone on its host, or the victim is: no other rank sees it. */
static const int ALONE[] = {0, 1, 2};
static const int LAST_ALONE[] = {0, 0, 1};
enum { RANKS = 3, VICTIM = 2, LOOKS = 30 };
#define LONG_NS ((uint64_t)3600 * 1000000000u)

/* What the ranks share beside the group. */
typedef struct sight {
  _Atomic uint32_t victim; /* its process, once it is about to stand */
  _Atomic uint64_t stood_ns;
  _Atomic int asked;   /* so often by those who wait, */
  _Atomic bool let_go; /* and then, where this is so, it goes on */
  _Atomic int named;   /* those who have heard of it */
  const int *host_of;
  double grace;
  uint64_t borne_ns; /* see even_peers_bear_silence */
  bool stops;
} sight;

static sight *shared;

static uint64_t tell(void *context, uint32_t host, uint32_t process, uint64_t now_ns) {
  uint32_t victim = atomic_load(&shared->victim);
  (void)context;
  (void)host;
  (void)now_ns;
  if (victim == 0 || process != victim) {
    return 0;
  }
  if (atomic_fetch_add(&shared->asked, 1) >= LOOKS && atomic_exchange(&shared->let_go, false)) {
    (void)kill((pid_t)victim, SIGCONT);
  }
  return atomic_load(&shared->stood_ns);
}

static void enter(int rank) {
  char name[16];
  (void)snprintf(name, sizeof name, "host-%d", shared->host_of[rank]);
  (void)setenv("EVENSTEP_HOST_ID", name, 1);
  even_peers_ask_standing(tell, NULL);
  even_peers_bear_silence(shared->borne_ns);
}

static int run(ranks_engine engine, ranks_body *body, int *results) {
  ranks_setup setup = {.ranks = RANKS,
                       .arena_bytes = 4096,
                       .timeout_seconds = 280,
                       .spin = -1,
                       .engine = engine,
                       .host_of = shared->host_of,
                       .silent = true,
                       .enter = enter};
  return ranks_run(&setup, body, NULL, results);
}

static void begin(const int *host_of, double grace, uint64_t stood_ns) {
  memset(shared, 0, sizeof *shared);
  shared->host_of = host_of;
  shared->grace = grace;
  atomic_store(&shared->stood_ns, stood_ns);
}

/* ---- told ---- */

static int wait_and_hear(even_comm *comm, void *unused) {
  float values[2000] = {0};
  (void)unused;
  even_comm_set_stop_grace(comm, shared->grace);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (even_comm_rank(comm) == VICTIM) {
    atomic_store(&shared->victim, (uint32_t)getpid());
    (void)raise(SIGSTOP); /* until it is killed */
    return 1;
  }
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, 2000, EVEN_F32, EVEN_SUM) == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, even_error_last()->rank == VICTIM);
  RANKS_EXPECT(comm, strstr(even_error_last()->what, "was stopped (SIGSTOP, SIGTSTP) and stands still") != NULL);
  if (atomic_fetch_add(&shared->named, 1) == RANKS - 2) {
    RANKS_EXPECT(comm, kill((pid_t)atomic_load(&shared->victim), SIGKILL) == 0);
  }
  return 0;
}

static void is_named(ranks_engine engine, const int *host_of) {
  int results[RANKS];
  begin(host_of, 1, LONG_NS); /* by its silence it would be named in another way, after a minute */
  assert_int_equal(run(engine, wait_and_hear, results), 1);
  assert_int_equal(results[VICTIM], RANKS_KILLED);
}

static void who_is_told_to_stand_is_named(void **state) {
  (void)state;
  is_named(RANKS_NETWORK, ALONE);
  is_named(RANKS_HOSTS, LAST_ALONE);
}

/* ---- not told, or not for long enough ---- */

/* As the last error says; 0 where it says nothing of it. */
static double seconds_not_answered(void) {
  static const char words[] = "has not answered for ";
  const char *at = strstr(even_error_last()->what, words);
  return at == NULL ? 0 : strtod(at + sizeof words - 1, NULL);
}

static int wait_and_give_up(even_comm *comm, void *unused) {
  float values[2000] = {0};
  (void)unused;
  even_comm_set_stop_grace(comm, shared->grace);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (even_comm_rank(comm) == VICTIM) {
    atomic_store(&shared->victim, (uint32_t)getpid());
    while (atomic_load(&shared->asked) < LOOKS) { /* meanwhile it answers, as one that computes does */
      (void)usleep(1000);
    }
    (void)raise(SIGSTOP); /* until it is killed */
    return 1;
  }
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, 2000, EVEN_F32, EVEN_SUM) == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, even_error_last()->rank == VICTIM);
  RANKS_EXPECT(comm, seconds_not_answered() >= (double)shared->borne_ns * 1e-9);
  if (atomic_fetch_add(&shared->named, 1) == RANKS - 2) {
    RANKS_EXPECT(comm, kill((pid_t)atomic_load(&shared->victim), SIGKILL) == 0);
  }
  return 0;
}

/* Its host's agent, which stands still, too, may go on before another one leads. Sixty graces would be 0.6 s. */
static void one_of_whom_nobody_tells_is_waited_for_as_long_as_is_borne(void **state) {
  int results[RANKS];
  (void)state;
  begin(LAST_ALONE, 0.01, 0);
  shared->borne_ns = 2000000000u;
  assert_int_equal(run(RANKS_NETWORK, wait_and_give_up, results), 1);
  assert_int_equal(results[VICTIM], RANKS_KILLED);
}

static int wait_and_meet(even_comm *comm, void *unused) {
  float values[2000] = {0};
  (void)unused;
  even_comm_set_stop_grace(comm, shared->grace);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (even_comm_rank(comm) == VICTIM) {
    atomic_store(&shared->let_go, shared->stops);
    atomic_store(&shared->victim, (uint32_t)getpid());
    if (shared->stops) {
      (void)raise(SIGSTOP);
    }
    while (atomic_load(&shared->asked) < LOOKS) {
      (void)usleep(1000);
    }
  }
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, 2000, EVEN_F32, EVEN_SUM) == EVEN_OK);
  return 0;
}

static void is_waited_for(ranks_engine engine, const int *host_of, double grace, uint64_t stood_ns, bool stops) {
  int results[RANKS];
  begin(host_of, grace, stood_ns);
  shared->stops = stops;
  assert_int_equal(run(engine, wait_and_meet, results), 0);
  assert_true(atomic_load(&shared->asked) >= LOOKS);
}

static void who_goes_on_within_the_grace_is_waited_for(void **state) {
  (void)state;
  /* they wait for thirty looks, which is far more than this grace; and it has not stood for all of it */
  is_waited_for(RANKS_NETWORK, ALONE, 0.1, 99999999u, true);
  is_waited_for(RANKS_HOSTS, LAST_ALONE, 0.1, 99999999u, true);
}

/* Where all were stopped, the first that goes on has old words of the others. */
static void who_has_not_waited_for_the_grace_itself_waits_on(void **state) {
  (void)state;
  is_waited_for(RANKS_NETWORK, ALONE, 1000, LONG_NS, false);
  is_waited_for(RANKS_HOSTS, LAST_ALONE, 1000, LONG_NS, false);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(who_is_told_to_stand_is_named),
      cmocka_unit_test(one_of_whom_nobody_tells_is_waited_for_as_long_as_is_borne),
      cmocka_unit_test(who_goes_on_within_the_grace_is_waited_for),
      cmocka_unit_test(who_has_not_waited_for_the_grace_itself_waits_on),
  };
  if (!ranks_have_ucx()) {
    return 77; /* skipped, as CMakeLists.txt says */
  }
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return shared == MAP_FAILED ? 1 : cmocka_run_group_tests_name("told who stands", tests, NULL, NULL);
}
