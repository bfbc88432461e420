/* _core.Balancer and _core.balance: who gets how many samples. Microseconds of arithmetic: the GIL stays. */
#include "ext.h"

#include <evenstep/balancer.h>
#include <stdbool.h>

typedef struct balancer_object {
  PyObject_HEAD even_balancer *balancer;
  size_t ranks;
  int64_t batch;
  int policy;
} balancer_object;

static void *array(size_t count, size_t bytes) {
  void *memory = PyMem_Calloc(count == 0 ? 1 : count, bytes);
  return memory != NULL ? memory : PyErr_NoMemory();
}

static int as_i64(PyObject *object, int64_t *out) {
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

static int as_double(PyObject *object, double *out) {
  *out = PyFloat_AsDouble(object);
  return PyErr_Occurred() ? -1 : 0;
}

/* Any sequence as a tuple of `ranks` items; `what` names it in the error. */
static PyObject *one_a_rank(PyObject *sequence, size_t ranks, const char *what) {
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
static int as_pair(PyObject *object, int64_t *samples, double *seconds) {
  PyObject *pair = PySequence_Tuple(object);
  if (pair == NULL) {
    return -1;
  }
  int failed = -1;
  if (PyTuple_Size(pair) != 2) {
    PyErr_SetString(PyExc_ValueError, "wants pairs (samples, seconds)");
  } else {
    failed = as_i64(PyTuple_GetItem(pair, 0), samples) != 0 || as_double(PyTuple_GetItem(pair, 1), seconds) != 0;
  }
  Py_DECREF(pair);
  return failed ? -1 : 0;
}

/* None: *out stays NULL. Free with PyMem_Free. */
static int as_speeds(PyObject *object, size_t ranks, double **out) {
  if (object == Py_None) {
    return 0;
  }
  PyObject *tuple = one_a_rank(object, ranks, "speeds");
  if (tuple == NULL) {
    return -1;
  }
  int failed = (*out = array(ranks, sizeof **out)) == NULL;
  for (size_t r = 0; !failed && r < ranks; r++) {
    failed = as_double(PyTuple_GetItem(tuple, (Py_ssize_t)r), &(*out)[r]) != 0;
  }
  Py_DECREF(tuple);
  return failed ? -1 : 0;
}

/* A cap of None is no cap. None for all: *out stays NULL. Free with PyMem_Free. */
static int as_caps(PyObject *object, size_t ranks, int64_t **out) {
  if (object == Py_None) {
    return 0;
  }
  PyObject *tuple = one_a_rank(object, ranks, "caps");
  if (tuple == NULL) {
    return -1;
  }
  int failed = (*out = array(ranks, sizeof **out)) == NULL;
  for (size_t r = 0; !failed && r < ranks; r++) {
    PyObject *cap = PyTuple_GetItem(tuple, (Py_ssize_t)r);
    (*out)[r] = -1;
    failed = cap != Py_None && as_i64(cap, &(*out)[r]) != 0;
  }
  Py_DECREF(tuple);
  return failed ? -1 : 0;
}

static PyObject *as_list(const int64_t *shares, size_t ranks) {
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

static PyObject *balancer_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"policy", "ranks", "batch", "speeds", "caps", NULL};
  const char *policy = NULL;
  Py_ssize_t ranks = 0;
  long long batch = 0;
  PyObject *speeds = Py_None;
  PyObject *caps = Py_None;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "snL|OO:Balancer", keywords, &policy, &ranks, &batch, &speeds,
                                   &caps)) {
    return NULL;
  }
  if (ranks < 0) {
    return PyErr_Format(PyExc_ValueError, "%zd ranks; at least 1 is needed", ranks);
  }
  even_balancer_params params = {.size = sizeof params, .ranks = (size_t)ranks, .batch = batch};
  even_status status = even_policy_parse(policy, &params.policy);
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  double *speed = NULL;
  int64_t *cap = NULL;
  balancer_object *self = NULL;
  if (as_speeds(speeds, params.ranks, &speed) == 0 && as_caps(caps, params.ranks, &cap) == 0) {
    params.speeds = speed;
    params.caps = cap;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    self = (balancer_object *)make(type, 0);
  }
  if (self != NULL) {
    self->ranks = params.ranks;
    self->batch = batch;
    self->policy = (int)params.policy;
    status = even_balancer_open(&params, &self->balancer);
    if (status != EVEN_OK) {
      Py_DECREF((PyObject *)self);
      self = (balancer_object *)even_ext_raise(status);
    }
  }
  PyMem_Free(speed);
  PyMem_Free(cap);
  return (PyObject *)self;
}

