/* A made-up MPI (fake_mpi.h): each pair of ranks has a ring of bytes in shared memory; messages go through it piece by
 * piece while both ends ask for the state of requests, as large ones do in real libraries. */
#include "comm/fake_mpi.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MOST FAKE_MPI_MOST_RANKS
#define FAILED 15
#define TRUNCATED 14
#define COMMS 64
#define KEY 17

/* ---- three kinds of handles ---- */

typedef struct comm {
  bool used;
  uint32_t context;
  int ranks;
  int own;
  int members[MOST]; /* in the world */
} comm;

typedef struct request {
  struct request *next;
  bool sends;
  bool done;
  int error;
  uint32_t context;
  int peer; /* in the world; -1: any of comm */
  int tag;
  unsigned char *data;
  uint64_t bytes;
  uint64_t sent; /* with the words before it */
  int slot;
  struct request **parts; /* of a gather */
  size_t part_count;
} request;

static comm comms[COMMS]; /* 0: world, 1: self */
static request **slots;
static int slot_count;

#ifdef FAKE_NUMBERS
typedef int handle;
#define ANY_SOURCE (-2)
#define LARGEST_TAG_KEY 0x64400001
#define BYTE 0x4c00010d
#define ERRORS_RETURN 0x54000001
#define NO_STATUS ((void *)1)
#define NO_REQUEST 0x2c000000
#define SERIALIZED 2
#define MULTIPLE 3
static const char *const default_version = "MPICH Version:      4.3.1 (made up)\nMPICH Release date: none";
static handle handle_of_comm(int number) {
  return number < 2 ? 0x44000000 + number : (int)(0x84000000u + (unsigned)number);
}
static handle handle_of_slot(int slot) {
  return (int)(0x98000000u + (unsigned)slot);
}
static int slot_of(handle at) {
  return (int)((unsigned)at - 0x98000000u);
}
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
#define MULTIPLE 4096
static const char *const default_version = "Made-up MPI 5.0, of the standard ABI";
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
#define LARGEST_TAG_KEY 0
#define BYTE ((void *)ompi_mpi_byte)
#define ERRORS_RETURN ((void *)ompi_mpi_errors_return)
#define NO_REQUEST ((void *)ompi_request_null)
#define SERIALIZED 2
#define MULTIPLE 3
extern char ompi_mpi_comm_world[8], ompi_mpi_comm_self[8], ompi_mpi_byte[8], ompi_mpi_errors_return[8],
    ompi_request_null[8];
char ompi_mpi_comm_world[8], ompi_mpi_comm_self[8], ompi_mpi_byte[8], ompi_mpi_errors_return[8], ompi_request_null[8];
static const char *const default_version = "Open MPI v5.0.9 (made up), package: none";
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
static handle handle_of_slot(int slot) {
  return slots[slot];
}
static int slot_of(handle at) {
  return ((const request *)at)->slot;
}
#endif

extern fake_mpi_control fake_mpi;
fake_mpi_control fake_mpi;

/* ---- the world ---- */

typedef struct ring {
  _Alignas(64) _Atomic uint64_t head; /* bytes written */
  _Alignas(64) _Atomic uint64_t tail; /* bytes read */
  unsigned char bytes[FAKE_MPI_RING_BYTES];
} ring;

typedef struct words {
  uint32_t context;
  int32_t tag;
  uint64_t bytes;
} words;

typedef struct message {
  struct message *next;
  int from;
  words said;
  unsigned char *data;
  uint64_t got;
  request *taker;
} message;

typedef struct incoming {
  words said;
  size_t said_bytes;
  message *current;
} incoming;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int inside;
static int rank;
static int ranks = 1;
static ring (*rings)[MOST];
static bool running;
static int given;
static request *sending[MOST];
static request *posted;
static message *waiting; /* not taken, and those under way */
static incoming from_rank[MOST];
static uint64_t gathers;
static int (*forget)(handle, int, void *, void *);
static bool watched;

