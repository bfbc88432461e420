/* Looking for run.db. */
#include "cli/run_folder.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "monitor/history.h"
#include "os/folder.h"

#include <string.h>

enum { MOST_TOLD = 8 };

static bool holds_run(const char *folder) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/run.db", folder);
  bool there = even_text_status(&path) == EVEN_OK && even_path_exists(even_text_string(&path));
  even_text_free(&path);
  return there;
}

static even_status newest(even_text *out) {
  even_names names = {NULL, 0};
  even_text path = EVEN_TEXT_EMPTY;
  uint64_t best = 0;
  even_text_clear(out);
  if (even_folder_names("runs", &names) != EVEN_OK) {
    even_error_clear();
  }
  for (size_t i = 0; i < names.count; i++) {
    even_text_clear(&path);
    even_text_format(&path, "runs/%s", names.items[i]);
    if (even_text_status(&path) != EVEN_OK || !holds_run(even_text_string(&path))) {
      continue;
    }
    uint64_t when =
        even_history_alive(even_text_string(&path)) ? UINT64_MAX : even_history_began(even_text_string(&path));
    if (when > best) {
      best = when;
      even_text_clear(out);
      even_text_add(out, even_text_string(&path));
    }
  }
  even_names_free(&names);
  even_text_free(&path);
  if (best == 0) {
    even_status status = even_fail(EVEN_ERR_NOT_FOUND, "there is no run in the folder runs");
    (void)even_error_fix("name the run's folder, or start one: evenstep run train.py");
    return status;
  }
  return even_text_status(out);
}

/* The newest ones first: a run that is looked for is seldom an old one. */
static void list_newest(const even_names *names, uint64_t *began, even_text *list) {
  for (int told = 0;; told++) {
    size_t best = names->count;
    for (size_t i = 0; i < names->count; i++) {
      if (began[i] != 0 && (best == names->count || began[i] > began[best])) {
        best = i;
      }
    }
    if (best == names->count) {
      return;
    }
    if (told == MOST_TOLD) {
      even_text_add(list, " …");
      return;
    }
    even_text_format(list, "%s%s", told > 0 ? ", " : "", names->items[best]);
    began[best] = 0;
  }
}

static void list_runs(even_text *list) {
  even_names names = {NULL, 0};
  even_text path = EVEN_TEXT_EMPTY;
  uint64_t *began = NULL;
  if (even_folder_names("runs", &names) == EVEN_OK && EVEN_NEW_ARRAY(&began, names.count) == EVEN_OK) {
    for (size_t i = 0; i < names.count; i++) {
      even_text_clear(&path);
      even_text_format(&path, "runs/%s", names.items[i]);
      bool there = even_text_status(&path) == EVEN_OK && holds_run(even_text_string(&path));
      uint64_t when = there ? even_history_began(even_text_string(&path)) : 0;
      began[i] = there && when == 0 ? 1 : when; /* one that cannot be read is told last */
    }
    list_newest(&names, began, list);
  }
  even_free(began);
  even_names_free(&names);
  even_text_free(&path);
}

static void add_fix(void) {
  even_text list = EVEN_TEXT_EMPTY;
  even_error kept = *even_error_last();
  list_runs(&list);
  (void)even_fail(kept.status, "%s", kept.what);
  if (list.length > 0) {
    (void)even_error_fix("name a run's folder or a run of runs/, the newest first: %s", even_text_string(&list));
  } else {
    (void)even_error_fix("name the folder of a run: the one that `evenstep run` printed");
  }
  even_text_free(&list);
}

even_status even_run_folder(const char *name, even_text *out) {
  if (name == NULL) {
    return newest(out);
  }
  even_text_clear(out);
  even_text_add(out, name);
  while (out->length > 1 && out->data[out->length - 1] == '/') {
    out->data[--out->length] = '\0';
  }
  if (even_text_status(out) == EVEN_OK && !holds_run(even_text_string(out))) {
    even_text_clear(out);
    even_text_format(out, "runs/%s", name);
  }
  EVEN_TRY(even_text_status(out));
  if (!holds_run(even_text_string(out))) {
    even_status status =
        even_fail(EVEN_ERR_NOT_FOUND, "%s is no run: neither %s nor runs/%s has a run.db", name, name, name);
    add_fix();
    return status;
  }
  return EVEN_OK;
}

even_status even_run_folder_at_all(const char *name, even_text *out) {
  if (name == NULL) {
    return newest(out);
  }
  even_text_clear(out);
  even_text_add(out, name);
  if (even_text_status(out) == EVEN_OK && !even_path_is_folder(even_text_string(out))) {
    even_text_clear(out);
    even_text_format(out, "runs/%s", name);
  }
  EVEN_TRY(even_text_status(out));
  return even_path_is_folder(even_text_string(out)) ? EVEN_OK : even_run_folder(name, out);
}
