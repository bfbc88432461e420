/* The ranks of a group, as processes or as threads. */
#include "comm/ranks.h"

#include "comm/group.h"
#include "os/shared_memory.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define CANNOT_OPEN 99

typedef struct thread_rank {
  even_comm_params params;
  even_shared_memory *memory;
  ranks_body *body;
  void *argument;
  int result;
} thread_rank;

int ranks_complain(const even_comm *comm, const char *format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  (void)fprintf(stderr, "rank %d: %s\n", comm == NULL ? -1 : even_comm_rank(comm), text);
  return 1;
}

static even_comm_params params_of(const ranks_setup *setup, int rank) {
  return (even_comm_params){.size = sizeof(even_comm_params),
                            .rank = rank,
                            .ranks = setup->ranks,
                            .arena_bytes = setup->arena_bytes,
                            .timeout_seconds = setup->timeout_seconds,
                            .spin = setup->spin};
}

static int be_process(const even_comm_params *params, int fd, ranks_body *body, void *argument) {
  even_comm *comm = NULL;
  if (even_comm_open(params, fd, &comm) != EVEN_OK) {
    (void)ranks_complain(NULL, "rank %d cannot open: %s", params->rank, even_error_last()->what);
    return CANNOT_OPEN;
  }
  int result = body(comm, argument);
  even_comm_close(comm);
  return result;
}

static void run_processes(const ranks_setup *setup, int fd, ranks_body *body, void *argument, int *results) {
  pid_t processes[RANKS_MOST];
  (void)fflush(NULL);
  for (int rank = 0; rank < setup->ranks; rank++) {
    even_comm_params params = params_of(setup, rank);
    processes[rank] = fork();
    if (processes[rank] == 0) {
      _exit(be_process(&params, fd, body, argument));
    }
  }
  (void)close(fd);
  for (int rank = 0; rank < setup->ranks; rank++) {
    int status = 0;
    (void)waitpid(processes[rank], &status, 0);
    results[rank] = WIFEXITED(status) ? WEXITSTATUS(status) : RANKS_KILLED;
  }
}

even_comm *ranks_open_alone(size_t arena_bytes) {
  ranks_setup setup = {.ranks = 1, .arena_bytes = arena_bytes, .timeout_seconds = 60};
  even_comm_params params = params_of(&setup, 0);
  even_comm *comm = NULL;
  int fd = -1;
  if (even_comm_create_segment(&params, &fd) == EVEN_OK) {
    if (even_comm_open(&params, fd, &comm) != EVEN_OK) {
      (void)ranks_complain(NULL, "cannot open: %s", even_error_last()->what);
    }
    (void)close(fd);
  }
  return comm;
}

static void *be_thread(void *argument) {
  thread_rank *rank = argument;
  even_comm *comm = NULL;
  if (even_comm_open_mapped(&rank->params, rank->memory->address, rank->memory->bytes, &comm) != EVEN_OK) {
    (void)ranks_complain(NULL, "rank %d cannot open: %s", rank->params.rank, even_error_last()->what);
    rank->result = CANNOT_OPEN;
    return NULL;
  }
  rank->result = rank->body(comm, rank->argument);
  even_comm_close(comm);
  return NULL;
}

static void run_threads(const ranks_setup *setup, int fd, ranks_body *body, void *argument, int *results) {
  even_shared_memory memory;
  pthread_t threads[RANKS_MOST];
  thread_rank ranks[RANKS_MOST];
  if (even_shared_memory_adopt(fd, &memory) != EVEN_OK) {
    abort();
  }
  for (int rank = 0; rank < setup->ranks; rank++) {
    ranks[rank] = (thread_rank){
        .params = params_of(setup, rank), .memory = &memory, .body = body, .argument = argument, .result = 1};
    if (pthread_create(&threads[rank], NULL, be_thread, &ranks[rank]) != 0) {
      abort();
    }
  }
  for (int rank = 0; rank < setup->ranks; rank++) {
    (void)pthread_join(threads[rank], NULL);
    results[rank] = ranks[rank].result;
  }
  even_shared_memory_close(&memory);
}

int ranks_run(const ranks_setup *setup, ranks_body *body, void *argument, int *results) {
  int own[RANKS_MOST];
  int fd = -1;
  int wrong = 0;
  even_comm_params params = params_of(setup, 0);
  int *into = results == NULL ? own : results;
  if (even_comm_create_segment(&params, &fd) != EVEN_OK) {
    return ranks_complain(NULL, "no segment: %s", even_error_last()->what);
  }
  if (setup->threads) {
    run_threads(setup, fd, body, argument, into);
  } else {
    run_processes(setup, fd, body, argument, into);
  }
  for (int rank = 0; rank < setup->ranks; rank++) {
    wrong += into[rank] != 0;
  }
  return wrong;
}
