/* struct raft_io. */
#include "orchestrator/raft_memory.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/text.h"
#include "orchestrator/raft_rules.h"
#include "orchestrator/raft_wire.h"
#include "os/clock.h"

#include <stdlib.h>
#include <string.h>

/* A request that is done, but of which raft is not told from within its own call. */
typedef struct even_raft_done {
  struct even_raft_done *next;
  struct raft_io_send *sent;
  raft_io_send_cb sent_cb;
  struct raft_io_append *appended;
  raft_io_append_cb appended_cb;
  int status;
} even_raft_done;

static even_raft_memory *memory_of(const struct raft_io *io) {
  return io->impl;
}

static void queue(even_raft_memory *memory, even_raft_done *at, const even_raft_done *done) {
  *at = *done;
  *memory->done_end = at;
  memory->done_end = &at->next;
}

static void call_back(even_raft_memory *memory, bool cancelled) {
  while (memory->done != NULL && (cancelled || !memory->gave_up)) {
    even_raft_done *done = memory->done;
    memory->done = done->next;
    if (memory->done == NULL) {
      memory->done_end = &memory->done;
    }
    int status = cancelled ? RAFT_CANCELED : done->status;
    if (done->sent_cb != NULL) {
      done->sent_cb(done->sent, status);
    } else if (done->appended_cb != NULL) {
      done->appended_cb(done->appended, status);
    }
    raft_free(done);
  }
}

void even_raft_memory_give_up(even_raft_memory *memory) {
  if (!memory->gave_up) {
    memory->gave_up = true;
    memory->why = *even_error_last();
  }
  even_error_clear();
}

/* What libraft does where it hears that something could not be kept does not fit what is: a leader has told the others
 * of an entry by then, and goes on; a follower takes an entry for kept that is not, when it is sent again; and where
 * members change, or it was to stand for election at once, it frees what it uses on. So it hears nothing: its word goes
 * nowhere any more. */
static int kept(even_raft_memory *memory, even_status status) {
  if (status != EVEN_OK) {
    even_raft_memory_give_up(memory);
  }
  return 0;
}

/* ---- what raft calls ---- */

static int on_init(struct raft_io *io, raft_id id, const char *address) {
  (void)address;
  memory_of(io)->id = id;
  return 0;
}

static void on_close(struct raft_io *io, raft_io_close_cb cb) {
  even_raft_memory *memory = memory_of(io);
  call_back(memory, true);
  if (memory->unkept != NULL) {
    memory->unkept_cb(memory->unkept, RAFT_CANCELED);
    memory->unkept = NULL;
  }
  memory->tick = NULL;
  memory->receive = NULL;
  if (cb != NULL) {
    cb(io);
  }
}

/* 0, or raft's number for why not. */
static int code_of(even_status status) {
  if (status != EVEN_OK) {
    even_error_clear();
  }
  return status == EVEN_OK ? 0 : status == EVEN_ERR_MEMORY ? RAFT_NOMEM : RAFT_IOERR;
}

/* Memory of its own for each entry, which is raft's then. */
static int load_entry(const even_raft_kept *kept, struct raft_entry *out) {
  void *data = raft_malloc(kept->bytes + 1);
  if (data == NULL) {
    return RAFT_NOMEM;
  }
  memcpy(data, kept->data, kept->bytes);
  *out = (struct raft_entry){
      .term = kept->term, .type = (unsigned short)kept->type, .buf = {data, kept->bytes}, .batch = data};
  return 0;
}

/* Called once: what bootstrap left, or an earlier process; nothing for a member that joins. */
static int on_load(struct raft_io *io, raft_term *term, raft_id *voted_for, struct raft_snapshot **snapshot,
                   raft_index *start_index, struct raft_entry *entries[], size_t *n_entries) {
  const even_raft_store *store = &memory_of(io)->store;
  int failed = 0;
  *term = store->term;
  *voted_for = store->vote;
  *snapshot = NULL;
  *start_index = 1;
  *entries = NULL;
  *n_entries = 0;
  if (store->count == 0) {
    return 0;
  }
  *entries = raft_calloc(store->count, sizeof **entries);
  if (*entries == NULL) {
    return RAFT_NOMEM;
  }
  for (; failed == 0 && *n_entries < store->count; *n_entries += failed == 0 ? 1 : 0) {
    failed = load_entry(&store->entries[*n_entries], &(*entries)[*n_entries]);
  }
  while (failed != 0 && *n_entries > 0) {
    raft_free((*entries)[--*n_entries].batch);
  }
  if (failed != 0) {
    raft_free(*entries);
    *entries = NULL;
  }
  return failed;
}

static int on_start(struct raft_io *io, unsigned msecs, raft_io_tick_cb tick, raft_io_recv_cb receive) {
  even_raft_memory *memory = memory_of(io);
  memory->tick_ms = msecs;
  memory->tick = tick;
  memory->receive = receive;
  memory->next_tick_ns = even_clock_ns();
  return 0;
}

