/* The engine of several hosts: shared memory inside each, a leader of each over the network, one group of both. */
#ifndef EVEN_COMM_HOSTS_GROUP_H
#define EVEN_COMM_HOSTS_GROUP_H

#include "comm/engine.h"

#include <stdatomic.h>
#include <stdbool.h>

typedef struct even_hosts_group {
  EVEN_COMM_BASE;
  even_comm *inside;   /* this host's ranks, in the order of their ranks here */
  even_comm *between;  /* the hosts' leaders, in the order of the hosts; NULL on a rank that leads none */
  even_comm *everyone; /* all ranks; NULL: no messages and no all-to-all */
  int hosts;
  int own_host;
  int locals;    /* ranks on this host */
  int *members;  /* all ranks, host by host, in rank order on each */
  int *first;    /* where host h's begin in members; hosts + 1 of them */
  bool in_order; /* members are 0, 1, 2 …: what is cut by hosts lies in one piece */
  _Atomic uint64_t timeout_ns;
  atomic_flag busy;
  const char *doing; /* the call under way */
  _Atomic bool has_left;
  _Atomic bool ended; /* a call has failed */
  even_error end;
  /* for the call under way */
  size_t *counts;        /* one a rank */
  size_t *sizes;         /* one a rank */
  const void **pointers; /* one a rank */
  size_t *nothing;       /* zeros, one a rank */
  unsigned char *scratch;
  size_t scratch_bytes;
} even_hosts_group;

static inline even_hosts_group *even_hosts_of(even_comm *comm) {
  return (even_hosts_group *)(void *)comm;
}
static inline bool even_hosts_leads(const even_hosts_group *group) {
  return group->between != NULL;
}

/* ---- call.c ---- */

even_status even_hosts_begin(even_hosts_group *group, const char *what) EVEN_MUST_USE;
even_status even_hosts_end(even_hosts_group *group, even_status status) EVEN_MUST_USE;
/* What a step among this host's ranks came to; a failure is told to the other hosts, in their numbers. */
even_status even_hosts_inside(even_hosts_group *group, even_status status) EVEN_MUST_USE;
/* What the leader's step between the hosts came to, on all ranks of the host; the others' `status` is not looked at. */
even_status even_hosts_agree(even_hosts_group *group, even_status status) EVEN_MUST_USE;
/* At least that much memory, which stays until the group is closed. */
even_status even_hosts_scratch(even_hosts_group *group, size_t bytes) EVEN_MUST_USE;

/* ---- collectives.c ---- */

even_status even_hosts_all_reduce(even_comm *comm, const even_comm_reduction *job) EVEN_MUST_USE;
even_status even_hosts_reduce_scatter(even_comm *comm, const even_comm_scattering *job) EVEN_MUST_USE;
even_status even_hosts_all_gather(even_comm *comm, const even_comm_gathering *job) EVEN_MUST_USE;
even_status even_hosts_broadcast(even_comm *comm, unsigned char *data, size_t bytes, int root) EVEN_MUST_USE;
even_status even_hosts_barrier(even_comm *comm) EVEN_MUST_USE;

#endif
