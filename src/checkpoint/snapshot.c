/* Snapshots: taken in the time of a memory copy, written by anybody who holds their memory. */
#include "checkpoint/snapshot.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "checkpoint/content.h"
#include "checkpoint/writer.h"
#include "os/folder.h"
#include "os/lease_sign.h"
#include "os/shared_memory.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

enum { MOST_PATH = 4096, MOST_NAME = 256, MOST_JOB = 64, MOST_FILES = 65536, PAGE = 4096 };
static const char magic[16] = "evenstep-snap-4";

/* Whether there is something to write. Stored last, so that a process that dies meanwhile leaves EMPTY. */
enum { EMPTY = 0, READY = 1 };

typedef struct snapshot_entry {
  char name[MOST_NAME];
  uint64_t offset; /* in the segment */
  uint64_t bytes;
  uint64_t pieces;    /* the header and the tensors with data, */
  uint64_t begins_at; /* and the offset of as many places in the file (uint64_t) at which they begin */
} snapshot_entry;

/* The segment's first bytes; files follow from the next page on, each from a page of its own; then the entries, then
 * where their pieces begin, then the state. */
typedef struct snapshot_head {
  char magic[sizeof magic];
  _Atomic uint32_t ready;
  uint32_t replace;
  uint64_t expected_bytes;
  uint64_t entries; /* offset */
  uint64_t count;
  uint64_t state;       /* offset of JSON, */
  uint64_t state_bytes; /* with its final NUL */
  char folder[MOST_PATH];
  char previous[MOST_PATH];   /* "": none */
  char run_folder[MOST_PATH]; /* "": no sign of the job was seen there */
  char job[MOST_JOB];
} snapshot_head;

struct even_checkpoint_snapshot {
  even_shared_memory memory;
  even_checkpoint_saved saved; /* of the last write */
};

/* What is laid out, before it is copied. */
typedef struct snapshot_plan {
  even_safetensors_layout *layouts;
  even_content *contents;
  snapshot_entry *entries;
  even_content_copy *copies;
  size_t count;
  size_t bytes; /* of the segment */
  size_t entries_at;
  size_t begins_at;
  size_t state_at;
  size_t state_bytes;
} snapshot_plan;

static snapshot_head *head_of(const even_shared_memory *memory) {
  return memory->address;
}

even_status even_checkpoint_snapshot_open(int fd, even_checkpoint_snapshot **out) {
  even_checkpoint_snapshot *snapshot = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&snapshot));
  even_status status = fd >= 0 && even_shared_memory_has_label(fd, EVEN_SNAPSHOT_LABEL)
                           ? even_shared_memory_take(fd, &snapshot->memory)
                           : even_shared_memory_begin(EVEN_SNAPSHOT_LABEL, &snapshot->memory);
  if (status != EVEN_OK) {
    even_free(snapshot);
    return status;
  }
  *out = snapshot;
  return EVEN_OK;
}

void even_checkpoint_snapshot_close(even_checkpoint_snapshot *snapshot) {
  if (snapshot != NULL) {
    even_shared_memory_close(&snapshot->memory);
    even_free(snapshot);
  }
}

static even_status too_large(void) {
  return even_fail(EVEN_ERR_OVERFLOW, "a checkpoint of more bytes than memory has addresses");
}

static even_status plan_file(const even_checkpoint_file *file, size_t index, snapshot_plan *plan) {
  size_t end = 0;
  if (file->size != sizeof *file) {
    return even_fail(EVEN_ERR_ARGUMENT, "even_checkpoint_snapshot_take: a file of another version");
  }
  if (file->name == NULL || strlen(file->name) >= MOST_NAME) {
    return even_fail(EVEN_ERR_ARGUMENT, "a file of a checkpoint has no name, or one of more than %d bytes",
                     MOST_NAME - 1);
  }
  EVEN_TRY(even_content_of_file(file, &plan->layouts[index], &plan->contents[index]));
  snapshot_entry *entry = &plan->entries[index];
  memcpy(entry->name, file->name, strlen(file->name) + 1);
  entry->offset = plan->bytes;
  entry->bytes = plan->contents[index].bytes;
  if (!even_add_size(plan->bytes, (size_t)entry->bytes, &end) || !even_align_size(end, PAGE, &plan->bytes)) {
    return too_large();
  }
  return EVEN_OK;
}

