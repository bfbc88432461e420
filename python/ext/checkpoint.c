/* evenstep._core.CheckpointWriter and the checksum functions. */
#include "ext.h"

#include "base/fail.h"

#include <evenstep/checkpoint.h>
#include <stdlib.h>

typedef struct writer_object {
  PyObject ob_base;
  even_checkpoint_writer *writer; /* NULL once committed or abandoned */
  int busy;                       /* a call of another thread is inside, without the GIL */
} writer_object;

/* What the tensors of one add() need while it runs. */
typedef struct add_call {
  PyObject *tensors;  /* tuple: keeps the names alive */
  PyObject *metadata; /* tuple of pairs or NULL */
  even_checkpoint_tensor *items;
  int64_t *shapes; /* of all tensors, one after the other */
  even_checkpoint_pair *pairs;
  PyObject *fetch; /* callable or NULL */
  PyThreadState *released;
} add_call;

static PyObject *misuse(const char *text) {
  PyErr_SetString(PyExc_RuntimeError, text);
  return NULL;
}

static PyObject *writer_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"folder", "replace", "expected_bytes", NULL};
  PyObject *folder = NULL;
  int replace = 0;
  unsigned long long expected_bytes = 0;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O&|pK:CheckpointWriter", names, PyUnicode_FSConverter, &folder,
                                   &replace, &expected_bytes)) {
    return NULL;
  }
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  writer_object *self = (writer_object *)allocate(type, 0);
  if (self == NULL) {
    Py_DECREF(folder);
    return NULL;
  }
  even_checkpoint_params params = {.size = sizeof params,
                                   .folder = PyBytes_AsString(folder),
                                   .replace = replace != 0,
                                   .expected_bytes = expected_bytes};
  even_status status = EVEN_OK;
  Py_BEGIN_ALLOW_THREADS;
  status = even_checkpoint_writer_open(&params, &self->writer);
  Py_END_ALLOW_THREADS;
  Py_DECREF(folder);
  if (status != EVEN_OK) {
    Py_DECREF(self);
    return even_ext_raise(status);
  }
  return (PyObject *)self;
}

static void writer_dealloc(PyObject *object) {
  writer_object *self = (writer_object *)object;
  PyTypeObject *type = Py_TYPE(object);
  even_checkpoint_writer_abandon(self->writer);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static int usable(const writer_object *self) {
  if (self->busy) {
    (void)misuse("this CheckpointWriter is in use by another thread");
    return 0;
  }
  if (self->writer == NULL) {
    (void)misuse("this CheckpointWriter was committed or abandoned");
    return 0;
  }
  return 1;
}

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

static int read_tensors(add_call *call, Py_ssize_t count) {
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

static int read_metadata(add_call *call, Py_ssize_t count) {
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

/* Asks Python for the address of a tensor's bytes; the thread has no GIL when it comes here. */
static even_status fetch(void *context, size_t index, const void **data) {
  add_call *call = context;
  PyEval_RestoreThread(call->released);
  PyObject *address = PyObject_CallFunction(call->fetch, "n", (Py_ssize_t)index);
  if (address != NULL) {
    *data = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
  }
  int failed = PyErr_Occurred() != NULL || *data == NULL;
  call->released = PyEval_SaveThread();
  return failed ? even_fail(EVEN_ERR_STATE, "fetch gave no address for tensor %zu", index) : EVEN_OK;
}

static void end_call(add_call *call) {
  free(call->items);
  free(call->shapes);
  free(call->pairs);
  Py_XDECREF(call->tensors);
  Py_XDECREF(call->metadata);
}

static PyObject *run_add(writer_object *self, const char *name, add_call *call) {
  even_checkpoint_file file = {.size = sizeof file, .name = name, .fetch_context = call};
  Py_ssize_t tensors = PyTuple_Size(call->tensors);
  Py_ssize_t pairs = call->metadata == NULL ? 0 : PyTuple_Size(call->metadata);
  if (read_tensors(call, tensors) != 0 || (call->metadata != NULL && read_metadata(call, pairs) != 0)) {
    return NULL;
  }
  file.tensors = call->items;
  file.tensor_count = (size_t)tensors;
  file.metadata = call->pairs;
  file.metadata_count = (size_t)pairs;
  file.fetch = call->fetch == NULL ? NULL : fetch;
  if (!usable(self)) { /* not before: what was converted up to here may have run any Python code */
    return NULL;
  }
  self->busy = 1;
  call->released = PyEval_SaveThread();
  even_status status = even_checkpoint_writer_add(self->writer, &file);
  PyEval_RestoreThread(call->released);
  self->busy = 0;
  if (PyErr_Occurred()) { /* raised by fetch */
    return NULL;
  }
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  Py_INCREF(Py_None);
  return Py_None;
}

static PyObject *writer_add(PyObject *object, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"name", "tensors", "metadata", "fetch", NULL};
  writer_object *self = (writer_object *)object;
  add_call call = {0};
  const char *name = NULL;
  PyObject *tensors = NULL;
  PyObject *metadata = Py_None;
  PyObject *fetcher = Py_None;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "sO|OO:add", names, &name, &tensors, &metadata, &fetcher)) {
    return NULL;
  }
  call.fetch = fetcher == Py_None ? NULL : fetcher;
  call.tensors = PySequence_Tuple(tensors);
  call.metadata = metadata == Py_None || call.tensors == NULL ? NULL : PySequence_Tuple(metadata);
  PyObject *result = PyErr_Occurred() ? NULL : run_add(self, name, &call);
  end_call(&call);
  return result;
}

