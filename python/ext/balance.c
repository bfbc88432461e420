/* _core.balance: the exact split of measured tables. Microseconds of arithmetic: the GIL stays. */
#include "arguments.h"

#include <evenstep/balancer.h>
#include <stdbool.h>

/* One table from a sequence of pairs; both arrays freed by the caller also after a failure. */
static int as_table(PyObject *object, int64_t **samples, double **seconds, size_t *points) {
  PyObject *pairs = PySequence_Tuple(object);
  if (pairs == NULL) {
    return -1;
  }
  *points = (size_t)PyTuple_Size(pairs);
  *samples = even_ext_array(*points, sizeof **samples);
  *seconds = *samples != NULL ? even_ext_array(*points, sizeof **seconds) : NULL;
  int failed = *seconds == NULL;
  for (size_t i = 0; !failed && i < *points; i++) {
    failed = even_ext_as_pair(PyTuple_GetItem(pairs, (Py_ssize_t)i), &(*samples)[i], &(*seconds)[i]) != 0;
  }
  Py_DECREF(pairs);
  return failed ? -1 : 0;
}

/* What _core.balance was given beside the tables; freed with free_options, also after a failure. */
typedef struct options {
  int64_t *caps;
  double *constants;
  int64_t *buckets;
  int64_t *micro_batches;
} options;

static void free_options(options *o) {
  PyMem_Free(o->caps);
  PyMem_Free(o->constants);
  PyMem_Free(o->buckets);
  PyMem_Free(o->micro_batches);
}

static int read_cost(PyObject *table, const options *o, size_t rank, even_rank_cost *out) {
  int64_t *samples = NULL;
  double *seconds = NULL;
  int failed = as_table(table, &samples, &seconds, &out->table.points);
  out->table.samples = samples;
  out->table.seconds = seconds;
  out->constant_seconds = o->constants != NULL ? o->constants[rank] : 0.0;
  out->bucket = o->buckets != NULL ? o->buckets[rank] : 0;
  out->micro_batch = o->micro_batches != NULL ? o->micro_batches[rank] : 0;
  return failed;
}

static PyObject *solve(PyObject *tables, const options *o, int64_t batch) {
  size_t ranks = (size_t)PyTuple_Size(tables);
  even_rank_cost *costs = even_ext_array(ranks, sizeof *costs);
  int64_t *shares = even_ext_array(ranks, sizeof *shares);
  PyObject *result = NULL;
  bool read = costs != NULL && shares != NULL;
  for (size_t r = 0; read && r < ranks; r++) {
    read = read_cost(PyTuple_GetItem(tables, (Py_ssize_t)r), o, r, &costs[r]) == 0;
  }
  if (read) {
    double step = 0.0;
    even_status status = even_balancer_solve_costs(costs, o->caps, ranks, batch, shares, &step);
    PyObject *list = status == EVEN_OK ? even_ext_as_list(shares, ranks) : even_ext_raise(status);
    result = list != NULL ? Py_BuildValue("Nd", list, step) : NULL;
  }
  for (size_t r = 0; costs != NULL && r < ranks; r++) {
    PyMem_Free((void *)costs[r].table.samples);
    PyMem_Free((void *)costs[r].table.seconds);
  }
  PyMem_Free(costs);
  PyMem_Free(shares);
  return result;
}

static PyObject *balance(PyObject *module, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"tables", "batch", "caps", "constant_seconds", "buckets", "micro_batches", NULL};
  PyObject *tables = NULL;
  PyObject *caps = Py_None;
  PyObject *constants = Py_None;
  PyObject *buckets = Py_None;
  PyObject *micro_batches = Py_None;
  long long batch = 0;
  options o = {0};
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "OL|OOOO:balance", keywords, &tables, &batch, &caps, &constants,
                                   &buckets, &micro_batches)) {
    return NULL;
  }
  PyObject *tuple = PySequence_Tuple(tables);
  if (tuple == NULL) {
    return NULL;
  }
  size_t ranks = (size_t)PyTuple_Size(tuple);
  PyObject *result = NULL;
  if (even_ext_as_counts(caps, ranks, "caps", -1, &o.caps) == 0 &&
      even_ext_as_doubles(constants, ranks, "constant_seconds", &o.constants) == 0 &&
      even_ext_as_counts(buckets, ranks, "buckets", 0, &o.buckets) == 0 &&
      even_ext_as_counts(micro_batches, ranks, "micro_batches", 0, &o.micro_batches) == 0) {
    result = solve(tuple, &o, batch);
  }
  free_options(&o);
  Py_DECREF(tuple);
  return result;
}

