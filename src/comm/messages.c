/* Beginning, awaiting and giving up messages. Whoever waits for one moves all; where nobody waits, a thread does. */
#include "comm/messages.h"
#include "comm/watcher.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "comm/called.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/thread.h"

#include <stdio.h>
#include <string.h>

static void describe(const even_comm_request *request, char *text, size_t bytes) {
  const char *verb = request->sends ? "send" : "receive";
  const char *preposition = request->sends ? "to" : "from";
  if (request->peer == EVEN_COMM_ANY_RANK) {
    (void)snprintf(text, bytes, "receive of %zu bytes from any rank with tag %llu", request->bytes,
                   (unsigned long long)request->tag);
    return;
  }
  (void)snprintf(text, bytes, "%s of %zu bytes %s rank %d with tag %llu", verb, request->bytes, preposition,
                 request->peer, (unsigned long long)request->tag);
}

static void fail_request(even_comm_request *request) {
  char doing[128];
  describe(request, doing, sizeof doing);
  even_messages_unlink(request);
  even_messages_finish(request, even_group_failure_in(request->comm, doing));
}

/* Of a message that was coming in nothing is left: its receive has ended before it. */
static void forget_incoming(even_messages *messages, int rank) {
  even_message_stream *stream = &messages->streams[rank];
  even_free(stream->keeper);
  stream->keeper = NULL;
  stream->taker = NULL;
  stream->headed = false;
  stream->got = 0;
}

/* The group has ended: so have all requests. */
static void fail_all(even_comm *comm) {
  even_messages *messages = comm->messages;
  for (int rank = 0; rank < comm->ranks; rank++) {
    while (messages->streams[rank].first != NULL) {
      fail_request(messages->streams[rank].first);
    }
    forget_incoming(messages, rank);
  }
  while (messages->receives != NULL) {
    fail_request(messages->receives);
  }
}

/* Ends one that is open when its own rank leaves. */
static void leave_request(even_comm *comm) {
  even_messages *messages = comm->messages;
  even_comm_request *request = messages->receives;
  for (int rank = 0; request == NULL && rank < comm->ranks; rank++) {
    request = messages->streams[rank].first;
  }
  char doing[128];
  describe(request, doing, sizeof doing);
  even_messages_unlink(request);
  even_messages_finish(request,
                       even_fail(EVEN_ERR_STATE, "rank %d left the group before its %s was done", comm->rank, doing));
}

/* ---- does everybody live on whom something depends? ---- */

static bool has_left(const even_comm *comm, int rank) {
  return atomic_load(&comm->controls[rank].left) != 0;
}

static bool depends_on(const even_comm *comm, int rank) {
  const even_messages *messages = comm->messages;
  if (messages->streams[rank].first != NULL) {
    return true;
  }
  int here = 0;
  for (int other = 0; other < comm->ranks; other++) {
    here += other != comm->rank && !has_left(comm, other);
  }
  for (even_comm_request *request = messages->receives; request != NULL; request = request->next) {
    /* One who receives from any loses nothing with a rank that has closed the group, unless that was the last. */
    if (request->peer == rank || (request->peer == EVEN_COMM_ANY_RANK && (!has_left(comm, rank) || here == 0))) {
      return true;
    }
  }
  return false;
}

/* A peer that stands still harms only those that wait for it. And whoever opened the group may say that it is over. */
static void look_around(even_comm *comm, bool waits) {
  uint64_t now = even_clock_ns();
  for (int rank = 0; rank < comm->ranks; rank++) {
    if (rank == comm->rank || !depends_on(comm, rank)) {
      continue;
    }
    even_peer_state state = even_peers_look(comm, rank, now);
    if (state == EVEN_PEER_LIVES || (state == EVEN_PEER_STANDS && !waits)) {
      continue;
    }
    while (even_messages_move(comm)) { /* what it sent before */
    }
    if (depends_on(comm, rank)) {
      (void)even_peers_end_group(comm, rank, state);
    }
  }
  if (even_comm_is_over(comm)) {
    even_group_end(comm, EVEN_GROUP_REVOKED);
  }
}

static void look_around_at_times(even_comm *comm) {
  uint64_t now = even_clock_ns();
  if (now - comm->messages->lives_checked_ns >= EVEN_COMM_LOOK_NS) {
    comm->messages->lives_checked_ns = now;
    look_around(comm, false);
  }
}

