/* Broadcast, reduce-scatter and all-gather in pieces: while one piece crosses between the hosts, the ranks of a host
 * sum or spread others. What crosses is carried by the host's first rank, or by all that carry a lane, each its part of
 * every piece. No sum's order depends on it. */
#include "comm/hosts/group.h"

#include "base/checked.h"
#include "base/fail.h"

#include <string.h>

/* So many pieces at most and at least, but none of less for each host, and none of more than the group's piece_bytes.
 */
#define PIECES 16u
#define LEAST_PIECES 2u
#define LEAST_BYTES ((size_t)512 << 10)
/* Pieces that are summed before the first one has to be back. */
#define AHEAD 2u
/* So many pieces of a reduce-scatter are under way, each in a place of its own. */
#define SUMMED (AHEAD + 1)

typedef struct relay relay;
/* What of a piece crosses over a lane; on its carrier's thread. */
typedef even_status relay_piece(const relay *work, int lane, size_t piece);

typedef struct relayed {
  relay *work;
  int lane;
} relayed;

struct relay {
  even_hosts_group *group;
  int lanes;
  size_t pieces;
  relay_piece *cross;
  relayed lane[EVEN_COMM_LANES];
  /* of a broadcast */
  unsigned char *data;
  size_t bytes;
  int host; /* the root's, and its number there */
  int local;
  /* of the others: each host has a block, one after the other */
  const even_comm_scattering *scattering;
  const even_comm_gathering *gathering;
  size_t element;
  unsigned char *all;  /* in which the blocks lie; NULL: in `sums`, */
  unsigned char *sums; /* where SUMMED pieces have room, one beside the other */
  size_t room;         /* of each of these; in elements */
};

typedef even_hosts_range range;

static size_t pieces_of(const even_hosts_group *group, size_t bytes) {
  size_t pieces = even_least_size(bytes / LEAST_BYTES / (size_t)group->hosts, PIECES);
  size_t needed = bytes / group->piece_bytes + 1;
  pieces = pieces < LEAST_PIECES ? LEAST_PIECES : pieces;
  return pieces < needed ? needed : pieces;
}

/* What a lane carries of a piece. */
static range part_of(const relay *work, range piece, int lane) {
  return even_hosts_piece_of(piece, (size_t)work->lanes, (size_t)lane, work->element);
}

/* What a rank here carries of it, by its number here: of neighbouring lanes, if of more than one. */
static range carried_by(const relay *work, range piece, int local) {
  range carried = {.from = piece.from, .count = 0};
  for (int lane = work->lanes - 1; lane >= 0; lane--) {
    if (even_hosts_carrier_of(work->group, lane) == local) {
      range part = part_of(work, piece, lane);
      carried = (range){.from = part.from, .count = carried.count + part.count};
    }
  }
  return carried;
}

static bool carries(const relay *work) {
  bool any = false;
  for (int lane = 0; lane < work->lanes; lane++) {
    any = any || work->group->lane[lane] != NULL;
  }
  return any;
}

/* ---- the carriers' side ---- */

static even_status carry(void *context) {
  const relayed *own = context;
  even_hosts_group *group = own->work->group;
  even_carrier *carrier = &group->carriers[own->lane];
  uint64_t before = even_comm_wait_ns(group->lane[own->lane]);
  even_status status = EVEN_OK;
  for (size_t piece = 0; piece < own->work->pieces && status == EVEN_OK; piece++) {
    status = even_carrier_may(carrier, piece + 1) ? own->work->cross(own->work, own->lane, piece)
                                                  : even_fail(EVEN_ERR_REVOKED, "the call was given up on this host");
    if (status == EVEN_OK) {
      even_carrier_tell(carrier, piece + 1);
    }
  }
  (void)atomic_fetch_add(&group->hidden_ns, even_comm_wait_ns(group->lane[own->lane]) - before);
  return status;
}

/* ---- the rank's side ---- */

static void allow(const relay *work, size_t pieces) {
  for (int lane = 0; lane < work->lanes; lane++) {
    if (work->group->lane[lane] != NULL) {
      even_carrier_allow(&work->group->carriers[lane], pieces);
    }
  }
}

/* Only those know that carry; the others wait for them in what follows. */
static even_status await_piece(const relay *work, size_t piece) {
  even_status status = EVEN_OK;
  for (int lane = 0; lane < work->lanes && status == EVEN_OK; lane++) {
    status = work->group->lane[lane] == NULL ? EVEN_OK : even_carrier_await(&work->group->carriers[lane], piece + 1);
  }
  return status;
}

