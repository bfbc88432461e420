/* A changed copy of a file takes its place. */
#ifndef EVEN_OS_CHANGED_COPY_H
#define EVEN_OS_CHANGED_COPY_H

#include <evenstep/status.h>
#include <stdint.h>

typedef struct even_file_change {
  uint64_t bytes;     /* of its beginning are kept; UINT64_MAX: all */
  uint64_t at;        /* of this byte of them */
  unsigned char xor ; /* these bits are turned */
} even_file_change;

/* The file at `path` is replaced by a changed copy, which is written at `temporary` (of the same file system) first;
 * other names of it (hard links) stay as they were, and on any failure so does this one. Takes the same little memory
 * for any size. Not synced. EVEN_ERR_NOT_FOUND: there is no such file. */
even_status even_file_put_changed(const char *path, const char *temporary,
                                  const even_file_change *change) EVEN_MUST_USE;

#endif