/* Sleeps until a peer has done something for this rank, at most `limit_ns`. The lock is held, and let go meanwhile. */
static void sleep_unlocked(even_comm *comm, const even_comm_request *request, uint64_t limit_ns) {
  even_comm_control *own = &comm->controls[comm->rank];
  (void)atomic_fetch_add(&own->message_sleepers, 1u);
  uint32_t bell = atomic_load(&own->message_bell);
  bool idle = !even_messages_move(comm) && even_group_whole(comm) && (request == NULL || !request->done);
  (void)pthread_mutex_unlock(&comm->messages->lock);
  if (idle) {
    even_futex_wait(&own->message_bell, bell, limit_ns < EVEN_COMM_LOOK_NS ? limit_ns : EVEN_COMM_LOOK_NS);
  }
  (void)atomic_fetch_sub(&own->message_sleepers, 1u);
  (void)pthread_mutex_lock(&comm->messages->lock);
}

/* ---- the background ---- */

static void *work_in_background(void *argument) {
  even_comm *comm = argument;
  even_messages *messages = comm->messages;
  even_waits_rest(NULL, 0); /* what it may do is seen from the messages that are open */
  (void)pthread_mutex_lock(&messages->lock);
  while (!messages->stop) {
    if (messages->open == 0 || messages->waiters > 0) {
      (void)pthread_cond_wait(&messages->work, &messages->lock);
    } else if (!even_group_whole(comm)) {
      fail_all(comm);
    } else {
      sleep_unlocked(comm, NULL, EVEN_COMM_LOOK_NS);
      look_around_at_times(comm);
    }
  }
  (void)pthread_mutex_unlock(&messages->lock);
  return NULL;
}

/* Something is left to do that nobody waits for. Without a thread it is done when somebody waits. */
static void leave_to_background(even_comm *comm) {
  even_messages *messages = comm->messages;
  if (messages->open == 0 || messages->waiters > 0 || messages->stop) {
    return;
  }
  if (!messages->started) {
    messages->started = even_thread_start(work_in_background, comm, &messages->thread) == EVEN_OK;
  }
  (void)pthread_cond_signal(&messages->work);
}

even_status even_messages_open(even_comm *comm) {
  EVEN_TRY(EVEN_NEW(&comm->messages));
  (void)pthread_mutex_init(&comm->messages->lock, NULL);
  (void)pthread_cond_init(&comm->messages->work, NULL);
  return EVEN_NEW_ARRAY(&comm->messages->streams, (size_t)comm->ranks);
}

void even_messages_stop(even_comm *comm) {
  even_messages *messages = comm->messages;
  (void)pthread_mutex_lock(&messages->lock);
  bool started = messages->started;
  while (messages->open > 0) {
    leave_request(comm);
  }
  for (int rank = 0; rank < comm->ranks; rank++) {
    forget_incoming(messages, rank);
  }
  messages->stop = true;
  messages->started = false;
  (void)pthread_cond_signal(&messages->work);
  (void)pthread_mutex_unlock(&messages->lock);
  even_message_bell_ring(comm, comm->rank);
  if (started) {
    even_thread_join(messages->thread);
  }
}

void even_messages_free(even_comm *comm) {
  even_messages *messages = comm->messages;
  if (messages == NULL) {
    return;
  }
  for (int rank = 0; messages->streams != NULL && rank < comm->ranks; rank++) {
    even_free(messages->streams[rank].keeper);
  }
  while (messages->kept != NULL) {
    even_kept_message *message = messages->kept;
    messages->kept = message->next;
    even_free(message);
  }
  even_free(messages->streams);
  even_free(messages);
}

/* ---- the calls ---- */

bool even_shared_has_messages(const even_comm *comm) {
  return comm->layout.ring_bytes > 0;
}

/* With the lock held, under which alone requests end: none is begun after the last has ended. */
static even_status check_open(const even_comm *comm, const even_comm_request *wanted) {
  if (comm->messages->stop || has_left(comm, comm->rank)) {
    return even_fail(EVEN_ERR_STATE, "rank %d has left the group", comm->rank);
  }
  if (!even_group_whole(comm)) {
    char doing[128];
    describe(wanted, doing, sizeof doing);
    return even_group_failure_in(comm, doing);
  }
  return EVEN_OK;
}

