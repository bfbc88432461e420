/* Who takes checkpoints: says whether it has one, and takes the files of one that it has not. */
#include "orchestrator/bring.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/stop.h"
#include "checkpoint/incoming.h"
#include "checkpoint/manifest_writer.h"
#include "orchestrator/host_memory.h"
#include "os/clock.h"
#include "os/host.h"
#include "os/memory_use.h"
#include "os/pipe.h"
#include "os/shared_memory.h"
#include "os/thread.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

struct even_bring_take {
  void (*tell)(void *context, even_text *text);
  void *context;
  int from;    /* the host that sends them */
  bool coming; /* a file is on its way, or was not, since: */
  uint64_t quiet_ns;
  uint64_t serial;  /* of what was asked for last */
  even_text folder; /* where it shall lie, or else: */
  even_text other;
  bool in_memory;                     /* in this host's memory: `other` */
  even_text shared;                   /* a checkpoint that stays, and whose files it may share */
  uint64_t spared_bytes;              /* of files that it shares */
  bool unseen;                        /* what has the name of `folder` here is not the leader's */
  uint64_t sum;                       /* of its manifest */
  even_checkpoint_incoming *incoming; /* files of it are still to come */
  even_text place;                    /* where it comes to */
  bool ending;                     /* all have come: it is compared and named, or the leader is to hear how that went */
  even_checkpoint_incoming *whole; /* what that is done to, and who does it frees */
  bool threaded;                   /* by a thread, which may take its time */
  pthread_t thread;
  atomic_bool unwanted; /* asks that thread to end early */
  atomic_bool committed;
  even_status status; /* of that */
  even_error why;
  even_bring_kept *kept; /* the caller's */
};

/* ---- saying ---- */

static void begin_words(const even_bring_take *take, even_text *text, even_json *json) {
  *json = even_json_begin(text, 0);
  even_json_object(json, NULL);
  even_json_unsigned(json, "serial", take->serial);
}

static void say_where(even_bring_take *take, const char *folder) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json;
  begin_words(take, &text, &json);
  even_json_bool(&json, "holds", folder != NULL);
  if (folder != NULL) {
    even_json_string(&json, "folder", folder);
    even_json_bool(&json, "came", even_bring_kept_has(take->kept, folder));
  }
  even_json_object_end(&json);
  take->tell(take->context, &text);
}

static void say_error(even_bring_take *take, const even_error *error) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json;
  begin_words(take, &text, &json);
  even_json_integer(&json, "status", error->status);
  even_json_string(&json, "what", error->what);
  even_json_string(&json, "fix", error->fix);
  even_json_object_end(&json);
  take->tell(take->context, &text);
}

/* ---- what is here ---- */

/* The same manifest, and files of its sizes: their checksums each rank compares as it reads them. */
static bool holds(const char *folder, uint64_t sum) {
  even_checkpoint_info info = {0};
  uint64_t found = 0;
  bool same = even_bring_sum_of(folder, &found) && found == sum;
  if (same) {
    same = even_checkpoint_inspect(folder, &info) == EVEN_OK;
    even_checkpoint_info_free(&info);
    even_error_clear(); /* what cannot be read is not had */
  }
  return same;
}

/* ---- the end of one that came ---- */

static _Thread_local even_bring_take *served; /* by this thread */

static bool is_unwanted(void) {
  return atomic_load(&served->unwanted);
}

static void commit(even_bring_take *take) {
  take->status = even_checkpoint_incoming_commit(take->whole);
  take->why = *even_error_last();
  atomic_store_explicit(&take->committed, true, memory_order_release);
}

static void *commit_apart(void *context) {
  served = context;
  even_stop_when(is_unwanted);
  commit(served);
  return NULL;
}

static void start_commit(even_bring_take *take) {
  take->whole = take->incoming;
  take->incoming = NULL;
  take->ending = true;
  even_bring_kept_await(take->kept, take->in_memory, even_text_string(&take->place));
  atomic_store(&take->unwanted, false);
  take->threaded = even_thread_start(commit_apart, take, &take->thread) == EVEN_OK;
  if (!take->threaded) {
    commit(take); /* the leader waits a little for what else it asks */
    even_error_clear();
  }
}

/* Waits for it. */
static void end_commit(even_bring_take *take) {
  if (take->threaded) {
    even_thread_join(take->thread);
  }
  take->threaded = false;
  take->ending = false;
  take->whole = NULL;
  atomic_store(&take->committed, false);
}

/* The one that came before to where this one shall lie. */
static even_text *before_of(const even_bring_take *take) {
  return take->in_memory ? &take->kept->memory : &take->kept->disk;
}

