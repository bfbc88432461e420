/* Lists of hosts, what launchers say of a process's place, and the address that all ranks are told. */
#include "orchestrator/launched.h"

#include "base/fail.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/remote.h"
#include "os/calls.h"
#include "support/fault.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- lists ---- */

static void expect(const char *text, const char *expected) {
  even_hostlist list;
  char joined[1024] = "";
  assert_int_equal(even_hostlist_expand(text, &list), EVEN_OK);
  for (size_t i = 0; i < list.count; i++) {
    (void)strcat(strcat(joined, i == 0 ? "" : " "), list.names[i]);
  }
  assert_string_equal(joined, expected);
  even_hostlist_free(&list);
}

static void lists_are_written_out_as_scontrol_does(void **state) {
  (void)state;
  expect("login", "login");
  expect("n1,n2.cluster,gpu-a_b", "n1 n2.cluster gpu-a_b");
  expect("n[1-3]", "n1 n2 n3");
  expect("n[08-10,12],login", "n08 n09 n10 n12 login");
  expect("n[098-101]x", "n098x n099x n100x n101x");
  expect("rack[0-1]n[0-1,7]", "rack0n0 rack0n1 rack0n7 rack1n0 rack1n1 rack1n7");
  expect("a[1,3],b[2]c", "a1 a3 b2c");
  expect("[1-2]", "1 2");
}

static void what_is_no_list_is_refused(void **state) {
  static const char *const texts[] = {
      "",     ",",     "a,", "a,,b",     "n[",  "n[]",    "n[1", "n[1-]", "n[-1]",    "n[3-1]",        "n[1,]",
      "n[a]", "n[1]]", "n]", "n[1-2-3]", "a b", "n[1;2]", "n/1", "$(x)",  "n[0-512]", "n[0-99][0-99]", "n[1234567890]"};
  (void)state;
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    even_hostlist list;
    if (even_hostlist_expand(texts[i], &list) != EVEN_ERR_INPUT) {
      fail_msg("\"%s\" was taken for a list", texts[i]);
    }
    even_hostlist_free(&list);
  }
  char longest[400];
  even_hostlist list;
  memset(longest, 'a', sizeof longest);
  longest[EVEN_HOSTS_NAME - 1] = '\0';
  expect(longest, longest);
  longest[EVEN_HOSTS_NAME - 1] = 'a';
  longest[EVEN_HOSTS_NAME] = '\0';
  assert_int_equal(even_hostlist_expand(longest, &list), EVEN_ERR_INPUT);
  even_hostlist_free(&list);
}

static even_status expand(void *context) {
  even_hostlist list;
  even_status status = even_hostlist_expand(context, &list);
  even_hostlist_free(&list);
  return status;
}

static void a_list_without_memory_fails_and_leaks_nothing(void **state) {
  char text[] = "n[1-30]";
  (void)state;
  assert_true(fault_each_allocation(expand, text) >= 4);
}

/* ---- places ---- */

static const char *const *said;

static char *variable(const char *name) {
  for (size_t i = 0; said[i] != NULL; i += 2) {
    if (strcmp(said[i], name) == 0) {
      return (char *)said[i + 1];
    }
  }
  return NULL;
}

static even_launched find(const char *const *words) {
  even_launched found;
  said = words;
  assert_int_equal(even_launched_find(variable, &found), EVEN_OK);
  return found;
}

static void check_place(even_launched found, const char *by, int place, int count, const char *job) {
  assert_string_equal(found.by, by);
  assert_int_equal(found.place, place);
  assert_int_equal(found.count, count);
  assert_string_equal(found.job, job);
  assert_int_equal(found.returns, strcmp(by, "EVENSTEP_HOST_RANK") == 0);
  even_launched_free(&found);
}

