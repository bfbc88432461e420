/* Runs the ranks of a group: as processes, as in life, or as threads over one mapping, so that ThreadSanitizer sees
 * what they share. */
#ifndef EVEN_TEST_RANKS_H
#define EVEN_TEST_RANKS_H

#include <evenstep/comm.h>
#include <stdbool.h>
#include <sys/types.h>

#define RANKS_MOST 260
#define RANKS_KILLED (-1) /* in results: ended by a signal */

typedef enum ranks_engine {
  RANKS_SHM,
  RANKS_NETWORK, /* UCX, over TCP unless UCX_TLS says otherwise; or MPI */
  RANKS_HOSTS,   /* shared memory on each of the hosts that `host_of` says, the network between them */
} ranks_engine;

typedef struct ranks_setup {
  int ranks;
  size_t arena_bytes;
  double timeout_seconds;
  int spin;
  bool threads;
  ranks_engine engine;
  const int *host_of;        /* of RANKS_HOSTS: one a rank, */
  int lanes;                 /* so many groups between the hosts; 0: one, */
  bool silent;               /* and no messages */
  const char *mpi;           /* NULL: UCX is the network; else MPI is, this made-up one (fake_mpi.h) */
  void (*enter)(int rank);   /* NULL, or called in each rank's process before it opens anything */
  even_comm_over_call *over; /* as in even_comm_params */
  void *over_context;
} ranks_setup;

/* What a rank does; returns 0 where all was right. `argument` is the same for all. */
typedef int ranks_body(even_comm *comm, void *argument);

/* Runs `body` on every rank and waits for all. results[r] is what rank r returned, RANKS_KILLED, or 99 where it could
 * not open the group. Returns how many results are not 0. */
int ranks_run(const ranks_setup *setup, ranks_body *body, void *argument, int *results);

/* The segments of a group's parts: made before the ranks are, closed behind them. */
typedef struct ranks_segments {
  int whole;
  int inside[RANKS_MOST];
  int lanes[EVEN_COMM_LANES];
} ranks_segments;
even_status ranks_make_segments(const ranks_setup *setup, ranks_segments *out) EVEN_MUST_USE;
void ranks_close_segments(const ranks_setup *setup, ranks_segments *segments);
/* One of the ranks opens a group over them. */
even_status ranks_open(const ranks_setup *setup, const ranks_segments *segments, int rank,
                       even_comm **out) EVEN_MUST_USE;

/* The only rank of a group, in the calling process; NULL where it could not be opened. Close it. */
even_comm *ranks_open_alone(size_t arena_bytes);

/* Whether UCX can be opened here; says so where not, and ends the program as failed where EVENSTEP_TEST_REQUIRE names
 * ucx: `make test` skips nothing that it should have run. */
bool ranks_have_ucx(void);

/* As even_comm_site_call: the place that `context`, a string, names. */
bool ranks_say_site(void *context, char *text, size_t bytes);

/* Says what was wrong, with the rank, on stderr; returns 1. */
int ranks_complain(const even_comm *comm, const char *format, ...) EVEN_PRINTF(2, 3);

#define RANKS_EXPECT(comm, condition)                                                            \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      return ranks_complain((comm), "%s:%d: %s; last error: %s", __FILE__, __LINE__, #condition, \
                            even_error_last()->what);                                            \
    }                                                                                            \
  } while (0)

#endif
