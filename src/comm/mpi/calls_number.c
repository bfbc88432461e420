/* MPICH's handles, and its kin's. */
#define HANDLE int
#define MEMBER number
#define CALLS even_mpi_calls_of_numbers
#include "comm/mpi/calls_body.h"
