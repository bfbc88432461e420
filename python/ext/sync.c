/* _core.Sync: the gradient engine of one group. Gradients cross as addresses; finish releases the GIL. */
#include "comm.h"
#include "ext.h"
#include "objects.h"

#include <evenstep/checkpoint.h>
#include <evenstep/sync.h>

#include "base/alloc.h"

typedef struct sync_object {
  PyObject_HEAD even_sync *sync; /* NULL once closed */
  PyObject *comm_handle;         /* capsules: what the engine works on lives as long as it */
  PyObject *telemetry_handle;
  size_t parameter_count;
  size_t arena_offset;
  const char *arena;
  int finishing; /* a thread is inside finish */
  int waiting;   /* threads inside wait */
} sync_object;

/* A sequence of (count, dtype[, late]) into *out (free with even_free). */
static int to_parameters(PyObject *sequence, even_sync_parameter **out, size_t *count) {
  PyObject *list = PySequence_List(sequence);
  if (list == NULL) {
    return -1;
  }
  *count = (size_t)PyList_Size(list);
  even_status status = EVEN_NEW_ARRAY(out, *count);
  if (status != EVEN_OK) {
    Py_DECREF(list);
    (void)even_ext_raise(status);
    return -1;
  }
  for (size_t i = 0; i < *count; i++) {
    Py_ssize_t elements = 0;
    int dtype = 0;
    int late = 0;
    PyObject *item = PyList_GetItem(list, (Py_ssize_t)i); /* borrowed */
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "ni|p", &elements, &dtype, &late) || elements < 0) {
      if (PyErr_Occurred() == NULL) {
        PyErr_Format(PyExc_ValueError, "parameter %zu is not (count, dtype[, late])", i);
      }
      even_free(*out);
      Py_DECREF(list);
      return -1;
    }
    (*out)[i] = (even_sync_parameter){.count = (size_t)elements, .dtype = (even_dtype)dtype, .late = late};
  }
  Py_DECREF(list);
  return 0;
}

static PyObject *sync_arena_bytes(PyObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {
      "parameters", "bucket_bytes", "first_bucket_bytes", "wire", "bucket_elements", "static_graph", NULL};
  PyObject *sequence = NULL;
  Py_ssize_t bucket_bytes = 0;
  Py_ssize_t first_bucket_bytes = 0;
  Py_ssize_t bucket_elements = 0;
  int wire = EVEN_F32;
  even_sync_params params = {.size = sizeof params};
  even_sync_parameter *parameters = NULL;
  size_t bytes = 0;
  (void)type;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "O|nninp:arena_bytes", keywords, &sequence, &bucket_bytes,
                                   &first_bucket_bytes, &wire, &bucket_elements, &params.static_graph) ||
      to_parameters(sequence, &parameters, &params.parameter_count) != 0) {
    return NULL;
  }
  if (bucket_bytes < 0 || first_bucket_bytes < 0 || bucket_elements < 0) {
    even_free(parameters);
    PyErr_SetString(PyExc_ValueError, "sizes of buckets cannot be negative");
    return NULL;
  }
  params.parameters = parameters;
  params.bucket_bytes = (size_t)bucket_bytes;
  params.first_bucket_bytes = (size_t)first_bucket_bytes;
  params.bucket_elements = (size_t)bucket_elements;
  params.wire = (even_dtype)wire;
  even_status status = even_sync_arena_bytes(&params, &bytes);
  even_free(parameters);
  return status == EVEN_OK ? PyLong_FromSize_t(bytes) : even_ext_raise(status);
}

/* The doubles of a sequence of `count` into *out (free with even_free). */
static int to_seconds(PyObject *sequence, size_t count, double **out) {
  PyObject *list = PySequence_List(sequence);
  if (list == NULL) {
    return -1;
  }
  if ((size_t)PyList_Size(list) != count) {
    PyErr_Format(PyExc_ValueError, "%zd moments of %zu parameters", PyList_Size(list), count);
    Py_DECREF(list);
    return -1;
  }
  even_status status = EVEN_NEW_ARRAY(out, count);
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
  }
  for (size_t i = 0; status == EVEN_OK && i < count; i++) {
    (*out)[i] = PyFloat_AsDouble(PyList_GetItem(list, (Py_ssize_t)i)); /* borrowed */
  }
  Py_DECREF(list);
  return PyErr_Occurred() == NULL ? 0 : -1;
}

