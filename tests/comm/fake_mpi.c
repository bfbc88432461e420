/* A made-up MPI (fake_mpi.h): the library itself, its world and its communicators. What moves is in
 * fake_mpi_transfers.c. */
#include "comm/fake_mpi_kinds.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define KEY 17

fake_mpi_control fake_mpi;
fake_mpi_place fake_mpi_own = {.ranks = 1};

static comm comms[COMMS]; /* 0: world, 1: self */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int inside;
static bool running;
static int given;
static int (*forget)(handle, int, void *, void *);
static bool watched;

/* ---- what differs by kind ---- */

#if defined(FAKE_NUMBERS)
static handle handle_of_comm(int number) {
  return number < 2 ? 0x44000000 + number : (int)(0x84000000u + (unsigned)number);
}
#elif defined(FAKE_STANDARD)
static handle handle_of_comm(int number) {
  return number < 2 ? (void *)(uintptr_t)(0x101 + number) : (void *)&comms[number];
}
int MPI_Abi_get_version(int *major, int *minor);
int MPI_Abi_get_version(int *major, int *minor) {
  *major = 1;
  *minor = 0;
  return 0;
}
#else
char ompi_mpi_comm_world[8], ompi_mpi_comm_self[8], ompi_mpi_byte[8], ompi_mpi_errors_return[8], ompi_request_null[8];
static handle handle_of_comm(int number) {
  return number == 0 ? ompi_mpi_comm_world : number == 1 ? ompi_mpi_comm_self : (void *)&comms[number];
}
/* As a library does that knows the call but has another ABI. */
int MPI_Abi_get_version(int *major, int *minor);
int MPI_Abi_get_version(int *major, int *minor) {
  *major = -1;
  *minor = -1;
  return 0;
}
#endif

/* ---- the world ---- */

void fake_mpi_misused(const char *call, const char *why) {
  (void)fprintf(stderr, "the made-up MPI: %s: %s\n", call, why);
  abort();
}

bool fake_mpi_enter_transfer(const char *call, int tag) {
  if (atomic_fetch_add(&inside, 1) > 0 && given == SERIALIZED) {
    fake_mpi_misused(call, "two threads are in MPI, which gave MPI_THREAD_SERIALIZED");
  }
  (void)pthread_mutex_lock(&lock);
  if (!running && strcmp(call, "MPI_Init_thread") != 0) {
    fake_mpi_misused(call, fake_mpi.finalized ? "after MPI_Finalize" : "before MPI_Init");
  }
  const char *wanted = fake_mpi.fails;
  bool fails = wanted != NULL && strcmp(wanted, call) == 0 && tag >= fake_mpi.fails_from_tag;
  if (fails) {
    fake_mpi.fails = NULL;
  }
  return fails;
}

bool fake_mpi_enter(const char *call) {
  return fake_mpi_enter_transfer(call, INT_MAX);
}

int fake_mpi_leave(int code) {
  (void)pthread_mutex_unlock(&lock);
  (void)atomic_fetch_sub(&inside, 1);
  return code;
}

comm *fake_mpi_comm_of(const char *call, handle at) {
  for (int number = 0; number < COMMS; number++) {
    if (comms[number].used && at == handle_of_comm(number)) {
      return &comms[number];
    }
  }
  fake_mpi_misused(call, "this is no communicator");
  return NULL;
}

bool fake_mpi_is_world(handle at) {
  return at == handle_of_comm(0);
}

static void join_world(void) {
  fake_mpi_place *own = &fake_mpi_own;
  const char *fd = getenv(FAKE_MPI_WORLD);
  if (fd == NULL) {
    own->memory = calloc(1, FAKE_MPI_WORLD_BYTES);
  } else {
    own->rank = atoi(getenv(FAKE_MPI_RANK));
    own->ranks = atoi(getenv(FAKE_MPI_RANKS));
    void *memory = mmap(NULL, FAKE_MPI_WORLD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(fd), 0);
    own->memory = memory == MAP_FAILED ? NULL : memory;
  }
  if (own->memory == NULL || own->ranks > FAKE_MPI_MOST_RANKS) {
    fake_mpi_misused("MPI_Init_thread", "no memory for the world");
  }
  comms[0] = (comm){.used = true, .context = 1, .ranks = own->ranks, .own = own->rank};
  comms[1] = (comm){.used = true, .context = 2, .ranks = 1, .members = {own->rank}};
  for (int other = 0; other < own->ranks; other++) {
    comms[0].members[other] = other;
  }
}

