/* Parcels that come. */
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/parcel_parts.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/memory_use.h"
#include "os/pipe.h"
#include "os/shared_memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static void free_in(even_parcel_in *in) {
  even_pipe_close(in->fd);
  even_chunk_sums_drop(in->sums);
  even_free(in);
}

void even_parcels_free_ins(even_parcels *parcels) {
  while (parcels->ins != NULL) {
    even_parcel_in *in = parcels->ins;
    parcels->ins = in->next;
    free_in(in);
  }
}

/* For the last error, which is over with it; `silent`: the sender knows, or is gone. */
static void fail(even_parcel_in *in, bool silent) {
  if (!in->over) {
    in->over = true;
    in->silent = silent;
    in->why = *even_error_last();
  }
}

bool even_parcels_forget_in(even_parcels *parcels) {
  even_parcel_in **at = &parcels->ins;
  while (*at != NULL && !(*at)->over) {
    at = &(*at)->next;
  }
  even_parcel_in *in = *at;
  if (in == NULL) {
    return false;
  }
  *at = in->next;
  if (!in->delivered && !in->silent) {
    even_parcels_tell_end(parcels, &in->parcel, in->id, true, &in->why);
  }
  if (!in->delivered && in->accepted && in->calls.failed != NULL) {
    in->calls.failed(in->calls.context, &in->parcel, &in->why);
  }
  free_in(in);
  return true;
}

/* ---- its turn ---- */

static even_status take_memory(even_parcel_in *in) {
  even_shared_memory memory;
  char what[EVEN_PARCEL_NAME + 16];
  (void)snprintf(what, sizeof what, "parcel %s", in->parcel.name);
  EVEN_TRY(even_memory_ask(NULL, in->parcel.bytes, what));
  EVEN_TRY(even_shared_memory_begin("evenstep-parcel", &memory));
  in->fd = memory.fd;
  return EVEN_OK;
}

static even_status say_taken(even_parcels *parcels, const even_parcel_in *in) {
  const even_parcel_note note = {
      .kind = EVEN_MESSAGE_PARCEL_TAKE, .parcel = in->parcel, .id = in->id, .back = true, .at = in->got};
  return even_parcels_tell(parcels, in->parcel.from, &note, NULL, 0);
}

static even_status begin(even_parcels *parcels, even_parcel_in *in) {
  if (in->calls.offered != NULL) {
    EVEN_TRY(in->calls.offered(in->calls.context, &in->parcel, &in->fd));
  }
  in->accepted = true;
  if (in->fd < 0) {
    EVEN_TRY(take_memory(in));
  }
  EVEN_TRY(even_chunk_sums_open(SIZE_MAX, &in->sums));
  in->begun = true;
  in->moved_ns = even_clock_ns();
  return say_taken(parcels, in);
}

void even_parcels_begin_next(even_parcels *parcels) {
  int begun = 0;
  for (const even_parcel_in *in = parcels->ins; in != NULL; in = in->next) {
    begun += in->begun && !in->over ? 1 : 0;
  }
  for (even_parcel_in *in = parcels->ins; in != NULL && begun < EVEN_PARCEL_AT_ONCE; in = in->next) {
    if (in->begun || in->over) {
      continue;
    }
    if (begin(parcels, in) == EVEN_OK) {
      begun++;
    } else {
      fail(in, false);
      even_error_clear();
    }
  }
}

static even_status add(even_parcels *parcels, const even_parcel_note *note) {
  even_parcel_in **last = &parcels->ins;
  even_parcel_in *in = NULL;
  size_t waiting = 0;
  size_t at = 0;
  while (at < parcels->handler_count && strcmp(parcels->handlers[at].name, note->parcel.name) != 0) {
    at++;
  }
  if (at == parcels->handler_count) {
    return even_fail(EVEN_ERR_UNSUPPORTED, "nobody on host %d takes a parcel %s", parcels->params.self,
                     note->parcel.name);
  }
  for (; *last != NULL; last = &(*last)->next) {
    if ((*last)->id == note->id && (*last)->parcel.from == note->parcel.from && !(*last)->over) {
      return even_fail(EVEN_ERR_INPUT, "parcel %s is offered twice", note->parcel.name);
    }
    waiting++;
  }
  if (waiting >= EVEN_PARCEL_QUEUED) {
    return even_fail(EVEN_ERR_IN_USE, "%zu parcels wait for host %d already", waiting, parcels->params.self);
  }
  EVEN_TRY(EVEN_NEW(&in));
  *in = (even_parcel_in){.parcel = note->parcel, .id = note->id, .calls = parcels->handlers[at].calls, .fd = -1};
  *last = in;
  return EVEN_OK;
}

