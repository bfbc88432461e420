/* Repairs a checkpoint by a copy of the same one: chunk by chunk, each compared with its checksum before it is used. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/stop.h"
#include "base/text.h"
#include "checkpoint/reader.h"
#include "os/file.h"
#include "os/stream.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <string.h>

enum { MOST_MANIFEST_BYTES = 256 << 20, MOST_CHUNK_BYTES = 1 << 30 };
static const char unfinished[] = ".evenstep.repair"; /* behind the name of a file that is written anew */

typedef struct repair_job {
  const char *folder;
  const char *copy;
  even_names *repaired;
  even_names *left;
} repair_job;

/* One file, here and there; a side that cannot be opened has fd -1. */
typedef struct repair_file {
  const even_checkpoint_stored_file *stored;
  even_text path;
  even_text copy_path;
  even_input own;
  even_input other;
  char *buffer; /* of a chunk */
} repair_file;

static even_status join(const char *folder, const char *name, const char *suffix, even_text *out) {
  even_text_clear(out);
  even_text_format(out, "%s/%s%s", folder, name, suffix);
  return even_text_status(out);
}

static even_status add_name(even_names *names, const char *text) {
  EVEN_TRY(even_realloc((void **)&names->items, names->count + 1, sizeof *names->items));
  EVEN_TRY(even_duplicate(text, &names->items[names->count]));
  names->count++;
  return EVEN_OK;
}

static even_status add_chunk(even_names *names, const even_checkpoint_stored_file *file, size_t chunk) {
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&text, "chunk %zu of %s", chunk, file->name);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    status = add_name(names, text.data);
  }
  even_text_free(&text);
  return status;
}

/* ---- manifests ---- */
/* Whether one text is the other with some damage: of two checkpoints nearly all digits of the checksums differ. */
static bool is_alike(const even_text *a, const even_text *b) {
  size_t shorter = a->length < b->length ? a->length : b->length;
  size_t longer = a->length < b->length ? b->length : a->length;
  size_t same = 0;
  for (size_t i = 0; i < shorter; i++) {
    same += a->data[i] == b->data[i];
  }
  return longer > 0 && same >= longer - longer / 10;
}

static even_status read_manifest(const char *folder, even_text *text, even_checkpoint_info *info) {
  even_text path = EVEN_TEXT_EMPTY;
  *info = (even_checkpoint_info){.step = -1, .epoch = -1, .world_size = -1};
  even_status status = join(folder, EVEN_CHECKPOINT_MANIFEST, "", &path);
  if (status == EVEN_OK) {
    status = even_file_read(even_text_string(&path), MOST_MANIFEST_BYTES, text);
  }
  if (status == EVEN_OK) {
    status = even_manifest_parse(even_text_string(&path), even_text_string(text), text->length, info);
  }
  even_text_free(&path);
  return status;
}

static even_status replace_manifest(const repair_job *job, const even_text *right) {
  even_text path = EVEN_TEXT_EMPTY;
  even_status status = join(job->folder, EVEN_CHECKPOINT_MANIFEST, "", &path);
  if (status == EVEN_OK) {
    status = even_file_replace(even_text_string(&path), right->data, right->length);
  }
  even_text_free(&path);
  return status == EVEN_OK ? add_name(job->repaired, EVEN_CHECKPOINT_MANIFEST) : status;
}

static even_status not_a_copy(const repair_job *job) {
  even_status status =
      even_fail(EVEN_ERR_INPUT, "%s is not a copy of %s: their manifests differ", job->copy, job->folder);
  (void)even_error_fix("name a folder that the checkpoint was copied to");
  return status;
}

