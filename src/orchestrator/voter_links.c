/* Who is connected with whom, and what goes over it. */
#include "orchestrator/voter_links.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "os/socket.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORD_BYTES = 56, MOST_UNKNOWN = 64 };

static const uint64_t GREETING_NS = 3000000000u;
static const uint64_t CLOSED_NS = 3000000000u; /* a host that is there has answered by then */

void even_voter_write_number(unsigned char *bytes, uint64_t value) {
  for (int i = 0; i < 8; i++) {
    bytes[i] = (unsigned char)(value >> 8 * i);
  }
}

uint64_t even_voter_read_number(const unsigned char *bytes) {
  uint64_t value = 0;
  for (int i = 0; i < 8; i++) {
    value |= (uint64_t)bytes[i] << 8 * i;
  }
  return value;
}

static void tell(even_voter_link *link, uint64_t asks, uint64_t answers) {
  const even_voter_word *own = &link->all->own;
  unsigned char bytes[WORD_BYTES];
  even_voter_write_number(bytes, own->id);
  even_voter_write_number(bytes + 8, own->newest.generation);
  even_voter_write_number(bytes + 16, own->newest.leader);
  even_voter_write_number(bytes + 24, own->port);
  even_voter_write_number(bytes + 32, link->all->term(link->all->context));
  even_voter_write_number(bytes + 40, asks);
  even_voter_write_number(bytes + 48, answers);
  if (even_link_send(&link->link, EVEN_MESSAGE_MEMBER, NULL, bytes, sizeof bytes) != EVEN_OK) {
    even_error_clear(); /* the end of the connection tells it */
  }
}

static void on_ready(void *context, even_link *link) {
  (void)link;
  if (!((even_voter_link *)context)->all->rests) {
    tell(context, 0, 0);
  }
}

/* Where both have called each other (each misses the other) both ends must keep the same of the two connections, or
 * each closes the one that the other keeps: that of the higher number, which is who calls otherwise, too. One that has
 * long been silent the other end may have given up. */
static bool outranks(const even_voter_link *older, const even_voter_link *newer) {
  bool own = newer->all->own.id > newer->id;
  return older->called != newer->called && older->called == own && !older->link.failed && !older->link.broken &&
         even_clock_ns() - older->link.heard_ns < 4 * even_link_beat_ns();
}

/* `newer` has just said who it is, and counts: of two that one end has called, that end has closed the older one, or
 * does not know of it. One that outranks it stays beside it: it may be on its way yet, and come to nothing; else the
 * lower number hears on it who calls, and closes the other one. */
static void leave_older(even_voter_links *links, const even_voter_link *newer) {
  for (even_voter_link *link = links->open; link != NULL; link = link->next) {
    if (link != newer && link->id == newer->id && !outranks(link, newer)) {
      link->over = true;
    }
  }
}

static void forget_missing(even_voter_links *links, uint64_t id) {
  for (size_t i = 0; i < EVEN_VOTER_MISSING; i++) {
    if (links->missing[i].id == id) {
      links->missing[i] = (even_voter_missing){.id = 0};
    }
  }
}

/* Who has been missing for longest is given up first, and before those that may be cut off the others. */
static uint64_t worth(const even_voter_missing *one) {
  return one->id == 0 ? 0 : one->closed ? one->since_ns : one->since_ns + INT64_MAX;
}

static void note_missing(even_voter_links *links, const even_voter_link *link, bool closed) {
  even_voter_missing *place = &links->missing[0];
  for (size_t i = 0; i < EVEN_VOTER_MISSING; i++) {
    if (closed && links->missing[i].id == link->id) {
      return;
    }
  }
  forget_missing(links, link->id);
  for (size_t i = 0; i < EVEN_VOTER_MISSING; i++) {
    place = worth(&links->missing[i]) < worth(place) ? &links->missing[i] : place;
  }
  if (closed && place->id != 0 && !place->closed) {
    return;
  }
  *place = (even_voter_missing){.id = link->id, .since_ns = even_clock_ns(), .closed = closed};
  memcpy(place->address, link->address, sizeof place->address);
}

static uint64_t refused_since(const even_voter_links *links, uint64_t id) {
  for (size_t i = 0; i < EVEN_VOTER_REFUSALS; i++) {
    if (links->refusals[i].id == id) {
      return links->refusals[i].since_ns;
    }
  }
  return 0;
}

/* One is free, or of a member that is none any more. NULL: none. */
static even_voter_refusal *find_place(even_voter_links *links) {
  for (size_t i = 0; i < EVEN_VOTER_REFUSALS; i++) {
    char address[EVEN_VOTER_ADDRESS] = "";
    if (links->refusals[i].id != 0 && links->where != NULL) {
      links->where(links->context, links->refusals[i].id, address);
    }
    if (links->refusals[i].id == 0 || (links->where != NULL && address[0] == '\0')) {
      return &links->refusals[i];
    }
  }
  return NULL;
}

