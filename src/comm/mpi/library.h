/* The part of MPI's C interface that the engine uses, opened at run time. Libraries differ in what a handle is: Open
 * MPI hands out addresses (and has those of its constants in symbols), MPICH and its kin (Intel MPI, MVAPICH, Cray)
 * numbers, MPI 5's standard ABI small numbers in the place of addresses. All that differs is here and in calls_body.h.
 */
#ifndef EVEN_COMM_MPI_LIBRARY_H
#define EVEN_COMM_MPI_LIBRARY_H

#include <evenstep/status.h>
#include <stdbool.h>

/* A communicator, a group, a request, a data type or an error handler. */
typedef union even_mpi_handle {
  int number;
  void *address;
} even_mpi_handle;

typedef struct even_mpi even_mpi;

/* The calls with handles in them, for one kind of handle; they return MPI's codes (0: done). */
typedef struct even_mpi_calls {
  int (*comm_rank)(const even_mpi *mpi, even_mpi_handle comm, int *rank);
  int (*comm_size)(const even_mpi *mpi, even_mpi_handle comm, int *ranks);
  /* A communicator of these ranks of MPI_COMM_WORLD alone, whose errors are returned. Collective over them. */
  int (*comm_create)(const even_mpi *mpi, const int *world_ranks, int ranks, int tag, even_mpi_handle *comm);
  int (*comm_free)(const even_mpi *mpi, even_mpi_handle *comm);
  /* Lets MPI_COMM_WORLD return errors instead of ending the job. */
  int (*world_returns_errors)(const even_mpi *mpi);
  int (*largest_tag)(const even_mpi *mpi, int *tag);
  /* Calls even_mpi_on_finalize when MPI is finalized, before anything of it is gone. */
  int (*watch_finalize)(const even_mpi *mpi);
  int (*send)(const even_mpi *mpi, const void *data, int bytes, int to, int tag, even_mpi_handle comm,
              even_mpi_handle *request);
  int (*receive)(const even_mpi *mpi, void *data, int bytes, int from, int tag, even_mpi_handle comm,
                 even_mpi_handle *request);
  /* all = `bytes` bytes of each rank of MPI_COMM_WORLD */
  int (*gather)(const even_mpi *mpi, const void *mine, int bytes, void *all, even_mpi_handle *request);
  int (*test)(const even_mpi *mpi, even_mpi_handle *request, int *done);
  int (*cancel)(const even_mpi *mpi, even_mpi_handle *request);
} even_mpi_calls;

/* What MPI declares, with `handle` for each kind of handle. */
#define EVEN_MPI_FUNCTIONS(handle)                                                                                 \
  struct {                                                                                                         \
    int (*comm_rank)(handle comm, int *rank);                                                                      \
    int (*comm_size)(handle comm, int *size);                                                                      \
    int (*comm_group)(handle comm, handle *group);                                                                 \
    int (*group_incl)(handle group, int count, const int *ranks, handle *out);                                     \
    int (*group_free)(handle * group);                                                                             \
    int (*comm_create_group)(handle comm, handle group, int tag, handle *out);                                     \
    int (*comm_free)(handle * comm);                                                                               \
    int (*comm_set_errhandler)(handle comm, handle errhandler);                                                    \
    int (*comm_get_attr)(handle comm, int key, void *value, int *found);                                           \
    int (*comm_set_attr)(handle comm, int key, void *value);                                                       \
    int (*comm_create_keyval)(int (*copy)(handle, int, void *, void *, void *, int *),                             \
                              int (*forget)(handle, int, void *, void *), int *key, void *extra);                  \
    int (*isend)(const void *data, int count, handle type, int to, int tag, handle comm, handle *request);         \
    int (*irecv)(void *data, int count, handle type, int from, int tag, handle comm, handle *request);             \
    int (*iallgather)(const void *mine, int count, handle type, void *all, int each, handle all_type, handle comm, \
                      handle *request);                                                                            \
    int (*test)(handle * request, int *done, void *status);                                                        \
    int (*cancel)(handle * request);                                                                               \
  }

typedef union even_mpi_functions {
  EVEN_MPI_FUNCTIONS(int) number;
  EVEN_MPI_FUNCTIONS(void *) address;
} even_mpi_functions;

struct even_mpi {
  const char *family; /* "Open MPI", "MPICH" (and its kin), "MPI's standard ABI" */
  char version[96];   /* the library's own words */
  const even_mpi_calls *calls;
  even_mpi_functions of;
  int (*init_thread)(int *argc, char ***argv, int wanted, int *given);
  int (*initialized)(int *flag);
  int (*finalized)(int *flag);
  int (*finalize)(void);
  int (*query_thread)(int *given);
  int (*error_string)(int code, char *text, int *length);
  int (*get_library_version)(char *text, int *length);
  even_mpi_handle world;
  even_mpi_handle self;
  even_mpi_handle byte;
  even_mpi_handle errors_return;
  int any_source;
  int largest_tag_key;
  int one_thread_at_a_time; /* MPI_THREAD_SERIALIZED */
  int any_thread;           /* MPI_THREAD_MULTIPLE */
  void *no_status;
};

/* calls_number.c, calls_address.c */
extern const even_mpi_calls even_mpi_calls_of_numbers;
extern const even_mpi_calls even_mpi_calls_of_addresses;

/* Opens a library (NULL: one that the process has, else the first of the usual names) once for the process and never
 * closes it. Starts nothing. EVEN_ERR_NOT_FOUND with the way to get one, EVEN_ERR_UNSUPPORTED where it is none or too
 * old (MPI 3 is needed), EVEN_ERR_STATE where another one is open. */
even_status even_mpi_library_get(const char *name, const even_mpi **out) EVEN_MUST_USE;

/* process.c, from a thread of whoever finalizes MPI. */
void even_mpi_on_finalize(void);

#endif