/* (bucket_bytes, first_bucket_bytes, seconds before, seconds) of the sizes with which the exchange ends first. */
static PyObject *sync_choose_sizes(PyObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"parameters", "ready", "end", "costs", "shape", "engine", "arena_bytes", "wire", NULL};
  PyObject *sequence = NULL;
  PyObject *ready = NULL;
  PyObject *costs = NULL;
  Py_ssize_t arena_bytes = 0;
  int wire = EVEN_F32;
  even_sync_course course = {.size = sizeof course};
  even_sync_params params = {.size = sizeof params};
  even_sync_parameter *parameters = NULL;
  double *seconds = NULL;
  even_sync_sizes sizes;
  (void)type;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "OOdOss|ni:choose_sizes", keywords, &sequence, &ready,
                                   &course.end_seconds, &costs, &course.shape, &course.engine, &arena_bytes, &wire) ||
      !even_ext_take_costs(costs, &course.costs) ||
      to_parameters(sequence, &parameters, &params.parameter_count) != 0) {
    return NULL;
  }
  PyObject *result = NULL;
  if (course.costs == NULL || arena_bytes < 0) {
    PyErr_SetString(PyExc_ValueError, "sizes are chosen by costs, for an arena of 0 bytes or more");
  } else if (to_seconds(ready, params.parameter_count, &seconds) == 0) {
    params.parameters = parameters;
    params.wire = (even_dtype)wire;
    course.ready_seconds = seconds;
    course.arena_bytes = (size_t)arena_bytes;
    even_status status = even_sync_choose_sizes(&params, &course, &sizes);
    result = status == EVEN_OK
                 ? Py_BuildValue("(nndd)", (Py_ssize_t)sizes.bucket_bytes, (Py_ssize_t)sizes.first_bucket_bytes,
                                 sizes.before_seconds, sizes.seconds)
                 : even_ext_raise(status);
  }
  even_free(seconds);
  even_free(parameters);
  return result;
}

static int take_handles(sync_object *self, PyObject *comm, PyObject *telemetry) {
  self->comm_handle = PyObject_GetAttrString(comm, "handle");
  if (self->comm_handle == NULL) {
    return -1;
  }
  if (telemetry != NULL && telemetry != Py_None) {
    self->telemetry_handle = PyObject_GetAttrString(telemetry, "handle");
    if (self->telemetry_handle == NULL) {
      return -1;
    }
    if (self->telemetry_handle == Py_None) {
      Py_CLEAR(self->telemetry_handle);
    }
  }
  return 0;
}

static int open_engine(sync_object *self, even_sync_params *params) {
  even_comm *comm = PyCapsule_GetPointer(self->comm_handle, "evenstep.comm");
  if (comm == NULL) {
    return -1;
  }
  if (self->telemetry_handle != NULL) {
    params->telemetry = PyCapsule_GetPointer(self->telemetry_handle, "evenstep.telemetry");
    if (params->telemetry == NULL) {
      return -1;
    }
  }
  even_status status = even_sync_open(params, comm, &self->sync);
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
    return -1;
  }
  self->arena = even_comm_arena(comm);
  return 0;
}

