/* A leader and two hosts in one process. */
#include "parcel_star.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/calls.h"
#include "os/listener.h"
#include "os/pipe.h"
#include "os/shared_memory.h"
#include "os/socket.h"

#include "support/clock_ahead.h"

#include <string.h>
#include <unistd.h>

enum { TURN_MS = 5, MOST_TURNS = 200000, STILL_TURNS = 100 };

static const unsigned char KEY[EVEN_TLS_KEY_BYTES] = "one key for this job, 32 bytes.";
/* ---- what each holds ---- */

static unsigned char byte_of(uint64_t number, size_t at) {
  return (unsigned char)(number + at * 7 + at / 256 + at / 65536);
}

even_status star_memory(uint64_t number, size_t bytes, int *fd) {
  even_shared_memory memory;
  *fd = -1;
  EVEN_TRY(even_shared_memory_create("evenstep-test", bytes, &memory));
  unsigned char *data = memory.address;
  for (size_t i = 0; i < bytes; i++) {
    data[i] = byte_of(number, i);
  }
  *fd = dup(memory.fd);
  even_shared_memory_close(&memory);
  return *fd >= 0 ? EVEN_OK : even_fail(EVEN_ERR_SYSTEM, "dup");
}

static bool is_right(const even_parcel *parcel, int fd) {
  even_shared_memory memory;
  if (lseek(fd, 0, SEEK_CUR) != 0 || even_shared_memory_duplicate(fd, &memory) != EVEN_OK) {
    even_error_clear();
    return true; /* a fault that was put there is no altered byte */
  }
  bool right = memory.bytes == parcel->bytes;
  const unsigned char *data = memory.address;
  for (size_t i = 0; right && i < memory.bytes; i++) {
    right = data[i] == byte_of(parcel->number, i);
  }
  even_shared_memory_close(&memory);
  return right;
}

/* ---- parcels ---- */

static even_status offered(void *context, const even_parcel *parcel, int *fd) {
  star_host *host = context;
  (void)parcel;
  (void)fd;
  if (host->refuses != EVEN_OK) {
    return even_fail(host->refuses, "not now");
  }
  host->underway++;
  host->most_underway = host->underway > host->most_underway ? host->underway : host->most_underway;
  return EVEN_OK;
}

static even_status arrived(void *context, const even_parcel *parcel, int fd) {
  star_host *host = context;
  host->underway--;
  host->arrived++;
  host->last = *parcel;
  host->altered = host->altered || (!host->star->unread && !is_right(parcel, fd));
  even_pipe_close(fd);
  return host->dislikes == EVEN_OK ? EVEN_OK : even_fail(host->dislikes, "not this one");
}

static void failed(void *context, const even_parcel *parcel, const even_error *why) {
  star_host *host = context;
  host->underway--;
  host->failed++;
  host->last = *parcel;
  host->why = *why;
}

static void on_done(void *context, const even_parcel *parcel, const even_error *why) {
  star_offer *offer = context;
  (void)parcel;
  offer->told++;
  offer->received = why == NULL;
  if (why != NULL) {
    offer->why = *why;
  }
}

even_status star_offer_test(star *at, int from, int to, uint64_t number, size_t bytes, star_offer *out) {
  int fd = -1;
  *out = (star_offer){0};
  EVEN_TRY(star_memory(number, bytes, &fd));
  return even_parcels_offer(at->hosts[from].parcels, to, "test", number, fd, bytes, on_done, out);
}

static even_link *way(void *context, int host) {
  star_host *self = context;
  star_end *end = &self->ends[self == &self->star->hosts[0] ? host : 0];
  return end->link.fd >= 0 ? &end->link : NULL;
}

/* ---- links ---- */

static void on_ready(void *context, even_link *link) {
  (void)context;
  (void)link;
}

static even_status on_message(void *context, even_link *link, const even_message *message) {
  static unsigned char changed[EVEN_PARCEL_PIECE];
  star_end *end = context;
  star_host *host = &end->star->hosts[end->self];
  even_message copy = *message;
  (void)link;
  end->star->moved++;
  if (message->kind == EVEN_MESSAGE_PIECE) {
    host->pieces++;
    if (host->alters) {
      host->alters = false;
      memcpy(changed, message->data, message->data_bytes);
      changed[message->data_bytes / 2] ^= 1;
      copy.data = changed;
    }
  }
  if (even_parcels_know(message->kind)) {
    return even_parcels_take(host->parcels, end->other, &copy);
  }
  return end->star->hears != NULL ? end->star->hears(end->star, end->self, end->other, message)
                                  : even_fail(EVEN_ERR_INPUT, "a message of kind %d", (int)message->kind);
}

static void on_ended(void *context, even_link *link) {
  star_end *end = context;
  star *at = end->star;
  at->ended++;
  if (at->status == EVEN_OK && !at->ends_expected) {
    at->status = even_link_why(link)->status;
  }
  even_link_close(link);
  if (at->loses != NULL) {
    at->loses(at, end->self, end->other);
  }
  even_parcels_lost(at->hosts[end->self].parcels, end->other);
}

static void take_connection(void *context, int fd) {
  star *at = context;
  int made = -1;
  even_status status = even_socket_accept(fd, &made);
  if (status == EVEN_OK && made >= 0) {
    star_end *end = &at->hosts[0].ends[++at->accepted];
    const even_link_calls calls = {.context = end, .ready = on_ready, .message = on_message, .ended = on_ended};
    status = even_link_open(&end->link, &at->loop, made, true, KEY, &calls);
  }
  at->status = at->status == EVEN_OK ? status : at->status;
}

