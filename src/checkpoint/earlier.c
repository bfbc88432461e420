/* Files that have not changed since an earlier checkpoint: found by their checksums, shared by links. */
#include "checkpoint/earlier.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_check.h"
#include "base/json_walk.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/stream.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_NAME = 256, SUM_DIGITS = 16, LEAST_SHARED_BYTES = 1 << 20 };

static void free_file(even_manifest_file *file) {
  even_free(file->name);
  even_free(file->sums);
}

void even_earlier_free(even_earlier *earlier) {
  for (size_t i = 0; i < earlier->count; i++) {
    free_file(&earlier->files[i]);
  }
  even_free(earlier->files);
  even_free(earlier->folder);
  *earlier = (even_earlier){NULL, NULL, 0};
}

static bool own_sum_is_right(const even_text *text) {
  size_t tail = strlen(EVEN_MANIFEST_TAIL);
  size_t whole = tail + SUM_DIGITS + strlen(EVEN_MANIFEST_END);
  if (text->length < whole) {
    return false;
  }
  const char *end = text->data + text->length - whole;
  return memcmp(end, EVEN_MANIFEST_TAIL, tail) == 0 &&
         strtoull(end + tail, NULL, 16) == even_checkpoint_checksum(text->data, text->length - whole);
}

static even_status read_sums(even_json_walk list, even_manifest_file *file) {
  size_t capacity = 0;
  even_json_walk value;
  char digits[SUM_DIGITS + 1];
  while (even_json_walk_element(&list, &value)) {
    if (file->sum_count == capacity) {
      capacity = capacity == 0 ? 16 : capacity * 2;
      EVEN_TRY(even_realloc((void **)&file->sums, capacity, sizeof *file->sums));
    }
    file->sums[file->sum_count++] =
        even_json_walk_string(value, digits, sizeof digits) ? (uint64_t)strtoull(digits, NULL, 16) : 0;
  }
  return EVEN_OK;
}

/* *file has no name where the entry is not of our form. */
static even_status read_entry(even_json_walk entry, even_manifest_file *file) {
  char member[32];
  char name[MOST_NAME] = "";
  double bytes = -1;
  double chunk_bytes = 0;
  even_json_walk value;
  even_json_walk list;
  *file = (even_manifest_file){0};
  while (even_json_walk_member(&entry, member, sizeof member, &value)) {
    if (strcmp(member, "name") == 0) {
      (void)even_json_walk_string(value, name, sizeof name);
    } else if (strcmp(member, "bytes") == 0) {
      (void)even_json_walk_number(value, &bytes);
    } else if (strcmp(member, "chunk_bytes") == 0) {
      (void)even_json_walk_number(value, &chunk_bytes);
    } else if (strcmp(member, "checksums") == 0 && file->sums == NULL && even_json_walk_enter(value, '[', &list)) {
      EVEN_TRY(read_sums(list, file));
    }
  }
  if (name[0] == '\0' || strchr(name, '/') != NULL || chunk_bytes != EVEN_CHECKPOINT_CHUNK_BYTES || bytes < 0 ||
      bytes > (double)((uint64_t)1 << 53)) {
    return EVEN_OK;
  }
  file->bytes = (uint64_t)bytes;
  return even_duplicate(name, &file->name);
}

static even_status read_files(even_json_walk list, even_earlier *out) {
  even_json_walk value;
  even_json_walk entry;
  while (even_json_walk_element(&list, &value)) {
    even_manifest_file file = {0};
    even_status status = even_json_walk_enter(value, '{', &entry) ? read_entry(entry, &file) : EVEN_OK;
    if (status == EVEN_OK && file.name != NULL) {
      status = even_realloc((void **)&out->files, out->count + 1, sizeof *out->files);
    }
    if (status != EVEN_OK || file.name == NULL) {
      free_file(&file);
      EVEN_TRY(status);
      continue;
    }
    out->files[out->count++] = file;
  }
  return EVEN_OK;
}

static even_status read_text(const char *text, even_earlier *out) {
  char member[32];
  char format[64] = "";
  even_json_walk root;
  even_json_walk value;
  even_json_walk list;
  if (!even_json_walk_enter(even_json_walk_begin(text), '{', &root)) {
    return EVEN_OK;
  }
  while (even_json_walk_member(&root, member, sizeof member, &value)) {
    if (strcmp(member, "format") == 0) {
      (void)even_json_walk_string(value, format, sizeof format);
    } else if (strcmp(member, "files") == 0 && strcmp(format, EVEN_CHECKPOINT_FORMAT) == 0 && out->count == 0 &&
               even_json_walk_enter(value, '[', &list)) {
      EVEN_TRY(read_files(list, out));
    }
  }
  return EVEN_OK;
}