void even_parcels_hear_offer(even_parcels *parcels, const even_parcel_note *note) {
  if (add(parcels, note) != EVEN_OK) {
    even_parcels_tell_end(parcels, &note->parcel, note->id, true, even_error_last());
    even_error_clear();
  }
}

/* ---- its pieces ---- */

static even_parcel_in *find_in(even_parcels *parcels, const even_parcel_note *note) {
  even_parcel_in *in = parcels->ins;
  while (in != NULL && (in->id != note->id || in->parcel.from != note->parcel.from || in->over)) {
    in = in->next;
  }
  return in;
}

/* All of it is here. */
static even_status deliver(even_parcels *parcels, even_parcel_in *in, uint64_t expected) {
  uint64_t sum = 0;
  EVEN_TRY(even_chunk_sums_end(in->sums, &sum));
  if (sum != expected) {
    return even_fail(EVEN_ERR_CORRUPT, "parcel %s is not what host %d has sent: its checksum is another one",
                     in->parcel.name, in->parcel.from);
  }
  int fd = in->fd;
  in->fd = -1;
  in->over = in->delivered = true;
  even_shared_memory_rewind(&(even_shared_memory){.fd = fd});
  even_status status = in->calls.arrived(in->calls.context, &in->parcel, fd);
  even_parcels_tell_end(parcels, &in->parcel, in->id, true, status == EVEN_OK ? NULL : even_error_last());
  return EVEN_OK;
}

static even_status take_piece(even_parcels *parcels, even_parcel_in *in, const even_parcel_note *note,
                              const even_message *message) {
  uint64_t left = in->parcel.bytes - in->got;
  if (!in->begun || note->at != in->got || message->data_bytes == 0 || message->data_bytes > left ||
      note->last != (message->data_bytes == left)) {
    return even_fail(EVEN_ERR_INPUT, "%zu bytes at byte %" PRIu64 " of parcel %s, of which %" PRIu64 " are here",
                     message->data_bytes, note->at, in->parcel.name, in->got);
  }
  EVEN_TRY(even_file_write_all(in->fd, message->data, message->data_bytes));
  EVEN_TRY(even_chunk_sums_update(in->sums, message->data, message->data_bytes));
  in->got += message->data_bytes;
  in->moved_ns = even_clock_ns();
  return note->last ? deliver(parcels, in, note->sum) : say_taken(parcels, in);
}

/* Pieces of one that was given up are still on their way: its sender knows. */
void even_parcels_hear_piece(even_parcels *parcels, const even_parcel_note *note, const even_message *message) {
  even_parcel_in *in = find_in(parcels, note);
  if (in != NULL && take_piece(parcels, in, note, message) != EVEN_OK) {
    fail(in, false);
  }
  even_error_clear();
}

void even_parcels_hear_end_forward(even_parcels *parcels, const even_parcel_note *note) {
  even_parcel_in *in = find_in(parcels, note);
  if (in == NULL) {
    return;
  }
  if (note->why.status == EVEN_OK) {
    (void)even_fail(EVEN_ERR_INPUT, "parcel %s ends before its end", in->parcel.name);
  } else {
    (void)even_error_restore(&note->why);
  }
  fail(in, true);
  even_error_clear();
}

void even_parcels_check_ins(even_parcels *parcels, uint64_t now) {
  for (even_parcel_in *in = parcels->ins; in != NULL; in = in->next) {
    if (in->begun && !in->over && now > in->moved_ns && now - in->moved_ns > parcels->params.patience_ns) {
      (void)even_fail(EVEN_ERR_TIMEOUT, "host %d sends nothing of parcel %s: %" PRIu64 " of %" PRIu64 " bytes so far",
                      in->parcel.from, in->parcel.name, in->got, in->parcel.bytes);
      fail(in, false);
      even_error_clear();
    }
  }
}

void even_parcels_lose_ins(even_parcels *parcels, int host) {
  for (even_parcel_in *in = parcels->ins; in != NULL; in = in->next) {
    if (host == 0 || in->parcel.from == host) {
      fail(in, true);
    }
  }
}

void even_parcels_withdraw_ins(even_parcels *parcels, const char *name) {
  for (even_parcel_in *in = parcels->ins; in != NULL; in = in->next) {
    if (strcmp(in->parcel.name, name) == 0) {
      in->calls = (even_parcel_calls){.context = NULL};
      fail(in, false);
    }
  }
}
