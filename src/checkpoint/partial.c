/* Partial folders: making one, and sweeping away those of dead writers.
 *
 * On a file system of this host alone the folder's lock tells. Where other hosts may see it they do not see that lock:
 * a file in it (the sign) is locked, too, which NFS does between hosts, and says whose it is. A writer of this host is
 * dead when the folder's lock is free; any other one when the sign's lock is free and nothing has changed for long, for
 * a mount may keep all locks to itself (nolock, local_lock), and says nothing of it. */
#include "checkpoint/partial.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/text.h"
#include "checkpoint/placing.h"
#include "os/clock.h"
#include "os/folder.h"
#include "os/host.h"
#include "os/lock_holder.h"
#include "os/locks.h"
#include "os/path.h"

#include <evenstep/checkpoint.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* A rival that sweeps may take the folder between mkdir and flock; it cannot go on for ever. */
enum { MOST_ATTEMPTS = 16, MOST_IDENTITY = 256 };

static const uint64_t LOOK_NS = 1000000;
static const char sign_name[] = "evenstep.writing";

/* Where locks may not reach: how long nothing in a partial folder may have changed while its writer lives. Writers
 * write all the time; a fetch from a device takes seconds, attributes over a network are up to a minute old. */
#define QUIET_NS (UINT64_C(600) * 1000000000u)

typedef enum writer_state { WRITER_GONE, WRITER_LIVES, WRITER_DEAD, WRITER_UNKNOWN } writer_state;

/* With a name before it. */
static bool ends_with(const char *text, const char *end) {
  return strcmp(text, end) != 0 && even_ends_with(text, end);
}

static even_status sign_of(const char *partial, char **out) {
  even_text end = EVEN_TEXT_EMPTY;
  even_text_format(&end, "/%s", sign_name);
  even_status status = even_text_status(&end);
  if (status == EVEN_OK) {
    status = even_placing_name(partial, even_text_string(&end), out);
  }
  even_text_free(&end);
  return status;
}

/* By the sign alone. `locked`: the caller has the folder's lock, which its writer had, were it a living one here. */
static even_status ask_sign(const char *partial, bool locked, writer_state *out) {
  char *path = NULL;
  char here[MOST_IDENTITY];
  even_sign sign;
  EVEN_TRY(sign_of(partial, &path));
  even_host_identity(here, sizeof here);
  even_sign_ask(path, &sign);
  *out = sign.held                                                        ? WRITER_LIVES
         : locked && sign.text[0] != '\0' && strcmp(sign.text, here) == 0 ? WRITER_DEAD
                                                                          : WRITER_UNKNOWN;
  even_free(path);
  return EVEN_OK;
}

/* *lock: the folder's, where it could be had. */
static even_status look_at(const char *partial, int *lock, writer_state *out) {
  even_status status = even_folder_lock_itself(partial, lock);
  if (status == EVEN_ERR_UNSUPPORTED) {
    return ask_sign(partial, false, out);
  }
  EVEN_TRY(status);
  if (*lock < 0) {
    *out = even_path_exists(partial) ? WRITER_LIVES : WRITER_GONE;
    return EVEN_OK;
  }
  if (!even_is_shared(*lock)) {
    *out = WRITER_DEAD;
    return EVEN_OK;
  }
  status = ask_sign(partial, true, out);
  if (status != EVEN_OK) {
    even_folder_unlock(*lock);
    *lock = -1;
  }
  return status;
}

static even_status tell_in_use(const char *partial) {
  even_text who = EVEN_TEXT_EMPTY;
  even_lock_add_holder(partial, false, &who); /* the error is kept in logs */
  (void)even_fail(EVEN_ERR_IN_USE, "%s is being written by another process%s%s", partial, who.length > 0 ? ", on " : "",
                  even_text_string(&who));
  even_text_free(&who);
  return even_error_fix("wait until that job has ended, or give each job its own folder (--checkpoint-dir)");
}

/* After the name was found taken: frees it, or says that the next is to be tried. */
static even_status free_name(const char *partial, bool *taken) {
  writer_state state = WRITER_GONE;
  int lock = -1;
  *taken = false;
  EVEN_TRY(look_at(partial, &lock, &state));
  even_status status = EVEN_OK;
  if (state == WRITER_LIVES) {
    status = tell_in_use(partial);
  } else if (state == WRITER_DEAD) {
    status = even_folder_remove_locked(partial, lock);
  }
  *taken = state == WRITER_UNKNOWN;
  even_folder_unlock(lock);
  return status;
}

