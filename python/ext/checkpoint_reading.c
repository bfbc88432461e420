/* evenstep._core.read_files, .move_bytes: a checkpoint's files to memory, and from there to where its bytes belong. */
#include "ext.h"

#include <evenstep/checkpoint.h>
#include <stdlib.h>

static int read_sums(PyObject *items, Py_ssize_t count, uint64_t *sums) {
  for (Py_ssize_t i = 0; i < count; i++) {
    sums[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(items, i));
    if (PyErr_Occurred()) {
      return -1;
    }
  }
  return 0;
}

static int read_places(PyObject *items, Py_ssize_t count, even_checkpoint_place *places) {
  for (Py_ssize_t i = 0; i < count; i++) {
    unsigned long long begin = 0;
    Py_ssize_t bytes = 0;
    PyObject *address = NULL;
    PyObject *item = PyTuple_GetItem(items, i);
    if (!PyTuple_Check(item) ||
        !PyArg_ParseTuple(item, "KnO;a place is (begin, bytes, address)", &begin, &bytes, &address)) {
      if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "a place is a tuple (begin, bytes, address)");
      }
      return -1;
    }
    if (bytes < 0) {
      PyErr_SetString(PyExc_ValueError, "a place of less than 0 bytes");
      return -1;
    }
    places[i] = (even_checkpoint_place){.begin = begin, .bytes = (size_t)bytes, .data = PyLong_AsVoidPtr(address)};
    if (PyErr_Occurred()) {
      return -1;
    }
  }
  return 0;
}

/* What one file's tuple says; its memory is in `call`. */
typedef struct read_call {
  PyObject *path;
  uint64_t *sums;
  even_checkpoint_place *places;
} read_call;

static int begin_read(PyObject *item, read_call *call, even_checkpoint_reading *reading) {
  PyObject *sums = NULL;
  PyObject *places = NULL;
  unsigned long long bytes = 0;
  Py_ssize_t chunk_bytes = 0;
  int only_places = 0;
  if (!PyTuple_Check(item) ||
      !PyArg_ParseTuple(item, "O&KnO!O!p;a file is (path, bytes, chunk_bytes, sums, places, only_places)",
                        PyUnicode_FSConverter, &call->path, &bytes, &chunk_bytes, &PyTuple_Type, &sums, &PyTuple_Type,
                        &places, &only_places)) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_TypeError, "a file is a tuple (path, bytes, chunk_bytes, sums, places, only_places)");
    }
    return -1;
  }
  Py_ssize_t sum_count = PyTuple_Size(sums);
  Py_ssize_t place_count = PyTuple_Size(places);
  call->sums = calloc((size_t)sum_count + 1, sizeof *call->sums);
  call->places = calloc((size_t)place_count + 1, sizeof *call->places);
  if (call->sums == NULL || call->places == NULL) {
    (void)PyErr_NoMemory();
    return -1;
  }
  *reading = (even_checkpoint_reading){.size = sizeof *reading,
                                       .path = PyBytes_AsString(call->path),
                                       .bytes = bytes,
                                       .chunk_bytes = chunk_bytes < 0 ? 0 : (size_t)chunk_bytes,
                                       .sums = call->sums,
                                       .sum_count = (size_t)sum_count,
                                       .places = call->places,
                                       .place_count = (size_t)place_count,
                                       .only_places = only_places != 0};
  return read_sums(sums, sum_count, call->sums) == 0 && read_places(places, place_count, call->places) == 0 ? 0 : -1;
}

