/* Messages between two ranks over the network. A header says the tag and the size, since UCX matches by one word; the
 * data follow under a number of their own, so that they land where they belong. */
#include "comm/ucx/messages.h"
#include "comm/called.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"
#include "os/thread.h"

#include <stdio.h>
#include <string.h>

static void describe(const even_ucx_group *group, const even_ucx_request *request, char *text, size_t bytes) {
  if (request->peer == EVEN_COMM_ANY_RANK) {
    (void)snprintf(text, bytes, "receive of %zu bytes from any rank with tag %llu", request->bytes,
                   (unsigned long long)request->tag);
    return;
  }
  (void)snprintf(text, bytes, "%s of %zu bytes %s rank %d with tag %llu", request->sends ? "send" : "receive",
                 request->bytes, request->sends ? "to" : "from", group->peers[request->peer].number,
                 (unsigned long long)request->tag);
}

void even_ucx_message_finish(even_ucx_group *group, even_ucx_request *request, even_status status) {
  even_ucx_request **at = &group->messages->open;
  while (*at != request) {
    at = &(*at)->next;
  }
  *at = request->next;
  request->status = status;
  if (group->process_mark == even_process_mark()) { /* a child of a fork counts none of its parent's */
    even_waits_message_ends();
  }
  if (status != EVEN_OK) {
    request->error = *even_error_last();
  }
  request->done = true;
}

/* ---- moving, with the lock held ---- */

/* A header that names no rank of the group as its sender is none: ranks are places in tables. */
static void append(even_ucx_group *group) {
  even_ucx_messages *messages = group->messages;
  even_ucx_announced *message = messages->incoming;
  even_ucx_announced **at = &messages->waiting;
  if (message->header.sender < 0 || message->header.sender >= group->ranks) {
    return; /* the next header lands there */
  }
  messages->incoming = NULL;
  group->peers[message->header.sender].heard++;
  message->header.site[sizeof message->header.site - 1] = '\0';
  while (*at != NULL) {
    at = &(*at)->next;
  }
  message->next = NULL;
  *at = message;
}

/* Takes the headers that have come; whether there were any. Without memory for the next one it is taken later. */
static bool hear_headers(even_ucx_group *group) {
  even_ucx_messages *messages = group->messages;
  bool heard = false;
  while (!group->deaf) {
    void *request = messages->incoming_request;
    if (request != NULL) {
      signed char status = group->transport->status(group, request);
      if (status == EVEN_UCX_UNDER_WAY) {
        break;
      }
      group->transport->release(group, request);
      messages->incoming_request = NULL;
      if (status != 0) {
        break;
      }
      append(group);
      heard = true;
    }
    if (messages->incoming == NULL && EVEN_NEW(&messages->incoming) != EVEN_OK) {
      break;
    }
    request = group->transport->receive(group, &messages->incoming->header, sizeof messages->incoming->header,
                                        even_ucx_tag(EVEN_UCX_HEADER, 0, 0), EVEN_UCX_KIND_MASK);
    if (even_ucx_is_error(request)) {
      break;
    }
    messages->incoming_request = request;
    if (request == NULL) {
      append(group);
      heard = true;
    }
  }
  return heard;
}

static even_ucx_announced **find_message(even_ucx_messages *messages, const even_ucx_request *request) {
  even_ucx_announced **at = &messages->waiting;
  while (*at != NULL && !((*at)->header.tag == request->tag &&
                          (request->peer == EVEN_COMM_ANY_RANK || request->peer == (*at)->header.sender))) {
    at = &(*at)->next;
  }
  return at;
}

static bool fits(const even_ucx_request *request, const even_ucx_header *header) {
  return request->bytes == header->bytes &&
         (header->bytes == 0 || even_called_fits(header->elements, request->elements));
}

