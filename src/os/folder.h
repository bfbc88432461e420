/* Folders: what is in one, removing one, and who may write to one. */
#ifndef EVEN_OS_FOLDER_H
#define EVEN_OS_FOLDER_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct even_names {
  char **items; /* sorted by byte value */
  size_t count;
} even_names;

/* The names in a folder, without "." and "..". Free with even_names_free, also after a failure. */
even_status even_folder_names(const char *path, even_names *out) EVEN_MUST_USE;
/* Appends a copy of the text; what was there stays, also after a failure (EVEN_ERR_MEMORY). */
even_status even_names_add(even_names *names, const char *text) EVEN_MUST_USE;
void even_names_free(even_names *names);

/* Makes one folder, which must not exist (EVEN_ERR_IN_USE) and whose parent must. Mode 0777 less umask. */
even_status even_folder_create(const char *path) EVEN_MUST_USE;
/* The same for this user alone: mode 0700. */
even_status even_folder_create_private(const char *path) EVEN_MUST_USE;
/* Removes a folder and the files in it; it must not hold other folders, nor be a symbolic link. */
even_status even_folder_remove(const char *path) EVEN_MUST_USE;
/* The same for the folder behind `fd`, which `path` named when it was locked: files go from that folder whatever has
 * the name by now. `fd` stays open. */
even_status even_folder_remove_locked(const char *path, int fd) EVEN_MUST_USE;
/* Renames; `to` may be an empty folder or nothing. EVEN_ERR_IN_USE where it is a folder with something in it. */
even_status even_folder_rename(const char *from, const char *to) EVEN_MUST_USE;
/* Swaps two folders in one atomic step. EVEN_ERR_UNSUPPORTED where the file system cannot. */
even_status even_folder_exchange(const char *a, const char *b) EVEN_MUST_USE;
/* Whether something has this name (also where it cannot be opened). */
bool even_path_exists(const char *path);
/* Whether it is a folder (or a link to one). */
bool even_path_is_folder(const char *path);
/* Whether it is there and neither a file nor a folder (a device, a pipe, a socket), also behind a link; false where
 * that cannot be told. Such a one is not to be replaced. */
bool even_path_is_special(const char *path);
/* Whether it is a symbolic link, whatever that leads to; what is not there is none. */
even_status even_path_is_link(const char *path, bool *out) EVEN_MUST_USE;

/* Takes the folder's lock (flock), which the kernel drops when its holder dies, however it dies. Over a network other
 * hosts do not see it (even_is_shared in locks.h). *fd = -1 without an error where a living process holds it, or where
 * the folder was removed or renamed away meanwhile. EVEN_ERR_UNSUPPORTED where the file system has no locks. */
even_status even_folder_lock(const char *path, int *fd) EVEN_MUST_USE;
/* The same by `held`, of a folder that this process, or one that has ended since, had locked, and that may hold the
 * lock still. Owns `held`. */
even_status even_folder_lock_again(const char *path, int held, int *fd) EVEN_MUST_USE;
/* Whether a living process holds that lock; who asks is in nobody's way. false where there is no such folder.
 * EVEN_ERR_UNSUPPORTED where the file system has no locks. */
even_status even_folder_is_locked(const char *path, bool *out) EVEN_MUST_USE;
/* As even_folder_lock, for a folder that is not a symbolic link (an error there): for one whose files are to go. */
even_status even_folder_lock_itself(const char *path, int *fd) EVEN_MUST_USE;
/* Opens the folder, to ask later whether it still has its name; -1 where it cannot be opened. Close with
 * even_folder_unlock. */
int even_folder_hold(const char *path);
/* Whether `path` names the folder behind `fd`; false for -1. */
bool even_folder_is_at(const char *path, int fd);
/* Whether this user owns the folder behind `fd`; false where it cannot be told. */
bool even_folder_is_own(int fd);
/* The same for the folder of that name; a symbolic link is none. */
bool even_path_is_own_folder(const char *path);
/* When (wall clock, ns) the folder or one of its files was last written to. Not a symbolic link. */
even_status even_folder_written_ns(const char *path, uint64_t *out) EVEN_MUST_USE;
/* Releases; -1 is allowed. Children that were forked meanwhile do not hold the lock any longer. */
void even_folder_unlock(int fd);

#endif
