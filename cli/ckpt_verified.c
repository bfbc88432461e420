/* Every byte of the checkpoints that a word names, while a job may replace and remove some of them. */
#include "base/fail.h"
#include "checkpoint/reader.h"
#include "cli/ckpt.h"
#include "os/folder.h"

#include <string.h>

enum { MOST_READINGS = 3, MOST_LISTINGS = 2 };

/* A checkpoint, or those of a folder or a run. What holds none is told as a checkpoint that it is not. */
static even_status find(const char *name, even_names *out) {
  even_text folder = EVEN_TEXT_EMPTY;
  even_status status = even_ckpt_folder(name, &folder);
  bool may_be_one = status == EVEN_OK ? strcmp(name, even_text_string(&folder)) == 0 : strchr(name, '/') != NULL;
  if (status == EVEN_OK) {
    status = even_ckpt_paths(even_text_string(&folder), false, out);
  }
  if (status == EVEN_OK && out->count == 0 && !may_be_one) {
    status = even_fail(EVEN_ERR_NOT_FOUND, "run %s has no checkpoint", even_text_string(&folder));
    (void)even_error_fix("`evenstep ckpt ls` lists those that there are");
  }
  even_text_free(&folder);
  if (out->count == 0 && may_be_one) {
    even_error_clear();
    return even_names_add(out, name);
  }
  return status;
}

/* *replaced: another one took its name meanwhile, and what was read is of both. */
static even_status read_once(const char *path, even_names *problems, bool *replaced) {
  int held = even_folder_hold(path);
  even_status status = even_checkpoint_verify(path, problems);
  if (held < 0) { /* was not there, or may not be listed */
    *replaced = status == EVEN_ERR_NOT_FOUND && even_path_is_folder(path);
  } else {
    bool mixed = status == EVEN_ERR_CORRUPT || status == EVEN_ERR_NOT_FOUND;
    *replaced = mixed && even_path_is_folder(path) && !even_folder_is_at(path, held);
  }
  even_folder_unlock(held);
  return status;
}

static even_status read_all(const char *path, even_names *problems) {
  bool replaced = false;
  even_status status = read_once(path, problems, &replaced);
  for (int i = 1; i < MOST_READINGS && replaced; i++) {
    even_names_free(problems);
    status = read_once(path, problems, &replaced);
  }
  if (replaced) {
    even_names_free(problems);
    status = even_fail(EVEN_ERR_IN_USE, "checkpoint %s is replaced again and again while it is read", path);
    (void)even_error_fix("verify it when its job has ended, or save less often");
  }
  return status;
}

/* Whether an outcome was told. */
static bool tell_all(const char *name, even_ckpt_verified *told, void *context) {
  even_names paths = {NULL, 0};
  even_status found = find(name, &paths);
  bool any = found != EVEN_OK;
  if (found != EVEN_OK) {
    told(context, name, found, &(even_names){NULL, 0});
  }
  for (size_t i = 0; i < paths.count && found == EVEN_OK; i++) {
    even_names problems = {NULL, 0};
    even_status status = read_all(paths.items[i], &problems);
    bool removed = status != EVEN_OK && strcmp(paths.items[i], name) != 0 && !even_path_exists(paths.items[i]);
    if (!removed) { /* else its job keeps newer ones meanwhile (--keep) */
      told(context, paths.items[i], status, &problems);
      any = true;
    }
    even_names_free(&problems);
  }
  even_names_free(&paths);
  return any;
}

void even_ckpt_verify(const char *name, even_ckpt_verified *told, void *context) {
  bool any = false;
  for (int i = 0; i < MOST_LISTINGS && !any; i++) {
    any = tell_all(name, told, context);
  }
  if (!any) {
    even_status status = even_fail(
        EVEN_ERR_NOT_FOUND, "no checkpoint stayed of those that %s had: each was removed while it was read", name);
    (void)even_error_fix("verify again, or keep more of them (--keep)");
    told(context, name, status, &(even_names){NULL, 0});
  }
}
