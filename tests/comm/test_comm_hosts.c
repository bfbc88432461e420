/* Groups over several hosts: whoever dies, is late or revokes, all ranks on all hosts hear of it in their own numbers.
 * (What the collectives compute: tests/conformance/comm.) */
#include "base/fail.h"
#include "comm/group.h"
#include "comm/hosts/group.h"
#include "comm/ranks.h"
#include "comm/ucx/group.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Ranks 0, 2 and 3 on one host, 1 and 4 on another: the leaders are 0 and 1. */
static const int HOST_OF[] = {0, 1, 0, 0, 1};
#define RANKS 5

static bool mentions(const char *text) {
  return strstr(even_error_last()->what, text) != NULL;
}

static int run(double timeout_seconds, ranks_body *body, void *argument, int *results) {
  ranks_setup setup = {.ranks = RANKS,
                       .arena_bytes = 4096,
                       .timeout_seconds = timeout_seconds,
                       .spin = -1,
                       .engine = RANKS_HOSTS,
                       .host_of = HOST_OF};
  return ranks_run(&setup, body, argument, results);
}

static int lose_one(even_comm *comm, void *argument) {
  int victim = *(int *)argument;
  float values[1000] = {0};
  char name[32];
  RANKS_EXPECT(comm, strcmp(even_comm_engine_name(comm), "hosts") == 0);
  RANKS_EXPECT(comm, even_comm_rank(comm) < RANKS && even_comm_ranks(comm) == RANKS);
  RANKS_EXPECT(comm, even_comm_arena(comm) != NULL && even_comm_arena_bytes(comm) == 4096);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (even_comm_rank(comm) == victim) {
    (void)raise(SIGKILL);
  }
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, 1000, EVEN_F32, EVEN_SUM) == EVEN_ERR_PEER_LOST);
  (void)snprintf(name, sizeof name, "rank %d", victim);
  RANKS_EXPECT(comm, even_error_last()->rank == victim);
  RANKS_EXPECT(comm, mentions(name) || mentions("among the ranks of one host"));
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST && mentions("unusable since"));
  return 0;
}

static void a_killed_rank_is_named_on_all_hosts(void **state) {
  int results[RANKS];
  (void)state;
  for (int victim = 0; victim < RANKS; victim++) {
    assert_int_equal(run(300, lose_one, &victim, results), 1);
    assert_int_equal(results[victim], RANKS_KILLED);
  }
}

/* The late rank comes when all others have given it up, which it learns from a message that cannot come. */
static int come_late(even_comm *comm, void *argument) {
  int late = *(int *)argument;
  float value = 1;
  even_comm_request *request = NULL;
  if (even_comm_rank(comm) != late) {
    even_comm_set_timeout(comm, 0.5);
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM) == EVEN_ERR_TIMEOUT);
    RANKS_EXPECT(comm, even_error_last()->rank == late);
    return 0;
  }
  RANKS_EXPECT(comm, even_comm_receive_begin(comm, &value, sizeof value, (late + 1) % RANKS, 7, &request) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_request_wait(request, 60, NULL) != EVEN_OK);
  even_comm_request_free(request);
  RANKS_EXPECT(comm, even_comm_barrier(comm) != EVEN_OK);
  return 0;
}

static void a_late_rank_is_named_on_all_hosts(void **state) {
  (void)state;
  for (int late = 0; late < RANKS; late++) {
    if (late !=
        1) { /* a leader whose whole host waits is late for the other host, too: either may be first to say so */
      assert_int_equal(run(300, come_late, &late, NULL), 0);
    }
  }
}

static int call_differently(even_comm *comm, void *argument) {
  int odd = *(int *)argument;
  float values[101] = {0};
  size_t count = even_comm_rank(comm) == odd ? 101 : 100;
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, count, EVEN_F32, EVEN_SUM) == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(comm, mentions("all_reduce of") || mentions("all_reduce among the ranks of one host"));
  return 0;
}

static void different_calls_are_told_apart(void **state) {
  (void)state;
  for (int odd = 0; odd < RANKS; odd += 4) {
    assert_int_equal(run(300, call_differently, &odd, NULL), 0);
  }
}

/* By one who leads no host, while everybody else is in the call. */
static int be_revoked(even_comm *comm, void *argument) {
  (void)argument;
  if (even_comm_rank(comm) == 4) {
    even_comm_revoke(comm);
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_REVOKED);
  return 0;
}

/* Revokes once the leader of this host waits for the other host, and this rank for its leader. */
static uint32_t stages_before;

static void *revoke_meanwhile(void *argument) {
  const even_comm_control *controls = even_hosts_of(argument)->inside->controls;
  while (atomic_load(&controls[1].sequence) != stages_before + 2) { /* past the barrier, at the leader's verdict */
  }
  even_comm_revoke(argument);
  return NULL;
}

static int be_revoked_between(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  even_comm_request *request = NULL;
  pthread_t revoker;
  char nothing = 0;
  (void)argument;
  if (own != 1 && own != 4) {                                                        /* their leader does not come */
    even_status status = even_comm_receive_begin(comm, &nothing, 1, 4, 1, &request); /* it may be known already */
    status = status == EVEN_OK ? even_comm_request_wait(request, 0, NULL) : status;
    RANKS_EXPECT(comm, status == EVEN_ERR_REVOKED);
    even_comm_request_free(request);
    return 0;
  }
  stages_before = atomic_load(&even_hosts_of(comm)->inside->controls[1].sequence);
  RANKS_EXPECT(comm, own != 4 || pthread_create(&revoker, NULL, revoke_meanwhile, comm) == 0);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_REVOKED);
  return own == 4 ? pthread_join(revoker, NULL) : 0;
}

