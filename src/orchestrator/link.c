/* Sockets and TLS to messages and back. */
#include "orchestrator/link.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "os/socket.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

enum { CHUNK = 65536, MOST_CHUNKS = 64, MOST_WAITING = 64 << 20, MOST_KEPT = 1 << 20 };

static const uint64_t LONGEST_BEAT_NS = 5000000000u;
static const uint64_t SILENCE_NS = 30000000000u;
static const uint64_t FIRST_TRIP_NS = 1000000000u;

static atomic_bool leaders_change;

/* What each end tells of its clock, so that the other can lay both on one. */
typedef struct beat {
  uint64_t now_ns;
  uint64_t echo_ns; /* the other end's clock by its last beat, 0: none came */
  uint64_t held_ns; /* and how long ago that came */
} beat;

static void fail_link(even_link *link) {
  if (!link->failed) {
    link->why = link->broken ? link->why : *even_error_last();
    link->failed = true;
  }
  even_error_clear();
}

/* Nothing goes out. What came before that is not lost: who stood still hears what it has missed. Where nothing can have
 * been said yet, it has failed. */
static void break_off(even_link *link) {
  if (!link->was_ready) {
    fail_link(link);
    return;
  }
  if (!link->failed && !link->broken) {
    link->why = *even_error_last();
    link->broken = true;
  }
  even_error_clear();
}

/* The other end has ended, or no way leads to it any more: nothing of this host failed. */
static bool is_loss(int reason) {
  return reason == ECONNRESET || reason == EPIPE || reason == ECONNABORTED || reason == EHOSTUNREACH ||
         reason == ENETUNREACH || reason == ENETDOWN;
}

static even_status fail_broken(const even_link *link, int reason) {
  even_status status = reason == ETIMEDOUT ? even_fail_errno(reason,
                                                             "the connection to %s broke: nothing came back for %.3g s "
                                                             "(EVENSTEP_HOST_TIMEOUT)",
                                                             link->peer, even_socket_silence() * 1e-3)
                                           : even_fail_errno(reason, "the connection to %s broke", link->peer);
  return is_loss(reason) ? even_error_means(EVEN_ERR_PEER_LOST) : status;
}

static uint64_t host_silence_ns(void) {
  return (uint64_t)even_socket_silence() * 1000000u;
}

uint64_t even_link_beat_ns(void) {
  uint64_t beat_ns = host_silence_ns() / 8;
  return beat_ns < LONGEST_BEAT_NS ? beat_ns : LONGEST_BEAT_NS;
}

void even_link_leaders_change(bool change) {
  atomic_store(&leaders_change, change);
}

uint64_t even_link_silence_ns(void) {
  uint64_t of_hosts = host_silence_ns();
  if (!atomic_load(&leaders_change)) {
    return of_hosts > SILENCE_NS ? of_hosts : SILENCE_NS;
  }
  uint64_t below = of_hosts * 15 / 2 < SILENCE_NS ? of_hosts * 15 / 2 : SILENCE_NS;
  return below > 3 * of_hosts ? below : 3 * of_hosts;
}

static void watch_room(even_link *link) {
  bool waits = !link->broken && link->sent < link->out.length;
  if (even_loop_writable(link->loop, &link->watch, waits) != EVEN_OK) {
    fail_link(link);
  }
}

/* Of a link that always has something waiting what has gone out is not kept either. The rest is moved where it is not
 * longer than what goes. */
static void forget_sent(even_link *link) {
  size_t waiting = link->out.length - link->sent;
  if (waiting == 0) {
    even_text_clear(&link->out);
    link->sent = 0;
  } else if (link->sent >= MOST_KEPT && link->sent >= waiting) {
    memmove(link->out.data, link->out.data + link->sent, waiting + 1); /* and its NUL */
    link->out.length = waiting;
    link->sent = 0;
  }
}

static void send_some(even_link *link) {
  while (link->sent < link->out.length) {
    bool broken = false;
    int reason = 0;
    size_t written =
        even_socket_write(link->fd, link->out.data + link->sent, link->out.length - link->sent, &broken, &reason);
    if (broken) {
      (void)fail_broken(link, reason);
      break_off(link);
      return;
    }
    if (written == 0) {
      break;
    }
    link->sent += written;
  }
  forget_sent(link);
}

/* From TLS to the kernel. */
static void push(even_link *link) {
  char buffer[CHUNK];
  size_t got = 0;
  if (link->fd < 0 || link->failed || link->broken) {
    return;
  }
  while ((got = even_tls_take(link->tls, buffer, sizeof buffer)) > 0) {
    even_text_append(&link->out, buffer, got);
  }
  if (even_text_status(&link->out) != EVEN_OK || link->out.length - link->sent > MOST_WAITING) {
    (void)even_fail(EVEN_ERR_MEMORY, "%s takes nothing of what is sent to it", link->peer);
    fail_link(link);
    return;
  }
  send_some(link);
  if (!link->failed) {
    watch_room(link);
  }
}

