/* All-reduce with one call from Python: of any array, and of a tensor as torch hands it to a backend. */
#include "comm.h"
#include "objects.h"

#include "base/fail.h"

/* Runs without the GIL, small calls too: to give it up and take it back costs a tenth of a microsecond, and another
 * thread may have to end the wait (close, revoke). None, or NULL with an exception. */
static PyObject *reduce(even_ext_comm *self, const even_ext_data *data, int op) {
  even_status status = EVEN_OK;
  even_comm *comm = even_ext_comm_open_group(self); /* to look at the tensor may have let another thread close it */
  if (comm == NULL) {
    return NULL;
  }
  size_t count = data->count * (size_t)data->reals;
  even_ext_comm_begin(self);
  Py_BEGIN_ALLOW_THREADS;
  status = even_comm_all_reduce(comm, data->address, count, (even_dtype)data->dtype, (even_reduce_op)op);
  Py_END_ALLOW_THREADS;
  return even_ext_comm_done(self, status);
}

static PyObject *refuse(even_status status, const char *fix) {
  (void)status;
  return even_ext_raise(even_error_fix("%s", fix));
}

PyObject *even_ext_comm_all_reduce_data(PyObject *object, PyObject *arguments) {
  even_ext_comm *self = (even_ext_comm *)object;
  PyObject *array = NULL;
  PyObject *result = NULL;
  even_ext_data data;
  int op = 0;
  if (even_ext_comm_open_group(self) == NULL || !PyArg_ParseTuple(arguments, "Oi:all_reduce_data", &array, &op) ||
      even_ext_data_open(array, &data) != 0) {
    return NULL;
  }
  if (data.read_only) {
    result = refuse(even_fail(EVEN_ERR_ARGUMENT, "all_reduce writes into its array, which is read-only"),
                    "pass a copy: x.copy()");
  } else if (!even_ext_data_reducible(&data, op)) {
    result = refuse(
        even_fail(EVEN_ERR_ARGUMENT, "elements of this dtype (%zu bytes each) cannot be reduced so", data.element),
        "integers have no average, floats no bits, complex numbers sums and averages alone; structures, dates, strings "
        "and "
        "numbers in another byte order can be moved only");
  } else {
    result = reduce(self, &data, op);
  }
  even_ext_data_close(&data);
  return result;
}

/* ---- what torch hands to a backend ---- */

#define MOST_OPS 16

/* _core.Reducer: callable with (tensors, options). */
typedef struct reducer_object {
  PyObject_HEAD even_ext_comm *comm;
  PyObject *types;           /* a tuple of those whose tensors are plain memory */
  PyObject *unset;           /* what options.timeout is where the call has none */
  signed char ops[MOST_OPS]; /* what torch's operation hashes to -> ours, -1 where we have none */
} reducer_object;

static struct {
  PyObject *on_cpu;
  PyObject *asynchronous;
  PyObject *timeout;
  PyObject *reduction;
} names;

/* Whether the tensor is on the CPU and its type one of the tuple's: another may hold no memory of its own. */
static bool is_plain_tensor(const reducer_object *self, PyObject *tensor) {
  PyObject *type = (PyObject *)Py_TYPE(tensor);
  bool known = false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(self->types); i++) {
    known = known || PyTuple_GetItem(self->types, i) == type;
  }
  PyObject *on_cpu = known ? PyObject_GetAttr(tensor, names.on_cpu) : NULL;
  Py_XDECREF(on_cpu);
  return on_cpu == Py_True;
}

/* The options ask for a call within the group's time limit, and for its end before it returns (`later`: after). */
static bool is_plain_call(const reducer_object *self, PyObject *options, bool later) {
  PyObject *asynchronous = PyObject_GetAttr(options, names.asynchronous);
  PyObject *timeout = asynchronous == (later ? Py_True : Py_False) ? PyObject_GetAttr(options, names.timeout) : NULL;
  bool plain = timeout != NULL && PyObject_RichCompareBool(timeout, self->unset, Py_EQ) == 1;
  Py_XDECREF(timeout);
  Py_XDECREF(asynchronous);
  return plain;
}

/* Our number of the operation, -1 where we have none. torch's operations hash to their numbers, which is three times
 * faster than asking for them. */
static int read_op(const reducer_object *self, PyObject *options) {
  PyObject *reduction = PyObject_GetAttr(options, names.reduction);
  Py_hash_t number = reduction == NULL ? -1 : PyObject_Hash(reduction);
  Py_XDECREF(reduction);
  return number >= 0 && number < MOST_OPS ? self->ops[number] : -1;
}

/* Whether the call is of the plain kind (without an exception where it is not): its one tensor's memory, which is kept
 * until it is closed, for the list is the caller's and may change meanwhile; and the operation. */
static bool look(const reducer_object *self, PyObject *tensors, PyObject *options, bool later, even_ext_data *data,
                 int *op) {
  PyObject *tensor = PyList_Check(tensors) && PyList_Size(tensors) == 1 ? PyList_GetItem(tensors, 0) : NULL;
  if (tensor == NULL || self->comm->closed || !is_plain_tensor(self, tensor) || !is_plain_call(self, options, later)) {
    PyErr_Clear();
    return false;
  }
  *op = read_op(self, options);
  if (*op < 0 || even_ext_data_open(tensor, data) != 0) {
    PyErr_Clear();
    return false;
  }
  if (!even_ext_data_reducible(data, *op)) {
    even_ext_data_close(data);
    return false;
  }
  if (data->keeper == NULL) {
    Py_INCREF(tensor);
    data->keeper = tensor;
  }
  return true;
}