/* The manifest by which both are judged, put right where it was damaged. */
static even_status settle_manifest(const repair_job *job, even_checkpoint_info *info) {
  even_text own = EVEN_TEXT_EMPTY;
  even_text other = EVEN_TEXT_EMPTY;
  even_checkpoint_info theirs;
  even_status mine = read_manifest(job->folder, &own, info);
  even_error first = *even_error_last();
  even_status status = read_manifest(job->copy, &other, &theirs);
  if (mine == EVEN_OK) {
    bool differs = status == EVEN_OK && (own.length != other.length || memcmp(own.data, other.data, own.length) != 0);
    bool damaged = status == EVEN_ERR_CORRUPT && is_alike(&own, &other);
    status = differs || (status == EVEN_ERR_CORRUPT && !damaged) ? not_a_copy(job) : damaged ? EVEN_OK : status;
  } else if (mine != EVEN_ERR_CORRUPT) {
    status = even_error_restore(&first);
  } else if (status == EVEN_OK) {
    status = is_alike(&own, &other) ? replace_manifest(job, &other) : not_a_copy(job);
    even_checkpoint_info damaged = *info;
    *info = theirs;
    theirs = damaged;
  }
  even_checkpoint_info_free(&theirs);
  even_text_free(&own);
  even_text_free(&other);
  return status;
}

/* ---- files ---- */
static size_t bytes_of(const even_checkpoint_stored_file *file, size_t chunk) {
  uint64_t begin = (uint64_t)chunk * file->chunk_bytes;
  return (size_t)(file->bytes - begin > file->chunk_bytes ? file->chunk_bytes : file->bytes - begin);
}

/* Reads a chunk into the buffer; *right: its checksum is what the manifest says. */
static even_status read_chunk(const repair_file *file, even_input *input, size_t chunk, bool *right) {
  size_t bytes = bytes_of(file->stored, chunk);
  *right = false;
  if (even_stop_asked()) {
    return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while %s was read", even_text_string(&file->path));
  }
  if (input->fd < 0 || input->bytes != file->stored->bytes) {
    uint64_t end = (uint64_t)chunk * file->stored->chunk_bytes + bytes;
    if (input->fd < 0 || input->bytes < end) {
      return EVEN_OK;
    }
  }
  even_status status = even_input_read_at(input, (uint64_t)chunk * file->stored->chunk_bytes, file->buffer, bytes);
  if (status != EVEN_OK) { /* a sector that the disk cannot read is damage, too */
    even_error_clear();
    return EVEN_OK;
  }
  *right = even_checkpoint_checksum(file->buffer, bytes) == file->stored->sums[chunk];
  return EVEN_OK;
}

/* A chunk that is right, from either side. *own: it was there. */
static even_status find_chunk(repair_file *file, size_t chunk, bool *right, bool *own) {
  EVEN_TRY(read_chunk(file, &file->own, chunk, own));
  *right = *own;
  return *own ? EVEN_OK : read_chunk(file, &file->other, chunk, right);
}

static even_status write_anew(const repair_job *job, repair_file *file) {
  even_text path = EVEN_TEXT_EMPTY;
  even_output output = {.fd = -1};
  even_status status = join(job->folder, file->stored->name, unfinished, &path);
  if (status == EVEN_OK) {
    status = even_file_remove(even_text_string(&path)); /* of a repair that was ended */
  }
  if (status == EVEN_OK) {
    status = even_output_create(even_text_string(&path), &output);
  }
  for (size_t i = 0; status == EVEN_OK && i < file->stored->sum_count; i++) {
    bool right = false;
    bool own = false;
    status = find_chunk(file, i, &right, &own);
    if (status == EVEN_OK && !right) {
      status = even_fail(EVEN_ERR_CORRUPT, "chunk %zu of %s changed while it was repaired", i, file->stored->name);
    }
    if (status == EVEN_OK) {
      status = even_output_write(&output, file->buffer, bytes_of(file->stored, i));
    }
    if (status == EVEN_OK && !own) {
      status = add_chunk(job->repaired, file->stored, i);
    }
  }
  if (status == EVEN_OK) {
    status = even_output_finish(&output);
  }
  if (status == EVEN_OK) {
    status = even_file_rename(even_text_string(&path), even_text_string(&file->path));
  }
  if (status == EVEN_OK) {
    status = even_folder_sync(job->folder);
  }
  even_output_drop(&output);
  even_text_free(&path);
  return status;
}

