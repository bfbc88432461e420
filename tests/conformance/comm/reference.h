/* The collectives once more, as plainly as can be, for comparison to the last bit. */
#ifndef EVEN_TEST_REFERENCE_H
#define EVEN_TEST_REFERENCE_H

#include <evenstep/types.h>

/* Element `index` of what rank `rank` puts into call `call`: the same wherever it is computed. Written to `out`. */
void reference_fill(void *out, even_dtype dtype, uint64_t call, int rank, size_t index);
/* Whether the op exists for the dtype. */
int reference_has(even_dtype dtype, even_reduce_op op);
/* op over all ranks of that element, in rank order. Written to `out`. */
void reference_reduce(void *out, even_dtype dtype, even_reduce_op op, uint64_t call, int ranks, size_t index);
/* From now on reference_reduce reduces the ranks of each host first, in order, then the hosts' results in order, each
 * rounded to its dtype; NULL: all ranks at once. */
void reference_set_hosts(const int *host_of);
/* The next number of a repeatable sequence (xorshift64*, Marsaglia 2003, Vigna 2016). */
uint64_t reference_random(uint64_t *state);

#endif