static void a_place_is_found_in_what_each_launcher_says(void **state) {
  static const char *const open_mpi[] = {"OMPI_COMM_WORLD_RANK",
                                         "1",
                                         "OMPI_COMM_WORLD_SIZE",
                                         "2",
                                         "PMIX_NAMESPACE",
                                         "a@1/x y",
                                         "SLURM_PROCID",
                                         "0",
                                         "SLURM_NTASKS",
                                         "9",
                                         "SLURM_JOB_ID",
                                         "7",
                                         NULL};
  static const char *const hydra[] = {
      "PMI_RANK",      "0", "PMI_SIZE",     "3", "SLURM_JOB_ID", "7", /* which two mpiexec may share */
      "SLURM_STEP_ID", "0", "SLURM_PROCID", "0", "SLURM_NTASKS", "3", NULL};
  static const char *const slurm[] = {"SLURM_PROCID",
                                      "2",
                                      "SLURM_NTASKS",
                                      "3",
                                      "SLURM_JOB_ID",
                                      "4711",
                                      "SLURM_STEP_ID",
                                      "0",
                                      "SLURM_NODELIST",
                                      "x",
                                      "SLURM_STEP_NODELIST",
                                      "n[08-10]",
                                      NULL};
  static const char *const again[] = {
      "SLURM_PROCID",  "0", "SLURM_STEP_NUM_TASKS", "2", "SLURM_NTASKS",       "9",     "SLURM_JOBID", "5",
      "SLURM_STEP_ID", "3", "SLURM_RESTART_COUNT",  "1", "SLURM_JOB_NODELIST", "a,b,c", NULL};
  static const char *const own[] = {"EVENSTEP_HOST_RANK",
                                    "1",
                                    "EVENSTEP_HOST_COUNT",
                                    "2",
                                    "EVENSTEP_HOST_JOB",
                                    "night",
                                    "PMI_RANK",
                                    "0",
                                    "PMI_SIZE",
                                    "1",
                                    NULL};
  (void)state;
  check_place(find(open_mpi), "Open MPI", 1, 2, "a-1-x-y");
  check_place(find(hydra), "MPICH", 0, 3, "");
  even_launched found = find(slurm);
  assert_int_equal(found.hosts.count, 3);
  assert_string_equal(found.hosts.names[2], "n10");
  check_place(found, "Slurm", 2, 3, "4711.0");
  found = find(again);
  assert_int_equal(found.hosts.count, 0); /* three names of two processes */
  check_place(found, "Slurm", 0, 2, "5.3.1");
  check_place(find(own), "EVENSTEP_HOST_RANK", 1, 2, "night");
}

static void no_place_is_found_in_anything_else(void **state) {
  static const char *const cases[][7] = {
      {NULL},
      {"PMI_RANK", "0", NULL},
      {"PMI_RANK", "2", "PMI_SIZE", "2", NULL},
      {"PMI_RANK", "x", "PMI_SIZE", "2", NULL},
      {"PMI_RANK", "-1", "PMI_SIZE", "2", NULL},
      {"EVENSTEP_HOST_RANK", "0", "EVENSTEP_HOST_COUNT", "0", NULL},
      {"EVENSTEP_HOST_RANK", "0", "EVENSTEP_HOST_COUNT", "513", NULL},
      {"SLURM_PROCID", "0", "SLURM_NTASKS", "2", "SLURM_JOB_ID", "7", NULL}, /* a batch script's own shell */
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_launched found;
    said = cases[i];
    assert_int_equal(even_launched_find(variable, &found), EVEN_ERR_USAGE);
    assert_true(even_error_last()->fix[0] != '\0');
    even_launched_free(&found);
  }
  assert_non_null(strstr(even_error_last()->what, "batch script"));
}

static const char *stat_of_self;

/* What the kernel says of this process: a file of the test's. */
static int open_stat_of_self(const char *name, int flags, mode_t mode) {
  if (strstr(name, "/self/") == NULL) {
    return even_os_real.open(name, flags, mode);
  }
  int fd = memfd_create("stat", MFD_CLOEXEC);
  assert_int_equal(write(fd, stat_of_self, strlen(stat_of_self)), strlen(stat_of_self));
  assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
  return fd;
}

/* `srun --pty bash`, and what is typed there: tasks of a further srun inherit the variables, and have no terminal. */
static void a_shell_of_srun_has_no_place(void **state) {
  static const char *const places[][3] = {{"SLURM_PROCID", "SLURM_NTASKS", "Slurm"}, {"PMI_RANK", "PMI_SIZE", "MPICH"}};
  static const char *const terminals[] = {"SLURM_PTY_PORT", "SLURM_PTY_WIN_COL"};
  static const struct {
    const char *stat;
    const char *further;
    bool typed;
  } cases[] = {
      {"30 (evenstep) S 20 30 20 34816 30 0 0 0 0 0 0 0 0 0 20 0 1 0 9 9 9", "X", true},  /* a job of the shell's */
      {"20 (evenstep) S 10 20 20 34816 20 0 0 0 0 0 0 0 0 0 20 0 1 0 9 9 9", "X", false}, /* srun --pty evenstep */
      {"30 (evenstep) S 20 30 10 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 9 9 9", "X", false},     /* of a further srun */
      {"30 (evenstep) S 20 30 20 34816 30 0 0 0 0 0 0 0 0 0 20 0 1 0 9 9 9", "MPI_LOCALRANKID", false},
      {"30 (evenstep) S 20 30 20 34816 30 0 0 0 0 0 0 0 0 0 20 0 1 0 9 9 9", "SLURM_STEP_ID", true},
  };
  (void)state;
  even_os.open = open_stat_of_self;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    for (size_t each = 0; each < 4; each++) {
      const char *const *place = places[each / 2];
      const char *const words[] = {
          place[0], "0", place[1], "1", "SLURM_STEP_ID", "0", terminals[each % 2], "80", cases[i].further, "0", NULL};
      bool hydra = strcmp(cases[i].further, "MPI_LOCALRANKID") == 0;
      even_launched found;
      stat_of_self = cases[i].stat;
      said = words;
      bool typed = cases[i].typed || (hydra && each / 2 == 0); /* it says nothing of Slurm's own place */
      assert_int_equal(even_launched_find(variable, &found), typed ? EVEN_ERR_USAGE : EVEN_OK);
      if (typed) {
        assert_non_null(strstr(even_error_last()->what, "srun --pty"));
      } else {
        assert_string_equal(found.by, place[2]);
      }
      even_launched_free(&found);
    }
  }
  even_os.open = even_os_real.open;
}

