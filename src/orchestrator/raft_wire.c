/* Raft's messages to bytes and back. */
#include "orchestrator/raft_wire.h"

#include "base/fail.h"

#include <string.h>

enum { MOST_ENTRIES = 65536, ENTRY_HEAD = 24 };

/* ---- writing ---- */

static void add(even_text *out, uint64_t value) {
  char bytes[8];
  for (int i = 0; i < 8; i++) {
    bytes[i] = (char)(value >> 8 * i);
  }
  even_text_append(out, bytes, sizeof bytes);
}

static void add_entries(even_text *out, const struct raft_append_entries *append) {
  size_t room = EVEN_RAFT_WIRE_MOST - 64;
  unsigned fit = 0;
  while (fit < append->n_entries && fit < MOST_ENTRIES && append->entries[fit].buf.len + ENTRY_HEAD <= room) {
    room -= append->entries[fit].buf.len + ENTRY_HEAD;
    fit++;
  }
  add(out, fit);
  for (unsigned i = 0; i < fit; i++) {
    const struct raft_entry *entry = &append->entries[i];
    add(out, entry->term);
    add(out, entry->type);
    add(out, entry->buf.len);
    if (entry->buf.len > 0) {
      even_text_append(out, entry->buf.base, entry->buf.len);
    }
  }
}

even_status even_raft_wire_write(const struct raft_message *message, even_text *out) {
  add(out, message->type);
  switch (message->type) {
    case RAFT_IO_APPEND_ENTRIES:
      add(out, message->append_entries.term);
      add(out, message->append_entries.prev_log_index);
      add(out, message->append_entries.prev_log_term);
      add(out, message->append_entries.leader_commit);
      add_entries(out, &message->append_entries);
      break;
    case RAFT_IO_APPEND_ENTRIES_RESULT:
      add(out, message->append_entries_result.term);
      add(out, message->append_entries_result.rejected);
      add(out, message->append_entries_result.last_log_index);
      break;
    case RAFT_IO_REQUEST_VOTE:
      add(out, message->request_vote.term);
      add(out, message->request_vote.candidate_id);
      add(out, message->request_vote.last_log_index);
      add(out, message->request_vote.last_log_term);
      add(out, message->request_vote.disrupt_leader);
      add(out, message->request_vote.pre_vote);
      break;
    case RAFT_IO_REQUEST_VOTE_RESULT:
      add(out, message->request_vote_result.term);
      add(out, message->request_vote_result.vote_granted);
      add(out, (uint64_t)message->request_vote_result.pre_vote);
      break;
    case RAFT_IO_TIMEOUT_NOW:
      add(out, message->timeout_now.term);
      add(out, message->timeout_now.last_log_index);
      add(out, message->timeout_now.last_log_term);
      break;
    default:
      return even_fail(EVEN_ERR_UNSUPPORTED, "a message of Raft's of type %d", (int)message->type);
  }
  return even_text_status(out);
}

/* ---- reading ---- */

typedef struct cursor {
  const unsigned char *bytes;
  size_t left;
  bool broken; /* there was less than was asked for, or a number beyond its limit */
} cursor;

static uint64_t take(cursor *at, uint64_t most) {
  uint64_t value = 0;
  if (at->left < 8) {
    at->broken = true;
    return 0;
  }
  for (int i = 0; i < 8; i++) {
    value |= (uint64_t)at->bytes[i] << 8 * i;
  }
  at->bytes += 8;
  at->left -= 8;
  at->broken = at->broken || value > most;
  return at->broken ? 0 : value;
}

static even_status no_message(void) {
  return even_fail(EVEN_ERR_INPUT, "bytes that are no message of Raft's");
}

/* The bytes of all entries, and whether they are whole. */
static bool measure(cursor at, uint64_t count, size_t *bytes) {
  *bytes = 0;
  for (uint64_t i = 0; i < count && !at.broken; i++) {
    (void)take(&at, UINT64_MAX);
    uint64_t type = take(&at, RAFT_CHANGE);
    uint64_t length = take(&at, EVEN_RAFT_WIRE_MOST);
    at.broken = at.broken || type < RAFT_COMMAND || length > at.left;
    if (!at.broken) {
      at.bytes += length;
      at.left -= length;
      *bytes += length;
    }
  }
  return !at.broken && at.left == 0;
}

