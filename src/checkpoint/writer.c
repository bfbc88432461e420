/* Writes one checkpoint: open, add files, commit or abandon. */
#include "checkpoint/writer.h"
#include "base/alloc.h"
#include "base/fail.h"
#include "base/text.h"
#include "checkpoint/content.h"
#include "checkpoint/created.h"
#include "checkpoint/earlier.h"
#include "checkpoint/items.h"
#include "checkpoint/layout.h"
#include "checkpoint/manifest_writer.h"
#include "checkpoint/partial.h"
#include "checkpoint/parts.h"
#include "checkpoint/placing.h"
#include "checkpoint/sharing.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/lease_sign.h"
#include "os/stream.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

/* A file that is written, and not yet known to be on the disk. */
typedef struct unsynced_file {
  even_output output;
  char *path;
} unsynced_file;

struct even_checkpoint_writer {
  char *folder;
  char *parent;
  char *run_folder; /* NULL: no sign is asked for */
  char *job;
  even_partial partial;
  bool begun;       /* the partial folder is there and ours */
  bool may_replace; /* a checkpoint of that name */
  bool replaces;    /* `folder` exists and is one */
  uint64_t expected_bytes;
  uint64_t written_bytes;
  even_checkpoint_saved saved; /* of the files so far */
  even_earlier earlier;        /* whose files may be shared */
  even_manifest_file *files;
  size_t file_count;
  unsynced_file *unsynced; /* all are synced at once, by several threads, before the folder gets its name */
  size_t unsynced_count;
};

/* More at a time hold too many descriptors. */
enum { MOST_UNSYNCED = 64 };

static void drop_unsynced(even_checkpoint_writer *writer) {
  for (size_t i = 0; i < writer->unsynced_count; i++) {
    even_output_drop(&writer->unsynced[i].output);
    even_free(writer->unsynced[i].path);
  }
  writer->unsynced_count = 0;
}

static void discard_partial(even_checkpoint_writer *writer) {
  if (writer->begun) {
    drop_unsynced(writer);
    even_partial_discard(&writer->partial);
    writer->begun = false;
  }
}

static void free_writer(even_checkpoint_writer *writer) {
  for (size_t i = 0; i < writer->file_count; i++) {
    even_free(writer->files[i].name);
    even_free(writer->files[i].sums);
    even_free(writer->files[i].parts);
  }
  drop_unsynced(writer);
  even_free(writer->unsynced);
  even_earlier_free(&writer->earlier);
  even_free(writer->files);
  even_free(writer->folder);
  even_free(writer->run_folder);
  even_free(writer->job);
  even_partial_free(&writer->partial);
  even_free(writer->parent);
  even_free(writer);
}

static even_status join(const char *folder, const char *name, even_text *out) {
  even_text_clear(out);
  even_text_format(out, "%s/%s", folder, name);
  return even_text_status(out);
}

/* Adds the advice that fits a failure to write; how much is missing is known here only. */
static even_status advise(const even_checkpoint_writer *writer, even_status status, uint64_t missing_bytes) {
  const even_error *error = even_error_last();
  if (status == EVEN_ERR_NO_SPACE) {
    (void)even_error_fix("free at least %" PRIu64
                         " bytes on the disk of %s, or choose another one with "
                         "--checkpoint-dir; earlier checkpoints are as they were",
                         missing_bytes, writer->parent);
  } else if (error->system_error == EFBIG) {
    (void)even_error_fix(
        "raise the limit on the size of files (`ulimit -f`), or choose another disk with "
        "--checkpoint-dir; earlier checkpoints are as they were");
  } else if (status == EVEN_ERR_PERMISSION) {
    (void)even_error_fix("make %s writable for this user, or choose another folder with --checkpoint-dir",
                         writer->parent);
  } else if (error->system_error != 0) {
    (void)even_error_fix(
        "look at the disk of %s (`dmesg`), or choose another one with --checkpoint-dir; "
        "earlier checkpoints are as they were",
        writer->parent);
  }
  return status;
}

