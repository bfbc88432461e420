/* How fast the disk behind a folder writes and reads, measured. */
#ifndef EVEN_DEVICE_DISK_SPEED_H
#define EVEN_DEVICE_DISK_SPEED_H

#include <evenstep/status.h>
#include <stdbool.h>

typedef struct even_disk_speed {
  double write_mb_per_second; /* 10^6 bytes, until they are on the disk */
  double read_mb_per_second;  /* NaN where the page cache cannot be avoided */
  bool direct;
} even_disk_speed;

/* Writes, then reads, a nameless file in blocks of 4 MiB, one after another, for about `seconds` in all; it takes
 * at most 512 MiB or a tenth of the free space. Errors: EVEN_ERR_NO_SPACE (less than 16 MiB may be taken), those of
 * even_direct_file_open. */
even_status even_disk_speed_measure(const char *folder, double seconds, even_disk_speed *out) EVEN_MUST_USE;

#endif