static even_status name_partial(const char *folder, int number, char **out) {
  char end[sizeof ".evenstep-" + 12 + sizeof EVEN_CHECKPOINT_PARTIAL] = EVEN_CHECKPOINT_PARTIAL;
  if (number > 0) {
    (void)snprintf(end, sizeof end, ".evenstep-%d%s", number, EVEN_CHECKPOINT_PARTIAL);
  }
  return even_placing_name(folder, end, out);
}

static even_status make_sign(even_partial *partial) {
  char here[MOST_IDENTITY];
  char *path = NULL;
  even_host_identity(here, sizeof here);
  EVEN_TRY(sign_of(partial->path, &path));
  even_status status = even_sign_make(path, here, &partial->sign);
  even_free(path);
  return status;
}

/* One that sweeps has it for a moment, to look at it. */
static even_status lock_own(even_partial *partial) {
  even_status status = even_folder_lock_itself(partial->path, &partial->lock);
  for (int i = 0; i < MOST_ATTEMPTS && status == EVEN_OK && partial->lock < 0 && even_path_exists(partial->path); i++) {
    even_clock_sleep_ns(LOOK_NS);
    status = even_folder_lock_itself(partial->path, &partial->lock);
  }
  return status;
}

/* Of the folder that the caller has just made. *taken: a rival took it. */
static even_status occupy(even_partial *partial, bool with_sign, bool *taken) {
  even_status status = lock_own(partial);
  *taken = status == EVEN_OK && partial->lock < 0;
  if (*taken || !with_sign || (partial->lock >= 0 && !even_is_shared(partial->lock))) {
    return EVEN_OK; /* without locks: write all the same */
  }
  status = make_sign(partial);
  if (status != EVEN_OK) {
    even_partial_discard(partial);
  }
  return status;
}

static even_status try_name(const char *folder, int number, bool with_sign, even_partial *out, bool *unknown,
                            bool *again) {
  EVEN_TRY(name_partial(folder, number, &out->path));
  even_status status = even_folder_create(out->path);
  *unknown = *again = false;
  if (status == EVEN_ERR_IN_USE) {
    status = free_name(out->path, unknown);
    *again = status == EVEN_OK;
  } else if (status == EVEN_OK) {
    status = occupy(out, with_sign, again);
  }
  if (status != EVEN_OK || *again) {
    even_partial_free(out);
  }
  return status;
}

static even_status make(const char *folder, bool with_sign, even_partial *out) {
  int number = 0;
  *out = EVEN_PARTIAL_NONE;
  for (int attempt = 0; attempt < MOST_ATTEMPTS; attempt++) {
    bool unknown = false;
    bool again = false;
    EVEN_TRY(try_name(folder, number, with_sign, out, &unknown, &again));
    if (!again) {
      return EVEN_OK;
    }
    number += unknown;
  }
  even_status status =
      even_fail(EVEN_ERR_IN_USE, "%s%s is taken by another process again and again", folder, EVEN_CHECKPOINT_PARTIAL);
  (void)even_error_fix("wait, or remove the unfinished ones (*%s) beside it when no job writes them",
                       EVEN_CHECKPOINT_PARTIAL);
  return status;
}

even_status even_partial_make(const char *folder, even_partial *out) {
  return make(folder, true, out);
}

even_status even_partial_reserve(const char *folder, even_partial *out) {
  return make(folder, false, out);
}

static even_status is_ours(const even_partial *partial, bool *out) {
  char *path = NULL;
  *out = true;
  if (partial->sign < 0) {
    return EVEN_OK;
  }
  EVEN_TRY(sign_of(partial->path, &path));
  even_status status = even_sign_is_there(path, partial->sign, out);
  even_free(path);
  return status;
}

/* Closed first: NFS gives a file that is open another name, and the folder could not be removed. */
static even_status remove_sign(even_partial *partial) {
  char *path = NULL;
  if (partial->sign < 0) {
    return EVEN_OK;
  }
  even_lock_release(partial->sign);
  partial->sign = -1;
  EVEN_TRY(sign_of(partial->path, &path));
  even_status status = even_sign_remove(path);
  even_free(path);
  return status;
}