static even_status name_parts(even_checkpoint_writer *writer, const char *folder) {
  EVEN_TRY(even_duplicate(folder, &writer->folder));
  size_t length = strlen(writer->folder);
  while (length > 1 && writer->folder[length - 1] == '/') {
    writer->folder[--length] = '\0';
  }
  const char *slash = strrchr(writer->folder, '/');
  const char *name = slash == NULL ? writer->folder : slash + 1;
  if (name[0] == '\0' || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "a checkpoint cannot have the name \"%s\"", folder);
  }
  if (even_ends_with(name, EVEN_CHECKPOINT_PARTIAL) || even_ends_with(name, EVEN_CHECKPOINT_REPLACED)) {
    return even_fail(EVEN_ERR_ARGUMENT, "%s: names that end in %s or %s are those of unfinished checkpoints", folder,
                     EVEN_CHECKPOINT_PARTIAL, EVEN_CHECKPOINT_REPLACED);
  }
  EVEN_TRY(even_duplicate(slash == NULL ? "." : writer->folder, &writer->parent));
  if (slash != NULL) {
    writer->parent[slash == writer->folder ? 1 : slash - writer->folder] = '\0';
  }
  return EVEN_OK;
}

/* What a cut left of an earlier replacement. Where that cannot be mended it is in the way later, and told then. */
static void settle(const char *folder) {
  even_error kept = *even_error_last();
  if (even_placing_settle(folder) != EVEN_OK) {
    (void)even_error_restore(&kept);
  }
}

/* What already has the name: nothing, a checkpoint that may be replaced, or something that must stay. */
static even_status check_target(even_checkpoint_writer *writer, bool replace) {
  even_text manifest = EVEN_TEXT_EMPTY;
  bool nothing = !even_path_exists(writer->folder);
  settle(writer->folder);
  writer->may_replace = replace;
  if (!even_path_exists(writer->folder)) {
    return EVEN_OK;
  }
  replace = replace || nothing; /* what has come back was being replaced, and the caller saw nothing there */
  even_status status = join(writer->folder, EVEN_CHECKPOINT_MANIFEST, &manifest);
  bool checkpoint = status == EVEN_OK && even_path_exists(even_text_string(&manifest));
  even_text_free(&manifest);
  EVEN_TRY(status);
  if (!replace || !checkpoint) {
    status =
        even_fail(EVEN_ERR_IN_USE, "%s already exists%s", writer->folder, checkpoint ? "" : " and is not a checkpoint");
    (void)even_error_fix("give another name, or remove it");
    return status;
  }
  writer->replaces = true;
  return EVEN_OK;
}

static even_status keep_owner(even_checkpoint_writer *writer, const even_checkpoint_params *params) {
  if (params->run_folder == NULL || params->run_folder[0] == '\0' || params->job == NULL) {
    return EVEN_OK;
  }
  if (params->sign_seen) {
    even_lease_heed();
  }
  EVEN_TRY(even_duplicate(params->run_folder, &writer->run_folder));
  return even_duplicate(params->job, &writer->job);
}

/* Whether the job still has its run folder: another host's job, which took this one for dead, may write there. */
static even_status check_owner(const even_checkpoint_writer *writer) {
  even_status status = even_lease_is_of(writer->run_folder, writer->job);
  return status == EVEN_OK ? EVEN_OK : even_error_prefix("checkpoint %s is not written", writer->folder);
}

even_status even_checkpoint_writer_open(const even_checkpoint_params *params, even_checkpoint_writer **out) {
  even_checkpoint_writer *writer = NULL;
  *out = NULL;
  if (params == NULL || params->size != sizeof *params || params->folder == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "even_checkpoint_writer_open: parameters of another version");
  }
  EVEN_TRY(EVEN_NEW(&writer));
  writer->partial = EVEN_PARTIAL_NONE;
  writer->expected_bytes = params->expected_bytes;
  even_status status = name_parts(writer, params->folder);
  if (status == EVEN_OK) {
    status = keep_owner(writer, params);
  }
  if (status == EVEN_OK) {
    status = check_owner(writer);
  }
  if (status == EVEN_OK) {
    status = check_target(writer, params->replace);
  }
  if (status == EVEN_OK) {
    status = even_earlier_read(params->previous, &writer->earlier);
  }
  if (status == EVEN_OK) {
    status = even_partial_make(writer->folder, &writer->partial);
    if (status == EVEN_ERR_NOT_FOUND) {
      (void)even_error_fix("make the folder %s first", writer->parent);
    } else if (status != EVEN_OK) {
      (void)advise(writer, status, params->expected_bytes);
    }
  }
  if (status != EVEN_OK) {
    free_writer(writer);
    return status;
  }
  writer->begun = true;
  even_partial_sweep(writer->parent, &writer->partial);
  *out = writer;
  return EVEN_OK;
}

