/* Compares a checkpoint with its manifest. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/text.h"
#include "checkpoint/compare.h"
#include "checkpoint/placing.h"
#include "checkpoint/reader.h"
#include "os/stream.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MOST_PROBLEMS = 256 };

static even_status join(const char *folder, const char *name, even_text *out) {
  even_text_clear(out);
  even_text_format(out, "%s/%s", folder, name);
  return even_text_status(out);
}

static even_status not_there(const char *folder) {
  even_text aside = EVEN_TEXT_EMPTY;
  even_text_format(&aside, "%s%s", folder, EVEN_CHECKPOINT_REPLACED);
  bool replaced = even_text_status(&aside) == EVEN_OK && even_path_is_folder(even_text_string(&aside));
  even_status status = even_fail(EVEN_ERR_NOT_FOUND, "checkpoint %s does not exist%s", folder,
                                 replaced ? ": it is being replaced, or was when the power went" : "");
  if (replaced) {
    (void)even_error_fix("name %s; the next checkpoint written beside it gives it its name back",
                         even_text_string(&aside));
  } else {
    (void)even_error_fix("`evenstep ckpt ls` lists the checkpoints there are");
  }
  even_text_free(&aside);
  return status;
}

/* Reads the manifest alone. */
static even_status read_manifest(const char *folder, even_checkpoint_info *out) {
  even_text text = EVEN_TEXT_EMPTY;
  even_status status = even_manifest_read(folder, &text, out);
  even_text_free(&text);
  if (status == EVEN_ERR_NOT_FOUND && even_path_exists(folder)) {
    status = even_fail(EVEN_ERR_INPUT, "%s is not a checkpoint: it has no %s", folder, EVEN_CHECKPOINT_MANIFEST);
    (void)even_error_fix("`evenstep ckpt ls DIR` lists the checkpoints of a folder or a run");
  } else if (status == EVEN_ERR_NOT_FOUND) {
    status = not_there(folder);
  }
  return status;
}

static even_status add_problem(even_names *problems, const char *text) {
  if (problems->count == MOST_PROBLEMS) {
    return EVEN_OK;
  }
  return even_names_add(problems, text);
}

/* The last error becomes a problem, unless the machine failed rather than the checkpoint. */
static even_status note(even_names *problems, even_status status) {
  if (status == EVEN_ERR_CORRUPT || status == EVEN_ERR_NOT_FOUND || status == EVEN_ERR_INPUT) {
    char text[sizeof even_error_last()->what];
    (void)snprintf(text, sizeof text, "%s", even_error_last()->what);
    return add_problem(problems, text);
  }
  return status;
}

static even_status check_size(const even_checkpoint_stored_file *file, uint64_t bytes) {
  if (bytes < file->bytes) {
    return even_fail(EVEN_ERR_CORRUPT, "%s is truncated: %" PRIu64 " of %" PRIu64 " bytes", file->name, bytes,
                     file->bytes);
  }
  if (bytes > file->bytes) {
    return even_fail(EVEN_ERR_CORRUPT, "%s has %" PRIu64 " bytes, %" PRIu64 " more than were written", file->name,
                     bytes, bytes - file->bytes);
  }
  return EVEN_OK;
}

static bool is_safetensors(const char *name) {
  const char *ending = strrchr(name, '.');
  return ending != NULL && strcmp(ending, ".safetensors") == 0;
}

/* Whether a part lies in these bytes and is as it was written. What cannot be read is not. */
static bool is_right(even_input *input, const even_part *part, uint64_t first, uint64_t last) {
  char *data = NULL;
  if (part->begin < first || part->begin + part->bytes - 1 > last || part->bytes > EVEN_CHECKPOINT_CHUNK_BYTES ||
      EVEN_NEW_ARRAY(&data, (size_t)part->bytes) != EVEN_OK) {
    return false;
  }
  bool right = even_input_read_at(input, part->begin, data, (size_t)part->bytes) == EVEN_OK &&
               even_checkpoint_checksum(data, (size_t)part->bytes) == part->sum;
  even_free(data);
  return right;
}

