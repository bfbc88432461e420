/* Where the made-up NCCL's ranks meet: a file that threads and processes map, with a region of bytes for each. */
#ifndef EVEN_TEST_FAKE_WORLD_H
#define EVEN_TEST_FAKE_WORLD_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

enum { FAKE_RANKS = 16, FAKE_PATH = 120 };

typedef struct fake_world {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int ranks, arrived, left;
  int device[FAKE_RANKS]; /* 1 + device of the ranks that have come, 0 */
  unsigned long phase;
  int in_phase;
  unsigned long signature[FAKE_RANKS];
  unsigned long sent[FAKE_RANKS][FAKE_RANKS], received[FAKE_RANKS][FAKE_RANKS];
  size_t message[FAKE_RANKS][FAKE_RANKS];
  char grown[FAKE_PATH];
} fake_world;

typedef struct fake_place {
  char path[FAKE_PATH];
  int fd;
  fake_world *world;
} fake_place;

bool fake_place_create(fake_place *out, const char *path); /* path NULL: a new one; false: it is there already */
void fake_place_open(fake_place *out, const char *path);
void fake_place_close(fake_place *place, bool remove);
void fake_place_write(const fake_place *place, int region, const void *data, size_t bytes);
void fake_place_read(const fake_place *place, int region, void *data, size_t bytes, size_t offset);

#endif