/* Whether the file needs to be written anew, and can be: chunks that are damaged on both sides are put into job->left.
 */
static even_status look_at(const repair_job *job, repair_file *file, bool *damaged, bool *curable) {
  *damaged = file->own.fd < 0 || file->own.bytes != file->stored->bytes;
  *curable = true;
  for (size_t i = 0; i < file->stored->sum_count; i++) {
    bool right = false;
    bool own = false;
    EVEN_TRY(find_chunk(file, i, &right, &own));
    *damaged = *damaged || !own;
    if (!right) {
      *curable = false;
      EVEN_TRY(add_chunk(job->left, file->stored, i));
    }
  }
  return EVEN_OK;
}

static even_status open_side(const char *folder, const char *name, even_text *path, even_input *input) {
  *input = (even_input){.fd = -1};
  EVEN_TRY(join(folder, name, "", path));
  even_status status = even_input_open(even_text_string(path), input);
  if (status == EVEN_ERR_MEMORY || status == EVEN_ERR_PERMISSION) {
    return status;
  }
  if (status != EVEN_OK) {
    even_error_clear();
    input->fd = -1;
  }
  return EVEN_OK;
}

/* Of a chunk: what the manifest says, and no more than one of the files has; from a shorter one it is not read. */
static size_t most_bytes(const repair_file *file) {
  uint64_t most = file->stored->bytes < file->stored->chunk_bytes ? file->stored->bytes : file->stored->chunk_bytes;
  uint64_t own = file->own.fd < 0 ? 0 : file->own.bytes;
  uint64_t other = file->other.fd < 0 ? 0 : file->other.bytes;
  uint64_t there = own > other ? own : other;
  return (size_t)(most < there ? most : there);
}

static even_status repair_one(const repair_job *job, const even_checkpoint_stored_file *stored) {
  repair_file file = {
      .stored = stored, .path = EVEN_TEXT_EMPTY, .copy_path = EVEN_TEXT_EMPTY, .own = {.fd = -1}, .other = {.fd = -1}};
  bool damaged = false;
  bool curable = false;
  if (stored->chunk_bytes > MOST_CHUNK_BYTES) {
    return even_fail(EVEN_ERR_CORRUPT, "%s: chunks that do not fit in memory", stored->name);
  }
  even_status status = open_side(job->folder, stored->name, &file.path, &file.own);
  if (status == EVEN_OK) {
    status = open_side(job->copy, stored->name, &file.copy_path, &file.other);
  }
  if (status == EVEN_OK) {
    status = EVEN_NEW_ARRAY(&file.buffer, most_bytes(&file) + 1);
  }
  if (status == EVEN_OK) {
    status = look_at(job, &file, &damaged, &curable);
  }
  if (status == EVEN_OK && damaged && curable) {
    size_t before = job->repaired->count;
    status = write_anew(job, &file);
    if (status == EVEN_OK && job->repaired->count == before) { /* its chunks were right, its size was not */
      status = add_name(job->repaired, stored->name);
    }
  }
  even_input_close(&file.own);
  even_input_close(&file.other);
  even_text_free(&file.path);
  even_text_free(&file.copy_path);
  even_free(file.buffer);
  return status;
}

even_status even_checkpoint_repair(const char *folder, const char *copy, even_names *repaired, even_names *left) {
  const repair_job job = {.folder = folder, .copy = copy, .repaired = repaired, .left = left};
  even_checkpoint_info info;
  *repaired = (even_names){NULL, 0};
  *left = (even_names){NULL, 0};
  even_status status = settle_manifest(&job, &info);
  for (size_t i = 0; status == EVEN_OK && i < info.file_count; i++) {
    status = repair_one(&job, &info.files[i]);
  }
  even_checkpoint_info_free(&info);
  if (status == EVEN_OK && left->count > 0) {
    status = even_fail(EVEN_ERR_CORRUPT, "%zu chunks of %s are damaged in %s, too; the first: %s", left->count, folder,
                       copy, left->items[0]);
    (void)even_error_fix("repair it --from another copy; the files of these chunks were left as they are");
  }
  return status;
}
