/* Checks of what a caller passes to a collective, before any peer hears of it. */
#ifndef EVEN_COMM_ARGUMENTS_H
#define EVEN_COMM_ARGUMENTS_H

#include "base/checked.h"
#include "base/fail.h"
#include "comm/kernels.h"

/* The kernel for a dtype and an operation; EVEN_ERR_ARGUMENT where there is none. */
even_status even_check_reduction(const even_kernels *kernels, even_dtype dtype, even_reduce_op op,
                                 even_reduce_function **out) EVEN_MUST_USE;
/* count elements at `data`: not NULL, aligned to the element, of a size that fits. *bytes is that size. */
even_status even_check_data(const void *data, size_t count, even_dtype dtype, size_t *bytes) EVEN_MUST_USE;
/* The sum and the largest of `ranks` counts, in elements; the sum's bytes fit. */
even_status even_check_counts(const size_t *counts, int ranks, even_dtype dtype, size_t *total,
                              size_t *largest) EVEN_MUST_USE;

#endif
