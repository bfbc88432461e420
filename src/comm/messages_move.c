/* What moves messages: sends into the streams, and out of the streams to who asked first, or into keeping. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "comm/called.h"
#include "comm/messages.h"

#include <string.h>

void even_messages_finish(even_comm_request *request, even_status status) {
  request->status = status;
  if (status != EVEN_OK) {
    request->error = *even_error_last();
  }
  request->done = true;
  request->comm->messages->open--;
  even_message_bell_ring(request->comm, request->comm->rank); /* its waiter, where another thread did the moving */
}

void even_messages_unlink(even_comm_request *request) {
  even_messages *messages = request->comm->messages;
  even_comm_request **at = request->sends ? &messages->streams[request->peer].first : &messages->receives;
  while (*at != request) {
    at = &(*at)->next;
  }
  *at = request->next;
}

/* ---- out ---- */

static bool send_to(even_comm *comm, int rank) {
  even_message_stream *stream = &comm->messages->streams[rank];
  bool moved = false;
  while (stream->first != NULL) {
    even_comm_request *request = stream->first;
    if (!request->headed) {
      const even_message_header header = {.tag = request->tag,
                                          .what = request->bytes | (uint64_t)request->site << EVEN_MESSAGE_SITE_SHIFT |
                                                  (uint64_t)request->elements << EVEN_MESSAGE_ELEMENTS_SHIFT};
      request->headed = even_channel_write(comm, rank, &header, sizeof header) == sizeof header;
      moved = moved || request->headed;
    }
    if (request->headed) {
      size_t part = even_channel_write(comm, rank, request->data + request->moved, request->bytes - request->moved);
      request->moved += part;
      moved = moved || part > 0;
    }
    if (!request->headed || request->moved < request->bytes) {
      break;
    }
    even_messages_unlink(request);
    even_messages_finish(request, EVEN_OK);
  }
  return moved;
}

/* ---- in ---- */

static bool wants_from(const even_comm_request *request, int rank) {
  return request->peer == rank || request->peer == EVEN_COMM_ANY_RANK;
}

static bool fits(const even_comm_request *request, const even_message_words *words) {
  return request->bytes == words->bytes && (words->bytes == 0 || even_called_fits(words->elements, request->elements));
}

/* Where it is received, is known to who waits for it alone (messages.c), who tells the sender, too. */
static even_status refuse(even_comm_request *request, int from, even_message_words *words) {
  char sent[48];
  char wanted[48];
  char site[EVEN_FLIGHT_SITE_BYTES];
  words->refusal = words->refusal != 0 ? words->refusal : ++request->comm->messages->refusals;
  request->refusal = words->refusal;
  request->untold = true;
  request->refused_from = from;
  even_message_site_of(request->comm, from, words->site, site, sizeof site);
  even_call_describe_elements(words->elements, sent, sizeof sent);
  even_call_describe_elements(request->elements, wanted, sizeof wanted);
  (void)even_fail(EVEN_ERR_MISMATCH, "rank %d sent %zu bytes%s with tag %llu, but rank %d receives %zu%s%s%s", from,
                  words->bytes, sent, (unsigned long long)request->tag, request->comm->rank, request->bytes, wanted,
                  site[0] == '\0' ? "" : "; sent at ", site);
  (void)even_error_place(from, NULL);
  return even_error_fix(EVEN_MESSAGE_DIFFERS_FIX);
}

/* The first receive that waits for such a message; those that expect another size or dtype fail. */
static even_comm_request *find_taker(even_comm *comm, int from, even_message_words *words) {
  even_comm_request *request = comm->messages->receives;
  while (request != NULL) {
    even_comm_request *next = request->next;
    bool taken = request->headed || !wants_from(request, from) || request->tag != words->tag;
    if (!taken && fits(request, words)) {
      return request;
    }
    if (!taken) {
      even_messages_unlink(request);
      even_messages_finish(request, refuse(request, from, words));
    }
    request = next;
  }
  return NULL;
}

static even_comm_request *first_wanting(const even_comm *comm, int from) {
  even_comm_request *request = comm->messages->receives;
  while (request != NULL && (request->headed || !wants_from(request, from))) {
    request = request->next;
  }
  return request;
}

/* It has come to a receive that it fits. */
static void take_back(even_comm *comm, int from, const even_message_words *words) {
  if (words->refusal != 0) {
    comm->messages->accepted[words->refusal % EVEN_MESSAGES_ACCEPTED] = words->refusal;
    even_refusal_withdraw(comm, from, words->tag);
  }
}

