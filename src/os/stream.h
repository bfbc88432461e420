/* Files that are written or read once, from front to back, in pieces. */
#ifndef EVEN_OS_STREAM_H
#define EVEN_OS_STREAM_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A new file under construction. The path is the caller's and must outlive the stream. */
typedef struct even_output {
  int fd;     /* -1 when not open */
  int direct; /* the same file past the page cache; 0: there is no such way */
  const char *path;
  uint64_t bytes; /* written so far */
} even_output;

/* Makes a file that must not exist yet (EVEN_ERR_IN_USE). Mode 0666 less umask. */
even_status even_output_create(const char *path, even_output *out) EVEN_MUST_USE;
/* Appends all of `data`, through EINTR and short writes; output->bytes is exact after a failure, too. */
even_status even_output_write(even_output *output, const void *data, size_t bytes) EVEN_MUST_USE;
/* From now on what even_output_write_at gets aligned (EVEN_DIRECT_ALIGNMENT in direct_file.h: address, offset, number
 * of bytes) goes past the page cache, where the file lies on a file system of this host that is known to gain by it.
 * What is not aligned goes through the page cache as before. */
void even_output_go_direct(even_output *output);
bool even_output_is_direct(const even_output *output);
/* Makes room for what will be written directly: EVEN_ERR_NO_SPACE where there is none. Nothing where the file is not
 * direct. */
even_status even_output_make_room(even_output *output, uint64_t offset, uint64_t bytes) EVEN_MUST_USE;
/* Writes all of `data` at `offset`; output->bytes stays as it is. Several threads may at a time. */
even_status even_output_write_at(even_output *output, uint64_t offset, const void *data, size_t bytes) EVEN_MUST_USE;
/* fsync and close; the file is durable (its name is with the folder's sync). On failure the file is removed. */
even_status even_output_finish(even_output *output) EVEN_MUST_USE;
/* Closes and removes the file. Does nothing where none is open. */
void even_output_drop(even_output *output);

typedef struct even_input {
  int fd;     /* -1 when not open */
  int direct; /* the same file past the page cache; 0: there is no such way */
  void *map;  /* all of it, to ask what is in the page cache; NULL: nobody can say */
  const char *path;
  uint64_t bytes; /* size when it was opened */
} even_input;

/* Opens a regular file for reading; a folder or a device is EVEN_ERR_INPUT. */
even_status even_input_open(const char *path, even_input *out) EVEN_MUST_USE;
/* Fills `buffer` up to `bytes`; *got is less only at the end of the file. */
even_status even_input_read(even_input *input, void *buffer, size_t bytes, size_t *got) EVEN_MUST_USE;
/* From now on what even_input_read_at reads aligned (as even_output_go_direct) comes past the page cache, where it is
 * not in it. A disk is then read at its own speed, by as many readers as there are threads. */
void even_input_go_direct(even_input *input);
/* Whether all of a range is in the page cache, or nobody can say: there it is read at the speed of memory. */
bool even_input_is_cached(const even_input *input, uint64_t offset, size_t bytes);
/* Fills `buffer` with the bytes at `offset`; EVEN_ERR_CORRUPT where the file ends before. Several threads may at a
 * time. */
even_status even_input_read_at(even_input *input, uint64_t offset, void *buffer, size_t bytes) EVEN_MUST_USE;
void even_input_close(even_input *input);

/* Makes the bytes of `output` at `offset` those of `input` there by sharing what holds them on the disk (FICLONERANGE:
 * XFS with reflink, btrfs, NFS 4.2 before such a server …); neither file sees what is written to the other later. Both
 * numbers are multiples of 64 KiB, which no file system's blocks are larger than; or the range ends where `input` does,
 * and `output` not behind it. False: it is not shared, and must be written, for the range may hold anything; why does
 * not matter (no such file system, another one, no room). output->bytes stays as it is. */
bool even_output_share(even_output *output, const even_input *input, uint64_t offset, uint64_t bytes);

#endif
