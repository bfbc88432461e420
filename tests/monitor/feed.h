/* Ranks that never were: writes rings as ranks of given speeds would, for the monitor's tests. */
#ifndef EVEN_TEST_FEED_H
#define EVEN_TEST_FEED_H

#include <evenstep/telemetry.h>

enum { FEED_MOST_RANKS = 64 };

typedef struct feed {
  int fd;
  int ranks;
  even_telemetry *writers[FEED_MOST_RANKS];
  double speeds[FEED_MOST_RANKS]; /* samples a second */
  uint32_t batch;
  uint64_t now_ns;
  uint32_t step;
} feed;

void feed_open(feed *out, int ranks, uint32_t batch, uint64_t now_ns);
void feed_close(feed *made);
/* One step with these shares: spans and step records of every rank; time goes on by the slowest's. */
void feed_step(feed *made, const uint32_t *shares);
void feed_event(feed *made, int rank, even_event event, int64_t value, const char *words);
/* What es.log(name=number) writes. */
void feed_scalar(feed *made, int rank, uint32_t step, const char *name, double number);

#endif
