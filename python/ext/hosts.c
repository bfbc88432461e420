/* _core.Comm of ranks on several hosts: over UCX, and made of groups in shared memory joined by it. */
#include "comm.h"

#include "base/alloc.h"
#include "base/fail.h"

#include <stdio.h>

/* A new object of `type` around a group, which it owns, also where this fails. */
static PyObject *wrap(PyTypeObject *type, even_comm *comm, size_t arena_bytes) {
  allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  even_ext_comm *self = (even_ext_comm *)make(type, 0);
  if (self == NULL) {
    even_comm_close(comm);
    return NULL;
  }
  self->comm = comm;
  self->arena_bytes = arena_bytes;
  return (PyObject *)self;
}

typedef struct gathering {
  PyObject *call;
  int ranks;
} gathering;

/* What the caller's function returns, if it is all ranks' records one after the other; an exception is left set. */
static even_status gather_with_gil(const gathering *context, const void *mine, size_t bytes, void *all) {
  char *data = NULL;
  Py_ssize_t length = 0;
  PyObject *records = PyObject_CallFunction(context->call, "y#", mine, (Py_ssize_t)bytes);
  if (records == NULL || PyBytes_AsStringAndSize(records, &data, &length) != 0) {
    Py_XDECREF(records);
    return even_fail(EVEN_ERR_SYSTEM, "the ranks could not exchange their addresses");
  }
  bool fits = (size_t)length == bytes * (size_t)context->ranks;
  if (fits) {
    memcpy(all, data, (size_t)length);
  }
  Py_DECREF(records);
  return fits ? EVEN_OK
              : even_fail(EVEN_ERR_MISMATCH, "the ranks' addresses are %zd bytes together, not %d times %zu", length,
                          context->ranks, bytes);
}

static even_status gather(void *context, const void *mine, size_t bytes, void *all) {
  PyGILState_STATE state = PyGILState_Ensure();
  even_status status = gather_with_gil(context, mine, bytes, all);
  PyGILState_Release(state);
  return status;
}

PyObject *even_ext_comm_open_ucx(PyObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"gather", "rank",    "ranks",      "arena_bytes", "timeout_seconds",
                             "spin",   "library", "interfaces", "number",      NULL};
  even_comm_params params = {.size = sizeof params, .timeout_seconds = 1800.0, .spin = -1};
  even_comm_network network = {.size = sizeof network, .gather = gather, .number = -1};
  gathering context = {0};
  even_comm *comm = NULL;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "Oii|O&dizzi:open_ucx", keywords, &context.call, &params.rank,
                                   &params.ranks, even_ext_to_size, &params.arena_bytes, &params.timeout_seconds,
                                   &params.spin, &network.library, &network.interfaces, &network.number)) {
    return NULL;
  }
  context.ranks = params.ranks;
  network.context = &context;
  even_status status = EVEN_OK;
  Py_BEGIN_ALLOW_THREADS;
  status = even_comm_open_ucx(&params, &network, &comm);
  Py_END_ALLOW_THREADS;
  if (status != EVEN_OK) {
    return PyErr_Occurred() != NULL ? NULL : even_ext_raise(status); /* the gathering's own exception is the cause */
  }
  return wrap((PyTypeObject *)type, comm, params.arena_bytes);
}

/* The group of a Comm object, or NULL for None; false with an exception for anything else, or one in use. */
static bool take(PyObject *type, PyObject *object, even_comm **out) {
  *out = NULL;
  if (object == Py_None) {
    return true;
  }
  if ((PyObject *)Py_TYPE(object) != type) {
    PyErr_SetString(PyExc_TypeError, "open_hosts is made of Comm objects");
    return false;
  }
  even_ext_comm *given = (even_ext_comm *)object;
  *out = even_ext_comm_open_group(given);
  if (*out != NULL && (given->calls > 0 || given->messages > 0 || given->handles > 0 || given->view != NULL)) {
    (void)even_ext_raise(even_fail(EVEN_ERR_STATE, "a group that is in use cannot become part of another"));
    return false;
  }
  return *out != NULL;
}

/* The object is closed from here on: its group belongs to another. */
static void give_up(PyObject *object) {
  if (object != Py_None) {
    ((even_ext_comm *)object)->comm = NULL;
    ((even_ext_comm *)object)->closed = 1;
  }
}

static int *to_hosts(PyObject *object, int *ranks) {
  Py_ssize_t count = PySequence_Size(object);
  int *hosts = NULL;
  if (count < 1 || count > INT_MAX) {
    PyErr_SetString(PyExc_ValueError, "host_of has a host for each rank");
    return NULL;
  }
  *ranks = (int)count;
  size_t *numbers = even_ext_to_counts(object, *ranks);
  if (numbers != NULL && EVEN_NEW_ARRAY(&hosts, (size_t)count) != EVEN_OK) {
    (void)even_ext_raise(EVEN_ERR_MEMORY);
  }
  for (int rank = 0; hosts != NULL && rank < *ranks; rank++) {
    hosts[rank] = numbers[rank] > INT_MAX ? -1 : (int)numbers[rank];
  }
  even_free(numbers);
  return hosts;
}

PyObject *even_ext_comm_open_hosts(PyObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"rank", "host_of", "inside", "between", "everyone", "timeout_seconds", NULL};
  even_comm_hosts params = {.size = sizeof params};
  PyObject *host_of = NULL;
  PyObject *inside = NULL;
  PyObject *between = Py_None;
  PyObject *everyone = Py_None;
  double timeout_seconds = 1800.0;
  even_comm *comm = NULL;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "iOO|OOd:open_hosts", keywords, &params.rank, &host_of, &inside,
                                   &between, &everyone, &timeout_seconds) ||
      !take(type, inside, &params.inside) || !take(type, between, &params.between) ||
      !take(type, everyone, &params.everyone)) {
    return NULL;
  }
  int *hosts = to_hosts(host_of, &params.ranks);
  if (hosts == NULL) {
    return NULL;
  }
  params.host_of = hosts;
  even_status status = even_comm_open_hosts(&params, timeout_seconds, &comm);
  even_free(hosts);
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  give_up(inside);
  give_up(between);
  give_up(everyone);
  return wrap((PyTypeObject *)type, comm, even_comm_arena_bytes(comm));
}

PyObject *even_ext_ucx_version(PyObject *module, PyObject *arguments) {
  const char *library = NULL;
  char version[32];
  even_status status = EVEN_OK;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "|z:ucx_version", &library)) {
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS;
  status = even_comm_ucx_version(library, version, sizeof version);
  Py_END_ALLOW_THREADS;
  return status == EVEN_OK ? PyUnicode_FromString(version) : even_ext_raise(status);
}