static void misused(const char *call, const char *why) {
  (void)fprintf(stderr, "the made-up MPI: %s: %s\n", call, why);
  abort();
}

/* Enters a call; `tag` is a transfer's. Whether it is to fail. */
static bool enter_transfer(const char *call, int tag) {
  if (atomic_fetch_add(&inside, 1) > 0 && given == SERIALIZED) {
    misused(call, "two threads are in MPI, which gave MPI_THREAD_SERIALIZED");
  }
  (void)pthread_mutex_lock(&lock);
  if (!running && strcmp(call, "MPI_Init_thread") != 0) {
    misused(call, fake_mpi.finalized ? "after MPI_Finalize" : "before MPI_Init");
  }
  const char *wanted = fake_mpi.fails;
  bool fails = wanted != NULL && strcmp(wanted, call) == 0 && tag >= fake_mpi.fails_from_tag;
  if (fails) {
    fake_mpi.fails = NULL;
  }
  return fails;
}

static bool enter(const char *call) {
  return enter_transfer(call, INT_MAX);
}

static int leave(int code) {
  (void)pthread_mutex_unlock(&lock);
  (void)atomic_fetch_sub(&inside, 1);
  return code;
}

static comm *comm_of(const char *call, handle at) {
  for (int number = 0; number < COMMS; number++) {
    if (comms[number].used && at == handle_of_comm(number)) {
      return &comms[number];
    }
  }
  misused(call, "this is no communicator");
  return NULL;
}

static void join_world(void) {
  const char *fd = getenv(FAKE_MPI_WORLD);
  if (fd == NULL) {
    rings = calloc(MOST, sizeof *rings);
  } else {
    rank = atoi(getenv(FAKE_MPI_RANK));
    ranks = atoi(getenv(FAKE_MPI_RANKS));
    void *memory = mmap(NULL, FAKE_MPI_WORLD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(fd), 0);
    rings = memory == MAP_FAILED ? NULL : memory;
  }
  if (rings == NULL || ranks > MOST) {
    misused("MPI_Init_thread", "no memory for the world");
  }
  comms[0] = (comm){.used = true, .context = 1, .ranks = ranks, .own = rank};
  comms[1] = (comm){.used = true, .context = 2, .ranks = 1, .members = {rank}};
  for (int other = 0; other < ranks; other++) {
    comms[0].members[other] = other;
  }
}

/* ---- moving ---- */

static size_t put(ring *to, const void *data, size_t bytes) {
  uint64_t head = atomic_load_explicit(&to->head, memory_order_relaxed);
  uint64_t room = FAKE_MPI_RING_BYTES - (head - atomic_load_explicit(&to->tail, memory_order_acquire));
  size_t count = bytes < room ? bytes : (size_t)room;
  for (size_t i = 0; i < count; i++) {
    to->bytes[(head + i) % FAKE_MPI_RING_BYTES] = ((const unsigned char *)data)[i];
  }
  atomic_store_explicit(&to->head, head + count, memory_order_release);
  return count;
}

static size_t get(ring *from, void *data, size_t bytes) {
  uint64_t tail = atomic_load_explicit(&from->tail, memory_order_relaxed);
  uint64_t there = atomic_load_explicit(&from->head, memory_order_acquire) - tail;
  size_t count = bytes < there ? bytes : (size_t)there;
  for (size_t i = 0; data != NULL && i < count; i++) {
    ((unsigned char *)data)[i] = from->bytes[(tail + i) % FAKE_MPI_RING_BYTES];
  }
  atomic_store_explicit(&from->tail, tail + count, memory_order_release);
  return count;
}

