/* Ports, random names, paths, folders' entries, busy neighbours, the kernel's words about memory. */
#include "os/busy.h"
#include "os/entries.h"
#include "os/listener.h"
#include "os/oom.h"
#include "os/path.h"
#include "os/port.h"
#include "os/random.h"
#include "support/fault.h"
#include "support/ports.h"

#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* Of the ports that it hands out by itself. */
static long first_of_kernel(void) {
  long first = 0;
  FILE *range = fopen("/proc/sys/net/ipv4/ip_local_port_range", "re");
  assert_non_null(range);
  assert_int_equal(fscanf(range, "%ld", &first), 1);
  (void)fclose(range);
  return first;
}

static void finds_a_port_that_can_be_bound(void **state) {
  (void)state;
  int port = 0;
  assert_int_equal(even_port_free(&port), EVEN_OK);
  assert_in_range(port, 1, 65535);
  long first = first_of_kernel();
  if (first >= 20000) {
    assert_in_range(port, 10000, first - 1); /* not one of those that others are given */
  }
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
  assert_false(port_is_free(port));
  (void)close(fd);
  assert_true(port_is_free(port));
  const fault_call calls[] = {FAULT_socket, FAULT_bind, FAULT_getsockname};
  for (size_t i = 0; i < 3; i++) {
    fault_os(calls[i], 1, EADDRNOTAVAIL);
    assert_int_equal(even_port_free(&port), EVEN_ERR_SYSTEM);
    fault_reset();
  }
  fault_os(FAULT_bind, 1, EADDRINUSE);
  assert_int_equal(even_port_free(&port), EVEN_OK); /* the next one */
  fault_reset();
  fault_os(FAULT_open, 1, EACCES);
  port = 0;
  assert_int_equal(even_port_free(&port), EVEN_OK); /* any */
  assert_in_range(port, 1, 65535);
  fault_reset();
}

static int numbers;

/* The first two who ask are given one number, which no other process's test is given beside this one. */
static ssize_t chosen(void *bytes, size_t count, unsigned flags) {
  if (numbers++ >= 2) {
    return even_os_real.getrandom(bytes, count, flags);
  }
  for (size_t i = 0; i < count; i++) {
    ((unsigned char *)bytes)[i] = (unsigned char)(getpid() >> (8 * (count - 1 - i)));
  }
  return (ssize_t)count;
}

/* Of two that begin at a time, before either has bound its port. */
static void nobody_is_given_a_port_that_another_holds(void **state) {
  (void)state;
  even_port_held held[2] = {{.holds = false}, {.holds = false}};
  int port[2] = {0, 0};
  int fd = -1;
  even_os.getrandom = chosen;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(even_port_hold(&port[i], &held[i]), EVEN_OK);
  }
  even_os.getrandom = even_os_real.getrandom;
  assert_true(port[0] != port[1]);
  assert_true(numbers >= 3 || numbers == 0); /* the latter where the kernel chooses, which has left no room below */
  assert_int_equal(numbers == 0, first_of_kernel() < 20000);
  assert_false(port_is_free(port[0]));
  even_port_let_go(&held[0]);
  even_port_let_go(&held[0]); /* nothing more */
  assert_true(port_is_free(port[0]));
  int before = port[1];
  assert_int_equal(even_port_hold(&port[1], &held[1]), EVEN_OK);
  assert_true(port[1] == before || port_is_free(before)); /* one at a time */
  before = port[1];
  assert_true(even_port_pass(before, &held[1], &held[0]) && held[0].holds && !held[1].holds);
  assert_false(port_is_free(before));
  assert_int_equal(even_listener_open("127.0.0.1", &before, &fd), EVEN_OK); /* of somebody who has not asked */
  assert_false(even_port_pass(before, &held[0], &held[1]) || held[0].holds || held[1].holds);
  even_listener_close(fd);
  assert_true(port_is_free(port[1]));
  fault_os(FAULT_socket, 2, EAFNOSUPPORT); /* of a name, after the port's own */
  assert_int_equal(even_port_hold(&port[0], &held[0]), EVEN_OK);
  assert_false(held[0].holds);
  fault_reset();
}

static void sends_to_a_port(void **state) {
  int port = 0;
  int fd = -1;
  char got[8] = "";
  (void)state;
  assert_int_equal(even_listener_open("127.0.0.1", &port, &fd), EVEN_OK);
  assert_int_equal(even_port_send("127.0.0.1", port, "words", 5), EVEN_OK);
  int from = accept(fd, NULL, NULL);
  assert_int_equal(recv(from, got, sizeof got, MSG_WAITALL), 5);
  assert_memory_equal(got, "words", 5);
  (void)close(from);
  fault_os(FAULT_connect, 1, ENETUNREACH);
  assert_int_equal(even_port_send("127.0.0.1", port, "words", 5), EVEN_ERR_SYSTEM);
  fault_os(FAULT_socket, 1, EMFILE);
  assert_int_equal(even_port_send("127.0.0.1", port, "words", 5), EVEN_ERR_SYSTEM);
  fault_reset();
  even_listener_close(fd);
  assert_int_equal(even_port_send("127.0.0.1", port, "words", 5), EVEN_ERR_NOT_FOUND);
}