/* The one before goes when the next one is whole, and not sooner. */
static void follow_before(even_bring_take *take) {
  even_bring_kept_follow(take->kept, take->in_memory, even_text_string(&take->place));
}

/* What the new one shared with the one before may be what is damaged: the next one shall come whole. */
static void drop_damaged(even_bring_take *take) {
  even_text *before = before_of(take);
  if (take->status != EVEN_ERR_CORRUPT || before->length == 0 ||
      even_checkpoint_verify(before->data, NULL) == EVEN_OK) {
    return;
  }
  if (even_checkpoint_remove(before->data) == EVEN_OK) {
    even_text_clear(before);
  }
  even_error_clear();
}

static void conclude(even_bring_take *take) {
  const char *place = even_text_string(&take->place);
  if (take->status == EVEN_ERR_IN_USE && holds(place, take->sum)) {
    even_bring_kept_miss(take->kept);
    say_where(take, place); /* it has come another way meanwhile */
    return;
  }
  if (take->status != EVEN_OK) {
    say_error(take, &take->why);
    drop_damaged(take);
    even_bring_kept_miss(take->kept);
    return;
  }
  follow_before(take);
  say_where(take, place);
}

void even_bring_take_tick(even_bring_take *take) {
  if (take != NULL && atomic_load_explicit(&take->committed, memory_order_acquire)) {
    end_commit(take);
    conclude(take);
  }
}

/* One that has its name by now stays. */
static void give_up(even_bring_take *take) {
  if (take->ending) {
    atomic_store(&take->unwanted, true);
    end_commit(take);
    if (take->status == EVEN_OK) {
      follow_before(take);
    } else {
      even_bring_kept_miss(take->kept);
    }
  }
  even_checkpoint_incoming_abandon(take->incoming);
  take->incoming = NULL;
}

/* ---- what the leader asks ---- */

static even_status set_wish(even_bring_take *take, const even_bring_wish *wish) {
  even_text_clear(&take->folder);
  even_text_clear(&take->other);
  even_text_add(&take->folder, wish->folder);
  even_text_add(&take->other, wish->other);
  even_text_clear(&take->shared);
  even_text_add(&take->shared, wish->shared == NULL ? "" : wish->shared);
  take->spared_bytes = 0;
  take->serial = wish->serial;
  take->sum = wish->sum;
  take->in_memory = wish->memory;
  take->coming = false;
  take->quiet_ns = even_clock_ns();
  EVEN_TRY(even_text_status(&take->folder));
  EVEN_TRY(even_text_status(&take->shared));
  return even_text_status(&take->other);
}

static even_status read_wish(even_bring_take *take, const json_t *content) {
  uint64_t sum = 0;
  bool named = even_bring_sum_read(even_json_text(content, "sum"), &sum);
  json_int_t serial = json_integer_value(json_object_get(content, "serial"));
  const even_bring_wish wish = {.serial = (uint64_t)serial,
                                .folder = even_json_text(content, "folder"),
                                .other = even_json_text(content, "other"),
                                .sum = sum,
                                .memory = json_is_true(json_object_get(content, "memory"))};
  if (wish.folder[0] != '/' || wish.other[0] != '/' || !named || serial < 1) {
    return even_fail(EVEN_ERR_INPUT, "the leader asks for a checkpoint without saying which");
  }
  take->unseen = json_is_true(json_object_get(content, "unseen"));
  return set_wish(take, &wish);
}

/* The same name in this host's memory. */
static even_status choose_memory(even_bring_take *take) {
  const char *name = strrchr(take->folder.data, '/');
  if (take->kept->host == NULL) {
    EVEN_TRY(even_host_memory_open(&take->kept->host));
  }
  even_text_clear(&take->other);
  even_text_format(&take->other, "%s%s", even_text_string(&take->kept->host->folder), name);
  return even_text_status(&take->other);
}

even_status even_bring_take_begin(even_bring_take *take, const even_bring_wish *wish) {
  give_up(take);
  EVEN_TRY(set_wish(take, wish));
  return wish->memory ? choose_memory(take) : EVEN_OK;
}

uint64_t even_bring_take_spared(const even_bring_take *take) {
  return take->spared_bytes;
}

bool even_bring_take_is_idle(const even_bring_take *take, uint64_t ns) {
  return !take->coming && !take->ending && even_clock_ns() - take->quiet_ns > ns;
}

even_status even_bring_take_hear(even_bring_take *take, const json_t *content) {
  give_up(take);
  EVEN_TRY(read_wish(take, content));
  if (take->in_memory && choose_memory(take) != EVEN_OK) {
    say_error(take, even_error_last());
    even_error_clear();
    return EVEN_OK;
  }
  if (!take->unseen && holds(take->folder.data, take->sum)) {
    say_where(take, take->folder.data);
  } else if (holds(take->other.data, take->sum)) {
    say_where(take, take->other.data);
  } else {
    say_where(take, NULL);
  }
  return EVEN_OK;
}