static even_status check_file_name(const even_checkpoint_writer *writer, const char *name) {
  if (name == NULL || name[0] == '\0' || strchr(name, '/') != NULL || strcmp(name, ".") == 0 ||
      strcmp(name, "..") == 0 || strcmp(name, EVEN_CHECKPOINT_MANIFEST) == 0) {
    even_status status =
        even_fail(EVEN_ERR_ARGUMENT, "a file of a checkpoint cannot have the name \"%s\"", name == NULL ? "" : name);
    (void)even_error_fix("give a plain file name such as model.safetensors");
    return status;
  }
  for (size_t i = 0; i < writer->file_count; i++) {
    if (strcmp(writer->files[i].name, name) == 0) {
      return even_fail(EVEN_ERR_ARGUMENT, "%s is already in this checkpoint", name);
    }
  }
  return EVEN_OK;
}

static even_status sync_one(void *context, void *own, size_t item) {
  even_checkpoint_writer *writer = context;
  (void)own;
  return even_output_finish(&writer->unsynced[item].output);
}

/* What was written is on the disk, all of it, or an error. */
static even_status sync_files(even_checkpoint_writer *writer) {
  const even_items_job items = {.count = writer->unsynced_count,
                                .most = EVEN_ITEMS_USUAL_THREADS,
                                .context = writer,
                                .work = sync_one,
                                .what = "a checkpoint was synced"};
  even_status status = even_items_run(&items);
  drop_unsynced(writer);
  return status;
}

/* A file to write, under the partial name. On success it is the last one of `unsynced`. */
static even_status create_file(even_checkpoint_writer *writer, const char *name, even_output **out) {
  even_text path = EVEN_TEXT_EMPTY;
  unsynced_file file = {.output = {.fd = -1}};
  if (writer->unsynced_count == MOST_UNSYNCED) {
    EVEN_TRY(sync_files(writer));
  }
  EVEN_TRY(even_partial_check(&writer->partial));
  EVEN_TRY(even_realloc((void **)&writer->unsynced, writer->unsynced_count + 1, sizeof *writer->unsynced));
  even_status status = join(writer->partial.path, name, &path);
  if (status == EVEN_OK) {
    status = even_duplicate(even_text_string(&path), &file.path);
  }
  if (status == EVEN_OK) {
    status = even_output_create(file.path, &file.output);
  }
  even_text_free(&path);
  if (status != EVEN_OK) {
    even_free(file.path);
    return status;
  }
  writer->unsynced[writer->unsynced_count] = file;
  *out = &writer->unsynced[writer->unsynced_count++].output;
  return EVEN_OK;
}

/* Chunks that have not changed since the earlier checkpoint are shared with it, where the file system can. */
static even_status share_and_write(even_checkpoint_writer *writer, const char *name, const even_content *content,
                                   even_output *output, even_manifest_file *entry) {
  even_sharing sharing;
  even_status status = even_sharing_make(&writer->earlier, name, content, output, &sharing);
  if (status == EVEN_OK && sharing.chunks.there == NULL) {
    status = even_content_write(content, output, &entry->sums, &entry->sum_count);
  } else if (status == EVEN_OK) {
    status = even_content_write_rest(content, output, &sharing.chunks);
    if (status != EVEN_OK && output->bytes < sharing.bytes) {
      output->bytes = sharing.bytes; /* what it has of them takes no room, so none of it is missing */
    }
    writer->saved.shared_bytes += sharing.bytes;
    entry->sums = sharing.chunks.sums;
    entry->sum_count = sharing.chunks.count;
    sharing.chunks.sums = NULL;
  }
  even_sharing_free(&sharing);
  return status;
}

static even_status write_file(even_checkpoint_writer *writer, const char *name, const even_content *content,
                              even_manifest_file *entry) {
  even_output *output = NULL;
  even_status status = create_file(writer, name, &output);
  if (status == EVEN_OK) {
    status = share_and_write(writer, name, content, output, entry);
    entry->bytes = output->bytes;
  }
  if (status != EVEN_OK) {
    uint64_t missing = content->bytes - entry->bytes;
    uint64_t planned = writer->written_bytes + entry->bytes;
    (void)advise(writer, status,
                 writer->expected_bytes > planned + missing ? writer->expected_bytes - planned : missing);
  }
  return status;
}