static void pump_sends(int to) {
  while (sending[to] != NULL) {
    request *send = sending[to];
    words said = {.context = send->context, .tag = send->tag, .bytes = send->bytes};
    if (send->sent < sizeof said) {
      send->sent += put(&rings[rank][to], (unsigned char *)&said + send->sent, sizeof said - send->sent);
    }
    if (send->sent >= sizeof said) {
      uint64_t at = send->sent - sizeof said;
      send->sent += put(&rings[rank][to], send->data + at, send->bytes - at);
    }
    if (send->sent < sizeof said + send->bytes) {
      return;
    }
    sending[to] = send->next;
    send->done = true;
  }
}

static bool fits(const request *wanted, const words *said, int from) {
  return wanted->context == said->context && wanted->tag == said->tag && (wanted->peer < 0 || wanted->peer == from);
}

/* Gives a message to a receive, with what has come of it. */
static void hand_over(message *to, request *taker) {
  to->taker = taker;
  if (to->said.bytes > taker->bytes) {
    taker->error = TRUNCATED;
  } else if (to->got > 0) {
    memcpy(taker->data, to->data, to->got);
  }
}

static void announce(int from, const words *said) {
  message *made = calloc(1, sizeof *made);
  message **end = &waiting;
  made->from = from;
  made->said = *said;
  made->data = malloc(said->bytes + 1);
  while (*end != NULL) {
    end = &(*end)->next;
  }
  *end = made;
  from_rank[from].current = made;
  for (request **at = &posted; *at != NULL; at = &(*at)->next) {
    if (fits(*at, said, from)) {
      request *taker = *at;
      *at = taker->next;
      hand_over(made, taker);
      return;
    }
  }
}

static void forget_message(message *done) {
  message **at = &waiting;
  while (*at != done) {
    at = &(*at)->next;
  }
  *at = done->next;
  free(done->data);
  free(done);
}

static void pump_receives(int from) {
  incoming *in = &from_rank[from];
  ring *source = &rings[from][rank];
  for (;;) {
    if (in->current == NULL) {
      in->said_bytes += get(source, (unsigned char *)&in->said + in->said_bytes, sizeof in->said - in->said_bytes);
      if (in->said_bytes < sizeof in->said) {
        return;
      }
      in->said_bytes = 0;
      announce(from, &in->said);
    }
    message *current = in->current;
    bool direct = current->taker != NULL && current->taker->error == 0;
    unsigned char *to = direct ? current->taker->data : current->data;
    current->got += get(source, to == NULL ? NULL : to + current->got, current->said.bytes - current->got);
    if (current->got < current->said.bytes) {
      return;
    }
    in->current = NULL;
    if (current->taker != NULL) {
      current->taker->done = true;
      forget_message(current);
    }
  }
}

static void pump(void) {
  for (int other = 0; other < ranks; other++) {
    pump_sends(other);
    pump_receives(other);
  }
}

static request *new_request(handle *out) {
  request *made = calloc(1, sizeof *made);
  int slot = 0;
  while (slot < slot_count && slots[slot] != NULL) {
    slot++;
  }
  if (slot == slot_count) {
    slots = realloc(slots, (size_t)(++slot_count) * sizeof(request *));
  }
  slots[slot] = made;
  made->slot = slot;
  *out = handle_of_slot(slot);
  return made;
}

static void begin_send(request *send) {
  request **end = &sending[send->peer];
  while (*end != NULL) {
    end = &(*end)->next;
  }
  *end = send;
}

static void begin_receive(request *receive) {
  for (message *at = waiting; at != NULL; at = at->next) {
    if (at->taker == NULL && fits(receive, &at->said, at->from)) {
      hand_over(at, receive);
      if (at->got == at->said.bytes && from_rank[at->from].current != at) {
        receive->done = true;
        forget_message(at);
      }
      return;
    }
  }
  request **end = &posted;
  while (*end != NULL) {
    end = &(*end)->next;
  }
  *end = receive;
}

/* ---- MPI ---- */