static void gives_random_digits(void **state) {
  (void)state;
  char one[33];
  char two[33];
  assert_int_equal(even_random_hex(one, 32), EVEN_OK);
  assert_int_equal(even_random_hex(two, 32), EVEN_OK);
  assert_int_equal(strlen(one), 32);
  assert_int_equal(strspn(one, "0123456789abcdef"), 32);
  assert_string_not_equal(one, two);
  assert_int_equal(even_random_hex(one, 1), EVEN_OK);
  assert_int_equal(strlen(one), 1);
  assert_int_equal(even_random_hex(one, 65), EVEN_ERR_ARGUMENT);
  fault_os(FAULT_getrandom, 1, ENOSYS);
  assert_int_equal(even_random_hex(two, 32), EVEN_ERR_SYSTEM);
  fault_reset();
}

static void makes_paths_absolute(void **state) {
  (void)state;
  even_text text = EVEN_TEXT_EMPTY;
  char here[4096];
  assert_non_null(getcwd(here, sizeof here));
  assert_int_equal(even_path_absolute("/a/b", &text), EVEN_OK);
  assert_string_equal(text.data, "/a/b");
  assert_int_equal(even_path_absolute("./a", &text), EVEN_OK);
  assert_int_equal(strncmp(text.data, here, strlen(here)), 0);
  assert_string_equal(text.data + strlen(here), "/a");
  assert_string_equal(even_path_name("/a/b.c"), "b.c");
  assert_string_equal(even_path_name("b"), "b");
  fault_os(FAULT_getcwd, 1, ENOENT);
  assert_int_equal(even_path_absolute("a", &text), EVEN_ERR_NOT_FOUND);
  fault_reset();
  assert_int_equal(even_program_path(&text), EVEN_OK);
  assert_non_null(strstr(text.data, "test_os_names"));
  assert_true(even_file_executable(text.data));
  assert_false(even_file_executable("/tmp")); /* a folder may be entered, not run */
  assert_false(even_file_readable("/no/such/file"));
  fault_os(FAULT_readlink, 1, EACCES);
  assert_int_equal(even_program_path(&text), EVEN_ERR_PERMISSION);
  fault_reset();
  even_text_free(&text);
}

static void knows_the_hosts_name(void **state) {
  (void)state;
  char name[64];
  char expected[64];
  assert_int_equal(gethostname(expected, sizeof expected), 0);
  even_host_name(name, sizeof name);
  assert_string_equal(name, expected);
  fault_os(FAULT_open, 1, EACCES);
  even_host_name(name, 6);
  fault_reset();
  assert_string_equal(name, "local");
}

static bool count_entry(void *context, const char *name) {
  size_t *count = context;
  assert_string_not_equal(name, ".");
  (*count)++;
  return *count < 150;
}

static void walks_a_folder(void **state) {
  (void)state;
  char folder[] = "/tmp/evenstep-entries-XXXXXX";
  char path[64];
  size_t count = 0;
  assert_non_null(mkdtemp(folder));
  assert_int_equal(even_folder_each(folder, count_entry, &count), EVEN_OK);
  assert_int_equal(count, 0);
  for (int i = 0; i < 300; i++) {
    (void)snprintf(path, sizeof path, "%s/%d", folder, i);
    assert_int_equal(mkdir(path, 0700), 0);
  }
  assert_int_equal(even_folder_each(folder, count_entry, &count), EVEN_OK);
  assert_int_equal(count, 150); /* it stopped when told */
  fault_os(FAULT_getdents64, 1, EIO);
  assert_int_equal(even_folder_each(folder, count_entry, &count), EVEN_ERR_SYSTEM);
  fault_reset();
  for (int i = 0; i < 300; i++) {
    (void)snprintf(path, sizeof path, "%s/%d", folder, i);
    (void)rmdir(path);
  }
  (void)rmdir(folder);
  assert_int_equal(even_folder_each(folder, count_entry, &count), EVEN_ERR_NOT_FOUND);
}

/* The plan's weights leave the wanted fraction, but for the coarseness of nice values. */
static void plans_neighbours(void **state) {
  (void)state;
  for (int percent = 4; percent < 100; percent++) {
    double fraction = percent / 100.0;
    int nice = 0;
    int count = even_busy_plan(fraction, &nice);
    double left = 1 / (1 + count / pow(1.25, nice));
    assert_in_range(count, 1, EVEN_BUSY_MOST);
    assert_in_range(nice, 0, 19);
    assert_true(fabs(left - fraction) < 0.06);
  }
  int nice = 0;
  assert_int_equal(even_busy_plan(1e-12, &nice), EVEN_BUSY_MOST);
}

