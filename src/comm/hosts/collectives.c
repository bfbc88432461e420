/* The collectives over several hosts: inside each, between the leaders, inside each again. Sums are formed in rank
 * order on each host, then in the order of the hosts: the same bits on all ranks. 16-bit floats are rounded once on
 * each host and once more between them. */
#include "comm/hosts/group.h"

#include "base/fail.h"

/* The operation among the ranks of a host: the division of AVG is for the end. */
static even_reduce_op inner_op(even_reduce_op op) {
  return op == EVEN_AVG ? EVEN_SUM : op;
}

even_status even_hosts_reduce_inside(even_hosts_group *group, const void *input, void *output, size_t count,
                                     even_dtype dtype, even_reduce_op op) {
  group->counts[0] = count;
  for (int local = 1; local < group->locals; local++) {
    group->counts[local] = 0;
  }
  return even_comm_reduce_scatter(group->inside, input, output, group->counts, dtype, inner_op(op));
}

/* ---- all-reduce, barrier, broadcast ---- */

/* One after the other: inside, between, inside. */
static even_status reduce_in_turns(even_hosts_group *group, const even_comm_reduction *job) {
  EVEN_TRY(even_hosts_reduce_inside(group, job->data, job->data, job->count, job->dtype, job->op));
  even_status status = EVEN_OK;
  if (even_hosts_leads(group)) {
    status = even_comm_engine_of(group->between)->all_reduce(group->between, job);
  }
  EVEN_TRY(even_hosts_agree(group, status));
  return group->locals > 1 ? even_comm_broadcast(group->inside, job->data, job->bytes, 0) : EVEN_OK;
}

static even_status run_all_reduce(even_hosts_group *group, void *job, int lanes) {
  return lanes == 0 ? reduce_in_turns(group, job) : even_hosts_stream(group, job, lanes);
}

even_status even_hosts_all_reduce(even_comm *comm, const even_comm_reduction *job) {
  even_hosts_group *group = even_hosts_of(comm);
  even_comm_reduction own = *job;
  EVEN_TRY(even_hosts_begin(group, EVEN_CALL_ALL_REDUCE, job->dtype, job->op, 0, job->count));
  return even_hosts_end(group, even_hosts_by_cost(group, EVEN_HOSTS_ALL_REDUCE, job->bytes, run_all_reduce, &own));
}

even_status even_hosts_barrier(even_comm *comm) {
  even_hosts_group *group = even_hosts_of(comm);
  EVEN_TRY(even_hosts_begin(group, EVEN_CALL_BARRIER, 0, 0, 0, 0));
  return even_hosts_end(group, even_hosts_meet(group));
}

/* The host of a rank, and its place among that host's ranks. */
static int host_of(const even_hosts_group *group, int rank, int *local) {
  int host = 0;
  int at = 0;
  while (group->members[at] != rank) {
    at++;
  }
  while (at >= group->first[host + 1]) {
    host++;
  }
  *local = at - group->first[host];
  return host;
}

typedef struct broadcasting {
  unsigned char *data;
  size_t bytes;
  int root;
  int host; /* of the root */
  int local;
} broadcasting;

static even_status broadcast_in_turns(even_hosts_group *group, const broadcasting *job) {
  even_status status = EVEN_OK;
  if (job->host == group->own_host) {
    EVEN_TRY(even_comm_broadcast(group->inside, job->data, job->bytes, job->local));
  }
  if (even_hosts_leads(group)) {
    status = even_comm_broadcast(group->between, job->data, job->bytes, job->host);
  }
  EVEN_TRY(even_hosts_agree(group, status));
  return job->host != group->own_host && group->locals > 1
             ? even_comm_broadcast(group->inside, job->data, job->bytes, 0)
             : EVEN_OK;
}

/* The group between all ranks, for a call of this one. */
static even_comm *everyone(even_hosts_group *group) {
  even_comm_set_timeout(group->everyone, (double)atomic_load(&group->timeout_ns) * 1e-9);
  return group->everyone;
}

static even_status run_broadcast(even_hosts_group *group, void *context, int lanes) {
  const broadcasting *job = context;
  if (lanes == EVEN_HOSTS_DIRECT) {
    return even_comm_broadcast(everyone(group), job->data, job->bytes, job->root);
  }
  return lanes == 0 ? broadcast_in_turns(group, job)
                    : even_hosts_relay_broadcast(group, job->data, job->bytes, job->host, job->local, lanes);
}

even_status even_hosts_broadcast(even_comm *comm, unsigned char *data, size_t bytes, int root) {
  even_hosts_group *group = even_hosts_of(comm);
  broadcasting job = {.data = data, .bytes = bytes, .root = root};
  job.host = host_of(group, root, &job.local);
  EVEN_TRY(even_hosts_begin(group, EVEN_CALL_BROADCAST, EVEN_U8, 0, root, bytes));
  return even_hosts_end(group, even_hosts_by_cost(group, EVEN_HOSTS_BROADCAST, bytes, run_broadcast, &job));
}

/* ---- what is cut by ranks is cut by hosts between them ---- */

void even_hosts_sum_counts(const even_hosts_group *group, const size_t *counts, size_t *sizes) {
  for (int host = 0; host < group->hosts; host++) {
    sizes[host] = 0;
    for (int at = group->first[host]; at < group->first[host + 1]; at++) {
      sizes[host] += counts[group->members[at]];
    }
  }
}

static even_status run_reduce_scatter(even_hosts_group *group, void *job, int lanes) {
  return lanes == 0 ? even_hosts_scatter_in_turns(group, job) : even_hosts_relay_scatter(group, job, lanes);
}

even_status even_hosts_reduce_scatter(even_comm *comm, const even_comm_scattering *job) {
  even_hosts_group *group = even_hosts_of(comm);
  even_comm_scattering own = *job;
  EVEN_TRY(even_hosts_begin(group, EVEN_CALL_REDUCE_SCATTER, job->dtype, job->op, 0, job->total));
  return even_hosts_end(group,
                        even_hosts_by_cost(group, EVEN_HOSTS_REDUCE_SCATTER, job->bytes, run_reduce_scatter, &own));
}

static even_status run_all_gather(even_hosts_group *group, void *job, int lanes) {
  if (lanes == EVEN_HOSTS_DIRECT) {
    return even_comm_engine_of(group->everyone)->all_gather(everyone(group), job);
  }
  return lanes == 0 ? even_hosts_gather_in_turns(group, job) : even_hosts_relay_gather(group, job, lanes);
}

even_status even_hosts_all_gather(even_comm *comm, const even_comm_gathering *job) {
  even_hosts_group *group = even_hosts_of(comm);
  even_comm_gathering own = *job;
  EVEN_TRY(even_hosts_begin(group, EVEN_CALL_ALL_GATHER, job->dtype, 0, 0, job->total));
  return even_hosts_end(group, even_hosts_by_cost(group, EVEN_HOSTS_ALL_GATHER, job->bytes, run_all_gather, &own));
}