static void what_was_said_to_one_process_is_not_handed_on(void **state) {
  (void)state;
  assert_int_equal(setenv("PMI_RANK", "0", 1), 0);
  assert_int_equal(setenv("OMPI_COMM_WORLD_RANK", "0", 1), 0);
  assert_int_equal(setenv("OMPI_MCA_btl", "self", 1), 0);
  assert_int_equal(setenv("EVENSTEP_HOST_RANK", "0", 1), 0);
  assert_int_equal(setenv("EVENSTEP_HOST_RANKS_OTHER", "kept", 1), 0);
  even_launched_forget();
  assert_null(getenv("PMI_RANK"));
  assert_null(getenv("OMPI_COMM_WORLD_RANK"));
  assert_null(getenv("OMPI_MCA_btl"));
  assert_null(getenv("EVENSTEP_HOST_RANK"));
  assert_non_null(getenv("EVENSTEP_HOST_RANKS_OTHER"));
  assert_non_null(getenv("PATH"));
}

/* ---- the address of all ---- */

static const char *const *ends; /* of the link with descriptor 2 n: [2 n] this one's address, [2 n + 1] the other's */

static int tell_end(const char *end, struct sockaddr *address) {
  struct sockaddr_in where = {.sin_family = AF_INET};
  assert_int_equal(inet_pton(AF_INET, end, &where.sin_addr), 1);
  memcpy(address, &where, sizeof where);
  return 0;
}

static int made_up_local(int fd, struct sockaddr *address, socklen_t *bytes) {
  (void)bytes;
  return tell_end(ends[fd], address);
}

static int made_up_peer(int fd, struct sockaddr *address, socklen_t *bytes) {
  (void)bytes;
  return tell_end(ends[fd + 1], address);
}

static void expect_address(const char *const *of_links, const char *expected) {
  even_link links[3] = {{.fd = 0}, {.fd = 2}, {.fd = 4}};
  even_host_agent agents[4] = {{.link = NULL}, {.link = &links[0]}, {.link = &links[1]}, {.link = &links[2]}};
  even_hosts hosts = {.agents = agents, .count = 4};
  even_job job = {.hosts = &hosts};
  ends = of_links;
  even_os.getsockname = made_up_local;
  even_os.getpeername = made_up_peer;
  even_job_hosts_choose_address(&job);
  even_os = even_os_real;
  assert_string_equal(job.master_address, expected);
}

static void an_agent_on_the_leaders_machine_is_no_measure_for_others(void **state) {
  static const char *const mixed[] = {"127.0.0.1", "127.0.0.1", "172.17.0.1", "172.17.0.1", "10.0.0.1", "10.0.0.2"};
  static const char *const apart[] = {"10.0.0.1", "10.0.0.2", "10.1.0.1", "10.1.0.2", "10.0.0.1", "10.0.0.1"};
  static const char *const here[] = {"127.0.0.1", "127.0.0.1", "10.0.0.1", "10.0.0.1", "10.1.0.1", "10.1.0.1"};
  (void)state;
  expect_address(mixed, "10.0.0.1");
  expect_address(apart, "10.0.0.1");
  expect_address(here, "10.0.0.1");
}

static void an_address_of_another_host_is_told_as_that(void **state) {
  static const even_host_wish wishes[] = {{.name = "here", .ranks = 1}};
  even_hosts *hosts = NULL;
  even_hosts_params params = {.size = sizeof params,
                              .hosts = wishes,
                              .count = 1,
                              .most_ranks = 2,
                              .program = "/usr/bin/evenstep",
                              .folder = "/",
                              .patience_seconds = 1,
                              .address = "240.0.0.1"}; /* nobody's (RFC 1112, class E) */
  (void)state;
  assert_int_equal(even_hosts_open(&params, &hosts), EVEN_ERR_SYSTEM);
  assert_null(hosts);
  assert_non_null(strstr(even_error_last()->what, "240.0.0.1 cannot be listened at"));
  assert_non_null(strstr(even_error_last()->fix, "--address is one of this host's own"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(an_address_of_another_host_is_told_as_that),
      cmocka_unit_test(lists_are_written_out_as_scontrol_does),
      cmocka_unit_test(what_is_no_list_is_refused),
      cmocka_unit_test(a_list_without_memory_fails_and_leaks_nothing),
      cmocka_unit_test(a_place_is_found_in_what_each_launcher_says),
      cmocka_unit_test(no_place_is_found_in_anything_else),
      cmocka_unit_test(a_shell_of_srun_has_no_place),
      cmocka_unit_test(what_was_said_to_one_process_is_not_handed_on),
      cmocka_unit_test(an_agent_on_the_leaders_machine_is_no_measure_for_others),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
