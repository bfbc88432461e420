/* What agents say to one another of parcels: what comes, what is passed on, what is over. */
#include "orchestrator/parcel.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/parcel_parts.h"
#include "os/clock.h"

#include <string.h>

/* Who passes on never has more than the windows of what a receiver takes at once; who sends more is no right agent. */
enum { MOST_PASSED_ON = 2 * EVEN_PARCEL_AT_ONCE * EVEN_PARCEL_WINDOW };
static const uint64_t PATIENCE_NS = 60000000000u;

even_status even_parcels_tell(even_parcels *parcels, int host, const even_parcel_note *note, const void *data,
                              size_t bytes) {
  even_text text = EVEN_TEXT_EMPTY;
  even_link *link = parcels->params.way(parcels->params.context, host);
  if (link == NULL) {
    return even_fail(EVEN_ERR_PEER_LOST, "host %d cannot be reached", host);
  }
  even_parcel_note_write(note, &text);
  return even_link_send_text(link, note->kind, &text, data, bytes);
}

void even_parcels_tell_end(even_parcels *parcels, const even_parcel *parcel, uint64_t id, bool back,
                           const even_error *why) {
  even_parcel_note note = {.kind = EVEN_MESSAGE_PARCEL_END, .parcel = *parcel, .id = id, .back = back};
  const even_error kept = *even_error_last();
  if (why != NULL) {
    note.why = *why;
  }
  (void)!even_parcels_tell(parcels, back ? parcel->from : parcel->to, &note, NULL, 0);
  (void)even_error_restore(&kept);
}

/* ---- opening and closing ---- */

even_status even_parcels_open(const even_parcels_params *params, even_parcels **out) {
  *out = NULL;
  if (params->size != sizeof *params || params->way == NULL || params->self < 0 || params->self >= params->count) {
    return even_fail(EVEN_ERR_ARGUMENT, "parcels of host %d among %d", params->self, params->count);
  }
  EVEN_TRY(EVEN_NEW(out));
  (*out)->params = *params;
  (*out)->next_id = even_clock_ns(); /* other numbers than those of an agent that was here before */
  if ((*out)->params.patience_ns == 0) {
    (*out)->params.patience_ns = PATIENCE_NS;
  }
  return EVEN_OK;
}

void even_parcels_close(even_parcels *parcels) {
  if (parcels == NULL) {
    return;
  }
  even_parcels_free_outs(parcels);
  even_parcels_free_ins(parcels);
  even_free(parcels->handlers);
  even_free(parcels->piece);
  even_free(parcels);
}

even_status even_parcels_expect(even_parcels *parcels, const char *name, const even_parcel_calls *calls) {
  size_t at = 0;
  while (at < parcels->handler_count && strcmp(parcels->handlers[at].name, name) != 0) {
    at++;
  }
  if (at == parcels->handler_count) {
    EVEN_TRY(even_realloc((void **)&parcels->handlers, at + 1, sizeof *parcels->handlers));
    parcels->handler_count++;
  }
  parcels->handlers[at] = (even_parcel_handler){.name = name, .calls = *calls};
  return EVEN_OK;
}

static void forget_handler(even_parcels *parcels, const char *name) {
  size_t kept = 0;
  for (size_t i = 0; i < parcels->handler_count; i++) {
    if (strcmp(parcels->handlers[i].name, name) != 0) {
      parcels->handlers[kept++] = parcels->handlers[i];
    }
  }
  parcels->handler_count = kept;
}

/* ---- what comes ---- */

bool even_parcels_know(even_message_kind kind) {
  return kind == EVEN_MESSAGE_PARCEL || kind == EVEN_MESSAGE_PARCEL_TAKE || kind == EVEN_MESSAGE_PIECE ||
         kind == EVEN_MESSAGE_PARCEL_END || kind == EVEN_MESSAGE_PARCEL_GONE;
}

/* Between two others. */
static even_status pass_on(even_parcels *parcels, const even_parcel_note *note, const even_message *message) {
  int to = note->back ? note->parcel.from : note->parcel.to;
  even_text text = EVEN_TEXT_EMPTY;
  even_link *link = parcels->params.way(parcels->params.context, to);
  if (link == NULL || !even_link_is_up(link)) {
    (void)even_fail(EVEN_ERR_PEER_LOST, "host %d is lost", to);
    even_parcels_tell_end(parcels, &note->parcel, note->id, !note->back, even_error_last());
    even_error_clear();
    return EVEN_OK;
  }
  if (message->kind == EVEN_MESSAGE_PIECE && even_link_waiting(link) > MOST_PASSED_ON) {
    return even_fail(EVEN_ERR_INPUT, "more of a parcel comes than host %d has asked for", to);
  }
  even_text_append(&text, message->json, message->json_bytes);
  return even_link_send_text(link, message->kind, &text, message->data, message->data_bytes);
}

