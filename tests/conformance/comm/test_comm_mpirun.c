/* The same calls over real MPI libraries: starts itself under each mpirun that is found (EVENSTEP_TEST_MPIRUN: paths,
 * separated by ':'), with the library that belongs to it. */
#include "comm/ranks.h"
#include "conformance/comm/random_calls.h"
#include "support/required.h"
#include "support/sanitizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define LIBRARY "EVENSTEP_TEST_UNDER_MPI" /* set in ranks */
#define SKIPPED 77

/* ---- a rank ---- */

static int exchange_messages(even_comm *comm) {
  static unsigned char out[300000];
  static unsigned char in[300000];
  int own = even_comm_rank(comm);
  int ranks = even_comm_ranks(comm);
  even_comm_request *send = NULL;
  even_comm_request *receive = NULL;
  for (size_t bytes = 1; bytes <= sizeof out; bytes = bytes * 7 + 1) {
    memset(out, own + 1, bytes);
    RANKS_EXPECT(comm, even_comm_send_begin(comm, out, bytes, (own + 1) % ranks, 9, &send) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, in, bytes, (own + ranks - 1) % ranks, 9, &receive) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(receive, 0, NULL) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(send, 0, NULL) == EVEN_OK);
    RANKS_EXPECT(comm, in[0] == (own + ranks - 1) % ranks + 1 && in[bytes - 1] == in[0]);
    even_comm_request_free(send);
    even_comm_request_free(receive);
  }
  return 0;
}

/* The second group of the same ranks begins with an empty communicator. */
static int be_rank(const char *library) {
  int rank = 0;
  int ranks = 0;
  if (even_comm_mpi_place(library, &rank, &ranks) != EVEN_OK) {
    return ranks_complain(NULL, "%s", even_error_last()->what);
  }
  for (int group = 0; group < 2; group++) {
    even_comm_params params = {.size = sizeof params,
                               .rank = rank,
                               .ranks = ranks,
                               .arena_bytes = RANDOM_CALLS_ARENA_BYTES,
                               .timeout_seconds = 60,
                               .spin = -1};
    even_comm_network network = {.size = sizeof network, .number = -1, .library = library};
    random_calls suite = {.seed = 77 + (uint64_t)group, .calls = 40, .largest = group == 0 ? 300000 : 4000000};
    even_comm *comm = NULL;
    if (even_comm_open_mpi(&params, &network, &comm) != EVEN_OK) {
      return ranks_complain(NULL, "rank %d cannot open: %s", rank, even_error_last()->what);
    }
    int wrong = random_calls_run(comm, &suite) + exchange_messages(comm);
    even_comm_close(comm);
    if (wrong != 0) {
      return wrong;
    }
  }
  return 0;
}

/* ---- mpirun ---- */

/* Beside the launcher, as in a virtual environment or a prefix; else where the loader looks. */
static const char *library_of(const char *mpirun, char *path, size_t bytes) {
  static const char *const names[] = {"libmpi.so.40", "libmpi.so.12"};
  const char *slash = strrchr(mpirun, '/');
  for (size_t i = 0; slash != NULL && i < sizeof names / sizeof names[0]; i++) {
    (void)snprintf(path, bytes, "%.*s/../lib/%s", (int)(slash - mpirun), mpirun, names[i]);
    if (access(path, R_OK) == 0) {
      return path;
    }
  }
  (void)snprintf(path, bytes, "%s", strstr(mpirun, "mpich") != NULL ? "libmpich.so.12" : "libmpi.so.40");
  return path;
}

static bool is_there(const char *mpirun) {
  char command[4096];
  (void)snprintf(command, sizeof command, "command -v '%s' > /dev/null", mpirun);
  return system(command) == 0;
}

static int run_under(const char *mpirun, const char *self, int ranks) {
  char library[4096];
  char command[8192];
  (void)setenv(LIBRARY, library_of(mpirun, library, sizeof library), 1);
  (void)snprintf(command, sizeof command, "timeout -k 5 200 '%s' -n %d '%s'", mpirun, ranks, self);
  (void)printf("%s, with %s\n", command, library);
  (void)fflush(NULL);
  int status = system(command);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

/* What Open MPI wants to be told of a root user and of more ranks than cores; and no network but this host's own. */
static void tell_launchers(void) {
  (void)setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  (void)setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  (void)setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 1);
  (void)setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe", 1);
  (void)setenv("OMPI_MCA_btl_tcp_if_include", "lo", 0);
  (void)setenv("ASAN_OPTIONS", "detect_leaks=0", 1); /* of theirs */
}

int main(int count, char **words) {
  const char *library = getenv(LIBRARY);
  const char *wanted = getenv("EVENSTEP_TEST_MPIRUN");
  char list[4096];
  char *rest = list;
  int tested = 0;
  int wrong = 0;
  if (library != NULL) {
    return be_rank(library);
  }
  if (EVEN_TEST_THREADS_WATCHED) {
    return SKIPPED; /* it takes what it has not compiled for races */
  }
  (void)count;
  tell_launchers();
  (void)snprintf(list, sizeof list, "%s", wanted == NULL ? "mpirun.openmpi:mpirun.mpich" : wanted);
  for (char *mpirun = strtok_r(list, ":", &rest); mpirun != NULL; mpirun = strtok_r(NULL, ":", &rest)) {
    for (int ranks = 2; is_there(mpirun) && ranks <= 3; ranks++, tested++) {
      wrong += run_under(mpirun, words[0], ranks) != 0;
    }
  }
  if (tested == 0 && required("mpi", "no mpirun is found: set EVENSTEP_TEST_MPIRUN")) {
    return 1;
  }
  return wrong != 0 ? 1 : tested > 0 ? 0 : SKIPPED;
}
