/* The transfers of a group over MPI. */
#include "comm/mpi/requests.h"

#include "base/alloc.h"
#include "base/fail.h"

int even_mpi_piece(size_t bytes, size_t number, size_t *begin) {
  *begin = number * EVEN_MPI_PIECE_BYTES;
  return (int)(bytes - *begin < EVEN_MPI_PIECE_BYTES ? bytes - *begin : EVEN_MPI_PIECE_BYTES);
}

even_status even_mpi_requests_reserve(even_mpi_requests *requests, size_t count) {
  EVEN_TRY(EVEN_NEW_ARRAY(&requests->reserve, count));
  for (size_t i = 0; i < count; i++) {
    even_mpi_request *request = &requests->reserve[i];
    request->room = 1;
    request->pieces = &request->only;
    request->next = requests->free;
    requests->free = request;
  }
  return EVEN_OK;
}

static even_mpi_request *make(even_mpi_requests *requests, size_t count) {
  even_mpi_request *request = NULL;
  if (EVEN_NEW(&request) != EVEN_OK || EVEN_NEW_ARRAY(&request->pieces, count) != EVEN_OK) {
    even_free(request);
    return NULL;
  }
  request->room = count;
  request->older = requests->newest;
  requests->newest = request;
  return request;
}

even_mpi_request *even_mpi_requests_take(even_mpi_requests *requests, size_t bytes) {
  size_t count = bytes <= EVEN_MPI_PIECE_BYTES ? 1 : (bytes - 1) / EVEN_MPI_PIECE_BYTES + 1;
  even_mpi_request **at = &requests->free;
  while (*at != NULL && (*at)->room < count) {
    at = &(*at)->next;
  }
  even_mpi_request *request = *at;
  if (request != NULL) {
    *at = request->next;
  } else {
    request = make(requests, count);
  }
  if (request != NULL) {
    request->count = count;
    request->done = 0;
    requests->open++;
  }
  return request;
}

void even_mpi_requests_give_back(even_mpi_requests *requests, even_mpi_request *request) {
  requests->open--;
  request->next = requests->free;
  requests->free = request;
}

void even_mpi_requests_free(even_mpi_requests *requests) {
  while (requests->newest != NULL) {
    even_mpi_request *request = requests->newest;
    requests->newest = request->older;
    even_free(request->pieces);
    even_free(request);
  }
  even_free(requests->reserve);
}
