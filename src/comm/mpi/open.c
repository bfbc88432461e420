/* Opening a group over MPI. */
#include "base/fail.h"
#include "base/params.h"
#include "comm/mpi/process.h"

typedef struct world {
  const even_mpi_process *process;
  uint64_t limit_ns;
} world;

static even_status gather_in_world(void *context, const void *mine, size_t bytes, void *all) {
  const world *of = context;
  return even_mpi_gather(of->process, mine, bytes, all, of->limit_ns);
}

/* Without a gather of the caller's: the group is all of the MPI job, which meets through MPI. */
static even_status open_world(const even_comm_params *params, const even_comm_network *network, even_comm **out) {
  even_comm_network over = *network;
  world of = {.limit_ns = even_comm_limit_ns(params->timeout_seconds)};
  EVEN_TRY(even_mpi_start(network->library, &of.process));
  if (params->rank != of.process->rank || params->ranks != of.process->ranks) {
    (void)even_fail(EVEN_ERR_ARGUMENT, "rank %d of %d is asked for; to %s this is process %d of %d", params->rank,
                    params->ranks, of.process->mpi->version, of.process->rank, of.process->ranks);
    return even_error_fix(
        "start the ranks with the mpirun that belongs to this library, or name that mpirun's library "
        "(EVENSTEP_MPI_LIBRARY)");
  }
  over.gather = gather_in_world;
  over.context = &of;
  return even_ucx_open(params, &over, &even_mpi_transport, out);
}

even_status even_comm_open_mpi(const even_comm_params *params, const even_comm_network *network, even_comm **out) {
  even_comm_params own;
  even_comm_network over;
  *out = NULL;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_comm_params, &own, params));
  EVEN_TRY(EVEN_TAKE_PARAMS(even_comm_network, &over, network));
  EVEN_TRY(EVEN_CHECK_RESERVED(even_comm_network, &over));
  if (over.interfaces != NULL) {
    (void)even_fail(EVEN_ERR_ARGUMENT, "interfaces are given (%s), but MPI chooses its own", over.interfaces);
    return even_error_fix("tell MPI: Open MPI has OMPI_MCA_btl_tcp_if_include, MPICH what its network library reads");
  }
  return over.gather == NULL ? open_world(&own, &over, out) : even_ucx_open(&own, &over, &even_mpi_transport, out);
}

even_status even_comm_mpi_place(const char *library, int *rank, int *ranks) {
  const even_mpi_process *process = NULL;
  EVEN_TRY(even_mpi_start(library, &process));
  *rank = process->rank;
  *ranks = process->ranks;
  return EVEN_OK;
}
