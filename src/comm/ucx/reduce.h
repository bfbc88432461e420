/* What the reductions over UCX share: where the others' parts arrive, and which transfers bring them. */
#ifndef EVEN_COMM_UCX_REDUCE_H
#define EVEN_COMM_UCX_REDUCE_H

#include "comm/ucx/group.h"

/* What one rank sends to one other at a time, at most. */
size_t even_ucx_chunk_bytes(int ranks);
/* Room for a chunk of every rank, twice; made once. */
even_status even_ucx_need_staging(even_ucx_group *group) EVEN_MUST_USE;

static inline unsigned char *even_ucx_staging_of(const even_ucx_group *group, int rank, size_t piece) {
  return group->staging + ((piece & 1u) * (size_t)group->ranks + (size_t)rank) * even_ucx_chunk_bytes(group->ranks);
}
/* The transfers of a piece's scatter, or of its gather: two a rank. */
static inline even_ucx_transfer *even_ucx_transfers_of(const even_ucx_group *group, size_t piece, bool gathers) {
  return group->transfers + ((piece & 1u) * 2 + (gathers ? 1u : 0u)) * 2 * (size_t)group->ranks;
}

/* The steps of piece p of a call. */
static inline uint64_t even_ucx_scatter_step(size_t piece) {
  return 1 + 2 * (uint64_t)piece;
}
static inline uint64_t even_ucx_gather_step(size_t piece) {
  return 2 + 2 * (uint64_t)piece;
}
/* Those of the measurement that a call may begin with, above all others. */
#define EVEN_UCX_FIT_STEP ((uint64_t)1 << (EVEN_UCX_STEP_BITS - 1))

/* ---- fit.c: parts by the speeds of the links ---- */

/* A call of fewer bytes is not worth measuring links for. */
#define EVEN_UCX_FIT_BYTES ((size_t)4 << 20)
/* Parts are counted in so many of a whole. */
#define EVEN_UCX_FIT_WHOLE ((uint32_t)1 << 16)

/* Where among EVEN_UCX_FIT_WHOLE each rank's part ends, so that an all-reduce whose times[r] is what the link of rank r
 * takes for a given number of bytes costs least; whether that is worth having beside equal parts (else `ends` is not
 * touched). Through the link of a rank that owns the part f go 1 + (ranks - 2) f of the data, in and out. */
bool even_ucx_fit_parts(const uint64_t *times, int ranks, uint32_t *ends);
/* In a large call, after all have met: measures the links when it is time to, which *measured says. */
even_status even_ucx_fit_measure(even_ucx_group *group, bool *measured) EVEN_MUST_USE;
/* The largest part, of EVEN_UCX_FIT_WHOLE. */
uint32_t even_ucx_fit_widest(const even_ucx_group *group);

#endif