/* Gives a receive its message, where that has been announced; whether it was. */
static bool match(even_ucx_group *group, even_ucx_request *request) {
  even_ucx_announced **at = find_message(group->messages, request);
  even_ucx_announced *message = *at;
  if (message == NULL) {
    return false;
  }
  if (!fits(request, &message->header)) {
    even_ucx_message_refuse(group, request, message);
    return true;
  }
  if (request->bytes > 0 && even_ucx_number_is_taken(group, message)) {
    even_ucx_message_refuse_number(group, request, &message->header);
    return true;
  }
  *at = message->next;
  if (message->refused) {
    even_ucx_accept(group, message->header.sender, message->header.number);
  }
  if (!message->returned) {
    even_ucx_give_room_back(group, message->header.sender, message->header.bytes);
  }
  request->peer = message->header.sender;
  request->matched = true;
  if (request->bytes > 0) {
    even_ucx_receive(group, &request->parts[1], request->peer,
                     even_ucx_tag(EVEN_UCX_PAYLOAD, request->peer, message->header.number), request->data,
                     request->bytes);
  }
  even_free(message);
  return true;
}

/* Sets group->asked of the ranks from which something is asked that has not come yet; whether of any. */
static bool find_asked(even_ucx_group *group) {
  bool found = false;
  bool any = false;
  memset(group->asked, 0, (size_t)group->ranks * sizeof *group->asked);
  for (const even_ucx_request *request = group->messages->open; request != NULL; request = request->next) {
    if (!request->sends && !request->matched) {
      found = true;
      any = any || request->peer == EVEN_COMM_ANY_RANK;
      if (request->peer != EVEN_COMM_ANY_RANK) {
        group->asked[request->peer] = true;
      }
    }
  }
  for (int rank = 0; any && rank < group->ranks; rank++) {
    group->asked[rank] = true;
  }
  return found;
}

/* What is asked for may come behind what nobody asks for yet: that must not keep it away. */
static void make_room(even_ucx_group *group) {
  if (group->messages->waiting == NULL || !find_asked(group)) {
    return;
  }
  for (even_ucx_announced *message = group->messages->waiting; message != NULL; message = message->next) {
    if (!message->returned && group->asked[message->header.sender]) {
      message->returned = true;
      even_ucx_give_room_back(group, message->header.sender, message->header.bytes);
    }
  }
}

static void fail_all(even_ucx_group *group) {
  even_ucx_messages *messages = group->messages;
  while (messages->open != NULL) {
    even_ucx_request *request = messages->open;
    char doing[128];
    describe(group, request, doing, sizeof doing);
    even_ucx_abandon(group, request->parts, 2);
    even_ucx_message_finish(group, request, even_ucx_failure(group, doing));
  }
}

bool even_ucx_messages_move(even_ucx_group *group) {
  even_ucx_messages *messages = group->messages;
  if (messages == NULL || (messages->open == NULL && group->ended)) {
    return false;
  }
  if (group->ended) {
    fail_all(group);
    return true;
  }
  even_ucx_give_owed_room_back(group);
  bool moved = hear_headers(group);
  for (even_ucx_request *request = messages->open, *next = NULL; request != NULL; request = next) {
    next = request->next;
    if (!request->sends && !request->matched) {
      moved = match(group, request) || moved;
    }
    bool begun = request->sends ? request->begun : request->matched;
    if (!request->done && begun && even_ucx_settled(group, &request->parts[0]) &&
        even_ucx_settled(group, &request->parts[1])) {
      even_ucx_message_finish(group, request, EVEN_OK);
      moved = true;
    }
  }
  if (moved) {
    make_room(group);
  }
  return moved;
}

/* ---- does everybody live on whom something depends? ---- */

/* One who receives from any loses nothing with a rank that has closed the group, unless that was the last. */
static bool depends_on(const even_ucx_group *group, int rank) {
  int here = 0;
  for (int other = 0; other < group->ranks; other++) {
    here += other != group->rank && !group->peers[other].left;
  }
  for (const even_ucx_request *request = group->messages->open; request != NULL; request = request->next) {
    bool any = request->peer == EVEN_COMM_ANY_RANK;
    if (request->peer == rank || (any && (!group->peers[rank].left || here == 0))) {
      return true;
    }
  }
  return false;
}

/* One who waits for a message also looks whether the group is over, and whether those stand still on whom it depends.
 * The lock is let go meanwhile. */
