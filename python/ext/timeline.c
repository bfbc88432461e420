/* _core.Timeline, a timeline file of this process's own, and what else lays calls on a timeline: a thread's row, NVTX
 * ranges. */
#include "ext.h"
#include "objects.h"

#include <evenstep/telemetry.h>

#include "os/ranges.h"

typedef struct timeline_object {
  PyObject_HEAD even_timeline *timeline; /* NULL once closed */
} timeline_object;

static PyObject *timeline_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  int fd = -1;
  int rank = 0;
  const char *path = NULL;
  (void)names;
  if (!PyArg_ParseTuple(arguments, "iis:Timeline", &fd, &rank, &path)) {
    return NULL;
  }
  timeline_object *self = (timeline_object *)even_ext_object_new(type);
  if (self == NULL) {
    return NULL;
  }
  even_status status = even_timeline_open(fd, rank, path, &self->timeline);
  if (status != EVEN_OK) {
    Py_DECREF((PyObject *)self);
    return even_ext_raise(status);
  }
  return (PyObject *)self;
}

static PyObject *timeline_close(PyObject *self, PyObject *unused) {
  even_timeline *timeline = ((timeline_object *)self)->timeline;
  even_status status = EVEN_OK;
  (void)unused;
  ((timeline_object *)self)->timeline = NULL;
  Py_BEGIN_ALLOW_THREADS;
  status = even_timeline_close(timeline);
  Py_END_ALLOW_THREADS;
  return even_ext_done(status);
}

static void timeline_dealloc(PyObject *self) {
  (void)!even_timeline_close(((timeline_object *)self)->timeline);
  even_ext_object_free(self);
}

static PyMethodDef timeline_methods[] = {
    {"close", timeline_close, METH_NOARGS, "Writes what is left; raises what writing failed with."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot timeline_slots[] = {
    {Py_tp_new, (void *)timeline_new},
    {Py_tp_dealloc, (void *)timeline_dealloc},
    {Py_tp_methods, timeline_methods},
    {Py_tp_doc, "Timeline(fd, rank, path): a thread writes what segment fd's first ring gets into a file."},
    {0, NULL}};
static PyType_Spec timeline_spec = {"evenstep._core.Timeline", sizeof(timeline_object), 0, Py_TPFLAGS_DEFAULT,
                                    timeline_slots};

static PyObject *ranges_open(PyObject *module, PyObject *arguments) {
  const char *library = NULL;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "|z:ranges_open", &library)) {
    return NULL;
  }
  even_status status = even_ranges_open(library);
  return even_ext_done(status);
}

static PyObject *range_start(PyObject *module, PyObject *arguments) {
  const char *name = NULL;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "s:range_start", &name)) {
    return NULL;
  }
  return PyLong_FromUnsignedLongLong(even_ranges_on() ? even_range_start(name) : 0);
}

static PyObject *range_end(PyObject *module, PyObject *arguments) {
  unsigned long long range = 0;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "K:range_end", &range)) {
    return NULL;
  }
  if (even_ranges_on()) {
    even_range_end(range);
  }
  Py_RETURN_NONE;
}

static PyObject *telemetry_row(PyObject *module, PyObject *arguments) {
  int row = 0;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "i:telemetry_row", &row)) {
    return NULL;
  }
  even_telemetry_set_row(row);
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"ranges_open", ranges_open, METH_VARARGS,
     "ranges_open(library=None): NVTX ranges from now on, around each collective too; raises where it is not here"},
    {"range_start", range_start, METH_VARARGS, "range_start(name) -> what range_end takes; after ranges_open"},
    {"range_end", range_end, METH_VARARGS, "range_end(range)"},
    {"telemetry_row", telemetry_row, METH_VARARGS, "telemetry_row(row): of this thread's calls in a timeline"},
    {NULL, NULL, 0, NULL}};

int even_ext_add_timeline(PyObject *module) {
  if (even_ext_add_type(module, "Timeline", &timeline_spec) == NULL) {
    return -1;
  }
  return PyModule_AddFunctions(module, functions);
}
