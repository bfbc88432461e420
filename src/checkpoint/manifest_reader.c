/* Reads, parses and checks a manifest. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/utf8.h"
#include "checkpoint/manifest_writer.h"
#include "checkpoint/reader.h"
#include "os/file.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { SUM_DIGITS = 16 };

static even_status corrupt(const char *origin, const char *what) {
  return even_fail(EVEN_ERR_CORRUPT, "%s is damaged: %s", origin, what);
}

/* Names in a manifest are anyone's: no control characters, and no page of them. */
static even_status corrupt_file(const char *origin, const char *name, const char *what) {
  char shown[160];
  return even_fail(EVEN_ERR_CORRUPT, "%s is damaged: %s of \"%s\" in its list of files", origin, what,
                   even_utf8_clean(name, shown, sizeof shown));
}

/* Exactly 16 lower-case hexadecimal digits. */
static bool read_sum(const char *digits, uint64_t *out) {
  *out = 0;
  for (size_t i = 0; i < SUM_DIGITS; i++) {
    char digit = digits[i];
    unsigned value = digit >= '0' && digit <= '9' ? (unsigned)(digit - '0') : (unsigned)(digit - 'a') + 10u;
    if (!((digit >= '0' && digit <= '9') || (digit >= 'a' && digit <= 'f'))) {
      return false;
    }
    *out = *out << 4 | value;
  }
  return true;
}

static even_status refuse_format(const char *origin, const char *format) {
  (void)even_fail(EVEN_ERR_UNSUPPORTED, "%s has the format \"%.64s\", not " EVEN_CHECKPOINT_FORMAT, origin, format);
  return even_error_fix("it is of another version of Evenstep: use that one, or a newer one");
}

/* Of a text that does not end as ours do, which may be another version's: its first member is its format. */
static even_status tell_wrong_end(const char *origin, const char *text, size_t bytes) {
  static const char family[] = "evenstep-checkpoint-";
  char begin[128];
  char number[10];
  char quote[2];
  char format[sizeof family + sizeof number];
  size_t most = bytes < sizeof begin - 1 ? bytes : sizeof begin - 1;
  memcpy(begin, text, most);
  begin[most] = '\0';
  if (sscanf(begin, " { \"format\" : \"evenstep-checkpoint-%9[0-9]%1[\"]", number, quote) == 2) {
    (void)snprintf(format, sizeof format, "%s%s", family, number);
    if (strcmp(format, EVEN_CHECKPOINT_FORMAT) != 0) {
      return refuse_format(origin, format);
    }
  }
  return corrupt(origin, "it does not end with its checksum (truncated?)");
}

/* The manifest's last line holds the checksum of all that stands before it. */
static even_status check_own_sum(const char *origin, const char *text, size_t bytes) {
  size_t tail = strlen(EVEN_MANIFEST_TAIL);
  size_t end = strlen(EVEN_MANIFEST_END);
  size_t whole = tail + SUM_DIGITS + end;
  uint64_t said = 0;
  if (bytes < whole || memcmp(text + bytes - whole, EVEN_MANIFEST_TAIL, tail) != 0 ||
      memcmp(text + bytes - end, EVEN_MANIFEST_END, end) != 0 || !read_sum(text + bytes - whole + tail, &said)) {
    return tell_wrong_end(origin, text, bytes);
  }
  if (even_checkpoint_checksum(text, bytes - whole) != said) {
    return corrupt(origin, "its checksum does not match its text");
  }
  return EVEN_OK;
}

static bool read_count(const json_t *object, const char *key, uint64_t minimum, uint64_t *out) {
  const json_t *value = json_object_get(object, key);
  if (!json_is_integer(value) || json_integer_value(value) < (json_int_t)minimum) {
    return false;
  }
  *out = (uint64_t)json_integer_value(value);
  return true;
}

static bool plain_name(const char *name) {
  return name != NULL && name[0] != '\0' && strchr(name, '/') == NULL && strcmp(name, ".") != 0 &&
         strcmp(name, "..") != 0;
}

/* Manifests of versions before have none. */
static even_status read_parts(const char *origin, const char *name, const json_t *list,
                              even_checkpoint_stored_file *file) {
  uint64_t before = 0;
  if (list == NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&file->parts, json_array_size(list)));
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *one = json_array_get(list, i);
    const char *digits = json_string_value(json_array_get(one, 2));
    json_int_t begin = json_integer_value(json_array_get(one, 0));
    json_int_t bytes = json_integer_value(json_array_get(one, 1));
    even_part *part = &file->parts[file->part_count++];
    *part = (even_part){.begin = (uint64_t)begin, .bytes = (uint64_t)bytes};
    if (begin < 0 || bytes < 1 || part->begin < before || part->begin > file->bytes ||
        part->bytes > file->bytes - part->begin || digits == NULL || strlen(digits) != SUM_DIGITS ||
        !read_sum(digits, &part->sum)) {
      return corrupt_file(origin, name, "a part is none");
    }
    before = part->begin + part->bytes;
  }
  return EVEN_OK;
}

