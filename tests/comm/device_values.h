/* What ranks of device communicators reduce in tests, and what comes of it: numbers that every type holds exactly, in
 * whatever order they are added. */
#ifndef EVEN_TEST_DEVICE_VALUES_H
#define EVEN_TEST_DEVICE_VALUES_H

#include <evenstep/types.h>
#include <stddef.h>

/* What rank r brings at index i: small, so that every type holds every sum and product. */
double device_value(int rank, size_t i);
/* data[i] = value */
void device_value_put(void *data, size_t i, even_dtype dtype, double value);
/* data[i] = what the rank brings there */
void device_values_fill(void *data, size_t count, even_dtype dtype, int rank);
/* op over all ranks of what they bring at index i */
double device_reduced(even_reduce_op op, even_dtype dtype, int ranks, size_t i);

#endif
