/* Partial folders: making one, and sweeping away those of dead writers. */
#include "checkpoint/partial.h"

#include "base/fail.h"
#include "base/text.h"
#include "os/folder.h"

#include <evenstep/checkpoint.h>
#include <string.h>

/* A rival that sweeps may take the folder between mkdir and flock; it cannot go on for ever. */
enum { MOST_ATTEMPTS = 16 };

static even_status take_over(const char *partial) {
  int lock = -1;
  EVEN_TRY(even_folder_lock(partial, &lock));
  if (lock < 0) {
    if (!even_path_exists(partial)) {
      return EVEN_OK;
    }
    even_status status = even_fail(EVEN_ERR_IN_USE, "%s is being written by another process", partial);
    (void)even_error_fix("wait until that job has ended, or give each job its own folder (--checkpoint-dir)");
    return status;
  }
  even_status status = even_folder_remove(partial);
  even_folder_unlock(lock);
  return status;
}

even_status even_partial_make(const char *partial, int *lock) {
  *lock = -1;
  for (int attempt = 0; attempt < MOST_ATTEMPTS; attempt++) {
    even_status status = even_folder_create(partial);
    if (status == EVEN_ERR_IN_USE) {
      EVEN_TRY(take_over(partial));
      continue;
    }
    EVEN_TRY(status);
    if (even_folder_lock(partial, lock) != EVEN_OK) { /* a file system without locks: write all the same */
      return EVEN_OK;
    }
    if (*lock >= 0) {
      return EVEN_OK;
    }
  }
  return even_fail(EVEN_ERR_IN_USE, "%s is taken by another process again and again", partial);
}

void even_partial_sweep(const char *parent) {
  even_names names = {NULL, 0};
  even_text path = EVEN_TEXT_EMPTY;
  size_t suffix = strlen(EVEN_CHECKPOINT_PARTIAL);
  if (even_folder_names(parent, &names) == EVEN_OK) {
    for (size_t i = 0; i < names.count; i++) {
      size_t length = strlen(names.items[i]);
      int lock = -1;
      if (length <= suffix || strcmp(names.items[i] + length - suffix, EVEN_CHECKPOINT_PARTIAL) != 0) {
        continue;
      }
      even_text_clear(&path);
      even_text_format(&path, "%s/%s", parent, names.items[i]);
      if (even_text_status(&path) == EVEN_OK && even_folder_lock(even_text_string(&path), &lock) == EVEN_OK &&
          lock >= 0) {
        (void)!even_folder_remove(even_text_string(&path));
        even_folder_unlock(lock);
      }
    }
  }
  even_names_free(&names);
  even_text_free(&path);
}
