/* Messages that do not fit where they are received: the receive fails there, and the sender, who may be long past it,
 * is told at its next call. It is told nothing where the message is received after all before it has heard. */
#include "comm/ucx/messages.h"

#include "base/fail.h"
#include "comm/called.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

/* How long that may take. */
#define SAYING_NS ((uint64_t)2000 * 1000000u)
/* A word that takes another one back was sent right behind it, or there is none yet. */
#define LASTING_NS ((uint64_t)200 * 1000000u)

void even_ucx_message_refuse(even_ucx_group *group, even_ucx_request *request, even_ucx_announced *message) {
  const even_ucx_header *header = &message->header;
  char name[128];
  char sent[48];
  char wanted[48];
  message->refused = true;
  request->untold = true;
  request->refused_from = header->sender;
  request->refused_number = header->number;
  even_ucx_name(group, header->sender, name, sizeof name);
  even_call_describe_elements(header->elements, sent, sizeof sent);
  even_call_describe_elements(request->elements, wanted, sizeof wanted);
  (void)even_fail(EVEN_ERR_MISMATCH, "%s sent %llu bytes%s with tag %llu, but rank %d receives %zu%s%s%s", name,
                  (unsigned long long)header->bytes, sent, (unsigned long long)header->tag,
                  group->peers[group->rank].number, request->bytes, wanted, header->site[0] == '\0' ? "" : "; sent at ",
                  header->site);
  (void)even_error_place(group->peers[header->sender].number, NULL);
  even_ucx_message_finish(group, request, even_error_fix(EVEN_MESSAGE_DIFFERS_FIX));
}

bool even_ucx_number_is_taken(const even_ucx_group *group, const even_ucx_announced *message) {
  const even_ucx_announced *other = group->message_numbers == 0 ? NULL : group->messages->waiting;
  for (; other != NULL; other = other->next) {
    if (other->header.sender == message->header.sender && other->header.number < message->header.number &&
        other->header.bytes > 0 && (message->header.number - other->header.number) % group->message_numbers == 0) {
      return true;
    }
  }
  return false;
}

void even_ucx_message_refuse_number(even_ucx_group *group, even_ucx_request *request, const even_ucx_header *header) {
  char name[128];
  even_ucx_name(group, header->sender, name, sizeof name);
  (void)even_fail(EVEN_ERR_UNSUPPORTED,
                  "%llu messages and more of %s wait to be received: %s cannot tell the next ones apart",
                  (unsigned long long)group->message_numbers, name, group->transport->library);
  (void)even_error_place(group->peers[header->sender].number, NULL);
  even_ucx_message_finish(group, request, even_error_fix("receive messages in about the order in which they are sent"));
}

static void tell(even_ucx_group *group, int peer, const even_ucx_notice *notice, size_t bytes) {
  const even_error kept = *even_error_last();
  if (peer == group->rank) {
    even_ucx_take_refusal(group, notice);
  } else if (!group->ended && !group->peers[peer].left && group->peers[peer].failed == 0) {
    (void)even_ucx_post(group, peer, notice, bytes); /* without memory the sender is told nothing */
  }
  /* Who has said it may leave now, or make a call over other groups: the word is to be on its way before that. */
  uint64_t began = even_clock_ns();
  for (uint32_t idle = 0; group->letters != NULL && !group->ended && even_clock_ns() - began < SAYING_NS;) {
    even_ucx_breathe(group, &idle);
    even_ucx_letters_settle(group);
  }
  (void)even_error_restore(&kept);
}

/* Tells the sender, with the words of that receive's error. */
static void tell_refusal(even_ucx_group *group, int sender, uint64_t number, const even_error *why) {
  even_ucx_notice notice;
  memset(&notice, 0, sizeof notice);
  notice.word = EVEN_UCX_REFUSES;
  notice.sender = group->rank;
  notice.refusal.number = number;
  (void)snprintf(notice.refusal.what, sizeof notice.refusal.what, "%.*s", (int)sizeof notice.refusal.what - 1,
                 why->what);
  (void)snprintf(notice.refusal.fix, sizeof notice.refusal.fix, "%.*s", (int)sizeof notice.refusal.fix - 1, why->fix);
  tell(group, sender, &notice, offsetof(even_ucx_notice, refusal) + sizeof notice.refusal);
}

