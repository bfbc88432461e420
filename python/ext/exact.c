/* _core.Exact: sums over blocks whose bits depend on the blocks alone. Gradients cross as addresses; add and finish
 * release the GIL. */
#include "comm.h"
#include "ext.h"
#include "objects.h"

#include <evenstep/exact.h>

#include "base/alloc.h"

typedef struct exact_object {
  PyObject_HEAD even_exact *exact; /* NULL once closed */
  PyObject *comm_handle;           /* a capsule: the group lives as long as it; NULL: alone */
  size_t parameter_count;
  int ranks;
  int busy; /* a thread is inside a call */
} exact_object;

/* A sequence of (count, dtype) into *out (free with even_free). */
static int to_parameters(PyObject *sequence, even_sync_parameter **out, size_t *count) {
  PyObject *list = PySequence_List(sequence);
  if (list == NULL) {
    return -1;
  }
  *count = (size_t)PyList_Size(list);
  even_status status = EVEN_NEW_ARRAY(out, *count);
  int failed = status != EVEN_OK;
  if (failed) {
    (void)even_ext_raise(status);
  }
  for (size_t i = 0; !failed && i < *count; i++) {
    Py_ssize_t elements = 0;
    int dtype = 0;
    PyObject *item = PyList_GetItem(list, (Py_ssize_t)i); /* borrowed */
    failed = !PyTuple_Check(item) || !PyArg_ParseTuple(item, "ni", &elements, &dtype) || elements < 0;
    if (failed && PyErr_Occurred() == NULL) {
      PyErr_Format(PyExc_ValueError, "parameter %zu is not (count, dtype)", i);
    }
    (*out)[i] = (even_sync_parameter){.count = (size_t)elements, .dtype = (even_dtype)dtype};
  }
  Py_DECREF(list);
  return failed ? -1 : 0;
}

static int open_sums(exact_object *self, PyObject *comm, const even_exact_params *params) {
  even_comm *group = NULL;
  self->ranks = 1;
  if (comm != Py_None) {
    self->comm_handle = PyObject_GetAttrString(comm, "handle");
    group = self->comm_handle == NULL ? NULL : PyCapsule_GetPointer(self->comm_handle, "evenstep.comm");
    if (group == NULL) {
      return -1;
    }
    self->ranks = even_comm_ranks(group);
  }
  even_status status = even_exact_open(params, group, &self->exact);
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
    return -1;
  }
  return 0;
}

static PyObject *exact_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"parameters", "comm", "part_bytes", NULL};
  PyObject *sequence = NULL;
  PyObject *comm = Py_None;
  Py_ssize_t part_bytes = 0;
  even_exact_params params = {.size = sizeof params};
  even_sync_parameter *parameters = NULL;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "O|On:Exact", keywords, &sequence, &comm, &part_bytes)) {
    return NULL;
  }
  if (part_bytes < 0) {
    return PyErr_Format(PyExc_ValueError, "sizes in bytes cannot be negative");
  }
  exact_object *self = (exact_object *)even_ext_object_new(type);
  if (self == NULL) {
    return NULL;
  }
  int failed = to_parameters(sequence, &parameters, &params.parameter_count);
  if (failed == 0) {
    params.parameters = parameters;
    params.part_bytes = (size_t)part_bytes;
    self->parameter_count = params.parameter_count;
    failed = open_sums(self, comm, &params);
  }
  even_free(parameters);
  if (failed != 0) {
    Py_DECREF((PyObject *)self);
    return NULL;
  }
  return (PyObject *)self;
}

static void close_sums(exact_object *self) {
  even_exact_close(self->exact);
  self->exact = NULL;
  Py_CLEAR(self->comm_handle);
}

static void exact_dealloc(PyObject *object) {
  close_sums((exact_object *)object);
  even_ext_object_free(object);
}

/* The sums, or NULL with an exception when they are closed or another thread is inside a call. */
static even_exact *sums_of(exact_object *self) {
  if (self->exact == NULL || self->busy) {
    PyErr_SetString(even_ext_error, self->exact == NULL ? "the exact sums are closed"
                                                        : "another thread is inside a call of these exact sums");
    return NULL;
  }
  return self->exact;
}

static PyObject *exact_begin(PyObject *object, PyObject *sequence) {
  exact_object *self = (exact_object *)object;
  even_exact *exact = sums_of(self);
  size_t *counts = exact == NULL ? NULL : even_ext_to_counts(sequence, self->ranks);
  if (counts == NULL) {
    return NULL;
  }
  even_status status = even_exact_begin(exact, counts);
  even_free(counts);
  return even_ext_done(status);
}

