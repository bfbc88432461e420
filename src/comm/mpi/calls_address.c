/* Open MPI's handles, and those of MPI's standard ABI. */
#define HANDLE void *
#define MEMBER address
#define CALLS even_mpi_calls_of_addresses
#include "comm/mpi/calls_body.h"