static PyObject *sync_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {
      "comm", "parameters", "bucket_bytes", "first_bucket_bytes", "arena_offset", "telemetry",    "wire", "encoding",
      "way",  "ratio",      "seed",         "bucket_elements",    "unsummed",     "static_graph", NULL};
  PyObject *comm = NULL;
  PyObject *sequence = NULL;
  PyObject *telemetry = NULL;
  Py_ssize_t bucket_bytes = 0;
  Py_ssize_t first_bucket_bytes = 0;
  Py_ssize_t bucket_elements = 0;
  Py_ssize_t arena_offset = 0;
  int wire = EVEN_F32;
  int encoding = EVEN_SYNC_PLAIN;
  int way = EVEN_SYNC_CHEAPER;
  unsigned long long seed = 0;
  even_sync_params params = {.size = sizeof params};
  even_sync_parameter *parameters = NULL;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "OO|nnnOiiidKnpp:Sync", keywords, &comm, &sequence, &bucket_bytes,
                                   &first_bucket_bytes, &arena_offset, &telemetry, &wire, &encoding, &way,
                                   &params.ratio, &seed, &bucket_elements, &params.unsummed, &params.static_graph)) {
    return NULL;
  }
  if (bucket_bytes < 0 || first_bucket_bytes < 0 || bucket_elements < 0 || arena_offset < 0) {
    return PyErr_Format(PyExc_ValueError, "sizes cannot be negative");
  }
  sync_object *self = (sync_object *)even_ext_object_new(type);
  if (self == NULL) {
    return NULL;
  }
  int failed = take_handles(self, comm, telemetry);
  if (failed == 0) {
    failed = to_parameters(sequence, &parameters, &params.parameter_count);
  }
  if (failed == 0) {
    params.parameters = parameters;
    params.bucket_bytes = (size_t)bucket_bytes;
    params.first_bucket_bytes = (size_t)first_bucket_bytes;
    params.bucket_elements = (size_t)bucket_elements;
    params.arena_offset = (size_t)arena_offset;
    params.wire = (even_dtype)wire;
    params.encoding = (even_sync_encoding)encoding;
    params.way = (even_sync_way)way;
    params.seed = seed;
    self->parameter_count = params.parameter_count;
    failed = open_engine(self, &params);
    even_free(parameters);
  }
  if (failed != 0) {
    Py_DECREF((PyObject *)self);
    return NULL;
  }
  return (PyObject *)self;
}

static void close_engine(sync_object *self) {
  even_sync *sync = self->sync;
  self->sync = NULL;
  if (sync != NULL) {
    Py_BEGIN_ALLOW_THREADS;
    even_sync_close(sync);
    Py_END_ALLOW_THREADS;
  }
  Py_CLEAR(self->comm_handle);
  Py_CLEAR(self->telemetry_handle);
}

static void sync_dealloc(PyObject *object) {
  close_engine((sync_object *)object);
  even_ext_object_free(object);
}

/* The engine, or NULL with an exception when it is closed or a thread is inside finish. */
static even_sync *engine_of(PyObject *object) {
  sync_object *self = (sync_object *)object;
  if (self->sync == NULL || self->finishing) {
    PyErr_SetString(even_ext_error, self->sync == NULL ? "the gradient engine is closed"
                                                       : "another thread is inside finish of this gradient engine");
    return NULL;
  }
  return self->sync;
}

static PyObject *sync_offset(PyObject *object, PyObject *arguments) {
  sync_object *self = (sync_object *)object;
  Py_ssize_t index = 0;
  even_sync *sync = engine_of(object);
  if (sync == NULL || !PyArg_ParseTuple(arguments, "n:offset", &index)) {
    return NULL;
  }
  if (index < 0 || (size_t)index >= self->parameter_count) {
    return PyErr_Format(PyExc_IndexError, "parameter %zd of %zu", index, self->parameter_count);
  }
  return PyLong_FromSsize_t((const char *)even_sync_slot(sync, (size_t)index) - self->arena);
}

static PyObject *sync_begin(PyObject *object, PyObject *arguments) {
  double weight = 0;
  unsigned int step = 0;
  even_sync *sync = engine_of(object);
  if (sync == NULL || !PyArg_ParseTuple(arguments, "d|I:begin", &weight, &step)) {
    return NULL;
  }
  return even_ext_done(even_sync_begin(sync, weight, step));
}

static PyObject *sync_ready(PyObject *object, PyObject *arguments) {
  Py_ssize_t index = 0;
  const void *gradient = NULL;
  even_sync *sync = engine_of(object);
  if (sync == NULL || !PyArg_ParseTuple(arguments, "nO&:ready", &index, even_ext_to_address, &gradient)) {
    return NULL;
  }
  return even_ext_done(even_sync_ready(sync, (size_t)index, gradient));
}

