/* Writes the manifest. */
#include "checkpoint/manifest_writer.h"

#include "base/fail.h"
#include "base/json_check.h"
#include "base/json_writer.h"
#include "checkpoint/created.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static void add_time(even_json *json, uint64_t created_ns) {
  char text[EVEN_CREATED_BYTES];
  even_created_text(created_ns, text);
  even_json_string(json, "created", text);
}

/* A line each. */
static void add_parts(even_json *json, const even_manifest_file *file) {
  char part[80];
  even_json_array(json, "parts");
  for (size_t i = 0; i < file->part_count; i++) {
    const even_part *one = &file->parts[i];
    (void)snprintf(part, sizeof part, "[%" PRIu64 ", %" PRIu64 ", \"%016" PRIx64 "\"]", one->begin, one->bytes,
                   one->sum);
    even_json_raw(json, NULL, part);
  }
  even_json_array_end(json);
}

static void add_file(even_json *json, const even_manifest_file *file) {
  char digits[20];
  even_json_object(json, NULL);
  even_json_string(json, "name", file->name);
  even_json_unsigned(json, "bytes", file->bytes);
  even_json_unsigned(json, "chunk_bytes", EVEN_CHECKPOINT_CHUNK_BYTES);
  even_json_array(json, "checksums");
  for (size_t i = 0; i < file->sum_count; i++) {
    (void)snprintf(digits, sizeof digits, "%016" PRIx64, file->sums[i]);
    even_json_string(json, NULL, digits);
  }
  even_json_array_end(json);
  if (file->part_count > 0) {
    add_parts(json, file);
  }
  even_json_object_end(json);
}

static even_status check_size(size_t bytes) {
  if (bytes <= EVEN_MANIFEST_MOST_BYTES) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_OVERFLOW,
                  "a checkpoint's manifest would have %zu bytes or more, and no reader takes more than %d", bytes,
                  EVEN_MANIFEST_MOST_BYTES);
  return even_error_fix("keep large lists of the state as tensors, which have files of their own");
}

even_status even_manifest_write(const even_manifest_file *files, size_t count, uint64_t created_ns,
                                const char *state_json, even_text *out) {
  EVEN_TRY(check_size(state_json != NULL ? strlen(state_json) : 0));
  EVEN_TRY(even_json_check_object("a checkpoint's state", state_json != NULL ? state_json : ""));
  even_json json = even_json_begin(out, 2);
  even_json_object(&json, NULL);
  even_json_string(&json, "format", EVEN_CHECKPOINT_FORMAT);
  add_time(&json, created_ns);
  even_json_array(&json, "files");
  for (size_t i = 0; i < count; i++) {
    add_file(&json, &files[i]);
  }
  even_json_array_end(&json);
  even_json_raw(&json, "state", state_json);
  even_text_add(out, ",");
  EVEN_TRY(even_text_status(out));
  uint64_t sum = even_checkpoint_checksum(out->data, out->length);
  even_text_format(out, "%s%016" PRIx64 "%s", EVEN_MANIFEST_TAIL, sum, EVEN_MANIFEST_END);
  EVEN_TRY(even_text_status(out));
  return check_size(out->length);
}