static void take_beat(even_link *link, const even_message *message) {
  beat told;
  uint64_t now = even_clock_ns();
  if (message->data_bytes != sizeof told) {
    return;
  }
  memcpy(&told, message->data, sizeof told);
  link->echo = told.now_ns;
  link->echo_ns = now;
  if (!link->offset_known) { /* better than nothing until the first way there and back was seen */
    link->offset_known = true;
    link->offset_ns = (int64_t)now - (int64_t)told.now_ns;
    link->least_trip_ns = FIRST_TRIP_NS;
  }
  if (told.echo_ns == 0 || told.echo_ns > now || told.held_ns > now - told.echo_ns) {
    return;
  }
  uint64_t trip = now - told.echo_ns - told.held_ns;
  link->least_trip_ns += link->least_trip_ns / 100; /* an old short one is forgotten by and by, for clocks drift */
  if (trip < link->least_trip_ns) {
    link->least_trip_ns = trip;
    link->offset_ns = (int64_t)(now - trip / 2) - (int64_t)told.now_ns;
  }
}

static even_status deliver(even_link *link) {
  size_t at = 0;
  even_status status = EVEN_OK;
  while (status == EVEN_OK && at < link->in.length) {
    even_message message;
    size_t used = 0;
    size_t wanted = 0;
    status =
        even_message_next((const unsigned char *)link->in.data + at, link->in.length - at, &message, &used, &wanted);
    if (status != EVEN_OK || used == 0) {
      break;
    }
    at += used;
    if (message.kind == EVEN_MESSAGE_BEAT) {
      take_beat(link, &message);
    } else {
      status = link->calls.message(link->calls.context, link, &message);
    }
  }
  link->in.length -= at;
  memmove(link->in.data, link->in.data + at, link->in.length);
  return status;
}

/* From TLS to messages; *more: there may be more at once. */
static even_status pull(even_link *link, bool *more) {
  char buffer[CHUNK];
  size_t got = 0;
  bool ended = false;
  EVEN_TRY(even_tls_read(link->tls, buffer, sizeof buffer, &got, &ended));
  if (!link->was_ready && even_tls_ready(link->tls)) {
    link->was_ready = true;
    link->calls.ready(link->calls.context, link);
  }
  *more = got > 0;
  if (ended) {
    return even_fail(EVEN_ERR_PEER_LOST, "%s closed the connection", link->peer);
  }
  if (got == 0) {
    return EVEN_OK;
  }
  even_text_append(&link->in, buffer, got);
  EVEN_TRY(even_text_status(&link->in));
  return deliver(link);
}

static even_status take_bytes(even_link *link, const char *bytes, size_t count) {
  bool more = true;
  link->heard_ns = even_clock_ns();
  even_status status = even_tls_feed(link->tls, bytes, count);
  while (status == EVEN_OK && more) {
    status = pull(link, &more);
  }
  return status;
}

static void readable(void *context, int fd) {
  even_link *link = context;
  char buffer[CHUNK];
  for (int chunks = 0; chunks < MOST_CHUNKS && !link->failed && link->fd >= 0; chunks++) {
    size_t got = 0;
    int reason = 0;
    even_pipe_state state = even_socket_read(fd, buffer, sizeof buffer, &got, &reason);
    if (state == EVEN_PIPE_EMPTY) {
      break;
    }
    if (state == EVEN_PIPE_ENDED) {
      (void)(reason == 0 ? even_fail(EVEN_ERR_PEER_LOST, "%s closed the connection", link->peer)
                         : fail_broken(link, reason));
      fail_link(link);
      break;
    }
    if (take_bytes(link, buffer, got) != EVEN_OK) {
      push(link); /* what TLS says to the other end of it */
      fail_link(link);
      break;
    }
  }
  push(link);
  if (link->failed) {
    even_loop_remove(link->loop, &link->watch); /* its end is told in the next tick */
  }
}

even_status even_link_open(even_link *link, even_loop *loop, int fd, bool server,
                           const unsigned char key[EVEN_TLS_KEY_BYTES], const even_link_calls *calls) {
  *link = (even_link){.loop = loop, .fd = fd, .watch = {.fd = -1}, .calls = *calls, .heard_ns = even_clock_ns()};
  even_socket_peer(fd, link->peer, sizeof link->peer);
  even_status status = even_tls_open(server, key, &link->tls);
  if (status == EVEN_OK) {
    status = even_loop_add(loop, &link->watch, fd, readable, link);
  }
  if (status != EVEN_OK) {
    even_link_close(link);
    return status;
  }
  if (!server) {
    bool more = false;
    status = pull(link, &more); /* the first word is the caller's */
    push(link);
  }
  if (status != EVEN_OK) {
    even_link_close(link);
  }
  return status;
}

