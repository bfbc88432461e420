/* The collectives of _core.Comm. Data cross as addresses; the GIL is released while a call runs. */
#include "comm.h"

#include "base/alloc.h"
#include "comm/called.h"

/* Runs `call` without the GIL and returns None or raises. */
#define RUN(self, call)                             \
  do {                                              \
    even_status run_status_ = EVEN_OK;              \
    even_ext_comm_begin(self);                      \
    Py_BEGIN_ALLOW_THREADS;                         \
    run_status_ = (call);                           \
    Py_END_ALLOW_THREADS;                           \
    return even_ext_comm_done((self), run_status_); \
  } while (0)

/* What the call was to the script, for those who compare and report it: the engine takes it, or it was refused before.
 */
static even_status done_as(even_status status) {
  even_comm_call_as(NULL);
  return status;
}

/* A sequence of `ranks` counts into a new array. */
size_t *even_ext_to_counts(PyObject *object, int ranks) {
  PyObject *items = PySequence_Tuple(object);
  size_t *counts = NULL;
  even_status status = EVEN_OK;
  if (items == NULL) {
    return NULL;
  }
  if (PyTuple_Size(items) != ranks) {
    PyErr_Format(PyExc_ValueError, "%zd counts for a group of %d ranks: give one for each rank", PyTuple_Size(items),
                 ranks);
  } else {
    status = EVEN_NEW_ARRAY(&counts, (size_t)ranks);
  }
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
  }
  for (int rank = 0; counts != NULL && rank < ranks; rank++) {
    if (!even_ext_to_size(PyTuple_GetItem(items, rank), &counts[rank])) {
      even_free(counts);
      counts = NULL;
    }
  }
  Py_DECREF(items);
  return counts;
}

PyObject *even_ext_comm_all_reduce(PyObject *object, PyObject *arguments) {
  even_ext_comm *self = (even_ext_comm *)object;
  void *data = NULL;
  size_t count = 0;
  int dtype = 0;
  int op = 0;
  even_comm *comm = even_ext_comm_open_group(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "O&O&ii:all_reduce", even_ext_to_address, &data, even_ext_to_size,
                                        &count, &dtype, &op)) {
    return NULL;
  }
  RUN(self, even_comm_all_reduce(comm, data, count, (even_dtype)dtype, (even_reduce_op)op));
}

/* `root` alone gets something: this is its reduce. -1: all do. */
static even_status reduce_scatter_and_free(even_comm *comm, const void *input, void *output, size_t *counts, int dtype,
                                           int op, int root) {
  const even_comm_called called = {.kind = EVEN_CALL_REDUCE, .root = root, .count = root < 0 ? 0 : counts[root]};
  even_comm_call_as(root < 0 ? NULL : &called);
  even_status status = even_comm_reduce_scatter(comm, input, output, counts, (even_dtype)dtype, (even_reduce_op)op);
  even_free(counts);
  return done_as(status);
}

PyObject *even_ext_comm_reduce_scatter(PyObject *object, PyObject *arguments) {
  even_ext_comm *self = (even_ext_comm *)object;
  void *input = NULL;
  void *output = NULL;
  PyObject *sequence = NULL;
  int dtype = 0;
  int op = 0;
  int root = -1;
  even_comm *comm = even_ext_comm_open_group(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "O&O&Oii|i:reduce_scatter", even_ext_to_address, &input,
                                        even_ext_to_address, &output, &sequence, &dtype, &op, &root)) {
    return NULL;
  }
  if (root < -1 || root >= even_comm_ranks(comm)) {
    return PyErr_Format(PyExc_ValueError, "reduce to rank %d in a group of %d ranks", root, even_comm_ranks(comm));
  }
  size_t *counts = even_ext_to_counts(sequence, even_comm_ranks(comm));
  if (counts == NULL) {
    return NULL;
  }
  RUN(self, reduce_scatter_and_free(comm, input, output, counts, dtype, op, root));
}

int even_ext_to_elements(PyObject *object, void *out) {
  unsigned long value = PyLong_AsUnsignedLong(object);
  if (PyErr_Occurred() == NULL && value > UINT16_MAX) {
    PyErr_Format(PyExc_ValueError, "%lu is no number of a type of elements", value);
  }
  *(unsigned *)out = (unsigned)value;
  return PyErr_Occurred() == NULL;
}

static even_status all_gather_and_free(even_comm *comm, const void *input, void *output, size_t *counts, int dtype,
                                       unsigned elements) {
  const even_comm_called called = {.elements = elements};
  even_comm_call_as(&called);
  even_status status = even_comm_all_gather(comm, input, output, counts, (even_dtype)dtype);
  even_free(counts);
  return done_as(status);
}