/* How a call came out: what a member's host says of it holds until it says something else, or nothing. */
static void note_refused(even_voter_links *links, uint64_t id, bool refused) {
  if (id == 0 || refused == (refused_since(links, id) != 0)) {
    return;
  }
  even_voter_refusal *place = refused ? find_place(links) : NULL;
  for (size_t i = 0; i < EVEN_VOTER_REFUSALS && !refused; i++) {
    place = links->refusals[i].id == id ? &links->refusals[i] : place;
  }
  if (place != NULL) {
    *place = refused ? (even_voter_refusal){.id = id, .since_ns = even_clock_ns()} : (even_voter_refusal){.id = 0};
  }
}

/* Who was called, or has been named by now. */
static void learn_address(even_voter_link *link) {
  if (link->all->where != NULL) {
    link->all->where(link->all->context, link->id, link->address);
  }
}

static even_status take_word(even_voter_link *link, const even_message *message) {
  if (message->data_bytes != WORD_BYTES) {
    return even_fail(EVEN_ERR_INPUT, "a member's word of %zu bytes", message->data_bytes);
  }
  const even_voter_word word = {
      .id = even_voter_read_number(message->data),
      .newest = {even_voter_read_number(message->data + 8), even_voter_read_number(message->data + 16)},
      .port = even_voter_read_number(message->data + 24),
      .term = even_voter_read_number(message->data + 32),
      .asks = even_voter_read_number(message->data + 40),
      .answers = even_voter_read_number(message->data + 48)};
  if (!link->told && link->called && link->id != word.id) {
    forget_missing(link->all, link->id); /* another one listens where that one did: it has ended */
  }
  if (word.id == 0 || word.id == link->all->own.id || (link->id != 0 && link->id != word.id) || word.port > 65535) {
    return even_fail(EVEN_ERR_INPUT, "%s says that it is member %llu", link->link.peer, (unsigned long long)word.id);
  }
  if (!link->told) {
    link->id = word.id;
    leave_older(link->all, link);
    link->told = true;
    forget_missing(link->all, word.id);
    note_refused(link->all, word.id, false);
    learn_address(link);
  }
  if (word.answers > link->answered_ns && word.answers <= even_clock_boot_ns()) {
    link->answered_ns = word.answers;
    link->answered_term = word.term;
  }
  link->all->word(link->all->context, &word);
  if (word.asks != 0) {
    tell(link, 0, word.asks);
  }
  return EVEN_OK;
}

/* Whoever would join the job may know any of its hosts. It closes the connection when it has heard. */
static even_status point_onwards(even_voter_link *from) {
  even_text text = EVEN_TEXT_EMPTY;
  char address[EVEN_VOTER_ADDRESS] = "";
  int port = 0;
  if (from->all->leader == NULL || !from->all->leader(from->all->context, address, &port)) {
    address[0] = '\0';
    port = 0;
  }
  even_text_format(&text, "{\"address\":\"%s\",\"port\":%d,\"silence_ms\":%d}", address, port, even_socket_silence());
  return even_link_send_text(&from->link, EVEN_MESSAGE_LEADER, &text, NULL, 0);
}

static even_status on_message(void *context, even_link *link, const even_message *message) {
  even_voter_link *from = context;
  (void)link;
  if (from->all->rests) {
    return EVEN_OK;
  }
  if (message->kind == EVEN_MESSAGE_MEMBER) {
    return take_word(from, message);
  }
  if (message->kind == EVEN_MESSAGE_GREET && !from->told) {
    return point_onwards(from);
  }
  if (message->kind != EVEN_MESSAGE_RAFT || !from->told) {
    return even_fail(EVEN_ERR_INPUT, "a message of kind %d, which voters do not send", (int)message->kind);
  }
  return from->all->raft(from->all->context, from->id, message->data, message->data_bytes);
}

/* It has shown that it has the key; not yet who it is, where it was called: whoever was meant. */
static bool is_member(const even_voter_link *link) {
  return link->told || (link->called && link->link.was_ready);
}

static void miss(even_voter_link *link, bool closed) {
  learn_address(link);
  note_missing(link->all, link, closed);
  link->all->closed = link->all->closed || closed;
}

/* Its host has the word of the job's end: its process reads that, or is none any more. */
static bool has_end(const even_voter_link *link) {
  return link->delivered && even_leadership_ended(&link->all->own.newest);
}

