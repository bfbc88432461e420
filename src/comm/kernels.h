/* The reductions themselves, one table of functions for each instruction set. */
#ifndef EVEN_COMM_KERNELS_H
#define EVEN_COMM_KERNELS_H

#include <evenstep/types.h>

#define EVEN_DTYPES 13 /* that the host reduces: the first of EVEN_DTYPE_LIST */
#define EVEN_REDUCE_OPS 8

/* targets[t][i] = op over k of sources[k][i], in the order of k; divisor is AVG's. Pointers are aligned to their
 * element. A target may be one of the sources, but may not overlap one in another way. */
typedef void even_reduce_function(void *const *targets, size_t target_count, const void *const *sources,
                                  size_t source_count, size_t count, double divisor);

/* to[i] = from[i] * scale, formed in fp32 and rounded to the nearest 16-bit float. */
typedef void even_narrow_function(uint16_t *to, const float *from, size_t count, float scale);
/* to[i] = from[i]. */
typedef void even_widen_function(float *to, const uint16_t *from, size_t count);

/* What two ranks' data go through at a time where they are staged: copies of lines that the other core has written, a
 * reduction with what it has staged, and the staging of what is its to reduce. */
typedef struct even_staged {
  void *out; /* out[i] = result[i] */
  const void *result;
  const void *sources[2]; /* targets[0][i] = targets[1][i] = sources[0][i] op sources[1][i]; a target is a source */
  void *targets[2];
  const void *in; /* staging[i] = in[i]; `staging` may be `result` */
  void *staging;
} even_staged;

/* All three in one loop, line by line, so that what waits for one line gives time to the others'; own data are asked
 * for ahead. `count` is a multiple of a line's. */
typedef void even_staged_function(const even_staged *work, size_t count, double divisor);

/* places[k][i] = op over k of places[k][i], in the order of k; their lines are asked for ahead. */
typedef void even_in_place_function(void *const *places, size_t place_count, size_t count, double divisor);
#define EVEN_IN_PLACE_RANKS 16 /* places at most: more streams than a core asks ahead for */

typedef struct even_kernels {
  const char *name;
  even_reduce_function *reduce[EVEN_DTYPES][EVEN_REDUCE_OPS]; /* NULL where op makes no sense for the dtype */
  even_staged_function *staged[EVEN_REDUCE_OPS]; /* of F32; NULL where there is none: these are for the usual sums */
  even_in_place_function *in_place[EVEN_REDUCE_OPS]; /* of F32; NULL as above */
  even_narrow_function *narrow[EVEN_DTYPES];         /* to F16 and BF16; NULL for the others */
  even_widen_function *widen[EVEN_DTYPES];           /* from F16 and BF16; NULL for the others */
} even_kernels;

/* The best table that this machine can run. Any thread. */
const even_kernels *even_kernels_best(void);
/* The table of that name, NULL where this build or machine lacks it (for tests and benchmarks). */
const even_kernels *even_kernels_named(const char *name);
/* Makes `kernels` the best from now on (for tests); NULL: chosen again. */
void even_kernels_use(const even_kernels *kernels);

/* Copies to memory that is not read again soon, past the caches where the machine can. */
void even_copy_past_caches(void *target, const void *source, size_t bytes);

/* Copies what another core has written. memcpy may use one instruction for the whole copy (rep movsb), which fetches
 * lines out of a cache that is not shared three times more slowly than loads do. */
void even_copy_from_core(void *target, const void *source, size_t bytes);

extern const even_kernels even_kernels_portable;
extern const even_kernels even_kernels_avx2;
extern const even_kernels even_kernels_avx512;
extern const even_kernels even_kernels_neon;

#endif
