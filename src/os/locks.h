/* Locks by flock, which the kernel drops when their holder dies, however it dies; and files whose lock tells that their
 * maker lives. */
#ifndef EVEN_OS_LOCKS_H
#define EVEN_OS_LOCKS_H

#include <evenstep/status.h>
#include <stdbool.h>

/* Takes the lock of what is open as `fd`: 0, or the errno of why not; EWOULDBLOCK: another holds it. Whoever only asks
 * is waited for. */
int even_lock_take(int fd);

/* Whether other hosts may see what is open as `fd`: not on a file system that is known to be this host's alone. There a
 * folder's lock is none for them: NFS has locks between hosts for files that are open for writing, and none for folders
 * (flock(2), "NFS details"; the kernel's nfs_dir_operations has no flock). */
bool even_is_shared(int fd);

/* Makes a file of this text, which must not be there yet, and locks it; without a lock where the file system has none.
 * Hold *fd as long as you live. */
even_status even_sign_make(const char *path, const char *text, int *fd) EVEN_MUST_USE;

typedef struct even_sign {
  bool held;      /* by a living process, on this host or, where locks reach so far, on another */
  char text[256]; /* its first bytes; "" where there is no such file, or it cannot be read */
} even_sign;

void even_sign_ask(const char *path, even_sign *out);
/* Whether `path` still names the file behind `fd`. */
even_status even_sign_is_there(const char *path, int fd, bool *out) EVEN_MUST_USE;
/* Removes it; that it is not there is an error. */
even_status even_sign_remove(const char *path) EVEN_MUST_USE;
/* Releases; -1 is allowed. */
void even_lock_release(int fd);

#endif
