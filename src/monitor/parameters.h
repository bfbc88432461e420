/* How far apart the parameters of two checkpoints are. */
#ifndef EVEN_MONITOR_PARAMETERS_H
#define EVEN_MONITOR_PARAMETERS_H

#include <evenstep/status.h>
#include <stddef.h>

typedef struct even_parameters_difference {
  double relative_norm; /* ||a - b|| / ||b|| over all floating tensors together, in double precision */
  size_t tensors;
  double elements;
} even_parameters_difference;

/* Compares two safetensors files by tensor name: F64, F32, F16, BF16; others (counters) are passed over. Errors:
 * EVEN_ERR_MISMATCH (names or shapes differ: says which), EVEN_ERR_CORRUPT, those of reading. */
even_status even_parameters_compare(const char *path_a, const char *path_b,
                                    even_parameters_difference *out) EVEN_MUST_USE;
/* For tests. */
double even_parameters_half(unsigned short bits);

#endif
