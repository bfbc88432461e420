/* What the opening of an optimizer's states and its steps share. */
#ifndef EVEN_OPTIM_STATES_H
#define EVEN_OPTIM_STATES_H

#include <evenstep/optim.h>

#include "optim/kernels.h"
#include "optim/pieces.h"
#include "os/shared_memory.h"

#define EVEN_OPTIM_NOWHERE SIZE_MAX

/* Which process a rank is. */
typedef struct even_optim_process {
  int64_t number;
  uint64_t start_time;
} even_optim_process;

/* What a rank leaves for the others, and what a piece was before it changed it: behind this the states of each
 * parameter in the piece, and of 16-bit floats the values, one after the other. */
typedef struct even_optim_kept {
  _Alignas(64) _Atomic uint64_t name; /* of the piece and the step, once all is there (even_optim_round_name) */
  _Atomic uint64_t came;              /* the step that it has come to, and whether it looks who else has (step.c) */
  _Atomic uint64_t copied;            /* bytes of what all share, where it makes a copy of its own */
} even_optim_kept;

/* Where the numbers of one parameter lie in the memory. */
typedef struct even_optim_place {
  size_t count;
  even_dtype dtype;
  int states;
  size_t state[EVEN_OPTIM_STATES];
  size_t values; /* those that the other ranks take, of 16-bit floats in fp32; EVEN_OPTIM_NOWHERE where nobody wants
                    them */
} even_optim_place;

struct even_optim {
  even_comm *comm; /* NULL: alone */
  int rank, ranks;
  size_t parameter_count;
  even_optim_place *places;
  even_optim_factors *factors; /* of the step under way, one a parameter */
  even_optim_piece *pieces;
  size_t piece_count;
  const void **parts;        /* of a sum that is formed, one a rank */
  double *room;              /* for the sums of a piece */
  even_shared_memory memory; /* the words of the pieces, what is kept of each rank, then the numbers */
  size_t sums;               /* in it the words of the round before, where there is a norm */
  size_t squares;            /* and what that found, one a piece */
  uint64_t number;           /* of steps */
  /* where a rank that ends leaves nothing half done: */
  bool survives;
  even_optim_process *processes; /* of the ranks */
  size_t kept;                   /* rank r's: at kept + r * kept_stride */
  size_t kept_stride;
};

static inline bool even_optim_is_short(even_dtype dtype) {
  return dtype == EVEN_F16 || dtype == EVEN_BF16;
}

/* Bytes of a number beside an element. */
static inline size_t even_optim_wide_bytes(even_dtype dtype) {
  return dtype == EVEN_F64 ? sizeof(double) : sizeof(float);
}

static inline void *even_optim_at(const even_optim *optim, size_t offset) {
  return (char *)optim->memory.address + offset;
}

/* How many states a rule wants. */
static inline int even_optim_states_of(const even_optim_rule *rule) {
  if (rule->method == EVEN_OPTIM_SGD) {
    return rule->momentum != 0 ? 1 : 0;
  }
  return rule->amsgrad ? 3 : 2;
}

static inline even_optim_kept *even_optim_kept_of(const even_optim *optim, int rank) {
  return even_optim_at(optim, optim->kept + (size_t)rank * optim->kept_stride);
}

#endif
