/* even_mpi_calls for one kind of handle, compiled for each: HANDLE is MPI's type, MEMBER its place in our union. */
#include "comm/mpi/library.h"

#include <stddef.h>

#define OF(mpi) ((mpi)->of.MEMBER)

static int comm_rank(const even_mpi *mpi, even_mpi_handle comm, int *rank) {
  return OF(mpi).comm_rank(comm.MEMBER, rank);
}

static int comm_size(const even_mpi *mpi, even_mpi_handle comm, int *ranks) {
  return OF(mpi).comm_size(comm.MEMBER, ranks);
}

static int comm_create(const even_mpi *mpi, const int *world_ranks, int ranks, int tag, even_mpi_handle *comm) {
  HANDLE world_group;
  HANDLE group;
  int code = OF(mpi).comm_group(mpi->world.MEMBER, &world_group);
  if (code != 0) {
    return code;
  }
  code = OF(mpi).group_incl(world_group, ranks, world_ranks, &group);
  if (code == 0) {
    code = OF(mpi).comm_create_group(mpi->world.MEMBER, group, tag, &comm->MEMBER);
    (void)OF(mpi).group_free(&group);
  }
  (void)OF(mpi).group_free(&world_group);
  return code != 0 ? code : OF(mpi).comm_set_errhandler(comm->MEMBER, mpi->errors_return.MEMBER);
}

static int comm_free(const even_mpi *mpi, even_mpi_handle *comm) {
  return OF(mpi).comm_free(&comm->MEMBER);
}

static int world_returns_errors(const even_mpi *mpi) {
  return OF(mpi).comm_set_errhandler(mpi->world.MEMBER, mpi->errors_return.MEMBER);
}

static int largest_tag(const even_mpi *mpi, int *tag) {
  int *value = NULL;
  int found = 0;
  int code = OF(mpi).comm_get_attr(mpi->world.MEMBER, mpi->largest_tag_key, (void *)&value, &found);
  *tag = code == 0 && found != 0 && value != NULL ? *value : 32767; /* the least that MPI allows */
  return code;
}

static int copy_nothing(HANDLE comm, int key, void *extra, void *value, void *out, int *copied) {
  (void)comm;
  (void)key;
  (void)extra;
  (void)value;
  (void)out;
  *copied = 0;
  return 0;
}

static int forget(HANDLE comm, int key, void *value, void *extra) {
  (void)comm;
  (void)key;
  (void)value;
  (void)extra;
  even_mpi_on_finalize();
  return 0;
}

/* MPI_Finalize begins with freeing MPI_COMM_SELF and so with forgetting its attributes. */
static int watch_finalize(const even_mpi *mpi) {
  int key = 0;
  int code = OF(mpi).comm_create_keyval(copy_nothing, forget, &key, NULL);
  return code != 0 ? code : OF(mpi).comm_set_attr(mpi->self.MEMBER, key, NULL);
}

static int send(const even_mpi *mpi, const void *data, int bytes, int to, int tag, even_mpi_handle comm,
                even_mpi_handle *request) {
  return OF(mpi).isend(data, bytes, mpi->byte.MEMBER, to, tag, comm.MEMBER, &request->MEMBER);
}

static int receive(const even_mpi *mpi, void *data, int bytes, int from, int tag, even_mpi_handle comm,
                   even_mpi_handle *request) {
  return OF(mpi).irecv(data, bytes, mpi->byte.MEMBER, from, tag, comm.MEMBER, &request->MEMBER);
}

static int gather(const even_mpi *mpi, const void *mine, int bytes, void *all, even_mpi_handle *request) {
  return OF(mpi).iallgather(mine, bytes, mpi->byte.MEMBER, all, bytes, mpi->byte.MEMBER, mpi->world.MEMBER,
                            &request->MEMBER);
}

static int test(const even_mpi *mpi, even_mpi_handle *request, int *done) {
  return OF(mpi).test(&request->MEMBER, done, mpi->no_status);
}

static int cancel(const even_mpi *mpi, even_mpi_handle *request) {
  return OF(mpi).cancel(&request->MEMBER);
}

const even_mpi_calls CALLS = {
    .comm_rank = comm_rank,
    .comm_size = comm_size,
    .comm_create = comm_create,
    .comm_free = comm_free,
    .world_returns_errors = world_returns_errors,
    .largest_tag = largest_tag,
    .watch_finalize = watch_finalize,
    .send = send,
    .receive = receive,
    .gather = gather,
    .test = test,
    .cancel = cancel,
};