/* The largest micro-batch that is cheapest a sample. */
static PyObject *best_micro_batch(PyObject *module, PyObject *arguments) {
  PyObject *pairs = NULL;
  long long most = 0;
  int64_t *samples = NULL;
  double *seconds = NULL;
  even_time_table table = {0};
  PyObject *result = NULL;
  int64_t shares[1];
  (void)module;
  if (!PyArg_ParseTuple(arguments, "OL:best_micro_batch", &pairs, &most)) {
    return NULL;
  }
  if (most < 1) {
    return PyErr_Format(PyExc_ValueError, "a micro-batch of at most %lld samples; at least 1 is needed", most);
  }
  if (as_table(pairs, &samples, &seconds, &table.points) == 0) {
    table.samples = samples;
    table.seconds = seconds;
    even_status status = even_balancer_solve(&table, NULL, 1, most, shares, NULL); /* checks the table */
    result = status == EVEN_OK ? PyLong_FromLongLong(even_time_table_best_micro_batch(&table, most))
                               : even_ext_raise(status);
  }
  PyMem_Free(samples);
  PyMem_Free(seconds);
  return result;
}

/* ---- memory by measured peaks ---- */

static int as_curve(PyObject *pairs, even_memory_curve *out) {
  int64_t *samples = NULL;
  double *bytes = NULL;
  size_t points = 0;
  int failed = as_table(pairs, &samples, &bytes, &points);
  memset(out, 0, sizeof *out);
  for (size_t i = 0; !failed && i < points; i++) {
    even_memory_curve_take(out, samples[i], bytes[i]);
  }
  PyMem_Free(samples);
  PyMem_Free(bytes);
  return failed;
}

static PyObject *memory_cap(PyObject *module, PyObject *arguments) {
  PyObject *pairs = NULL;
  double limit = 0.0;
  even_memory_curve curve;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "Od:memory_cap", &pairs, &limit) || as_curve(pairs, &curve) != 0) {
    return NULL;
  }
  int64_t cap = even_memory_curve_cap(&curve, limit);
  if (cap < 0) {
    Py_RETURN_NONE;
  }
  return PyLong_FromLongLong(cap);
}

static PyObject *memory_bytes(PyObject *module, PyObject *arguments) {
  PyObject *pairs = NULL;
  long long samples = 0;
  even_memory_curve curve;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "OL:memory_bytes", &pairs, &samples) || as_curve(pairs, &curve) != 0) {
    return NULL;
  }
  return PyFloat_FromDouble(even_memory_curve_bytes(&curve, samples));
}

static PyMethodDef functions[] = {
    {"balance", (PyCFunction)(void (*)(void))balance, METH_VARARGS | METH_KEYWORDS,
     "balance(tables, batch, caps=None, constant_seconds=None, buckets=None, micro_batches=None) -> (shares, "
     "step_seconds): the best integer split for measured tables, each a sequence of (samples, seconds)"},
    {"best_micro_batch", best_micro_batch, METH_VARARGS,
     "best_micro_batch(table, most) -> the size of a micro-batch, at most `most`, that takes the least time a sample"},
    {"memory_cap", memory_cap, METH_VARARGS,
     "memory_cap(peaks, limit_bytes) -> the most samples that the limit holds, by peaks (samples, bytes) that were "
     "measured; None: nothing is known"},
    {"memory_bytes", memory_bytes, METH_VARARGS,
     "memory_bytes(peaks, samples) -> the bytes that so many samples are expected to need; nan: nothing is known"},
    {NULL, NULL, 0, NULL}};

int even_ext_add_balance(PyObject *module) {
  return PyModule_AddFunctions(module, functions);
}
