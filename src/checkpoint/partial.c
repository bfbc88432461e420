/* Partial folders: making one, and sweeping away those of dead writers. */
#include "checkpoint/partial.h"

#include "base/fail.h"
#include "base/text.h"
#include "os/clock.h"
#include "os/folder.h"

#include <evenstep/checkpoint.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* A rival that sweeps may take the folder between mkdir and flock; it cannot go on for ever. */
enum { MOST_ATTEMPTS = 16 };

/* Where there are no locks: how long nothing in a partial folder may have changed while its writer lives. Writers write
 * all the time; a fetch from a device takes seconds, attributes over a network are up to a minute old. */
#define QUIET_NS (UINT64_C(600) * 1000000000u)

/* Removes what a dead writer left. EVEN_ERR_IN_USE where the writer lives, or where that cannot be told yet. */
static even_status remove_abandoned(const char *partial, bool own_only) {
  int lock = -1;
  even_status status = even_folder_lock_itself(partial, &lock);
  if (status == EVEN_ERR_UNSUPPORTED) {
    uint64_t written = 0;
    EVEN_TRY(even_folder_written_ns(partial, &written));
    uint64_t now = even_clock_wall_ns();
    if (written < now && now - written > QUIET_NS) {
      return even_folder_remove(partial);
    }
    status = even_fail(EVEN_ERR_IN_USE, "%s was written to less than 10 minutes ago, and its file system has no locks",
                       partial);
    (void)even_error_fix("remove it when no job writes it, or wait, or choose a --checkpoint-dir that has locks");
    return status;
  }
  EVEN_TRY(status);
  if (lock < 0) {
    if (!even_path_exists(partial)) {
      return EVEN_OK;
    }
    status = even_fail(EVEN_ERR_IN_USE, "%s is being written by another process", partial);
    (void)even_error_fix("wait until that job has ended, or give each job its own folder (--checkpoint-dir)");
    return status;
  }
  if (!own_only || even_folder_is_own(lock)) {
    status = even_folder_remove_locked(partial, lock);
  }
  even_folder_unlock(lock);
  return status;
}

even_status even_partial_make(const char *partial, int *lock) {
  *lock = -1;
  for (int attempt = 0; attempt < MOST_ATTEMPTS; attempt++) {
    even_status status = even_folder_create(partial);
    if (status == EVEN_ERR_IN_USE) {
      EVEN_TRY(remove_abandoned(partial, false));
      continue;
    }
    EVEN_TRY(status);
    if (even_folder_lock_itself(partial, lock) != EVEN_OK || *lock >= 0) { /* without locks: write all the same */
      return EVEN_OK;
    }
  }
  return even_fail(EVEN_ERR_IN_USE, "%s is taken by another process again and again", partial);
}

void even_partial_sweep(const char *parent) {
  even_error kept = *even_error_last(); /* what is left behind is no error of the caller */
  even_names names = {NULL, 0};
  even_text path = EVEN_TEXT_EMPTY;
  size_t suffix = strlen(EVEN_CHECKPOINT_PARTIAL);
  if (even_folder_names(parent, &names) == EVEN_OK) {
    for (size_t i = 0; i < names.count; i++) {
      size_t length = strlen(names.items[i]);
      if (length <= suffix || strcmp(names.items[i] + length - suffix, EVEN_CHECKPOINT_PARTIAL) != 0) {
        continue;
      }
      even_text_clear(&path);
      even_text_format(&path, "%s/%s", parent, names.items[i]);
      if (even_text_status(&path) == EVEN_OK) {
        (void)!remove_abandoned(even_text_string(&path), true);
      }
    }
  }
  even_names_free(&names);
  even_text_free(&path);
  (void)even_error_restore(&kept);
}
