/* evenstep._core.CheckpointWriter and the checksum functions. */
#include "checkpoint_call.h"
#include "objects.h"

#include <evenstep/checkpoint.h>
#include <stdlib.h>

typedef struct writer_object {
  PyObject ob_base;
  even_checkpoint_writer *writer; /* NULL once committed or abandoned */
  int busy;                       /* a call of another thread is inside, without the GIL */
} writer_object;

static PyObject *misuse(const char *text) {
  PyErr_SetString(PyExc_RuntimeError, text);
  return NULL;
}

static PyObject *writer_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"folder", "replace", "expected_bytes", "previous", "run_folder", "job", "sign_seen", NULL};
  PyObject *folder = NULL;
  PyObject *previous = NULL;
  PyObject *run_folder = NULL;
  const char *job = NULL;
  int replace = 0;
  int sign_seen = 0;
  unsigned long long expected_bytes = 0;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O&|pKO&O&zp:CheckpointWriter", names, PyUnicode_FSConverter,
                                   &folder, &replace, &expected_bytes, even_ext_path_or_none, &previous,
                                   even_ext_path_or_none, &run_folder, &job, &sign_seen)) {
    return NULL;
  }
  writer_object *self = (writer_object *)even_ext_object_new(type);
  if (self == NULL) {
    Py_DECREF(folder);
    Py_XDECREF(previous);
    Py_XDECREF(run_folder);
    return NULL;
  }
  even_checkpoint_params params = {.size = sizeof params,
                                   .folder = PyBytes_AsString(folder),
                                   .replace = replace != 0,
                                   .expected_bytes = expected_bytes,
                                   .previous = previous == NULL ? NULL : PyBytes_AsString(previous),
                                   .run_folder = run_folder == NULL ? NULL : PyBytes_AsString(run_folder),
                                   .job = job,
                                   .sign_seen = sign_seen != 0};
  even_status status = EVEN_OK;
  Py_BEGIN_ALLOW_THREADS;
  status = even_checkpoint_writer_open(&params, &self->writer);
  Py_END_ALLOW_THREADS;
  Py_DECREF(folder);
  Py_XDECREF(previous);
  Py_XDECREF(run_folder);
  if (status != EVEN_OK) {
    Py_DECREF(self);
    return even_ext_raise(status);
  }
  return (PyObject *)self;
}

static void writer_dealloc(PyObject *object) {
  writer_object *self = (writer_object *)object;
  even_checkpoint_writer_abandon(self->writer);
  even_ext_object_free(object);
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

static PyObject *run_add(writer_object *self, even_ext_file_call *call, const even_checkpoint_file *file) {
  PyThreadState *released = NULL;
  if (!usable(self)) { /* not before: what was converted up to here may have run any Python code */
    return NULL;
  }
  call->released = &released;
  self->busy = 1;
  released = PyEval_SaveThread();
  even_status status = even_checkpoint_writer_add(self->writer, file);
  PyEval_RestoreThread(released);
  call->released = NULL;
  self->busy = 0;
  if (PyErr_Occurred()) { /* raised by fetch */
    return NULL;
  }
  return even_ext_done(status);
}

static PyObject *writer_add(PyObject *object, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"name", "tensors", "metadata", "fetch", NULL};
  even_ext_file_call call = {0};
  even_checkpoint_file file;
  const char *name = NULL;
  PyObject *tensors = NULL;
  PyObject *metadata = Py_None;
  PyObject *fetch = Py_None;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "sO|OO:add", names, &name, &tensors, &metadata, &fetch)) {
    return NULL;
  }
  PyObject *result = even_ext_file_begin(&call, name, tensors, metadata, fetch, &file) != 0
                         ? NULL
                         : run_add((writer_object *)object, &call, &file);
  even_ext_file_end(&call);
  return result;
}

static PyObject *writer_commit(PyObject *object, PyObject *arguments) {
  writer_object *self = (writer_object *)object;
  const char *state = NULL;
  if (!PyArg_ParseTuple(arguments, "s:commit", &state) || !usable(self)) {
    return NULL;
  }
  even_checkpoint_writer *writer = self->writer;
  even_checkpoint_saved saved;
  even_status status = EVEN_OK;
  self->writer = NULL;
  even_checkpoint_writer_saved(writer, &saved);
  Py_BEGIN_ALLOW_THREADS;
  status = even_checkpoint_writer_commit(writer, state);
  Py_END_ALLOW_THREADS;
  return status == EVEN_OK ? even_ext_saved(&saved) : even_ext_raise(status);
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
     "address, bytes); where the address is 0, fetch(index) gives it when it is its turn. bytes as tensors are the "
     "file."},
    {"commit", writer_commit, METH_VARARGS,
     "commit(state_json) -> (bytes, linked, shared)\n\nWrites the manifest and gives the checkpoint its name. Of the "
     "bytes of its files those are told that were not written: of files linked to those of `previous`, of chunks "
     "shared with them."},
    {"abandon", writer_abandon, METH_NOARGS, "abandon()\n\nRemoves what was written. Safe to call at any time."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot writer_slots[] = {
    {Py_tp_new, writer_new},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_methods, writer_methods},
    {Py_tp_doc,
     "CheckpointWriter(folder, replace=False, expected_bytes=0, previous=None)\n\nWrites a checkpoint that is whole or "
     "not there; large files that are as in the checkpoint `previous` are linked to it, and chunks of others that are "
     "shared with it where the file system can."},
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

static PyObject *crc32c(PyObject *module, PyObject *arguments) {
  const char *data = NULL;
  Py_ssize_t bytes = 0;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "y#:crc32c", &data, &bytes)) {
    return NULL;
  }
  return PyLong_FromUnsignedLong(even_checkpoint_crc32c(data, (size_t)bytes));
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
  return even_ext_done(status);
}

static PyMethodDef functions[] = {
    {"file_checksums", file_checksums, METH_VARARGS,
     "file_checksums(path, chunk_bytes) -> (sums, bytes)\n\nXXH3 (64 bits) of each chunk of a file."},
    {"checksum", checksum, METH_VARARGS, "checksum(data) -> int\n\nXXH3 (64 bits) of bytes."},
    {"crc32c", crc32c, METH_VARARGS, "crc32c(data) -> int\n\nCRC-32C of bytes."},
    {"checkpoint_remove", checkpoint_remove, METH_VARARGS,
     "checkpoint_remove(folder)\n\nRemoves a checkpoint; no moment shows half of it."},
    {NULL, NULL, 0, NULL}};

int even_ext_add_checkpoint(PyObject *module) {
  if (even_ext_add_checkpoint_snapshot(module) != 0 || even_ext_add_checkpoint_reading(module) != 0) {
    return -1;
  }
  if (even_ext_add_type(module, "CheckpointWriter", &writer_spec) == NULL) {
    return -1;
  }
  return PyModule_AddFunctions(module, functions);
}
