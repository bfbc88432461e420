/* Device communicators of several hosts: who sees that a rank of its own host dies tells the others over the group of
 * the host's memory that goes beside. The hosts are played by one. */
#include "comm/device_members.h"
#include "comm/device_ranks.h"
#include "comm/fake_gpu.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define RANKS 4

/* Ranks 0 and 1 on one host, 2 and 3 on another. */
static void enter_host(int rank) {
  (void)setenv("EVENSTEP_HOST_ID", rank < 2 ? "one" : "two", 1);
}

static int lose_rank_1(even_comm *host, void *argument) {
  device_member at;
  even_flight_call call;
  (void)argument;
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0);
  even_device_comm_go_beside(at.comm, host);
  RANKS_EXPECT(host, device_member_sum(&at, 4) == EVEN_OK);
  fake_gpu_wait(at.stream, at.rank);
  RANKS_EXPECT(host, even_comm_barrier(host) == EVEN_OK);
  RANKS_EXPECT(host, (even_device_comm_flight(at.comm, 3, &call, 1) == 1) == (at.rank >= 2));
  if (at.rank == 1) {
    device_member_await(&at, 0, 2);
    (void)raise(SIGKILL);
  }
  RANKS_EXPECT(host, device_member_sum(&at, 1000) == EVEN_OK);
  RANKS_EXPECT(host, device_member_failure(&at) == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1);
  RANKS_EXPECT(host, strstr(even_error_last()->what, "rank 1 (process ") != NULL);
  RANKS_EXPECT(host, strstr(even_error_last()->what, "was in all_reduce of 1000 F32 elements with SUM") != NULL);
  RANKS_EXPECT(host, device_member_end(&at) == EVEN_OK);
  device_member_forget(&at);
  return 0;
}

static void other_hosts_hear_of_a_death(void **state) {
  static const int host_of[RANKS] = {0, 0, 1, 1};
  int results[RANKS];
  (void)state;
  for (int engine = RANKS_NETWORK; engine <= RANKS_HOSTS; engine++) {
    const ranks_setup setup = {.ranks = RANKS,
                               .arena_bytes = 4096,
                               .timeout_seconds = 120,
                               .spin = -1,
                               .engine = (ranks_engine)engine,
                               .host_of = host_of,
                               .enter = enter_host};
    assert_int_equal(ranks_run(&setup, lose_rank_1, NULL, results), 1);
    assert_int_equal(results[1], RANKS_KILLED);
  }
}

static int revoke_beside(even_comm *host, void *argument) {
  device_member at;
  (void)argument;
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0);
  even_device_comm_go_beside(at.comm, host);
  fake_gpu_hang(true);
  RANKS_EXPECT(host, device_member_sum(&at, 4) == EVEN_OK);
  if (at.rank == 0) {
    device_member_await(&at, 1, 1);
    device_member_await(&at, 2, 1);
    even_comm_revoke(host);
  }
  RANKS_EXPECT(host, device_member_failure(&at) == EVEN_ERR_REVOKED);
  RANKS_EXPECT(host, device_member_end(&at) == EVEN_OK);
  device_member_forget(&at);
  return 0;
}

static void a_revoked_group_ends_the_one_beside_it(void **state) {
  const ranks_setup setup = {
      .ranks = 3, .arena_bytes = 4096, .timeout_seconds = 120, .spin = -1, .engine = RANKS_NETWORK};
  (void)state;
  assert_int_equal(ranks_run(&setup, revoke_beside, NULL, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(other_hosts_hear_of_a_death, device_test_begin, device_test_end),
      cmocka_unit_test_setup_teardown(a_revoked_group_ends_the_one_beside_it, device_test_begin, device_test_end),
  };
  return ranks_have_ucx() ? cmocka_run_group_tests_name("device communicators of several hosts", tests, NULL, NULL)
                          : 77;
}
