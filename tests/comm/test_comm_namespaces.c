/* Hosts made of network namespaces, joined by a bridge over links of different speeds: what the engine between hosts
 * does on a network, when one of its processes dies, and when a link is cut. Needs root, ip and tc; skipped without.
 *
 *   test_comm_namespaces bench           measures all-reduce over the shaped links instead
 *   test_comm_namespaces legs KILOBYTES  prints what each way takes, usually, with a slow link, with
 *                                        a late host */
#include "base/fail.h"
#include "comm/hosts_bench.h"
#include "comm/waits.h"
#include "os/clock.h"
#include "support/required.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define HOSTS HOSTS_BENCH_HOSTS
#define RANKS 5
#define LACKS "they need root, ip and tc, and a kernel that has them"

static const int HOST_OF[] = {0, 0, 1, 1, 2};
static const char *const SPEEDS[] = {"1gbit", "400mbit", "200mbit"};
static int owner; /* the process whose number is in the names */

static int command(const char *format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  /* NOLINTNEXTLINE(concurrency-mt-unsafe,cert-env33-c): the words are this test's own */
  return length < (int)sizeof text ? system(text) : -1;
}

static int keeper[2] = {-1, -1}; /* nobody writes: it ends with this process, and with the ranks */
static pid_t keeper_pid = -1;

/* In a process of its own, so that the hosts go with this one, whatever its end: a name in /run/netns has no owner. */
static bool keep_hosts(void) {
  char byte = 0;
  if (pipe(keeper) != 0 || (keeper_pid = fork()) < 0) {
    return false;
  }
  if (keeper_pid > 0) {
    (void)close(keeper[0]);
    return true;
  }
  (void)setsid();
  (void)close(keeper[1]);
  while (read(keeper[0], &byte, 1) < 0 && errno == EINTR) {
  }
  for (int host = 0; host < HOSTS; host++) {
    (void)command("ip netns del even-%d-%d 2>/dev/null", owner, host);
  }
  (void)command("ip netns del even-%d-net 2>/dev/null", owner);
  _exit(0);
}

static void remove_hosts(void) {
  if (getpid() == owner && keeper_pid > 0) {
    (void)close(keeper[1]);
    (void)waitpid(keeper_pid, NULL, 0);
  }
}

static bool make_host(int host) {
  return command("ip netns add even-%d-%d 2>/dev/null", owner, host) == 0 &&
         command("ip link add eth0 netns even-%d-%d type veth peer name p%d netns even-%d-net", owner, host, host,
                 owner) == 0 &&
         command("ip -n even-%d-net link set p%d master br0 up", owner, host) == 0 &&
         command("ip -n even-%d-%d addr add 10.77.0.%d/24 dev eth0", owner, host, host + 1) == 0 &&
         command("ip -n even-%d-%d link set eth0 up", owner, host) == 0 &&
         command("ip -n even-%d-%d link set lo up", owner, host) == 0 && /* a host's way to its own address */
         command("tc -n even-%d-%d qdisc add dev eth0 root tbf rate %s burst 256kb latency 100ms", owner, host,
                 SPEEDS[host]) == 0 &&
         command("tc -n even-%d-net qdisc add dev p%d root tbf rate %s burst 256kb latency 100ms", owner, host,
                 SPEEDS[host]) == 0;
}

static bool make_hosts(void) {
  owner = getpid();
  bool made = geteuid() == 0 && command("command -v ip tc >/dev/null") == 0 && keep_hosts() &&
              command("ip netns add even-%d-net 2>/dev/null", owner) == 0 &&
              command("ip -n even-%d-net link add br0 type bridge 2>/dev/null", owner) == 0 &&
              command("ip -n even-%d-net link set br0 up", owner) == 0;
  for (int host = 0; made && host < HOSTS; host++) {
    made = make_host(host);
  }
  return made;
}

/* Moves this rank's process to its host. */
static void enter_host(int rank) {
  char path[64];
  (void)snprintf(path, sizeof path, "/var/run/netns/even-%d-%d", owner, HOST_OF[rank]);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) {
    _exit(98);
  }
  (void)close(fd);
  (void)setenv("UCX_NET_DEVICES", "eth0", 1);
  (void)snprintf(path, sizeof path, "host-%d", HOST_OF[rank]);
  (void)setenv("EVENSTEP_HOST_ID", path, 1);
}

static bool shape(int host, unsigned megabits) {
  /* What a link lets through at once, and what waits before it: some milliseconds' worth. */
  unsigned burst = megabits * 125 * 2 > 262144 ? megabits * 125 * 2 : 262144;
  return command("tc -n even-%d-%d qdisc replace dev eth0 root tbf rate %umbit burst %u latency 100ms", owner, host,
                 megabits, burst) == 0 &&
         command("tc -n even-%d-net qdisc replace dev p%d root tbf rate %umbit burst %u latency 100ms", owner, host,
                 megabits, burst) == 0;
}