/* One piece of memory for the bytes of all, as raft wants it. */
static even_status take_entries(cursor *at, struct raft_append_entries *out) {
  uint64_t count = take(at, MOST_ENTRIES);
  size_t bytes = 0;
  if (at->broken || !measure(*at, count, &bytes)) {
    return no_message();
  }
  out->n_entries = (unsigned)count;
  out->entries = NULL;
  if (count == 0) {
    return EVEN_OK;
  }
  unsigned char *batch = raft_malloc(bytes + 1);
  out->entries = raft_malloc(count * sizeof *out->entries);
  if (batch == NULL || out->entries == NULL) {
    raft_free(batch);
    raft_free(out->entries);
    out->entries = NULL;
    return even_fail(EVEN_ERR_MEMORY, "no memory for %zu bytes of the voters' log", bytes);
  }
  unsigned char *next = batch;
  for (uint64_t i = 0; i < count; i++) {
    struct raft_entry *entry = &out->entries[i];
    entry->term = take(at, UINT64_MAX);
    entry->type = (unsigned short)take(at, RAFT_CHANGE);
    entry->buf.len = take(at, EVEN_RAFT_WIRE_MOST);
    entry->buf.base = next;
    entry->batch = batch;
    memcpy(next, at->bytes, entry->buf.len);
    next += entry->buf.len;
    at->bytes += entry->buf.len;
    at->left -= entry->buf.len;
  }
  return EVEN_OK;
}

even_status even_raft_wire_read(const unsigned char *bytes, size_t count, struct raft_message *out) {
  cursor at = {.bytes = bytes, .left = count};
  memset(out, 0, sizeof *out);
  out->type = (unsigned short)take(&at, RAFT_IO_TIMEOUT_NOW);
  switch (out->type) {
    case RAFT_IO_APPEND_ENTRIES:
      out->append_entries.term = take(&at, UINT64_MAX);
      out->append_entries.prev_log_index = take(&at, UINT64_MAX);
      out->append_entries.prev_log_term = take(&at, UINT64_MAX);
      out->append_entries.leader_commit = take(&at, UINT64_MAX);
      EVEN_TRY(take_entries(&at, &out->append_entries));
      break;
    case RAFT_IO_APPEND_ENTRIES_RESULT:
      out->append_entries_result.term = take(&at, UINT64_MAX);
      out->append_entries_result.rejected = take(&at, UINT64_MAX);
      out->append_entries_result.last_log_index = take(&at, UINT64_MAX);
      break;
    case RAFT_IO_REQUEST_VOTE:
      out->request_vote.term = take(&at, UINT64_MAX);
      out->request_vote.candidate_id = take(&at, UINT64_MAX);
      out->request_vote.last_log_index = take(&at, UINT64_MAX);
      out->request_vote.last_log_term = take(&at, UINT64_MAX);
      out->request_vote.disrupt_leader = take(&at, 1) == 1;
      out->request_vote.pre_vote = take(&at, 1) == 1;
      break;
    case RAFT_IO_REQUEST_VOTE_RESULT:
      out->request_vote_result.term = take(&at, UINT64_MAX);
      out->request_vote_result.vote_granted = take(&at, 1) == 1;
      out->request_vote_result.pre_vote = (raft_tribool)take(&at, raft_tribool_false);
      break;
    case RAFT_IO_TIMEOUT_NOW:
      out->timeout_now.term = take(&at, UINT64_MAX);
      out->timeout_now.last_log_index = take(&at, UINT64_MAX);
      out->timeout_now.last_log_term = take(&at, UINT64_MAX);
      break;
    default:
      at.broken = true;
      break;
  }
  if (at.broken || at.left > 0) {
    even_raft_wire_drop(out);
    return no_message();
  }
  return EVEN_OK;
}

void even_raft_wire_drop(struct raft_message *message) {
  if (message->type == RAFT_IO_APPEND_ENTRIES && message->append_entries.entries != NULL) {
    raft_free(message->append_entries.entries[0].batch);
    raft_free(message->append_entries.entries);
    message->append_entries.entries = NULL;
    message->append_entries.n_entries = 0;
  }
}
