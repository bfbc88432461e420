/* Which of an engine's ways a collective goes, by size: what is known of their costs decides, and what the calls
 * themselves cost. All ways give the same bits. One rank (rank 0 of a group) chooses and says so in the words that
 * announce the call; the others go by what it says. */
#ifndef EVEN_COMM_WAYS_H
#define EVEN_COMM_WAYS_H

#include "comm/costs.h"

#include <stdint.h>

#define EVEN_WAYS_MOST 4
#define EVEN_WAYS_CLASSES 24 /* by powers of four */
#define EVEN_WAYS_TRIAL 6    /* calls: as many of the current way, then of the other */

/* What is known of the calls of one size. */
typedef struct even_ways_size {
  uint8_t current;
  uint8_t other; /* the way that it is tried against */
  bool started;
  uint32_t call;                         /* of the trial and the pause after it */
  uint32_t pause;                        /* calls from one trial to the next */
  uint64_t cost[2][EVEN_WAYS_TRIAL / 2]; /* ns for 1024 bytes: of the trial's calls of the current way, of the other */
  double seconds[EVEN_WAYS_MOST];        /* of a call of the class's size; 0: not known */
  uint32_t tried[EVEN_WAYS_MOST];        /* trials of each in this group */
} even_ways_size;

/* All that decides which way a call goes. Where no words announce calls, all ranks keep the same: rank 0's. */
typedef struct even_ways_choice {
  int forced; /* -1: none */
  even_ways_size sizes[EVEN_WAYS_CLASSES];
} even_ways_choice;

/* Of one collective. */
typedef struct even_ways {
  const char *collective;
  const char *const *names; /* `count` of them */
  int count;
  size_t least; /* bytes of calls that have a choice */
  size_t most;
  size_t small; /* calls of less begin with way `before` where nothing is known; 0: none do */
  int before;
  even_ways_choice choice;
  uint64_t began;         /* the call under way; 0: not measured */
  even_comm_costs *costs; /* NULL, or what the trials add to; held */
  char shape[EVEN_COMM_COSTS_SHAPE];
  char engine[EVEN_COMM_COSTS_WORD];
} even_ways;

/* The first way is taken until something speaks for another. `names` stay. */
void even_ways_start(even_ways *ways, const char *collective, const char *const *names, int count);
/* The choice is of calls of these sizes (the least and the largest of even_ways_sizes where this is not said). */
void even_ways_set_range(even_ways *ways, size_t least, size_t most);
/* Calls of less than `bytes` begin with way `way` where nothing is known of their costs, and not with the first. */
void even_ways_begin_small(even_ways *ways, size_t bytes, int way);
/* From now on by these costs alone, and whatever is learnt goes there. Costs NULL: it begins anew, and nothing is kept.
 */
void even_ways_follow(even_ways *ways, even_comm_costs *costs, const char *shape, const char *engine);
/* The number of a way, -1 without one of that name. */
int even_ways_named(const even_ways *ways, const char *name);
/* Always way `way`; -1: chosen again. */
void even_ways_force(even_ways *ways, int way);
/* Lets go of the costs. */
void even_ways_end(even_ways *ways);

/* The way for the next call of so many bytes. */
int even_ways_next(const even_ways *ways, size_t bytes);
/* That call begins, all ranks being there, and has ended well: now_ns by one clock. */
void even_ways_call_begins(even_ways *ways, uint64_t now_ns);
void even_ways_call_ends(even_ways *ways, size_t bytes, uint64_t now_ns);
/* Whether the next call of so many bytes is one that is measured. */
bool even_ways_measures(const even_ways *ways, size_t bytes);
/* After even_ways_call_ends: where that call was the last of a trial, what was decided by it; NULL else. */
even_ways_size *even_ways_decided(even_ways *ways, size_t bytes);
/* The sizes that are measured at first use, rising, and the largest of them that has a choice up to `limit` bytes where
 * the costs of one are not known; 0 where they all are. */
#define EVEN_WAYS_SIZES 5
extern const size_t even_ways_sizes[EVEN_WAYS_SIZES];
size_t even_ways_lacking(const even_ways *ways, size_t limit);
/* Whether the costs of all ways are known at this size: of two ways, after the first EVEN_WAYS_TRIAL calls. */
bool even_ways_known(const even_ways *ways, size_t bytes);
/* Appends what was chosen by which figures, for people; nothing where there was no choice. */
void even_ways_describe(const even_ways *ways, char *text, size_t bytes);

#endif
