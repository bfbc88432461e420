/* Losses that jump, by what the last ones were: their median, and the median of their distances from it (MAD; Hampel,
 * "The influence curve and its role in robust estimation", JASA 1974), which single jumps do not move. Pure. */
#ifndef EVEN_MONITOR_SPIKE_H
#define EVEN_MONITOR_SPIKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
  EVEN_SPIKE_WINDOW = 128, /* losses */
  EVEN_SPIKE_LEAST = 32,   /* before so many nothing is told */
  EVEN_SPIKE_DEVIATIONS = 10
};

typedef struct even_spikes {
  double losses[EVEN_SPIKE_WINDOW]; /* a ring */
  size_t count;                     /* ever, in it */
  size_t counted;                   /* of these when the limit was made */
  double deviations;                /* above the median is a jump; 0: EVEN_SPIKE_DEVIATIONS, INFINITY: none is */
  double median;
  double limit;
  bool inside; /* the last loss was above it */
  uint32_t since;
} even_spikes;

/* Takes a step's loss (what is not finite is passed over). True where a spike begins (`inside` is true then: the loss
 * is above `limit`) or ends. A loss that stays where it jumped to is the usual one after half a window. */
bool even_spikes_take(even_spikes *spikes, uint32_t step, double loss);
/* Another loss, or the same again from an earlier step on: what was before says nothing; `deviations` stays. */
void even_spikes_forget(even_spikes *spikes);

#endif
