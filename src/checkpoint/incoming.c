/* What comes grows in a partial folder, as what is written does. */
#include "checkpoint/incoming.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/stop.h"
#include "base/text.h"
#include "checkpoint/partial.h"
#include "checkpoint/placing.h"
#include "os/file.h"
#include "os/pipe.h"
#include "os/stream.h"

#include <evenstep/checkpoint.h>
#include <stdio.h>
#include <string.h>

/* Each is open until its bytes are known to be on the disk. */
enum { MOST_FILES = 512 };

typedef struct incoming_file {
  char *path;
  even_output output; /* fd -1: it was not filled */
  bool filled;
  bool linked; /* and on the disk already */
} incoming_file;

struct even_checkpoint_incoming {
  even_text folder;
  even_text parent;
  even_text manifest;
  even_checkpoint_info info;
  incoming_file *files;
  even_partial partial;
  bool begun; /* the partial folder is there, and ours */
  bool replace;
};

static void release(even_checkpoint_incoming *incoming) {
  const even_error kept = *even_error_last();
  for (size_t i = 0; incoming->files != NULL && i < incoming->info.file_count; i++) {
    even_output_drop(&incoming->files[i].output);
    even_free(incoming->files[i].path);
  }
  if (incoming->begun) {
    even_partial_discard(&incoming->partial);
  }
  even_partial_free(&incoming->partial);
  even_free(incoming->files);
  even_checkpoint_info_free(&incoming->info);
  even_text_free(&incoming->folder);
  even_text_free(&incoming->parent);
  even_text_free(&incoming->manifest);
  even_free(incoming);
  (void)even_error_restore(&kept);
}

void even_checkpoint_incoming_abandon(even_checkpoint_incoming *incoming) {
  if (incoming != NULL) {
    release(incoming);
  }
}

const even_checkpoint_info *even_checkpoint_incoming_info(const even_checkpoint_incoming *incoming) {
  return &incoming->info;
}

/* ---- opening ---- */

static even_status name_parts(even_checkpoint_incoming *incoming, const char *folder) {
  const char *slash = strrchr(folder, '/');
  if (folder[0] != '/' || slash[1] == '\0' || strcmp(slash, "/.") == 0 || strcmp(slash, "/..") == 0 ||
      even_ends_with(folder, EVEN_CHECKPOINT_PARTIAL)) {
    return even_fail(EVEN_ERR_ARGUMENT, "a checkpoint cannot come to \"%s\"", folder);
  }
  even_text_add(&incoming->folder, folder);
  even_text_append(&incoming->parent, folder, slash == folder ? 1 : (size_t)(slash - folder));
  EVEN_TRY(even_text_status(&incoming->folder));
  return even_text_status(&incoming->parent);
}

static even_status read_manifest(even_checkpoint_incoming *incoming, const char *manifest, size_t bytes) {
  EVEN_TRY(even_manifest_parse("the manifest of a checkpoint that comes", manifest, bytes, &incoming->info));
  if (incoming->info.file_count > MOST_FILES) {
    return even_fail(EVEN_ERR_UNSUPPORTED, "a checkpoint of %zu files, and %d at most are taken from another host",
                     incoming->info.file_count, (int)MOST_FILES);
  }
  even_text_append(&incoming->manifest, manifest, bytes);
  EVEN_TRY(even_text_status(&incoming->manifest));
  EVEN_TRY(EVEN_NEW_ARRAY(&incoming->files, incoming->info.file_count));
  for (size_t i = 0; i < incoming->info.file_count; i++) {
    incoming->files[i].output = (even_output){.fd = -1};
  }
  return EVEN_OK;
}

static even_status check_target(const even_checkpoint_incoming *incoming) {
  const char *folder = even_text_string(&incoming->folder);
  return incoming->replace || !even_path_exists(folder)
             ? EVEN_OK
             : even_fail(EVEN_ERR_IN_USE, "%s already exists, and is another checkpoint", folder);
}

static even_status begin(even_checkpoint_incoming *incoming) {
  if (even_placing_settle(even_text_string(&incoming->folder)) != EVEN_OK) {
    even_error_clear(); /* in the way later, and told then */
  }
  EVEN_TRY(check_target(incoming));
  EVEN_TRY(even_folder_make(even_text_string(&incoming->parent)));
  EVEN_TRY(even_partial_make(even_text_string(&incoming->folder), &incoming->partial));
  incoming->begun = true;
  even_partial_sweep(even_text_string(&incoming->parent), &incoming->partial);
  return EVEN_OK;
}

even_status even_checkpoint_incoming_open(const char *folder, bool replace, const char *manifest, size_t bytes,
                                          even_checkpoint_incoming **out) {
  even_checkpoint_incoming *incoming = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&incoming));
  incoming->partial = EVEN_PARTIAL_NONE;
  incoming->replace = replace;
  even_status status = name_parts(incoming, folder);
  if (status == EVEN_OK) {
    status = read_manifest(incoming, manifest, bytes);
  }
  if (status == EVEN_OK) {
    status = begin(incoming);
  }
  if (status != EVEN_OK) {
    release(incoming);
    return status;
  }
  *out = incoming;
  return EVEN_OK;
}

/* ---- its files ---- */

