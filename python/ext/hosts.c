/* _core.Comm of ranks on several hosts: over UCX or MPI, and made of groups in shared memory joined by it. */
#include "comm.h"
#include "objects.h"

#include "base/alloc.h"
#include "base/fail.h"

#include <stdio.h>

/* A new object of `type` around a group, which it owns, also where this fails. `over` stays as long as the group. */
static PyObject *wrap(PyTypeObject *type, even_comm *comm, size_t arena_bytes, PyObject *over) {
  even_ext_comm *self = (even_ext_comm *)even_ext_object_new(type);
  if (self == NULL) {
    even_ext_comm_close_group(comm);
    return NULL;
  }
  self->comm = comm;
  self->arena_bytes = arena_bytes;
  Py_XINCREF(over);
  self->over = over;
  return (PyObject *)self;
}

/* What the caller's function returns, if it is all ranks' records one after the other; an exception is left set. */
static even_status gather_with_gil(const even_ext_gathering *context, const void *mine, size_t bytes, void *all) {
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

even_status even_ext_gather(void *context, const void *mine, size_t bytes, void *all) {
  PyGILState_STATE state = PyGILState_Ensure();
  even_status status = gather_with_gil(context, mine, bytes, all);
  PyGILState_Release(state);
  return status;
}

typedef even_status open_network_call(const even_comm_params *, const even_comm_network *, even_comm **);

static PyObject *open_network(PyObject *type, even_comm_params *params, even_comm_network *network,
                              PyObject *gather_call, PyObject *over, open_network_call *call) {
  even_ext_gathering context = {.call = gather_call, .ranks = params->ranks};
  even_comm *comm = NULL;
  even_ext_comm_patience patience;
  network->gather = gather_call == Py_None ? NULL : even_ext_gather;
  network->context = &context;
  even_ext_comm_ask_over(over, params);
  even_ext_ask_standing();
  even_status status = even_ext_comm_patience_read(&patience);
  Py_BEGIN_ALLOW_THREADS;
  status = status == EVEN_OK ? call(params, network, &comm) : status;
  Py_END_ALLOW_THREADS;
  network->context = NULL; /* it was of this call */
  if (status != EVEN_OK) {
    return PyErr_Occurred() != NULL ? NULL : even_ext_raise(status); /* the gathering's own exception is the cause */
  }
  even_ext_comm_prepare(comm, &patience);
  return wrap((PyTypeObject *)type, comm, params->arena_bytes, over);
}

PyObject *even_ext_comm_open_ucx(PyObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"gather",     "rank",   "ranks", "arena_bytes", "timeout_seconds", "spin", "library",
                             "interfaces", "number", "over",  NULL};
  even_comm_params params = {.size = sizeof params, .timeout_seconds = 1800.0, .spin = -1};
  even_comm_network network = {.size = sizeof network, .number = -1};
  PyObject *call = NULL;
  PyObject *over = NULL;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "Oii|O&dizziO&:open_ucx", keywords, &call, &params.rank,
                                   &params.ranks, even_ext_to_size, &params.arena_bytes, &params.timeout_seconds,
                                   &params.spin, &network.library, &network.interfaces, &network.number,
                                   even_ext_to_over, &over)) {
    return NULL;
  }
  if (call == Py_None) {
    PyErr_SetString(PyExc_TypeError, "open_ucx needs a gather function");
    return NULL;
  }
  return open_network(type, &params, &network, call, over, even_comm_open_ucx);
}

PyObject *even_ext_comm_open_mpi(PyObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"gather", "rank",    "ranks",  "arena_bytes", "timeout_seconds",
                             "spin",   "library", "number", NULL};
  even_comm_params params = {.size = sizeof params, .timeout_seconds = 1800.0, .spin = -1};
  even_comm_network network = {.size = sizeof network, .number = -1};
  PyObject *call = NULL;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "Oii|O&dizi:open_mpi", keywords, &call, &params.rank,
                                   &params.ranks, even_ext_to_size, &params.arena_bytes, &params.timeout_seconds,
                                   &params.spin, &network.library, &network.number)) {
    return NULL;
  }
  return open_network(type, &params, &network, call, NULL, even_comm_open_mpi);
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