/* A kernel says of a process that has ended that its connection is closed, or reset; and of one that is called, that
 * nobody listens there. A process that lives closes one, too: that it has given up, or where it keeps another one. One
 * that stands still closes none. */
static void on_ended(void *context, even_link *link) {
  even_voter_link *from = context;
  const even_error *why = even_link_why(link);
  bool closed = even_link_was_closed(link);
  bool left = from->over; /* for another one */
  from->over = true;
  if (from->called && !from->told) {
    note_refused(from->all, from->id, why->system_error == ECONNREFUSED);
  }
  if (left || has_end(from) || even_voter_links_find(from->all, from->id) != NULL) {
    return;
  }
  if (closed ? from->told : is_member(from)) {
    miss(from, closed);
  } else if (!from->told && from->called && why->system_error == ECONNREFUSED) {
    forget_missing(from->all, from->id);
  }
}

/* `address` NULL: it calls, and it is not known yet who. */
static even_status add_link(even_voter_links *links, int fd, uint64_t id, const char *address, const char *peer) {
  bool called = address != NULL;
  even_voter_link *link = NULL;
  even_status status = EVEN_NEW(&link);
  if (status != EVEN_OK) {
    even_pipe_close(fd);
    return status;
  }
  const even_link_calls calls = {.context = link, .ready = on_ready, .message = on_message, .ended = on_ended};
  link->all = links;
  link->id = id;
  link->called = called;
  (void)snprintf(link->address, sizeof link->address, "%.63s", called ? address : "");
  link->since_ns = even_clock_ns();
  status = even_link_open(&link->link, links->loop, fd, !called, links->key, &calls);
  if (peer != NULL) { /* while it is on its way the kernel does not know it */
    (void)snprintf(link->link.peer, sizeof link->link.peer, "%s", peer);
  }
  if (status != EVEN_OK) {
    link->next = links->gone; /* the loop may have it in hand */
    links->gone = link;
    return status;
  }
  link->next = links->open;
  links->open = link;
  return EVEN_OK;
}

static void take_connection(void *context, int fd) {
  even_voter_links *links = context;
  int made = -1;
  if (even_socket_accept(fd, &made) != EVEN_OK || made < 0) {
    even_error_clear();
    return;
  }
  if (links->unknown >= MOST_UNKNOWN) { /* members call again */
    even_pipe_close(made);
    return;
  }
  links->unknown++;
  if (add_link(links, made, 0, NULL, NULL) != EVEN_OK) {
    even_error_clear();
  }
}

even_status even_voter_links_open(even_voter_links *links) {
  links->watch.fd = -1;
  return even_loop_add(links->loop, &links->watch, links->listener, take_connection, links);
}

static void free_gone(even_voter_links *links) {
  while (links->gone != NULL) {
    even_voter_link *link = links->gone;
    links->gone = link->next;
    even_free(link);
  }
}

void even_voter_links_close(even_voter_links *links) {
  even_loop_remove(links->loop, &links->watch);
  even_pipe_close(links->listener);
  links->listener = -1;
  while (links->open != NULL) {
    even_voter_link *link = links->open;
    links->open = link->next;
    even_link_close(&link->link);
    even_free(link);
  }
  free_gone(links);
  explicit_bzero(links->key, sizeof links->key);
}

static void give_up_closed(even_voter_links *links, uint64_t now_ns) {
  for (size_t i = 0; i < EVEN_VOTER_MISSING; i++) {
    const even_voter_missing *one = &links->missing[i];
    if (one->closed && now_ns > one->since_ns + CLOSED_NS) {
      forget_missing(links, one->id);
    }
  }
}

void even_voter_links_tick(even_voter_links *links, uint64_t now_ns) {
  even_voter_link **at = &links->open;
  free_gone(links);
  give_up_closed(links, now_ns);
  bool alone = true;
  links->unknown = 0;
  while (*at != NULL) {
    even_voter_link *link = *at;
    even_link_tick(&link->link, true);
    if (!link->told && !link->over && !links->rests && now_ns - link->since_ns > GREETING_NS) {
      if (is_member(link) && even_voter_links_find(links, link->id) == NULL) {
        miss(link, false);
      }
      note_refused(links, link->id, false);
      link->over = true;
    }
    alone = alone && (!link->told || link->over || !even_link_is_up(&link->link));
    if (!link->over) {
      links->unknown += link->told || link->called ? 0 : 1;
      at = &link->next;
      continue;
    }
    *at = link->next;
    even_link_close(&link->link);
    link->next = links->gone;
    links->gone = link;
  }
  links->alone_ns = !alone ? 0 : links->alone_ns == 0 ? now_ns : links->alone_ns;
}