static int on_bootstrap(struct raft_io *io, const struct raft_configuration *configuration) {
  even_raft_store *store = &memory_of(io)->store;
  struct raft_buffer bytes = {NULL, 0};
  if (store->count > 0) {
    return RAFT_CANTBOOTSTRAP;
  }
  int failed = raft_configuration_encode(configuration, &bytes);
  if (failed != 0) {
    return failed;
  }
  const even_raft_kept first = {.term = 1, .type = RAFT_CHANGE, .bytes = bytes.len, .data = bytes.base};
  store->term = 1;
  failed = code_of(even_raft_store_append(store, &first, 1));
  raft_free(bytes.base);
  return failed;
}

static int on_recover(struct raft_io *io, const struct raft_configuration *configuration) {
  (void)io;
  (void)configuration;
  return RAFT_IOERR; /* nobody asks for it */
}

static int on_term(struct raft_io *io, raft_term term) {
  even_raft_memory *memory = memory_of(io);
  return kept(memory, memory->gave_up ? EVEN_OK : even_raft_store_term(&memory->store, term));
}

static int on_vote(struct raft_io *io, raft_id member) {
  even_raft_memory *memory = memory_of(io);
  return kept(memory, memory->gave_up ? EVEN_OK : even_raft_store_vote(&memory->store, member));
}

static bool send_now(even_raft_memory *memory, const struct raft_message *message) {
  even_text bytes = EVEN_TEXT_EMPTY;
  struct raft_message says = *message;
  if (says.type == RAFT_IO_APPEND_ENTRIES_RESULT) {
    even_raft_rules_answer(&says.append_entries_result, memory->shown);
  } else if (says.type == RAFT_IO_REQUEST_VOTE_RESULT) {
    even_raft_rules_refuse(&says.request_vote_result, memory->store.term);
  }
  bool sent = !memory->gave_up && even_raft_wire_write(&says, &bytes) == EVEN_OK &&
              memory->send(memory->context, message->server_id, bytes.data, bytes.length);
  even_text_free(&bytes);
  return sent;
}

/* Without memory entries go out later, and of anything else libraft hears at once that it is done: it has only to free
 * its request. An error there has libraft give up, or free what came twice. */
static int on_send(struct raft_io *io, struct raft_io_send *request, const struct raft_message *message,
                   raft_io_send_cb cb) {
  even_raft_memory *memory = memory_of(io);
  even_raft_done *done = cb == NULL ? NULL : raft_malloc(sizeof *done);
  if (cb != NULL && done == NULL && message->type == RAFT_IO_APPEND_ENTRIES) {
    return RAFT_NOMEM;
  }
  int status = send_now(memory, message) ? 0 : RAFT_NOCONNECTION;
  if (done != NULL) {
    queue(memory, done, &(even_raft_done){.sent = request, .sent_cb = cb, .status = status});
  } else if (cb != NULL) {
    cb(request, status);
  }
  return 0;
}

static even_status store_entries(even_raft_memory *memory, const struct raft_entry entries[], unsigned n) {
  even_raft_kept *copies = NULL;
  const bool follows = raft_state(memory->io.data) == RAFT_FOLLOWER;
  EVEN_TRY(EVEN_NEW_ARRAY(&copies, n));
  for (unsigned i = 0; i < n; i++) {
    copies[i] = (even_raft_kept){
        .term = entries[i].term, .type = entries[i].type, .bytes = entries[i].buf.len, .data = entries[i].buf.base};
    memory->changed = memory->changed || (follows && entries[i].type == RAFT_CHANGE);
  }
  even_status status = even_raft_store_append(&memory->store, copies, n);
  even_free(copies);
  return status;
}

/* Of entries that are not kept libraft hears when it is closed. */
static int on_append(struct raft_io *io, struct raft_io_append *request, const struct raft_entry entries[], unsigned n,
                     raft_io_append_cb cb) {
  even_raft_memory *memory = memory_of(io);
  even_raft_done *done = memory->gave_up ? NULL : raft_malloc(sizeof *done);
  if (done != NULL) {
    (void)kept(memory, store_entries(memory, entries, n));
  } else if (!memory->gave_up) {
    (void)kept(memory, even_fail(EVEN_ERR_MEMORY, "no memory for what the voters' log is to keep"));
  }
  if (!memory->gave_up) {
    queue(memory, done, &(even_raft_done){.appended = request, .appended_cb = cb});
    return 0;
  }
  raft_free(done);
  memory->unkept = request;
  memory->unkept_cb = cb;
  return 0;
}

static int on_truncate(struct raft_io *io, raft_index index) {
  even_raft_memory *memory = memory_of(io);
  memory->changed = true;
  return kept(memory, memory->gave_up ? EVEN_OK : even_raft_store_truncate(&memory->store, index));
}