/* The groups of a sequence of Comm objects or Nones; *lanes: with the one that is no part of it. */
static bool take_lanes(PyObject *type, PyObject *objects, even_comm **out, int *lanes) {
  Py_ssize_t count = objects == Py_None ? 0 : PySequence_Size(objects);
  if (count < 0 || count > EVEN_COMM_LANES - 1) {
    PyErr_Format(PyExc_ValueError, "lanes has at most %d groups", EVEN_COMM_LANES - 1);
    return false;
  }
  bool taken = true;
  for (Py_ssize_t i = 0; i < count && taken; i++) {
    PyObject *object = PySequence_GetItem(objects, i); /* the sequence keeps it */
    taken = object != NULL && take(type, object, &out[i]);
    Py_XDECREF(object);
  }
  *lanes = (int)count + 1;
  return taken;
}

static void give_up_lanes(PyObject *objects, int lanes) {
  for (Py_ssize_t i = 0; i + 1 < lanes; i++) {
    PyObject *object = PySequence_GetItem(objects, i);
    if (object != NULL) {
      give_up(object);
      Py_DECREF(object);
    }
  }
}

PyObject *even_ext_lane_rank(PyObject *module, PyObject *arguments) {
  int lane = 0;
  int lanes = 0;
  int ranks = 0;
  (void)module;
  return PyArg_ParseTuple(arguments, "iii:lane_rank", &lane, &lanes, &ranks)
             ? PyLong_FromLong(even_comm_lane_rank(lane, lanes, ranks))
             : NULL;
}

PyObject *even_ext_comm_open_hosts(PyObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"rank", "host_of", "inside", "between", "everyone", "timeout_seconds", "lanes", NULL};
  even_comm_hosts params = {.size = sizeof params};
  PyObject *host_of = NULL;
  PyObject *inside = NULL;
  PyObject *between = Py_None;
  PyObject *everyone = Py_None;
  PyObject *lanes = Py_None;
  even_comm *lane[EVEN_COMM_LANES] = {NULL};
  double timeout_seconds = 1800.0;
  even_comm *comm = NULL;
  params.lane = lane;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "iOO|OOdO:open_hosts", keywords, &params.rank, &host_of, &inside,
                                   &between, &everyone, &timeout_seconds, &lanes) ||
      !take(type, inside, &params.inside) || !take(type, between, &params.between) ||
      !take(type, everyone, &params.everyone) || !take_lanes(type, lanes, lane, &params.lanes)) {
    return NULL;
  }
  int *hosts = to_hosts(host_of, &params.ranks);
  if (hosts == NULL) {
    return NULL;
  }
  params.host_of = hosts;
  even_ext_comm_patience patience;
  even_status status = even_ext_comm_patience_read(&patience);
  Py_BEGIN_ALLOW_THREADS;
  status = status == EVEN_OK ? even_comm_open_hosts(&params, timeout_seconds, &comm) : status;
  Py_END_ALLOW_THREADS;
  even_free(hosts);
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  even_ext_comm_prepare(comm, &patience);
  give_up(inside);
  give_up(between);
  give_up(everyone);
  give_up_lanes(lanes, params.lanes);
  PyObject *parts = PyTuple_Pack(4, inside, between, everyone, lanes); /* whom they ask whether they are over */
  if (parts == NULL) {
    even_ext_comm_close_group(comm);
    return NULL;
  }
  PyObject *whole = wrap((PyTypeObject *)type, comm, even_comm_arena_bytes(comm), parts);
  Py_DECREF(parts);
  return whole;
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

PyObject *even_ext_mpi_version(PyObject *module, PyObject *arguments) {
  const char *library = NULL;
  char version[96];
  even_status status = EVEN_OK;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "|z:mpi_version", &library)) {
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS;
  status = even_comm_mpi_version(library, version, sizeof version);
  Py_END_ALLOW_THREADS;
  return status == EVEN_OK ? PyUnicode_DecodeUTF8(version, (Py_ssize_t)strlen(version), "replace")
                           : even_ext_raise(status);
}

PyObject *even_ext_mpi_place(PyObject *module, PyObject *arguments) {
  const char *library = NULL;
  int rank = 0;
  int ranks = 0;
  even_status status = EVEN_OK;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "|z:mpi_place", &library)) {
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS;
  status = even_comm_mpi_place(library, &rank, &ranks);
  Py_END_ALLOW_THREADS;
  return status == EVEN_OK ? Py_BuildValue("(ii)", rank, ranks) : even_ext_raise(status);
}
