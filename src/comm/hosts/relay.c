/* Broadcast, reduce-scatter and all-gather in pieces through the first ranks of the hosts: a carrier makes the calls
 * between the hosts, piece by piece, while the ranks of the host move or sum other pieces. */
#include "comm/hosts/group.h"

#include "base/checked.h"
#include "base/fail.h"

#include <string.h>

/* So many pieces at most and at least, but none of less for each host. */
#define PIECES 16u
#define LEAST_PIECES 4u
#define LEAST_BYTES ((size_t)512 << 10)

typedef struct relay relay;
typedef even_status relay_piece(relay *work, size_t piece);

struct relay {
  even_hosts_group *group;
  size_t pieces;
  relay_piece *cross; /* on the leader's carrier */
  /* of a broadcast */
  unsigned char *data;
  size_t bytes;
  int host; /* the root's, and its number there */
  int local;
  /* of the others */
  const even_comm_scattering *scattering;
  const even_comm_gathering *gathering;
  const size_t *sizes; /* of the hosts' blocks */
  size_t element;
  unsigned char *sums;
  const unsigned char *block;
};

size_t even_hosts_pieces(const even_hosts_group *group, size_t bytes) {
  size_t pieces = bytes / LEAST_BYTES / (size_t)group->hosts;
  bool in_turns = group->ways.choice.forced >= 0 && strcmp(group->ways.names[group->ways.choice.forced], "turns") == 0;
  bool apart = group->hosts == 1 || pieces < LEAST_PIECES || in_turns;
  return apart ? 1 : even_least_size(pieces, PIECES);
}

static even_status carry(void *context) {
  relay *work = context;
  even_hosts_group *group = work->group;
  even_carrier *own = &group->carriers[0];
  uint64_t before = even_comm_wait_ns(group->between);
  even_status status = EVEN_OK;
  for (size_t piece = 0; piece < work->pieces && status == EVEN_OK; piece++) {
    status = even_carrier_may(own, piece + 1) ? work->cross(work, piece)
                                              : even_fail(EVEN_ERR_REVOKED, "the call was given up on this host");
    if (status == EVEN_OK) {
      even_carrier_tell(own, piece + 1);
    }
  }
  (void)atomic_fetch_add(&group->hidden_ns, even_comm_wait_ns(group->between) - before);
  return status;
}

static even_status begin(relay *work) {
  return even_hosts_leads(work->group) ? even_carrier_begin(&work->group->carriers[0], carry, work) : EVEN_OK;
}

static void allow(const relay *work, size_t pieces) {
  if (even_hosts_leads(work->group)) {
    even_carrier_allow(&work->group->carriers[0], pieces);
  }
}

/* Only the leader knows; the others wait for it in what follows. */
static even_status await_piece(const relay *work, size_t piece) {
  return even_hosts_leads(work->group) ? even_carrier_await(&work->group->carriers[0], piece + 1) : EVEN_OK;
}

/* The end of the call, with the outcome on all ranks of the host. */
static even_status finish(const relay *work, even_status status) {
  even_hosts_group *group = work->group;
  if (status != EVEN_OK) {
    even_hosts_tell_failure(group);
  }
  const even_error why = *even_error_last();
  if (even_hosts_leads(group) && group->carriers[0].started) {
    if (status != EVEN_OK) {
      even_carrier_stop(&group->carriers[0]);
    }
    even_status carried = even_carrier_finish(&group->carriers[0]);
    status = status == EVEN_OK ? carried : even_error_restore(&why);
  }
  return status == EVEN_OK || even_hosts_leads(group) ? even_hosts_agree(group, status) : status;
}

/* ---- broadcast ---- */

static size_t bytes_of(const relay *work, size_t piece, size_t *from) {
  size_t size = (work->bytes - 1) / work->pieces + 1;
  *from = even_least_size(piece * size, work->bytes);
  return even_least_size(size, work->bytes - *from);
}

static even_status cross_broadcast(relay *work, size_t piece) {
  size_t from = 0;
  size_t bytes = bytes_of(work, piece, &from);
  return even_comm_broadcast(work->group->between, work->data + from, bytes, work->host);
}

static even_status spread_broadcast(relay *work, size_t piece, int local) {
  size_t from = 0;
  size_t bytes = bytes_of(work, piece, &from);
  return work->group->locals == 1 ? EVEN_OK : even_comm_broadcast(work->group->inside, work->data + from, bytes, local);
}

static even_status broadcast_pieces(relay *work) {
  even_hosts_group *group = work->group;
  bool has_root = group->own_host == work->host;
  if (!has_root || work->local == 0) { /* the leader sends what it has, or takes what comes */
    allow(work, work->pieces);
  }
  if (!has_root) {
    even_hosts_await_others(group);
  }
  for (size_t piece = 0; piece < work->pieces; piece++) {
    if (!has_root) {
      EVEN_TRY(await_piece(work, piece));
    }
    EVEN_TRY(spread_broadcast(work, piece, has_root ? work->local : 0));
    if (has_root && work->local != 0) {
      allow(work, piece + 1);
    }
  }
  return EVEN_OK;
}

even_status even_hosts_relay_broadcast(even_hosts_group *group, unsigned char *data, size_t bytes, int host,
                                       int local) {
  relay work = {.group = group,
                .pieces = even_hosts_pieces(group, bytes),
                .cross = cross_broadcast,
                .data = data,
                .bytes = bytes,
                .host = host,
                .local = local};
  even_status status = begin(&work);
  return finish(&work, status == EVEN_OK ? broadcast_pieces(&work) : status);
}