/* ---- MPI ---- */

int MPI_Init_thread(int *argc, char ***argv, int wanted, int *out);
int MPI_Init_thread(int *argc, char ***argv, int wanted, int *out) {
  (void)argc;
  (void)argv;
  if (fake_mpi_enter("MPI_Init_thread")) {
    return fake_mpi_leave(FAILED);
  }
  if (running || fake_mpi.finalized) {
    fake_mpi_misused("MPI_Init_thread", "a second time");
  }
  running = true;
  join_world();
  *out = fake_mpi.threads == 0 ? wanted : fake_mpi.threads == 2 ? SERIALIZED : 1;
  given = *out;
  return fake_mpi_leave(0);
}

int MPI_Query_thread(int *out);
int MPI_Query_thread(int *out) {
  bool fails = fake_mpi_enter("MPI_Query_thread");
  *out = given;
  return fake_mpi_leave(fails ? FAILED : 0);
}

int MPI_Initialized(int *flag);
int MPI_Initialized(int *flag) {
  *flag = running || fake_mpi.finalized;
  return fake_mpi.fails != NULL && strcmp(fake_mpi.fails, "MPI_Initialized") == 0 ? FAILED : 0;
}

int MPI_Finalized(int *flag);
int MPI_Finalized(int *flag) {
  *flag = fake_mpi.finalized;
  return 0;
}

int MPI_Finalize(void);
int MPI_Finalize(void) {
  if (watched) {
    watched = false;
    (void)forget(handle_of_comm(1), KEY, NULL, NULL);
  }
  (void)fake_mpi_enter("MPI_Finalize");
  running = false;
  fake_mpi.finalized = true;
  return fake_mpi_leave(0);
}

int MPI_Get_library_version(char *text, int *length);
int MPI_Get_library_version(char *text, int *length) {
  *length = snprintf(text, 8192, "%s", fake_mpi.version == NULL ? DEFAULT_VERSION : fake_mpi.version);
  return fake_mpi.fails != NULL && strcmp(fake_mpi.fails, "MPI_Get_library_version") == 0 ? FAILED : 0;
}

int MPI_Error_string(int code, char *text, int *length);
int MPI_Error_string(int code, char *text, int *length) {
  *length = snprintf(text, 256, "made-up error %d", code);
  return 0;
}

int MPI_Comm_rank(handle at, int *out);
int MPI_Comm_rank(handle at, int *out) {
  bool fails = fake_mpi_enter("MPI_Comm_rank");
  *out = fake_mpi_comm_of("MPI_Comm_rank", at)->own;
  return fake_mpi_leave(fails ? FAILED : 0);
}

int MPI_Comm_size(handle at, int *out);
int MPI_Comm_size(handle at, int *out) {
  bool fails = fake_mpi_enter("MPI_Comm_size");
  *out = fake_mpi_comm_of("MPI_Comm_size", at)->ranks;
  return fake_mpi_leave(fails ? FAILED : 0);
}

/* A group is a communicator's number. */
int MPI_Comm_group(handle at, handle *out);
int MPI_Comm_group(handle at, handle *out) {
  bool fails = fake_mpi_enter("MPI_Comm_group");
  *out = at;
  return fake_mpi_leave(fails ? FAILED : 0);
}

static int chosen[FAKE_MPI_MOST_RANKS];
static int chosen_count;

int MPI_Group_incl(handle from, int count, const int *of, handle *out);
int MPI_Group_incl(handle from, int count, const int *of, handle *out) {
  bool fails = fake_mpi_enter("MPI_Group_incl");
  chosen_count = count;
  memcpy(chosen, of, (size_t)count * sizeof *of);
  *out = from;
  return fake_mpi_leave(fails ? FAILED : 0);
}