/* What has not changed since the earlier checkpoint is not written again. */
static even_status link_or_write(even_checkpoint_writer *writer, const char *name, const even_content *content,
                                 even_manifest_file *entry) {
  even_text path = EVEN_TEXT_EMPTY;
  bool linked = false;
  even_status status = join(writer->partial.path, name, &path);
  if (status == EVEN_OK) {
    status = even_earlier_link(&writer->earlier, name, content, even_text_string(&path), entry, &linked);
  }
  even_text_free(&path);
  if (status != EVEN_OK) {
    return advise(writer, status, 0);
  }
  if (!linked) {
    return write_file(writer, name, content, entry);
  }
  writer->saved.linked_bytes += content->bytes;
  return even_parts_sum_all(content);
}

/* With the checksums of its chunks, and of what tensors have in the chunks that they share. */
static even_status put_content(even_checkpoint_writer *writer, const char *name, const even_content *content,
                               even_manifest_file *entry) {
  even_content summed = *content;
  size_t places = EVEN_PARTS_OF_A_PIECE * content->count;
  EVEN_TRY(EVEN_NEW_ARRAY(&entry->parts, places));
  summed.parts = entry->parts;
  EVEN_TRY(link_or_write(writer, name, &summed, entry));
  entry->part_count = even_parts_pack(entry->parts, places);
  return EVEN_OK;
}

static even_status append_entry(even_checkpoint_writer *writer, const char *name, even_manifest_file *entry) {
  EVEN_TRY(even_realloc((void **)&writer->files, writer->file_count + 1, sizeof *writer->files));
  EVEN_TRY(even_duplicate(name, &entry->name));
  writer->files[writer->file_count++] = *entry;
  writer->written_bytes += entry->bytes;
  writer->saved.bytes = writer->written_bytes;
  return EVEN_OK;
}

static even_status check_begun(const even_checkpoint_writer *writer) {
  return writer->begun ? EVEN_OK
                       : even_fail(EVEN_ERR_STATE, "checkpoint %s has failed and takes no more files", writer->folder);
}

even_status even_checkpoint_writer_add_content(even_checkpoint_writer *writer, const char *name,
                                               const even_content *content) {
  even_manifest_file entry = {0};
  EVEN_TRY(check_begun(writer));
  even_status status = check_file_name(writer, name);
  if (status == EVEN_OK) {
    status = put_content(writer, name, content, &entry);
  }
  if (status == EVEN_OK) {
    status = append_entry(writer, name, &entry);
  }
  if (status != EVEN_OK) {
    even_free(entry.sums);
    even_free(entry.parts);
    discard_partial(writer);
  }
  return status;
}

even_status even_checkpoint_writer_add(even_checkpoint_writer *writer, const even_checkpoint_file *file) {
  even_safetensors_layout layout = {0};
  even_content content = {0};
  EVEN_TRY(check_begun(writer));
  even_status status = file == NULL || file->size != sizeof *file
                           ? even_fail(EVEN_ERR_ARGUMENT, "even_checkpoint_writer_add: parameters of another version")
                           : check_file_name(writer, file->name);
  if (status == EVEN_OK) {
    status = even_content_of_file(file, &layout, &content);
  }
  if (status == EVEN_OK) {
    status = even_checkpoint_writer_add_content(writer, file->name, &content);
  } else {
    discard_partial(writer);
  }
  even_content_free(&content);
  even_safetensors_layout_free(&layout);
  return status;
}

static even_status write_manifest(even_checkpoint_writer *writer, const char *state_json) {
  even_text text = EVEN_TEXT_EMPTY;
  even_output *output = NULL;
  uint64_t created = 0;
  even_status status = even_checkpoint_now(writer->parent, &created);
  if (status == EVEN_OK) {
    status = even_manifest_write(writer->files, writer->file_count, created, state_json, &text);
  }
  if (status == EVEN_OK) {
    status = create_file(writer, EVEN_CHECKPOINT_MANIFEST, &output);
  }
  if (status == EVEN_OK) {
    status = even_output_write(output, text.data, text.length);
  }
  if (status != EVEN_OK) {
    (void)advise(writer, status, text.length - (output == NULL ? 0 : output->bytes));
  }
  even_text_free(&text);
  return status;
}

