/* _core.CommCosts: the table of what collectives cost; and groups that choose by one (Comm.choose, Comm.measure). */
#include "comm.h"
#include "objects.h"

#include "base/fail.h"

#include <evenstep/comm_costs.h>

typedef struct costs_object {
  PyObject_HEAD even_comm_costs *costs;
} costs_object;

static PyTypeObject *costs_type;

static PyObject *costs_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {NULL};
  if (!PyArg_ParseTupleAndKeywords(arguments, names, ":CommCosts", keywords)) {
    return NULL;
  }
  costs_object *self = (costs_object *)even_ext_object_new(type);
  even_status status = self == NULL ? EVEN_OK : even_comm_costs_open(&self->costs);
  if (status != EVEN_OK) {
    Py_DECREF((PyObject *)self);
    return even_ext_raise(status);
  }
  return (PyObject *)self;
}

static void costs_dealloc(PyObject *object) {
  even_comm_costs_close(((costs_object *)object)->costs);
  even_ext_object_free(object);
}

/* Loads or saves, without the GIL: a file system may take its time. */
static PyObject *with_file(PyObject *object, PyObject *arguments, bool saves) {
  even_comm_costs *costs = ((costs_object *)object)->costs;
  const char *path = NULL;
  even_status status = EVEN_OK;
  if (!PyArg_ParseTuple(arguments, "s", &path)) {
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS;
  status = saves ? even_comm_costs_save(costs, path) : even_comm_costs_load(costs, path);
  Py_END_ALLOW_THREADS;
  return even_ext_done(status);
}
static PyObject *costs_load(PyObject *object, PyObject *arguments) {
  return with_file(object, arguments, false);
}
static PyObject *costs_save(PyObject *object, PyObject *arguments) {
  return with_file(object, arguments, true);
}

static PyObject *costs_add(PyObject *object, PyObject *arguments) {
  even_comm_cost_key key = {0};
  unsigned long long bytes = 0;
  double seconds = 0;
  if (!PyArg_ParseTuple(arguments, "ssssKd:add", &key.collective, &key.shape, &key.engine, &key.way, &bytes,
                        &seconds)) {
    return NULL;
  }
  key.bytes = bytes;
  even_status status = even_comm_costs_add(((costs_object *)object)->costs, &key, seconds);
  return even_ext_done(status);
}

static PyObject *costs_find(PyObject *object, PyObject *arguments) {
  even_comm_cost_key key = {0};
  unsigned long long bytes = 0;
  double seconds = 0;
  if (!PyArg_ParseTuple(arguments, "ssssK:find", &key.collective, &key.shape, &key.engine, &key.way, &bytes)) {
    return NULL;
  }
  key.bytes = bytes;
  if (!even_comm_costs_find(((costs_object *)object)->costs, &key, &seconds)) {
    Py_RETURN_NONE;
  }
  return PyFloat_FromDouble(seconds);
}

static PyObject *costs_step(PyObject *object, PyObject *arguments) {
  const char *shape = NULL;
  const char *engine = NULL;
  double seconds = 0;
  if (!PyArg_ParseTuple(arguments, "ss:step", &shape, &engine)) {
    return NULL;
  }
  if (!even_comm_costs_step(((costs_object *)object)->costs, shape, engine, &seconds)) {
    Py_RETURN_NONE;
  }
  return PyFloat_FromDouble(seconds);
}

static PyObject *costs_rows(PyObject *object, PyObject *unused) {
  even_comm_costs *costs = ((costs_object *)object)->costs;
  even_comm_cost cost;
  PyObject *list = PyList_New(0);
  (void)unused;
  for (size_t i = 0; list != NULL && even_comm_costs_at(costs, i, &cost); i++) {
    PyObject *row =
        Py_BuildValue("ssssKdkL", cost.collective, cost.shape, cost.engine, cost.way, (unsigned long long)cost.bytes,
                      cost.seconds, (unsigned long)cost.samples, (long long)cost.at);
    if (row == NULL || PyList_Append(list, row) != 0) {
      Py_CLEAR(list);
    }
    Py_XDECREF(row);
  }
  return list;
}

/* ---- groups ---- */

bool even_ext_take_costs(PyObject *object, even_comm_costs **out) {
  *out = NULL;
  if (object == Py_None) {
    return true;
  }
  if (Py_TYPE(object) != costs_type) {
    PyErr_SetString(PyExc_TypeError, "costs are a CommCosts, or None");
    return false;
  }
  *out = ((costs_object *)object)->costs;
  return true;
}

PyObject *even_ext_comm_choose(PyObject *object, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"costs", "shape", "way", "measure_seconds", NULL};
  even_ext_comm *self = (even_ext_comm *)object;
  even_comm_choosing params = {.size = sizeof params};
  PyObject *costs = Py_None;
  even_status status = EVEN_OK;
  even_comm *comm = even_ext_comm_open_group(self);
  if (comm == NULL ||
      !PyArg_ParseTupleAndKeywords(arguments, names, "|Ozzd:choose", keywords, &costs, &params.shape, &params.way,
                                   &params.measure_seconds) ||
      !even_ext_take_costs(costs, &params.costs)) {
    return NULL;
  }
  even_ext_comm_begin(self);
  Py_BEGIN_ALLOW_THREADS;
  status = even_comm_choose(comm, &params);
  Py_END_ALLOW_THREADS;
  return even_ext_comm_done(self, status);
}

