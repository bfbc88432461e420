/* Sequential writing and reading of one disk. */
#include "device/disk_speed.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"
#include "os/direct_file.h"
#include "os/host.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 4 << 20, MOST_BLOCKS = 128, LEAST_BLOCKS = 4 };

static double since(uint64_t start_ns) {
  return (double)(even_clock_ns() - start_ns) * 1e-9;
}

/* Neither zeros nor a short pattern: a disk or filesystem that compresses must not shine. */
static void fill(unsigned char *block) {
  uint64_t state = UINT64_C(0x9e3779b97f4a7c15);
  for (size_t i = 0; i < BLOCK; i += sizeof state) {
    state ^= state << 13; /* xorshift64, Marsaglia 2003 */
    state ^= state >> 7;
    state ^= state << 17;
    memcpy(block + i, &state, sizeof state);
  }
}

static even_status blocks_allowed(const char *folder, size_t *out) {
  even_disk disk;
  EVEN_TRY(even_disk_read(folder, &disk));
  uint64_t blocks = disk.free_bytes / 10 / BLOCK;
  if (blocks < LEAST_BLOCKS) {
    even_status status = even_fail(EVEN_ERR_NO_SPACE, "too little free space in %s to measure the disk", folder);
    (void)even_error_fix("free some space, or name an output file on another disk");
    return status;
  }
  *out = blocks < MOST_BLOCKS ? (size_t)blocks : MOST_BLOCKS;
  return EVEN_OK;
}

static even_status write_measure(even_direct_file *file, const void *block, size_t most, double seconds,
                                 size_t *written, even_disk_speed *out) {
  uint64_t start = even_clock_ns();
  size_t count = 0;
  while (count < most && (count < LEAST_BLOCKS || since(start) < seconds)) {
    EVEN_TRY(even_direct_file_write(file, block, BLOCK, (uint64_t)count * BLOCK));
    count++;
  }
  EVEN_TRY(even_direct_file_sync(file));
  out->write_mb_per_second = (double)count * (double)BLOCK / since(start) * 1e-6;
  *written = count;
  return EVEN_OK;
}

static even_status read_measure(even_direct_file *file, void *block, size_t written, double seconds,
                                even_disk_speed *out) {
  uint64_t start = even_clock_ns();
  size_t count = 0;
  while (count < LEAST_BLOCKS || since(start) < seconds) {
    EVEN_TRY(even_direct_file_read(file, block, BLOCK, (uint64_t)(count % written) * BLOCK));
    count++;
  }
  out->read_mb_per_second = (double)count * (double)BLOCK / since(start) * 1e-6;
  return EVEN_OK;
}

even_status even_disk_speed_measure(const char *folder, double seconds, even_disk_speed *out) {
  even_direct_file file = {.fd = -1};
  unsigned char *memory = NULL;
  size_t most = 0;
  size_t written = 0;
  *out = (even_disk_speed){.write_mb_per_second = NAN, .read_mb_per_second = NAN};
  EVEN_TRY(blocks_allowed(folder, &most));
  EVEN_TRY(even_alloc(BLOCK + EVEN_DIRECT_ALIGNMENT, 1, (void **)&memory));
  unsigned char *block = memory + (EVEN_DIRECT_ALIGNMENT - (uintptr_t)memory % EVEN_DIRECT_ALIGNMENT);
  fill(block);
  even_status status = even_direct_file_open(folder, &file);
  if (status == EVEN_OK) {
    out->direct = file.direct;
    status = write_measure(&file, block, most, seconds / 2, &written, out);
  }
  if (status == EVEN_OK && file.direct) {
    status = read_measure(&file, block, written, seconds / 2, out);
  }
  even_direct_file_close(&file);
  even_free(memory);
  return status;
}
