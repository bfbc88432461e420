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

/* "step-00000120", and "-1f9e02aa" behind where another training has that name: those that a job's checkpoints have. */
static bool is_steps(const char *name) {
  static const char prefix[] = "step-";
  if (strncmp(name, prefix, sizeof prefix - 1) != 0) {
    return false;
  }
  const char *number = name + sizeof prefix - 1;
  const char *behind = number + strspn(number, "0123456789");
  size_t lineage = *behind == '-' ? strspn(behind + 1, "0123456789abcdef") : 0;
  return behind > number && (*behind == '\0' || (lineage > 0 && behind[1 + lineage] == '\0'));
}

/* Whether it is to be told of; `path`: it, in its folder. */
static bool is_one(const char *name, const char *path, bool growing) {
  if (even_ends_with(name, EVEN_CHECKPOINT_PARTIAL)) {
    return growing;
  }
  return has(path, EVEN_CHECKPOINT_MANIFEST) || (!growing && is_steps(name) && even_path_is_folder(path));
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
    if (status == EVEN_OK && is_one(names.items[i], even_text_string(&path), growing)) {
      status = even_names_add(out, even_text_string(&path));
    }
  }
  even_names_free(&names);
  even_text_free(&path);
  return status;
}

even_status even_ckpt_folder(const char *name, even_text *out) {
  bool may_be_run = name[0] != '\0' && strchr(name, '/') == NULL && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
  bool there = even_path_exists(name);
  even_text_clear(out);
  even_text_format(out, "%s%s", there ? "" : "runs/", name);
  EVEN_TRY(even_text_status(out));
  if (there || (may_be_run && even_path_exists(even_text_string(out)))) {
    return EVEN_OK;
  }
  if (may_be_run) {
    (void)even_fail(EVEN_ERR_NOT_FOUND, "neither folder %s nor run %s exists", name, even_text_string(out));
  } else {
    (void)even_fail(EVEN_ERR_NOT_FOUND, "folder %s does not exist", name);
  }
  return even_error_fix("name a folder with checkpoints, a run folder, or a run in ./runs");
}
