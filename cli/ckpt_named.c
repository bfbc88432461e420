/* Which checkpoints a word on the command line names. */
#include "base/fail.h"
#include "checkpoint/reader.h"
#include "cli/ckpt.h"
#include "os/path.h"

#include <string.h>

static bool has(const char *folder, const char *name) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/%s", folder, name);
  bool there = even_text_status(&path) == EVEN_OK && even_path_exists(even_text_string(&path));
  even_text_free(&path);
  return there;
}

static bool grows(const char *name) {
  size_t length = strlen(name);
  size_t tail = strlen(EVEN_CHECKPOINT_PARTIAL);
  return length >= tail && strcmp(name + length - tail, EVEN_CHECKPOINT_PARTIAL) == 0;
}

even_status even_ckpt_paths(const char *folder, bool growing, even_names *out) {
  even_names names = {NULL, 0};
  even_text path = EVEN_TEXT_EMPTY;
  if (has(folder, EVEN_CHECKPOINT_MANIFEST)) {
    return even_names_add(out, folder);
  }
  even_text_format(&path, "%s%s", folder, has(folder, "checkpoints") ? "/checkpoints" : "");
  even_status status = even_text_status(&path);
  size_t root = path.length;
  if (status == EVEN_OK) {
    status = even_folder_names(even_text_string(&path), &names);
  }
  for (size_t i = 0; i < names.count && status == EVEN_OK; i++) {
    path.length = root;
    even_text_format(&path, "/%s", names.items[i]);
    status = even_text_status(&path);
    bool wanted = grows(names.items[i]) ? growing : has(even_text_string(&path), EVEN_CHECKPOINT_MANIFEST);
    if (status == EVEN_OK && wanted) {
      status = even_names_add(out, even_text_string(&path));
    }
  }
  even_names_free(&names);
  even_text_free(&path);
  return status;
}

even_status even_ckpt_folder(const char *name, even_text *out) {
  even_text_clear(out);
  even_text_format(out, "runs/%s", name);
  EVEN_TRY(even_text_status(out));
  if (even_path_exists(name)) {
    even_text_clear(out);
    even_text_add(out, name);
    return even_text_status(out);
  }
  if (!even_path_exists(even_text_string(out))) {
    (void)even_fail(EVEN_ERR_NOT_FOUND, "neither folder %s nor run %s exists", name, even_text_string(out));
    return even_error_fix("name a folder with checkpoints, a run folder, or a run in ./runs");
  }
  return EVEN_OK;
}
