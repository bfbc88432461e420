/* Reduce-scatter over UCX: the others' parts of what this rank owns come from each of them directly, in rounds, and are
 * reduced in rank order. */
#include "comm/ucx/reduce.h"

#include "base/checked.h"
#include "base/fail.h"

#include <string.h>

typedef struct scatter {
  const even_comm_scattering *job;
  size_t cell; /* elements of a rank's part that one other sends at a time */
  size_t own_begin;
} scatter;

/* Where `rank`'s part lies. */
static const unsigned char *part_of(const even_comm_scattering *job, int rank) {
  size_t begin = 0;
  for (int before = 0; before < rank && job->places == NULL; before++) {
    begin += job->counts[before];
  }
  return job->places != NULL ? job->places[rank] : job->input + begin * job->element;
}

/* What of a part of `count` elements is in a round. */
static size_t in_round(const scatter *work, size_t count, size_t round) {
  size_t first = round * work->cell;
  return first >= count ? 0 : even_least_size(count - first, work->cell);
}

/* A round's exchange with two of the others. With the group's lock held. */
static void begin_pair(even_ucx_group *group, const scatter *work, size_t round, int step) {
  const even_comm_scattering *job = work->job;
  even_ucx_transfer *transfer = even_ucx_transfers_of(group, round, false) + 2 * (step - 1);
  int from = (group->rank + group->ranks - step) % group->ranks;
  int to = (group->rank + step) % group->ranks;
  size_t own = in_round(work, job->counts[group->rank], round);
  size_t other = in_round(work, job->counts[to], round);
  uint64_t number = even_ucx_scatter_step(round);
  if (own > 0) {
    even_ucx_receive(group, transfer, from, even_ucx_call_tag(group, from, number),
                     even_ucx_staging_of(group, from, round), own * job->element);
  }
  if (other > 0) {
    even_ucx_send(group, transfer + 1, to, even_ucx_call_tag(group, group->rank, number),
                  part_of(job, to) + round * work->cell * job->element, other * job->element);
  }
}

static void begin_round(even_ucx_group *group, const scatter *work, size_t round) {
  (void)pthread_mutex_lock(&group->lock);
  for (int step = 1; step < group->ranks; step++) {
    begin_pair(group, work, round, step);
  }
  (void)pthread_mutex_unlock(&group->lock);
}

static void reduce_round(even_ucx_group *group, const scatter *work, size_t round) {
  const even_comm_scattering *job = work->job;
  size_t first = round * work->cell;
  size_t count = in_round(work, job->counts[group->rank], round);
  void *target = job->output + first * job->element;
  for (int rank = 0; rank < group->ranks; rank++) {
    group->sources[rank] = even_ucx_staging_of(group, rank, round);
  }
  group->sources[group->rank] = part_of(job, group->rank) + first * job->element;
  if (count > 0) {
    job->reduce(&target, 1, group->sources, (size_t)group->ranks, count, job->divisor);
  }
}

/* With one of the others after the other, so that no link has several senders. */
static even_status scatter_in_pairs(even_ucx_group *group, const scatter *work, size_t rounds) {
  for (size_t round = 0; round < rounds; round++) {
    for (int step = 1; step < group->ranks; step++) {
      (void)pthread_mutex_lock(&group->lock);
      begin_pair(group, work, round, step);
      (void)pthread_mutex_unlock(&group->lock);
      EVEN_TRY(even_ucx_wait(group, even_ucx_transfers_of(group, round, false), 2 * (size_t)group->ranks));
    }
    reduce_round(group, work, round);
  }
  return EVEN_OK;
}

static even_status scatter_large(even_ucx_group *group, const void *context, int pairs) {
  const scatter *work = context;
  size_t rounds = work->job->largest / work->cell + (work->job->largest % work->cell != 0);
  if (pairs != 0) {
    return scatter_in_pairs(group, work, rounds);
  }
  begin_round(group, work, 0);
  for (size_t round = 0; round < rounds; round++) {
    if (round + 1 < rounds) {
      begin_round(group, work, round + 1);
    }
    EVEN_TRY(even_ucx_wait(group, even_ucx_transfers_of(group, round, false), 2 * (size_t)group->ranks));
    reduce_round(group, work, round);
  }
  return EVEN_OK;
}

static even_status scatter_small(even_ucx_group *group, const scatter *work) {
  const even_comm_scattering *job = work->job;
  void *target = job->output;
  if (job->bytes > 0) {
    memcpy(group->outgoing[group->rank].data, job->input, job->bytes);
  }
  EVEN_TRY(even_ucx_call_meet(group, job->bytes, NULL));
  for (int rank = 0; rank < group->ranks; rank++) {
    const unsigned char *data = rank == group->rank ? job->input : group->arrived[rank].data;
    group->sources[rank] = data == NULL ? NULL : data + work->own_begin * job->element;
  }
  if (job->counts[group->rank] > 0) {
    job->reduce(&target, 1, group->sources, (size_t)group->ranks, job->counts[group->rank], job->divisor);
  }
  return EVEN_OK;
}

even_status even_ucx_reduce_scatter(even_comm *comm, const even_comm_scattering *job) {
  even_ucx_group *group = even_ucx_of(comm);
  size_t line = EVEN_COMM_LINE / job->element;
  scatter work = {.job = job, .cell = even_ucx_chunk_bytes(group->ranks) / EVEN_COMM_LINE * line};
  for (int rank = 0; rank < group->rank; rank++) {
    work.own_begin += job->counts[rank];
  }
  EVEN_TRY(even_ucx_call_begin(group, EVEN_CALL_REDUCE_SCATTER, job->dtype, job->op, 0, job->total, job->counts));
  if (job->places == NULL && job->bytes <= EVEN_UCX_SMALL_BYTES) {
    return even_ucx_call_end(group, scatter_small(group, &work));
  }
  even_status status = even_ucx_need_staging(group);
  return even_ucx_call_end(
      group,
      status == EVEN_OK ? even_ucx_by_cost(group, EVEN_UCX_REDUCE_SCATTER, job->bytes, scatter_large, &work) : status);
}
