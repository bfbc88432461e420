/* Where the made-up NCCL's ranks meet: a file that threads and processes map, with a region of bytes for each. There is
 * no lock in it: a rank may be killed or stopped anywhere. */
#ifndef EVEN_TEST_FAKE_WORLD_H
#define EVEN_TEST_FAKE_WORLD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FAKE_RANKS = 16, FAKE_PATH = 120 };

/* Words of a rank are written by that rank alone. */
typedef struct fake_world {
  _Atomic uint32_t changed; /* grows with each of these */
  atomic_int arrived, left;
  atomic_int device[FAKE_RANKS];    /* 1 + device of the ranks that have come, 0 */
  atomic_ulong reached[FAKE_RANKS]; /* barriers */
  atomic_ulong signature[FAKE_RANKS];
  atomic_ulong sent[FAKE_RANKS][FAKE_RANKS], received[FAKE_RANKS][FAKE_RANKS];
  atomic_size_t message[FAKE_RANKS][FAKE_RANKS];
  atomic_bool has_grown; /* `grown` is written */
  char grown[FAKE_PATH];
} fake_world;

typedef struct fake_place {
  char path[FAKE_PATH];
  int fd;
  fake_world *world;
} fake_place;

bool fake_place_create(fake_place *out, const char *path); /* path NULL: a new one; false: it is there already */
/* Removes what this process has created and nobody has removed: ranks that never came cannot. */
void fake_places_forget(void);
void fake_place_open(fake_place *out, const char *path);
void fake_place_close(fake_place *place, bool remove);
void fake_place_write(const fake_place *place, int region, const void *data, size_t bytes);
void fake_place_read(const fake_place *place, int region, void *data, size_t bytes, size_t offset);
/* Something has changed. Sleeps until something has since `seen` was read, some milliseconds at most. */
void fake_world_change(fake_world *world);
void fake_world_wait(fake_world *world, uint32_t seen);

#endif