/* One address a parameter into a new array (even_free); 0 is NULL. */
static void **to_addresses(const exact_object *self, PyObject *sequence) {
  PyObject *list = PySequence_List(sequence);
  void **out = NULL;
  if (list == NULL) {
    return NULL;
  }
  if ((size_t)PyList_Size(list) != self->parameter_count) {
    PyErr_Format(PyExc_ValueError, "%zd addresses for %zu parameters", PyList_Size(list), self->parameter_count);
    Py_DECREF(list);
    return NULL;
  }
  even_status status = EVEN_NEW_ARRAY(&out, self->parameter_count);
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
  }
  for (size_t i = 0; out != NULL && i < self->parameter_count; i++) {
    if (!even_ext_to_address(PyList_GetItem(list, (Py_ssize_t)i), &out[i])) {
      even_free(out);
      out = NULL;
    }
  }
  Py_DECREF(list);
  return out;
}

static PyObject *exact_add(PyObject *object, PyObject *arguments) {
  exact_object *self = (exact_object *)object;
  double weight = 0;
  double loss = 0;
  PyObject *sequence = NULL;
  even_exact *exact = sums_of(self);
  if (exact == NULL || !PyArg_ParseTuple(arguments, "ddO:add", &weight, &loss, &sequence)) {
    return NULL;
  }
  void **gradients = to_addresses(self, sequence);
  if (gradients == NULL) {
    return NULL;
  }
  even_status status = EVEN_OK;
  self->busy = 1;
  Py_BEGIN_ALLOW_THREADS;
  status = even_exact_add(exact, weight, loss, (const void *const *)gradients);
  Py_END_ALLOW_THREADS;
  self->busy = 0;
  even_free((void *)gradients);
  return even_ext_done(status);
}

static PyObject *exact_finish(PyObject *object, PyObject *sequence) {
  exact_object *self = (exact_object *)object;
  even_exact_report report = {0};
  even_exact *exact = sums_of(self);
  void **targets = exact == NULL ? NULL : to_addresses(self, sequence);
  if (targets == NULL) {
    return NULL;
  }
  PyObject *used = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->parameter_count);
  if (used == NULL) {
    even_free((void *)targets);
    return NULL;
  }
  uint8_t *flags = (uint8_t *)PyBytes_AsString(used);
  even_status status = EVEN_OK;
  self->busy = 1;
  even_ext_comes_from_python(true);
  Py_BEGIN_ALLOW_THREADS;
  status = even_exact_finish(exact, targets, flags, &report);
  Py_END_ALLOW_THREADS;
  even_ext_comes_from_python(false);
  self->busy = 0;
  even_free((void *)targets);
  if (status != EVEN_OK) {
    Py_DECREF(used);
    return even_ext_raise(status);
  }
  return Py_BuildValue("(NddKKK)", used, report.weight, report.loss, (unsigned long long)report.communication_ns,
                       (unsigned long long)report.peer_wait_ns, (unsigned long long)report.bytes);
}

static PyObject *exact_close(PyObject *object, PyObject *unused) {
  exact_object *self = (exact_object *)object;
  (void)unused;
  if (self->exact != NULL && sums_of(self) == NULL) {
    return NULL;
  }
  close_sums(self);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"begin", exact_begin, METH_O, "begin(counts): opens a round; counts[r] blocks are rank r's"},
    {"add", exact_add, METH_VARARGS,
     "add(weight, loss, addresses): this rank's next block; one address of a gradient a parameter, 0: none"},
    {"finish", exact_finish, METH_O,
     "finish(addresses): writes the weighted mean of all blocks' gradients there; returns (used, weight, loss, "
     "communication_ns, peer_wait_ns, bytes)"},
    {"close", exact_close, METH_NOARGS, "frees the sums"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, (void *)exact_new},
                              {Py_tp_dealloc, (void *)exact_dealloc},
                              {Py_tp_methods, methods},
                              {Py_tp_doc, "Sums over blocks, exact to the bit (include/evenstep/exact.h)."},
                              {0, NULL}};
static PyType_Spec spec = {"evenstep._core.Exact", sizeof(exact_object), 0, Py_TPFLAGS_DEFAULT, slots};

int even_ext_add_exact(PyObject *module) {
  if (even_ext_add_type(module, "Exact", &spec) == NULL) {
    return -1;
  }
  return 0;
}
