/* A folder with a name of its own, its owner's lock on it, and a keeper that removes it. */
#include "orchestrator/host_memory.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/folder.h"
#include "os/path.h"
#include "os/random.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define PREFIX "evenstep-memory-"
enum { DIGITS = 16, NAMES = 64 };

static const char *place_of_all(void) {
  const char *place = getenv("EVENSTEP_MEMORY_DIR");
  return place == NULL || place[0] == '\0' ? EVEN_HOST_MEMORY_PLACE : place;
}

/* Checkpoints, and what was to become one. */
static void remove_dead(const char *path, int lock) {
  even_names names = {NULL, 0};
  even_text inner = EVEN_TEXT_EMPTY;
  even_status status = even_folder_names(path, &names);
  for (size_t i = 0; status == EVEN_OK && i < names.count; i++) {
    even_text_clear(&inner);
    even_text_format(&inner, "%s/%s", path, names.items[i]);
    status = even_text_status(&inner);
    if (status == EVEN_OK && even_path_is_folder(inner.data)) {
      status = even_folder_remove(inner.data);
    }
  }
  if (status == EVEN_OK) {
    (void)!even_folder_remove_locked(path, lock);
  }
  even_text_free(&inner);
  even_names_free(&names);
}

/* Of agents that were killed with their keepers. */
static void sweep(const char *place) {
  even_names names = {NULL, 0};
  even_text path = EVEN_TEXT_EMPTY;
  even_status status = even_folder_names(place, &names);
  for (size_t i = 0; status == EVEN_OK && i < names.count; i++) {
    int lock = -1;
    if (strncmp(names.items[i], PREFIX, strlen(PREFIX)) != 0) {
      continue;
    }
    even_text_clear(&path);
    even_text_format(&path, "%s/%s", place, names.items[i]);
    status = even_text_status(&path);
    if (status == EVEN_OK && even_folder_lock_itself(path.data, &lock) == EVEN_OK && lock >= 0) {
      if (even_folder_is_own(lock)) {
        remove_dead(path.data, lock);
      }
      even_folder_unlock(lock);
    }
  }
  even_text_free(&path);
  even_names_free(&names);
  even_error_clear(); /* what cannot be swept away stays */
}

/* One under a new name, and its lock: not `had` where an agent that starts just now found it before it was locked, took
 * it for a dead one's, and removes it. */
static even_status try_name(even_host_memory *memory, const char *place, bool *had) {
  char digits[DIGITS + 1];
  *had = false;
  EVEN_TRY(even_random_hex(digits, DIGITS));
  even_text_clear(&memory->folder);
  EVEN_TRY(even_path_absolute(place, &memory->folder));
  even_text_format(&memory->folder, "/%s%s", PREFIX, digits);
  EVEN_TRY(even_text_status(&memory->folder));
  EVEN_TRY(even_folder_create_private(memory->folder.data));
  even_status status = even_folder_lock(memory->folder.data, &memory->lock);
  *had = status == EVEN_OK && memory->lock >= 0;
  if (status == EVEN_ERR_UNSUPPORTED) {
    even_error_clear(); /* nobody sweeps there then, either */
    *had = true;
    return EVEN_OK;
  }
  if (status != EVEN_OK) {
    const even_error kept = *even_error_last();
    (void)!even_folder_remove(memory->folder.data);
    (void)even_error_restore(&kept);
  }
  return status;
}

static even_status make(even_host_memory *memory, const char *place) {
  bool had = false;
  for (int i = 0; i < NAMES && !had; i++) {
    EVEN_TRY(try_name(memory, place, &had));
  }
  even_status status = had ? EVEN_OK : even_fail(EVEN_ERR_IN_USE, "folders that are made in %s do not stay", place);
  if (had) {
    status = even_keeper_start(memory->folder.data, &memory->keeper);
  }
  if (had && status != EVEN_OK) {
    const even_error kept = *even_error_last();
    (void)!even_folder_remove(memory->folder.data);
    (void)even_error_restore(&kept);
  }
  return status;
}

even_status even_host_memory_open(even_host_memory **out) {
  const char *place = place_of_all();
  *out = NULL;
  EVEN_TRY(EVEN_NEW(out));
  (*out)->lock = -1;
  (*out)->keeper = (even_keeper){.pid = -1, .pipe = -1};
  sweep(place);
  even_status status = make(*out, place);
  if (status != EVEN_OK) {
    (void)even_error_prefix("--checkpoint-memory");
    (void)even_error_fix("EVENSTEP_MEMORY_DIR names another memory file system (tmpfs) than %s",
                         EVEN_HOST_MEMORY_PLACE);
    even_host_memory_close(*out);
    *out = NULL;
  }
  return status;
}

even_status even_host_memory_take(const char *folder, int lock, const even_keeper *keeper, even_host_memory **out) {
  even_keeper its = *keeper;
  even_status status = EVEN_NEW(out);
  if (status != EVEN_OK) {
    even_keeper_stop(&its);
    even_folder_unlock(lock);
    return status;
  }
  (*out)->lock = lock;
  (*out)->keeper = its;
  even_text_add(&(*out)->folder, folder);
  status = even_text_status(&(*out)->folder);
  if (status != EVEN_OK) {
    even_host_memory_close(*out);
    *out = NULL;
  }
  return status;
}

void even_host_memory_close(even_host_memory *memory) {
  if (memory != NULL) {
    even_keeper_stop(&memory->keeper);
    even_folder_unlock(memory->lock);
    even_text_free(&memory->folder);
    even_free(memory);
  }
}

bool even_host_memory_has(const even_host_memory *memory, const char *path) {
  return memory != NULL && strncmp(path, memory->folder.data, memory->folder.length) == 0 &&
         path[memory->folder.length] == '/';
}