static void queue(even_comm *comm, even_comm_request *request) {
  even_messages *messages = comm->messages;
  even_comm_request **at = request->sends ? &messages->streams[request->peer].first : &messages->receives;
  while (*at != NULL) {
    at = &(*at)->next;
  }
  *at = request;
  messages->open++;
  if (!request->sends) {
    even_messages_offer_kept(comm, request);
  }
  (void)even_messages_move(comm);
  leave_to_background(comm);
}

static even_status begin(even_comm *comm, const even_comm_request *wanted, even_comm_request **out) {
  *out = NULL;
  const even_comm_called called = even_called_take_message();
  even_waits_call();
  if (wanted->bytes > EVEN_MESSAGE_MOST_BYTES) {
    return even_fail(EVEN_ERR_OVERFLOW, "a message of %zu bytes is more than memory can hold", wanted->bytes);
  }
  EVEN_TRY(EVEN_NEW(out));
  **out = *wanted;
  (*out)->elements = called.elements;
  (void)pthread_mutex_lock(&comm->messages->lock);
  (*out)->site = wanted->sends ? even_message_site_number(comm, called.site) : 0;
  even_status status = check_open(comm, wanted);
  if (status == EVEN_OK) {
    queue(comm, *out);
  }
  (void)pthread_mutex_unlock(&comm->messages->lock);
  if (status != EVEN_OK) {
    even_free(*out);
    *out = NULL;
  }
  return status;
}

even_status even_shared_send_begin(even_comm *comm, const void *data, size_t bytes, int peer, uint64_t tag,
                                   even_comm_request **out) {
  /* The data of a send are only read. */
  unsigned char *bytes_at = (unsigned char *)(uintptr_t)data;
  even_comm_request wanted = {.comm = comm, .sends = true, .data = bytes_at, .bytes = bytes, .peer = peer, .tag = tag};
  return begin(comm, &wanted, out);
}

even_status even_shared_receive_begin(even_comm *comm, void *data, size_t bytes, int peer, uint64_t tag,
                                      even_comm_request **out) {
  even_comm_request wanted = {.comm = comm, .data = data, .bytes = bytes, .peer = peer, .tag = tag};
  return begin(comm, &wanted, out);
}

bool even_shared_request_done(even_comm_request *request) {
  even_comm *comm = request->comm;
  (void)pthread_mutex_lock(&comm->messages->lock);
  if (!request->done && !even_messages_move(comm)) {
    look_around_at_times(comm); /* nobody else may: the thread can be missing */
  }
  if (!request->done && !even_group_whole(comm)) {
    fail_all(comm);
  }
  bool done = request->done;
  (void)pthread_mutex_unlock(&comm->messages->lock);
  return done;
}

static void time_out(even_comm_request *request, uint64_t limit_ns) {
  even_comm *comm = request->comm;
  uint32_t cause = EVEN_GROUP_TIMEOUT | (uint32_t)request->peer;
  char doing[128];
  describe(request, doing, sizeof doing);
  char peers[EVEN_WAITS_TEXT] = "";
  if (request->peer != EVEN_COMM_ANY_RANK) {
    even_waits_describe(comm, request->peer, peers, sizeof peers);
  }
  (void)even_fail(EVEN_ERR_TIMEOUT, "Timed out: nothing came of a %s within the timeout of %.3g s%s", doing,
                  (double)limit_ns * 1e-9, peers);
  if (request->peer == EVEN_COMM_ANY_RANK) {
    (void)even_error_fix("see what the other ranks are doing (a stack dump), or raise the timeout");
    cause = EVEN_GROUP_ALL_LATE | (uint32_t)comm->rank;
  } else {
    (void)even_error_place(request->peer, NULL);
    (void)even_error_fix("see what rank %d is doing (a stack dump), or raise the timeout", request->peer);
  }
  even_messages_unlink(request);
  even_messages_finish(request, EVEN_ERR_TIMEOUT);
  even_group_end(comm, cause);
  fail_all(comm);
}

/* Of a receive that a message did not fit: who waits for it knows where that is. With the lock held, which is let go to
 * ask for that: of several who wait for it the first asks. */
