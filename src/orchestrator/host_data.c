/* Files and folders that the command names, which each host needs: which they are, what is there, and how that differs.
 */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"
#include "os/entries.h"
#include "os/folder.h"
#include "os/path.h"
#include "os/stream.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of a larger file than WHOLE_BYTES so many pieces are looked at, from its first to its last. */
enum {
  MOST_PATHS = 64,
  MOST_LIST_BYTES = 8192,
  WHOLE_BYTES = 16 << 20,
  PIECES = 16,
  PIECE_BYTES = 65536,
  DIFFERENCES = 4
};

/* ---- which ---- */

static even_status absolute(const char *folder, const char *path, even_text *out) {
  even_text_clear(out);
  even_text_format(out, "%s%s%s", path[0] == '/' ? "" : folder, path[0] == '/' ? "" : "/", path);
  return even_text_status(out);
}

static bool is_there(const char *folder, const char *path) {
  even_text whole = EVEN_TEXT_EMPTY;
  bool there = path[0] != '\0' && absolute(folder, path, &whole) == EVEN_OK && even_path_exists(whole.data);
  even_text_free(&whole);
  return there;
}

/* The path in "data", "--data=data", "data.path=data"; NULL: none. */
static const char *path_in(const char *folder, const char *word) {
  const char *value = strchr(word, '=');
  if (word[0] != '-' && is_there(folder, word)) {
    return word;
  }
  return value != NULL && is_there(folder, value + 1) ? value + 1 : NULL;
}

static bool has(const json_t *list, const json_t *item) {
  for (size_t i = 0; i < json_array_size(list); i++) {
    if (json_equal(json_array_get(list, i), (json_t *)item)) {
      return true;
    }
  }
  return false;
}

even_status even_host_data_check(even_data_check *out) {
  static const char *const names[] = {[EVEN_DATA_TELL] = "on", [EVEN_DATA_STRICT] = "strict", [EVEN_DATA_OFF] = "off"};
  const char *wish = getenv("EVENSTEP_CHECK_DATA");
  *out = EVEN_DATA_TELL;
  for (size_t i = 0; wish != NULL && wish[0] != '\0' && i < sizeof names / sizeof names[0]; i++) {
    if (strcmp(wish, names[i]) == 0) {
      *out = (even_data_check)i;
      return EVEN_OK;
    }
  }
  if (wish == NULL || wish[0] == '\0') {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_USAGE, "EVENSTEP_CHECK_DATA=%.100s is neither on nor strict nor off", wish);
  return even_error_fix(
      "leave it out (on): what differs of the paths in the command is told; strict: it is an error; "
      "off: other hosts are not asked for them");
}

even_status even_host_data_find(const char *folder, const char *const *words, size_t count, json_t **out) {
  even_data_check check = EVEN_DATA_TELL;
  size_t bytes = 0;
  *out = json_array();
  if (*out == NULL) {
    return even_fail(EVEN_ERR_MEMORY, "the paths that the command names");
  }
  EVEN_TRY(even_host_data_check(&check));
  for (size_t i = 0; i < count && check != EVEN_DATA_OFF; i++) {
    const char *path = path_in(folder, words[i]);
    json_t *item = path == NULL ? NULL : json_string(path); /* none of what is no UTF-8 */
    bytes += item == NULL ? 0 : strlen(path);
    if (item == NULL || has(*out, item) || json_array_size(*out) == MOST_PATHS || bytes > MOST_LIST_BYTES) {
      json_decref(item);
    } else if (json_array_append_new(*out, item) != 0) {
      return even_fail(EVEN_ERR_MEMORY, "the paths that the command names");
    }
  }
  return EVEN_OK;
}

/* ---- what is there ---- */

static bool any_name(void *context, const char *name) {
  (void)name;
  *(bool *)context = true;
  return false;
}

static even_status sum_pieces(even_input *input, uint64_t *out) {
  char *pieces = NULL;
  even_status status = EVEN_OK;
  EVEN_TRY(EVEN_NEW_ARRAY(&pieces, (size_t)PIECES * PIECE_BYTES));
  for (uint64_t i = 0; i < PIECES && status == EVEN_OK; i++) {
    uint64_t offset = (input->bytes - PIECE_BYTES) / (PIECES - 1) * i;
    status = even_input_read_at(input, i + 1 < PIECES ? offset : input->bytes - PIECE_BYTES, &pieces[i * PIECE_BYTES],
                                PIECE_BYTES);
  }
  if (status == EVEN_OK) {
    *out = even_checkpoint_checksum(pieces, (size_t)PIECES * PIECE_BYTES);
  }
  even_free(pieces);
  return status;
}

static even_status sum_whole(even_input *input, uint64_t *out) {
  char *content = NULL;
  EVEN_TRY(EVEN_NEW_ARRAY(&content, (size_t)input->bytes + 1));
  even_status status = input->bytes == 0 ? EVEN_OK : even_input_read_at(input, 0, content, (size_t)input->bytes);
  if (status == EVEN_OK) {
    *out = even_checkpoint_checksum(content, (size_t)input->bytes);
  }
  even_free(content);
  return status;
}