static PyObject *writer_commit(PyObject *object, PyObject *arguments) {
  writer_object *self = (writer_object *)object;
  const char *state = NULL;
  if (!PyArg_ParseTuple(arguments, "s:commit", &state) || !usable(self)) {
    return NULL;
  }
  even_checkpoint_writer *writer = self->writer;
  even_status status = EVEN_OK;
  self->writer = NULL;
  Py_BEGIN_ALLOW_THREADS;
  status = even_checkpoint_writer_commit(writer, state);
  Py_END_ALLOW_THREADS;
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  Py_INCREF(Py_None);
  return Py_None;
}

static PyObject *writer_abandon(PyObject *object, PyObject *unused) {
  writer_object *self = (writer_object *)object;
  (void)unused;
  if (self->busy) {
    return misuse("this CheckpointWriter is in use by another thread");
  }
  even_checkpoint_writer *writer = self->writer;
  self->writer = NULL;
  Py_BEGIN_ALLOW_THREADS;
  even_checkpoint_writer_abandon(writer);
  Py_END_ALLOW_THREADS;
  Py_INCREF(Py_None);
  return Py_None;
}

static PyMethodDef writer_methods[] = {
    {"add", (PyCFunction)(void (*)(void))writer_add, METH_VARARGS | METH_KEYWORDS,
     "add(name, tensors, metadata=None, fetch=None)\n\nWrites one safetensors file of tensors (name, dtype, shape, "
     "address, bytes); where the address is 0, fetch(index) gives it when it is its turn."},
    {"commit", writer_commit, METH_VARARGS,
     "commit(state_json)\n\nWrites the manifest and gives the checkpoint its name."},
    {"abandon", writer_abandon, METH_NOARGS, "abandon()\n\nRemoves what was written. Safe to call at any time."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot writer_slots[] = {
    {Py_tp_new, writer_new},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_methods, writer_methods},
    {Py_tp_doc,
     "CheckpointWriter(folder, replace=False, expected_bytes=0)\n\nWrites a checkpoint that is whole or not there."},
    {0, NULL}};

static PyType_Spec writer_spec = {.name = "evenstep._core.CheckpointWriter",
                                  .basicsize = sizeof(writer_object),
                                  .flags = Py_TPFLAGS_DEFAULT,
                                  .slots = writer_slots};

static PyObject *list_of_sums(const uint64_t *sums, size_t count, uint64_t file_bytes) {
  PyObject *list = PyList_New((Py_ssize_t)count);
  if (list == NULL) {
    return NULL;
  }
  for (size_t i = 0; i < count; i++) {
    PyObject *sum = PyLong_FromUnsignedLongLong(sums[i]);
    if (sum == NULL || PyList_SetItem(list, (Py_ssize_t)i, sum) != 0) {
      Py_DECREF(list);
      return NULL;
    }
  }
  return Py_BuildValue("(NK)", list, (unsigned long long)file_bytes);
}

static PyObject *file_checksums(PyObject *module, PyObject *arguments) {
  PyObject *path = NULL;
  Py_ssize_t chunk_bytes = 0;
  uint64_t *sums = NULL;
  uint64_t file_bytes = 0;
  size_t count = 0;
  even_status status = EVEN_OK;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "O&n:file_checksums", PyUnicode_FSConverter, &path, &chunk_bytes)) {
    return NULL;
  }
  if (chunk_bytes < 1) {
    Py_DECREF(path);
    PyErr_SetString(PyExc_ValueError, "chunk_bytes must be at least 1");
    return NULL;
  }
  const char *name = PyBytes_AsString(path);
  Py_BEGIN_ALLOW_THREADS;
  status = even_checkpoint_file_checksums(name, (size_t)chunk_bytes, &sums, &count, &file_bytes);
  Py_END_ALLOW_THREADS;
  Py_DECREF(path);
  PyObject *result = status == EVEN_OK ? list_of_sums(sums, count, file_bytes) : even_ext_raise(status);
  even_checkpoint_free(sums);
  return result;
}

static PyObject *checksum(PyObject *module, PyObject *arguments) {
  const char *data = NULL;
  Py_ssize_t bytes = 0;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "y#:checksum", &data, &bytes)) {
    return NULL;
  }
  return PyLong_FromUnsignedLongLong(even_checkpoint_checksum(data, (size_t)bytes));
}

static PyObject *checkpoint_remove(PyObject *module, PyObject *arguments) {
  PyObject *path = NULL;
  even_status status = EVEN_OK;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "O&:checkpoint_remove", PyUnicode_FSConverter, &path)) {
    return NULL;
  }
  const char *name = PyBytes_AsString(path);
  Py_BEGIN_ALLOW_THREADS;
  status = even_checkpoint_remove(name);
  Py_END_ALLOW_THREADS;
  Py_DECREF(path);
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  Py_INCREF(Py_None);
  return Py_None;
}

static PyMethodDef functions[] = {
    {"file_checksums", file_checksums, METH_VARARGS,
     "file_checksums(path, chunk_bytes) -> (sums, bytes)\n\nXXH3 (64 bits) of each chunk of a file."},
    {"checksum", checksum, METH_VARARGS, "checksum(data) -> int\n\nXXH3 (64 bits) of bytes."},
    {"checkpoint_remove", checkpoint_remove, METH_VARARGS,
     "checkpoint_remove(folder)\n\nRemoves a checkpoint; no moment shows half of it."},
    {NULL, NULL, 0, NULL}};

int even_ext_add_checkpoint(PyObject *module) {
  PyObject *type = PyType_FromSpec(&writer_spec);
  if (type == NULL || PyModule_AddObject(module, "CheckpointWriter", type) != 0) {
    Py_XDECREF(type);
    return -1;
  }
  return PyModule_AddFunctions(module, functions);
}