static PyObject *sync_complete(PyObject *object, PyObject *unused) {
  even_sync *sync = engine_of(object);
  (void)unused;
  return sync == NULL ? NULL : even_ext_done(even_sync_complete(sync));
}

static PyObject *sync_finish(PyObject *object, PyObject *unused) {
  sync_object *self = (sync_object *)object;
  even_sync *sync = engine_of(object);
  even_sync_report report = {0};
  even_status status = EVEN_OK;
  (void)unused;
  if (sync == NULL) {
    return NULL;
  }
  PyObject *used = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->parameter_count);
  if (used == NULL) {
    return NULL;
  }
  uint8_t *flags = (uint8_t *)PyBytes_AsString(used);
  self->finishing = 1;
  even_ext_comes_from_python(true);
  Py_BEGIN_ALLOW_THREADS;
  status = even_sync_finish(sync, flags, &report);
  Py_END_ALLOW_THREADS;
  even_ext_comes_from_python(false);
  self->finishing = 0;
  if (status != EVEN_OK) {
    Py_DECREF(used);
    return even_ext_raise(status);
  }
  return Py_BuildValue(
      "(NKKKKKIKI)", used, (unsigned long long)report.start_ns, (unsigned long long)report.communication_ns,
      (unsigned long long)report.peer_wait_ns, (unsigned long long)report.exposed_ns, (unsigned long long)report.bytes,
      (unsigned int)report.buckets, (unsigned long long)report.full_bytes, (unsigned int)report.nonfinite);
}

static PyObject *sync_know(PyObject *object, PyObject *used) {
  sync_object *self = (sync_object *)object;
  even_sync *sync = engine_of(object);
  char *flags = NULL;
  Py_ssize_t count = 0;
  if (sync == NULL) {
    return NULL;
  }
  if (used != Py_None) {
    if (PyBytes_AsStringAndSize(used, &flags, &count) != 0) {
      return NULL;
    }
    if ((size_t)count != self->parameter_count) {
      return PyErr_Format(PyExc_ValueError, "%zd flags of %zu parameters", count, self->parameter_count);
    }
  }
  return even_ext_done(even_sync_know(sync, (const uint8_t *)flags));
}

static PyObject *sync_wait(PyObject *object, PyObject *arguments) {
  sync_object *self = (sync_object *)object;
  Py_ssize_t index = 0;
  even_status status = EVEN_OK;
  if (self->sync == NULL) {
    (void)engine_of(object);
    return NULL;
  }
  if (!PyArg_ParseTuple(arguments, "n:wait", &index)) {
    return NULL;
  }
  self->waiting++;
  Py_BEGIN_ALLOW_THREADS;
  status = even_sync_await(self->sync, (size_t)index);
  Py_END_ALLOW_THREADS;
  self->waiting--;
  return even_ext_done(status);
}

/* (parameter, whether on this rank) of each whose gradient was not finite in the last round. */
static PyObject *sync_nonfinite(PyObject *object, PyObject *unused) {
  sync_object *self = (sync_object *)object;
  even_sync *sync = engine_of(object);
  (void)unused;
  PyObject *list = sync == NULL ? NULL : PyList_New(0);
  for (size_t i = 0; list != NULL && i < self->parameter_count; i++) {
    int bits = even_sync_nonfinite(sync, i);
    if (bits == 0) {
      continue;
    }
    PyObject *one = Py_BuildValue("(nN)", (Py_ssize_t)i, PyBool_FromLong(bits & EVEN_SYNC_NONFINITE_HERE));
    if (one == NULL || PyList_Append(list, one) != 0) {
      Py_CLEAR(list);
    }
    Py_XDECREF(one);
  }
  return list;
}

static PyObject *sync_left_out(PyObject *object, PyObject *arguments) {
  Py_ssize_t index = 0;
  int of_sums = 0;
  even_sync_left left = {0};
  even_sync *sync = engine_of(object);
  if (sync == NULL || !PyArg_ParseTuple(arguments, "np:left_out", &index, &of_sums)) {
    return NULL;
  }
  even_status status = even_sync_left_out(sync, (size_t)index, of_sums, &left);
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  return Py_BuildValue("(nnn)", (Py_ssize_t)(intptr_t)left.values, (Py_ssize_t)left.first, (Py_ssize_t)left.count);
}