static void hear(even_parcels *parcels, const even_parcel_note *note, const even_message *message) {
  switch (note->kind) {
    case EVEN_MESSAGE_PARCEL:
      even_parcels_hear_offer(parcels, note);
      break;
    case EVEN_MESSAGE_PARCEL_TAKE:
      even_parcels_hear_taken(parcels, note);
      break;
    case EVEN_MESSAGE_PIECE:
      even_parcels_hear_piece(parcels, note, message);
      break;
    default:
      if (note->back) {
        even_parcels_hear_end_back(parcels, note);
      } else {
        even_parcels_hear_end_forward(parcels, note);
      }
      break;
  }
}

/* Begins what waits, sends on, and tells of ends, until nothing is left to do at once. A call of the caller's may come
 * by here again, and leaves it to the first. */
static void go_on(even_parcels *parcels) {
  bool more = !parcels->busy;
  while (more) {
    parcels->busy = true;
    even_parcels_begin_next(parcels);
    even_parcels_send_on(parcels);
    more = even_parcels_forget_in(parcels);
    more = even_parcels_forget_out(parcels) || more;
    parcels->busy = false;
  }
}

even_status even_parcels_take(even_parcels *parcels, int host, const even_message *message) {
  even_parcel_note note;
  if (parcels == NULL) {
    return EVEN_OK;
  }
  int self = parcels->params.self;
  EVEN_TRY(even_parcel_note_read(message, parcels->params.count, &note));
  if (note.kind == EVEN_MESSAGE_PARCEL_GONE) {
    if (self == 0) {
      return even_fail(EVEN_ERR_INPUT, "host %d says that another one is lost: that is the leader's to say", host);
    }
    even_parcels_lost(parcels, note.host);
    return EVEN_OK;
  }
  int to = note.back ? note.parcel.from : note.parcel.to;
  int from = note.back ? note.parcel.to : note.parcel.from;
  if (self == 0 ? from != host : to != self) {
    return even_fail(EVEN_ERR_INPUT, "host %d sends a message of a parcel from host %d to host %d", host, from, to);
  }
  if (to != self) {
    return pass_on(parcels, &note, message);
  }
  bool busy = parcels->busy;
  parcels->busy = true;
  hear(parcels, &note, message);
  parcels->busy = busy;
  go_on(parcels);
  return EVEN_OK;
}

void even_parcels_tick(even_parcels *parcels) {
  uint64_t now = even_clock_ns();
  if (parcels == NULL) {
    return;
  }
  even_parcels_check_outs(parcels, now);
  even_parcels_check_ins(parcels, now);
  go_on(parcels);
}

void even_parcels_withdraw(even_parcels *parcels, const char *name) {
  const even_error kept = *even_error_last();
  if (parcels == NULL) {
    return;
  }
  (void)even_fail(EVEN_ERR_STATE, "nobody on host %d has to do with parcels %s any more", parcels->params.self, name);
  const even_error why = *even_error_last();
  even_parcels_withdraw_outs(parcels, name);
  (void)even_error_restore(&why);
  even_parcels_withdraw_ins(parcels, name);
  forget_handler(parcels, name);
  go_on(parcels);
  (void)even_error_restore(&kept);
}

void even_parcels_lost(even_parcels *parcels, int host) {
  const even_error kept = *even_error_last();
  const even_parcel_note note = {.kind = EVEN_MESSAGE_PARCEL_GONE, .host = host};
  if (parcels == NULL) {
    return;
  }
  if (host == 0) {
    (void)even_fail(EVEN_ERR_PEER_LOST, "the leader is lost");
  } else {
    (void)even_fail(EVEN_ERR_PEER_LOST, "host %d is lost", host);
  }
  even_parcels_lose_outs(parcels, host);
  even_parcels_lose_ins(parcels, host);
  for (int other = 1; parcels->params.self == 0 && other < parcels->params.count; other++) {
    if (other != host) {
      (void)!even_parcels_tell(parcels, other, &note, NULL, 0); /* else it is lost, too */
    }
  }
  go_on(parcels);
  (void)even_error_restore(&kept);
}
