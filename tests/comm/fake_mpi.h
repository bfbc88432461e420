/* A made-up MPI library that moves real bytes between processes (fake_mpi.c). It comes three times: with MPICH's
 * numbers for handles, with Open MPI's addresses, with MPI 5's standard ABI. It aborts where it is called as MPI must
 * not be. */
#ifndef EVEN_TEST_FAKE_MPI_H
#define EVEN_TEST_FAKE_MPI_H

#include <stdbool.h>

#define FAKE_MPI_MOST_RANKS 8

/* What a test sets before the library is used, and reads afterwards: symbol "fake_mpi". */
typedef struct fake_mpi_control {
  _Atomic(const char *) fails; /* the call that fails, once: "MPI_Isend"; NULL: none */
  int fails_from_tag;          /* transfers with smaller tags do not: what a thread of the library's own may send */
  int threads;                 /* 0: whatever is asked for; else 1 (funneled), 2 (serialized) */
  const char *version;
  int largest_tag;      /* 0: 32767 */
  int communicators;    /* that are not freed */
  bool keeps_receiving; /* a receive cannot be cancelled */
  bool finalized;
} fake_mpi_control;

/* In the environment of a rank: the shared memory of the world (fake_mpi_world_bytes long), its place in it. */
#define FAKE_MPI_WORLD "EVENSTEP_FAKE_MPI_WORLD"
#define FAKE_MPI_RANK "EVENSTEP_FAKE_MPI_RANK"
#define FAKE_MPI_RANKS "EVENSTEP_FAKE_MPI_RANKS"

#define FAKE_MPI_RING_BYTES ((size_t)64 << 10)
#define FAKE_MPI_WORLD_BYTES (FAKE_MPI_MOST_RANKS * FAKE_MPI_MOST_RANKS * (FAKE_MPI_RING_BYTES + 128))

#endif