static void add_file(even_json *json, const char *path) {
  even_input input = {.fd = -1};
  char sum[24];
  uint64_t found = 0;
  even_status status = even_input_open(path, &input);
  if (status == EVEN_OK) {
    status = input.bytes > WHOLE_BYTES ? sum_pieces(&input, &found) : sum_whole(&input, &found);
  }
  if (status == EVEN_OK) {
    (void)snprintf(sum, sizeof sum, "%016" PRIx64, found);
    even_json_string(json, "kind", "file");
    even_json_unsigned(json, "bytes", input.bytes);
    even_json_string(json, "sum", sum);
  } else { /* a device, a pipe; or it may not be read */
    even_json_string(json, "kind", status == EVEN_ERR_INPUT ? "device or pipe" : "file");
    even_error_clear();
  }
  even_input_close(&input);
}

static void add_path(even_json *json, const char *name, const char *path) {
  bool any = false;
  even_json_object(json, name);
  if (even_path_is_folder(path)) {
    even_json_string(json, "kind", "folder");
    bool read = even_folder_each(path, any_name, &any) == EVEN_OK;
    if (read) {
      even_json_bool(json, "empty", !any);
    } else {
      even_error_clear(); /* nobody says so */
    }
  } else if (even_path_exists(path)) {
    add_file(json, path);
  }
  even_json_object_end(json);
}

void even_host_data_add(even_json *json, const char *folder, const json_t *paths) {
  even_text path = EVEN_TEXT_EMPTY;
  even_json_object(json, "data");
  for (size_t i = 0; i < json_array_size(paths) && i < MOST_PATHS; i++) {
    const char *name = json_string_value(json_array_get(paths, i));
    if (name != NULL && absolute(folder, name, &path) == EVEN_OK) {
      add_path(json, name, path.data);
    }
  }
  even_json_object_end(json);
  even_text_free(&path);
}

/* ---- comparing ---- */

/* What of it differs there, in words; "": nothing. */
static void compare_one(const char *path, const json_t *here, const json_t *there, bool whole, char *out, size_t room) {
  const char *mine = even_json_text(here, "kind");
  const char *other = even_json_text(there, "kind");
  const json_t *bytes[2] = {json_object_get(here, "bytes"), json_object_get(there, "bytes")};
  out[0] = '\0';
  if (mine[0] == '\0') {
    return; /* it went while it was looked for */
  }
  if (other[0] == '\0') {
    (void)snprintf(out, room, "%s is not there", path);
  } else if (strcmp(mine, other) != 0) {
    (void)snprintf(out, room, "%s is a %s there and a %s here", path, other, mine);
  } else if (json_is_false(json_object_get(here, "empty")) && json_is_true(json_object_get(there, "empty"))) {
    (void)snprintf(out, room, "folder %s holds nothing there", path);
  } else if (bytes[0] != NULL && bytes[1] == NULL) {
    (void)snprintf(out, room, "%s cannot be read there", path);
  } else if (whole && bytes[0] != NULL && !json_equal((json_t *)bytes[0], (json_t *)bytes[1])) {
    (void)snprintf(out, room, "%s has %" PRId64 " bytes there and %" PRId64 " here", path,
                   (int64_t)json_integer_value(bytes[1]), (int64_t)json_integer_value(bytes[0]));
  } else if (whole && strcmp(even_json_text(here, "sum"), even_json_text(there, "sum")) != 0) {
    (void)snprintf(out, room, "%s has another content there", path);
  }
}

even_status even_host_data_compare(const json_t *ours, const json_t *theirs, const char *name, bool whole) {
  even_text words = EVEN_TEXT_EMPTY;
  const char *path = NULL;
  const char *first = "";
  json_t *here = NULL;
  int count = 0;
  if (!json_is_object(theirs)) {
    return EVEN_OK; /* it was not asked */
  }
  json_object_foreach((json_t *)ours, path, here) {
    char one[200];
    compare_one(path, here, json_object_get(theirs, path), whole, one, sizeof one);
    if (one[0] == '\0') {
      continue;
    }
    first = count == 0 ? path : first;
    if (count++ < DIFFERENCES) {
      even_text_format(&words, "%s%s", count > 1 ? "; " : "", one);
    }
  }
  even_status status = even_text_status(&words);
  if (status == EVEN_OK && count > 0) {
    char more[48] = "";
    if (count > DIFFERENCES) {
      (void)snprintf(more, sizeof more, "; and %d more", count - DIFFERENCES);
    }
    status = even_fail(EVEN_ERR_MISMATCH, "host %s differs from this one in what the command names: %.480s%s", name,
                       even_text_string(&words), more);
    (void)even_error_fix(
        "copy it there (rsync -a %.100s …), or share it (NFS); EVENSTEP_CHECK_DATA=off: other hosts are not asked",
        first);
  }
  even_text_free(&words);
  return status;
}

void even_host_data_tell(even_host_agent *agent) {
  if (agent->differs.length > 0 && agent->hosts->job != NULL) {
    even_job_notice(agent->hosts->job, "%s", even_text_string(&agent->differs));
    even_text_free(&agent->differs);
  }
}