/* All here know then that all here were well. */
static even_status meet_here(even_hosts_group *group) {
  even_hosts_await_others(group);
  return group->locals > 1 ? even_comm_barrier(group->inside) : EVEN_OK;
}

static even_status run(relay *work, even_status (*move)(relay *work)) {
  even_hosts_group *group = work->group;
  even_status status = EVEN_OK;
  int begun = 0;
  for (; begun < work->lanes && status == EVEN_OK; begun++) {
    work->lane[begun] = (relayed){.work = work, .lane = begun};
    status = group->lane[begun] == NULL
                 ? EVEN_OK
                 : even_carrier_begin(&group->carriers[begun], group->lane[begun], carry, &work->lane[begun]);
  }
  status = status == EVEN_OK ? move(work) : status;
  even_error why = *even_error_last();
  if (status != EVEN_OK) { /* the carriers end, too */
    even_hosts_tell_failure(group);
  }
  for (int lane = 0; lane < begun; lane++) {
    if (group->lane[lane] == NULL || !group->carriers[lane].started) {
      continue;
    }
    if (status != EVEN_OK) {
      even_carrier_stop(&group->carriers[lane]);
    }
    even_status ended = even_carrier_finish(&group->carriers[lane]);
    if (status == EVEN_OK && ended != EVEN_OK) {
      status = ended;
      why = *even_error_last();
      even_hosts_tell_failure(group);
    }
  }
  return status == EVEN_OK ? meet_here(group) : even_error_restore(&why); /* the first */
}

/* ---- broadcast ---- */

static range bytes_of(const relay *work, size_t piece) {
  return even_hosts_piece_of((range){.count = work->bytes}, work->pieces, piece, 1);
}

static even_status cross_broadcast(const relay *work, int lane, size_t piece) {
  range part = part_of(work, bytes_of(work, piece), lane);
  return part.count == 0 ? EVEN_OK
                         : even_comm_broadcast(work->group->lane[lane], work->data + part.from, part.count, work->host);
}

/* What the carriers here have of a range of elements, at its place on each, to all here. */
static even_status spread(const relay *work, range piece, unsigned char *all, even_dtype dtype) {
  even_hosts_group *group = work->group;
  if (group->locals == 1 || piece.count == 0) {
    return EVEN_OK;
  }
  if (work->lanes == 1) {
    return even_comm_broadcast(group->inside, all + piece.from * work->element, piece.count * work->element, 0);
  }
  for (int local = 0; local < group->locals; local++) {
    group->counts[local] = carried_by(work, piece, local).count;
  }
  range own = carried_by(work, piece, even_comm_rank(group->inside));
  return even_comm_all_gather(group->inside, all + own.from * work->element, all + piece.from * work->element,
                              group->counts, dtype);
}

/* Where the root is, all get a piece from it before it crosses. */
static even_status give_pieces(relay *work) {
  even_hosts_group *group = work->group;
  bool is_root = even_comm_rank(group->inside) == work->local;
  if (is_root) { /* what it carries itself */
    allow(work, work->pieces);
  }
  for (size_t piece = 0; piece < work->pieces && group->locals > 1; piece++) {
    range of = bytes_of(work, piece);
    if (of.count > 0) {
      EVEN_TRY(even_comm_broadcast(group->inside, work->data + of.from, of.count, work->local));
    }
    if (!is_root) {
      allow(work, piece + 1);
    }
  }
  return EVEN_OK;
}

static even_status take_pieces(relay *work) {
  allow(work, work->pieces);
  even_hosts_await_others(work->group);
  for (size_t piece = 0; piece < work->pieces; piece++) {
    EVEN_TRY(await_piece(work, piece));
    EVEN_TRY(spread(work, bytes_of(work, piece), work->data, EVEN_U8));
  }
  return EVEN_OK;
}

even_status even_hosts_relay_broadcast(even_hosts_group *group, unsigned char *data, size_t bytes, int host, int local,
                                       int lanes) {
  relay work = {.group = group,
                .lanes = lanes,
                .pieces = pieces_of(group, bytes),
                .cross = cross_broadcast,
                .data = data,
                .bytes = bytes,
                .host = host,
                .local = local,
                .element = 1};
  return run(&work, group->own_host == host ? give_pieces : take_pieces);
}

/* ---- what is cut by hosts ---- */

/* A host's block among all elements. */
static range block_of(const relay *work, int host) {
  range block = {.from = 0, .count = work->group->sizes[host]};
  for (int before = 0; before < host; before++) {
    block.from += work->group->sizes[before];
  }
  return block;
}