static ranks_setup setup_of(double timeout_seconds) {
  return (ranks_setup){.ranks = RANKS,
                       .timeout_seconds = timeout_seconds,
                       .spin = -1,
                       .engine = RANKS_HOSTS,
                       .host_of = HOST_OF,
                       .lanes = 2,
                       .enter = enter_host};
}

static int run(double timeout_seconds, ranks_body *body, void *argument, int *results) {
  const ranks_setup setup = setup_of(timeout_seconds);
  return ranks_run(&setup, body, argument, results);
}

static int reduce(even_comm *comm, void *argument) {
  static const size_t sizes[] = {1, 1000, 60000, 200000};
  static double values[200000];
  (void)argument;
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    for (size_t k = 0; k < sizes[i]; k++) {
      values[k] = (double)(k % 1000) + even_comm_rank(comm);
    }
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, sizes[i], EVEN_F64, EVEN_SUM) == EVEN_OK);
    for (size_t k = 0; k < sizes[i]; k++) {
      RANKS_EXPECT(comm, values[k] == (double)(k % 1000) * RANKS + 0 + 1 + 2 + 3 + 4);
    }
  }
  return 0;
}

static void hosts_add_up(void **state) {
  (void)state;
  assert_int_equal(run(60, reduce, NULL, NULL), 0);
}

static int lose_one(even_comm *comm, void *argument) {
  static float values[300000];
  (void)argument;
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (even_comm_rank(comm) == 3) {
    (void)raise(SIGKILL);
  }
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, 300000, EVEN_F32, EVEN_SUM) == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, even_error_last()->rank == 3);
  return 0;
}

static void a_killed_rank_is_named_over_the_network(void **state) {
  int results[RANKS];
  (void)state;
  assert_int_equal(run(60, lose_one, NULL, results), 1);
  assert_int_equal(results[3], RANKS_KILLED);
}

/* Nobody hangs: both sides of the cut have an error that names somebody on the other. */
static int lose_a_link(even_comm *comm, void *argument) {
  float value = 1;
  int own = even_comm_rank(comm);
  (void)argument;
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (own == 4) {
    RANKS_EXPECT(comm, command("ip link set eth0 down") == 0); /* this process is in its host */
  }
  even_comm_set_timeout(comm, 1);
  even_status status = EVEN_OK;
  for (int call = 0; status == EVEN_OK && call < 3; call++) { /* the cut may come after the first */
    status = even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM);
  }
  RANKS_EXPECT(comm, status == EVEN_ERR_TIMEOUT || status == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, own == 4 ? even_error_last()->rank < 4 : even_error_last()->rank == 4);
  return 0;
}

static void a_cut_link_is_no_hang(void **state) {
  (void)state;
  assert_int_equal(run(60, lose_a_link, NULL, NULL), 0);
}

/* ---- ranks that wait for one another ---- */

/* UCX has threads of its own, of which the engine cannot know that they make no calls. */
static even_waits_others nobody_calls(void *context) {
  (void)context;
  return EVEN_WAITS_OTHERS_NONE;
}

/* First for what is on its way over a slow link, which is none; then hosts in two groups, in opposite order. */
static int cross(even_comm *comm, void *argument) {
  enum { COUNT = 3 << 20 };
  static float values[COUNT];
  static const int slow_host = 2;
  int host = HOST_OF[even_comm_rank(comm)];
  const ranks_setup setup = setup_of(120);
  even_comm *other = NULL;
  even_waits_ask_others(nobody_calls, NULL);
  RANKS_EXPECT(comm, ranks_open(&setup, argument, even_comm_rank(comm), &other) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_record(comm, NULL, "test/one") == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_record(other, NULL, "test/other") == EVEN_OK);
  RANKS_EXPECT(comm, host != slow_host || shape(slow_host, 40));
  even_status status = even_comm_all_reduce(comm, values, COUNT, EVEN_F32, EVEN_SUM);
  RANKS_EXPECT(comm, host != slow_host || shape(slow_host, 200));
  RANKS_EXPECT(comm, status == EVEN_OK && even_comm_barrier(comm) == EVEN_OK);
  status = even_comm_barrier(host == 1 ? other : comm);
  const char *what = even_error_last()->what;
  if (status == EVEN_ERR_PEER_LOST && strstr(what, "left the group") != NULL) {
    even_comm_close(other); /* by who saw it first, and was told what is looked for here */
    return 0;
  }
  RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && strstr(what, "ranks wait for one another: ") != NULL);
  RANKS_EXPECT(comm, strstr(what, ") is in barrier of group test/one for ") != NULL);
  RANKS_EXPECT(comm, strstr(what, "rank 2 (host ") != NULL);
  RANKS_EXPECT(comm, strstr(what, ") is in barrier of group test/other for ") != NULL);
  even_comm_close(other);
  return 0;
}

