/* The links of the hosts that `evenstep chaos --namespaces` makes: one is cut, which parts its host from the other, and
 * is there again afterwards. Root alone may make networks. */
#include "../checkpoint/scratch.h"
#include "cli/chaos_job_alone.h"
#include "monitor/monitored.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/net_namespace.h"
#include "os/port.h"
#include "support/required.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static alone made;
static even_chaos_network network;
static monitored *history;

static int set_up(void **state) {
  if (scratch_make(state) != 0 || monitored_set_up(state) != 0) {
    return -1;
  }
  history = *state;
  return 0;
}

static int tear_down(void **state) {
  alone_close(&made);
  even_chaos_network_close(&network);
  return monitored_tear_down(state) | scratch_remove(state);
}

/* Whether a program on the first host reaches the port of the second. */
static bool is_reached(int port) {
  int before = -1;
  assert_int_equal(even_net_namespace_enter(network.holders[0].process.pid, &before), EVEN_OK);
  const bool reached = even_port_send("10.79.0.2", port, "x", 1) == EVEN_OK;
  assert_int_equal(even_net_namespace_leave(before), EVEN_OK);
  return reached;
}

/* A link that has just been made takes a moment. */
static bool comes_up(int port) {
  for (uint64_t until = even_clock_ns() + (uint64_t)60 * 1000000000u; even_clock_ns() < until;) {
    if (is_reached(port)) {
      return true;
    }
    even_clock_sleep_ns(10000000);
  }
  return false;
}

static void a_link_is_cut_and_is_there_again(void **state) {
  int port = 0;
  int fd = -1;
  int before = -1;
  (void)state;
  alone_open(&made, EVEN_CHAOS_CUT, 0); /* the first host's link */
  if (even_chaos_network_open(&network, 2) != EVEN_OK) {
    assert_false(required("namespaces", "hosts of network namespaces take root, unshare, nsenter and ip"));
    skip();
  }
  monitored_start(history);
  monitored_committed(history);
  assert_int_equal(even_history_open(history->folder, &made.job.history), EVEN_OK);
  made.job.network = &network;
  made.job.agent.process.pid = network.holders[1].process.pid; /* the other one leads */
  assert_int_equal(even_net_namespace_enter(network.holders[1].process.pid, &before), EVEN_OK);
  assert_int_equal(even_listener_open("10.79.0.2", &port, &fd), EVEN_OK);
  assert_int_equal(even_net_namespace_leave(before), EVEN_OK);
  assert_true(comes_up(port));
  assert_true(alone_inject(&made));
  assert_string_equal(made.done[0].words, "the link of host here, for 8 s");
  assert_int_equal(made.done[0].rank, -1);
  assert_false(is_reached(port));
  assert_false(alone_inject(&made)); /* one at a time */
  made.job.cut_until_ns = UINT64_MAX;
  even_chaos_relent(&made.job, false);
  assert_false(is_reached(port)); /* it is not over */
  made.job.cut_until_ns = 1;
  even_chaos_relent(&made.job, false);
  assert_true(comes_up(port));
  even_listener_close(fd);
  even_history_close(made.job.history);
  assert_int_equal(even_monitor_close(history->monitor, 0), EVEN_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_link_is_cut_and_is_there_again, set_up, tear_down),
  };
  return cmocka_run_group_tests_name("cli_chaos_network", tests, NULL, NULL);
}
