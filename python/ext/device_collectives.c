/* The collectives and messages of _core.DeviceComm. Data cross as addresses, streams as the numbers that torch gives
 * (stream.cuda_stream). */
#include "device_comm.h"

#include "base/alloc.h"

/* PyArg converter ("O&"): None, or a float into a double that `value` points to then. */
typedef struct optional_double {
  double number;
  const double *value;
} optional_double;

static int to_factor(PyObject *object, void *out) {
  optional_double *into = out;
  into->value = NULL;
  if (object == Py_None) {
    return 1;
  }
  into->number = PyFloat_AsDouble(object);
  if (PyErr_Occurred() != NULL) {
    return 0;
  }
  into->value = &into->number;
  return 1;
}

PyObject *even_ext_device_all_reduce(PyObject *object, PyObject *arguments) {
  even_ext_device *self = (even_ext_device *)object;
  void *input = NULL;
  void *output = NULL;
  void *stream = NULL;
  size_t count = 0;
  int dtype = 0;
  int op = 0;
  optional_double factor = {0};
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL ||
      !PyArg_ParseTuple(arguments, "O&O&O&iiO&O&:all_reduce", even_ext_to_address, &input, even_ext_to_address, &output,
                        even_ext_to_size, &count, &dtype, &op, to_factor, &factor, even_ext_to_address, &stream)) {
    return NULL;
  }
  EVEN_EXT_DEVICE_RUN(self, even_device_comm_all_reduce(comm, input, output, count, (even_dtype)dtype,
                                                        (even_reduce_op)op, factor.value, stream));
}

PyObject *even_ext_device_reduce(PyObject *object, PyObject *arguments) {
  even_ext_device *self = (even_ext_device *)object;
  void *input = NULL;
  void *output = NULL;
  void *stream = NULL;
  size_t count = 0;
  int dtype = 0;
  int op = 0;
  int root = 0;
  optional_double factor = {0};
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "O&O&O&iiO&iO&:reduce", even_ext_to_address, &input,
                                        even_ext_to_address, &output, even_ext_to_size, &count, &dtype, &op, to_factor,
                                        &factor, &root, even_ext_to_address, &stream)) {
    return NULL;
  }
  EVEN_EXT_DEVICE_RUN(self, even_device_comm_reduce(comm, input, output, count, (even_dtype)dtype, (even_reduce_op)op,
                                                    factor.value, root, stream));
}

/* `call`, and then the lists that it was given go. */
#define FREED(a, b, c, d, call)         \
  do {                                  \
    even_status freed_status_ = (call); \
    even_free(a);                       \
    even_free(b);                       \
    even_free(c);                       \
    even_free(d);                       \
    return freed_status_;               \
  } while (0)

static even_status reduce_scatter_and_free(even_device_comm *comm, const void *input, void *output, size_t *counts,
                                           int dtype, int op, const double *factor, void *stream) {
  FREED(counts, NULL, NULL, NULL,
        even_device_comm_reduce_scatter(comm, input, output, counts, (even_dtype)dtype, (even_reduce_op)op, factor,
                                        stream));
}

PyObject *even_ext_device_reduce_scatter(PyObject *object, PyObject *arguments) {
  even_ext_device *self = (even_ext_device *)object;
  void *input = NULL;
  void *output = NULL;
  void *stream = NULL;
  PyObject *sequence = NULL;
  int dtype = 0;
  int op = 0;
  optional_double factor = {0};
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL ||
      !PyArg_ParseTuple(arguments, "O&O&OiiO&O&:reduce_scatter", even_ext_to_address, &input, even_ext_to_address,
                        &output, &sequence, &dtype, &op, to_factor, &factor, even_ext_to_address, &stream)) {
    return NULL;
  }
  size_t *counts = even_ext_to_counts(sequence, even_device_comm_ranks(comm));
  if (counts == NULL) {
    return NULL;
  }
  EVEN_EXT_DEVICE_RUN(self, reduce_scatter_and_free(comm, input, output, counts, dtype, op, factor.value, stream));
}