static even_status make_plan(const even_checkpoint_file *files, size_t count, const char *state_json,
                             snapshot_plan *plan) {
  size_t end = 0;
  plan->count = count;
  EVEN_TRY(EVEN_NEW_ARRAY(&plan->layouts, count));
  EVEN_TRY(EVEN_NEW_ARRAY(&plan->contents, count));
  EVEN_TRY(EVEN_NEW_ARRAY(&plan->entries, count));
  EVEN_TRY(EVEN_NEW_ARRAY(&plan->copies, count));
  if (!even_align_size(sizeof(snapshot_head), PAGE, &plan->bytes)) {
    return too_large();
  }
  for (size_t i = 0; i < count; i++) {
    EVEN_TRY(plan_file(&files[i], i, plan));
  }
  plan->entries_at = plan->bytes;
  plan->state_bytes = strlen(state_json) + 1;
  if (!even_add_size(plan->bytes, count * sizeof *plan->entries, &plan->begins_at)) {
    return too_large();
  }
  plan->state_at = plan->begins_at;
  for (size_t i = 0; i < count; i++) {
    plan->entries[i].pieces = plan->contents[i].count;
    plan->entries[i].begins_at = plan->state_at;
    if (!even_add_size(plan->state_at, plan->contents[i].count * sizeof(uint64_t), &plan->state_at)) {
      return too_large();
    }
  }
  if (!even_add_size(plan->state_at, plan->state_bytes, &end) || !even_align_size(end, PAGE, &plan->bytes)) {
    return too_large();
  }
  return EVEN_OK;
}

static void free_plan(snapshot_plan *plan) {
  for (size_t i = 0; i < plan->count; i++) {
    if (plan->contents != NULL) {
      even_content_free(&plan->contents[i]);
    }
    if (plan->layouts != NULL) {
      even_safetensors_layout_free(&plan->layouts[i]);
    }
  }
  even_free(plan->layouts);
  even_free(plan->contents);
  even_free(plan->entries);
  even_free(plan->copies);
}

/* What is too long is left out: written all the same. */
static void put_text(const char *text, char *out, size_t bytes) {
  size_t length = text == NULL || strlen(text) >= bytes ? 0 : strlen(text);
  memcpy(out, length == 0 ? "" : text, length);
  out[length] = '\0';
}

static even_status copy(const snapshot_plan *plan, const even_checkpoint_params *params, const char *state_json,
                        const even_shared_memory *memory) {
  snapshot_head *head = head_of(memory);
  char *base = memory->address;
  memcpy(head->magic, magic, sizeof magic);
  head->replace = params->replace;
  head->expected_bytes = params->expected_bytes;
  head->entries = plan->entries_at;
  head->count = plan->count;
  head->state = plan->state_at;
  head->state_bytes = plan->state_bytes;
  memcpy(head->folder, params->folder, strlen(params->folder) + 1);
  put_text(params->previous, head->previous, sizeof head->previous);
  bool known = params->sign_seen || even_lease_is_known(params->run_folder, params->job);
  put_text(known ? params->run_folder : NULL, head->run_folder, sizeof head->run_folder);
  put_text(params->job, head->job, sizeof head->job);
  for (size_t i = 0; i < plan->count; i++) {
    plan->copies[i] = (even_content_copy){.content = &plan->contents[i], .to = base + plan->entries[i].offset};
  }
  EVEN_TRY(even_contents_copy(plan->copies, plan->count));
  memcpy(base + plan->entries_at, plan->entries, plan->count * sizeof *plan->entries);
  for (size_t i = 0; i < plan->count; i++) {
    uint64_t *begins = (uint64_t *)(void *)(base + plan->entries[i].begins_at);
    for (size_t piece = 0; piece < plan->contents[i].count; piece++) {
      begins[piece] = plan->contents[i].pieces[piece].begin;
    }
  }
  memcpy(base + plan->state_at, state_json, plan->state_bytes);
  atomic_store_explicit(&head->ready, READY, memory_order_release);
  return EVEN_OK;
}