even_status even_partial_check(const even_partial *partial) {
  bool ours = false;
  EVEN_TRY(is_ours(partial, &ours));
  if (ours) {
    return EVEN_OK;
  }
  even_status status = even_fail(EVEN_ERR_STATE, "%s was taken for a dead writer's, and removed", partial->path);
  (void)even_error_fix("mount that file system with locks between hosts, or choose another --checkpoint-dir");
  return status;
}

even_status even_partial_complete(even_partial *partial) {
  EVEN_TRY(even_partial_check(partial));
  return remove_sign(partial);
}

void even_partial_release(even_partial *partial) {
  even_lock_release(partial->sign);
  even_folder_unlock(partial->lock);
  partial->lock = partial->sign = -1;
}

void even_partial_discard(even_partial *partial) {
  even_error kept = *even_error_last(); /* the cause, not what the cleaning meets */
  bool ours = true;
  if (is_ours(partial, &ours) != EVEN_OK || ours) {
    even_lock_release(partial->sign);
    partial->sign = -1;
    (void)!even_folder_remove(partial->path);
  }
  even_partial_release(partial);
  (void)even_error_restore(&kept);
}

void even_partial_free(even_partial *partial) {
  even_partial_release(partial);
  even_free(partial->path);
  partial->path = NULL;
}

/* ---- sweeping ---- */

/* First its name goes, which its writer needs to go on: were it alive after all, it fails, and leaves nothing half. */
static even_status remove_by_name(const char *partial) {
  char *away = NULL;
  if (ends_with(partial, EVEN_CHECKPOINT_PARTIAL EVEN_CHECKPOINT_PARTIAL)) { /* no writer's name */
    return even_folder_remove(partial);
  }
  EVEN_TRY(even_placing_name(partial, EVEN_CHECKPOINT_PARTIAL, &away));
  even_status status = even_folder_rename(partial, away);
  if (status == EVEN_OK) {
    status = even_folder_remove(away);
  }
  even_free(away);
  return status;
}

/* By the clock of the file system, which is another host's. */
static even_status is_quiet(const char *partial, const even_partial *own, bool *out) {
  uint64_t written = 0;
  uint64_t now = 0;
  EVEN_TRY(even_folder_written_ns(partial, &written));
  EVEN_TRY(even_folder_written_ns(own->path, &now));
  *out = written < now && now - written > QUIET_NS;
  return EVEN_OK;
}

static even_status sweep_one(const char *partial, const even_partial *own) {
  writer_state state = WRITER_GONE;
  bool quiet = false;
  int lock = -1;
  EVEN_TRY(look_at(partial, &lock, &state));
  even_status status = EVEN_OK;
  if (lock >= 0 ? !even_folder_is_own(lock) : !even_path_is_own_folder(partial)) {
    state = WRITER_LIVES; /* its user's matter */
  }
  if (state == WRITER_DEAD) {
    status = even_folder_remove_locked(partial, lock);
  } else if (state == WRITER_UNKNOWN) {
    status = is_quiet(partial, own, &quiet);
    if (status == EVEN_OK && quiet) {
      status = remove_by_name(partial);
    }
  }
  even_folder_unlock(lock);
  return status;
}

static void sweep_name(const char *parent, const char *name, const even_partial *own) {
  even_text path = EVEN_TEXT_EMPTY;
  if (strcmp(name, even_path_name(own->path)) == 0) {
    return;
  }
  even_text_format(&path, "%s/%s", parent, name);
  if (even_text_status(&path) == EVEN_OK && ends_with(name, EVEN_CHECKPOINT_PARTIAL)) {
    (void)!sweep_one(even_text_string(&path), own);
  } else if (even_text_status(&path) == EVEN_OK && ends_with(name, EVEN_CHECKPOINT_REPLACED)) {
    path.data[path.length - strlen(EVEN_CHECKPOINT_REPLACED)] = '\0';
    (void)!even_placing_settle(path.data);
  }
  even_text_free(&path);
}

void even_partial_sweep(const char *parent, const even_partial *own) {
  even_error kept = *even_error_last(); /* what is left behind is no error of the caller */
  even_names names = {NULL, 0};
  if (even_folder_names(parent, &names) == EVEN_OK) {
    for (size_t i = 0; i < names.count; i++) {
      sweep_name(parent, names.items[i], own);
    }
  }
  even_names_free(&names);
  (void)even_error_restore(&kept);
}
