/* Sequences with one item a rank, in and out. Each sets an exception where it fails. */
#ifndef EVEN_EXT_ARGUMENTS_H
#define EVEN_EXT_ARGUMENTS_H

#include "ext.h"

/* Zeroed; free with PyMem_Free. */
void *even_ext_array(size_t count, size_t bytes);
int even_ext_as_i64(PyObject *object, int64_t *out);
int even_ext_as_double(PyObject *object, double *out);
/* Any sequence as a tuple of `ranks` items; `what` names it in the error. */
PyObject *even_ext_one_a_rank(PyObject *sequence, size_t ranks, const char *what);
/* A pair (samples, seconds). */
int even_ext_as_pair(PyObject *object, int64_t *samples, double *seconds);
/* None: *out stays NULL, which is what it is before. Free with PyMem_Free, also after a failure. */
int even_ext_as_doubles(PyObject *object, size_t ranks, const char *what, double **out);
/* The same; an item of None is `none`. */
int even_ext_as_counts(PyObject *object, size_t ranks, const char *what, int64_t none, int64_t **out);
PyObject *even_ext_as_list(const int64_t *values, size_t ranks);

#endif