static void look_around(even_ucx_group *group) {
  uint64_t now = even_clock_ns();
  if (even_ucx_look_is_due(&group->message_looks, now)) {
    even_ucx_end_over(group);
    for (int rank = 0; rank < group->ranks; rank++) {
      group->waits[rank] = rank != group->rank && depends_on(group, rank);
    }
    even_ucx_look(group, &group->message_looks, group->waits, now);
    even_ucx_look_at_whole(group);
  }
}

static void check_lives(even_ucx_group *group) {
  for (int rank = 0; rank < group->ranks && !group->ended; rank++) {
    const even_ucx_peer *peer = &group->peers[rank];
    if (rank == group->rank || (peer->failed == 0 && !peer->left && !peer->gone) || !depends_on(group, rank)) {
      continue;
    }
    while (even_ucx_move(group)) { /* what it sent before it went */
    }
    if (depends_on(group, rank)) {
      even_ucx_end_lost(group, rank);
    }
  }
}

/* ---- the background ---- */

static void *work_in_background(void *argument) {
  even_ucx_group *group = argument;
  even_ucx_messages *messages = group->messages;
  even_waits_rest(NULL, 0); /* what it may do is seen from the messages that are open */
  (void)pthread_mutex_lock(&group->lock);
  while (!messages->stop) {
    if (messages->open == NULL || messages->waiters > 0) {
      (void)pthread_cond_wait(&messages->work, &group->lock);
    } else {
      uint32_t polls = UINT32_MAX; /* it never polls: others need the core */
      even_ucx_rest(group, &polls, EVEN_COMM_LOOK_NS);
      check_lives(group);
    }
  }
  (void)pthread_mutex_unlock(&group->lock);
  return NULL;
}

/* Something is left to do that nobody waits for. Without a thread it is done when somebody waits. */
static void leave_to_background(even_ucx_group *group) {
  even_ucx_messages *messages = group->messages;
  if (messages->open == NULL || messages->waiters > 0 || messages->stop) {
    return;
  }
  if (!messages->started) {
    messages->started = even_thread_start(work_in_background, group, &messages->thread) == EVEN_OK;
  }
  (void)pthread_cond_signal(&messages->work);
}

even_status even_ucx_messages_open(even_ucx_group *group) {
  EVEN_TRY(EVEN_NEW(&group->messages));
  (void)pthread_cond_init(&group->messages->work, NULL);
  return EVEN_OK;
}

void even_ucx_messages_stop(even_ucx_group *group) {
  even_ucx_messages *messages = group->messages;
  (void)pthread_mutex_lock(&group->lock);
  bool started = messages->started;
  messages->gave_up = messages->open != NULL;
  while (messages->open != NULL) {
    even_ucx_request *request = messages->open;
    char doing[128];
    describe(group, request, doing, sizeof doing);
    even_ucx_abandon(group, request->parts, 2);
    even_ucx_message_finish(group, request,
                            even_fail(EVEN_ERR_STATE, "rank %d left the group before its %s was done",
                                      group->peers[group->rank].number, doing));
  }
  messages->stop = true;
  messages->started = false;
  (void)pthread_cond_signal(&messages->work);
  even_ucx_wake(group);
  (void)pthread_mutex_unlock(&group->lock);
  if (started) {
    even_thread_join(messages->thread);
  }
}

bool even_ucx_messages_are_left(even_ucx_group *group) {
  (void)hear_headers(group);
  return group->messages->gave_up || group->messages->waiting != NULL;
}

void even_ucx_messages_hear_no_more(even_ucx_group *group) {
  if (group->messages != NULL) {
    even_ucx_transfer incoming = {.request = group->messages->incoming_request, .peer = group->rank};
    even_ucx_abandon(group, &incoming, 1);
    group->messages->incoming_request = NULL;
  }
}

void even_ucx_messages_free(even_ucx_group *group) {
  even_ucx_messages *messages = group->messages;
  if (messages == NULL) {
    return;
  }
  even_free(messages->incoming);
  while (messages->waiting != NULL) {
    even_ucx_announced *message = messages->waiting;
    messages->waiting = message->next;
    even_free(message);
  }
  even_free(messages);
  group->messages = NULL;
}

/* ---- the calls ---- */