even_status even_earlier_read(const char *folder, even_earlier *out) {
  even_text text = EVEN_TEXT_EMPTY;
  even_error kept = *even_error_last();
  bool link = false;
  *out = (even_earlier){NULL, NULL, 0};
  if (folder == NULL || folder[0] == '\0') {
    return EVEN_OK;
  }
  EVEN_TRY(even_duplicate(folder, &out->folder));
  even_text_format(&text, "%s/%s", folder, EVEN_CHECKPOINT_MANIFEST);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    even_text path = text;
    text = (even_text)EVEN_TEXT_EMPTY;
    status = even_path_is_link(even_text_string(&path), &link);
    if (status == EVEN_OK && !link) {
      status = even_file_read(even_text_string(&path), EVEN_MANIFEST_MOST_BYTES, &text);
    }
    even_text_free(&path);
  }
  if (status == EVEN_OK && own_sum_is_right(&text) &&
      even_json_check_object("a manifest", even_text_string(&text)) == EVEN_OK) {
    status = read_text(even_text_string(&text), out);
  }
  even_text_free(&text);
  if (status != EVEN_OK) {
    even_earlier_free(out);
    if (status != EVEN_ERR_MEMORY) {
      status = EVEN_OK;
    }
  }
  if (status == EVEN_OK) {
    (void)even_error_restore(&kept);
  }
  return status;
}

const even_manifest_file *even_earlier_find(const even_earlier *earlier, const char *name) {
  for (size_t i = 0; i < earlier->count; i++) {
    if (strcmp(earlier->files[i].name, name) == 0) {
      return &earlier->files[i];
    }
  }
  return NULL;
}

even_status even_earlier_open(const even_earlier *earlier, const even_manifest_file *file, even_text *path,
                              even_input *input, bool *opened) {
  even_error kept = *even_error_last();
  bool is_link = false;
  *opened = false;
  *input = (even_input){.fd = -1};
  even_text_format(path, "%s/%s", earlier->folder, file->name);
  EVEN_TRY(even_text_status(path));
  const char *from = even_text_string(path);
  if (even_path_is_link(from, &is_link) == EVEN_OK && !is_link && even_input_open(from, input) == EVEN_OK) {
    *opened = input->bytes == file->bytes;
  }
  if (!*opened) {
    even_input_close(input);
    (void)even_error_restore(&kept);
  }
  return EVEN_OK;
}

/* A link that is what the manifest says, or none. */
static even_status make_link(const char *from, const char *path, uint64_t bytes, bool *linked) {
  even_error kept = *even_error_last();
  even_input input = {.fd = -1};
  bool is_link = false;
  if (even_path_is_link(from, &is_link) != EVEN_OK || is_link || even_file_link(from, path) != EVEN_OK) {
    (void)even_error_restore(&kept); /* no links here: it is written */
    return EVEN_OK;
  }
  *linked = even_input_open(path, &input) == EVEN_OK && input.bytes == bytes;
  even_input_close(&input);
  even_status status = *linked ? EVEN_OK : even_file_remove(path);
  if (status == EVEN_OK) {
    (void)even_error_restore(&kept);
  }
  return status;
}

even_status even_earlier_link(const even_earlier *earlier, const char *name, const even_content *content,
                              const char *path, even_manifest_file *entry, bool *linked) {
  even_text from = EVEN_TEXT_EMPTY;
  bool same = false;
  *linked = false;
  const even_manifest_file *file = even_earlier_find(earlier, name);
  if (file == NULL || file->bytes != content->bytes || content->bytes < LEAST_SHARED_BYTES) {
    return EVEN_OK;
  }
  EVEN_TRY(even_content_compare(content, file->sums, file->sum_count, &same));
  if (!same) {
    return EVEN_OK;
  }
  even_text_format(&from, "%s/%s", earlier->folder, name);
  even_status status = even_text_status(&from);
  if (status == EVEN_OK) {
    status = make_link(even_text_string(&from), path, content->bytes, linked);
  }
  even_text_free(&from);
  if (status == EVEN_OK && *linked) {
    entry->bytes = file->bytes;
    status = EVEN_NEW_ARRAY(&entry->sums, file->sum_count);
    if (status == EVEN_OK) {
      entry->sum_count = file->sum_count;
      memcpy(entry->sums, file->sums, file->sum_count * sizeof *file->sums);
    }
  }
  return status;
}