/* True once the tensor is reduced; False where the call is not of the plain kind: nothing has happened then. */
static PyObject *reducer_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
  reducer_object *self = (reducer_object *)object;
  PyObject *tensors = NULL;
  PyObject *options = NULL;
  even_ext_data data;
  int op = 0;
  (void)keywords;
  if (!PyArg_UnpackTuple(arguments, "Reducer", 2, 2, &tensors, &options)) {
    return NULL;
  }
  if (!look(self, tensors, options, false, &data, &op)) {
    Py_RETURN_FALSE;
  }
  PyObject *done = reduce(self->comm, &data, op);
  even_ext_data_close(&data);
  if (done == NULL) {
    return NULL;
  }
  Py_DECREF(done);
  Py_RETURN_TRUE;
}

/* True once the call is in the queue; False where it is not of the plain kind. */
static PyObject *reducer_put(PyObject *object, PyObject *arguments) {
  reducer_object *self = (reducer_object *)object;
  PyObject *queue = NULL;
  PyObject *token = NULL;
  PyObject *place = NULL;
  PyObject *tensors = NULL;
  PyObject *options = NULL;
  even_ext_queued call = {.comm = self->comm};
  if (!PyArg_UnpackTuple(arguments, "put", 5, 5, &queue, &token, &place, &tensors, &options)) {
    return NULL;
  }
  if (!look(self, tensors, options, true, &call.data, &call.op)) {
    Py_RETURN_FALSE;
  }
  if (even_ext_queue_put(queue, token, place, &call) != 0) {
    even_ext_data_close(&call.data);
    return NULL;
  }
  Py_RETURN_TRUE;
}

static int read_ops(reducer_object *self, PyObject *pairs) {
  PyObject *items = PyDict_Items(pairs);
  memset(self->ops, -1, sizeof self->ops);
  for (Py_ssize_t i = 0; items != NULL && i < PyList_Size(items); i++) {
    int theirs = 0;
    int ours = 0;
    if (!PyArg_ParseTuple(PyList_GetItem(items, i), "ii", &theirs, &ours) || theirs < 0 || theirs >= MOST_OPS) {
      Py_DECREF(items);
      if (PyErr_Occurred() == NULL) {
        PyErr_Format(PyExc_ValueError, "%d is no number of an operation", theirs);
      }
      return -1;
    }
    self->ops[theirs] = (signed char)ours;
  }
  Py_XDECREF(items);
  return items == NULL ? -1 : 0;
}

static PyObject *comm_type;

static PyObject *reducer_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  PyObject *comm = NULL;
  PyObject *types = NULL;
  PyObject *ops = NULL;
  PyObject *unset = NULL;
  (void)keywords;
  if (!PyArg_ParseTuple(arguments, "O!O!O!O:Reducer", (PyTypeObject *)comm_type, &comm, &PyTuple_Type, &types,
                        &PyDict_Type, &ops, &unset)) {
    return NULL;
  }
  reducer_object *self = (reducer_object *)even_ext_object_new(type);
  if (self == NULL) {
    return NULL;
  }
  Py_INCREF(comm);
  Py_INCREF(types);
  Py_INCREF(unset);
  self->comm = (even_ext_comm *)comm;
  self->types = types;
  self->unset = unset;
  if (read_ops(self, ops) != 0) {
    Py_DECREF((PyObject *)self);
    return NULL;
  }
  return (PyObject *)self;
}

static void reducer_dealloc(PyObject *object) {
  reducer_object *self = (reducer_object *)object;
  Py_XDECREF((PyObject *)self->comm);
  Py_XDECREF(self->types);
  Py_XDECREF(self->unset);
  even_ext_object_free(object);
}

static PyMethodDef reducer_methods[] = {
    {"put", reducer_put, METH_VARARGS,
     "put(queue, token, place, tensors, options) -> whether the queue will all-reduce the tensor"},
    {NULL, NULL, 0, NULL}};
static PyType_Slot reducer_slots[] = {
    {Py_tp_methods, (void *)reducer_methods},
    {Py_tp_new, (void *)reducer_new},
    {Py_tp_dealloc, (void *)reducer_dealloc},
    {Py_tp_call, (void *)reducer_call},
    {Py_tp_doc, "Reducer(comm, types, ops, unset)(tensors, options) -> whether the tensor was all-reduced"},
    {0, NULL}};
static PyType_Spec reducer_spec = {.name = "evenstep._core.Reducer",
                                   .basicsize = sizeof(reducer_object),
                                   .flags = Py_TPFLAGS_DEFAULT,
                                   .slots = reducer_slots};

int even_ext_add_reduce(PyObject *module, PyObject *type_of_comm) {
  comm_type = type_of_comm;
  names.on_cpu = PyUnicode_InternFromString("is_cpu");
  names.asynchronous = PyUnicode_InternFromString("asyncOp");
  names.timeout = PyUnicode_InternFromString("timeout");
  names.reduction = PyUnicode_InternFromString("reduceOp");
  if (names.on_cpu == NULL || names.asynchronous == NULL || names.timeout == NULL || names.reduction == NULL ||
      even_ext_add_type(module, "Reducer", &reducer_spec) == NULL) {
    return -1;
  }
  return 0;
}