/* ---- what is cut by hosts ---- */

/* Elements of a host's block that are in a piece; *from: where they begin among all. */
static size_t slice_of(const relay *work, size_t piece, int host, size_t *from) {
  size_t size = work->sizes[host];
  size_t line = EVEN_COMM_LINE / work->element;
  size_t step = ((size - (size > 0)) / work->pieces / line + 1) * line;
  size_t begin = even_least_size(piece * step, size);
  *from = begin;
  for (int before = 0; before < host; before++) {
    *from += work->sizes[before];
  }
  return even_least_size(step, size - begin);
}

/* What the hosts have in a piece, into the carrier's own room. */
static size_t divide(const relay *work, size_t piece, unsigned char *base, size_t *largest) {
  even_hosts_group *group = work->group;
  size_t total = 0;
  *largest = 0;
  for (int host = 0; host < group->hosts; host++) {
    size_t from = 0;
    group->parts[host] = slice_of(work, piece, host, &from);
    group->places[host] = base + from * work->element;
    *largest = group->parts[host] > *largest ? group->parts[host] : *largest;
    total += group->parts[host];
  }
  return total;
}

static even_status cross_scatter(relay *work, size_t piece) {
  even_hosts_group *group = work->group;
  even_comm_scattering outer = *work->scattering;
  outer.total = divide(work, piece, work->sums, &outer.largest);
  outer.bytes = outer.total * work->element;
  outer.counts = group->parts;
  outer.places = (const unsigned char *const *)group->places;
  outer.input = work->sums;
  outer.output = group->places[group->own_host];
  return even_comm_engine_of(group->between)->reduce_scatter(group->between, &outer);
}

static even_status reduce_piece(relay *work, size_t piece) {
  even_hosts_group *group = work->group;
  const even_comm_scattering *job = work->scattering;
  for (int host = 0; host < group->hosts && group->locals > 0; host++) {
    size_t from = 0;
    size_t count = slice_of(work, piece, host, &from);
    unsigned char *into = even_hosts_leads(group) ? work->sums + from * work->element : job->output;
    for (int local = 0; local < group->locals; local++) {
      group->counts[local] = local == 0 ? count : 0;
    }
    if (count > 0) {
      EVEN_TRY(even_comm_reduce_scatter(group->inside, job->input + from * work->element, into, group->counts,
                                        job->dtype, job->op == EVEN_AVG ? EVEN_SUM : job->op));
    }
  }
  return EVEN_OK;
}

static even_status scatter_pieces(relay *work) {
  for (size_t piece = 0; piece < work->pieces; piece++) {
    EVEN_TRY(reduce_piece(work, piece));
    allow(work, piece + 1);
    even_hosts_await_others(work->group);
  }
  return EVEN_OK;
}

even_status even_hosts_relay_scatter(even_hosts_group *group, const even_comm_scattering *job, unsigned char *sums,
                                     unsigned char **block) {
  size_t from = 0;
  relay work = {.group = group,
                .pieces = even_hosts_pieces(group, job->bytes),
                .cross = cross_scatter,
                .scattering = job,
                .sizes = group->sizes,
                .element = job->element,
                .sums = sums};
  even_hosts_sum_counts(group, job->counts, group->sizes);
  even_status status = begin(&work);
  status = finish(&work, status == EVEN_OK ? scatter_pieces(&work) : status);
  (void)slice_of(&work, 0, group->own_host, &from);
  *block = sums == NULL ? NULL : sums + from * job->element;
  return status;
}

static even_status cross_gather(relay *work, size_t piece) {
  even_hosts_group *group = work->group;
  even_comm_gathering outer = *work->gathering;
  size_t own = 0;
  size_t first = 0;
  size_t largest = 0;
  outer.total = divide(work, piece, work->gathering->output, &largest);
  outer.largest = largest * work->element;
  outer.bytes = outer.total * work->element;
  outer.counts = group->parts;
  outer.places = group->places;
  (void)slice_of(work, 0, group->own_host, &first);
  (void)slice_of(work, piece, group->own_host, &own);
  outer.input = work->block + (own - first) * work->element;
  return even_comm_engine_of(group->between)->all_gather(group->between, &outer);
}

static even_status spread_piece(relay *work, size_t piece) {
  even_hosts_group *group = work->group;
  for (int host = 0; host < group->hosts && group->locals > 1; host++) {
    size_t from = 0;
    size_t bytes = slice_of(work, piece, host, &from) * work->element;
    if (bytes > 0) {
      EVEN_TRY(even_comm_broadcast(group->inside, work->gathering->output + from * work->element, bytes, 0));
    }
  }
  return EVEN_OK;
}

static even_status gather_pieces(relay *work) {
  allow(work, work->pieces);
  even_hosts_await_others(work->group);
  for (size_t piece = 0; piece < work->pieces; piece++) {
    EVEN_TRY(await_piece(work, piece));
    EVEN_TRY(spread_piece(work, piece));
  }
  return EVEN_OK;
}

even_status even_hosts_relay_gather(even_hosts_group *group, const even_comm_gathering *job,
                                    const unsigned char *block) {
  relay work = {.group = group,
                .pieces = even_hosts_pieces(group, job->bytes),
                .cross = cross_gather,
                .gathering = job,
                .sizes = group->sizes,
                .element = job->element,
                .block = block};
  even_hosts_sum_counts(group, job->counts, group->sizes);
  even_status status = begin(&work);
  return finish(&work, status == EVEN_OK ? gather_pieces(&work) : status);
}
