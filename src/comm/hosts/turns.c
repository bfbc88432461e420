/* Reduce-scatter and all-gather over several hosts in turns: inside each, between the leaders, inside each again. What
 * is large goes so piece by piece, each a part of every rank's, so that a leader needs no room for all of it. */
#include "comm/hosts/group.h"

#include "base/fail.h"

#include <string.h>

/* A piece of what is cut by ranks. */
typedef struct turn {
  const size_t *counts; /* of each rank's part */
  size_t element;
  size_t pieces;
  size_t number;
  size_t total; /* elements of the piece; of each rank: group->parts */
} turn;

/* Where `rank`'s part begins in what lies in rank order, in elements. */
static size_t begin_of(const size_t *counts, int rank) {
  size_t begin = 0;
  for (int before = 0; before < rank; before++) {
    begin += counts[before];
  }
  return begin;
}

/* Of the part of `rank`, counted from its own beginning. */
static even_hosts_range slice_of(const turn *at, int rank) {
  return even_hosts_piece_of((even_hosts_range){.count = at->counts[rank]}, at->pieces, at->number, at->element);
}

/* Where the piece of this rank's own part lies: `part` may be NULL where that has nothing. */
static unsigned char *own_slice(const even_hosts_group *group, const turn *at, unsigned char *part) {
  size_t from = slice_of(at, group->rank).from;
  return from == 0 ? part : part + from * at->element;
}

static turn turn_of(even_hosts_group *group, const size_t *counts, size_t element, size_t pieces, size_t number) {
  turn at = {.counts = counts, .element = element, .pieces = pieces, .number = number};
  for (int rank = 0; rank < group->ranks; rank++) {
    group->parts[rank] = slice_of(&at, rank).count;
    at.total += group->parts[rank];
  }
  return at;
}

/* Of what goes through a leader's scratch. */
static size_t pieces_of(const even_hosts_group *group, size_t bytes) {
  return bytes == 0 ? 1 : (bytes - 1) / group->piece_bytes + 1;
}

/* Copies a piece from where it lies in rank order to the order of the hosts, or back. */
static void reorder(const even_hosts_group *group, const turn *at, unsigned char *by_rank, unsigned char *by_host,
                    bool back) {
  for (int i = 0; i < group->ranks && at->total > 0; i++) {
    int rank = group->members[i];
    unsigned char *part = by_rank + (begin_of(at->counts, rank) + slice_of(at, rank).from) * at->element;
    size_t bytes = group->parts[rank] * at->element;
    if (bytes > 0) {
      (void)memcpy(back ? part : by_host, back ? by_host : part, bytes);
    }
    by_host += bytes;
  }
}

/* Parts of the host's ranks, one after the other at `block` of the leader, to them (or, gathers, from them); `own` is
 * where this rank's is. */
static even_status move_parts(even_hosts_group *group, const turn *at, unsigned char *block, unsigned char *own,
                              bool gathers) {
  const int *locals = &group->members[group->first[group->own_host]];
  size_t begin = 0;
  const void **leaders = group->pointers;               /* on the leader: where everybody's part is */
  const void **others = group->pointers + group->ranks; /* on all: where the leader's or one's own is */
  for (int local = 0; local < group->locals; local++) {
    size_t bytes = group->parts[locals[local]] * at->element;
    leaders[local] = block == NULL ? NULL : block + begin; /* NULL: nobody has anything, or who does not lead */
    others[local] = own;
    group->sizes[local] = even_hosts_leads(group) ? bytes : 0;
    group->nothing[local] = 0;
    begin += bytes;
  }
  group->nothing[0] = group->parts[group->rank] * at->element; /* of what goes to or comes from the leader */
  even_status status =
      gathers ? even_comm_all_to_all(group->inside, others, group->nothing, (void *const *)leaders, group->sizes)
              : even_comm_all_to_all(group->inside, leaders, group->sizes, (void *const *)others, group->nothing);
  return status;
}

static size_t largest_of(const even_hosts_group *group) {
  size_t largest = 0;
  for (int host = 0; host < group->hosts; host++) {
    largest = group->sizes[host] > largest ? group->sizes[host] : largest;
  }
  return largest;
}

/* ---- reduce-scatter ---- */

/* The leader's step: `sums` lie in the order of the hosts; this host's block of the result comes to `output`. */
static even_status scatter_between(even_hosts_group *group, const even_comm_scattering *job, const unsigned char *sums,
                                   unsigned char *output) {
  even_comm_scattering outer = *job;
  outer.input = sums;
  outer.output = output;
  outer.counts = group->sizes;
  outer.largest = largest_of(group);
  return even_comm_engine_of(group->between)->reduce_scatter(group->between, &outer);
}

/* Each rank is alone on its host: there is nothing to sum or to copy there. */
static even_status scatter_alone(even_hosts_group *group, const even_comm_scattering *job) {
  even_hosts_sum_counts(group, job->counts, group->sizes);
  return even_hosts_agree(group, scatter_between(group, job, job->input, job->output));
}

