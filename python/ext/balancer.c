/* _core.Balancer: who gets how many samples. Microseconds of arithmetic: the GIL stays. */
#include "arguments.h"
#include "objects.h"

#include <evenstep/balancer.h>
#include <stdbool.h>

typedef struct balancer_object {
  PyObject_HEAD even_balancer *balancer;
  PyObject *choose; /* a policy that is a function; else NULL */
  size_t ranks;
  int64_t batch;
  int policy;
} balancer_object;

/* ---- a policy that is a function ---- */

/* A list with one item a rank; `make` gives a new reference. */
static PyObject *list_of(const even_policy_view *view, PyObject *(*make)(const even_policy_view *, size_t)) {
  PyObject *list = PyList_New((Py_ssize_t)view->ranks);
  for (size_t r = 0; list != NULL && r < view->ranks; r++) {
    PyObject *item = make(view, r);
    if (item == NULL || PyList_SetItem(list, (Py_ssize_t)r, item) != 0) {
      Py_DECREF(list);
      return NULL;
    }
  }
  return list;
}

static PyObject *cap_of(const even_policy_view *view, size_t rank) {
  if (view->caps[rank] < 0) {
    Py_RETURN_NONE;
  }
  return PyLong_FromLongLong(view->caps[rank]);
}

static PyObject *timing_of(const even_policy_view *view, size_t rank) {
  return Py_BuildValue("Ld", (long long)view->last[rank].samples, view->last[rank].busy_seconds);
}

static PyObject *fixed_of(const even_policy_view *view, size_t rank) {
  return PyFloat_FromDouble(view->fixed_seconds[rank]);
}

static PyObject *slope_of(const even_policy_view *view, size_t rank) {
  return PyFloat_FromDouble(view->seconds_per_sample[rank]);
}

static PyObject *proposed_of(const even_policy_view *view, size_t rank) {
  return PyLong_FromLongLong(view->proposed[rank]);
}

/* The view as arguments: batch, steps, caps, last, fixed_seconds, seconds_per_sample, proposed. */
static PyObject *view_arguments(const even_policy_view *view) {
  PyObject *last = NULL;
  if (view->last != NULL) {
    last = list_of(view, timing_of);
  } else {
    last = Py_None;
    Py_INCREF(last);
  }
  return Py_BuildValue("LLNNNNN", (long long)view->batch, (long long)view->steps, list_of(view, cap_of), last,
                       list_of(view, fixed_of), list_of(view, slope_of), list_of(view, proposed_of));
}

/* An exception stays set: whoever asked for shares raises it. */
static even_status choose(void *context, const even_policy_view *view, int64_t *shares) {
  PyObject *arguments = view_arguments(view);
  PyObject *answer = arguments != NULL ? PyObject_CallObject(context, arguments) : NULL;
  Py_XDECREF(arguments);
  PyObject *tuple = answer != NULL ? even_ext_one_a_rank(answer, view->ranks, "shares") : NULL;
  Py_XDECREF(answer);
  bool read = tuple != NULL;
  for (size_t r = 0; read && r < view->ranks; r++) {
    read = even_ext_as_i64(PyTuple_GetItem(tuple, (Py_ssize_t)r), &shares[r]) == 0;
  }
  Py_XDECREF(tuple);
  return read ? EVEN_OK : EVEN_ERR_ARGUMENT;
}

/* A policy's name, or a function. */
static int read_policy(PyObject *policy, balancer_object *self, even_balancer_params *params) {
  if (PyCallable_Check(policy)) {
    Py_INCREF(policy);
    self->choose = policy;
    params->policy = EVEN_POLICY_CALLBACK;
    params->choose = choose;
    params->choose_context = policy;
    return 0;
  }
  PyObject *bytes = PyUnicode_Check(policy) ? PyUnicode_AsUTF8String(policy) : NULL;
  if (bytes == NULL) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_TypeError, "policy: give the name of one, or a function that chooses the shares");
    }
    return -1;
  }
  even_status status = even_policy_parse(PyBytes_AsString(bytes), &params->policy);
  Py_DECREF(bytes);
  return status == EVEN_OK ? 0 : (even_ext_raise(status), -1);
}

