/* Messages that do not fit where they are received: the receive fails there, and the sender, who may be long past it,
 * is told at its next call. It is told nothing where the message is received after all before it has heard. */
#include "base/fail.h"
#include "comm/group.h"
#include "os/futex.h"

#include <stdio.h>
#include <string.h>

/* Takes it for this thread where it is `as`; nobody waits for it. */
static bool hold(even_comm_refusal *refusal, uint32_t as) {
  return atomic_load(&refusal->state) == as && atomic_compare_exchange_strong(&refusal->state, &as, EVEN_REFUSAL_HELD);
}

/* The same, after whoever reads or writes it: done in a moment, if it lives. */
static bool hold_soon(even_comm_refusal *refusal, uint32_t as) {
  for (int tries = 0; tries < 1000 && atomic_load(&refusal->state) == EVEN_REFUSAL_HELD; tries++) {
    even_core_yield();
  }
  return hold(refusal, as);
}

void even_refusal_say(even_comm *comm, int sender, uint64_t tag, const even_error *why) {
  even_comm_refusal *refusal = &even_comm_mail_of(comm, sender)->refusal;
  if (!hold_soon(refusal, EVEN_REFUSAL_NONE)) {
    return; /* another is there, which is as good */
  }
  refusal->from = comm->rank;
  refusal->tag = tag;
  even_comm_end_words_write(&refusal->words, why);
  refusal->words.rank = even_comm_number(comm, comm->rank); /* whom the sender is to look at */
  atomic_store(&refusal->state, EVEN_REFUSAL_SAID);
  even_message_bell_ring(comm, sender);
}

void even_refusal_withdraw(even_comm *comm, int sender, uint64_t tag) {
  even_comm_refusal *refusal = &even_comm_mail_of(comm, sender)->refusal;
  if (hold_soon(refusal, EVEN_REFUSAL_SAID)) {
    bool own = refusal->from == comm->rank && refusal->tag == tag;
    atomic_store(&refusal->state, own ? EVEN_REFUSAL_NONE : EVEN_REFUSAL_SAID);
  }
}

/* Reads it, and leaves it in that state. */
static bool hear(const even_comm *comm, uint32_t state) {
  even_comm_mail *mail = even_comm_mail_of(comm, comm->rank);
  even_error why;
  if (mail == NULL || !hold_soon(&mail->refusal, EVEN_REFUSAL_SAID)) {
    return false;
  }
  even_comm_end_words_read(&mail->refusal.words, &why);
  atomic_store(&mail->refusal.state, state);
  return even_error_restore(&why) != EVEN_OK;
}

bool even_shared_refused(even_comm *comm, bool waits) {
  return hear(comm, waits ? EVEN_REFUSAL_SAID : EVEN_REFUSAL_NONE); /* one that is taken back is not there any more */
}

bool even_refusal_stands(const even_comm *comm) {
  return hear(comm, EVEN_REFUSAL_SAID);
}

uint32_t even_message_site_number(even_comm *comm, const char *text) {
  even_comm_mail *mail = text == NULL ? NULL : even_comm_mail_of(comm, comm->rank);
  for (uint32_t number = 1; mail != NULL && number <= EVEN_MESSAGE_SITES; number++) {
    char *site = mail->sites[number - 1];
    if (site[0] == '\0') {
      (void)snprintf(site, EVEN_FLIGHT_SITE_BYTES, "%s", text);
      return number;
    }
    if (strncmp(site, text, EVEN_FLIGHT_SITE_BYTES - 1) == 0) {
      return number;
    }
  }
  return 0;
}

void even_message_site_of(const even_comm *comm, int rank, uint32_t number, char *text, size_t bytes) {
  const even_comm_mail *mail = even_comm_mail_of(comm, rank);
  bool known = mail != NULL && number > 0;
  (void)snprintf(text, bytes, "%.*s", (int)EVEN_FLIGHT_SITE_BYTES - 1, known ? mail->sites[number - 1] : "");
}