/* ---- its files ---- */

static size_t file_of(const even_parcel *parcel) {
  return (size_t)(parcel->number % EVEN_BRING_FILES);
}

static even_status choose_file(even_bring_take *take, const even_parcel *parcel, int *fd) {
  size_t file = file_of(parcel);
  if (parcel->from != take->from || parcel->number / EVEN_BRING_FILES != take->serial || take->ending) {
    return even_fail(EVEN_ERR_STATE, "this checkpoint was not asked for");
  }
  if (file == 0) {
    return parcel->bytes <= EVEN_MANIFEST_MOST_BYTES && take->incoming == NULL
               ? EVEN_OK
               : even_fail(EVEN_ERR_INPUT, "a manifest of %" PRIu64 " bytes", parcel->bytes);
  }
  const even_checkpoint_info *info = take->incoming == NULL ? NULL : even_checkpoint_incoming_info(take->incoming);
  if (info == NULL || file > info->file_count || parcel->bytes != info->files[file - 1].bytes) {
    return even_fail(EVEN_ERR_INPUT, "file %zu of a checkpoint, of %" PRIu64 " bytes, which its manifest does not have",
                     file, parcel->bytes);
  }
  return even_checkpoint_incoming_create(take->incoming, file - 1, fd);
}

static even_status offered(void *context, const even_parcel *parcel, int *fd) {
  even_bring_take *take = context;
  EVEN_TRY(choose_file(take, parcel, fd));
  take->coming = true;
  return EVEN_OK;
}

static void note_quiet(even_bring_take *take) {
  take->coming = false;
  take->quiet_ns = even_clock_ns();
}

/* Another one that lies there, or a folder that cannot be written to, leaves the run folder. */
static even_status open_at(even_bring_take *take, const char *folder, bool replace, const char *manifest,
                           size_t bytes) {
  even_text_clear(&take->place);
  even_text_add(&take->place, folder);
  EVEN_TRY(even_text_status(&take->place));
  return even_checkpoint_incoming_open(folder, replace, manifest, bytes, &take->incoming);
}

/* To a host's disk less may come than all of it, and what a full one does not take is told then. */
static even_status check_room(const even_bring_take *take, uint64_t bytes) {
  const char *slash = strrchr(even_text_string(&take->place), '/');
  even_text parent = EVEN_TEXT_EMPTY;
  even_disk disk = {.free_bytes = 0};
  if (take->in_memory) {
    return even_memory_ask(NULL, bytes, "a checkpoint");
  }
  if (take->from == 0 || slash == NULL) {
    return EVEN_OK;
  }
  even_text_append(&parent, take->place.data, (size_t)(slash - take->place.data));
  even_status status = even_text_status(&parent);
  if (status == EVEN_OK) {
    status = even_disk_read(parent.data, &disk);
  }
  if (status == EVEN_OK && bytes > disk.free_bytes) {
    status = even_fail(EVEN_ERR_NO_SPACE, "a checkpoint of %" PRIu64 " bytes, where %" PRIu64 " are free (%s)", bytes,
                       disk.free_bytes, parent.data);
  }
  even_text_free(&parent);
  return status;
}

static bool is_same(const even_checkpoint_stored_file *one, const even_checkpoint_stored_file *other) {
  return strcmp(one->name, other->name) == 0 && one->bytes == other->bytes && one->bytes > 0 &&
         one->chunk_bytes == other->chunk_bytes && one->sum_count == other->sum_count &&
         memcmp(one->sums, other->sums, one->sum_count * sizeof *one->sums) == 0;
}

/* A file of the checkpoint `before` with the same checksums needs not come again. */
static even_status link_from(even_bring_take *take, const char *before, const even_checkpoint_info *had,
                             even_json *json, bool *any) {
  const even_checkpoint_info *info = even_checkpoint_incoming_info(take->incoming);
  even_text from = EVEN_TEXT_EMPTY;
  even_status status = EVEN_OK;
  for (size_t i = 0; status == EVEN_OK && i < info->file_count; i++) {
    for (size_t k = 0; status == EVEN_OK && k < had->file_count; k++) {
      bool linked = false;
      if (!is_same(&info->files[i], &had->files[k])) {
        continue;
      }
      even_text_clear(&from);
      even_text_format(&from, "%s/%s", before, had->files[k].name);
      status = even_text_status(&from);
      if (status == EVEN_OK) {
        status = even_checkpoint_incoming_link(take->incoming, i, from.data, &linked);
      }
      *any = *any || linked;
      if (linked) {
        even_json_integer(json, NULL, (int64_t)i + 1);
        take->spared_bytes += info->files[i].bytes;
      }
    }
  }
  even_text_free(&from);
  return status;
}

