/* The files of a checkpoint as Python gives them. */
#include "checkpoint_call.h"

#include "base/fail.h"

#include <stdlib.h>

/* Reads tensor `index` = (name, dtype, shape, address, bytes); its shape goes to *shape. */
static int read_tensor(PyObject *item, even_checkpoint_tensor *out, int64_t *shape) {
  PyObject *dimensions = NULL;
  PyObject *address = NULL;
  Py_ssize_t bytes = 0;
  if (!PyTuple_Check(item) ||
      !PyArg_ParseTuple(item, "ssO!On;a tensor is (name, dtype, shape, address, bytes)", &out->name, &out->dtype,
                        &PyTuple_Type, &dimensions, &address, &bytes)) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_TypeError, "a tensor is a tuple (name, dtype, shape, address, bytes)");
    }
    return -1;
  }
  out->data = PyLong_AsVoidPtr(address);
  if (PyErr_Occurred() || bytes < 0) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_ValueError, "a tensor of less than 0 bytes");
    }
    return -1;
  }
  out->bytes = (size_t)bytes;
  out->shape = shape;
  out->dimensions = (size_t)PyTuple_Size(dimensions);
  for (size_t i = 0; i < out->dimensions; i++) {
    shape[i] = PyLong_AsLongLong(PyTuple_GetItem(dimensions, (Py_ssize_t)i));
    if (PyErr_Occurred()) {
      return -1;
    }
  }
  return 0;
}

static int read_tensors(even_ext_file_call *call, Py_ssize_t count) {
  size_t dimensions = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *item = PyTuple_GetItem(call->tensors, i);
    PyObject *shape = PyTuple_Check(item) && PyTuple_Size(item) == 5 ? PyTuple_GetItem(item, 2) : NULL;
    if (shape == NULL || !PyTuple_Check(shape)) {
      PyErr_SetString(PyExc_TypeError, "a tensor is a tuple (name, dtype, shape, address, bytes), its shape a tuple");
      return -1;
    }
    dimensions += (size_t)PyTuple_Size(shape);
  }
  call->items = calloc((size_t)count + 1, sizeof *call->items);
  call->shapes = calloc(dimensions + 1, sizeof *call->shapes);
  if (call->items == NULL || call->shapes == NULL) {
    (void)PyErr_NoMemory();
    return -1;
  }
  int64_t *shape = call->shapes;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (read_tensor(PyTuple_GetItem(call->tensors, i), &call->items[i], shape) != 0) {
      return -1;
    }
    shape += call->items[i].dimensions;
  }
  return 0;
}

static int read_metadata(even_ext_file_call *call, Py_ssize_t count) {
  call->pairs = calloc((size_t)count + 1, sizeof *call->pairs);
  if (call->pairs == NULL) {
    (void)PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *pair = PyTuple_GetItem(call->metadata, i);
    if (!PyTuple_Check(pair) || !PyArg_ParseTuple(pair, "ss", &call->pairs[i].key, &call->pairs[i].value)) {
      if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "metadata are pairs (key, value)");
      }
      return -1;
    }
  }
  return 0;
}

int even_ext_path_or_none(PyObject *path, void *out) {
  if (path == Py_None) { /* NULL: what was converted is freed, where a later argument is wrong */
    *(PyObject **)out = NULL;
    return 1;
  }
  return PyUnicode_FSConverter(path, out);
}

/* Asks Python for the address of a tensor's bytes; the thread has no GIL when it comes here. */
static even_status fetch(void *context, size_t index, const void **data) {
  even_ext_file_call *call = context;
  PyEval_RestoreThread(*call->released);
  PyObject *address = PyObject_CallFunction(call->fetch, "n", (Py_ssize_t)index);
  if (address != NULL) {
    *data = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
  }
  int failed = PyErr_Occurred() != NULL || *data == NULL;
  *call->released = PyEval_SaveThread();
  return failed ? even_fail(EVEN_ERR_STATE, "fetch gave no address for tensor %zu", index) : EVEN_OK;
}

void even_ext_file_end(even_ext_file_call *call) {
  free(call->items);
  free(call->shapes);
  free(call->pairs);
  Py_XDECREF(call->tensors);
  Py_XDECREF(call->metadata);
}

int even_ext_file_begin(even_ext_file_call *call, const char *name, PyObject *tensors, PyObject *metadata,
                        PyObject *fetcher, even_checkpoint_file *file) {
  call->fetch = fetcher == Py_None ? NULL : fetcher;
  if (PyBytes_Check(tensors)) {
    Py_INCREF(tensors);
    call->tensors = tensors;
    *file = (even_checkpoint_file){.size = sizeof *file,
                                   .name = name,
                                   .raw = PyBytes_AsString(tensors),
                                   .raw_bytes = (size_t)PyBytes_Size(tensors)};
    return 0;
  }
  call->tensors = PySequence_Tuple(tensors);
  call->metadata = metadata == Py_None || call->tensors == NULL ? NULL : PySequence_Tuple(metadata);
  if (PyErr_Occurred()) {
    return -1;
  }
  Py_ssize_t count = PyTuple_Size(call->tensors);
  Py_ssize_t pairs = call->metadata == NULL ? 0 : PyTuple_Size(call->metadata);
  if (read_tensors(call, count) != 0 || (call->metadata != NULL && read_metadata(call, pairs) != 0)) {
    return -1;
  }
  *file = (even_checkpoint_file){.size = sizeof *file,
                                 .name = name,
                                 .tensors = call->items,
                                 .tensor_count = (size_t)count,
                                 .metadata = call->pairs,
                                 .metadata_count = (size_t)pairs,
                                 .fetch = call->fetch == NULL ? NULL : fetch,
                                 .fetch_context = call};
  return 0;
}

PyObject *even_ext_saved(const even_checkpoint_saved *saved) {
  return Py_BuildValue("(KKK)", (unsigned long long)saved->bytes, (unsigned long long)saved->linked_bytes,
                       (unsigned long long)saved->shared_bytes);
}