/* *older_here: what was replaced has the partial name now. What has the name may come and go meanwhile. */
static even_status put_in_place(even_checkpoint_writer *writer, bool *older_here) {
  enum { MOST_ATTEMPTS = 16 };
  even_status status = EVEN_OK;
  *older_here = false;
  EVEN_TRY(even_partial_complete(&writer->partial));
  EVEN_TRY(even_folder_sync(writer->partial.path));
  EVEN_TRY(check_owner(writer)); /* the last before the name: writing may have taken long */
  for (int attempt = 0; attempt < MOST_ATTEMPTS; attempt++) {
    if (writer->replaces) {
      status = even_placing_replace(writer->partial.path, writer->parent, writer->folder, older_here);
      if (status != EVEN_ERR_NOT_FOUND) {
        return status;
      }
      writer->replaces = false; /* it was removed meanwhile */
    } else {
      status = even_folder_rename(writer->partial.path, writer->folder);
      if (status != EVEN_ERR_IN_USE || !writer->may_replace) {
        return status;
      }
      EVEN_TRY(check_target(writer, true)); /* another one was written there meanwhile, and may be gone again */
    }
  }
  return status;
}

void even_checkpoint_writer_saved(const even_checkpoint_writer *writer, even_checkpoint_saved *out) {
  *out = writer->saved;
}

even_status even_checkpoint_writer_commit(even_checkpoint_writer *writer, const char *state_json) {
  even_status status = EVEN_OK;
  bool older_here = false;
  if (!writer->begun) {
    status = even_fail(EVEN_ERR_STATE, "checkpoint %s has failed and cannot be committed", writer->folder);
    free_writer(writer);
    return status;
  }
  status = write_manifest(writer, state_json);
  if (status == EVEN_OK) {
    status = sync_files(writer);
  }
  if (status == EVEN_OK) {
    status = put_in_place(writer, &older_here);
  }
  if (status != EVEN_OK) {
    (void)advise(writer, status, 0);
    discard_partial(writer);
    free_writer(writer);
    return status;
  }
  if (!older_here) {
    writer->begun = false; /* the partial name is gone */
    even_partial_release(&writer->partial);
  }
  status = even_folder_sync(writer->parent);
  if (status != EVEN_OK) {
    (void)even_error_prefix("checkpoint %s is whole, but may not survive a power cut", writer->folder);
    (void)advise(writer, status, 0);
  }
  discard_partial(writer); /* the checkpoint that was replaced, now under the partial name */
  free_writer(writer);
  return status;
}

void even_checkpoint_writer_abandon(even_checkpoint_writer *writer) {
  if (writer != NULL) {
    discard_partial(writer);
    free_writer(writer);
  }
}

even_status even_checkpoint_remove(const char *folder) {
  even_checkpoint_writer *names = NULL;
  even_text manifest = EVEN_TEXT_EMPTY;
  EVEN_TRY(EVEN_NEW(&names));
  names->partial = EVEN_PARTIAL_NONE;
  even_status status = name_parts(names, folder);
  if (status == EVEN_OK) {
    status = join(names->folder, EVEN_CHECKPOINT_MANIFEST, &manifest);
  }
  if (status == EVEN_OK && !even_path_exists(even_text_string(&manifest))) {
    status = even_fail(EVEN_ERR_INPUT, "%s is not a checkpoint: it has no %s", folder, EVEN_CHECKPOINT_MANIFEST);
  }
  if (status == EVEN_OK) {
    settle(names->folder); /* else an older one would come in its place */
    status = even_partial_reserve(names->folder, &names->partial);
  }
  if (status == EVEN_OK) { /* an empty folder may be renamed over */
    even_partial_release(&names->partial);
    status = even_folder_rename(names->folder, names->partial.path);
    if (status != EVEN_OK) {
      even_partial_discard(&names->partial);
    }
  }
  if (status == EVEN_OK) { /* first the name, for good: no power cut may leave half a checkpoint under it */
    status = even_folder_sync(names->parent);
  }
  if (status == EVEN_OK) {
    status = even_folder_remove(names->partial.path);
  }
  even_text_free(&manifest);
  free_writer(names);
  return status;
}
