/* Repairs a checkpoint by a copy of the same one: chunk by chunk, each compared with its checksum before it is used. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/stop.h"
#include "base/text.h"
#include "checkpoint/compare.h"
#include "checkpoint/reader.h"
#include "os/file.h"
#include "os/stream.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <string.h>

enum { MOST_CHUNK_BYTES = 1 << 30 };
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

#define FILE_OF(file)                          \
  ((repair_file){.stored = (file),             \
                 .path = EVEN_TEXT_EMPTY,      \
                 .copy_path = EVEN_TEXT_EMPTY, \
                 .own = {.fd = -1},            \
                 .other = {.fd = -1}})

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

/* Whether it may be what is left of the other: what is gone is cut off, or zeros, as after a cut of the power. */
static bool is_left_of(const even_text *damaged, const even_text *right) {
  size_t left = 0;
  size_t same = 0;
  for (size_t i = 0; i < damaged->length; i++) {
    left += damaged->data[i] != '\0';
    same += damaged->data[i] != '\0' && i < right->length && damaged->data[i] == right->data[i];
  }
  return same >= left - left / 10;
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

static even_status open_both(const repair_job *job, repair_file *file) {
  const even_checkpoint_stored_file *stored = file->stored;
  if (stored->chunk_bytes > MOST_CHUNK_BYTES) {
    return even_fail(EVEN_ERR_CORRUPT, "%s: chunks that do not fit in memory", stored->name);
  }
  EVEN_TRY(open_side(job->folder, stored->name, &file->path, &file->own));
  EVEN_TRY(open_side(job->copy, stored->name, &file->copy_path, &file->other));
  return EVEN_NEW_ARRAY(&file->buffer, most_bytes(file) + 1);
}

static void close_both(repair_file *file) {
  even_input_close(&file->own);
  even_input_close(&file->other);
  even_text_free(&file->path);
  even_text_free(&file->copy_path);
  even_free(file->buffer);
}

static even_status repair_one(const repair_job *job, const even_checkpoint_stored_file *stored) {
  repair_file file = FILE_OF(stored);
  bool damaged = false;
  bool curable = false;
  even_status status = open_both(job, &file);
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
  close_both(&file);
  return status;
}

/* ---- whether it is a copy, by the files ---- */
/* Where the tensors begin: two checkpoints of one model have the same headers. 0: no file of tensors. */
static uint64_t tensors_begin(const repair_file *file) {
  even_safetensors_file tensors;
  uint64_t begin = 0;
  if (even_safetensors_is_named(file->stored->name)) {
    begin = even_safetensors_open(even_text_string(&file->copy_path), &tensors) == EVEN_OK ? tensors.data : 0;
    even_safetensors_close(&tensors);
    even_error_clear();
  }
  return begin;
}

/* Of a chunk that is not right here: its bytes from `from` on that are the copy's. */
static even_status count_same(repair_file *file, size_t chunk, size_t from, char *own, uint64_t *same) {
  uint64_t begin = (uint64_t)chunk * file->stored->chunk_bytes;
  size_t here = bytes_of(file->stored, chunk);
  bool right = false;
  if (file->own.bytes <= begin) {
    return EVEN_OK;
  }
  here = file->own.bytes - begin < here ? (size_t)(file->own.bytes - begin) : here;
  EVEN_TRY(read_chunk(file, &file->other, chunk, &right));
  bool both = right && even_input_read_at(&file->own, begin, own, here) == EVEN_OK;
  even_error_clear();
  for (size_t i = from; both && i < here; i++) {
    *same += file->buffer[i] == own[i];
  }
  return EVEN_OK;
}

/* *whole: it is what the manifest says. *alike: that, or at least nine tenths of its bytes are the copy's, or it is not
 * there, and says nothing. */
static even_status compare_file(repair_file *file, bool *whole, bool *alike) {
  uint64_t bytes = 0;
  uint64_t same = 0;
  bool damaged = file->own.fd < 0 || file->own.bytes != file->stored->bytes;
  char *more = NULL;
  *whole = false;
  *alike = file->own.fd < 0 || file->own.bytes == 0;
  if (*alike) {
    return EVEN_OK;
  }
  uint64_t from = tensors_begin(file);
  even_status status = EVEN_NEW_ARRAY(&more, most_bytes(file) + 1);
  for (size_t i = 0; status == EVEN_OK && i < file->stored->sum_count; i++) {
    size_t here = bytes_of(file->stored, i);
    size_t skipped = from < here ? (size_t)from : here; /* the header may end in a later chunk */
    bool right = false;
    from -= skipped;
    bytes += here - skipped;
    status = read_chunk(file, &file->own, i, &right);
    if (right) {
      same += here - skipped;
    } else if (status == EVEN_OK) {
      damaged = true;
      status = count_same(file, i, skipped, more, &same);
    }
  }
  even_free(more);
  *whole = !damaged;
  *alike = !damaged || same >= bytes - bytes / 10;
  return status;
}

static even_status other_bytes(const repair_job *job, const char *file) {
  even_status status = even_fail(EVEN_ERR_INPUT,
                                 "%s is not known to be a copy of %s: the manifest here is damaged, and %s has other "
                                 "bytes there",
                                 job->copy, job->folder, file);
  (void)even_error_fix(
      "name a folder that the checkpoint was copied to; where this is one, remove %s/%s, which then comes from there",
      job->folder, file);
  return status;
}

/* Whether the copy's manifest is that of the files here. A single file that is whole says so where no other has a
 * checkpoint's other values. */
static even_status compare_files(const repair_job *job, const even_checkpoint_info *theirs) {
  bool some = false;
  for (size_t i = 0; i < theirs->file_count; i++) {
    repair_file file = FILE_OF(&theirs->files[i]);
    bool whole = false;
    bool alike = false;
    even_status status = open_both(job, &file);
    if (status == EVEN_OK) {
      status = compare_file(&file, &whole, &alike);
    }
    close_both(&file);
    EVEN_TRY(status);
    if (!alike) {
      return other_bytes(job, theirs->files[i].name);
    }
    some = some || whole;
  }
  if (some) {
    return EVEN_OK;
  }
  even_status status = even_fail(EVEN_ERR_INPUT,
                                 "%s is not known to be a copy of %s: the manifest here is damaged, and no file of "
                                 "that one is whole here",
                                 job->copy, job->folder);
  (void)even_error_fix("copy the whole folder from there, where it is the same checkpoint");
  return status;
}

/* ---- both ---- */
/* The copy's, where that and what is left of the own one, or the files, say that it is one. */
static even_status take_manifest(const repair_job *job, const even_text *own, const even_text *other,
                                 const even_checkpoint_info *theirs) {
  if (!is_alike(own, other)) {
    EVEN_TRY(is_left_of(own, other) ? compare_files(job, theirs) : not_a_copy(job));
  }
  return replace_manifest(job, other);
}

/* The manifest by which both are judged, put right where it was damaged. */
static even_status settle_manifest(const repair_job *job, even_checkpoint_info *info) {
  even_text own = EVEN_TEXT_EMPTY;
  even_text other = EVEN_TEXT_EMPTY;
  even_checkpoint_info theirs;
  even_status mine = even_manifest_read(job->folder, &own, info);
  even_error first = *even_error_last();
  even_status status = even_manifest_read(job->copy, &other, &theirs);
  if (mine == EVEN_OK) {
    bool differs = status == EVEN_OK && (own.length != other.length || memcmp(own.data, other.data, own.length) != 0);
    bool damaged = status == EVEN_ERR_CORRUPT && (is_alike(&own, &other) || is_left_of(&other, &own));
    status = differs || (status == EVEN_ERR_CORRUPT && !damaged) ? not_a_copy(job) : damaged ? EVEN_OK : status;
  } else if (mine != EVEN_ERR_CORRUPT) {
    status = even_error_restore(&first);
  } else if (status == EVEN_OK) {
    status = take_manifest(job, &own, &other, &theirs);
    even_checkpoint_info damaged = *info;
    *info = theirs;
    theirs = damaged;
  }
  even_checkpoint_info_free(&theirs);
  even_text_free(&own);
  even_text_free(&other);
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
