/* _core.Memory, _core.MemoryCurve, _core.memory_caps: what a rank holds, how many samples fit. Microseconds: the GIL
 * stays. */
#include "arguments.h"
#include "objects.h"

#include <evenstep/balancer.h>
#include <stdbool.h>

#include "os/memory_use.h"

/* ---- what the process holds ---- */

typedef struct memory_object {
  PyObject_HEAD even_memory_place place;
} memory_object;

static PyObject *memory_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"root", NULL};
  const char *root = "";
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "|s:Memory", keywords, &root)) {
    return NULL;
  }
  memory_object *self = (memory_object *)even_ext_object_new(type);
  even_status status = self != NULL ? even_memory_place_find(root, &self->place) : EVEN_OK;
  if (status != EVEN_OK) {
    Py_DECREF((PyObject *)self);
    return even_ext_raise(status);
  }
  return (PyObject *)self;
}

static PyObject *memory_read(PyObject *object, PyObject *unused) {
  even_memory_use use;
  (void)unused;
  even_status status = even_memory_use_read(&((memory_object *)object)->place, &use);
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  PyObject *folder = PyUnicode_DecodeFSDefault(use.limited_by);
  return folder == NULL ? NULL
                        : Py_BuildValue("KKKKNd", (unsigned long long)use.resident_bytes,
                                        (unsigned long long)use.peak_bytes, (unsigned long long)use.available_bytes,
                                        (unsigned long long)use.limit_bytes, folder, use.free_part);
}

static PyObject *memory_ask(PyObject *object, PyObject *arguments) {
  unsigned long long bytes = 0;
  const char *what = NULL;
  if (!PyArg_ParseTuple(arguments, "Ks:ask", &bytes, &what)) {
    return NULL;
  }
  return even_ext_done(even_memory_ask(&((memory_object *)object)->place, bytes, what));
}

static PyObject *memory_reset_peak(PyObject *object, PyObject *unused) {
  (void)unused;
  return PyBool_FromLong(even_memory_peak_reset(&((memory_object *)object)->place));
}

static PyObject *memory_give_back(PyObject *object, PyObject *unused) {
  (void)object;
  (void)unused;
  Py_BEGIN_ALLOW_THREADS;
  even_memory_give_back();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

static PyObject *memory_keep(PyObject *object, PyObject *keep) {
  int truth = PyObject_IsTrue(keep);
  (void)object;
  return truth < 0 ? NULL : PyBool_FromLong(even_memory_keep(truth != 0));
}

static PyObject *memory_kept(PyObject *object, PyObject *unused) {
  (void)object;
  (void)unused;
  return PyLong_FromUnsignedLongLong(even_memory_kept_bytes());
}

static PyMethodDef memory_methods[] = {
    {"read", memory_read, METH_NOARGS,
     "read() -> (resident, peak, available, limit: bytes; folder of the control group whose limit that is, '': the "
     "host's memory; the least part that is free of any of these limits)"},
    {"ask", memory_ask, METH_VARARGS, "ask(bytes, what): raises EVEN_ERR_MEMORY where it may not take so many more"},
    {"give_back", memory_give_back, METH_NOARGS,
     "give_back(): free memory that the allocator keeps goes to the system"},
    {"keep", memory_keep, METH_O,
     "keep(bool) -> whether from now on the allocator keeps what is freed, or no longer does; False: it is none of "
     "glibc's, or refuses, and nothing has changed"},
    {"kept", memory_kept, METH_NOARGS, "kept() -> bytes that are free in the allocator's heaps; 0: it does not say"},
    {"reset_peak", memory_reset_peak, METH_NOARGS, "reset_peak() -> whether a new peak began"},
    {NULL, NULL, 0, NULL}};
static PyType_Slot memory_slots[] = {
    {Py_tp_new, (void *)memory_new},
    {Py_tp_dealloc, (void *)even_ext_object_free},
    {Py_tp_methods, memory_methods},
    {Py_tp_doc, "Memory(root=''): what this process holds, and how much more it may take. Any thread."},
    {0, NULL}};
static PyType_Spec memory_spec = {"evenstep._core.Memory", sizeof(memory_object), 0, Py_TPFLAGS_DEFAULT, memory_slots};

/* ---- what a number of samples needs ---- */

typedef struct curve_object {
  PyObject_HEAD even_memory_curve curve;
} curve_object;

static PyObject *curve_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {NULL};
  if (!PyArg_ParseTupleAndKeywords(arguments, names, ":MemoryCurve", keywords)) {
    return NULL;
  }
  return even_ext_object_new(type); /* zeros: nothing is known */
}