static bool was_accepted(const even_ucx_messages *messages, int sender, uint64_t number) {
  bool found = false;
  for (uint32_t i = 0; i < EVEN_UCX_ACCEPTED && i < messages->accepts; i++) {
    found = found || (messages->accepted[i].sender == sender && messages->accepted[i].number == number);
  }
  return found;
}

void even_ucx_message_tell_sender(even_ucx_group *group, even_ucx_request *request) {
  const even_flight_writer *flight = &group->flight;
  char site[EVEN_FLIGHT_SITE_BYTES];
  request->untold = false;
  (void)pthread_mutex_unlock(&group->lock);
  bool known = flight->ask != NULL && flight->ask(flight->context, site, sizeof site);
  (void)pthread_mutex_lock(&group->lock);
  if (known) {
    size_t length = strlen(request->error.what);
    (void)snprintf(request->error.what + length, sizeof request->error.what - length, "; received at %s", site);
  }
  if (!was_accepted(group->messages, request->refused_from, request->refused_number)) {
    tell_refusal(group, request->refused_from, request->refused_number, &request->error);
  }
}

void even_ucx_accept(even_ucx_group *group, int sender, uint64_t number) {
  uint32_t place = group->messages->accepts++ % EVEN_UCX_ACCEPTED;
  group->messages->accepted[place].sender = sender;
  group->messages->accepted[place].number = number;
  even_ucx_notice notice;
  memset(&notice, 0, sizeof notice);
  notice.word = EVEN_UCX_ACCEPTS;
  notice.sender = group->rank;
  notice.refusal.number = number;
  tell(group, sender, &notice, offsetof(even_ucx_notice, refusal) + sizeof notice.refusal.number);
}

void even_ucx_take_refusal(even_ucx_group *group, const even_ucx_notice *notice) {
  bool same = group->refused && group->refused_by == notice->sender && group->refusal.number == notice->refusal.number;
  if (notice->word == EVEN_UCX_ACCEPTS) {
    group->refused = group->refused && !same;
    return;
  }
  if (group->refused) {
    return; /* another is there, which is as good */
  }
  group->refusal = notice->refusal;
  group->refusal.what[sizeof group->refusal.what - 1] = '\0';
  group->refusal.fix[sizeof group->refusal.fix - 1] = '\0';
  group->refused_by = notice->sender;
  group->refused_ns = even_clock_ns();
  group->refused = true;
  even_ucx_wake(group);
}

bool even_ucx_refusal_stands(const even_ucx_group *group) {
  if (!group->refused) {
    return false;
  }
  (void)even_fail(EVEN_ERR_MISMATCH, "%s", group->refusal.what);
  (void)even_error_place(group->peers[group->refused_by].number, NULL);
  return even_error_fix("%s", group->refusal.fix) != EVEN_OK;
}

bool even_ucx_refusal_take(even_ucx_group *group) {
  bool stands = even_ucx_refusal_stands(group);
  group->refused = false;
  return stands;
}

bool even_ucx_refusal_lasts(const even_ucx_group *group) {
  return group->refused && even_clock_ns() - group->refused_ns >= LASTING_NS;
}

bool even_ucx_refused(even_comm *comm, bool waits) {
  even_ucx_group *group = even_ucx_of(comm);
  if (!group->refused && !group->ended) {
    return false;
  }
  (void)pthread_mutex_lock(&group->lock);
  while (!group->has_left && even_ucx_move(group)) { /* it may have been taken back, or said before the group ended */
  }
  bool lasts = waits && even_ucx_refusal_lasts(group);
  bool refused = waits ? lasts && even_ucx_refusal_stands(group) : even_ucx_refusal_take(group);
  (void)pthread_mutex_unlock(&group->lock);
  return refused;
}
