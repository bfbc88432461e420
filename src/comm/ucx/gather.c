/* Over UCX, what moves data and does not reduce them: all-gather and broadcast; and the barrier. All-to-alls:
 * exchange.c. */
#include "comm/ucx/group.h"

#include "base/checked.h"
#include "base/fail.h"

#include <stdint.h>
#include <string.h>

static void copy(void *target, const void *source, size_t bytes) {
  if (bytes > 0 && target != source) {
    memmove(target, source, bytes);
  }
}

/* ---- all-gather ---- */

static even_status gather_small(even_ucx_group *group, const even_comm_gathering *job) {
  size_t own = job->counts[group->rank] * job->element;
  unsigned char *to = job->output;
  copy(group->outgoing[group->rank].data, job->input, own);
  EVEN_TRY(even_ucx_call_meet(group, own, NULL));
  for (int rank = 0; rank < group->ranks; rank++) {
    size_t bytes = job->counts[rank] * job->element;
    copy(to, rank == group->rank ? job->input : group->arrived[rank].data, bytes);
    to += bytes;
  }
  return EVEN_OK;
}

/* Where the part of `rank` goes. */
static unsigned char *place_of(const even_comm_gathering *job, int rank) {
  unsigned char *at = job->output;
  for (int before = 0; before < rank; before++) {
    at += job->counts[before] * job->element;
  }
  return job->places != NULL ? job->places[rank] : at;
}

/* All parts at once, or (`pairs`) from and to one rank after the other, so that no link has several senders. */
static even_status gather_large(even_ucx_group *group, const void *context, int pairs) {
  const even_comm_gathering *job = context;
  size_t own = job->counts[group->rank] * job->element;
  size_t begun = 0;
  copy(place_of(job, group->rank), job->input, own);
  for (int step = 1; step < group->ranks; step++) {
    int from = (group->rank + group->ranks - step) % group->ranks;
    int to = (group->rank + step) % group->ranks;
    size_t bytes = job->counts[from] * job->element;
    (void)pthread_mutex_lock(&group->lock);
    if (bytes > 0) {
      even_ucx_receive(group, &group->transfers[begun++], from, even_ucx_call_tag(group, from, 1), place_of(job, from),
                       bytes);
    }
    if (own > 0) {
      even_ucx_send(group, &group->transfers[begun++], to, even_ucx_call_tag(group, group->rank, 1), job->input, own);
    }
    (void)pthread_mutex_unlock(&group->lock);
    if (pairs != 0) {
      EVEN_TRY(even_ucx_wait(group, group->transfers, begun));
      begun = 0;
    }
  }
  return even_ucx_wait(group, group->transfers, begun);
}

even_status even_ucx_all_gather(even_comm *comm, const even_comm_gathering *job) {
  even_ucx_group *group = even_ucx_of(comm);
  EVEN_TRY(even_ucx_call_begin(group, EVEN_CALL_ALL_GATHER, job->dtype, 0, 0, job->total, job->counts));
  return even_ucx_call_end(group, job->places == NULL && job->largest <= EVEN_UCX_SMALL_BYTES
                                      ? gather_small(group, job)
                                      : even_ucx_by_cost(group, EVEN_UCX_ALL_GATHER, job->bytes, gather_large, job));
}

/* ---- broadcast ---- */

static even_status broadcast_small(even_ucx_group *group, unsigned char *data, size_t bytes, int root) {
  bool sends = group->rank == root;
  if (sends) {
    copy(group->outgoing[root].data, data, bytes);
  }
  EVEN_TRY(even_ucx_call_meet(group, sends ? bytes : 0, NULL));
  if (!sends) {
    copy(data, group->arrived[root].data, bytes);
  }
  return EVEN_OK;
}

typedef struct part {
  unsigned char *at;
  size_t bytes;
} part;

/* The part that `rank` passes on. */
static part part_of(const even_ucx_group *group, unsigned char *data, size_t bytes, int rank) {
  size_t size = (bytes / (size_t)group->ranks / EVEN_COMM_LINE + 1) * EVEN_COMM_LINE;
  size_t begin = even_least_size((size_t)rank * size, bytes);
  return (part){.at = data + begin, .bytes = even_least_size(size, bytes - begin)};
}

