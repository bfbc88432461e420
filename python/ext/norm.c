/* Batch normalisation over all ranks, for _core.Comm and the module. Numbers cross as addresses; the GIL is released
 * while ranks meet. */
#include "arguments.h"
#include "comm.h"

#include <evenstep/norm.h>

/* Whether there is memory for each channel's numbers; else an exception is set. A tensor that has none (a fake one of
 * torch's) has address 0. */
static bool has_memory(const void *memory, size_t channels) {
  if (memory == NULL && channels > 0) {
    PyErr_SetString(PyExc_ValueError, "a tensor without memory");
  }
  return memory != NULL || channels == 0;
}

/* What the script's layer brings, and where the answer goes. */
typedef struct norm_call {
  even_norm_values mine;
  even_norm_whole whole;
  even_status (*run)(even_comm *comm, const even_norm_values *mine, even_norm_whole *out);
} norm_call;

/* What the ranks brought as a tuple; None where they are in different calls; NULL with an exception. */
static PyObject *meet(even_ext_comm *self, norm_call *call) {
  even_comm *comm = self->comm;
  Py_ssize_t ranks = (Py_ssize_t)even_comm_ranks(comm);
  even_status status = EVEN_OK;
  call->whole.numbers = even_ext_array((size_t)ranks, sizeof *call->whole.numbers);
  if (call->whole.numbers == NULL) {
    return PyErr_NoMemory();
  }
  even_ext_comm_begin(self);
  Py_BEGIN_ALLOW_THREADS;
  status = call->run(comm, &call->mine, &call->whole);
  Py_END_ALLOW_THREADS;
  PyObject *result = even_ext_comm_done(self, status);
  if (result != NULL && call->whole.alike) {
    Py_DECREF(result);
    result = PyTuple_New(ranks);
    for (Py_ssize_t r = 0; result != NULL && r < ranks; r++) {
      PyObject *number = PyFloat_FromDouble(call->whole.numbers[r]);
      if (number == NULL || PyTuple_SetItem(result, r, number) != 0) {
        Py_CLEAR(result);
      }
    }
  }
  PyMem_Free(call->whole.numbers);
  return result;
}

static void narrow(const double *values, size_t count, float *out) {
  for (size_t i = 0; out != NULL && i < count; i++) {
    out[i] = (float)values[i];
  }
}

/* mark, place, number, first, second, dtype, channels, out, narrow=0 */
static PyObject *meet_by(PyObject *object, PyObject *arguments,
                         even_status (*run)(even_comm *comm, const even_norm_values *mine, even_norm_whole *out)) {
  even_ext_comm *self = (even_ext_comm *)object;
  norm_call call = {.mine = {.size = sizeof call.mine}, .run = run};
  even_norm_values *mine = &call.mine;
  void *first = NULL;
  void *second = NULL;
  double *out = NULL;
  float *narrowed = NULL;
  int dtype = 0;
  if (even_ext_comm_open_group(self) == NULL ||
      !PyArg_ParseTuple(arguments, "dddO&O&iO&O&|O&", &mine->mark[0], &mine->mark[1], &mine->number,
                        even_ext_to_address, &first, even_ext_to_address, &second, &dtype, even_ext_to_size,
                        &mine->channels, even_ext_to_address, &out, even_ext_to_address, &narrowed)) {
    return NULL;
  }
  if (!has_memory(out, mine->channels)) {
    return NULL;
  }
  mine->first = first;
  mine->second = second;
  mine->dtype = (even_dtype)dtype;
  call.whole.first = out;
  call.whole.second = out + mine->channels;
  PyObject *numbers = meet(self, &call);
  if (numbers != NULL && call.whole.alike) {
    narrow(out, 2 * mine->channels, narrowed);
  }
  return numbers;
}

PyObject *even_ext_comm_norm_statistics(PyObject *object, PyObject *arguments) {
  return meet_by(object, arguments, even_norm_statistics);
}

PyObject *even_ext_comm_norm_sums(PyObject *object, PyObject *arguments) {
  return meet_by(object, arguments, even_norm_sums);
}

/* norm_through(sums, variance, weight, dtype, channels, eps, values, part, out) */
static PyObject *norm_through(PyObject *module, PyObject *arguments) {
  (void)module;
  even_norm_backward layer = {.size = sizeof layer};
  even_norm_whole sums = {0};
  double *both = NULL;
  void *variance = NULL;
  void *weight = NULL;
  char *out = NULL;
  int dtype = 0;
  if (!PyArg_ParseTuple(arguments, "O&O&O&iO&dddO&:norm_through", even_ext_to_address, &both, even_ext_to_address,
                        &variance, even_ext_to_address, &weight, &dtype, even_ext_to_size, &layer.channels, &layer.eps,
                        &layer.values, &layer.part, even_ext_to_address, &out)) {
    return NULL;
  }
  if (!has_memory(both, layer.channels) || !has_memory(variance, layer.channels) || !has_memory(out, layer.channels)) {
    return NULL;
  }
  layer.dtype = (even_dtype)dtype;
  layer.variance = variance;
  layer.weight = weight;
  sums.first = both;
  sums.second = both + layer.channels;
  even_status status = even_norm_through(&layer, &sums, out, out + layer.channels * even_dtype_bytes(layer.dtype));
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  Py_RETURN_NONE;
}

