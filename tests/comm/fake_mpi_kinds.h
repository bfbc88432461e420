/* What the files of the made-up MPI (fake_mpi.h) share: handles of its three kinds, communicators, how a call is
 * entered and left. */
#ifndef EVEN_TEST_FAKE_MPI_KINDS_H
#define EVEN_TEST_FAKE_MPI_KINDS_H

#include "comm/fake_mpi.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#define FAILED 15
#define COMMS 64

typedef struct comm {
  bool used;
  uint32_t context;
  int ranks;
  int own;
  int members[FAKE_MPI_MOST_RANKS]; /* in the world */
} comm;

#ifdef FAKE_NUMBERS
typedef int handle;
#define ANY_SOURCE (-2)
#define LARGEST_TAG_KEY 0x64400001
#define BYTE 0x4c00010d
#define ERRORS_RETURN 0x54000001
#define NO_STATUS ((void *)1)
#define NO_REQUEST 0x2c000000
#define SERIALIZED 2
#define DEFAULT_VERSION "MPICH Version:      4.3.1 (made up)\nMPICH Release date: none"
#else
typedef void *handle;
#define ANY_SOURCE (-1)
#define NO_STATUS NULL
#ifdef FAKE_STANDARD
#define LARGEST_TAG_KEY 501
#define BYTE ((void *)0x247)
#define ERRORS_RETURN ((void *)0x143)
#define NO_REQUEST ((void *)0x180)
#define SERIALIZED 2048
#define DEFAULT_VERSION "Made-up MPI 5.0, of the standard ABI"
#else
#define LARGEST_TAG_KEY 0
#define BYTE ((void *)ompi_mpi_byte)
#define ERRORS_RETURN ((void *)ompi_mpi_errors_return)
#define NO_REQUEST ((void *)ompi_request_null)
#define SERIALIZED 2
#define DEFAULT_VERSION "Open MPI v5.0.9 (made up), package: none"
extern char ompi_mpi_comm_world[8], ompi_mpi_comm_self[8], ompi_mpi_byte[8], ompi_mpi_errors_return[8],
    ompi_request_null[8];
#endif
#endif

extern fake_mpi_control fake_mpi;

#pragma GCC visibility push(hidden)

/* ---- fake_mpi.c ---- */

typedef struct fake_mpi_place {
  int rank; /* in the world */
  int ranks;
  void *memory; /* of the world: FAKE_MPI_WORLD_BYTES, zeroed before the first rank came */
} fake_mpi_place;
extern fake_mpi_place fake_mpi_own;

/* Ends the process: MPI must not be called so. */
void fake_mpi_misused(const char *call, const char *why);
/* Enters a call, which holds the lock until it is left; whether it is to fail. `tag` is a transfer's. */
bool fake_mpi_enter(const char *call);
bool fake_mpi_enter_transfer(const char *call, int tag);
int fake_mpi_leave(int code); /* returns `code` */
comm *fake_mpi_comm_of(const char *call, handle at);
bool fake_mpi_is_world(handle at);

/* ---- fake_mpi_transfers.c ---- */

/* Whether a message of this context is there that nobody has received. */
bool fake_mpi_has_unreceived(uint32_t context);

#pragma GCC visibility pop

#endif