int MPI_Group_free(handle *at);
int MPI_Group_free(handle *at) {
  bool fails = fake_mpi_enter("MPI_Group_free");
  (void)at;
  return fake_mpi_leave(fails ? FAILED : 0);
}

int MPI_Comm_create_group(handle from, handle group, int tag, handle *out);
int MPI_Comm_create_group(handle from, handle group, int tag, handle *out) {
  int number = 2;
  uint32_t context = 2166136261u + (uint32_t)tag;
  (void)group;
  bool fails = fake_mpi_enter("MPI_Comm_create_group");
  (void)fake_mpi_comm_of("MPI_Comm_create_group", from);
  while (comms[number].used) {
    number++;
  }
  if (fails) {
    return fake_mpi_leave(FAILED);
  }
  comms[number] = (comm){.used = true, .ranks = chosen_count, .own = -1};
  for (int i = 0; i < chosen_count; i++) {
    comms[number].members[i] = chosen[i];
    comms[number].own = chosen[i] == fake_mpi_own.rank ? i : comms[number].own;
    context = (context ^ (uint32_t)chosen[i]) * 16777619u;
  }
  comms[number].context = context | 0x80000000u;
  *out = handle_of_comm(number);
  fake_mpi.communicators++;
  return fake_mpi_leave(0);
}

int MPI_Comm_free(handle *at);
int MPI_Comm_free(handle *at) {
  bool fails = fake_mpi_enter("MPI_Comm_free");
  comm *freed = fake_mpi_comm_of("MPI_Comm_free", *at);
  if (fake_mpi_has_unreceived(freed->context)) {
    fake_mpi_misused("MPI_Comm_free", "a message in it has not been received");
  }
  freed->used = false;
  fake_mpi.communicators--;
  return fake_mpi_leave(fails ? FAILED : 0);
}

int MPI_Comm_set_errhandler(handle at, handle handler);
int MPI_Comm_set_errhandler(handle at, handle handler) {
  bool fails = fake_mpi_enter("MPI_Comm_set_errhandler");
  (void)fake_mpi_comm_of("MPI_Comm_set_errhandler", at);
  if (handler != ERRORS_RETURN) {
    fake_mpi_misused("MPI_Comm_set_errhandler", "this is not MPI_ERRORS_RETURN");
  }
  return fake_mpi_leave(fails ? FAILED : 0);
}

int MPI_Comm_get_attr(handle at, int key, void *out, int *found);
int MPI_Comm_get_attr(handle at, int key, void *out, int *found) {
  static int largest;
  bool fails = fake_mpi_enter("MPI_Comm_get_attr");
  (void)fake_mpi_comm_of("MPI_Comm_get_attr", at);
  largest = fake_mpi.largest_tag == 0 ? 32767 : fake_mpi.largest_tag;
  *found = key == LARGEST_TAG_KEY;
  *(void **)out = &largest;
  return fake_mpi_leave(fails ? FAILED : 0);
}

int MPI_Comm_create_keyval(int (*copy)(handle, int, void *, void *, void *, int *),
                           int (*forgets)(handle, int, void *, void *), int *key, void *extra);
int MPI_Comm_create_keyval(int (*copy)(handle, int, void *, void *, void *, int *),
                           int (*forgets)(handle, int, void *, void *), int *key, void *extra) {
  int copied = 1;
  bool fails = fake_mpi_enter("MPI_Comm_create_keyval");
  forget = forgets;
  *key = KEY;
  if (copy(handle_of_comm(1), KEY, extra, NULL, NULL, &copied) != 0 || copied != 0) {
    fake_mpi_misused("MPI_Comm_create_keyval", "the attribute would be copied");
  }
  return fake_mpi_leave(fails ? FAILED : 0);
}

int MPI_Comm_set_attr(handle at, int key, void *value);
int MPI_Comm_set_attr(handle at, int key, void *value) {
  bool fails = fake_mpi_enter("MPI_Comm_set_attr");
  (void)value;
  if (at != handle_of_comm(1) || key != KEY) {
    fake_mpi_misused("MPI_Comm_set_attr", "this is not MPI_COMM_SELF");
  }
  watched = !fails;
  return fake_mpi_leave(fails ? FAILED : 0);
}
