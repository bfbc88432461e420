/* The table of costs, as its two files and the groups that use it see it. */
#ifndef EVEN_COMM_COSTS_H
#define EVEN_COMM_COSTS_H

#include "base/text.h"

#include <evenstep/comm_costs.h>
#include <pthread.h>
#include <stdatomic.h>

typedef struct even_cost_entry {
  even_comm_cost cost;
  uint32_t fresh; /* samples that no file has */
} even_cost_entry;

struct even_comm_costs {
  pthread_mutex_t lock;
  _Atomic uint32_t holders;
  even_cost_entry *entries;
  size_t count;
  size_t capacity;
};

/* One more holder, who closes it too. Returns costs; NULL is allowed. */
even_comm_costs *even_comm_costs_hold(even_comm_costs *costs);

/* Takes an entry in, with the lock held: new, or merged into what is known of the same key by the samples of both (64
 * at most counted on either side). */
even_status even_comm_costs_merge(even_comm_costs *costs, const even_comm_cost *cost) EVEN_MUST_USE;
/* EVEN_ERR_ARGUMENT names what is wrong with the words or the size. */
even_status even_comm_costs_check(const even_comm_cost_key *key) EVEN_MUST_USE;
even_comm_cost_key even_comm_cost_key_of(const even_comm_cost *cost);

/* costs_file.c: the file's content. Reading takes all entries from `oldest` on, or, with an error, none; `origin` names
 * the text in errors. */
void even_comm_costs_write(even_comm_costs *costs, even_text *out);
even_status even_comm_costs_read(even_comm_costs *costs, const char *origin, const char *text, size_t length,
                                 int64_t oldest) EVEN_MUST_USE;

#endif