static bool is_ready(const even_shared_memory *memory) {
  return memory->address != NULL && atomic_load_explicit(&head_of(memory)->ready, memory_order_acquire) == READY;
}

even_status even_checkpoint_snapshot_take(even_checkpoint_snapshot *snapshot, const even_checkpoint_params *params,
                                          const even_checkpoint_file *files, size_t count, const char *state_json) {
  snapshot_plan plan = {0};
  if (params == NULL || params->size != sizeof *params || params->folder == NULL || state_json == NULL ||
      count > MOST_FILES) {
    return even_fail(EVEN_ERR_ARGUMENT, "even_checkpoint_snapshot_take: parameters of another version");
  }
  if (strlen(params->folder) >= MOST_PATH) {
    return even_fail(EVEN_ERR_ARGUMENT, "a checkpoint's folder has a path of more than %d bytes", MOST_PATH - 1);
  }
  if (is_ready(&snapshot->memory)) {
    return even_fail(EVEN_ERR_STATE, "the snapshot before this one was not written yet");
  }
  even_status status = make_plan(files, count, state_json, &plan);
  if (status == EVEN_OK) {
    status = even_shared_memory_grow(&snapshot->memory, plan.bytes);
  }
  if (status == EVEN_OK) {
    status = copy(&plan, params, state_json, &snapshot->memory);
  }
  free_plan(&plan);
  return status;
}

/* A range of the segment behind its first page. */
static bool is_inside(const even_shared_memory *memory, uint64_t offset, uint64_t bytes) {
  return offset >= sizeof(snapshot_head) && offset <= memory->bytes && bytes <= memory->bytes - offset;
}

static const uint64_t *begins_of(const char *base, const snapshot_entry *entry) {
  return (const uint64_t *)(const void *)(base + entry->begins_at);
}

static bool is_entry(const even_shared_memory *memory, const snapshot_entry *entry) {
  if (memchr(entry->name, '\0', MOST_NAME) == NULL || !is_inside(memory, entry->offset, entry->bytes) ||
      entry->pieces == 0 || entry->pieces > memory->bytes / sizeof(uint64_t) ||
      entry->begins_at % _Alignof(uint64_t) != 0 ||
      !is_inside(memory, entry->begins_at, entry->pieces * sizeof(uint64_t))) {
    return false;
  }
  const uint64_t *begins = begins_of(memory->address, entry);
  bool right = begins[0] == 0;
  for (uint64_t i = 1; right && i < entry->pieces; i++) {
    right = begins[i] > begins[i - 1] && begins[i] < entry->bytes;
  }
  return right;
}

/* Another process filled it: no figure in it is believed. */
static even_status check(const even_shared_memory *memory) {
  const snapshot_head *head = head_of(memory);
  const char *base = memory->address;
  bool right = memcmp(head->magic, magic, sizeof magic) == 0 && head->count <= MOST_FILES &&
               head->entries % _Alignof(snapshot_entry) == 0 &&
               is_inside(memory, head->entries, head->count * sizeof(snapshot_entry)) && head->state_bytes > 0 &&
               is_inside(memory, head->state, head->state_bytes) && base[head->state + head->state_bytes - 1] == '\0' &&
               memchr(head->folder, '\0', MOST_PATH) != NULL && memchr(head->previous, '\0', MOST_PATH) != NULL &&
               memchr(head->run_folder, '\0', MOST_PATH) != NULL && memchr(head->job, '\0', MOST_JOB) != NULL;
  for (size_t i = 0; right && i < head->count; i++) {
    right = is_entry(memory, (const snapshot_entry *)(const void *)(base + head->entries) + i);
  }
  return right ? EVEN_OK : even_fail(EVEN_ERR_CORRUPT, "the memory of a snapshot holds something else");
}

static even_status add_entry(even_checkpoint_writer *writer, const char *base, const snapshot_entry *entry) {
  const uint64_t *begins = begins_of(base, entry);
  even_content content = {.count = (size_t)entry->pieces, .bytes = entry->bytes};
  EVEN_TRY(EVEN_NEW_ARRAY(&content.pieces, content.count));
  for (size_t i = 0; i < content.count; i++) {
    uint64_t end = i + 1 < content.count ? begins[i + 1] : entry->bytes;
    content.pieces[i] = (even_content_piece){
        .data = base + entry->offset + begins[i], .begin = begins[i], .bytes = (size_t)(end - begins[i])};
  }
  even_status status = even_checkpoint_writer_add_content(writer, entry->name, &content);
  even_content_free(&content);
  return status;
}

