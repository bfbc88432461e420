/* A member's memory that outlives it. */
#include "orchestrator/raft_store.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/file.h"
#include "os/folder.h"

#include <stdio.h>
#include <string.h>

enum { HEAD = 5 * 8, ENTRY_HEAD = 3 * 8, SUM = 8 };

static const char magic[8] = "evenlog1";

/* ---- bytes ---- */

/* FNV-1a: the file is replaced whole, so nothing but the disk can damage it. */
static uint64_t sum_of(const char *bytes, size_t count) {
  uint64_t sum = 14695981039346656037u;
  for (size_t i = 0; i < count; i++) {
    sum = (sum ^ (unsigned char)bytes[i]) * 1099511628211u;
  }
  return sum;
}

static void add(even_text *out, uint64_t value) {
  char bytes[8];
  for (int i = 0; i < 8; i++) {
    bytes[i] = (char)(value >> 8 * i);
  }
  even_text_append(out, bytes, sizeof bytes);
}

static uint64_t number_at(const char *bytes) {
  uint64_t value = 0;
  for (int i = 0; i < 8; i++) {
    value |= (uint64_t)(unsigned char)bytes[i] << 8 * i;
  }
  return value;
}

even_status even_raft_store_write(const even_raft_store *store, even_text *out) {
  size_t begun = out->length;
  even_text_append(out, magic, sizeof magic);
  add(out, store->member);
  add(out, store->term);
  add(out, store->vote);
  add(out, store->count);
  for (size_t i = 0; i < store->count; i++) {
    const even_raft_kept *entry = &store->entries[i];
    add(out, entry->term);
    add(out, entry->type);
    add(out, entry->bytes);
    if (entry->bytes > 0) {
      even_text_append(out, (const char *)entry->data, entry->bytes);
    }
  }
  EVEN_TRY(even_text_status(out));
  add(out, sum_of(out->data + begun, out->length - begun));
  return even_text_status(out);
}

static void drop_from(even_raft_store *store, size_t kept) {
  while (store->count > kept) {
    even_free(store->entries[--store->count].data);
  }
}

static even_status add_copy(even_raft_store *store, const even_raft_kept *entry) {
  even_raft_kept copy = *entry;
  EVEN_TRY(even_realloc((void **)&store->entries, store->count + 1, sizeof *store->entries));
  EVEN_TRY(EVEN_NEW_ARRAY(&copy.data, entry->bytes + 1));
  if (entry->bytes > 0) {
    memcpy(copy.data, entry->data, entry->bytes);
  }
  store->entries[store->count++] = copy;
  return EVEN_OK;
}

static even_status not_whole(const even_raft_store *store) {
  return even_fail(EVEN_ERR_CORRUPT, "the log of member %llu is not whole", (unsigned long long)store->member);
}

static even_status read_entry(even_raft_store *store, const char *bytes, size_t count, size_t *at) {
  if (count - *at < ENTRY_HEAD) {
    return not_whole(store);
  }
  uint64_t type = number_at(bytes + *at + 8);
  uint64_t length = number_at(bytes + *at + 16);
  const even_raft_kept entry = {.term = number_at(bytes + *at),
                                .type = (unsigned)type,
                                .bytes = (size_t)length,
                                .data = (unsigned char *)(bytes + *at + ENTRY_HEAD)};
  *at += ENTRY_HEAD;
  if (type == 0 || type > UINT16_MAX || length > count - *at) {
    return not_whole(store);
  }
  *at += length;
  return add_copy(store, &entry);
}

even_status even_raft_store_read(even_raft_store *store, const char *bytes, size_t count) {
  size_t end = count - SUM;
  if (count < HEAD + SUM || memcmp(bytes, magic, sizeof magic) != 0 || number_at(bytes + end) != sum_of(bytes, end) ||
      number_at(bytes + 8) != store->member) {
    return not_whole(store);
  }
  size_t at = HEAD;
  even_status status = EVEN_OK;
  store->term = number_at(bytes + 16);
  store->vote = number_at(bytes + 24);
  uint64_t entries = number_at(bytes + 32);
  for (uint64_t i = 0; status == EVEN_OK && i < entries; i++) {
    status = read_entry(store, bytes, end, &at);
  }
  if (status == EVEN_OK && at != end) {
    status = not_whole(store);
  }
  if (status != EVEN_OK) {
    drop_from(store, 0);
    store->term = store->vote = 0;
  }
  return status;
}

/* ---- the file ---- */

static even_status path_of(const even_raft_store *store, even_text *out) {
  even_text_format(out, "%s/log", even_text_string(&store->folder));
  return even_text_status(out);
}

