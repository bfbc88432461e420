/* The loops over elements of exact sums. One path for every instruction set: they are as fast as memory, and each
 * operation is rounded once. */
#ifndef EVEN_SYNC_EXACT_LOOPS_H
#define EVEN_SYNC_EXACT_LOOPS_H

#include <evenstep/types.h>
#include <stdbool.h>

/* What gradients of `dtype` are summed in: F32, F64 for F64. */
even_dtype even_exact_wide(even_dtype dtype);
/* sum[i] = weight * gradient[i], or with `add` sum[i] += that. gradient NULL: zeros. `sum` has even_exact_wide(dtype).
 */
void even_exact_take(void *sum, const void *gradient, even_dtype dtype, size_t count, double weight, bool add);
/* left[i] += right[i], of F32 or F64. */
void even_exact_join(void *left, const void *right, even_dtype wide, size_t count);
/* target[i] = sum[i] / weight, rounded to `dtype`. */
void even_exact_give(void *target, const void *sum, even_dtype dtype, size_t count, double weight);

#endif
