/* Sums over several hosts of which each host's leader brings one: what goes between the hosts is the caller's own. */
#ifndef EVEN_COMM_HOSTS_LEG_H
#define EVEN_COMM_HOSTS_LEG_H

#include <evenstep/comm.h>
#include <stdbool.h>

/* Where this rank is in a group over several hosts. */
typedef struct even_hosts_place {
  int hosts;
  int host;   /* this rank's */
  bool leads; /* it, rank `host` of the leaders' group */
} even_hosts_place;

/* False where the group is of another engine: all ranks are on one host, or each is taken for a host of its own. */
bool even_hosts_place_of(const even_comm *comm, even_hosts_place *out);

/* What a leader does with the others: makes `total` of its host's sums. */
typedef even_status even_hosts_leg(even_comm *leaders, void *context);

/* Collective. The `values` (F32) of a host's ranks are added up, in rank order, at the leader's `values`; it makes the
 * leg, and what is at its `total` then comes to that of its host's ranks. `total` may not overlap `values`. Errors are
 * those of an all-reduce; a leg's own is every rank's. */
even_status even_hosts_reduce_by_leg(even_comm *comm, float *values, float *total, size_t count, even_hosts_leg *leg,
                                     void *context) EVEN_MUST_USE;

#endif