/* The log never grows so long that raft takes a snapshot of it (voter.c). */
static int on_snapshot_put(struct raft_io *io, unsigned trailing, struct raft_io_snapshot_put *request,
                           const struct raft_snapshot *snapshot, raft_io_snapshot_put_cb cb) {
  (void)io;
  (void)trailing;
  (void)request;
  (void)snapshot;
  (void)cb;
  return RAFT_IOERR;
}

static int on_snapshot_get(struct raft_io *io, struct raft_io_snapshot_get *request, raft_io_snapshot_get_cb cb) {
  (void)io;
  (void)request;
  (void)cb;
  return RAFT_IOERR;
}

static raft_time on_time(struct raft_io *io) {
  (void)io;
  return even_clock_ns() / 1000000u;
}

/* Elections end sooner where members do not wait equally long: nothing secret hangs on it. */
static int on_random(struct raft_io *io, int least, int most) {
  uint64_t state = even_clock_ns() ^ memory_of(io)->id * 0x9e3779b97f4a7c15u;
  state ^= state >> 30;
  state *= 0xbf58476d1ce4e5b9u;
  state ^= state >> 27;
  return most <= least ? least : least + (int)(state % (uint64_t)(most - least));
}

/* ---- what the owner calls ---- */

void even_raft_memory_open(even_raft_memory *memory, const even_raft_store *store, void *context,
                           bool (*send)(void *context, uint64_t member, const void *bytes, size_t count)) {
  *memory = (even_raft_memory){.store = *store, .context = context, .send = send};
  memory->done_end = &memory->done;
  memory->io = (struct raft_io){.version = 1,
                                .impl = memory,
                                .init = on_init,
                                .close = on_close,
                                .load = on_load,
                                .start = on_start,
                                .bootstrap = on_bootstrap,
                                .recover = on_recover,
                                .set_term = on_term,
                                .set_vote = on_vote,
                                .send = on_send,
                                .append = on_append,
                                .truncate = on_truncate,
                                .snapshot_put = on_snapshot_put,
                                .snapshot_get = on_snapshot_get,
                                .time = on_time,
                                .random = on_random};
}

void even_raft_memory_close(even_raft_memory *memory, bool forget) {
  even_raft_store_close(&memory->store, forget);
}

/* libraft has no memory, or has heard what contradicts its log; or it has members that count no more, and there is no
 * memory for those that do. Where it lacked memory for members that came, it goes on with those before. */
static void see_raft(even_raft_memory *memory) {
  struct raft *raft = memory->io.data;
  if (memory->gave_up || memory->receive == NULL) {
    return;
  }
  if (raft_state(raft) == RAFT_UNAVAILABLE) {
    (void)even_fail(EVEN_ERR_STATE, "libraft takes part no more (no memory, or a word that contradicts its log)");
    even_raft_memory_give_up(memory);
  } else if (memory->changed) {
    int failed = even_raft_rules_members(raft, &memory->store);
    if (failed != 0) {
      (void)even_fail(EVEN_ERR_STATE, "members that have changed: %s", raft_strerror(failed));
      even_raft_memory_give_up(memory);
    }
    memory->changed = false;
  }
}

const even_error *even_raft_memory_gave_up(const even_raft_memory *memory) {
  return memory->gave_up ? &memory->why : NULL;
}

even_status even_raft_memory_receive(even_raft_memory *memory, uint64_t from, const char *address,
                                     const unsigned char *bytes, size_t count) {
  struct raft_message message;
  if (memory->receive == NULL || memory->gave_up) {
    return EVEN_OK;
  }
  EVEN_TRY(even_raft_wire_read(bytes, count, &message));
  if (message.type == RAFT_IO_REQUEST_VOTE && message.request_vote.candidate_id != from) {
    return even_fail(EVEN_ERR_INPUT, "member %llu asks for votes for another one", (unsigned long long)from);
  }
  message.server_id = from;
  message.server_address = address;
  if (message.type == RAFT_IO_APPEND_ENTRIES) {
    memory->shown = even_raft_rules_hear(&message.append_entries);
  }
  if (message.type == RAFT_IO_REQUEST_VOTE) {
    const even_raft_rules_vote before = even_raft_rules_vote_begin(memory->io.data);
    memory->receive(&memory->io, &message);
    even_raft_rules_vote_end(memory->io.data, &before);
  } else {
    memory->receive(&memory->io, &message);
  }
  call_back(memory, false);
  see_raft(memory);
  return EVEN_OK;
}

void even_raft_memory_turn(even_raft_memory *memory, uint64_t now_ns) {
  call_back(memory, false);
  if (!memory->gave_up && memory->tick != NULL && now_ns >= memory->next_tick_ns) {
    memory->next_tick_ns = now_ns + (uint64_t)memory->tick_ms * 1000000u;
    memory->tick(&memory->io);
    call_back(memory, false);
  }
  see_raft(memory);
}