static even_status load(even_raft_store *store, bool *known) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text content = EVEN_TEXT_EMPTY;
  even_status status = path_of(store, &path);
  if (status == EVEN_OK && even_path_exists(path.data)) {
    status = even_file_read(path.data, EVEN_RAFT_STORE_MOST, &content);
    status = status == EVEN_OK ? even_raft_store_read(store, content.data, content.length) : status;
    *known = status == EVEN_OK;
  }
  even_text_free(&content);
  even_text_free(&path);
  return status;
}

/* Without a folder of its own, or without locks, it is in memory alone. */
static void take_folder(even_raft_store *store, const char *folder, bool *held) {
  *held = false;
  if (folder == NULL) {
    return;
  }
  even_text_format(&store->folder, "%s/%llu", folder, (unsigned long long)store->member);
  bool there = even_text_status(&store->folder) == EVEN_OK && even_folder_make(store->folder.data) == EVEN_OK &&
               even_folder_lock(store->folder.data, &store->lock) == EVEN_OK;
  *held = there && store->lock < 0;
  if (!there) {
    even_error_clear();
    even_text_free(&store->folder);
    store->folder = (even_text)EVEN_TEXT_EMPTY;
  }
}

even_status even_raft_store_open(even_raft_store *store, const char *folder, uint64_t member, bool *known) {
  bool held = false;
  *store = (even_raft_store){.folder = EVEN_TEXT_EMPTY, .lock = -1, .member = member};
  *known = false;
  take_folder(store, folder, &held);
  if (held) {
    even_raft_store_close(store, false);
    return even_fail(EVEN_ERR_IN_USE, "member %llu of this job's group is another process of this host",
                     (unsigned long long)member);
  }
  even_status status = store->lock < 0 ? EVEN_OK : load(store, known);
  if (status != EVEN_OK) {
    const even_error kept = *even_error_last();
    even_raft_store_close(store, false);
    return even_error_restore(&kept);
  }
  return EVEN_OK;
}

void even_raft_store_close(even_raft_store *store, bool forget) {
  const even_error kept = *even_error_last();
  drop_from(store, 0);
  even_free(store->entries);
  if (store->folder.data != NULL && store->lock >= 0) {
    if (forget) {
      char *slash = strrchr(store->folder.data, '/');
      (void)!even_folder_remove_locked(store->folder.data, store->lock);
      *slash = '\0';
      (void)!even_folder_remove(store->folder.data); /* that of all, with the last: it must not hold folders */
    }
    even_folder_unlock(store->lock);
  }
  even_text_free(&store->folder);
  *store = (even_raft_store){.folder = EVEN_TEXT_EMPTY, .lock = -1};
  (void)even_error_restore(&kept);
}

/* A file that is behind would make a member that forgot what it said: better none, also after the machine has lost its
 * power. */
static even_status give_up(even_raft_store *store, const char *path) {
  EVEN_TRY(even_file_remove(path));
  EVEN_TRY(even_folder_sync(store->folder.data));
  even_folder_unlock(store->lock);
  store->lock = -1;
  return EVEN_OK;
}

static even_status keep(even_raft_store *store) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text content = EVEN_TEXT_EMPTY;
  if (store->lock < 0) {
    return EVEN_OK;
  }
  EVEN_TRY(path_of(store, &path));
  even_status status = even_raft_store_write(store, &content);
  if (status == EVEN_OK) {
    status = even_file_replace_private(path.data, content.data, content.length);
  }
  if (status != EVEN_OK) {
    status = give_up(store, path.data);
  }
  even_text_free(&content);
  even_text_free(&path);
  return status;
}

static even_status keep_vote(even_raft_store *store, uint64_t term, uint64_t vote) {
  const uint64_t term_before = store->term;
  const uint64_t vote_before = store->vote;
  store->term = term;
  store->vote = vote;
  even_status status = keep(store);
  if (status != EVEN_OK) {
    store->term = term_before;
    store->vote = vote_before;
  }
  return status;
}

even_status even_raft_store_term(even_raft_store *store, uint64_t term) {
  return keep_vote(store, term, term == store->term ? store->vote : 0);
}

even_status even_raft_store_vote(even_raft_store *store, uint64_t member) {
  return keep_vote(store, store->term, member);
}

even_status even_raft_store_append(even_raft_store *store, const even_raft_kept *entries, size_t count) {
  const size_t before = store->count;
  even_status status = EVEN_OK;
  for (size_t i = 0; status == EVEN_OK && i < count; i++) {
    status = add_copy(store, &entries[i]);
  }
  status = status == EVEN_OK ? keep(store) : status;
  if (status != EVEN_OK) {
    drop_from(store, before);
  }
  return status;
}

even_status even_raft_store_truncate(even_raft_store *store, uint64_t index) {
  const size_t before = store->count;
  const size_t left = index >= 1 && index <= before ? (size_t)index - 1 : before;
  store->count = left;
  even_status status = keep(store);
  store->count = before;
  if (status == EVEN_OK) {
    drop_from(store, left);
  }
  return status;
}