static PyObject *balancer_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"policy", "ranks", "batch", "speeds", "caps", "buckets", NULL};
  PyObject *policy = NULL;
  Py_ssize_t ranks = 0;
  long long batch = 0;
  PyObject *speeds = Py_None;
  PyObject *caps = Py_None;
  PyObject *buckets = Py_None;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "OnL|OOO:Balancer", keywords, &policy, &ranks, &batch, &speeds,
                                   &caps, &buckets)) {
    return NULL;
  }
  if (ranks < 0) {
    return PyErr_Format(PyExc_ValueError, "%zd ranks; at least 1 is needed", ranks);
  }
  even_balancer_params params = {.size = sizeof params, .ranks = (size_t)ranks, .batch = batch};
  double *speed = NULL;
  int64_t *cap = NULL;
  int64_t *bucket = NULL;
  balancer_object *self = (balancer_object *)even_ext_object_new(type);
  bool read = self != NULL && read_policy(policy, self, &params) == 0 &&
              even_ext_as_doubles(speeds, params.ranks, "speeds", &speed) == 0 &&
              even_ext_as_counts(caps, params.ranks, "caps", -1, &cap) == 0 &&
              even_ext_as_counts(buckets, params.ranks, "buckets", 0, &bucket) == 0;
  if (read) {
    params.speeds = speed;
    params.caps = cap;
    params.buckets = bucket;
    self->ranks = params.ranks;
    self->batch = batch;
    self->policy = (int)params.policy;
    even_status status = even_balancer_open(&params, &self->balancer);
    read = status == EVEN_OK || even_ext_raise(status) != NULL;
  }
  PyMem_Free(speed);
  PyMem_Free(cap);
  PyMem_Free(bucket);
  if (!read) {
    Py_XDECREF((PyObject *)self);
    return NULL;
  }
  return (PyObject *)self;
}

static void balancer_dealloc(PyObject *self) {
  even_balancer_close(((balancer_object *)self)->balancer);
  Py_XDECREF(((balancer_object *)self)->choose);
  even_ext_object_free(self);
}

/* Of spared[] those ranks that `ranks` (any sequence of numbers) names. */
static int read_spared(PyObject *ranks, size_t count, bool *spared) {
  PyObject *tuple = PySequence_Tuple(ranks);
  if (tuple == NULL) {
    return -1;
  }
  int failed = 0;
  for (Py_ssize_t i = 0; !failed && i < PyTuple_Size(tuple); i++) {
    int64_t rank = -1;
    failed = even_ext_as_i64(PyTuple_GetItem(tuple, i), &rank);
    if (!failed && (rank < 0 || (uint64_t)rank >= count)) {
      PyErr_Format(PyExc_ValueError, "there is no rank %lld among %zu", (long long)rank, count);
      failed = -1;
    } else if (!failed) {
      spared[rank] = true;
    }
  }
  Py_DECREF(tuple);
  return failed;
}