static even_status write_out(const even_shared_memory *memory, even_checkpoint_saved *saved) {
  const snapshot_head *head = head_of(memory);
  const char *base = memory->address;
  even_checkpoint_writer *writer = NULL;
  const even_checkpoint_params params = {.size = sizeof params,
                                         .folder = head->folder,
                                         .replace = head->replace != 0,
                                         .expected_bytes = head->expected_bytes,
                                         .previous = head->previous,
                                         .run_folder = head->run_folder,
                                         .job = head->job};
  EVEN_TRY(check(memory));
  if (head->run_folder[0] != '\0') {
    even_lease_heed();
  }
  EVEN_TRY(even_checkpoint_writer_open(&params, &writer));
  for (size_t i = 0; i < head->count; i++) {
    even_status status = add_entry(writer, base, (const snapshot_entry *)(const void *)(base + head->entries) + i);
    if (status != EVEN_OK) {
      even_checkpoint_writer_abandon(writer);
      return status;
    }
  }
  even_checkpoint_saved added;
  even_checkpoint_writer_saved(writer, &added);
  EVEN_TRY(even_checkpoint_writer_commit(writer, base + head->state));
  *saved = added;
  return EVEN_OK;
}

static void empty(const even_shared_memory *memory) {
  atomic_store_explicit(&head_of(memory)->ready, EMPTY, memory_order_release);
}

even_status even_checkpoint_snapshot_write(even_checkpoint_snapshot *snapshot) {
  if (!is_ready(&snapshot->memory)) {
    return even_fail(EVEN_ERR_STATE, "there is no snapshot to write");
  }
  snapshot->saved = (even_checkpoint_saved){0};
  even_status status = write_out(&snapshot->memory, &snapshot->saved);
  empty(&snapshot->memory);
  return status;
}

void even_checkpoint_snapshot_saved(const even_checkpoint_snapshot *snapshot, even_checkpoint_saved *out) {
  *out = snapshot->saved;
}

/* Its own process had put it in place, and died before it could say so. */
static bool is_in_place(const even_shared_memory *memory) {
  even_text manifest = EVEN_TEXT_EMPTY;
  even_text_format(&manifest, "%s/%s", head_of(memory)->folder, EVEN_CHECKPOINT_MANIFEST);
  bool there = even_text_status(&manifest) == EVEN_OK && even_path_exists(even_text_string(&manifest));
  even_text_free(&manifest);
  return there;
}

bool even_snapshot_is_left(int fd) {
  even_shared_memory memory = {.fd = -1};
  size_t bytes = 0;
  bool left = even_shared_memory_bytes(fd, &bytes) != EVEN_OK;
  if (bytes >= sizeof(snapshot_head)) { /* else nobody ever took one */
    left = even_shared_memory_duplicate(fd, &memory) != EVEN_OK || is_ready(&memory);
    even_shared_memory_close(&memory);
  }
  if (left) {
    even_error_clear();
  }
  return left;
}

even_status even_snapshot_finish(int fd, even_text *folder) {
  even_shared_memory memory = {.fd = -1};
  even_checkpoint_saved saved;
  size_t bytes = 0;
  even_text_clear(folder);
  EVEN_TRY(even_shared_memory_bytes(fd, &bytes));
  if (bytes < sizeof(snapshot_head)) { /* nobody ever took one */
    return EVEN_OK;
  }
  EVEN_TRY(even_shared_memory_duplicate(fd, &memory));
  even_status status = EVEN_OK;
  if (is_ready(&memory)) {
    status = check(&memory);
    if (status == EVEN_OK && (head_of(&memory)->replace != 0 || !is_in_place(&memory))) {
      even_text_add(folder, head_of(&memory)->folder);
      status = even_text_status(folder);
      status = status == EVEN_OK ? write_out(&memory, &saved) : status;
    }
    if (status == EVEN_OK) {
      empty(&memory);
    }
  }
  even_shared_memory_close(&memory);
  return status;
}