/* Decides where the message that comes in goes. False where nobody wants anything from there. */
static bool direct(even_comm *comm, even_message_stream *stream, int from) {
  stream->taker = find_taker(comm, from, &stream->words);
  if (stream->taker != NULL) {
    stream->taker->headed = true;
    stream->taker->peer = from;
    take_back(comm, from, &stream->words);
    return true;
  }
  even_comm_request *wanting = first_wanting(comm, from);
  if (wanting == NULL) {
    return false;
  }
  /* Somebody waits for what comes behind it. */
  void *kept = NULL;
  size_t bytes = 0;
  even_status status = even_add_size(sizeof *stream->keeper, stream->words.bytes, &bytes)
                           ? even_alloc(1, bytes, &kept)
                           : even_fail(EVEN_ERR_OVERFLOW, "a message that is larger than memory can be");
  if (status != EVEN_OK) {
    even_messages_unlink(wanting);
    even_messages_finish(wanting, status);
    return false;
  }
  stream->keeper = kept;
  *stream->keeper = (even_kept_message){.from = from, .words = stream->words};
  return true;
}

static void keep(even_messages *messages, even_kept_message *message) {
  even_kept_message **at = &messages->kept;
  while (*at != NULL) {
    at = &(*at)->next;
  }
  *at = message;
}

static void deliver(even_comm_request *request, const even_kept_message *message) {
  if (message->words.bytes > 0) {
    memcpy(request->data, message->data, message->words.bytes);
  }
  request->peer = message->from;
  take_back(request->comm, message->from, &message->words);
  even_messages_unlink(request);
  even_messages_finish(request, EVEN_OK);
}

static void arrive(even_comm *comm, even_message_stream *stream) {
  if (stream->taker != NULL) {
    even_messages_unlink(stream->taker);
    even_messages_finish(stream->taker, EVEN_OK);
  } else {
    /* Somebody may have asked for it meanwhile. */
    even_comm_request *taker = find_taker(comm, stream->keeper->from, &stream->words);
    stream->keeper->words = stream->words;
    if (taker != NULL) {
      deliver(taker, stream->keeper);
      even_free(stream->keeper);
    } else {
      keep(comm->messages, stream->keeper);
    }
  }
  stream->headed = false;
  stream->got = 0;
  stream->taker = NULL;
  stream->keeper = NULL;
}

static bool read_words(even_comm *comm, even_message_stream *stream, int from) {
  even_message_header header;
  if (even_channel_read(comm, from, &header, sizeof header) == 0) {
    return false;
  }
  stream->words = (even_message_words){.tag = header.tag,
                                       .bytes = (size_t)(header.what & EVEN_MESSAGE_MOST_BYTES),
                                       .site = (uint32_t)(header.what >> EVEN_MESSAGE_SITE_SHIFT) & EVEN_MESSAGE_SITES,
                                       .elements = (uint32_t)(header.what >> EVEN_MESSAGE_ELEMENTS_SHIFT)};
  return true;
}

static bool receive_from(even_comm *comm, int rank) {
  even_message_stream *stream = &comm->messages->streams[rank];
  bool moved = false;
  for (;;) {
    if (!stream->headed) {
      if (first_wanting(comm, rank) == NULL || !read_words(comm, stream, rank)) {
        return moved;
      }
      stream->headed = true;
      moved = true;
    }
    if (stream->taker == NULL && stream->keeper == NULL && !direct(comm, stream, rank)) {
      return moved;
    }
    unsigned char *to = stream->taker != NULL ? stream->taker->data : stream->keeper->data;
    size_t bytes = stream->words.bytes;
    size_t part = even_channel_read(comm, rank, bytes == 0 ? NULL : to + stream->got, bytes - stream->got);
    stream->got += part;
    moved = moved || part > 0;
    if (stream->got < bytes) {
      return moved;
    }
    arrive(comm, stream);
    moved = true;
  }
}

void even_messages_offer_kept(even_comm *comm, even_comm_request *request) {
  for (even_kept_message **at = &comm->messages->kept; *at != NULL; at = &(*at)->next) {
    even_kept_message *message = *at;
    if (!wants_from(request, message->from) || message->words.tag != request->tag) {
      continue;
    }
    if (!fits(request, &message->words)) {
      even_messages_unlink(request);
      even_messages_finish(request, refuse(request, message->from, &message->words));
      return;
    }
    *at = message->next;
    deliver(request, message);
    even_free(message);
    return;
  }
}

bool even_messages_move(even_comm *comm) {
  bool moved = false;
  if (comm->messages->stop || !even_group_whole(comm)) {
    return false; /* who waited may be gone, and the memory to move to with it */
  }
  for (int rank = 0; rank < comm->ranks; rank++) {
    moved = send_to(comm, rank) || moved;
    moved = receive_from(comm, rank) || moved;
  }
  comm->messages->moves += moved;
  return moved;
}