int MPI_Init_thread(int *argc, char ***argv, int wanted, int *out);
int MPI_Init_thread(int *argc, char ***argv, int wanted, int *out) {
  (void)argc;
  (void)argv;
  if (enter("MPI_Init_thread")) {
    return leave(FAILED);
  }
  if (running || fake_mpi.finalized) {
    misused("MPI_Init_thread", "a second time");
  }
  running = true;
  join_world();
  *out = fake_mpi.threads == 0 ? wanted : fake_mpi.threads == 2 ? SERIALIZED : 1;
  given = *out;
  return leave(0);
}

int MPI_Query_thread(int *out);
int MPI_Query_thread(int *out) {
  bool fails = enter("MPI_Query_thread");
  *out = given;
  return leave(fails ? FAILED : 0);
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
  (void)enter("MPI_Finalize");
  running = false;
  fake_mpi.finalized = true;
  return leave(0);
}

int MPI_Get_library_version(char *text, int *length);
int MPI_Get_library_version(char *text, int *length) {
  *length = snprintf(text, 8192, "%s", fake_mpi.version == NULL ? default_version : fake_mpi.version);
  return fake_mpi.fails != NULL && strcmp(fake_mpi.fails, "MPI_Get_library_version") == 0 ? FAILED : 0;
}

int MPI_Error_string(int code, char *text, int *length);
int MPI_Error_string(int code, char *text, int *length) {
  *length = snprintf(text, 256, "made-up error %d", code);
  return 0;
}

int MPI_Comm_rank(handle at, int *out);
int MPI_Comm_rank(handle at, int *out) {
  bool fails = enter("MPI_Comm_rank");
  *out = comm_of("MPI_Comm_rank", at)->own;
  return leave(fails ? FAILED : 0);
}

int MPI_Comm_size(handle at, int *out);
int MPI_Comm_size(handle at, int *out) {
  bool fails = enter("MPI_Comm_size");
  *out = comm_of("MPI_Comm_size", at)->ranks;
  return leave(fails ? FAILED : 0);
}

/* A group is a communicator's number. */
int MPI_Comm_group(handle at, handle *out);
int MPI_Comm_group(handle at, handle *out) {
  bool fails = enter("MPI_Comm_group");
  *out = at;
  return leave(fails ? FAILED : 0);
}

static int chosen[MOST];
static int chosen_count;

int MPI_Group_incl(handle from, int count, const int *of, handle *out);
int MPI_Group_incl(handle from, int count, const int *of, handle *out) {
  bool fails = enter("MPI_Group_incl");
  chosen_count = count;
  memcpy(chosen, of, (size_t)count * sizeof *of);
  *out = from;
  return leave(fails ? FAILED : 0);
}

int MPI_Group_free(handle *at);
int MPI_Group_free(handle *at) {
  bool fails = enter("MPI_Group_free");
  (void)at;
  return leave(fails ? FAILED : 0);
}

int MPI_Comm_create_group(handle from, handle group, int tag, handle *out);
int MPI_Comm_create_group(handle from, handle group, int tag, handle *out) {
  int number = 2;
  uint32_t context = 2166136261u + (uint32_t)tag;
  (void)group;
  bool fails = enter("MPI_Comm_create_group");
  (void)comm_of("MPI_Comm_create_group", from);
  while (comms[number].used) {
    number++;
  }
  if (fails) {
    return leave(FAILED);
  }
  comms[number] = (comm){.used = true, .ranks = chosen_count, .own = -1};
  for (int i = 0; i < chosen_count; i++) {
    comms[number].members[i] = chosen[i];
    comms[number].own = chosen[i] == rank ? i : comms[number].own;
    context = (context ^ (uint32_t)chosen[i]) * 16777619u;
  }
  comms[number].context = context | 0x80000000u;
  *out = handle_of_comm(number);
  fake_mpi.communicators++;
  return leave(0);
}