typedef struct broadcasting {
  unsigned char *data;
  size_t bytes;
  int root;
} broadcasting;

/* The root sends every rank a part, its own part to all; everybody passes its part on: no link carries more than about
 * twice the data (van de Geijn's scatter and all-gather). */
static even_status broadcast_parts(even_ucx_group *group, const broadcasting *job) {
  unsigned char *data = job->data;
  size_t bytes = job->bytes;
  size_t count = 0;
  int own = group->rank;
  int root = job->root;
  part mine = part_of(group, data, bytes, own);
  part roots = part_of(group, data, bytes, root);
  even_ucx_transfer *first = group->transfers;
  (void)pthread_mutex_lock(&group->lock);
  if (own != root) {
    even_ucx_receive(group, &first[count++], root, even_ucx_call_tag(group, root, 1), mine.at, mine.bytes);
    even_ucx_receive(group, &first[count++], root, even_ucx_call_tag(group, root, 2), roots.at, roots.bytes);
  }
  for (int rank = 0; rank < group->ranks; rank++) {
    part other = part_of(group, data, bytes, rank);
    if (rank == own || rank == root) {
      continue;
    }
    if (own == root) {
      even_ucx_send(group, &first[count++], rank, even_ucx_call_tag(group, own, 1), other.at, other.bytes);
      even_ucx_send(group, &first[count++], rank, even_ucx_call_tag(group, own, 2), mine.at, mine.bytes);
    } else {
      even_ucx_receive(group, &first[count++], rank, even_ucx_call_tag(group, rank, 3), other.at, other.bytes);
    }
  }
  (void)pthread_mutex_unlock(&group->lock);
  if (own != root) {
    EVEN_TRY(even_ucx_wait(group, first, 1));
    (void)pthread_mutex_lock(&group->lock);
    for (int rank = 0; rank < group->ranks; rank++) {
      if (rank != own && rank != root) {
        even_ucx_send(group, &first[count++], rank, even_ucx_call_tag(group, own, 3), mine.at, mine.bytes);
      }
    }
    (void)pthread_mutex_unlock(&group->lock);
  }
  return even_ucx_wait(group, first, count);
}

/* One step, and the root's link carries all. */
static even_status broadcast_whole(even_ucx_group *group, const broadcasting *job) {
  size_t count = 0;
  uint64_t tag = even_ucx_call_tag(group, job->root, 1);
  (void)pthread_mutex_lock(&group->lock);
  if (group->rank != job->root) {
    even_ucx_receive(group, &group->transfers[count++], job->root, tag, job->data, job->bytes);
  }
  for (int step = 1; step < group->ranks && group->rank == job->root; step++) {
    even_ucx_send(group, &group->transfers[count++], (group->rank + step) % group->ranks, tag, job->data, job->bytes);
  }
  (void)pthread_mutex_unlock(&group->lock);
  return even_ucx_wait(group, group->transfers, count);
}

static even_status broadcast_large(even_ucx_group *group, const void *job, int whole) {
  return whole != 0 ? broadcast_whole(group, job) : broadcast_parts(group, job);
}

even_status even_ucx_broadcast(even_comm *comm, unsigned char *data, size_t bytes, int root) {
  even_ucx_group *group = even_ucx_of(comm);
  const broadcasting job = {.data = data, .bytes = bytes, .root = root};
  EVEN_TRY(even_ucx_call_begin(group, EVEN_CALL_BROADCAST, EVEN_U8, 0, root, bytes, NULL));
  return even_ucx_call_end(group, bytes <= EVEN_UCX_SMALL_BYTES
                                      ? broadcast_small(group, data, bytes, root)
                                      : even_ucx_by_cost(group, EVEN_UCX_BROADCAST, bytes, broadcast_large, &job));
}

even_status even_ucx_barrier(even_comm *comm) {
  even_ucx_group *group = even_ucx_of(comm);
  EVEN_TRY(even_ucx_call_begin(group, EVEN_CALL_BARRIER, 0, 0, 0, 0, NULL));
  return even_ucx_call_end(group, even_ucx_call_meet(group, 0, NULL));
}
