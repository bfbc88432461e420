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

/* Where `rank`'s part lies; `begin`: its place where they lie one after the other. */
static const unsigned char *part_of(const even_comm_scattering *job, int rank, size_t begin) {
  return job->places != NULL ? job->places[rank] : job->input + begin * job->element;
}

/* What of a part of `count` elements is in a round. */
static size_t in_round(const scatter *work, size_t count, size_t round) {
  size_t first = round * work->cell;
  return first >= count ? 0 : even_least_size(count - first, work->cell);
}

static void begin_round(even_ucx_group *group, const scatter *work, size_t round) {
  const even_comm_scattering *job = work->job;
  even_ucx_transfer *transfer = even_ucx_transfers_of(group, round, false);
  size_t own = in_round(work, job->counts[group->rank], round);
  size_t begin = 0;
  (void)pthread_mutex_lock(&group->lock);
  for (int rank = 0; rank < group->ranks; begin += job->counts[rank], rank++) {
    size_t other = in_round(work, job->counts[rank], round);
    if (rank == group->rank) {
      continue;
    }
    if (own > 0) {
      even_ucx_receive(group, transfer++, rank, even_ucx_call_tag(group, rank, even_ucx_scatter_step(round)),
                       even_ucx_staging_of(group, rank, round), own * job->element);
    }
    if (other > 0) {
      even_ucx_send(group, transfer++, rank, even_ucx_call_tag(group, group->rank, even_ucx_scatter_step(round)),
                    part_of(job, rank, begin) + round * work->cell * job->element, other * job->element);
    }
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
  group->sources[group->rank] = part_of(job, group->rank, work->own_begin) + first * job->element;
  if (count > 0) {
    job->reduce(&target, 1, group->sources, (size_t)group->ranks, count, job->divisor);
  }
}

static even_status scatter_large(even_ucx_group *group, const scatter *work) {
  size_t rounds = work->job->largest / work->cell + (work->job->largest % work->cell != 0);
  EVEN_TRY(even_ucx_need_staging(group));
  EVEN_TRY(even_ucx_call_meet(group, 0, NULL));
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
  return even_ucx_call_end(group, job->places == NULL && job->bytes <= EVEN_UCX_SMALL_BYTES
                                      ? scatter_small(group, &work)
                                      : scatter_large(group, &work));
}