static range slice_of(const relay *work, size_t piece, int host) {
  return even_hosts_piece_of(block_of(work, host), work->pieces, piece, work->element);
}

/* Elements that the hosts before `host` have in a piece. */
static size_t before_in_piece(const relay *work, size_t piece, int host) {
  size_t count = 0;
  for (int before = 0; before < host; before++) {
    range block = {.count = work->group->sizes[before]};
    count += even_hosts_piece_of(block, work->pieces, piece, work->element).count;
  }
  return count;
}

/* Where element `at` of those that a host has in a piece lies; it is among all that are counted. */
static unsigned char *place_of(const relay *work, size_t piece, int host, size_t at) {
  if (work->all != NULL) {
    return work->all + at * work->element;
  }
  size_t place = piece % SUMMED * work->room + before_in_piece(work, piece, host);
  place += at - slice_of(work, piece, host).from;
  return work->sums + place * work->element;
}

/* What the hosts have of a piece on a lane, into the lane's own room. */
static size_t divide(const relay *work, int lane, size_t piece, size_t *largest) {
  const even_hosts_group *group = work->group;
  size_t *parts = &group->parts[lane * group->hosts];
  unsigned char **places = &group->places[lane * group->hosts];
  size_t total = 0;
  *largest = 0;
  for (int host = 0; host < group->hosts; host++) {
    range part = part_of(work, slice_of(work, piece, host), lane);
    parts[host] = part.count;
    places[host] = place_of(work, piece, host, part.from);
    *largest = part.count > *largest ? part.count : *largest;
    total += part.count;
  }
  return total;
}

/* ---- reduce-scatter ---- */

/* A rank that is alone on its host has its sums in its input, and what comes at once where it belongs. */
static bool is_alone(const relay *work) {
  return work->group->locals == 1;
}

static even_status cross_scatter(const relay *work, int lane, size_t piece) {
  const even_hosts_group *group = work->group;
  range own = part_of(work, slice_of(work, piece, group->own_host), lane);
  even_comm *comm = group->lane[lane];
  even_comm_scattering outer = *work->scattering;
  outer.total = divide(work, lane, piece, &outer.largest);
  outer.bytes = outer.total * work->element;
  outer.counts = &group->parts[lane * group->hosts];
  outer.places = (const unsigned char *const *)&group->places[lane * group->hosts];
  outer.input = work->all;
  if (!is_alone(work)) {
    outer.output = place_of(work, piece, group->own_host, own.from);
  } else if (own.count > 0) { /* else it may be NULL */
    outer.output += (own.from - block_of(work, group->own_host).from) * work->element;
  }
  return outer.total == 0 ? EVEN_OK : even_comm_engine_of(comm)->reduce_scatter(comm, &outer);
}

/* The host's sums of a piece, each part at its place on who carries it. */
static even_status reduce_piece(const relay *work, size_t piece) {
  even_hosts_group *group = work->group;
  const even_comm_scattering *job = work->scattering;
  for (int host = 0; host < group->hosts && !is_alone(work); host++) {
    range slice = slice_of(work, piece, host);
    range own = carried_by(work, slice, even_comm_rank(group->inside));
    for (int local = 0; local < group->locals; local++) {
      group->counts[local] = carried_by(work, slice, local).count;
    }
    unsigned char *into = own.count > 0 ? place_of(work, piece, host, own.from) : job->output;
    if (slice.count > 0) {
      EVEN_TRY(even_comm_reduce_scatter(group->inside, job->input + slice.from * work->element, into, group->counts,
                                        job->dtype, job->op == EVEN_AVG ? EVEN_SUM : job->op));
    }
  }
  return EVEN_OK;
}

static range common_of(range a, range b) {
  size_t from = a.from > b.from ? a.from : b.from;
  size_t end = even_least_size(a.from + a.count, b.from + b.count);
  return (range){.from = from, .count = end > from ? end - from : 0};
}

/* Where the part of one of this host's ranks is among all elements. */
static range wanted_by(const relay *work, int local) {
  const even_hosts_group *group = work->group;
  const int *locals = &group->members[group->first[group->own_host]];
  range wanted = {.from = block_of(work, group->own_host).from, .count = work->scattering->counts[locals[local]]};
  for (int before = 0; before < local; before++) {
    wanted.from += work->scattering->counts[locals[before]];
  }
  return wanted;
}