static PyObject *sync_discard(PyObject *object, PyObject *unused) {
  even_sync *sync = engine_of(object);
  (void)unused;
  return sync == NULL ? NULL : even_ext_done(even_sync_discard(sync));
}

static PyObject *sync_keep(PyObject *object, PyObject *arguments) {
  Py_ssize_t index = 0;
  even_sync *sync = engine_of(object);
  if (sync == NULL || !PyArg_ParseTuple(arguments, "n:keep", &index)) {
    return NULL;
  }
  return even_ext_done(even_sync_keep(sync, (size_t)index));
}

static PyObject *sync_forget(PyObject *object, PyObject *unused) {
  even_sync *sync = engine_of(object);
  (void)unused;
  return sync == NULL ? NULL : even_ext_done(even_sync_forget(sync));
}

static PyObject *sync_close(PyObject *object, PyObject *unused) {
  sync_object *self = (sync_object *)object;
  (void)unused;
  if (self->finishing) {
    (void)engine_of(object);
    return NULL;
  }
  if (self->waiting > 0) {
    PyErr_SetString(even_ext_error, "another thread waits for a sum of this gradient engine");
    return NULL;
  }
  close_engine(self);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"arena_bytes", (PyCFunction)(void (*)(void))sync_arena_bytes, METH_VARARGS | METH_KEYWORDS | METH_STATIC,
     "arena_bytes(parameters, bucket_bytes=0, first_bucket_bytes=0, wire=DTYPE_F32, bucket_elements=0): bytes of arena "
     "that [(count, dtype), …] need"},
    {"choose_sizes", (PyCFunction)(void (*)(void))sync_choose_sizes, METH_VARARGS | METH_KEYWORDS | METH_STATIC,
     "choose_sizes(parameters, ready, end, costs, shape, engine, arena_bytes=0, wire=DTYPE_F32): (bucket_bytes, "
     "first_bucket_bytes, seconds until now, seconds) of the exchange that ends first; 0, 0: as it is"},
    {"offset", sync_offset, METH_VARARGS, "offset(index): where the parameter's slot lies in the arena, in bytes"},
    {"begin", sync_begin, METH_VARARGS, "begin(weight, step=0): opens a round"},
    {"ready", sync_ready, METH_VARARGS, "ready(index, address): the gradient is there and stays until finish"},
    {"complete", sync_complete, METH_NOARGS,
     "complete(): nothing more is made ready in this round, which ends without waiting for finish"},
    {"finish", sync_finish, METH_NOARGS,
     "finish(): blocks until every slot holds its weighted sum; returns (used, start_ns, communication_ns, "
     "peer_wait_ns, "
     "exposed_ns, bytes, buckets, full_bytes, nonfinite), used[i] 1 where some rank had a gradient of parameter i, "
     "nonfinite how many of these were not finite on some rank"},
    {"know", sync_know, METH_O,
     "know(used): from now on used (bytes) is what finish gives, and ranks no longer ask one another; None: they do"},
    {"wait", sync_wait, METH_VARARGS,
     "wait(index): blocks until the parameter's slot holds its sum of this round; any thread, also beside finish"},
    {"nonfinite", sync_nonfinite, METH_NOARGS,
     "nonfinite(): (parameter, whether on this rank) of each whose gradient was not finite in the last round"},
    {"left_out", sync_left_out, METH_VARARGS,
     "left_out(index, of_sums): (address, first, count) of what the encoding has left out of the parameter so far"},
    {"discard", sync_discard, METH_NOARGS, "discard(): what the round under way leaves out is not kept"},
    {"keep", sync_keep, METH_VARARGS, "keep(i): what the last round left out of it is kept, although it was discarded"},
    {"forget", sync_forget, METH_NOARGS, "forget(): nothing has been left out so far"},
    {"close", sync_close, METH_NOARGS, "ends the engine; a round under way is revoked on all ranks"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, (void *)sync_new},
                              {Py_tp_dealloc, (void *)sync_dealloc},
                              {Py_tp_methods, methods},
                              {Py_tp_doc, "The gradient engine of one group (include/evenstep/sync.h)."},
                              {0, NULL}};
