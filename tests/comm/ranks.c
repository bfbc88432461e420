/* The ranks of a group, as processes or as threads. */
#include "comm/ranks.h"

#include "comm/fake_mpi.h"
#include "comm/group.h"
#include "comm/ucx/api.h"
#include "os/shared_memory.h"
#include "support/required.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

bool ranks_say_site(void *context, char *text, size_t bytes) {
  (void)snprintf(text, bytes, "%s", (const char *)context);
  return true;
}

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
                            .spin = setup->spin,
                            .over = setup->over,
                            .over_context = setup->over_context};
}

/* Through a group in shared memory. */
static even_status gather(void *context, const void *mine, size_t bytes, void *all) {
  even_comm *comm = context;
  size_t counts[RANKS_MOST];
  for (int rank = 0; rank < even_comm_ranks(comm); rank++) {
    counts[rank] = bytes;
  }
  return even_comm_all_gather(comm, mine, all, counts, EVEN_U8);
}

static even_status open_network(const ranks_setup *setup, const even_comm_params *params, even_comm *bootstrap,
                                int number, even_comm **out) {
  even_comm_network network = {
      .size = sizeof network, .gather = gather, .context = bootstrap, .number = number, .library = setup->mpi};
  return setup->mpi == NULL ? even_comm_open_ucx(params, &network, out) : even_comm_open_mpi(params, &network, out);
}

static int hosts_of(const ranks_setup *setup) {
  int hosts = 0;
  for (int rank = 0; rank < setup->ranks; rank++) {
    hosts = setup->host_of[rank] >= hosts ? setup->host_of[rank] + 1 : hosts;
  }
  return hosts;
}

/* How many ranks before `end` are on that host. */
static int ranks_on(const ranks_setup *setup, int host, int end) {
  int count = 0;
  for (int rank = 0; rank < end; rank++) {
    count += setup->host_of[rank] == host;
  }
  return count;
}

static int lanes_of(const ranks_setup *setup) {
  return setup->lanes == 0 ? 1 : setup->lanes;
}

static even_status open_between(const ranks_setup *setup, const even_comm_params *params, int fd, even_comm **out) {
  even_comm *bootstrap = NULL;
  even_comm_params outer = *params;
  outer.rank = setup->host_of[params->rank];
  outer.ranks = hosts_of(setup);
  outer.arena_bytes = 0;
  even_status status = even_comm_open(&outer, fd, &bootstrap);
  if (status == EVEN_OK) {
    status = open_network(setup, &outer, bootstrap, params->rank, out);
  }
  if (status == EVEN_OK) {
    status = even_comm_barrier(bootstrap);
  }
  even_comm_close(bootstrap);
  return status;
}

static even_status open_hosts(const ranks_setup *setup, const ranks_segments *segments, const even_comm_params *params,
                              even_comm *everyone, even_comm **out) {
  int host = setup->host_of[params->rank];
  even_comm_hosts hosts = {.size = sizeof hosts,
                           .rank = params->rank,
                           .ranks = params->ranks,
                           .host_of = setup->host_of,
                           .lanes = setup->lanes,
                           .everyone = setup->silent ? NULL : everyone};
  even_comm *lanes[EVEN_COMM_LANES] = {NULL};
  even_comm_params inner = *params;
  inner.rank = ranks_on(setup, host, params->rank);
  inner.ranks = ranks_on(setup, host, params->ranks);
  even_status status = even_comm_open(&inner, segments->inside[host], &hosts.inside);
  for (int lane = 0; lane < lanes_of(setup) && status == EVEN_OK; lane++) {
    if (inner.rank == even_comm_lane_rank(lane, lanes_of(setup), inner.ranks)) {
      status = open_between(setup, params, segments->lanes[lane], &lanes[lane]);
    }
  }
  hosts.between = lanes[0];
  hosts.lane = &lanes[1];
  status = status == EVEN_OK ? even_comm_open_hosts(&hosts, params->timeout_seconds, out) : status;
  if (setup->silent) {
    even_comm_close(everyone);
  }
  return status;
}

even_status ranks_make_segments(const ranks_setup *setup, ranks_segments *out) {
  even_comm_params params = params_of(setup, 0);
  int hosts = setup->engine == RANKS_HOSTS ? hosts_of(setup) : 0;
  even_status status = even_comm_create_segment(&params, &out->whole);
  for (int host = 0; host < hosts && status == EVEN_OK; host++) {
    params.ranks = ranks_on(setup, host, setup->ranks);
    status = even_comm_create_segment(&params, &out->inside[host]);
  }
  params.ranks = hosts;
  params.arena_bytes = 0;
  for (int lane = 0; hosts > 0 && lane < lanes_of(setup) && status == EVEN_OK; lane++) {
    status = even_comm_create_segment(&params, &out->lanes[lane]);
  }
  return status;
}