PyObject *even_ext_comm_measure(PyObject *object, PyObject *arguments) {
  even_ext_comm *self = (even_ext_comm *)object;
  PyObject *object_of_costs = NULL;
  even_comm_costs *costs = NULL;
  const char *shape = NULL;
  double seconds = 0;
  even_status status = EVEN_OK;
  even_comm *comm = even_ext_comm_open_group(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "Osd:measure", &object_of_costs, &shape, &seconds) ||
      !even_ext_take_costs(object_of_costs, &costs)) {
    return NULL;
  }
  even_ext_comm_begin(self);
  Py_BEGIN_ALLOW_THREADS;
  status = even_comm_measure(comm, costs, shape, seconds);
  Py_END_ALLOW_THREADS;
  return even_ext_comm_done(self, status);
}

static PyMethodDef costs_methods[] = {
    {"load", costs_load, METH_VARARGS, "load(path): adds a file's entries; a file that is not there is an empty one"},
    {"save", costs_save, METH_VARARGS, "save(path): adds to the file what was learnt since it was loaded or saved"},
    {"add", costs_add, METH_VARARGS, "add(collective, shape, engine, way, bytes, seconds): a measured call"},
    {"find", costs_find, METH_VARARGS, "find(collective, shape, engine, way, bytes) -> seconds, or None"},
    {"step", costs_step, METH_VARARGS, "step(shape, engine) -> seconds of an invented step's all-reduces, or None"},
    {"rows", costs_rows, METH_NOARGS,
     "[(collective, shape, engine, way, bytes, seconds, samples, when it was last kept)]"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot costs_slots[] = {{Py_tp_new, (void *)costs_new},
                                    {Py_tp_dealloc, (void *)costs_dealloc},
                                    {Py_tp_methods, costs_methods},
                                    {Py_tp_doc, "CommCosts()\n\nWhat collectives cost: measured seconds."},
                                    {0, NULL}};

static PyType_Spec costs_spec = {.name = "evenstep._core.CommCosts",
                                 .basicsize = sizeof(costs_object),
                                 .flags = Py_TPFLAGS_DEFAULT,
                                 .slots = costs_slots};

int even_ext_add_costs(PyObject *module) {
  PyObject *type = even_ext_add_type(module, "CommCosts", &costs_spec);
  if (type == NULL) {
    return -1;
  }
  costs_type = (PyTypeObject *)type;
  return 0;
}
