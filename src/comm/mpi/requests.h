/* The transfers of a group over MPI: one request of MPI for each piece of what is moved. With the group's lock held. */
#ifndef EVEN_COMM_MPI_REQUESTS_H
#define EVEN_COMM_MPI_REQUESTS_H

#include "comm/mpi/library.h"

#include <stddef.h>

/* What one call of MPI moves; its counts are ints. */
#define EVEN_MPI_PIECE_BYTES ((size_t)1 << 30)

typedef struct even_mpi_request {
  struct even_mpi_request *next;  /* of those that are free */
  struct even_mpi_request *older; /* of those that are not of the reserve */
  size_t room;                    /* pieces that it may have */
  size_t count;
  size_t done; /* the first pieces, in order */
  bool receives;
  even_mpi_handle *pieces;
  even_mpi_handle only;
} even_mpi_request;

typedef struct even_mpi_requests {
  even_mpi_request *reserve; /* so many are there without asking for memory */
  even_mpi_request *newest;
  even_mpi_request *free;
  size_t open; /* taken and not given back */
} even_mpi_requests;

/* How many bytes of a transfer are in its piece `number`, of as many pieces as even_mpi_requests_take counts; *begin:
 * where that begins. */
int even_mpi_piece(size_t bytes, size_t number, size_t *begin);
even_status even_mpi_requests_reserve(even_mpi_requests *requests, size_t count) EVEN_MUST_USE;
/* For a transfer of so many bytes; NULL without memory. */
even_mpi_request *even_mpi_requests_take(even_mpi_requests *requests, size_t bytes);
void even_mpi_requests_give_back(even_mpi_requests *requests, even_mpi_request *request);
void even_mpi_requests_free(even_mpi_requests *requests);

#endif