/* Whether bytes from `begin` to `end` of a damaged chunk are known to be right, by a checksum of their own. */
static bool is_spared(const even_checkpoint_stored_file *file, even_input *input, uint64_t first, uint64_t last,
                      uint64_t begin, uint64_t end) {
  uint64_t from = begin > first ? begin : first;
  uint64_t to = end < last + 1 ? end : last + 1;
  for (size_t i = 0; i < file->part_count; i++) {
    if (file->parts[i].begin == from && file->parts[i].begin + file->parts[i].bytes == to) {
      return is_right(input, &file->parts[i], first, last);
    }
  }
  return false;
}

/* What is damaged in these bytes, as far as the header tells: " (header, blocks.0.weight, … and 7 more)"; where the
 * manifest has no checksums of tensors' parts, what lies there. Nothing where the header cannot be read, or is none. */
static void name_content(const even_checkpoint_stored_file *stored, const char *path, uint64_t first, uint64_t last,
                         even_text *out) {
  enum { MOST_NAMES = 4 };
  even_safetensors_file file;
  const char *name = NULL;
  const json_t *tensor = NULL;
  size_t count = 0;
  even_error kept = *even_error_last();
  even_input input = {.fd = -1};
  bool safetensors = is_safetensors(stored->name);
  bool opened = even_input_open(path, &input) == EVEN_OK;
  if (safetensors && opened && first == 0 && stored->part_count > 0 && !is_right(&input, stored->parts, first, last)) {
    even_text_add(out, " (header"); /* its length may be what is damaged */
    count++;
  }
  if (even_safetensors_open(path, &file) == EVEN_OK) {
    if (stored->part_count == 0 && first < file.data) {
      even_text_add(out, " (header");
      count++;
    }
    json_object_foreach(file.header, name, tensor) {
      const json_t *offsets = json_object_get(tensor, "data_offsets");
      uint64_t begin = file.data + (uint64_t)json_integer_value(json_array_get(offsets, 0));
      uint64_t end = file.data + (uint64_t)json_integer_value(json_array_get(offsets, 1));
      if (offsets != NULL && begin < end && begin <= last && end > first &&
          !(opened && is_spared(stored, &input, first, last, begin, end))) {
        if (count < MOST_NAMES) {
          even_text_format(out, "%s%.64s", count == 0 ? " (" : ", ", name);
        }
        count++;
      }
    }
    if (count > MOST_NAMES) {
      even_text_format(out, " and %zu more", count - MOST_NAMES);
    }
  }
  even_text_add(out, count > 0 ? ")" : "");
  even_safetensors_close(&file);
  even_input_close(&input);
  (void)even_error_restore(&kept);
}

static even_status check_chunks(const even_checkpoint_stored_file *file, const char *path, const uint64_t *sums,
                                even_names *problems) {
  even_text content = EVEN_TEXT_EMPTY;
  even_status status = EVEN_OK;
  for (size_t i = 0; i < file->sum_count && status == EVEN_OK; i++) {
    uint64_t first = (uint64_t)i * file->chunk_bytes;
    uint64_t last = file->bytes - first > file->chunk_bytes ? first + file->chunk_bytes - 1 : file->bytes - 1;
    if (sums[i] != file->sums[i]) {
      even_text_clear(&content);
      name_content(file, path, first, last, &content);
      status = note(
          problems,
          even_fail(EVEN_ERR_CORRUPT, "chunk %zu of %s (bytes %" PRIu64 "\xE2\x80\x93%" PRIu64 ") is altered%s", i,
                    file->name, first, last, even_text_status(&content) == EVEN_OK ? even_text_string(&content) : ""));
    }
  }
  even_text_free(&content);
  return status;
}