/* What has come of this host's block, from who carries it to whose it is. */
static even_status deliver_piece(const relay *work, size_t piece) {
  even_hosts_group *group = work->group;
  if (is_alone(work)) {
    return EVEN_OK;
  }
  range slice = slice_of(work, piece, group->own_host);
  int own = even_comm_rank(group->inside);
  range mine = wanted_by(work, own);
  range carried = carried_by(work, slice, own);
  const void **sources = group->pointers;
  const void **targets = group->pointers + group->ranks;
  for (int local = 0; local < group->locals; local++) {
    range gives = common_of(carried, wanted_by(work, local));
    range takes = common_of(carried_by(work, slice, local), mine);
    group->counts[local] = gives.count * work->element;
    group->nothing[local] = takes.count * work->element;
    sources[local] = gives.count == 0 ? NULL : place_of(work, piece, group->own_host, gives.from);
    targets[local] = takes.count == 0 ? NULL : work->scattering->output + (takes.from - mine.from) * work->element;
  }
  return even_comm_all_to_all(group->inside, sources, group->counts, (void *const *)targets, group->nothing);
}

static even_status scatter_pieces(relay *work) {
  for (size_t turn = 0; turn < work->pieces + AHEAD; turn++) {
    if (turn < work->pieces) {
      EVEN_TRY(reduce_piece(work, turn));
      allow(work, turn + 1);
    }
    if (turn == 0) {
      even_hosts_await_others(work->group);
    }
    if (turn >= AHEAD) {
      EVEN_TRY(await_piece(work, turn - AHEAD));
      EVEN_TRY(deliver_piece(work, turn - AHEAD));
    }
  }
  return EVEN_OK;
}

even_status even_hosts_relay_scatter(even_hosts_group *group, const even_comm_scattering *job, int lanes) {
  relay work = {.group = group,
                .lanes = lanes,
                .pieces = pieces_of(group, job->bytes),
                .cross = cross_scatter,
                .scattering = job,
                .element = job->element};
  even_hosts_sum_counts(group, job->counts, group->sizes);
  if (is_alone(&work)) {
    work.all = (unsigned char *)(uintptr_t)job->input; /* only read */
    return run(&work, scatter_pieces);
  }
  work.room = before_in_piece(&work, 0, group->hosts); /* the first piece is the largest */
  size_t pieces = even_least_size(work.pieces, SUMMED);
  EVEN_TRY(carries(&work) ? even_hosts_scratch(group, pieces * work.room * work.element + 1) : EVEN_OK);
  work.sums = group->scratch;
  return run(&work, scatter_pieces);
}

/* ---- all-gather ---- */

static even_status cross_gather(const relay *work, int lane, size_t piece) {
  const even_hosts_group *group = work->group;
  even_comm *comm = group->lane[lane];
  even_comm_gathering outer = *work->gathering;
  size_t largest = 0;
  outer.total = divide(work, lane, piece, &largest);
  outer.largest = largest * work->element;
  outer.bytes = outer.total * work->element;
  outer.counts = &group->parts[lane * group->hosts];
  outer.places = &group->places[lane * group->hosts];
  outer.input = group->places[lane * group->hosts + group->own_host];
  return outer.total == 0 ? EVEN_OK : even_comm_engine_of(comm)->all_gather(comm, &outer);
}

/* This host's parts, to all here. */
static even_status gather_here(const relay *work) {
  even_hosts_group *group = work->group;
  const int *locals = &group->members[group->first[group->own_host]];
  unsigned char *block = work->all + block_of(work, group->own_host).from * work->element;
  for (int local = 0; local < group->locals; local++) {
    group->counts[local] = work->gathering->counts[locals[local]];
  }
  return even_comm_all_gather(group->inside, work->gathering->input, block, group->counts, work->gathering->dtype);
}

static even_status gather_pieces(relay *work) {
  even_hosts_group *group = work->group;
  EVEN_TRY(gather_here(work));
  allow(work, work->pieces);
  even_hosts_await_others(group);
  for (size_t piece = 0; piece < work->pieces; piece++) {
    EVEN_TRY(await_piece(work, piece));
    for (int host = 0; host < group->hosts; host++) {
      if (host != group->own_host) {
        EVEN_TRY(spread(work, slice_of(work, piece, host), work->all, work->gathering->dtype));
      }
    }
  }
  return EVEN_OK;
}

even_status even_hosts_relay_gather(even_hosts_group *group, const even_comm_gathering *job, int lanes) {
  relay work = {.group = group,
                .lanes = lanes,
                .pieces = pieces_of(group, job->bytes),
                .cross = cross_gather,
                .gathering = job,
                .element = job->element,
                .all = job->output};
  even_hosts_sum_counts(group, job->counts, group->sizes);
  return run(&work, gather_pieces);
}