static PyObject *balancer_observe(PyObject *object, PyObject *arguments) {
  balancer_object *self = (balancer_object *)object;
  PyObject *timings = NULL;
  PyObject *ranks = NULL;
  PyObject *exchange = Py_None;
  PyObject *passes = Py_None;
  double *exchange_seconds = NULL;
  double *pass_seconds = NULL;
  if (!PyArg_ParseTuple(arguments, "O|OOO:observe", &timings, &ranks, &exchange, &passes)) {
    return NULL;
  }
  PyObject *tuple = even_ext_one_a_rank(timings, self->ranks, "timings");
  if (tuple == NULL) {
    return NULL;
  }
  even_step_timing *timing = even_ext_array(self->ranks, sizeof *timing);
  bool *spared = timing != NULL ? even_ext_array(self->ranks, sizeof *spared) : NULL;
  bool read = spared != NULL && (ranks == NULL || read_spared(ranks, self->ranks, spared) == 0) &&
              even_ext_as_doubles(exchange, self->ranks, "exchange", &exchange_seconds) == 0 &&
              even_ext_as_doubles(passes, self->ranks, "passes", &pass_seconds) == 0;
  for (size_t r = 0; read && r < self->ranks; r++) {
    read = even_ext_as_pair(PyTuple_GetItem(tuple, (Py_ssize_t)r), &timing[r].samples, &timing[r].busy_seconds) == 0;
  }
  Py_DECREF(tuple);
  even_status status =
      read ? even_balancer_observe_waits(self->balancer, timing, spared, exchange_seconds, pass_seconds) : EVEN_OK;
  PyMem_Free(timing);
  PyMem_Free(spared);
  PyMem_Free(exchange_seconds);
  PyMem_Free(pass_seconds);
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
  int64_t *shares = even_ext_array(self->ranks, sizeof *shares);
  if (shares == NULL) {
    return NULL;
  }
  even_status status = even_balancer_shares(self->balancer, batch, shares);
  PyObject *list = NULL;
  if (status == EVEN_OK) {
    list = even_ext_as_list(shares, self->ranks);
  } else if (!PyErr_Occurred()) { /* by the function that is the policy */
    list = even_ext_raise(status);
  }
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

static PyObject *balancer_set_caps(PyObject *object, PyObject *caps) {
  balancer_object *self = (balancer_object *)object;
  int64_t *cap = NULL;
  bool read = even_ext_as_counts(caps, self->ranks, "caps", -1, &cap) == 0;
  even_status status = read ? even_balancer_set_caps(self->balancer, cap) : EVEN_OK;
  PyMem_Free(cap);
  if (!read || status != EVEN_OK) {
    return read ? even_ext_raise(status) : NULL;
  }
  Py_RETURN_NONE;
}

static PyObject *balancer_set_micro_batches(PyObject *object, PyObject *arguments) {
  balancer_object *self = (balancer_object *)object;
  PyObject *sizes = NULL;
  PyObject *more = NULL;
  if (!PyArg_ParseTuple(arguments, "OO:set_micro_batches", &sizes, &more)) {
    return NULL;
  }
  int64_t *size = NULL;
  double *samples = NULL;
  bool read = sizes != Py_None && more != Py_None;
  if (!read) {
    PyErr_SetString(PyExc_TypeError, "set_micro_batches: give a size and a number of samples for each rank");
  }
  read = read && even_ext_as_counts(sizes, self->ranks, "sizes", 0, &size) == 0 &&
         even_ext_as_doubles(more, self->ranks, "more_samples", &samples) == 0;
  even_status status = read ? even_balancer_set_micro_batches(self->balancer, size, samples) : EVEN_OK;
  PyMem_Free(size);
  PyMem_Free(samples);
  if (!read || status != EVEN_OK) {
    return read ? even_ext_raise(status) : NULL;
  }
  Py_RETURN_NONE;
}

static PyObject *balancer_without_caps(PyObject *object, PyObject *unused) {
  balancer_object *self = (balancer_object *)object;
  double seconds = 0.0;
  (void)unused;
  int64_t *shares = even_ext_array(self->ranks, sizeof *shares);
  if (shares == NULL) {
    return NULL;
  }
  even_status status = even_balancer_without_caps(self->balancer, shares, &seconds);
  PyObject *list = status == EVEN_OK ? even_ext_as_list(shares, self->ranks) : even_ext_raise(status);
  PyMem_Free(shares);
  return list != NULL ? Py_BuildValue("Nd", list, seconds) : NULL;
}

static PyObject *balancer_save(PyObject *object, PyObject *unused) {
  even_balancer *balancer = ((balancer_object *)object)->balancer;
  (void)unused;
  size_t size = even_balancer_save(balancer, NULL, 0);
  PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
  if (bytes != NULL) {
    (void)even_balancer_save(balancer, PyBytes_AsString(bytes), size);
  }
  return bytes;
}

static PyObject *balancer_restore(PyObject *object, PyObject *saved) {
  char *bytes = NULL;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(saved, &bytes, &size) != 0) {
    return NULL;
  }
  return even_ext_done(even_balancer_restore(((balancer_object *)object)->balancer, bytes, (size_t)size));
}