/* With the lock held, under which alone requests end: none is begun after the last has ended. */
static even_status check_open(const even_ucx_group *group, const even_ucx_request *wanted) {
  if (group->has_left) {
    return even_fail(EVEN_ERR_STATE, "rank %d has left the group", group->peers[group->rank].number);
  }
  if (group->ended) {
    char doing[128];
    describe(group, wanted, doing, sizeof doing);
    return even_ucx_failure(group, doing);
  }
  return EVEN_OK;
}

static void start_send(even_ucx_group *group, even_ucx_request *request) {
  even_ucx_peer *peer = &group->peers[request->peer];
  request->begun = true;
  even_ucx_take_room(group, request->peer, request->bytes);
  request->header.bytes = request->bytes;
  request->header.number = peer->sent++;
  even_ucx_send(group, &request->parts[0], request->peer, even_ucx_tag(EVEN_UCX_HEADER, group->rank, 0),
                &request->header, offsetof(even_ucx_header, site) + strlen(request->header.site) + 1);
  if (request->bytes > 0) {
    even_ucx_send(group, &request->parts[1], request->peer,
                  even_ucx_tag(EVEN_UCX_PAYLOAD, group->rank, request->header.number), request->data, request->bytes);
  }
}

void even_ucx_messages_start(even_ucx_group *group, int peer) {
  for (even_ucx_request *request = group->messages->open; request != NULL; request = request->next) {
    if (request->sends && !request->begun && request->peer == peer) {
      if (!even_ucx_has_room(group, peer, request->bytes)) {
        return; /* in the order of the calls */
      }
      start_send(group, request);
    }
  }
}

static void queue(even_ucx_group *group, even_ucx_request *request) {
  even_ucx_request **at = &group->messages->open;
  while (*at != NULL) {
    at = &(*at)->next;
  }
  *at = request;
  even_waits_message_begins();
  if (request->sends) {
    even_ucx_messages_start(group, request->peer);
  }
  (void)even_ucx_move(group);
  if (!request->sends) {
    make_room(group);
  }
  leave_to_background(group);
}

static even_status begin(even_ucx_group *group, const even_ucx_request *wanted, even_comm_request **out) {
  const even_comm_called called = even_called_take_message();
  even_ucx_request *request = NULL;
  even_waits_call();
  EVEN_TRY(EVEN_NEW(&request));
  *request = *wanted;
  request->elements = called.elements;
  request->header = (even_ucx_header){.tag = wanted->tag, .sender = group->rank, .elements = called.elements};
  (void)snprintf(request->header.site, sizeof request->header.site, "%s", called.site == NULL ? "" : called.site);
  (void)pthread_mutex_lock(&group->lock);
  even_status status = check_open(group, wanted);
  if (status == EVEN_OK) {
    queue(group, request);
  }
  (void)pthread_mutex_unlock(&group->lock);
  if (status != EVEN_OK) {
    even_free(request);
    return status;
  }
  *out = (even_comm_request *)(void *)request;
  return EVEN_OK;
}

even_status even_ucx_send_begin(even_comm *comm, const void *data, size_t bytes, int peer, uint64_t tag,
                                even_comm_request **out) {
  /* The data of a send are only read. */
  unsigned char *bytes_at = (unsigned char *)(uintptr_t)data;
  even_ucx_request wanted = {.comm = comm, .sends = true, .data = bytes_at, .bytes = bytes, .peer = peer, .tag = tag};
  return begin(even_ucx_of(comm), &wanted, out);
}

even_status even_ucx_receive_begin(even_comm *comm, void *data, size_t bytes, int peer, uint64_t tag,
                                   even_comm_request **out) {
  even_ucx_request wanted = {.comm = comm, .data = data, .bytes = bytes, .peer = peer, .tag = tag};
  return begin(even_ucx_of(comm), &wanted, out);
}

bool even_ucx_request_done(even_comm_request *handle) {
  even_ucx_request *request = (even_ucx_request *)(void *)handle;
  even_ucx_group *group = even_ucx_of(request->comm);
  (void)pthread_mutex_lock(&group->lock);
  if (!request->done && !even_ucx_move(group)) {
    even_ucx_end_over(group); /* nobody else may: the watcher can be missing */
    check_lives(group);
    (void)even_ucx_move(group);
  }
  bool done = request->done;
  (void)pthread_mutex_unlock(&group->lock);
  return done;
}

