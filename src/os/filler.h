/* A file that takes what room its file system has left: a real full disk, for tests of what follows. */
#ifndef EVEN_OS_FILLER_H
#define EVEN_OS_FILLER_H

#include <evenstep/status.h>
#include <stdint.h>

/* Makes the file, or empties it; *fd (close-on-exec) is the caller's. */
even_status even_filler_open(const char *path, int *fd) EVEN_MUST_USE;
/* Writes until nothing more fits, and counts into *bytes: again and again, for others may give room back. Errors: those
 * of writing but EVEN_ERR_NO_SPACE. */
even_status even_filler_fill(int fd, uint64_t *bytes) EVEN_MUST_USE;
/* Gives all room back: the file is removed. */
even_status even_filler_close(const char *path, int fd) EVEN_MUST_USE;

#endif