static PyObject *balancer_choice(PyObject *object, void *closure) {
  (void)closure;
  double seconds = 0.0;
  double other = 0.0;
  even_policy choice = even_balancer_choice(((balancer_object *)object)->balancer, &seconds, &other);
  return Py_BuildValue("sdd", even_policy_name(choice), seconds, other);
}

static PyObject *balancer_policy(PyObject *object, void *closure) {
  (void)closure;
  return PyUnicode_FromString(even_policy_name((even_policy)((balancer_object *)object)->policy));
}

static PyMethodDef balancer_methods[] = {
    {"observe", balancer_observe, METH_VARARGS,
     "observe(timings, spared=(), exchange=None, passes=None): takes one step, a pair (samples, busy seconds) for each "
     "rank; those that left out part of a dummy batch's work; the seconds that each needed for the exchange by itself; "
     "its busy seconds with what it waited for others within the step, 0 where that is nothing"},
    {"shares", balancer_shares, METH_VARARGS, "shares(batch=the global batch) -> the samples of each rank"},
    {"set_caps", balancer_set_caps, METH_O,
     "set_caps(caps): most samples of each rank from now on; None for one or all: no cap"},
    {"set_micro_batches", balancer_set_micro_batches, METH_VARARGS,
     "set_micro_batches(sizes, more_samples): of how many samples each rank's micro-batches are (0: none), and as how "
     "many samples beyond its own each counts"},
    {"without_caps", balancer_without_caps, METH_NOARGS,
     "without_caps() -> (the samples of each rank were there no caps, seconds of such a step)"},
    {"save", balancer_save, METH_NOARGS, "save() -> all that was learned, as bytes"},
    {"restore", balancer_restore, METH_O,
     "restore(saved): goes on from what save() gave of a balancer of the same policy, ranks, batch and buckets; the "
     "caps "
     "stay. EvenstepError, after which nothing has changed: of another one, damaged, or of a later version"},
    {"predict", balancer_predict, METH_VARARGS,
     "predict(rank, samples) -> seconds that the balancer expects, nan before anything was measured"},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef balancer_members[] = {{"policy", balancer_policy, NULL, "the policy's name", NULL},
                                         {"on_equal", balancer_on_equal, NULL,
                                          "(whether equal shares are given because balanced ones were measured "
                                          "slower, seconds of a balanced step, of an equal one)",
                                          NULL},
                                         {"choice", balancer_choice, NULL,
                                          "(which split runs: equal, proportional, hybrid or callback; seconds of a "
                                          "step of it, of the one it was preferred to; 0 before a trial)",
                                          NULL},
                                         {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot balancer_slots[] = {
    {Py_tp_new, (void *)balancer_new},
    {Py_tp_dealloc, (void *)balancer_dealloc},
    {Py_tp_methods, balancer_methods},
    {Py_tp_getset, balancer_members},
    {Py_tp_doc,
     "Balancer(policy, ranks, batch, speeds=None, caps=None, buckets=None): shares that follow the measured steps. "
     "The same observations give the same shares on every rank. One thread at a time."},
    {0, NULL}};
static PyType_Spec balancer_spec = {"evenstep._core.Balancer", sizeof(balancer_object), 0, Py_TPFLAGS_DEFAULT,
                                    balancer_slots};

int even_ext_add_balancer(PyObject *module) {
  if (even_ext_add_type(module, "Balancer", &balancer_spec) == NULL) {
    return -1;
  }
  return even_ext_add_balance(module);
}
