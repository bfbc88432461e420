/* Parcels on their way out. */
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/parcel_parts.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "os/stream.h"

#include <inttypes.h>
#include <string.h>

/* A link in whose queue so much waits gets no further piece. */
enum { MOST_QUEUED = 1 << 20 };
enum { TURN_PATIENCE = 10 };

static void free_out(even_parcel_out *out) {
  even_pipe_close(out->fd);
  even_chunk_sums_drop(out->sums);
  even_free(out);
}

void even_parcels_free_outs(even_parcels *parcels) {
  while (parcels->outs != NULL) {
    even_parcel_out *out = parcels->outs;
    parcels->outs = out->next;
    free_out(out);
  }
}

/* For the last error. */
static void fail(even_parcel_out *out) {
  if (!out->over) {
    out->over = true;
    out->why = *even_error_last();
  }
}

/* The same, and the receiver hears of it. */
static void give_up(even_parcels *parcels, even_parcel_out *out) {
  fail(out);
  even_parcels_tell_end(parcels, &out->parcel, out->id, false, &out->why);
  even_error_clear();
}

static void tell_nobody(void *context, const even_parcel *parcel, const even_error *why) {
  (void)context;
  (void)parcel;
  (void)why;
}

void even_parcels_withdraw_outs(even_parcels *parcels, const char *name) {
  const even_error why = *even_error_last();
  for (even_parcel_out *out = parcels->outs; out != NULL; out = out->next) {
    if (strcmp(out->parcel.name, name) == 0) {
      out->done = tell_nobody;
      (void)even_error_restore(&why);
      give_up(parcels, out);
    }
  }
}

bool even_parcels_forget_out(even_parcels *parcels) {
  even_parcel_out **at = &parcels->outs;
  while (*at != NULL && !(*at)->over) {
    at = &(*at)->next;
  }
  even_parcel_out *out = *at;
  if (out == NULL) {
    return false;
  }
  *at = out->next;
  out->done(out->context, &out->parcel, out->received ? NULL : &out->why);
  free_out(out);
  return true;
}

/* ---- offering ---- */

static even_status check_offer(const even_parcels *parcels, const even_parcel *parcel, const char *name) {
  bool right = parcel->to >= 0 && parcel->to < parcels->params.count && parcel->to != parcel->from &&
               parcel->bytes > 0 && parcel->bytes <= INT64_MAX && parcel->number <= INT64_MAX && name[0] != '\0' &&
               strlen(name) < sizeof parcel->name;
  return right ? EVEN_OK
               : even_fail(EVEN_ERR_ARGUMENT, "a parcel \"%s\" of %" PRIu64 " bytes from host %d to host %d of %d",
                           name, parcel->bytes, parcel->from, parcel->to, parcels->params.count);
}

static even_status offer(even_parcels *parcels, even_parcel_out *out) {
  const even_parcel_note note = {.kind = EVEN_MESSAGE_PARCEL, .parcel = out->parcel, .id = out->id};
  if (parcels->piece == NULL) {
    EVEN_TRY(EVEN_NEW_ARRAY(&parcels->piece, EVEN_PARCEL_PIECE));
  }
  EVEN_TRY(even_chunk_sums_open(SIZE_MAX, &out->sums));
  return even_parcels_tell(parcels, out->parcel.to, &note, NULL, 0);
}

even_status even_parcels_offer(even_parcels *parcels, int to, const char *name, uint64_t number, int fd, uint64_t bytes,
                               even_parcel_done done, void *context) {
  const even_parcel parcel = {.from = parcels->params.self, .to = to, .number = number, .bytes = bytes};
  even_parcel_out *out = NULL;
  even_parcel_out **last = &parcels->outs;
  even_status status = check_offer(parcels, &parcel, name);
  if (status == EVEN_OK) {
    status = EVEN_NEW(&out);
  }
  if (status != EVEN_OK) {
    even_pipe_close(fd);
    return status;
  }
  *out = (even_parcel_out){.parcel = parcel,
                           .id = parcels->next_id++,
                           .fd = fd,
                           .moved_ns = even_clock_ns(),
                           .done = done,
                           .context = context};
  memcpy(out->parcel.name, name, strlen(name) + 1);
  status = offer(parcels, out);
  if (status != EVEN_OK) {
    free_out(out);
    return status;
  }
  while (*last != NULL) {
    last = &(*last)->next;
  }
  *last = out;
  return EVEN_OK;
}

/* ---- its pieces ---- */