int MPI_Comm_free(handle *at);
int MPI_Comm_free(handle *at) {
  bool fails = enter("MPI_Comm_free");
  comm *freed = comm_of("MPI_Comm_free", *at);
  for (const message *left = waiting; left != NULL; left = left->next) {
    if (left->said.context == freed->context) {
      misused("MPI_Comm_free", "a message in it has not been received");
    }
  }
  freed->used = false;
  fake_mpi.communicators--;
  return leave(fails ? FAILED : 0);
}

int MPI_Comm_set_errhandler(handle at, handle handler);
int MPI_Comm_set_errhandler(handle at, handle handler) {
  bool fails = enter("MPI_Comm_set_errhandler");
  (void)comm_of("MPI_Comm_set_errhandler", at);
  if (handler != ERRORS_RETURN) {
    misused("MPI_Comm_set_errhandler", "this is not MPI_ERRORS_RETURN");
  }
  return leave(fails ? FAILED : 0);
}

int MPI_Comm_get_attr(handle at, int key, void *out, int *found);
int MPI_Comm_get_attr(handle at, int key, void *out, int *found) {
  static int largest;
  bool fails = enter("MPI_Comm_get_attr");
  (void)comm_of("MPI_Comm_get_attr", at);
  largest = fake_mpi.largest_tag == 0 ? 32767 : fake_mpi.largest_tag;
  *found = key == LARGEST_TAG_KEY;
  *(void **)out = &largest;
  return leave(fails ? FAILED : 0);
}

int MPI_Comm_create_keyval(int (*copy)(handle, int, void *, void *, void *, int *),
                           int (*forgets)(handle, int, void *, void *), int *key, void *extra);
int MPI_Comm_create_keyval(int (*copy)(handle, int, void *, void *, void *, int *),
                           int (*forgets)(handle, int, void *, void *), int *key, void *extra) {
  int copied = 1;
  bool fails = enter("MPI_Comm_create_keyval");
  forget = forgets;
  *key = KEY;
  if (copy(handle_of_comm(1), KEY, extra, NULL, NULL, &copied) != 0 || copied != 0) {
    misused("MPI_Comm_create_keyval", "the attribute would be copied");
  }
  return leave(fails ? FAILED : 0);
}

int MPI_Comm_set_attr(handle at, int key, void *value);
int MPI_Comm_set_attr(handle at, int key, void *value) {
  bool fails = enter("MPI_Comm_set_attr");
  (void)value;
  if (at != handle_of_comm(1) || key != KEY) {
    misused("MPI_Comm_set_attr", "this is not MPI_COMM_SELF");
  }
  watched = !fails;
  return leave(fails ? FAILED : 0);
}

static void check_transfer(const char *call, const comm *in, int count, handle type, int peer, int tag) {
  if (type != BYTE || count < 0) {
    misused(call, "this is not MPI_BYTE");
  }
  if (peer != ANY_SOURCE && (peer < 0 || peer >= in->ranks)) {
    misused(call, "there is no such rank");
  }
  if (tag < 0 || tag > (fake_mpi.largest_tag == 0 ? 32767 : fake_mpi.largest_tag)) {
    misused(call, "the tag is larger than MPI_TAG_UB");
  }
}

int MPI_Isend(const void *data, int count, handle type, int to, int tag, handle at, handle *out);
int MPI_Isend(const void *data, int count, handle type, int to, int tag, handle at, handle *out) {
  bool fails = enter_transfer("MPI_Isend", tag);
  const comm *in = comm_of("MPI_Isend", at);
  check_transfer("MPI_Isend", in, count, type, to == ANY_SOURCE ? -9 : to, tag);
  if (fails) {
    return leave(FAILED);
  }
  request *made = new_request(out);
  made->sends = true;
  made->context = in->context;
  made->peer = in->members[to];
  made->tag = tag;
  made->data = (unsigned char *)(uintptr_t)data;
  made->bytes = (uint64_t)count;
  begin_send(made);
  pump();
  return leave(0);
}

