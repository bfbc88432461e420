/* A nameless scratch file whose reads and writes go past the page cache where the filesystem can do that: for
 * measuring a disk. The kernel frees it with its descriptor, whatever this process's end. */
#ifndef EVEN_OS_DIRECT_FILE_H
#define EVEN_OS_DIRECT_FILE_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EVEN_DIRECT_ALIGNMENT = 4096 }; /* of buffers, sizes and offsets */

typedef struct even_direct_file {
  int fd;      /* -1 when not open */
  bool direct; /* false: the page cache is in the way, a read says nothing of the disk */
} even_direct_file;

/* Errors: EVEN_ERR_NOT_FOUND, EVEN_ERR_PERMISSION, EVEN_ERR_NO_SPACE, EVEN_ERR_SYSTEM. */
even_status even_direct_file_open(const char *folder, even_direct_file *out) EVEN_MUST_USE;
void even_direct_file_close(even_direct_file *file);
/* All of `bytes`, or an error. */
even_status even_direct_file_write(even_direct_file *file, const void *data, size_t bytes,
                                   uint64_t offset) EVEN_MUST_USE;
even_status even_direct_file_read(even_direct_file *file, void *data, size_t bytes, uint64_t offset) EVEN_MUST_USE;
/* Waits until what was written is on the disk. */
even_status even_direct_file_sync(even_direct_file *file) EVEN_MUST_USE;

#endif