static even_status send_piece(even_parcels *parcels, even_parcel_out *out) {
  const even_parcel *parcel = &out->parcel;
  uint64_t left = parcel->bytes - out->sent;
  size_t bytes = left < EVEN_PARCEL_PIECE ? (size_t)left : EVEN_PARCEL_PIECE;
  even_input input = {.fd = out->fd, .path = parcel->name};
  even_parcel_note note = {
      .kind = EVEN_MESSAGE_PIECE, .parcel = *parcel, .id = out->id, .at = out->sent, .last = bytes == left};
  EVEN_TRY(even_input_read_at(&input, out->sent, parcels->piece, bytes));
  EVEN_TRY(even_chunk_sums_update(out->sums, parcels->piece, bytes));
  if (note.last) {
    EVEN_TRY(even_chunk_sums_end(out->sums, &note.sum));
  }
  EVEN_TRY(even_parcels_tell(parcels, parcel->to, &note, parcels->piece, bytes));
  out->sent += bytes;
  return EVEN_OK;
}

/* Where its link has no room, it is looked for again with each tick, and each time that something was taken. */
static bool may_send(const even_parcels *parcels, const even_parcel_out *out) {
  if (out->over || !out->begun || out->sent == out->parcel.bytes || out->sent - out->taken >= EVEN_PARCEL_WINDOW) {
    return false;
  }
  const even_link *link = parcels->params.way(parcels->params.context, out->parcel.to);
  return link != NULL && even_link_waiting(link) < MOST_QUEUED;
}

void even_parcels_send_on(even_parcels *parcels) {
  for (even_parcel_out *out = parcels->outs; out != NULL; out = out->next) {
    while (may_send(parcels, out)) {
      if (send_piece(parcels, out) != EVEN_OK) {
        give_up(parcels, out);
      }
    }
  }
}

/* ---- what its receiver says ---- */

static even_parcel_out *find_out(even_parcels *parcels, const even_parcel_note *note) {
  even_parcel_out *out = parcels->outs;
  while (out != NULL && (out->id != note->id || out->parcel.to != note->parcel.to || out->over)) {
    out = out->next;
  }
  return out;
}

void even_parcels_hear_taken(even_parcels *parcels, const even_parcel_note *note) {
  even_parcel_out *out = find_out(parcels, note);
  if (out == NULL) {
    (void)even_fail(EVEN_ERR_PEER_LOST, "it is not offered any more");
    even_parcels_tell_end(parcels, &note->parcel, note->id, false, even_error_last());
    even_error_clear();
  } else if (note->at < out->taken || note->at > out->sent) {
    (void)even_fail(EVEN_ERR_INPUT, "host %d says that it has taken %" PRIu64 " bytes of %" PRIu64 " that were sent",
                    out->parcel.to, note->at, out->sent);
    give_up(parcels, out);
  } else {
    out->begun = true;
    out->taken = note->at;
    out->moved_ns = even_clock_ns();
  }
}

void even_parcels_hear_end_back(even_parcels *parcels, const even_parcel_note *note) {
  even_parcel_out *out = find_out(parcels, note);
  if (out == NULL) {
    return;
  }
  if (note->why.status != EVEN_OK) {
    (void)even_error_restore(&note->why);
    fail(out);
  } else if (out->sent < out->parcel.bytes) {
    (void)even_fail(EVEN_ERR_INPUT, "host %d says that it has all of parcel %s, before all was sent", out->parcel.to,
                    out->parcel.name);
    fail(out);
  } else {
    out->over = out->received = true;
  }
  even_error_clear();
}

void even_parcels_check_outs(even_parcels *parcels, uint64_t now) {
  for (even_parcel_out *out = parcels->outs; out != NULL; out = out->next) {
    uint64_t patience = out->begun ? parcels->params.patience_ns : TURN_PATIENCE * parcels->params.patience_ns;
    if (!out->over && now > out->moved_ns && now - out->moved_ns > patience) {
      (void)even_fail(EVEN_ERR_TIMEOUT, "host %d takes nothing of parcel %s: %" PRIu64 " of %" PRIu64 " bytes so far",
                      out->parcel.to, out->parcel.name, out->taken, out->parcel.bytes);
      give_up(parcels, out);
    }
  }
}

void even_parcels_lose_outs(even_parcels *parcels, int host) {
  for (even_parcel_out *out = parcels->outs; out != NULL; out = out->next) {
    if (host == 0 || out->parcel.to == host) {
      fail(out);
    }
  }
}
