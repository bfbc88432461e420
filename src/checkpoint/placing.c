/* Replacing a checkpoint: by a swap, or by two renames and what mends them after a cut. */
#include "checkpoint/placing.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/text.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/folder.h"

#include <evenstep/checkpoint.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Another host's writer may settle between the two renames, again and again; it is given time to end, over a network
 * more than a moment: 1 ms, 2 ms … 128 ms, 1.4 s in all. */
enum { MOST_ATTEMPTS = 16, MOST_DOUBLINGS = 7 };
static const uint64_t PAUSE_NS = 1000000;

even_status even_placing_name(const char *folder, const char *end, char **out) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s%s", folder, end);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_duplicate(even_text_string(&path), out);
  }
  even_text_free(&path);
  return status;
}

static even_status sync_parent(const char *folder) {
  const char *slash = strrchr(folder, '/');
  char *parent = NULL;
  if (slash == NULL) {
    return even_folder_sync(".");
  }
  EVEN_TRY(even_duplicate(folder, &parent));
  parent[slash == folder ? 1 : slash - folder] = '\0';
  even_status status = even_folder_sync(parent);
  even_free(parent);
  return status;
}

/* The older one goes, and only while the newer one is there: another replacement may have begun since the caller
 * looked, so its name goes first, and comes back if it was the only one. */
static even_status remove_older(const char *folder, const char *aside) {
  char *away = NULL;
  EVEN_TRY(sync_parent(folder)); /* the newer one's name is safe */
  EVEN_TRY(even_placing_name(aside, EVEN_CHECKPOINT_PARTIAL, &away));
  even_status status = even_folder_rename(aside, away);
  if (status == EVEN_OK && !even_path_is_folder(folder)) {
    status = even_folder_rename(away, aside);
  } else if (status == EVEN_OK) {
    status = sync_parent(folder);
    if (status == EVEN_OK) {
      status = even_folder_remove(away);
    }
  }
  even_free(away);
  return status;
}

/* Not just any folder that came to the name meanwhile: then the older one may be the only one. */
static even_status has_manifest(const char *folder, bool *out) {
  char *manifest = NULL;
  EVEN_TRY(even_placing_name(folder, "/" EVEN_CHECKPOINT_MANIFEST, &manifest));
  *out = even_path_exists(manifest);
  even_free(manifest);
  return EVEN_OK;
}

even_status even_placing_settle(const char *folder) {
  char *aside = NULL;
  EVEN_TRY(even_placing_name(folder, EVEN_CHECKPOINT_REPLACED, &aside));
  bool newer = false;
  even_status status = EVEN_OK;
  if (even_path_is_own_folder(aside)) {
    status = has_manifest(folder, &newer);
    if (status ==
        EVEN_OK) { /* an empty folder is renamed over; what else has the name stays, and so does the older one */
      status = newer ? remove_older(folder, aside) : even_folder_rename(aside, folder);
    }
  }
  even_free(aside);
  return status;
}

/* *again: somebody else was at work there. */
static even_status move_both(const char *partial, const char *folder, const char *aside, bool *again) {
  *again = false;
  even_status status = even_folder_rename(folder, aside);
  if (status == EVEN_ERR_NOT_FOUND) { /* another writer is between its two renames, or died there: it gives way */
    status = even_folder_rename(partial, folder);
    *again = status == EVEN_ERR_IN_USE;
    return status;
  }
  if (status == EVEN_ERR_IN_USE) { /* left by a cut, and not the sweep's to remove then */
    even_status settled = even_placing_settle(folder);
    *again = settled == EVEN_OK || settled == EVEN_ERR_NOT_FOUND || settled == EVEN_ERR_IN_USE; /* or another one has */
    return *again ? status : settled;
  }
  EVEN_TRY(status);
  status = even_folder_rename(partial, folder);
  if (status != EVEN_OK) {
    even_error kept = *even_error_last();
    *again = status == EVEN_ERR_IN_USE; /* the older one was given its name back */
    (void)!even_folder_rename(aside, folder);
    (void)even_error_restore(&kept);
  }
  return status;
}

static even_status move_aside(const char *partial, const char *parent, const char *folder, bool *older_here) {
  char *aside = NULL;
  bool again = true;
  EVEN_TRY(even_placing_name(folder, EVEN_CHECKPOINT_REPLACED, &aside));
  even_status status = EVEN_OK;
  for (int attempt = 0; attempt < MOST_ATTEMPTS && again; attempt++) {
    status = move_both(partial, folder, aside, &again);
    if (again) {
      even_clock_sleep_ns(PAUSE_NS << (attempt < MOST_DOUBLINGS ? attempt : MOST_DOUBLINGS));
    }
  }
  if (again) {
    status = even_fail(EVEN_ERR_IN_USE, "%s is being replaced by other writers, again and again", folder);
    (void)even_error_fix("give each job a folder of its own (--checkpoint-dir)");
  }
  if (status == EVEN_OK) { /* before the older one goes */
    status = even_folder_sync(parent);
  }
  *older_here = status == EVEN_OK && even_folder_rename(aside, partial) == EVEN_OK;
  if (status == EVEN_OK && !*older_here) {
    even_error_clear(); /* another writer has settled it, or the next will */
  }
  even_free(aside);
  return status;
}

even_status even_placing_replace(const char *partial, const char *parent, const char *folder, bool *older_here) {
  even_status status = even_folder_exchange(partial, folder);
  *older_here = status == EVEN_OK;
  return status == EVEN_ERR_UNSUPPORTED ? move_aside(partial, parent, folder, older_here) : status;
}