void even_voter_links_rest(even_voter_links *links, bool rests) {
  for (even_voter_link *link = links->open; link != NULL && rests != links->rests; link = link->next) {
    link->over = true;
  }
  links->closed = links->closed || rests != links->rests;
  links->rests = rests;
}

void even_voter_links_call(even_voter_links *links, uint64_t id, const char *address) {
  char host[EVEN_VOTER_ADDRESS];
  int fd = -1;
  for (const even_voter_link *link = links->open; link != NULL; link = link->next) {
    if (link->id == id) {
      return;
    }
  }
  const char *colon = strrchr(address, ':');
  if (colon == NULL || (size_t)(colon - address) >= sizeof host) {
    return;
  }
  memcpy(host, address, (size_t)(colon - address));
  host[colon - address] = '\0';
  even_status status = even_socket_connect_begin(host, (int)strtol(colon + 1, NULL, 10), &fd);
  bool refused = status != EVEN_OK && even_error_last()->system_error == ECONNREFUSED; /* of this machine, at once */
  status = status == EVEN_OK ? add_link(links, fd, id, address, host) : status;
  if (refused) {
    forget_missing(links, id);
  }
  if (status != EVEN_OK) {
    note_refused(links, id, refused);
    even_error_clear(); /* again in a moment */
  }
}

void even_voter_links_call_missing(even_voter_links *links) {
  for (size_t i = 0; i < EVEN_VOTER_MISSING; i++) {
    const even_voter_missing missing = links->missing[i]; /* what is said of it may end it */
    if (missing.id != 0) {
      even_voter_links_call(links, missing.id, missing.address);
    }
  }
}

const even_voter_missing *even_voter_links_missing(const even_voter_links *links) {
  const even_voter_missing *latest = NULL;
  for (size_t i = 0; i < EVEN_VOTER_MISSING; i++) {
    const even_voter_missing *one = &links->missing[i];
    latest = one->id != 0 && (latest == NULL || worth(one) > worth(latest)) ? one : latest;
  }
  return latest;
}

uint64_t even_voter_links_deserted(const even_voter_links *links, const uint64_t *ids, size_t count) {
  uint64_t since = 0;
  for (size_t i = 0; i < count && links->alone_ns != 0; i++) {
    uint64_t refused = ids[i] == links->own.id ? 0 : refused_since(links, ids[i]);
    if (ids[i] != links->own.id && refused == 0) {
      return 0;
    }
    since = refused > since ? refused : since;
  }
  return since == 0 || since > links->alone_ns ? since : links->alone_ns;
}

bool even_voter_links_delivered(even_voter_links *links) {
  bool all = true;
  for (even_voter_link *link = links->open; link != NULL; link = link->next) {
    if (link->told && !link->over && even_link_is_up(&link->link)) {
      link->delivered =
          link->delivered || (even_link_waiting(&link->link) == 0 && even_socket_delivered(link->link.fd));
      all = all && link->delivered;
    }
  }
  return all;
}

even_voter_link *even_voter_links_find(even_voter_links *links, uint64_t id) {
  for (even_voter_link *link = links->open; link != NULL; link = link->next) {
    if (link->id == id && link->told && !link->over && even_link_is_up(&link->link)) {
      return link;
    }
  }
  return NULL;
}

/* Such a call is given up now and then, and made again. */
bool even_voter_links_awaits(even_voter_links *links, uint64_t id, uint64_t now_ns, uint64_t call_ns) {
  for (even_voter_link *link = links->open; link != NULL; link = link->next) {
    bool taken = link->called && link->id == id && !link->over && link->link.fd >= 0 && !link->link.was_ready &&
                 !link->link.failed && even_link_waiting(&link->link) == 0 && even_socket_delivered(link->link.fd);
    links->awaited_ns = taken ? now_ns : links->awaited_ns;
    links->awaited = taken ? id : links->awaited;
  }
  return links->awaited == id && refused_since(links, id) == 0 && now_ns < links->awaited_ns + 2 * call_ns;
}

bool even_voter_links_send(even_voter_links *links, uint64_t id, const void *bytes, size_t count) {
  even_voter_link *link = even_voter_links_find(links, id);
  if (link == NULL || !even_link_has_room(&link->link)) {
    return false;
  }
  if (even_link_send(&link->link, EVEN_MESSAGE_RAFT, NULL, bytes, count) != EVEN_OK) {
    even_error_clear();
    return false;
  }
  return true;
}

void even_voter_links_tell(even_voter_links *links) {
  for (even_voter_link *link = links->open; link != NULL; link = link->next) {
    if (even_link_is_up(&link->link)) {
      link->delivered = false;
      tell(link, 0, 0);
    }
  }
}

void even_voter_links_ask(even_voter_link *link, uint64_t now_ns) {
  tell(link, now_ns, 0);
}
