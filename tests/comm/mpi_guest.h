/* What the tests of MPI as a guest in the process share: the made-up library's switches, and a process for each test.
 */
#ifndef EVEN_TEST_MPI_GUEST_H
#define EVEN_TEST_MPI_GUEST_H

#include "comm/fake_mpi.h"

#include <dlfcn.h>
#include <evenstep/comm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define LIBRARY FAKE_MPI_ADDRESSES

static inline bool mentions(const char *text) {
  return strstr(even_error_last()->what, text) != NULL;
}

static inline bool advises(const char *text) {
  return strstr(even_error_last()->fix, text) != NULL;
}

/* The made-up library's switches, in this process. */
static inline fake_mpi_control *control(void) {
  void *library = dlopen(LIBRARY, RTLD_NOW);
  void *address = library == NULL ? NULL : dlsym(library, "fake_mpi");
  if (address == NULL) {
    abort();
  }
  return address;
}

static inline int call_library(const char *name) {
  int (*call)(void) = NULL;
  void *address = dlsym(dlopen(LIBRARY, RTLD_NOW), name);
  memcpy(&call, &address, sizeof call);
  return call();
}

static inline int start_library(int threads) {
  int (*call)(int *, char ***, int, int *) = NULL;
  void *address = dlsym(dlopen(LIBRARY, RTLD_NOW), "MPI_Init_thread");
  memcpy(&call, &address, sizeof call);
  return call(NULL, NULL, threads, &threads);
}

static inline even_status open_alone(const char *library, even_comm **out) {
  even_comm_params params = {.size = sizeof params, .ranks = 1, .timeout_seconds = 10, .spin = -1};
  even_comm_network network = {.size = sizeof network, .number = -1, .library = library};
  return even_comm_open_mpi(&params, &network, out);
}

#define EXPECT(condition)                                                                                            \
  do {                                                                                                               \
    if (!(condition)) {                                                                                              \
      (void)fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition, even_error_last()->what); \
      return 1;                                                                                                      \
    }                                                                                                                \
  } while (0)

/* A process has one MPI, once: each test has a process of its own. */
static inline int in_child(int (*body)(const void *), const void *argument) {
  int status = 0;
  (void)fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    _exit(body(argument));
  }
  (void)waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

#endif