static even_status read_file(const char *origin, const json_t *object, even_checkpoint_stored_file *file) {
  const char *name = json_string_value(json_object_get(object, "name"));
  const json_t *sums = json_object_get(object, "checksums");
  if (name == NULL) {
    return corrupt(origin, "a file in its list has no name");
  }
  if (!plain_name(name)) {
    char shown[160];
    return even_fail(EVEN_ERR_CORRUPT, "%s is damaged: \"%s\" in its list of files is no name of a file of its folder",
                     origin, even_utf8_clean(name, shown, sizeof shown));
  }
  if (!read_count(object, "bytes", 0, &file->bytes)) {
    return corrupt_file(origin, name, "\"bytes\" is no size");
  }
  if (!read_count(object, "chunk_bytes", 1, &file->chunk_bytes)) {
    return corrupt_file(origin, name, "\"chunk_bytes\" is no size");
  }
  if (!json_is_array(sums)) {
    return corrupt_file(origin, name, "\"checksums\" is no list");
  }
  uint64_t expected = file->bytes / file->chunk_bytes + (file->bytes % file->chunk_bytes != 0 ? 1 : 0);
  if (json_array_size(sums) != expected) {
    return corrupt_file(origin, name, "the number of checksums does not fit the size");
  }
  EVEN_TRY(even_duplicate(name, &file->name));
  EVEN_TRY(EVEN_NEW_ARRAY(&file->sums, json_array_size(sums)));
  file->sum_count = json_array_size(sums);
  for (size_t i = 0; i < file->sum_count; i++) {
    const char *digits = json_string_value(json_array_get(sums, i));
    if (digits == NULL || strlen(digits) != SUM_DIGITS || !read_sum(digits, &file->sums[i])) {
      return corrupt_file(origin, name, "a checksum is not 16 hexadecimal digits");
    }
  }
  return read_parts(origin, name, json_object_get(object, "parts"), file);
}

static even_status read_files(const char *origin, const json_t *files, even_checkpoint_info *out) {
  EVEN_TRY(EVEN_NEW_ARRAY(&out->files, json_array_size(files)));
  out->file_count = json_array_size(files);
  for (size_t i = 0; i < out->file_count; i++) {
    EVEN_TRY(read_file(origin, json_array_get(files, i), &out->files[i]));
    if (__builtin_add_overflow(out->bytes, out->files[i].bytes, &out->bytes)) {
      return corrupt(origin, "the sizes of its files do not fit in 64 bits");
    }
    for (size_t j = 0; j < i; j++) {
      if (strcmp(out->files[i].name, out->files[j].name) == 0) {
        return corrupt_file(origin, out->files[i].name, "there are two entries");
      }
    }
  }
  return EVEN_OK;
}

static int64_t state_number(const json_t *state, const char *key) {
  const json_t *value = json_object_get(state, key);
  return json_is_integer(value) && json_integer_value(value) >= 0 ? (int64_t)json_integer_value(value) : -1;
}

/* What fits no field of the text is of no writer that we know. */
static even_status read_order(const json_t *state, even_checkpoint_info *out) {
  enum { NUMBERS = 3 };
  static const json_int_t most = 9999999999;
  json_int_t numbers[NUMBERS] = {0};
  even_text text = EVEN_TEXT_EMPTY;
  const json_t *order = json_object_get(state, "order");
  bool known = json_array_size(order) == NUMBERS;
  for (size_t i = 0; i < NUMBERS && known; i++) {
    const json_t *number = json_array_get(order, i);
    numbers[i] = json_integer_value(number);
    known = json_is_integer(number) && numbers[i] >= 0 && numbers[i] <= most;
  }
  memset(numbers, 0, known ? 0 : sizeof numbers);
  out->turn = (int64_t)numbers[0];
  even_text_format(&text, "%010lld.%010lld.%010lld %s", (long long)numbers[0], (long long)numbers[1],
                   (long long)numbers[2], out->created);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    status = even_duplicate(text.data, &out->order);
  }
  even_text_free(&text);
  return status;
}

static bool is_a_file(const even_checkpoint_info *info, const json_t *name) {
  const char *text = json_string_value(name);
  for (size_t i = 0; i < info->file_count && text != NULL; i++) {
    if (strcmp(info->files[i].name, text) == 0) {
      return true;
    }
  }
  return false;
}