static void balancer_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  even_balancer_close(((balancer_object *)self)->balancer);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF((PyObject *)type);
}

static PyObject *balancer_observe(PyObject *object, PyObject *timings) {
  balancer_object *self = (balancer_object *)object;
  PyObject *tuple = one_a_rank(timings, self->ranks, "timings");
  if (tuple == NULL) {
    return NULL;
  }
  even_step_timing *timing = array(self->ranks, sizeof *timing);
  bool read = timing != NULL;
  for (size_t r = 0; read && r < self->ranks; r++) {
    read = as_pair(PyTuple_GetItem(tuple, (Py_ssize_t)r), &timing[r].samples, &timing[r].busy_seconds) == 0;
  }
  Py_DECREF(tuple);
  even_status status = read ? even_balancer_observe(self->balancer, timing) : EVEN_OK;
  PyMem_Free(timing);
  if (!read || status != EVEN_OK) {
    return read ? even_ext_raise(status) : NULL;
  }
  Py_RETURN_NONE;
}

static PyObject *balancer_shares(PyObject *object, PyObject *arguments) {
  balancer_object *self = (balancer_object *)object;
  long long batch = self->batch;
  if (!PyArg_ParseTuple(arguments, "|L:shares", &batch)) {
    return NULL;
  }
  int64_t *shares = array(self->ranks, sizeof *shares);
  if (shares == NULL) {
    return NULL;
  }
  even_status status = even_balancer_shares(self->balancer, batch, shares);
  PyObject *list = status == EVEN_OK ? as_list(shares, self->ranks) : even_ext_raise(status);
  PyMem_Free(shares);
  return list;
}

static PyObject *balancer_predict(PyObject *object, PyObject *arguments) {
  balancer_object *self = (balancer_object *)object;
  Py_ssize_t rank = 0;
  long long samples = 0;
  if (!PyArg_ParseTuple(arguments, "nL:predict", &rank, &samples)) {
    return NULL;
  }
  if (rank < 0 || (size_t)rank >= self->ranks) {
    return PyErr_Format(PyExc_ValueError, "there is no rank %zd among %zu", rank, self->ranks);
  }
  return PyFloat_FromDouble(even_balancer_predict(self->balancer, (size_t)rank, samples));
}

static PyObject *balancer_on_equal(PyObject *object, void *closure) {
  (void)closure;
  double balanced = 0.0;
  double equal = 0.0;
  bool on_equal = even_balancer_on_equal(((balancer_object *)object)->balancer, &balanced, &equal);
  return Py_BuildValue("Ndd", PyBool_FromLong(on_equal), balanced, equal);
}

static PyObject *balancer_policy(PyObject *object, void *closure) {
  (void)closure;
  return PyUnicode_FromString(even_policy_name((even_policy)((balancer_object *)object)->policy));
}

/* One table from a sequence of pairs; both arrays freed by the caller also after a failure. */
static int as_table(PyObject *object, int64_t **samples, double **seconds, size_t *points) {
  PyObject *pairs = PySequence_Tuple(object);
  if (pairs == NULL) {
    return -1;
  }
  *points = (size_t)PyTuple_Size(pairs);
  *samples = array(*points, sizeof **samples);
  *seconds = *samples != NULL ? array(*points, sizeof **seconds) : NULL;
  int failed = *seconds == NULL;
  for (size_t i = 0; !failed && i < *points; i++) {
    failed = as_pair(PyTuple_GetItem(pairs, (Py_ssize_t)i), &(*samples)[i], &(*seconds)[i]) != 0;
  }
  Py_DECREF(pairs);
  return failed ? -1 : 0;
}