static void time_out(even_ucx_group *group, even_ucx_request *request, uint64_t limit_ns) {
  char doing[128];
  describe(group, request, doing, sizeof doing);
  (void)even_fail(EVEN_ERR_TIMEOUT, "Timed out: nothing came of a %s within the timeout of %.3g s", doing,
                  (double)limit_ns * 1e-9);
  if (request->peer == EVEN_COMM_ANY_RANK) {
    (void)even_error_fix("see what the other ranks are doing (a stack dump), or raise the timeout");
  } else {
    int number = group->peers[request->peer].number;
    (void)even_error_place(number, NULL);
    (void)even_error_fix("see what rank %d is doing (a stack dump), or raise the timeout", number);
  }
  const even_error why = *even_error_last();
  even_ucx_end(group);
  even_ucx_abandon(group, request->parts, 2);
  even_ucx_message_finish(group, request, even_error_restore(&why));
  fail_all(group);
}

static void tell_wait(even_ucx_group *group, even_ucx_request *request, even_ucx_waiting *waiting, uint64_t began) {
  char doing[EVEN_WAITS_DOING_BYTES];
  if (!even_waits_is_told(&waiting->of, began, even_clock_ns())) {
    return;
  }
  describe(group, request, doing, sizeof doing);
  even_ucx_tell_receive(group, request, waiting, doing, began, even_clock_ns());
}

even_status even_ucx_request_wait(even_comm_request *handle, double timeout_seconds, int *peer) {
  even_ucx_request *request = (even_ucx_request *)(void *)handle;
  even_ucx_group *group = even_ucx_of(request->comm);
  uint64_t began = even_clock_ns();
  uint64_t limit = timeout_seconds > 0 ? even_comm_limit_ns(timeout_seconds) : atomic_load(&group->timeout_ns);
  uint32_t polls = 0;
  bool refused = false;
  even_ucx_waiting waiting = {.asked_ns = 0};
  even_error told = {.status = EVEN_OK};
  even_waits_call();
  (void)pthread_mutex_lock(&group->lock);
  group->messages->waiters++;
  (void)even_ucx_move(group);
  while (!request->done && !refused) {
    uint64_t waited = even_clock_ns() - began;
    if (waited >= limit) {
      time_out(group, request, limit);
      break;
    }
    even_ucx_rest(group, &polls, limit - waited);
    if (!request->done) {
      tell_wait(group, request, &waiting, began); /* first: who has found the same may have left for it */
      look_around(group);
      check_lives(group);
      refused = !request->done && !group->ended && even_ucx_refusal_take(group);
      told = refused ? *even_error_last() : told;
    }
  }
  group->messages->waiters--;
  leave_to_background(group);
  bool found = even_waits_end(&waiting.of);
  if (!refused && request->untold) {
    even_ucx_message_tell_sender(group, request);
  }
  if (!refused && request->status != EVEN_OK) { /* refused: of another message, and this one goes on */
    told = request->error;
  }
  (void)pthread_mutex_unlock(&group->lock);
  if (found) {
    even_watcher_look();
  }
  if (peer != NULL && !refused) {
    *peer = request->peer;
  }
  return told.status == EVEN_OK ? EVEN_OK : even_error_restore(&told);
}

void even_ucx_request_free(even_comm_request *handle) {
  even_ucx_request *request = (even_ucx_request *)(void *)handle;
  even_ucx_group *group = even_ucx_of(request->comm);
  (void)pthread_mutex_lock(&group->lock);
  if (!request->done && (request->begun || request->matched)) {
    (void)even_fail(EVEN_ERR_REVOKED, "the group was revoked: rank %d gave up a message half moved",
                    group->peers[group->rank].number);
    even_ucx_end(group);
    fail_all(group);
  } else if (!request->done) {
    even_ucx_message_finish(group, request, EVEN_OK);
  }
  (void)pthread_mutex_unlock(&group->lock);
  even_free(request);
}