static void hosts_that_wait_for_one_another_are_told(void **state) {
  const ranks_setup setup = setup_of(120);
  ranks_segments other;
  (void)state;
  assert_int_equal(ranks_make_segments(&setup, &other), EVEN_OK);
  assert_int_equal(run(120, cross, &other, NULL), 0);
  ranks_close_segments(&setup, &other);
}

/* ---- bench ---- */

static int bench(void) {
  int result = 0;
  (void)printf("all-reduce of fp32, %d ranks on %d hosts (2, 2, 1), medians; the hosts share this machine's cores\n",
               RANKS, HOSTS);
  for (int i = 0; i < hosts_bench_count && result == 0; i++) {
    hosts_bench_links links = hosts_bench_all[i];
    for (int host = 0; host < HOSTS && result == 0; host++) {
      result = shape(host, links.speeds[host]) ? 0 : 1;
    }
    result = result == 0 ? run(600, hosts_bench_measure, &links, NULL) : result;
  }
  return result;
}

/* ---- legs ---- */

enum { PHASES = 4, CALLS = 160 };
static const char *const phases[PHASES] = {"usual", "host 1 at 100 Mbit/s", "usual again", "host 1 is 20 ms late"};
static int ring_fd = -1;
static size_t leg_bytes;

static int make_phases(even_comm *comm, void *argument) {
  even_telemetry *telemetry = NULL;
  int rank = even_comm_rank(comm);
  unsigned char *data = calloc(1, leg_bytes);
  (void)argument;
  RANKS_EXPECT(comm, data != NULL && even_telemetry_open(ring_fd, rank, &telemetry) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_record(comm, telemetry, "test/legs") == EVEN_OK);
  for (int phase = 0; phase < PHASES; phase++) {
    RANKS_EXPECT(comm, rank != 0 || shape(1, phase == 1 ? 100 : 1000));
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
    const even_event_record mark = {.event = EVEN_EVENT_MESSAGE, .value = phase};
    even_telemetry_event(telemetry, &mark);
    uint64_t began = even_clock_ns();
    for (int call = 0; call < CALLS; call++) {
      if (phase == 3 && HOST_OF[rank] == 1) {
        even_clock_sleep_ns(20000000);
      }
      RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, leg_bytes / 4, EVEN_F32, EVEN_MAX) == EVEN_OK);
    }
    if (rank == 0) {
      (void)printf("%s: %.2f ms a call\n", phases[phase], (double)(even_clock_ns() - began) / 1e6 / (double)CALLS);
      (void)fflush(stdout);
    }
  }
  free(data);
  return 0;
}

static void print_legs(even_telemetry_reader *reader) {
  static even_record records[4096];
  size_t count = even_telemetry_reader_drain(reader, records, sizeof records / sizeof records[0], NULL);
  for (size_t i = 0; i < count; i++) {
    const even_leg_record *leg = &records[i].as.leg;
    if (records[i].kind == EVEN_RECORD_EVENT) {
      (void)printf("rank %u: %s\n", records[i].rank, phases[records[i].as.event.value]);
    } else if (records[i].kind == EVEN_RECORD_LEG) {
      (void)printf("rank %u, %08x from %08x: %u transfers of %.0f KB, %.0f us each\n", records[i].rank, leg->own,
                   leg->peer, leg->transfers, (double)leg->bytes / 1e3 / leg->transfers,
                   (double)leg->ns / 1e3 / leg->transfers);
    }
  }
}

static int measure_legs(size_t kilobytes) {
  even_telemetry_reader *reader = NULL;
  leg_bytes = kilobytes << 10;
  bool made = even_telemetry_create_segment(RANKS, 0, &ring_fd) == EVEN_OK &&
              even_telemetry_reader_open(ring_fd, &reader) == EVEN_OK && shape(0, 1000) && shape(2, 1000);
  int result = made ? run(600, make_phases, NULL, NULL) : 1;
  if (made) {
    print_legs(reader);
  }
  even_telemetry_reader_close(reader);
  return result;
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(hosts_add_up),
      cmocka_unit_test(a_killed_rank_is_named_over_the_network),
      cmocka_unit_test(hosts_that_wait_for_one_another_are_told),
      cmocka_unit_test(a_cut_link_is_no_hang),
  };
  int result = 77; /* skipped, as CMakeLists.txt says */
  if (!ranks_have_ucx()) {
    return result;
  }
  if (!make_hosts()) {
    (void)fprintf(stderr, "network namespaces are not tested: %s\n", LACKS);
    result = required("namespaces", LACKS) ? 1 : result;
  } else if (argc > 1 && strcmp(argv[1], "bench") == 0) {
    result = bench();
  } else if (argc > 2 && strcmp(argv[1], "legs") == 0) {
    result = measure_legs(strtoul(argv[2], NULL, 10));
  } else {
    result = cmocka_run_group_tests(tests, NULL, NULL);
  }
  remove_hosts();
  return result;
}
