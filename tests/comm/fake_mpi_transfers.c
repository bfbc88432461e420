/* What moves in the made-up MPI (fake_mpi.h): each pair of ranks has a ring of bytes in shared memory; messages go
 * through it piece by piece while both ends ask for the state of requests, as large ones do in real libraries. */
#include "comm/fake_mpi_kinds.h"

#include <stdatomic.h>
#include <string.h>

#define MOST FAKE_MPI_MOST_RANKS
#define TRUNCATED 14

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

static request **slots;
static int slot_count;
static request *sending[MOST];
static request *posted;
static message *waiting; /* not taken, and those under way */
static incoming from_rank[MOST];
static uint64_t gathers;

#ifdef FAKE_NUMBERS
static handle handle_of_slot(int slot) {
  return (int)(0x98000000u + (unsigned)slot);
}
static int slot_of(handle at) {
  return (int)((unsigned)at - 0x98000000u);
}
#else
static handle handle_of_slot(int slot) {
  return slots[slot];
}
static int slot_of(handle at) {
  return ((const request *)at)->slot;
}
#endif

static ring *ring_of(int from, int to) {
  return (ring *)fake_mpi_own.memory + from * MOST + to;
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
      send->sent += put(ring_of(fake_mpi_own.rank, to), (unsigned char *)&said + send->sent, sizeof said - send->sent);
    }
    if (send->sent >= sizeof said) {
      uint64_t at = send->sent - sizeof said;
      send->sent += put(ring_of(fake_mpi_own.rank, to), send->data + at, send->bytes - at);
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
  ring *source = ring_of(from, fake_mpi_own.rank);
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
  for (int other = 0; other < fake_mpi_own.ranks; other++) {
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

bool fake_mpi_has_unreceived(uint32_t context) {
  const message *left = waiting;
  while (left != NULL && left->said.context != context) {
    left = left->next;
  }
  return left != NULL;
}

/* ---- MPI ---- */

static void check_transfer(const char *call, const comm *in, int count, handle type, int peer, int tag) {
  if (type != BYTE || count < 0) {
    fake_mpi_misused(call, "this is not MPI_BYTE");
  }
  if (peer != ANY_SOURCE && (peer < 0 || peer >= in->ranks)) {
    fake_mpi_misused(call, "there is no such rank");
  }
  if (tag < 0 || tag > (fake_mpi.largest_tag == 0 ? 32767 : fake_mpi.largest_tag)) {
    fake_mpi_misused(call, "the tag is larger than MPI_TAG_UB");
  }
}

int MPI_Isend(const void *data, int count, handle type, int to, int tag, handle at, handle *out);
int MPI_Isend(const void *data, int count, handle type, int to, int tag, handle at, handle *out) {
  bool fails = fake_mpi_enter_transfer("MPI_Isend", tag);
  const comm *in = fake_mpi_comm_of("MPI_Isend", at);
  check_transfer("MPI_Isend", in, count, type, to == ANY_SOURCE ? -9 : to, tag);
  if (fails) {
    return fake_mpi_leave(FAILED);
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
  return fake_mpi_leave(0);
}

int MPI_Irecv(void *data, int count, handle type, int from, int tag, handle at, handle *out);
int MPI_Irecv(void *data, int count, handle type, int from, int tag, handle at, handle *out) {
  bool fails = fake_mpi_enter_transfer("MPI_Irecv", tag);
  const comm *in = fake_mpi_comm_of("MPI_Irecv", at);
  check_transfer("MPI_Irecv", in, count, type, from, tag);
  if (fails) {
    return fake_mpi_leave(FAILED);
  }
  pump();
  request *made = new_request(out);
  made->context = in->context;
  made->peer = from == ANY_SOURCE ? -1 : in->members[from];
  made->tag = tag;
  made->data = data;
  made->bytes = (uint64_t)count;
  begin_receive(made);
  return fake_mpi_leave(0);
}

/* To every rank and from every rank, in a context of its own. */
int MPI_Iallgather(const void *mine, int count, handle type, void *all, int each, handle all_type, handle at,
                   handle *out);
int MPI_Iallgather(const void *mine, int count, handle type, void *all, int each, handle all_type, handle at,
                   handle *out) {
  bool fails = fake_mpi_enter("MPI_Iallgather");
  if (type != BYTE || all_type != BYTE || each != count || !fake_mpi_is_world(at)) {
    fake_mpi_misused("MPI_Iallgather", "wrong arguments");
  }
  if (fails) {
    return fake_mpi_leave(FAILED);
  }
  request *made = new_request(out);
  int number = made->slot;
  made->parts = calloc(2 * (size_t)fake_mpi_own.ranks, sizeof *made->parts);
  made->part_count = 2 * (size_t)fake_mpi_own.ranks;
  for (int other = 0; other < fake_mpi_own.ranks; other++) {
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
  return fake_mpi_leave(0);
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
  bool fails = fake_mpi_enter("MPI_Test");
  if (*at == NO_REQUEST || status != NO_STATUS) {
    fake_mpi_misused("MPI_Test", "no request, or a status");
  }
  int slot = slot_of(*at);
  if (slot < 0 || slot >= slot_count || slots[slot] == NULL) {
    fake_mpi_misused("MPI_Test", "this is no request");
  }
  request *of = slots[slot];
  pump();
  *done = of->done || all_parts_done(of);
  if (fails) {
    return fake_mpi_leave(FAILED);
  }
  int error = of->error;
  if (*done) {
    for (size_t i = 0; i < of->part_count; i++) {
      free_request(of->parts[i]);
    }
    free_request(of);
    *at = NO_REQUEST;
  }
  return fake_mpi_leave(*done ? error : 0);
}

int MPI_Cancel(handle *at);
int MPI_Cancel(handle *at) {
  bool fails = fake_mpi_enter("MPI_Cancel");
  request *of = slots[slot_of(*at)];
  if (of->sends) {
    fake_mpi_misused("MPI_Cancel", "sends cannot be cancelled");
  }
  for (request **in = &posted; *in != NULL && !fake_mpi.keeps_receiving; in = &(*in)->next) {
    if (*in == of) {
      *in = of->next;
      of->done = true;
      break;
    }
  }
  return fake_mpi_leave(fails ? FAILED : 0);
}