static even_status check_content(const even_checkpoint_stored_file *file, const char *path, even_names *problems) {
  uint64_t *sums = NULL;
  size_t count = 0;
  uint64_t bytes = 0;
  size_t before = problems->count;
  if (file->chunk_bytes > SIZE_MAX) {
    return note(problems, even_fail(EVEN_ERR_CORRUPT, "%s: chunks that do not fit in memory", file->name));
  }
  even_status status = even_checkpoint_file_checksums(path, (size_t)file->chunk_bytes, &sums, &count, &bytes);
  if (status != EVEN_OK) {
    return note(problems, status);
  }
  status = check_size(file, bytes);
  status = status != EVEN_OK ? note(problems, status) : check_chunks(file, path, sums, problems);
  even_free(sums);
  if (status == EVEN_OK && problems->count == before && is_safetensors(file->name)) {
    json_t *header = NULL;
    status = even_safetensors_read_header(path, &header);
    json_decref(header);
    status = status == EVEN_OK ? EVEN_OK : note(problems, status);
  }
  return status;
}

static even_status check_presence(const even_checkpoint_stored_file *file, const char *path, even_names *problems) {
  even_input input = {.fd = -1};
  even_status status = even_input_open(path, &input);
  if (status == EVEN_OK) {
    status = check_size(file, input.bytes);
  }
  even_input_close(&input);
  return status == EVEN_OK ? EVEN_OK : note(problems, status);
}

static even_status check_files(const char *folder, const even_checkpoint_info *info, bool content,
                               even_names *problems) {
  even_text path = EVEN_TEXT_EMPTY;
  even_status status = EVEN_OK;
  bool link = false;
  for (size_t i = 0; i < info->file_count && status == EVEN_OK; i++) {
    status = join(folder, info->files[i].name, &path);
    if (status == EVEN_OK) {
      status = even_path_is_link(even_text_string(&path), &link);
    }
    if (status == EVEN_OK && link) {
      status =
          note(problems, even_fail(EVEN_ERR_CORRUPT, "%s is a symbolic link: a checkpoint's files lie in its folder",
                                   info->files[i].name));
    } else if (status == EVEN_OK) {
      status = content ? check_content(&info->files[i], even_text_string(&path), problems)
                       : check_presence(&info->files[i], even_text_string(&path), problems);
    }
  }
  even_text_free(&path);
  return status;
}

/* Problems found make one error, which names the first. */
static even_status conclude(const char *folder, const even_names *problems) {
  if (problems->count == 0) {
    return EVEN_OK;
  }
  even_status status = problems->count == 1
                           ? even_fail(EVEN_ERR_CORRUPT, "checkpoint %s is damaged: %s", folder, problems->items[0])
                           : even_fail(EVEN_ERR_CORRUPT, "checkpoint %s is damaged in %zu places; the first: %s",
                                       folder, problems->count, problems->items[0]);
  (void)even_error_fix(
      "resume from an earlier checkpoint; `evenstep ckpt ls` lists them, `evenstep ckpt verify` "
      "checks them");
  return status;
}

static even_status compare(const char *folder, bool content, even_checkpoint_info *info, even_names *problems) {
  *problems = (even_names){NULL, 0};
  even_status status = read_manifest(folder, info);
  if (status == EVEN_ERR_CORRUPT) {
    status = note(problems, status);
  } else if (status == EVEN_OK) {
    status = check_files(folder, info, content, problems);
  }
  return status == EVEN_OK ? conclude(folder, problems) : status;
}

even_status even_checkpoint_inspect(const char *folder, even_checkpoint_info *out) {
  even_names problems = {NULL, 0};
  even_status status = compare(folder, false, out, &problems);
  even_names_free(&problems);
  return status;
}

even_status even_checkpoint_verify(const char *folder, even_names *problems) {
  even_names own = {NULL, 0};
  even_checkpoint_info info;
  even_status status = compare(folder, true, &info, problems == NULL ? &own : problems);
  even_checkpoint_info_free(&info);
  even_names_free(&own);
  return status;
}