static PyType_Spec spec = {"evenstep._core.Sync", sizeof(sync_object), 0, Py_TPFLAGS_DEFAULT, slots};

typedef struct place {
  const void *address;
  size_t bytes;
} place;

/* A list of (address, bytes) into *out (free with even_free). */
static int to_places(PyObject *list, place **out, size_t *count) {
  *count = (size_t)PyList_Size(list);
  even_status status = EVEN_NEW_ARRAY(out, *count);
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
    return -1;
  }
  for (size_t i = 0; i < *count; i++) {
    Py_ssize_t bytes = 0;
    PyObject *item = PyList_GetItem(list, (Py_ssize_t)i); /* borrowed */
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "O&n", even_ext_to_address, &(*out)[i].address, &bytes) ||
        bytes < 0) {
      if (PyErr_Occurred() == NULL) {
        PyErr_Format(PyExc_ValueError, "place %zu is not (address, bytes)", i);
      }
      even_free(*out);
      return -1;
    }
    (*out)[i].bytes = (size_t)bytes;
  }
  return 0;
}

static PyObject *content_sums(PyObject *module, PyObject *sequence) {
  place *places = NULL;
  uint64_t *sums = NULL;
  size_t count = 0;
  (void)module;
  PyObject *list = PySequence_List(sequence);
  if (list == NULL || to_places(list, &places, &count) != 0) {
    Py_XDECREF(list);
    return NULL;
  }
  Py_DECREF(list);
  even_status status = EVEN_NEW_ARRAY(&sums, count);
  if (status != EVEN_OK) {
    even_free(places);
    return even_ext_raise(status);
  }
  Py_BEGIN_ALLOW_THREADS;
  for (size_t i = 0; i < count; i++) {
    sums[i] = even_checkpoint_checksum(places[i].address, places[i].bytes);
  }
  Py_END_ALLOW_THREADS;
  PyObject *result = PyList_New((Py_ssize_t)count);
  for (size_t i = 0; result != NULL && i < count; i++) {
    PyObject *one = PyLong_FromUnsignedLongLong(sums[i]);
    if (one == NULL || PyList_SetItem(result, (Py_ssize_t)i, one) != 0) {
      Py_CLEAR(result);
    }
  }
  even_free(sums);
  even_free(places);
  return result;
}

static PyMethodDef functions[] = {
    {"content_sums", content_sums, METH_O,
     "content_sums(places) -> list\n\nXXH3 (64 bits) of the bytes at each (address, bytes)."},
    {NULL, NULL, 0, NULL}};

static int add_constants(PyObject *module) {
  static const struct {
    const char *name;
    int value;
  } constants[] = {
      {"SYNC_PLAIN", EVEN_SYNC_PLAIN},
      {"SYNC_INT8", EVEN_SYNC_INT8},
      {"SYNC_ONE_BIT", EVEN_SYNC_ONE_BIT},
      {"SYNC_TOP", EVEN_SYNC_TOP},
      {"SYNC_CHEAPER", EVEN_SYNC_CHEAPER},
      {"SYNC_GATHER", EVEN_SYNC_GATHER},
      {"SYNC_PARTS", EVEN_SYNC_PARTS},
      {"SYNC_PARTS_RANKS", EVEN_SYNC_PARTS_RANKS},
      {"SYNC_PARTS_BYTES", EVEN_SYNC_PARTS_BYTES},
  };
  for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++) {
    if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) != 0) {
      return -1;
    }
  }
  return 0;
}

int even_ext_add_sync(PyObject *module) {
  if (even_ext_add_type(module, "Sync", &spec) == NULL || add_constants(module) != 0 ||
      PyModule_AddFunctions(module, functions) != 0) {
    return -1;
  }
  return 0;
}