static int be_left(even_comm *comm, void *argument) {
  (void)argument;
  if (even_comm_rank(comm) == 4) {
    even_comm_leave(comm);
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_STATE);
    return 0;
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST && even_error_last()->rank == 4);
  return 0;
}

static void revoked_and_left(void **state) {
  (void)state;
  assert_int_equal(run(300, be_revoked, NULL, NULL), 0);
  assert_int_equal(run(300, be_revoked_between, NULL, NULL), 0);
  assert_int_equal(run(300, be_left, NULL, NULL), 0);
}

/* Of this rank: its group, while this thread leaves it (the watcher's asks, too), and what was seen of it then. */
static _Thread_local even_comm *leaving;
static int looks;
static int early; /* of these, such that a part had not been left yet, while this rank waited in another */

/* Asked by those who wait. */
static bool look_at_parts(void *unused) {
  even_comm *part = NULL;
  (void)unused;
  if (leaving == NULL) {
    return false;
  }
  looks++;
  for (int at = 1; (part = even_hosts_part(even_hosts_of(leaving), &at)) != NULL; at++) {
    if (!even_ucx_of(part)->has_left) {
      early++;
      break;
    }
  }
  return false;
}

static int leave_all_parts(even_comm *comm, void *argument) {
  (void)argument;
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  leaving = comm;
  even_comm_leave(comm);
  RANKS_EXPECT(comm, looks > 0 && early == 0);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_STATE);
  leaving = NULL;
  return 0;
}

static void all_parts_are_left_together(void **state) {
  ranks_setup setup = {.ranks = RANKS,
                       .timeout_seconds = 300,
                       .spin = -1,
                       .engine = RANKS_HOSTS,
                       .host_of = HOST_OF,
                       .lanes = 2,
                       .over = look_at_parts};
  (void)state;
  assert_int_equal(ranks_run(&setup, leave_all_parts, NULL, NULL), 0);
}

static int talk(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  even_comm_request *requests[2 * RANKS];
  int in[RANKS];
  (void)argument;
  RANKS_EXPECT(comm, even_comm_has_messages(comm));
  for (int peer = 0; peer < RANKS; peer++) {
    RANKS_EXPECT(comm, even_comm_send_begin(comm, &own, sizeof own, peer, 1, &requests[peer]) == EVEN_OK);
    RANKS_EXPECT(
        comm, even_comm_receive_begin(comm, &in[peer], sizeof in[peer], peer, 1, &requests[RANKS + peer]) == EVEN_OK);
  }
  for (int i = 0; i < 2 * RANKS; i++) {
    RANKS_EXPECT(comm, even_comm_request_wait(requests[i], 0, NULL) == EVEN_OK);
    even_comm_request_free(requests[i]);
  }
  for (int peer = 0; peer < RANKS; peer++) {
    RANKS_EXPECT(comm, in[peer] == peer);
  }
  return even_comm_barrier(comm) != EVEN_OK;
}

static void messages_cross_hosts(void **state) {
  (void)state;
  assert_int_equal(run(300, talk, NULL, NULL), 0);
}

static int open_badly(even_comm *comm, void *argument) {
  static const int backwards[] = {1, 0, 0, 0, 0};
  even_comm *inside = ranks_open_alone(0);
  even_comm *group = NULL;
  even_comm_hosts hosts = {.size = sizeof hosts, .ranks = RANKS, .host_of = backwards, .inside = inside};
  (void)argument;
  RANKS_EXPECT(comm, even_comm_open_hosts(&hosts, 1, &group) == EVEN_ERR_ARGUMENT && mentions("numbered from 0"));
  hosts.host_of = HOST_OF;
  RANKS_EXPECT(comm,
               even_comm_open_hosts(&hosts, 1, &group) == EVEN_ERR_ARGUMENT && mentions("rank 0 of 3 on its host"));
  hosts.ranks = 2; /* one on each host: this one leads */
  RANKS_EXPECT(comm, even_comm_open_hosts(&hosts, 1, &group) == EVEN_ERR_ARGUMENT && mentions("should have it"));
  hosts.ranks = 1;
  hosts.between = hosts.everyone = comm;
  RANKS_EXPECT(comm, even_comm_open_hosts(&hosts, 1, &group) == EVEN_ERR_ARGUMENT && mentions("given twice"));
  hosts.size = 3;
  RANKS_EXPECT(comm, even_comm_open_hosts(&hosts, 1, &group) == EVEN_ERR_ARGUMENT && group == NULL);
  even_comm_close(inside);
  return 0;
}

static void what_is_refused(void **state) {
  (void)state;
  ranks_setup alone = {.ranks = 1, .timeout_seconds = 300, .spin = -1, .engine = RANKS_NETWORK};
  assert_int_equal(ranks_run(&alone, open_badly, NULL, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_killed_rank_is_named_on_all_hosts),
      cmocka_unit_test(a_late_rank_is_named_on_all_hosts),
      cmocka_unit_test(different_calls_are_told_apart),
      cmocka_unit_test(revoked_and_left),
      cmocka_unit_test(all_parts_are_left_together),
      cmocka_unit_test(messages_cross_hosts),
      cmocka_unit_test(what_is_refused),
  };
  if (!ranks_have_ucx()) {
    return 77; /* skipped, as CMakeLists.txt says */
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
