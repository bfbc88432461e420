/* Whole files, and writes that survive a power cut. */
#ifndef EVEN_OS_FILE_H
#define EVEN_OS_FILE_H

#include "base/text.h"

#include <stddef.h>

/* Appends the whole file (at most limit_bytes, else EVEN_ERR_INPUT) to `out`. Never waits: a FIFO, a device or a
 * socket is EVEN_ERR_INPUT, here and below. */
even_status even_file_read(const char *path, size_t limit_bytes, even_text *out) EVEN_MUST_USE;
/* Appends the first bytes of the file (at most `bytes`) to `out`; a folder counts as empty. */
even_status even_file_start(const char *path, size_t bytes, even_text *out) EVEN_MUST_USE;
/* As even_file_read, for a file with a secret in it: EVEN_ERR_PERMISSION unless it is this user's own, and nobody else
 * may read or write it. A symbolic link is none. */
even_status even_file_read_private(const char *path, size_t limit_bytes, even_text *out) EVEN_MUST_USE;
/* Replaces `path` by `data`: temporary file, fsync, rename, fsync of the folder. On any
 * failure the old file stays as it was and the temporary one is removed. */
even_status even_file_replace(const char *path, const void *data, size_t bytes) EVEN_MUST_USE;
/* The same for a file that only its owner may read (mode 0600). */
even_status even_file_replace_private(const char *path, const void *data, size_t bytes) EVEN_MUST_USE;
/* Renames; a file at `to` is replaced. */
even_status even_file_rename(const char *from, const char *to) EVEN_MUST_USE;
/* Gives a file a second name, which must not be there yet; a symbolic link gets it for itself. Fails where the file
 * system has no links, or no more of them. */
even_status even_file_link(const char *from, const char *to) EVEN_MUST_USE;
/* Removes; a file that is not there is fine. */
even_status even_file_remove(const char *path) EVEN_MUST_USE;
/* Writes all of `data` to fd, through EINTR and short writes. */
even_status even_file_write_all(int fd, const void *data, size_t bytes) EVEN_MUST_USE;
/* What tells a file from a copy of it, also where several hosts see the same one: its number on its file system, and
 * when it was written last. */
enum { EVEN_FILE_MARK = 64 };
even_status even_file_mark(const char *path, char out[EVEN_FILE_MARK]) EVEN_MUST_USE;
/* Makes a folder and those above it, each new one's name synced in its parent; one that exists is fine. Mode 0777 less
 * umask. */
even_status even_folder_make(const char *path) EVEN_MUST_USE;
/* fsyncs a folder, so that renames in it are durable. */
even_status even_folder_sync(const char *path) EVEN_MUST_USE;

#endif