/* norm_follow(running, dtype, values, channels, momentum, factor) */
static PyObject *norm_follow(PyObject *module, PyObject *arguments) {
  (void)module;
  void *running = NULL;
  double *values = NULL;
  size_t channels = 0;
  double momentum = 0.0;
  double factor = 0.0;
  int dtype = 0;
  if (!PyArg_ParseTuple(arguments, "O&iO&O&dd:norm_follow", even_ext_to_address, &running, &dtype, even_ext_to_address,
                        &values, even_ext_to_size, &channels, &momentum, &factor)) {
    return NULL;
  }
  if (!has_memory(running, channels) || !has_memory(values, channels)) {
    return NULL;
  }
  even_status status = even_norm_follow(running, (even_dtype)dtype, values, channels, momentum, factor);
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  Py_RETURN_NONE;
}

/* norm_moments(x, dtype, outer, channels, inner, out): two rows of float64 */
static PyObject *norm_moments(PyObject *module, PyObject *arguments) {
  (void)module;
  even_norm_layout layout = {.size = sizeof layout};
  void *x = NULL;
  double *out = NULL;
  int dtype = 0;
  even_status status = EVEN_OK;
  if (!PyArg_ParseTuple(arguments, "O&iO&O&O&O&:norm_moments", even_ext_to_address, &x, &dtype, even_ext_to_size,
                        &layout.outer, even_ext_to_size, &layout.channels, even_ext_to_size, &layout.inner,
                        even_ext_to_address, &out)) {
    return NULL;
  }
  if (!has_memory(x, layout.channels) || !has_memory(out, layout.channels)) {
    return NULL;
  }
  layout.dtype = (even_dtype)dtype;
  Py_BEGIN_ALLOW_THREADS;
  status = even_norm_moments(&layout, x, out, out + layout.channels);
  Py_END_ALLOW_THREADS;
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  Py_RETURN_NONE;
}

/* norm_input(gradient, x, dtype, outer, channels, inner, mean, variance, eps, weight, through, out) */
static PyObject *norm_input(PyObject *module, PyObject *arguments) {
  (void)module;
  even_norm_layout layout = {.size = sizeof layout};
  void *gradient = NULL;
  void *x = NULL;
  void *mean = NULL;
  void *variance = NULL;
  void *weight = NULL;
  char *through = NULL;
  void *out = NULL;
  double eps = 0.0;
  int dtype = 0;
  even_status status = EVEN_OK;
  if (!PyArg_ParseTuple(arguments, "O&O&iO&O&O&O&O&dO&O&O&:norm_input", even_ext_to_address, &gradient,
                        even_ext_to_address, &x, &dtype, even_ext_to_size, &layout.outer, even_ext_to_size,
                        &layout.channels, even_ext_to_size, &layout.inner, even_ext_to_address, &mean,
                        even_ext_to_address, &variance, &eps, even_ext_to_address, &weight, even_ext_to_address,
                        &through, even_ext_to_address, &out)) {
    return NULL;
  }
  if (!has_memory(gradient, layout.channels) || !has_memory(x, layout.channels) || !has_memory(mean, layout.channels) ||
      !has_memory(variance, layout.channels) || !has_memory(through, layout.channels) ||
      !has_memory(out, layout.channels)) {
    return NULL;
  }
  layout.dtype = (even_dtype)dtype;
  Py_BEGIN_ALLOW_THREADS;
  status = even_norm_input(&layout, gradient, x, mean, variance, eps, weight, through,
                           through + layout.channels * even_dtype_bytes(layout.dtype), out);
  Py_END_ALLOW_THREADS;
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"norm_through", norm_through, METH_VARARGS,
     "norm_through(sums, variance, weight, dtype, channels, eps, values, part, out): even_norm_through"},
    {"norm_moments", norm_moments, METH_VARARGS,
     "norm_moments(x, dtype, outer, channels, inner, out): even_norm_moments; two rows of float64"},
    {"norm_input", norm_input, METH_VARARGS,
     "norm_input(gradient, x, dtype, outer, channels, inner, mean, variance, eps, weight, through, out): "
     "even_norm_input; through: slope and shift as two rows"},
    {"norm_follow", norm_follow, METH_VARARGS,
     "norm_follow(running, dtype, values, channels, momentum, factor): even_norm_follow"},
    {NULL, NULL, 0, NULL},
};

int even_ext_add_norm(PyObject *module) {
  return PyModule_AddFunctions(module, functions);
}