/* Of a model or an optimizer: "files", or where that is none or empty "file". *wrong: which name, NULL if that is none.
 */
static bool names_its_files(const even_checkpoint_info *info, const json_t *saved, const char **wrong) {
  const json_t *names = json_object_get(saved, "files");
  const json_t *one = json_object_get(saved, "file");
  if (names != NULL && !json_is_null(names) && !(json_is_array(names) && json_array_size(names) == 0)) {
    one = names;
    for (size_t i = 0; i < json_array_size(names); i++) {
      one = json_array_get(names, i);
      if (!is_a_file(info, one)) {
        break;
      }
    }
  }
  *wrong = json_string_value(one);
  return is_a_file(info, one);
}

/* Who loads it asks the state for files, which no checksum is of that is not in the list. */
static even_status check_named(const char *origin, const even_checkpoint_info *info) {
  static const char *const kinds[] = {"models", "optimizers"};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    json_t *kind = json_object_get(info->state, kinds[i]);
    const char *name = NULL;
    json_t *saved = NULL;
    json_object_foreach(kind, name, saved) {
      const char *wrong = NULL;
      if (!names_its_files(info, saved, &wrong)) {
        char shown[2][160];
        return even_fail(EVEN_ERR_CORRUPT,
                         "%s is damaged: its state names \"%s\" in %s for \"%s\", which is none of its files", origin,
                         wrong == NULL ? "" : even_utf8_clean(wrong, shown[0], sizeof shown[0]), kinds[i],
                         even_utf8_clean(name, shown[1], sizeof shown[1]));
      }
    }
  }
  return EVEN_OK;
}

static even_status read_root(const char *origin, json_t *root, even_checkpoint_info *out) {
  const char *format = json_string_value(json_object_get(root, "format"));
  const char *created = json_string_value(json_object_get(root, "created"));
  const json_t *files = json_object_get(root, "files");
  json_t *state = json_object_get(root, "state");
  if (format == NULL || strcmp(format, EVEN_CHECKPOINT_FORMAT) != 0) {
    return format == NULL ? corrupt(origin, "it has no \"format\"") : refuse_format(origin, format);
  }
  if (created == NULL || !json_is_array(files) || !json_is_object(state)) {
    return corrupt(origin, "it lacks \"created\", \"files\" or \"state\"");
  }
  EVEN_TRY(even_duplicate(created, &out->created));
  EVEN_TRY(read_order(state, out));
  out->state = json_incref(state);
  out->step = state_number(state, "step");
  out->epoch = state_number(state, "epoch");
  out->world_size = state_number(state, "world_size");
  EVEN_TRY(read_files(origin, files, out));
  return check_named(origin, out);
}

even_status even_manifest_parse(const char *origin, const char *text, size_t bytes, even_checkpoint_info *out) {
  json_t *root = NULL;
  *out = (even_checkpoint_info){.step = -1, .epoch = -1, .world_size = -1};
  EVEN_TRY(check_own_sum(origin, text, bytes));
  if (even_json_parse(origin, text, bytes, &root) != EVEN_OK) {
    char what[256];
    (void)snprintf(what, sizeof what, "%.255s", even_error_last()->what);
    return even_fail(EVEN_ERR_CORRUPT, "%s", what);
  }
  even_status status = read_root(origin, root, out);
  json_decref(root);
  return status;
}

even_status even_manifest_read(const char *folder, even_text *text, even_checkpoint_info *out) {
  even_text path = EVEN_TEXT_EMPTY;
  bool link = false;
  *out = (even_checkpoint_info){.step = -1, .epoch = -1, .world_size = -1};
  even_text_format(&path, "%s/%s", folder, EVEN_CHECKPOINT_MANIFEST);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_path_is_link(even_text_string(&path), &link);
  }
  if (status == EVEN_OK && link) {
    status = even_fail(EVEN_ERR_CORRUPT, "%s is a symbolic link: a checkpoint's files lie in its folder", path.data);
  }
  if (status == EVEN_OK) {
    status = even_file_read(path.data, EVEN_MANIFEST_MOST_BYTES, text);
  }
  if (status == EVEN_OK) {
    status = even_manifest_parse(path.data, even_text_string(text), text->length, out);
  }
  even_text_free(&path);
  return status;
}

void even_checkpoint_info_free(even_checkpoint_info *info) {
  for (size_t i = 0; i < info->file_count; i++) {
    even_free(info->files[i].name);
    even_free(info->files[i].sums);
    even_free(info->files[i].parts);
  }
  even_free(info->files);
  even_free(info->created);
  even_free(info->order);
  json_decref(info->state);
  *info = (even_checkpoint_info){.step = -1, .epoch = -1, .world_size = -1};
}