PyObject *even_ext_comm_all_gather(PyObject *object, PyObject *arguments) {
  even_ext_comm *self = (even_ext_comm *)object;
  void *input = NULL;
  void *output = NULL;
  PyObject *sequence = NULL;
  int dtype = 0;
  unsigned elements = 0;
  even_comm *comm = even_ext_comm_open_group(self);
  if (comm == NULL ||
      !PyArg_ParseTuple(arguments, "O&O&Oi|O&:all_gather", even_ext_to_address, &input, even_ext_to_address, &output,
                        &sequence, &dtype, even_ext_to_elements, &elements)) {
    return NULL;
  }
  size_t *counts = even_ext_to_counts(sequence, even_comm_ranks(comm));
  if (counts == NULL) {
    return NULL;
  }
  RUN(self, all_gather_and_free(comm, input, output, counts, dtype, elements));
}

/* A sequence of `ranks` addresses into a new array. */
void **even_ext_to_parts(PyObject *object, int ranks) {
  size_t *numbers = even_ext_to_counts(object, ranks); /* an address is a number that fits a size_t */
  void **parts = NULL;
  even_status status = numbers == NULL ? EVEN_OK : EVEN_NEW_ARRAY(&parts, (size_t)ranks);
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
  }
  for (int rank = 0; parts != NULL && rank < ranks; rank++) {
    parts[rank] = (void *)(uintptr_t)numbers[rank];
  }
  even_free(numbers);
  return parts;
}

typedef struct all_to_all_arguments {
  void **inputs;
  size_t *input_bytes;
  void **outputs;
  size_t *output_bytes;
} all_to_all_arguments;

static void free_arguments(all_to_all_arguments *all) {
  even_free(all->inputs);
  even_free(all->input_bytes);
  even_free(all->outputs);
  even_free(all->output_bytes);
}

/* The root's parts are of one size: another's own part is as large. */
static size_t part_bytes(const all_to_all_arguments *all, const even_comm_called *called) {
  return called->kind == EVEN_CALL_GATHER ? all->input_bytes[called->root] : all->output_bytes[called->root];
}

static even_status all_to_all_and_free(even_comm *comm, all_to_all_arguments *all, even_comm_called *called) {
  if (called->kind != 0) {
    called->count = part_bytes(all, called);
  }
  even_comm_call_as(called);
  even_status status =
      even_comm_all_to_all(comm, (const void *const *)all->inputs, all->input_bytes, all->outputs, all->output_bytes);
  free_arguments(all);
  return done_as(status);
}

PyObject *even_ext_comm_all_to_all(PyObject *object, PyObject *arguments) {
  even_ext_comm *self = (even_ext_comm *)object;
  PyObject *given[4];
  all_to_all_arguments all = {0};
  even_comm_called called = {0};
  int call = 0;
  int root = 0;
  even_comm *comm = even_ext_comm_open_group(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "OOOO|O&ii:all_to_all", &given[0], &given[1], &given[2], &given[3],
                                        even_ext_to_elements, &called.elements, &call, &root)) {
    return NULL;
  }
  int ranks = even_comm_ranks(comm);
  if ((call != 0 && call != EVEN_CALL_GATHER && call != EVEN_CALL_SCATTER) || root < 0 || root >= ranks) {
    return PyErr_Format(PyExc_ValueError, "no gather or scatter (%d) with root %d in a group of %d ranks", call, root,
                        ranks);
  }
  called.kind = (uint32_t)call;
  called.root = root;
  if ((all.inputs = even_ext_to_parts(given[0], ranks)) == NULL ||
      (all.input_bytes = even_ext_to_counts(given[1], ranks)) == NULL ||
      (all.outputs = even_ext_to_parts(given[2], ranks)) == NULL ||
      (all.output_bytes = even_ext_to_counts(given[3], ranks)) == NULL) {
    free_arguments(&all);
    return NULL;
  }
  RUN(self, all_to_all_and_free(comm, &all, &called));
}

static even_status broadcast(even_comm *comm, void *data, size_t bytes, int root, unsigned elements) {
  const even_comm_called called = {.elements = elements};
  even_comm_call_as(&called);
  return done_as(even_comm_broadcast(comm, data, bytes, root));
}

PyObject *even_ext_comm_broadcast(PyObject *object, PyObject *arguments) {
  even_ext_comm *self = (even_ext_comm *)object;
  void *data = NULL;
  size_t bytes = 0;
  int root = 0;
  unsigned elements = 0;
  even_comm *comm = even_ext_comm_open_group(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "O&O&i|O&:broadcast", even_ext_to_address, &data, even_ext_to_size,
                                        &bytes, &root, even_ext_to_elements, &elements)) {
    return NULL;
  }
  RUN(self, broadcast(comm, data, bytes, root, elements));
}

PyObject *even_ext_comm_barrier(PyObject *object, PyObject *unused) {
  even_ext_comm *self = (even_ext_comm *)object;
  even_comm *comm = even_ext_comm_open_group(self);
  (void)unused;
  if (comm == NULL) {
    return NULL;
  }
  RUN(self, even_comm_barrier(comm));
}