even_status even_link_send(even_link *link, even_message_kind kind, const char *json, const void *data, size_t bytes) {
  even_text message = EVEN_TEXT_EMPTY;
  if (!even_link_is_up(link)) {
    return EVEN_OK;
  }
  even_status status = even_message_add(&message, kind, json, json == NULL ? 0 : strlen(json), data, bytes);
  if (status == EVEN_OK) {
    status = even_tls_write(link->tls, message.data, message.length);
  }
  even_text_free(&message);
  if (status == EVEN_OK) {
    push(link);
  }
  return status;
}

even_status even_link_send_text(even_link *link, even_message_kind kind, even_text *json, const void *data,
                                size_t bytes) {
  even_status status = even_text_status(json);
  if (status == EVEN_OK) {
    status = even_link_send(link, kind, json->data, data, bytes);
  }
  even_text_free(json);
  return status;
}

size_t even_link_waiting(const even_link *link) {
  return link->out.length - link->sent;
}

bool even_link_has_room(const even_link *link) {
  return even_link_waiting(link) < EVEN_LINK_ROOM;
}

bool even_link_is_up(const even_link *link) {
  return link->fd >= 0 && !link->failed && !link->broken && link->was_ready;
}

static void send_beat(even_link *link, uint64_t now) {
  const beat told = {.now_ns = now, .echo_ns = link->echo, .held_ns = link->echo == 0 ? 0 : now - link->echo_ns};
  link->beat_ns = now;
  if (even_link_send(link, EVEN_MESSAGE_BEAT, NULL, &told, sizeof told) != EVEN_OK) {
    fail_link(link);
  }
}

/* By what has come, for signs of life, and the kernel's own probes, are on their way each second: for where the
 * kernel's limit begins late (os/socket.h). */
static void look_at_host(even_link *link) {
  if (link->was_ready && !link->failed && !link->broken &&
      (uint64_t)even_socket_silent(link->fd) * 1000000u > host_silence_ns() + even_link_beat_ns()) {
    (void)fail_broken(link, ETIMEDOUT);
    break_off(link);
  }
}

void even_link_tick(even_link *link, bool watched) {
  uint64_t now = even_clock_ns();
  if (link->fd < 0) {
    return;
  }
  look_at_host(link);
  if (even_link_is_up(link) && now - link->beat_ns >= even_link_beat_ns()) {
    send_beat(link, now);
  }
  if (link->broken && !link->failed) {
    readable(link, link->fd);
    if (link->fd < 0) {
      return; /* what was said has closed it */
    }
    fail_link(link);
  }
  if (watched && !link->failed && now - link->heard_ns > even_link_silence_ns()) {
    (void)even_fail(EVEN_ERR_TIMEOUT,
                    "%s has said nothing for %.0f s, though its host answers: does its agent stand still?", link->peer,
                    (double)even_link_silence_ns() * 1e-9);
    fail_link(link);
  }
  if (link->failed && !link->ended_told) {
    link->ended_told = true;
    even_loop_remove(link->loop, &link->watch);
    link->calls.ended(link->calls.context, link);
  }
}

void even_link_give_up(even_link *link) {
  fail_link(link);
}

void even_link_read(even_link *link) {
  if (link->fd >= 0 && link->was_ready && !link->failed) {
    readable(link, link->fd);
  }
}

void even_link_flush(even_link *link, int timeout_ms) {
  uint64_t until = even_clock_ns() + (uint64_t)timeout_ms * 1000000u;
  push(link);
  while (link->fd >= 0 && !link->failed && !link->broken && link->sent < link->out.length && even_clock_ns() < until) {
    even_socket_wait(link->fd, 50);
    push(link);
  }
}

const even_error *even_link_why(const even_link *link) {
  return &link->why;
}

bool even_link_was_closed(const even_link *link) {
  const even_error *why = &link->why;
  return why->status != EVEN_ERR_TIMEOUT &&
         (why->system_error == 0 || why->system_error == ECONNRESET || why->system_error == EPIPE);
}

void even_link_close(even_link *link) {
  if (link->fd >= 0) {
    if (link->tls != NULL && !link->failed) {
      even_tls_end(link->tls);
      push(link);
    }
    if (link->watch.fd >= 0) {
      even_loop_remove(link->loop, &link->watch);
    }
    even_pipe_close(link->fd);
    link->fd = -1;
  }
  even_tls_close(link->tls);
  link->tls = NULL;
  even_text_free(&link->in);
  even_text_free(&link->out);
  link->sent = 0; /* of that */
}