static PyObject *run(PyObject *files, Py_ssize_t count) {
  read_call *calls = calloc((size_t)count + 1, sizeof *calls);
  even_checkpoint_reading *readings = calloc((size_t)count + 1, sizeof *readings);
  PyObject *result = NULL;
  Py_ssize_t begun = 0;
  if (calls == NULL || readings == NULL) {
    (void)PyErr_NoMemory();
  } else {
    while (begun < count && begin_read(PyTuple_GetItem(files, begun), &calls[begun], &readings[begun]) == 0) {
      begun++;
    }
    if (begun == count) {
      even_status status = EVEN_OK;
      Py_BEGIN_ALLOW_THREADS;
      status = even_checkpoint_files_read(readings, (size_t)count);
      Py_END_ALLOW_THREADS;
      result = even_ext_done(status);
    }
  }
  for (Py_ssize_t i = 0; calls != NULL && i < count; i++) {
    Py_XDECREF(calls[i].path);
    free(calls[i].sums);
    free(calls[i].places);
  }
  free(calls);
  free(readings);
  return result;
}

static PyObject *read_files(PyObject *module, PyObject *files) {
  (void)module;
  if (!PyTuple_Check(files)) {
    PyErr_SetString(PyExc_TypeError,
                    "read_files wants a tuple of (path, bytes, chunk_bytes, sums, places, only_places)");
    return NULL;
  }
  return run(files, PyTuple_Size(files));
}

static PyObject *file_is_cached(PyObject *module, PyObject *arguments) {
  PyObject *path = NULL;
  bool cached = true;
  even_status status = EVEN_OK;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "O&:file_is_cached", PyUnicode_FSConverter, &path)) {
    return NULL;
  }
  const char *name = PyBytes_AsString(path);
  Py_BEGIN_ALLOW_THREADS;
  status = even_checkpoint_file_is_cached(name, &cached);
  Py_END_ALLOW_THREADS;
  Py_DECREF(path);
  return status == EVEN_OK ? PyBool_FromLong(cached) : even_ext_raise(status);
}

static PyObject *run_moves(PyObject *items, Py_ssize_t count) {
  even_checkpoint_move *moves = calloc((size_t)count + 1, sizeof *moves);
  PyObject *result = NULL;
  if (moves == NULL) {
    return PyErr_NoMemory();
  }
  for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
    PyObject *from = NULL;
    PyObject *to = NULL;
    Py_ssize_t bytes = 0;
    if (PyArg_ParseTuple(PyTuple_GetItem(items, i), "OOn;a move is (to, from, bytes)", &to, &from, &bytes)) {
      moves[i] = (even_checkpoint_move){
          .from = PyLong_AsVoidPtr(from), .to = PyLong_AsVoidPtr(to), .bytes = bytes < 0 ? 0 : (size_t)bytes};
    }
  }
  if (!PyErr_Occurred()) {
    even_status status = EVEN_OK;
    Py_BEGIN_ALLOW_THREADS;
    status = even_checkpoint_bytes_move(moves, (size_t)count);
    Py_END_ALLOW_THREADS;
    result = even_ext_done(status);
  }
  free(moves);
  return result;
}

static PyObject *move_bytes(PyObject *module, PyObject *items) {
  (void)module;
  if (!PyTuple_Check(items)) {
    PyErr_SetString(PyExc_TypeError, "move_bytes wants a tuple of (to, from, bytes)");
    return NULL;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(items); i++) {
    if (!PyTuple_Check(PyTuple_GetItem(items, i))) {
      PyErr_SetString(PyExc_TypeError, "a move is a tuple (to, from, bytes)");
      return NULL;
    }
  }
  return run_moves(items, PyTuple_Size(items));
}

static PyMethodDef functions[] = {
    {"read_files", read_files, METH_O,
     "read_files(files)\n\nReads files (path, bytes, chunk_bytes, sums, places, only_places) to places (begin, bytes, "
     "address), which ascend, and compares their checksums on the way, by several threads that share them. "
     "only_places: "
     "chunks in which no place lies are left alone."},
    {"file_is_cached", file_is_cached, METH_VARARGS,
     "file_is_cached(path)\n\nWhether all of a file lies in memory already, or nobody can say."},
    {"move_bytes", move_bytes, METH_O,
     "move_bytes(moves)\n\nCopies blocks (to, from, bytes), addresses that do not overlap, by several threads."},
    {NULL, NULL, 0, NULL}};

int even_ext_add_checkpoint_reading(PyObject *module) {
  return PyModule_AddFunctions(module, functions);
}