static PyObject *curve_take(PyObject *object, PyObject *arguments) {
  long long samples = 0;
  double bytes = 0.0;
  if (!PyArg_ParseTuple(arguments, "Ld:take", &samples, &bytes)) {
    return NULL;
  }
  even_memory_curve_take(&((curve_object *)object)->curve, samples, bytes);
  Py_RETURN_NONE;
}

static PyObject *curve_cap(PyObject *object, PyObject *limit) {
  double bytes = 0.0;
  if (even_ext_as_double(limit, &bytes) != 0) {
    return NULL;
  }
  return PyLong_FromLongLong(even_memory_curve_cap(&((curve_object *)object)->curve, bytes));
}

static PyMethodDef curve_methods[] = {
    {"take", curve_take, METH_VARARGS, "take(samples, peak bytes): takes a measured step"},
    {"cap", curve_cap, METH_O, "cap(bytes) -> the most samples that they hold; -1: nothing is known"},
    {NULL, NULL, 0, NULL}};
static PyType_Slot curve_slots[] = {
    {Py_tp_new, (void *)curve_new},
    {Py_tp_dealloc, (void *)even_ext_object_free},
    {Py_tp_methods, curve_methods},
    {Py_tp_doc, "MemoryCurve(): the memory that a rank needs for how many samples, by measured peaks."},
    {0, NULL}};
static PyType_Spec curve_spec = {"evenstep._core.MemoryCurve", sizeof(curve_object), 0, Py_TPFLAGS_DEFAULT,
                                 curve_slots};

/* ---- what all ranks hold ---- */

/* (pool, samples, cap, room); None for room: unknown. */
static int as_report(PyObject *object, even_memory_report *out) {
  PyObject *tuple = PySequence_Tuple(object);
  if (tuple == NULL) {
    return -1;
  }
  bool read = PyTuple_Size(tuple) == 4;
  if (!read) {
    PyErr_SetString(PyExc_ValueError, "wants (pool, samples, cap, room) of each rank");
  }
  if (read) {
    out->pool = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, 0));
    read = !PyErr_Occurred() && even_ext_as_i64(PyTuple_GetItem(tuple, 1), &out->samples) == 0 &&
           even_ext_as_i64(PyTuple_GetItem(tuple, 2), &out->cap) == 0;
  }
  if (read) {
    PyObject *room = PyTuple_GetItem(tuple, 3);
    out->room = EVEN_ROOM_UNKNOWN;
    read = room == Py_None || even_ext_as_i64(room, &out->room) == 0;
  }
  Py_DECREF(tuple);
  return read ? 0 : -1;
}

static PyObject *memory_caps(PyObject *module, PyObject *arguments) {
  PyObject *reports = NULL;
  PyObject *wants = NULL;
  long long batch = 0;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "OLO:memory_caps", &reports, &batch, &wants)) {
    return NULL;
  }
  PyObject *tuple = PySequence_Tuple(reports);
  if (tuple == NULL) {
    return NULL;
  }
  size_t ranks = (size_t)PyTuple_Size(tuple);
  even_memory_report *report = even_ext_array(ranks, sizeof *report);
  int64_t *caps = report != NULL ? even_ext_array(ranks, sizeof *caps) : NULL;
  int64_t *wanted = NULL;
  bool read = caps != NULL && even_ext_as_counts(wants, ranks, "wanted shares", 0, &wanted) == 0;
  if (read && wanted == NULL) {
    PyErr_SetString(PyExc_TypeError, "wants a wanted share of each rank");
    read = false;
  }
  for (size_t r = 0; read && r < ranks; r++) {
    read = as_report(PyTuple_GetItem(tuple, (Py_ssize_t)r), &report[r]) == 0;
  }
  PyObject *list = NULL;
  if (read) {
    even_memory_caps(report, ranks, batch, wanted, caps);
    list = even_ext_as_list(caps, ranks);
  }
  Py_DECREF(tuple);
  PyMem_Free(report);
  PyMem_Free(caps);
  PyMem_Free(wanted);
  return list;
}

static PyMethodDef functions[] = {
    {"memory_caps", memory_caps, METH_VARARGS,
     "memory_caps(reports, batch, wanted) -> the most samples of each rank, -1 for no cap; a report is (pool, samples, "
     "cap or -1, room or None)"},
    {NULL, NULL, 0, NULL}};

int even_ext_add_memory(PyObject *module) {
  if (even_ext_add_type(module, "Memory", &memory_spec) == NULL ||
      even_ext_add_type(module, "MemoryCurve", &curve_spec) == NULL) {
    return -1;
  }
  return PyModule_AddFunctions(module, functions);
}