static void tell_sender(even_comm_request *request) {
  const even_flight_writer *flight = &request->comm->flight;
  even_messages *messages = request->comm->messages;
  char site[EVEN_FLIGHT_SITE_BYTES];
  request->untold = false;
  (void)pthread_mutex_unlock(&messages->lock);
  bool known = flight->ask != NULL && flight->ask(flight->context, site, sizeof site);
  (void)pthread_mutex_lock(&messages->lock);
  if (known) {
    size_t length = strlen(request->error.what);
    (void)snprintf(request->error.what + length, sizeof request->error.what - length, "; received at %s", site);
  }
  if (messages->accepted[request->refusal % EVEN_MESSAGES_ACCEPTED] != request->refusal) {
    even_refusal_say(request->comm, request->refused_from, request->tag, &request->error);
  }
}

/* With the lock held, which is let go meanwhile. */
static void tell_wait(even_comm_request *request, even_waiting *waiting, uint64_t since_ns, uint64_t now_ns) {
  char doing[EVEN_WAITS_DOING_BYTES];
  int peer = request->peer;
  describe(request, doing, sizeof doing);
  (void)pthread_mutex_unlock(&request->comm->messages->lock);
  (void)even_waits_for_message(request->comm, waiting, request, doing, peer, since_ns, now_ns);
  (void)pthread_mutex_lock(&request->comm->messages->lock);
}

even_status even_shared_request_wait(even_comm_request *request, double timeout_seconds, int *peer) {
  even_comm *comm = request->comm;
  even_messages *messages = comm->messages;
  even_waiting waiting = {0};
  even_waits_call();
  uint64_t began = even_clock_ns();
  uint64_t checked = began;
  uint64_t limit = timeout_seconds > 0 ? even_comm_limit_ns(timeout_seconds) : comm->timeout_ns;
  (void)pthread_mutex_lock(&messages->lock);
  messages->waiters++;
  uint64_t moves = messages->moves;
  bool refused = false;
  even_error told = {.status = EVEN_OK};
  for (uint32_t polls = 0; !request->done && !refused;) {
    if (!even_group_whole(comm)) {
      fail_all(comm);
      continue;
    }
    if (even_messages_move(comm)) {
      polls = 0;
      continue;
    }
    if (polls < comm->arrival.most) {
      polls++;
      (void)pthread_mutex_unlock(&messages->lock); /* others may want to begin something */
      (void)pthread_mutex_lock(&messages->lock);
      continue;
    }
    uint64_t now = even_clock_ns();
    if (now - began >= limit) {
      time_out(request, limit);
      break;
    }
    uint64_t tried = now; /* before it is tried whether anything can be moved */
    sleep_unlocked(comm, request, limit - (now - began));
    now = even_clock_ns();
    bool moved = moves != messages->moves;
    if (moved) {
      moves = messages->moves;
      (void)even_waits_end(&waiting); /* and another begins */
    }
    if (now - checked >= EVEN_COMM_LOOK_NS || (request->peer >= 0 && has_left(comm, request->peer))) {
      checked = now;
      if (!moved) {
        tell_wait(request, &waiting, began, tried);
      }
      look_around(comm, true);
    }
    refused = !request->done && even_group_whole(comm) && even_shared_refused(comm, false);
    told = refused ? *even_error_last() : told;
  }
  messages->waiters--;
  leave_to_background(comm);
  bool found = even_waits_end(&waiting);
  if (!refused && request->untold) {
    tell_sender(request);
  }
  if (!refused && request->status != EVEN_OK) { /* refused: of another message, and this one goes on */
    told = request->error;
  }
  (void)pthread_mutex_unlock(&messages->lock);
  if (found) {
    even_watcher_look();
  }
  if (peer != NULL && !refused) {
    *peer = request->peer;
  }
  return told.status == EVEN_OK ? EVEN_OK : even_error_restore(&told);
}

void even_shared_request_free(even_comm_request *request) {
  even_comm *comm = request->comm;
  (void)pthread_mutex_lock(&comm->messages->lock);
  if (!request->done) {
    if (request->headed) {
      even_group_end(comm, EVEN_GROUP_REVOKED);
      fail_all(comm);
    } else {
      even_messages_unlink(request);
      even_messages_finish(request, EVEN_OK);
    }
  }
  (void)pthread_mutex_unlock(&comm->messages->lock);
  even_free(request);
}