/* One without its place would slow another rank, or none: whoever starts it hears of that. */
static void a_neighbour_has_its_place_or_is_none(void **state) {
  (void)state;
  pid_t pids[EVEN_BUSY_MOST];
  size_t count = 9;
  cpu_set_t mask;
  int32_t cpu = sched_getcpu();
  assert_int_equal(even_busy_start(cpu, 0.5, pids, &count), EVEN_OK);
  assert_int_equal(sched_getaffinity(pids[0], sizeof mask, &mask), 0);
  assert_true(CPU_COUNT(&mask) == 1 && CPU_ISSET((size_t)cpu, &mask));
  assert_int_equal(kill(pids[0], SIGKILL), 0);
  assert_int_equal(waitpid(pids[0], NULL, 0), pids[0]);
  assert_int_not_equal(even_busy_start(100000, 0.5, pids, &count),
                       EVEN_OK); /* no such CPU; more than a cpu_set_t has */
  assert_int_equal(count, 0);
  assert_non_null(strstr(even_error_last()->what, "pinned to CPU 100000"));
  assert_non_null(strstr(even_error_last()->fix, "taskset"));
  for (fault_call call = FAULT_fork; call <= FAULT_pipe2; call++) {
    if (call == FAULT_fork || call == FAULT_prctl || call == FAULT_setaffinity || call == FAULT_pipe2) {
      fault_os(call, 1, EPERM);
      assert_int_not_equal(even_busy_start(cpu, 0.5, pids, &count), EVEN_OK);
      fault_reset();
      assert_int_equal(count, 0);
      assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no child is left */
    }
  }
}

static void starts_neighbours(void **state) {
  (void)state;
  pid_t pids[EVEN_BUSY_MOST];
  size_t count = 0;
  assert_int_equal(even_busy_start(0, 0.25, pids, &count), EVEN_OK);
  assert_int_equal(count, 3);
  for (size_t i = 0; i < count; i++) {
    assert_int_equal(kill(pids[i], SIGKILL), 0);
    assert_int_equal(waitpid(pids[i], NULL, 0), pids[i]);
  }
  assert_int_equal(even_busy_start(0, 1, pids, &count), EVEN_ERR_ARGUMENT);
  fault_os(FAULT_fork, 2, EAGAIN);
  assert_int_not_equal(even_busy_start(0, 0.25, pids, &count), EVEN_OK);
  fault_reset();
  assert_int_equal(count, 1); /* the caller can end what was started */
  assert_int_equal(kill(pids[0], SIGKILL), 0);
  assert_int_equal(waitpid(pids[0], NULL, 0), pids[0]);
}

static void reads_the_kernels_words(void **state) {
  (void)state;
  /* from Linux 4.19, 5.10 and 6.1 */
  assert_int_equal(even_oom_victim_of("4,1,2,-;Killed process 77 (python) total-vm:1kB, anon-rss:1kB"), 0);
  assert_int_equal(even_oom_victim_of("3,1,2,-;Out of memory: Killed process 77 (python) total-vm:1kB"), 77);
  assert_int_equal(even_oom_victim_of("3,1,2,-;Memory cgroup out of memory: Killed process 78 (p) total-vm"), 78);
  assert_int_equal(even_oom_victim_of("6,1,2,-;usb 1-1: new device"), 0);
  assert_int_equal(even_oom_victim_of("Out of memory: Killed process x"), 0);
}

static void does_without_the_kernels_log(void **state) {
  (void)state;
  even_oom_watch watch;
  fault_os_from(FAULT_open, 1, EPERM);
  even_oom_watch_open(&watch);
  even_oom_watch_read(&watch);
  fault_reset();
  assert_false(watch.counted || watch.grouped);
  assert_false(even_oom_is_victim(&watch, 1));
  even_oom_watch_close(&watch);
  even_oom_watch_open(&watch);
  even_oom_watch_read(&watch);
  assert_false(even_oom_is_victim(&watch, getpid()));
  even_oom_watch_close(&watch);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(finds_a_port_that_can_be_bound),
      cmocka_unit_test(nobody_is_given_a_port_that_another_holds),
      cmocka_unit_test(sends_to_a_port),
      cmocka_unit_test(gives_random_digits),
      cmocka_unit_test(makes_paths_absolute),
      cmocka_unit_test(knows_the_hosts_name),
      cmocka_unit_test(walks_a_folder),
      cmocka_unit_test(plans_neighbours),
      cmocka_unit_test(a_neighbour_has_its_place_or_is_none),
      cmocka_unit_test(starts_neighbours),
      cmocka_unit_test(reads_the_kernels_words),
      cmocka_unit_test(does_without_the_kernels_log),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