static PyObject *solve(PyObject *tables, PyObject *caps, int64_t batch) {
  size_t ranks = (size_t)PyTuple_Size(tables);
  even_time_table *table = array(ranks, sizeof *table);
  int64_t *shares = array(ranks, sizeof *shares);
  int64_t *cap = NULL;
  PyObject *result = NULL;
  bool read = table != NULL && shares != NULL && as_caps(caps, ranks, &cap) == 0;
  for (size_t r = 0; read && r < ranks; r++) {
    int64_t *samples = NULL;
    double *seconds = NULL;
    read = as_table(PyTuple_GetItem(tables, (Py_ssize_t)r), &samples, &seconds, &table[r].points) == 0;
    table[r].samples = samples;
    table[r].seconds = seconds;
  }
  if (read) {
    double step = 0.0;
    even_status status = even_balancer_solve(table, cap, ranks, batch, shares, &step);
    PyObject *list = status == EVEN_OK ? as_list(shares, ranks) : even_ext_raise(status);
    result = list != NULL ? Py_BuildValue("Nd", list, step) : NULL;
  }
  for (size_t r = 0; table != NULL && r < ranks; r++) {
    PyMem_Free((void *)table[r].samples);
    PyMem_Free((void *)table[r].seconds);
  }
  PyMem_Free(table);
  PyMem_Free(shares);
  PyMem_Free(cap);
  return result;
}

static PyObject *balance(PyObject *module, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"tables", "batch", "caps", NULL};
  PyObject *tables = NULL;
  PyObject *caps = Py_None;
  long long batch = 0;
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "OL|O:balance", keywords, &tables, &batch, &caps)) {
    return NULL;
  }
  PyObject *tuple = PySequence_Tuple(tables);
  if (tuple == NULL) {
    return NULL;
  }
  PyObject *result = solve(tuple, caps, batch);
  Py_DECREF(tuple);
  return result;
}

static PyMethodDef balancer_methods[] = {
    {"observe", balancer_observe, METH_O,
     "observe(timings): takes one step, a pair (samples, busy seconds) for each rank"},
    {"shares", balancer_shares, METH_VARARGS, "shares(batch=the global batch) -> the samples of each rank"},
    {"predict", balancer_predict, METH_VARARGS,
     "predict(rank, samples) -> seconds that the balancer expects, nan before anything was measured"},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef balancer_members[] = {{"policy", balancer_policy, NULL, "the policy's name", NULL},
                                         {"on_equal", balancer_on_equal, NULL,
                                          "(whether equal shares are given because balanced ones were measured "
                                          "slower, seconds of a balanced step, of an equal one)",
                                          NULL},
                                         {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot balancer_slots[] = {
    {Py_tp_new, (void *)balancer_new},
    {Py_tp_dealloc, (void *)balancer_dealloc},
    {Py_tp_methods, balancer_methods},
    {Py_tp_getset, balancer_members},
    {Py_tp_doc,
     "Balancer(policy, ranks, batch, speeds=None, caps=None): shares that follow the measured steps. The same "
     "observations give the same shares on every rank. One thread at a time."},
    {0, NULL}};
static PyType_Spec balancer_spec = {"evenstep._core.Balancer", sizeof(balancer_object), 0, Py_TPFLAGS_DEFAULT,
                                    balancer_slots};

static PyMethodDef functions[] = {
    {"balance", (PyCFunction)(void (*)(void))balance, METH_VARARGS | METH_KEYWORDS,
     "balance(tables, batch, caps=None) -> (shares, step_seconds): the best integer split for measured tables, each a "
     "sequence of (samples, seconds)"},
    {NULL, NULL, 0, NULL}};

int even_ext_add_balancer(PyObject *module) {
  PyObject *type = PyType_FromSpec(&balancer_spec);
  if (type == NULL || PyModule_AddObject(module, "Balancer", type) != 0) {
    Py_XDECREF(type);
    return -1;
  }
  return PyModule_AddFunctions(module, functions);
}
