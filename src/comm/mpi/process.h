/* MPI in this process: started once, by whoever comes first, and left in order. */
#ifndef EVEN_COMM_MPI_PROCESS_H
#define EVEN_COMM_MPI_PROCESS_H

#include "comm/mpi/library.h"
#include "comm/ucx/group.h"

typedef struct even_mpi_process {
  const even_mpi *mpi;
  int rank; /* in MPI_COMM_WORLD */
  int ranks;
  int largest_tag;
  bool serial; /* MPI wants its calls one at a time */
} even_mpi_process;

/* Starts MPI where nobody has, with MPI_THREAD_MULTIPLE, and has it finalized when the process exits. Waits, without a
 * limit of ours, for all processes of the job to start it. EVEN_ERR_UNSUPPORTED where somebody started it for one
 * thread alone, EVEN_ERR_STATE after its end and in a child of a fork. */
even_status even_mpi_start(const char *library, const even_mpi_process **out) EVEN_MUST_USE;

/* transport.c */
extern const even_transport even_mpi_transport;

/* Around calls of MPI that may meet those of other threads. */
void even_mpi_enter(void);
void even_mpi_leave(void);

/* "what (MPI's words for the code)" as the calling thread's error. */
even_status even_mpi_fail(const char *what, int code) EVEN_MUST_USE;
/* MPI's words for a code, cut to fit. */
void even_mpi_words(int code, char *text, size_t bytes);

/* The groups that MPI's end takes the transport from. */
void even_mpi_group_add(even_ucx_group *group);
void even_mpi_group_remove(even_ucx_group *group);
/* A group has failed: the others may not come to MPI_Finalize. */
void even_mpi_has_failed(void);

/* all = `bytes` bytes of each rank of MPI_COMM_WORLD, within the limit. */
even_status even_mpi_gather(const even_mpi_process *process, const void *mine, size_t bytes, void *all,
                            uint64_t limit_ns) EVEN_MUST_USE;

#endif
