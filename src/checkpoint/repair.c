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

static even_status add_chunk(even_names *names, const even_checkpoint_stored_file *file, size_t chunk) {
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&text, "chunk %zu of %s", chunk, file->name);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    status = even_names_add(names, text.data);
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
  return status == EVEN_OK ? even_names_add(job->repaired, EVEN_CHECKPOINT_MANIFEST) : status;
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
      status = even_names_add(job->repaired, stored->name);
    }
  }
  close_both(&file);
  return status;
}

/* ---- whether it is a copy, by the files ---- */
/* What a file here says. */
typedef struct repair_evidence {
  bool filled; /* by the copy's manifest it holds tensors with data */
  bool whole;  /* it is what the copy's manifest says */
  bool alike;  /* that, or what damage leaves of it, or it is not there, and says nothing */
} repair_evidence;

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

/* Alike: at least nine tenths of its bytes are the copy's, and of several chunks one is right. The next checkpoint's
 * may have nine tenths in common (weights in BF16 hardly change), but then so in each chunk that is trained. */
static even_status compare_file(repair_file *file, repair_evidence *out) {
  uint64_t bytes = 0;
  uint64_t same = 0;
  size_t right_chunks = 0;
  bool damaged = file->own.fd < 0 || file->own.bytes != file->stored->bytes;
  char *more = NULL;
  uint64_t from = tensors_begin(file);
  out->filled = even_safetensors_is_named(file->stored->name) && file->stored->bytes > from;
  out->alike = file->own.fd < 0 || file->own.bytes == 0;
  if (out->alike) {
    return EVEN_OK;
  }
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
      right_chunks += here > skipped;
    } else if (status == EVEN_OK) {
      damaged = true;
      status = count_same(file, i, skipped, more, &same);
    }
  }
  even_free(more);
  out->whole = !damaged;
  out->alike = !damaged || (same >= bytes - bytes / 10 && (right_chunks > 0 || file->stored->sum_count == 1));
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

/* The files of one model or optimizer: how many hold tensors, and how many of these are whole here. */
static void count_files(const even_checkpoint_info *theirs, const repair_evidence *evidence, const json_t *saved,
                        size_t *filled, size_t *whole) {
  const json_t *names = json_object_get(saved, "files");
  const json_t *one = json_object_get(saved, "file");
  *filled = *whole = 0;
  for (size_t i = 0; i < theirs->file_count; i++) {
    bool named = json_array_size(names) == 0 && json_is_string(one) &&
                 strcmp(json_string_value(one), theirs->files[i].name) == 0;
    for (size_t j = 0; j < json_array_size(names); j++) {
      named = named || strcmp(json_string_value(json_array_get(names, j)), theirs->files[i].name) == 0;
    }
    *filled += named && evidence[i].filled;
    *whole += named && evidence[i].filled && evidence[i].whole;
  }
}

/* Of a state that names no files: all. */
static bool is_all_whole(const even_checkpoint_info *theirs, const repair_evidence *evidence) {
  size_t filled = 0;
  size_t whole = 0;
  for (size_t i = 0; i < theirs->file_count; i++) {
    filled += evidence[i].filled;
    whole += evidence[i].filled && evidence[i].whole;
  }
  return whole > 0 && whole == filled;
}

/* A file that is whole may hold what no training changes. So it takes a file of each optimizer, or all of all models.
 */
static bool is_proven(const even_checkpoint_info *theirs, const repair_evidence *evidence) {
  size_t some[2] = {0, 0}; /* models, optimizers */
  bool enough[2] = {true, true};
  const char *const kinds[2] = {"models", "optimizers"};
  if (json_object_size(json_object_get(theirs->state, kinds[0])) == 0 &&
      json_object_size(json_object_get(theirs->state, kinds[1])) == 0) {
    return is_all_whole(theirs, evidence);
  }
  for (size_t kind = 0; kind < 2; kind++) {
    const char *name = NULL;
    json_t *saved = NULL;
    json_object_foreach(json_object_get(theirs->state, kinds[kind]), name, saved) {
      size_t filled = 0;
      size_t whole = 0;
      count_files(theirs, evidence, saved, &filled, &whole);
      some[kind] += whole;
      enough[kind] = enough[kind] && (kind == 0 ? whole == filled : whole > 0 || filled == 0);
    }
  }
  return (some[0] > 0 && enough[0]) || (some[1] > 0 && enough[1]);
}

static even_status not_known(const repair_job *job, bool some) {
  even_status status =
      even_fail(EVEN_ERR_INPUT, "%s is not known to be a copy of %s: the manifest here is damaged, and %s", job->copy,
                job->folder,
                some ? "what of that one is whole here may be the same in checkpoints before and after "
                       "it (it takes a file of each optimizer, or all of all models)"
                     : "no file of that one is whole here");
  (void)even_error_fix("copy the whole folder from there, where it is the same checkpoint");
  return status;
}

static even_status weigh_files(const repair_job *job, const even_checkpoint_info *theirs, repair_evidence *evidence) {
  bool some = false;
  for (size_t i = 0; i < theirs->file_count; i++) {
    repair_file file = FILE_OF(&theirs->files[i]);
    even_status status = open_both(job, &file);
    if (status == EVEN_OK) {
      status = compare_file(&file, &evidence[i]);
    }
    close_both(&file);
    EVEN_TRY(status);
    if (!evidence[i].alike) {
      return other_bytes(job, theirs->files[i].name);
    }
    some = some || evidence[i].whole;
  }
  return is_proven(theirs, evidence) ? EVEN_OK : not_known(job, some);
}

/* Whether the copy's manifest is that of the files here. */
static even_status compare_files(const repair_job *job, const even_checkpoint_info *theirs) {
  repair_evidence *evidence = NULL;
  EVEN_TRY(EVEN_NEW_ARRAY(&evidence, theirs->file_count + 1));
  even_status status = weigh_files(job, theirs, evidence);
  even_free(evidence);
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