static even_status all_gather_and_free(even_device_comm *comm, const void *input, void *output, size_t *bytes,
                                       void *stream) {
  FREED(bytes, NULL, NULL, NULL, even_device_comm_all_gather(comm, input, output, bytes, stream));
}

PyObject *even_ext_device_all_gather(PyObject *object, PyObject *arguments) {
  even_ext_device *self = (even_ext_device *)object;
  void *input = NULL;
  void *output = NULL;
  void *stream = NULL;
  PyObject *sequence = NULL;
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "O&O&OO&:all_gather", even_ext_to_address, &input,
                                        even_ext_to_address, &output, &sequence, even_ext_to_address, &stream)) {
    return NULL;
  }
  size_t *bytes = even_ext_to_counts(sequence, even_device_comm_ranks(comm));
  if (bytes == NULL) {
    return NULL;
  }
  EVEN_EXT_DEVICE_RUN(self, all_gather_and_free(comm, input, output, bytes, stream));
}

PyObject *even_ext_device_broadcast(PyObject *object, PyObject *arguments) {
  even_ext_device *self = (even_ext_device *)object;
  void *data = NULL;
  void *stream = NULL;
  size_t bytes = 0;
  int root = 0;
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "O&O&iO&:broadcast", even_ext_to_address, &data, even_ext_to_size,
                                        &bytes, &root, even_ext_to_address, &stream)) {
    return NULL;
  }
  EVEN_EXT_DEVICE_RUN(self, even_device_comm_broadcast(comm, data, bytes, root, stream));
}

static even_status all_to_all_and_free(even_device_comm *comm, void **inputs, size_t *input_bytes, void **outputs,
                                       size_t *output_bytes, void *stream) {
  FREED(inputs, input_bytes, outputs, output_bytes,
        even_device_comm_all_to_all(comm, (const void *const *)inputs, input_bytes, outputs, output_bytes, stream));
}

PyObject *even_ext_device_all_to_all(PyObject *object, PyObject *arguments) {
  even_ext_device *self = (even_ext_device *)object;
  PyObject *given[4];
  void *stream = NULL;
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "OOOOO&:all_to_all", &given[0], &given[1], &given[2], &given[3],
                                        even_ext_to_address, &stream)) {
    return NULL;
  }
  int ranks = even_device_comm_ranks(comm);
  void **inputs = even_ext_to_parts(given[0], ranks);
  size_t *input_bytes = inputs == NULL ? NULL : even_ext_to_counts(given[1], ranks);
  void **outputs = input_bytes == NULL ? NULL : even_ext_to_parts(given[2], ranks);
  size_t *output_bytes = outputs == NULL ? NULL : even_ext_to_counts(given[3], ranks);
  if (output_bytes == NULL) {
    even_free(inputs);
    even_free(input_bytes);
    even_free(outputs);
    return NULL;
  }
  EVEN_EXT_DEVICE_RUN(self, all_to_all_and_free(comm, inputs, input_bytes, outputs, output_bytes, stream));
}

static PyObject *message(PyObject *object, PyObject *arguments, bool sends) {
  even_ext_device *self = (even_ext_device *)object;
  void *data = NULL;
  void *stream = NULL;
  size_t bytes = 0;
  int peer = 0;
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "O&O&iO&", even_ext_to_address, &data, even_ext_to_size, &bytes,
                                        &peer, even_ext_to_address, &stream)) {
    return NULL;
  }
  EVEN_EXT_DEVICE_RUN(self, sends ? even_device_comm_send(comm, data, bytes, peer, stream)
                                  : even_device_comm_receive(comm, data, bytes, peer, stream));
}

PyObject *even_ext_device_send(PyObject *object, PyObject *arguments) {
  return message(object, arguments, true);
}
PyObject *even_ext_device_receive(PyObject *object, PyObject *arguments) {
  return message(object, arguments, false);
}

PyObject *even_ext_device_barrier(PyObject *object, PyObject *arguments) {
  even_ext_device *self = (even_ext_device *)object;
  void *stream = NULL;
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "O&:barrier", even_ext_to_address, &stream)) {
    return NULL;
  }
  EVEN_EXT_DEVICE_RUN(self, even_device_comm_barrier(comm, stream));
}
