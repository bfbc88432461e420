/* evenstep._core.read_file, .move_bytes: a checkpoint's file to memory, and from there to where its bytes belong. */
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

static PyObject *run(PyObject *sums, PyObject *places, even_checkpoint_reading *reading) {
  Py_ssize_t sum_count = PyTuple_Size(sums);
  Py_ssize_t place_count = PyTuple_Size(places);
  uint64_t *own_sums = calloc((size_t)sum_count + 1, sizeof *own_sums);
  even_checkpoint_place *own_places = calloc((size_t)place_count + 1, sizeof *own_places);
  PyObject *result = NULL;
  if (own_sums == NULL || own_places == NULL) {
    (void)PyErr_NoMemory();
  } else if (read_sums(sums, sum_count, own_sums) == 0 && read_places(places, place_count, own_places) == 0) {
    even_status status = EVEN_OK;
    reading->sums = own_sums;
    reading->sum_count = (size_t)sum_count;
    reading->places = own_places;
    reading->place_count = (size_t)place_count;
    Py_BEGIN_ALLOW_THREADS;
    status = even_checkpoint_file_read(reading);
    Py_END_ALLOW_THREADS;
    result = status == EVEN_OK ? Py_None : even_ext_raise(status);
    Py_XINCREF(result);
  }
  free(own_sums);
  free(own_places);
  return result;
}

static PyObject *read_file(PyObject *module, PyObject *arguments) {
  PyObject *path = NULL;
  PyObject *sums = NULL;
  PyObject *places = NULL;
  unsigned long long bytes = 0;
  Py_ssize_t chunk_bytes = 0;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "O&KnO!O!:read_file", PyUnicode_FSConverter, &path, &bytes, &chunk_bytes,
                        &PyTuple_Type, &sums, &PyTuple_Type, &places)) {
    return NULL;
  }
  even_checkpoint_reading reading = {.size = sizeof reading,
                                     .path = PyBytes_AsString(path),
                                     .bytes = bytes,
                                     .chunk_bytes = chunk_bytes < 0 ? 0 : (size_t)chunk_bytes};
  PyObject *result = run(sums, places, &reading);
  Py_DECREF(path);
  return result;
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
    result = status == EVEN_OK ? Py_None : even_ext_raise(status);
    Py_XINCREF(result);
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
    {"read_file", read_file, METH_VARARGS,
     "read_file(path, bytes, chunk_bytes, sums, places)\n\nReads a file to places (begin, bytes, address), which "
     "ascend, and compares its checksums on the way, by several threads."},
    {"file_is_cached", file_is_cached, METH_VARARGS,
     "file_is_cached(path)\n\nWhether all of a file lies in memory already, or nobody can say."},
    {"move_bytes", move_bytes, METH_O,
     "move_bytes(moves)\n\nCopies blocks (to, from, bytes), addresses that do not overlap, by several threads."},
    {NULL, NULL, 0, NULL}};

int even_ext_add_checkpoint_reading(PyObject *module) {
  return PyModule_AddFunctions(module, functions);
}