/* Who sends it hears of them before it hears that the manifest is here, after which it sends the others. */
static even_status link_unchanged(even_bring_take *take) {
  const even_text *before = before_of(take)->length > 0 ? before_of(take) : &take->shared;
  even_checkpoint_info had = {0};
  even_text text = EVEN_TEXT_EMPTY;
  even_json json;
  if (before->length == 0 || even_checkpoint_inspect(before->data, &had) != EVEN_OK) {
    even_error_clear(); /* all of it comes */
    even_checkpoint_info_free(&had);
    return EVEN_OK;
  }
  begin_words(take, &text, &json);
  even_json_array(&json, "had");
  bool any = false;
  even_status status = link_from(take, before->data, &had, &json, &any);
  even_json_array_end(&json);
  even_json_object_end(&json);
  even_checkpoint_info_free(&had);
  if (status == EVEN_OK && any) {
    take->tell(take->context, &text);
  } else {
    even_text_free(&text);
  }
  return status;
}

static even_status take_manifest(even_bring_take *take, const char *manifest, size_t bytes) {
  if (even_checkpoint_checksum(manifest, bytes) != take->sum) {
    return even_fail(EVEN_ERR_CORRUPT, "the manifest that came is not the one that was asked for");
  }
  even_status status = EVEN_ERR_IN_USE;
  if (!take->in_memory) {
    status = open_at(take, take->folder.data, false, manifest, bytes);
  }
  if (status != EVEN_OK && status != EVEN_ERR_CORRUPT && status != EVEN_ERR_UNSUPPORTED) {
    status = open_at(take, take->other.data, true, manifest, bytes);
  }
  if (status == EVEN_OK) {
    status = link_unchanged(take);
  }
  return status == EVEN_OK ? check_room(take, even_checkpoint_incoming_info(take->incoming)->bytes - take->spared_bytes)
                           : status;
}

static even_status arrived(void *context, const even_parcel *parcel, int fd) {
  even_bring_take *take = context;
  even_shared_memory memory;
  note_quiet(take);
  if (parcel->number / EVEN_BRING_FILES != take->serial || take->ending ||
      (file_of(parcel) > 0) != (take->incoming != NULL)) {
    even_pipe_close(fd);
    return even_fail(EVEN_ERR_STATE, "this checkpoint is not asked for any more");
  }
  if (file_of(parcel) > 0) {
    even_checkpoint_incoming_filled(take->incoming, file_of(parcel) - 1, fd);
  } else {
    EVEN_TRY(even_shared_memory_adopt(fd, &memory));
    even_status status = take_manifest(take, memory.address, memory.bytes);
    even_shared_memory_close(&memory);
    EVEN_TRY(status);
  }
  if (even_checkpoint_incoming_is_full(take->incoming)) {
    start_commit(take);
  }
  return EVEN_OK;
}

static void failed(void *context, const even_parcel *parcel, const even_error *why) {
  even_bring_take *take = context;
  (void)why; /* who sends it knows */
  note_quiet(take);
  if (parcel->number / EVEN_BRING_FILES == take->serial) {
    give_up(take);
  }
}

/* ---- opening and closing ---- */

void even_bring_kept_free(even_bring_kept *kept) {
  even_text_free(&kept->disk);
  even_text_free(&kept->memory);
  even_text_free(&kept->coming);
  even_host_memory_close(kept->host);
  *kept = (even_bring_kept){.host = NULL};
}

even_status even_bring_take_open(even_parcels *parcels, int from, even_bring_kept *kept,
                                 void (*tell)(void *context, even_text *text), void *context, even_bring_take **out) {
  *out = NULL;
  EVEN_TRY(EVEN_NEW(out));
  (*out)->from = from;
  (*out)->kept = kept;
  (*out)->tell = tell;
  (*out)->context = context;
  const even_parcel_calls calls = {.context = *out, .offered = offered, .arrived = arrived, .failed = failed};
  even_status status = even_parcels_expect(parcels, from == 0 ? EVEN_BRING_PARCEL : EVEN_BRING_BACK_PARCEL, &calls);
  if (status != EVEN_OK) {
    even_free(*out);
    *out = NULL;
  }
  return status;
}

void even_bring_take_close(even_bring_take *take) {
  if (take == NULL) {
    return;
  }
  give_up(take);
  even_text_free(&take->folder);
  even_text_free(&take->other);
  even_text_free(&take->place);
  even_text_free(&take->shared);
  even_free(take);
}