/* This host's sums of a piece, at the leader's `sums` in the order of the hosts. */
static even_status reduce_slices(even_hosts_group *group, const even_comm_scattering *job, const turn *at,
                                 unsigned char *sums) {
  for (int i = 0; i < group->ranks; i++) {
    int rank = group->members[i];
    even_hosts_range slice = slice_of(at, rank);
    const unsigned char *input = job->input + (begin_of(job->counts, rank) + slice.from) * job->element;
    if (slice.count > 0) {
      EVEN_TRY(even_hosts_reduce_inside(group, input, sums, slice.count, job->dtype, job->op));
    }
    if (even_hosts_leads(group)) {
      sums += slice.count * job->element;
    }
  }
  return EVEN_OK;
}

/* The same of all at once: fewer calls, and in another place where it has to be brought into that order. */
static even_status reduce_all(even_hosts_group *group, const even_comm_scattering *job, const turn *at,
                              unsigned char *sums) {
  bool reorders = even_hosts_leads(group) && !group->in_order;
  unsigned char *into = reorders ? sums + job->bytes : sums;
  EVEN_TRY(even_hosts_reduce_inside(group, job->input, into, job->total, job->dtype, job->op));
  if (reorders) {
    reorder(group, at, into, sums, false);
  }
  return EVEN_OK;
}

static even_status scatter_piece(even_hosts_group *group, const even_comm_scattering *job, const turn *at) {
  bool leads = even_hosts_leads(group);
  bool whole = at->pieces == 1;
  even_comm_scattering piece = *job;
  piece.total = at->total;
  piece.bytes = at->total * job->element;
  EVEN_TRY(leads ? even_hosts_scratch(group, (whole && !group->in_order ? 2 : 1) * piece.bytes + 1) : EVEN_OK);
  unsigned char *sums = leads ? group->scratch : job->output; /* where nothing comes to */
  EVEN_TRY(whole ? reduce_all(group, job, at, sums) : reduce_slices(group, job, at, sums));
  even_hosts_sum_counts(group, group->parts, group->sizes);
  unsigned char *block = leads ? sums + begin_of(group->sizes, group->own_host) * job->element : NULL;
  EVEN_TRY(even_hosts_agree(group, leads ? scatter_between(group, &piece, sums, block) : EVEN_OK));
  return move_parts(group, at, block, own_slice(group, at, job->output), false);
}

even_status even_hosts_scatter_in_turns(even_hosts_group *group, const even_comm_scattering *job) {
  size_t pieces = pieces_of(group, job->bytes);
  if (group->hosts == group->ranks) {
    return scatter_alone(group, job);
  }
  for (size_t number = 0; number < pieces; number++) {
    turn at = turn_of(group, job->counts, job->element, pieces, number);
    EVEN_TRY(scatter_piece(group, job, &at));
  }
  return EVEN_OK;
}

/* ---- all-gather ---- */

/* The leader's step: the parts of this host lie at `block`; all come to `output`, in the order of the hosts. */
static even_status gather_between(even_hosts_group *group, const even_comm_gathering *job, const unsigned char *block,
                                  unsigned char *output) {
  even_comm_gathering outer = *job;
  outer.input = block;
  outer.output = output;
  outer.counts = group->sizes;
  outer.largest = largest_of(group) * job->element;
  return even_comm_engine_of(group->between)->all_gather(group->between, &outer);
}

/* On the leader in its output where the ranks of a host are neighbours, else by way of its scratch. */
static even_status gather_piece(even_hosts_group *group, const even_comm_gathering *job, const turn *at) {
  bool leads = even_hosts_leads(group);
  unsigned char *own = own_slice(group, at, (unsigned char *)(uintptr_t)job->input); /* only read */
  even_comm_gathering piece = *job;
  piece.total = at->total;
  piece.bytes = at->total * job->element;
  even_hosts_sum_counts(group, group->parts, group->sizes);
  size_t begin = begin_of(group->sizes, group->own_host) * job->element;
  EVEN_TRY(leads && !group->in_order ? even_hosts_scratch(group, piece.bytes + 1) : EVEN_OK);
  unsigned char *all = group->in_order ? job->output : group->scratch;
  unsigned char *block = leads && at->total > 0 ? all + begin : NULL;
  EVEN_TRY(move_parts(group, at, block, own, true));
  even_hosts_sum_counts(group, group->parts, group->sizes);
  EVEN_TRY(even_hosts_agree(group, leads ? gather_between(group, &piece, block, all) : EVEN_OK));
  if (leads && !group->in_order) {
    reorder(group, at, job->output, all, true);
  }
  return EVEN_OK;
}

even_status even_hosts_gather_in_turns(even_hosts_group *group, const even_comm_gathering *job) {
  size_t pieces = group->in_order ? 1 : pieces_of(group, job->bytes);
  for (size_t number = 0; number < pieces; number++) {
    turn at = turn_of(group, job->counts, job->element, pieces, number);
    EVEN_TRY(gather_piece(group, job, &at));
  }
  return group->locals > 1 ? even_comm_broadcast(group->inside, job->output, job->bytes, 0) : EVEN_OK;
}