void ranks_close_segments(const ranks_setup *setup, ranks_segments *segments) {
  int hosts = setup->engine == RANKS_HOSTS ? hosts_of(setup) : 0;
  (void)close(segments->whole);
  for (int host = 0; host < hosts; host++) {
    (void)close(segments->inside[host]);
  }
  for (int lane = 0; hosts > 0 && lane < lanes_of(setup); lane++) {
    (void)close(segments->lanes[lane]);
  }
}

even_status ranks_open(const ranks_setup *setup, const ranks_segments *segments, int rank, even_comm **out) {
  const even_comm_params params = params_of(setup, rank);
  even_comm *bootstrap = NULL;
  if (setup->engine == RANKS_SHM) {
    return even_comm_open(&params, segments->whole, out);
  }
  even_status status = even_comm_open(&params, segments->whole, &bootstrap);
  if (status == EVEN_OK) {
    status = open_network(setup, &params, bootstrap, -1, out);
  }
  if (status == EVEN_OK && setup->engine == RANKS_HOSTS) {
    status = open_hosts(setup, segments, &params, *out, out);
  }
  if (status == EVEN_OK) {
    status = even_comm_barrier(bootstrap); /* who leaves it first is not lost to the others */
  }
  even_comm_close(bootstrap);
  return status;
}

static int try_ucx(void) {
  const even_ucx_api *api = NULL;
  if (even_ucx_api_get(NULL, &api) != EVEN_OK) {
    (void)fprintf(stderr, "UCX is not tested: %s\n", even_error_last()->what);
    return 1;
  }
  return 0;
}

bool ranks_have_ucx(void) {
  int status = 1;
  (void)setenv("UCX_TLS", "tcp,self", 0);
  (void)setenv("UCX_HANDLE_ERRORS", "none", 0);
  (void)setenv("UCX_LOG_LEVEL", "error", 0);
  (void)setenv("UCX_MEM_EVENTS", "n", 0); /* its patches of the C library and a sanitizer's do not agree */
  (void)fflush(NULL);
  pid_t child = fork(); /* what UCX starts when it is opened does not survive a fork */
  if (child == 0) {
    _exit(try_ucx());
  }
  (void)waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
    return true;
  }
  if (required("ucx", "UCX cannot be opened (apt-get install libucx0)")) {
    exit(1);
  }
  return false;
}

/* The shared memory of the made-up MPI's world. */
static int make_world(int ranks) {
  char text[16];
  int fd = memfd_create("made-up MPI", 0);
  if (fd < 0 || ftruncate(fd, (off_t)FAKE_MPI_WORLD_BYTES) != 0) {
    abort();
  }
  (void)snprintf(text, sizeof text, "%d", fd);
  (void)setenv(FAKE_MPI_WORLD, text, 1);
  (void)snprintf(text, sizeof text, "%d", ranks);
  (void)setenv(FAKE_MPI_RANKS, text, 1);
  return fd;
}

static void enter_world(int rank) {
  char text[16];
  (void)snprintf(text, sizeof text, "%d", rank);
  (void)setenv(FAKE_MPI_RANK, text, 1);
}

static int be_process(const ranks_setup *setup, const ranks_segments *segments, int rank, ranks_body *body,
                      void *argument) {
  even_comm *comm = NULL;
  enter_world(rank);
  if (setup->enter != NULL) {
    setup->enter(rank);
  }
  if (ranks_open(setup, segments, rank, &comm) != EVEN_OK) {
    (void)ranks_complain(NULL, "rank %d cannot open: %s", rank, even_error_last()->what);
    return CANNOT_OPEN;
  }
  int result = body(comm, argument);
  even_comm_close(comm);
  return result;
}

static void run_processes(const ranks_setup *setup, const ranks_segments *segments, ranks_body *body, void *argument,
                          int *results) {
  pid_t processes[RANKS_MOST];
  int world = setup->mpi == NULL ? -1 : make_world(setup->ranks);
  (void)fflush(NULL);
  for (int rank = 0; rank < setup->ranks; rank++) {
    processes[rank] = fork();
    if (processes[rank] == 0) {
      _exit(be_process(setup, segments, rank, body, argument));
    }
  }
  for (int rank = 0; rank < setup->ranks; rank++) {
    int status = 0;
    (void)waitpid(processes[rank], &status, 0);
    results[rank] = WIFEXITED(status) ? WEXITSTATUS(status) : RANKS_KILLED;
  }
  if (world >= 0) {
    (void)close(world);
    (void)unsetenv(FAKE_MPI_WORLD);
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
  int own[RANKS_MOST] = {0};
  ranks_segments segments;
  int wrong = 0;
  int *into = results == NULL ? own : results;
  if (ranks_make_segments(setup, &segments) != EVEN_OK) {
    return ranks_complain(NULL, "no segment: %s", even_error_last()->what);
  }
  if (setup->threads) {
    run_threads(setup, segments.whole, body, argument, into);
  } else {
    run_processes(setup, &segments, body, argument, into);
    ranks_close_segments(setup, &segments);
  }
  for (int rank = 0; rank < setup->ranks; rank++) {
    wrong += into[rank] != 0;
  }
  return wrong;
}