int MPI_Irecv(void *data, int count, handle type, int from, int tag, handle at, handle *out);
int MPI_Irecv(void *data, int count, handle type, int from, int tag, handle at, handle *out) {
  bool fails = enter_transfer("MPI_Irecv", tag);
  const comm *in = comm_of("MPI_Irecv", at);
  check_transfer("MPI_Irecv", in, count, type, from, tag);
  if (fails) {
    return leave(FAILED);
  }
  pump();
  request *made = new_request(out);
  made->context = in->context;
  made->peer = from == ANY_SOURCE ? -1 : in->members[from];
  made->tag = tag;
  made->data = data;
  made->bytes = (uint64_t)count;
  begin_receive(made);
  return leave(0);
}

/* To every rank and from every rank, in a context of its own. */
int MPI_Iallgather(const void *mine, int count, handle type, void *all, int each, handle all_type, handle at,
                   handle *out);
int MPI_Iallgather(const void *mine, int count, handle type, void *all, int each, handle all_type, handle at,
                   handle *out) {
  bool fails = enter("MPI_Iallgather");
  if (type != BYTE || all_type != BYTE || each != count || at != handle_of_comm(0)) {
    misused("MPI_Iallgather", "wrong arguments");
  }
  if (fails) {
    return leave(FAILED);
  }
  request *made = new_request(out);
  int number = made->slot;
  made->parts = calloc(2 * (size_t)ranks, sizeof *made->parts);
  made->part_count = 2 * (size_t)ranks;
  for (int other = 0; other < ranks; other++) {
    handle ignored;
    request *send = new_request(&ignored);
    request *receive = new_request(&ignored);
    *send = (request){.sends = true, .peer = other, .data = (unsigned char *)(uintptr_t)mine, .slot = send->slot};
    *receive =
        (request){.peer = other, .data = (unsigned char *)all + (size_t)other * (size_t)each, .slot = receive->slot};
    send->context = receive->context = 3;
    send->tag = receive->tag = (int)(gathers % 30000);
    send->bytes = receive->bytes = (uint64_t)count;
    begin_send(send);
    begin_receive(receive);
    made->parts[2 * other] = send;
    made->parts[2 * other + 1] = receive;
  }
  gathers++;
  *out = handle_of_slot(number);
  return leave(0);
}

static void free_request(request *of) {
  slots[of->slot] = NULL;
  free(of->parts);
  free(of);
}

static bool all_parts_done(const request *of) {
  for (size_t i = 0; i < of->part_count; i++) {
    if (!of->parts[i]->done) {
      return false;
    }
  }
  return of->part_count > 0;
}

int MPI_Test(handle *at, int *done, void *status);
int MPI_Test(handle *at, int *done, void *status) {
  bool fails = enter("MPI_Test");
  if (*at == NO_REQUEST || status != NO_STATUS) {
    misused("MPI_Test", "no request, or a status");
  }
  int slot = slot_of(*at);
  if (slot < 0 || slot >= slot_count || slots[slot] == NULL) {
    misused("MPI_Test", "this is no request");
  }
  request *of = slots[slot];
  pump();
  *done = of->done || all_parts_done(of);
  if (fails) {
    return leave(FAILED);
  }
  int error = of->error;
  if (*done) {
    for (size_t i = 0; i < of->part_count; i++) {
      free_request(of->parts[i]);
    }
    free_request(of);
    *at = NO_REQUEST;
  }
  return leave(*done ? error : 0);
}

int MPI_Cancel(handle *at);
int MPI_Cancel(handle *at) {
  bool fails = enter("MPI_Cancel");
  request *of = slots[slot_of(*at)];
  if (of->sends) {
    misused("MPI_Cancel", "sends cannot be cancelled");
  }
  for (request **in = &posted; *in != NULL && !fake_mpi.keeps_receiving; in = &(*in)->next) {
    if (*in == of) {
      *in = of->next;
      of->done = true;
      break;
    }
  }
  return leave(fails ? FAILED : 0);
}