/* One after the other, so that the leader knows who comes. */
static even_status join_host(star *at, int host) {
  star_end *here = &at->hosts[host].ends[0];
  star_end *there = &at->hosts[0].ends[host];
  const even_link_calls calls = {.context = here, .ready = on_ready, .message = on_message, .ended = on_ended};
  int fd = -1;
  EVEN_TRY(even_socket_connect("127.0.0.1", at->port, 5000, &fd));
  EVEN_TRY(even_link_open(&here->link, &at->loop, fd, false, KEY, &calls));
  for (int turns = 0; turns < MOST_TURNS && at->status == EVEN_OK; turns++) {
    EVEN_TRY(even_loop_turn(&at->loop, TURN_MS));
    even_link_tick(&here->link, false);
    even_link_tick(&there->link, false);
    if (even_link_is_up(&here->link) && even_link_is_up(&there->link)) {
      return EVEN_OK;
    }
    if (here->link.failed || there->link.failed) {
      return even_error_restore(here->link.failed ? even_link_why(&here->link) : even_link_why(&there->link));
    }
  }
  return at->status == EVEN_OK ? even_fail(EVEN_ERR_TIMEOUT, "nobody comes") : at->status;
}

even_status star_open(star *at) {
  static const even_parcel_calls calls = {.offered = offered, .arrived = arrived, .failed = failed};
  *at = (star){.loop = {.fd = -1}, .listening = {.fd = -1}, .listener = -1};
  clock_ahead_set(0);
  for (int i = 0; i < STAR_HOSTS; i++) {
    at->hosts[i].star = at;
    for (int other = 0; other < STAR_HOSTS; other++) {
      at->hosts[i].ends[other] = (star_end){.star = at, .self = i, .other = other, .link = {.fd = -1}};
    }
  }
  EVEN_TRY(even_loop_open(&at->loop));
  EVEN_TRY(even_listener_open("127.0.0.1", &at->port, &at->listener));
  EVEN_TRY(even_loop_add(&at->loop, &at->listening, at->listener, take_connection, at));
  for (int i = 0; i < STAR_HOSTS; i++) {
    const even_parcels_params params = {.size = sizeof params,
                                        .self = i,
                                        .count = STAR_HOSTS,
                                        .context = &at->hosts[i],
                                        .way = way,
                                        .patience_ns = (uint64_t)STAR_PATIENCE_S * 1000000000u};
    even_parcel_calls own = calls;
    own.context = &at->hosts[i];
    EVEN_TRY(even_parcels_open(&params, &at->hosts[i].parcels));
    EVEN_TRY(even_parcels_expect(at->hosts[i].parcels, "test", &own));
  }
  EVEN_TRY(join_host(at, 1));
  return join_host(at, 2);
}

void star_close(star *at) {
  for (int i = STAR_HOSTS - 1; i >= 0; i--) {
    for (int other = 0; other < STAR_HOSTS; other++) {
      even_link_close(&at->hosts[i].ends[other].link);
    }
    even_parcels_close(at->hosts[i].parcels);
    at->hosts[i].parcels = NULL;
  }
  even_loop_remove(&at->loop, &at->listening);
  if (at->listener >= 0) {
    even_listener_close(at->listener);
  }
  even_loop_close(&at->loop);
}

/* ---- time ---- */

static void note_waiting(star *at) {
  for (int i = 0; i < STAR_HOSTS; i++) {
    for (int other = 0; other < STAR_HOSTS; other++) {
      size_t waiting = even_link_waiting(&at->hosts[i].ends[other].link);
      at->most_waiting = waiting > at->most_waiting ? waiting : at->most_waiting;
    }
  }
}

static even_status turn_once(star *at) {
  EVEN_TRY(even_loop_turn(&at->loop, TURN_MS));
  note_waiting(at);
  for (int i = 0; i < STAR_HOSTS; i++) {
    if (at->hosts[i].frozen) {
      continue;
    }
    for (int other = 0; other < STAR_HOSTS; other++) {
      even_link_tick(&at->hosts[i].ends[other].link, false);
    }
    if (at->hosts[i].parcels != NULL) {
      even_parcels_tick(at->hosts[i].parcels);
    }
  }
  return EVEN_OK;
}

even_status star_turn(star *at, const int *what, int wanted) {
  uint64_t moved = at->moved;
  int still = 0;
  for (int turns = 0; turns < MOST_TURNS && at->status == EVEN_OK && *what != wanted; turns++) {
    EVEN_TRY(turn_once(at));
    still = at->moved == moved ? still + 1 : 0;
    moved = at->moved;
    if (still == STILL_TURNS) {
      clock_ahead_add(UINT64_C(20000000000) * STAR_PATIENCE_S);
    }
  }
  return *what == wanted || at->status != EVEN_OK ? at->status : even_fail(EVEN_ERR_TIMEOUT, "it does not come to it");
}

void star_rest(star *at) {
  uint64_t moved = at->moved;
  int still = 0;
  while (still < STILL_TURNS && turn_once(at) == EVEN_OK) {
    still = at->moved == moved ? still + 1 : 0;
    moved = at->moved;
  }
}

void star_freeze(star *at, int host) {
  at->hosts[host].frozen = true;
  even_loop_remove(&at->loop, &at->hosts[host].ends[0].link.watch);
}

void star_thaw(star *at, int host) {
  even_link *link = &at->hosts[host].ends[0].link;
  even_loop_watch *watch = &link->watch;
  at->hosts[host].frozen = false;
  if (even_loop_add(&at->loop, watch, link->fd, watch->ready, watch->context) != EVEN_OK) {
    at->status = EVEN_ERR_SYSTEM;
  }
}