static even_status name_file(even_checkpoint_incoming *incoming, size_t file) {
  even_text path = EVEN_TEXT_EMPTY;
  EVEN_TRY(even_partial_check(&incoming->partial));
  if (incoming->files[file].path != NULL) {
    return even_fail(EVEN_ERR_STATE, "%s comes twice", incoming->info.files[file].name);
  }
  even_text_format(&path, "%s/%s", incoming->partial.path, incoming->info.files[file].name);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_duplicate(path.data, &incoming->files[file].path);
  }
  even_text_free(&path);
  return status;
}

even_status even_checkpoint_incoming_create(even_checkpoint_incoming *incoming, size_t file, int *fd) {
  even_output output;
  *fd = -1;
  if (file >= incoming->info.file_count) {
    return even_fail(EVEN_ERR_ARGUMENT, "file %zu of a checkpoint of %zu", file, incoming->info.file_count);
  }
  EVEN_TRY(name_file(incoming, file));
  EVEN_TRY(even_output_create(incoming->files[file].path, &output));
  *fd = output.fd;
  return EVEN_OK;
}

even_status even_checkpoint_incoming_link(even_checkpoint_incoming *incoming, size_t file, const char *from,
                                          bool *linked) {
  bool is_link = false;
  *linked = false;
  if (file >= incoming->info.file_count) {
    return even_fail(EVEN_ERR_ARGUMENT, "file %zu of a checkpoint of %zu", file, incoming->info.file_count);
  }
  if (even_path_is_link(from, &is_link) != EVEN_OK || is_link) {
    even_error_clear();
    return EVEN_OK;
  }
  EVEN_TRY(name_file(incoming, file));
  if (even_file_link(from, incoming->files[file].path) != EVEN_OK) {
    even_error_clear(); /* no links here, or it is gone: it comes */
    even_free(incoming->files[file].path);
    incoming->files[file].path = NULL;
    return EVEN_OK;
  }
  incoming->files[file].filled = incoming->files[file].linked = *linked = true;
  return EVEN_OK;
}

void even_checkpoint_incoming_filled(even_checkpoint_incoming *incoming, size_t file, int fd) {
  incoming->files[file].output =
      (even_output){.fd = fd, .path = incoming->files[file].path, .bytes = incoming->info.files[file].bytes};
  incoming->files[file].filled = true;
}

bool even_checkpoint_incoming_is_full(const even_checkpoint_incoming *incoming) {
  for (size_t i = 0; i < incoming->info.file_count; i++) {
    if (!incoming->files[i].filled && incoming->info.files[i].bytes > 0) {
      return false;
    }
  }
  return true;
}

/* ---- its end ---- */

/* Those of no bytes are made here. */
static even_status sync_files(even_checkpoint_incoming *incoming) {
  for (size_t i = 0; i < incoming->info.file_count; i++) {
    int fd = -1;
    if (even_stop_asked()) {
      return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while %s comes", even_text_string(&incoming->folder));
    }
    if (!incoming->files[i].filled) {
      EVEN_TRY(even_checkpoint_incoming_create(incoming, i, &fd));
      even_checkpoint_incoming_filled(incoming, i, fd);
    }
    if (!incoming->files[i].linked) {
      EVEN_TRY(even_output_finish(&incoming->files[i].output));
    }
  }
  return EVEN_OK;
}

static even_status write_manifest(const even_checkpoint_incoming *incoming) {
  even_text path = EVEN_TEXT_EMPTY;
  EVEN_TRY(even_partial_check(&incoming->partial));
  even_text_format(&path, "%s/%s", incoming->partial.path, EVEN_CHECKPOINT_MANIFEST);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_file_replace(path.data, incoming->manifest.data, incoming->manifest.length);
  }
  even_text_free(&path);
  return status;
}

/* A rename never takes the place of a folder with something in it, nor of a file: what has got the name meanwhile
 * stays. */
static even_status put_in_place(even_checkpoint_incoming *incoming) {
  const char *folder = even_text_string(&incoming->folder);
  const char *parent = even_text_string(&incoming->parent);
  const char *partial = incoming->partial.path;
  EVEN_TRY(check_target(incoming));
  EVEN_TRY(even_partial_complete(&incoming->partial));
  EVEN_TRY(even_folder_sync(partial));
  bool older_here = false; /* what was there goes with the partial name */
  if (incoming->replace && even_path_exists(folder)) {
    EVEN_TRY(even_placing_replace(partial, parent, folder, &older_here));
  } else {
    even_status status = even_folder_rename(partial, folder);
    if (status != EVEN_OK) {
      EVEN_TRY(check_target(incoming));
      return status;
    }
  }
  if (!older_here) {
    incoming->begun = false;
    even_partial_release(&incoming->partial);
  }
  return even_folder_sync(parent);
}

even_status even_checkpoint_incoming_commit(even_checkpoint_incoming *incoming) {
  even_status status = even_checkpoint_incoming_is_full(incoming)
                           ? EVEN_OK
                           : even_fail(EVEN_ERR_STATE, "files of %s are missing", even_text_string(&incoming->folder));
  if (status == EVEN_OK) {
    status = sync_files(incoming);
  }
  if (status == EVEN_OK) {
    status = write_manifest(incoming);
  }
  if (status == EVEN_OK) {
    status = even_checkpoint_verify(incoming->partial.path, NULL);
  }
  if (status == EVEN_OK) {
    status = put_in_place(incoming);
  }
  release(incoming);
  return status;
}
