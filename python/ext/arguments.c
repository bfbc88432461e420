/* Sequences with one item a rank, in and out. */
#include "arguments.h"

#include <stdbool.h>

void *even_ext_array(size_t count, size_t bytes) {
  void *memory = PyMem_Calloc(count == 0 ? 1 : count, bytes);
  return memory != NULL ? memory : PyErr_NoMemory();
}

int even_ext_as_i64(PyObject *object, int64_t *out) {
  PyObject *index = PyNumber_Index(object);
  if (index == NULL) {
    return -1;
  }
  long long value = PyLong_AsLongLong(index);
  Py_DECREF(index);
  if (value == -1 && PyErr_Occurred()) {
    return -1;
  }
  *out = value;
  return 0;
}

int even_ext_as_double(PyObject *object, double *out) {
  *out = PyFloat_AsDouble(object);
  return PyErr_Occurred() ? -1 : 0;
}

/* Any sequence as a tuple of `ranks` items; `what` names it in the error. */
PyObject *even_ext_one_a_rank(PyObject *sequence, size_t ranks, const char *what) {
  PyObject *tuple = PySequence_Tuple(sequence);
  if (tuple != NULL && PyTuple_Size(tuple) != (Py_ssize_t)ranks) {
    PyErr_Format(PyExc_ValueError, "%zd %s were given for %zu ranks; give one for each rank", PyTuple_Size(tuple), what,
                 ranks);
    Py_DECREF(tuple);
    return NULL;
  }
  return tuple;
}

/* A pair (samples, seconds). */
int even_ext_as_pair(PyObject *object, int64_t *samples, double *seconds) {
  PyObject *pair = PySequence_Tuple(object);
  if (pair == NULL) {
    return -1;
  }
  int failed = -1;
  if (PyTuple_Size(pair) != 2) {
    PyErr_SetString(PyExc_ValueError, "wants pairs (samples, seconds)");
  } else {
    failed = even_ext_as_i64(PyTuple_GetItem(pair, 0), samples) != 0 ||
             even_ext_as_double(PyTuple_GetItem(pair, 1), seconds) != 0;
  }
  Py_DECREF(pair);
  return failed ? -1 : 0;
}

int even_ext_as_doubles(PyObject *object, size_t ranks, const char *what, double **out) {
  if (object == Py_None) {
    return 0;
  }
  PyObject *tuple = even_ext_one_a_rank(object, ranks, what);
  if (tuple == NULL) {
    return -1;
  }
  bool read = (*out = even_ext_array(ranks, sizeof **out)) != NULL;
  for (size_t r = 0; read && r < ranks; r++) {
    read = even_ext_as_double(PyTuple_GetItem(tuple, (Py_ssize_t)r), &(*out)[r]) == 0;
  }
  Py_DECREF(tuple);
  return read ? 0 : -1;
}

int even_ext_as_counts(PyObject *object, size_t ranks, const char *what, int64_t none, int64_t **out) {
  if (object == Py_None) {
    return 0;
  }
  PyObject *tuple = even_ext_one_a_rank(object, ranks, what);
  if (tuple == NULL) {
    return -1;
  }
  bool read = (*out = even_ext_array(ranks, sizeof **out)) != NULL;
  for (size_t r = 0; read && r < ranks; r++) {
    PyObject *item = PyTuple_GetItem(tuple, (Py_ssize_t)r);
    (*out)[r] = none;
    read = item == Py_None || even_ext_as_i64(item, &(*out)[r]) == 0;
  }
  Py_DECREF(tuple);
  return read ? 0 : -1;
}

PyObject *even_ext_as_list(const int64_t *shares, size_t ranks) {
  PyObject *list = PyList_New((Py_ssize_t)ranks);
  for (size_t r = 0; list != NULL && r < ranks; r++) {
    PyObject *share = PyLong_FromLongLong(shares[r]);
    if (share == NULL || PyList_SetItem(list, (Py_ssize_t)r, share) != 0) {
      Py_DECREF(list);
      return NULL;
    }
  }
  return list;
}
