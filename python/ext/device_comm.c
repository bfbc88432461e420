/* _core.DeviceComm: a rank's place in a group of GPUs, whose data NCCL moves. device_collectives.c has its collectives.
 */
#include "device_comm.h"
#include "objects.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "comm/nccl/grouped.h"

static PyObject *device_type; /* made once, with the module */

static even_status close_without_gil(even_device_comm *comm) {
  even_status status = EVEN_OK;
  Py_BEGIN_ALLOW_THREADS;
  status = even_device_comm_close(comm);
  Py_END_ALLOW_THREADS;
  return status;
}

static void free_when_unused(even_ext_device *self) {
  if (self->closed && self->calls == 0 && self->comm != NULL) {
    even_device_comm *comm = self->comm;
    self->comm = NULL;
    (void)close_without_gil(comm);
    Py_CLEAR(self->beside);
  }
}

/* Groups that a thread left open which has ended: they have ended with it. */
static void drop_left_groups(even_ext_device *self) {
  if (self->groups > 0 && !even_device_has_group(self->comm)) {
    self->calls -= self->groups;
    self->groups = 0;
  }
}

/* How many groups of calls this thread has open. */
static Py_ssize_t own_groups(const even_ext_device *self) {
  return self->groups > 0 && even_device_in_group(self->comm) ? self->groups : 0;
}

even_device_comm *even_ext_device_open(even_ext_device *self) {
  if (self->closed || self->comm == NULL) {
    (void)even_ext_raise(even_fail(EVEN_ERR_STATE, "the device communicator is closed"));
    return NULL;
  }
  return self->comm;
}

void even_ext_device_begin(even_ext_device *self) {
  self->calls++;
}

PyObject *even_ext_device_done(even_ext_device *self, even_status status) {
  PyObject *result = NULL;
  if (status == EVEN_OK) {
    result = Py_None;
    Py_INCREF(result);
  } else {
    (void)even_ext_raise(status);
  }
  self->calls--;
  free_when_unused(self);
  return result;
}

static int to_id(PyObject *object, void *out) {
  char *bytes = NULL;
  Py_ssize_t length = 0;
  if (PyBytes_AsStringAndSize(object, &bytes, &length) != 0) {
    return 0;
  }
  if (length != EVEN_DEVICE_COMM_ID_BYTES) {
    PyErr_Format(PyExc_ValueError, "an identity has %d bytes, not %zd", EVEN_DEVICE_COMM_ID_BYTES, length);
    return 0;
  }
  memcpy(((even_device_comm_id *)out)->bytes, bytes, EVEN_DEVICE_COMM_ID_BYTES);
  return 1;
}

static PyObject *wrapped(even_device_comm *comm) {
  even_ext_device *self = (even_ext_device *)even_ext_object_new((PyTypeObject *)device_type);
  if (self == NULL) {
    (void)close_without_gil(comm);
    return NULL;
  }
  self->comm = comm;
  return (PyObject *)self;
}

/* The parameters' part in which ranks come to know one another, of Python's. */
static even_status present_ranks(even_device_comm_params *params, even_ext_gathering *gathering, PyObject *numbers,
                                 int **names) {
  params->gather = gathering->call == Py_None ? NULL : even_ext_gather;
  params->context = gathering;
  *names = NULL;
  if (numbers == Py_None) {
    return EVEN_OK;
  }
  size_t *given = even_ext_to_counts(numbers, gathering->ranks);
  even_status status = given == NULL ? EVEN_ERR_ARGUMENT : EVEN_NEW_ARRAY(names, (size_t)gathering->ranks);
  for (int rank = 0; status == EVEN_OK && rank < gathering->ranks; rank++) {
    (*names)[rank] = given[rank] > INT_MAX ? INT_MAX : (int)given[rank];
  }
  even_free(given);
  params->numbers = *names;
  return status;
}

/* An exception of Python's own (of the gathering, of the numbers) is the cause. */
static PyObject *raised(even_status status) {
  return PyErr_Occurred() != NULL ? NULL : even_ext_raise(status);
}

static PyObject *open_or_join(PyObject *arguments, PyObject *names, bool joins) {
  static char *keywords[] = {
      "id",     "rank",    "ranks",       "device", "shares_device", "blocking", "timeout_seconds", "library",
      "gather", "numbers", "leave_abort", NULL};
  even_device_comm_params params = {.size = sizeof params, .timeout_seconds = 1800.0};
  even_device_comm_id id;
  int shares = 0;
  int blocks = 0;
  int leaves = 0;
  int *numbers_copy = NULL;
  PyObject *numbers = Py_None;
  even_ext_gathering gathering = {.call = Py_None};
  even_ext_comm_patience patience;
  even_device_comm *comm = NULL;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "O&iii|ppdzOOp:DeviceComm", keywords, to_id, &id, &params.rank,
                                   &params.ranks, &params.device, &shares, &blocks, &params.timeout_seconds,
                                   &params.library, &gathering.call, &numbers, &leaves)) {
    return NULL;
  }
  params.shares_device = shares != 0;
  params.blocking = blocks != 0;
  params.leave_abort = leaves != 0;
  gathering.ranks = params.ranks;
  even_status status = even_ext_comm_patience_read(&patience);
  if (status == EVEN_OK) {
    status = present_ranks(&params, &gathering, numbers, &numbers_copy);
  }
  if (status == EVEN_OK) {
    Py_BEGIN_ALLOW_THREADS;
    status = joins ? even_device_comm_join(&params, &id, &comm) : even_device_comm_open(&params, &id, &comm);
    Py_END_ALLOW_THREADS;
  }
  even_free(numbers_copy);
  if (status != EVEN_OK) {
    return raised(status);
  }
  even_device_comm_set_stop_grace(comm, patience.stop_seconds);
  even_device_comm_on_stall(comm, patience.stall_seconds, even_ext_tell_stall, NULL);
  return wrapped(comm);
}

static PyObject *device_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  (void)type;
  return open_or_join(arguments, names, false);
}

static PyObject *device_join(PyObject *module, PyObject *arguments, PyObject *names) {
  (void)module;
  return open_or_join(arguments, names, true);
}

static void device_dealloc(PyObject *object) {
  even_ext_device *self = (even_ext_device *)object;
  if (self->comm != NULL) { /* nobody waits for what is on its stream */
    Py_BEGIN_ALLOW_THREADS;
    even_device_forget(self->comm);
    Py_END_ALLOW_THREADS;
  }
  Py_CLEAR(self->beside);
  Py_CLEAR(self->ring);
  even_ext_object_free(object);
}

static PyObject *device_make_id(PyObject *module, PyObject *arguments) {
  const char *library = NULL;
  even_device_comm_id id;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "|z:make_id", &library)) {
    return NULL;
  }
  even_status status = even_device_comm_make_id(library, &id);
  return status == EVEN_OK ? PyBytes_FromStringAndSize((const char *)id.bytes, sizeof id.bytes)
                           : even_ext_raise(status);
}

static PyObject *device_version(PyObject *module, PyObject *arguments) {
  const char *library = NULL;
  int version = 0;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "|z:version", &library)) {
    return NULL;
  }
  even_status status = even_device_comm_library(library, &version);
  return status == EVEN_OK ? PyLong_FromLong(version) : even_ext_raise(status);
}

/* A call without arguments. */
static PyObject *run_plainly(PyObject *object, even_status (*call)(even_device_comm *comm)) {
  even_ext_device *self = (even_ext_device *)object;
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL) {
    return NULL;
  }
  EVEN_EXT_DEVICE_RUN(self, call(comm));
}

/* NCCL's groups belong to the thread, and so does the group's lock: no other thread may come between, and a close of
 * another's leaves the communicator to the group's end. */
static PyObject *device_group_begin(PyObject *object, PyObject *unused) {
  even_ext_device *self = (even_ext_device *)object;
  even_device_comm *comm = even_ext_device_open(self);
  even_status status = EVEN_OK;
  (void)unused;
  if (comm == NULL) {
    return NULL;
  }
  even_ext_device_begin(self);
  Py_BEGIN_ALLOW_THREADS;
  status = even_device_comm_group_begin(comm);
  Py_END_ALLOW_THREADS;
  if (status == EVEN_OK) {
    self->calls++;
    self->groups++;
  }
  return even_ext_device_done(self, status);
}

/* Also of one that has been closed meanwhile. */
static PyObject *device_group_end(PyObject *object, PyObject *unused) {
  even_ext_device *self = (even_ext_device *)object;
  bool own = own_groups(self) > 0;
  even_device_comm *comm = own ? self->comm : even_ext_device_open(self);
  even_status status = EVEN_OK;
  (void)unused;
  if (comm == NULL) {
    return NULL;
  }
  even_ext_device_begin(self);
  if (own) { /* before it is: a group that is counted and not open is one that a thread has left */
    self->calls--;
    self->groups--;
  }
  Py_BEGIN_ALLOW_THREADS;
  status = even_device_comm_group_end(comm);
  Py_END_ALLOW_THREADS;
  return even_ext_device_done(self, status);
}

/* ---- lives ---- */

static PyObject *device_poll(PyObject *object, PyObject *unused) {
  (void)unused;
  return run_plainly(object, even_device_comm_poll);
}

static even_status abort_it(even_device_comm *comm) {
  even_device_comm_abort(comm);
  return EVEN_OK;
}

static PyObject *device_abort(PyObject *object, PyObject *unused) {
  (void)unused;
  return run_plainly(object, abort_it);
}

static PyObject *device_set_timeout(PyObject *object, PyObject *arguments) {
  double seconds = 0;
  even_device_comm *comm = even_ext_device_open((even_ext_device *)object);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "d:set_timeout", &seconds)) {
    return NULL;
  }
  even_device_comm_set_timeout(comm, seconds);
  Py_RETURN_NONE;
}

static PyObject *device_set_call_timeout(PyObject *object, PyObject *arguments) {
  double seconds = 0;
  even_device_comm *comm = even_ext_device_open((even_ext_device *)object);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "d:set_call_timeout", &seconds)) {
    return NULL;
  }
  even_device_comm_set_call_timeout(comm, seconds);
  Py_RETURN_NONE;
}

static PyObject *device_close(PyObject *object, PyObject *unused) {
  even_ext_device *self = (even_ext_device *)object;
  (void)unused;
  if (self->closed) {
    Py_RETURN_NONE;
  }
  even_device_comm *comm = self->comm;
  drop_left_groups(self);
  self->closed = 1;
  if (self->calls > own_groups(self)) {
    self->calls++;
    Py_BEGIN_ALLOW_THREADS;
    even_device_comm_abort(comm); /* the call comes back, and the last one out closes */
    Py_END_ALLOW_THREADS;
    self->calls--;
    free_when_unused(self);
    Py_RETURN_NONE;
  }
  self->comm = NULL;
  self->calls = self->groups = 0; /* this thread's own groups end with it */
  even_status status = close_without_gil(comm);
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
  }
  Py_CLEAR(self->beside);
  if (status != EVEN_OK) {
    return NULL;
  }
  Py_RETURN_NONE;
}

/* ---- what ranks know of one another ---- */

static PyObject *device_meet(PyObject *object, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"gather", "numbers", NULL};
  even_ext_device *self = (even_ext_device *)object;
  even_device_comm_params params = {.size = sizeof params};
  PyObject *numbers = Py_None;
  even_ext_gathering gathering = {0};
  int *copy = NULL;
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL || !PyArg_ParseTupleAndKeywords(arguments, names, "O|O:meet", keywords, &gathering.call, &numbers)) {
    return NULL;
  }
  gathering.ranks = even_device_comm_ranks(comm);
  even_status status = present_ranks(&params, &gathering, numbers, &copy);
  self->calls++;
  if (status == EVEN_OK) {
    Py_BEGIN_ALLOW_THREADS;
    status = even_device_comm_meet(comm, &params);
    Py_END_ALLOW_THREADS;
  }
  self->calls--;
  even_free(copy);
  PyObject *result = Py_None;
  Py_INCREF(result);
  if (status != EVEN_OK) {
    Py_CLEAR(result);
    (void)raised(status);
  }
  free_when_unused(self);
  return result;
}

static PyObject *device_go_beside(PyObject *object, PyObject *group) {
  even_ext_device *self = (even_ext_device *)object;
  even_device_comm *comm = even_ext_device_open(self);
  PyObject *handle = comm == NULL || group == Py_None ? NULL : PyObject_GetAttrString(group, "handle");
  even_comm *beside = handle == NULL ? NULL : PyCapsule_GetPointer(handle, "evenstep.comm");
  if (comm == NULL || PyErr_Occurred() != NULL) {
    Py_XDECREF(handle);
    return NULL;
  }
  self->calls++; /* another thread may close it meanwhile */
  Py_BEGIN_ALLOW_THREADS;
  even_device_comm_go_beside(comm, beside);
  Py_END_ALLOW_THREADS;
  self->calls--;
  PyObject *before = self->beside;
  self->beside = handle;
  Py_XDECREF(before);
  free_when_unused(self);
  Py_RETURN_NONE;
}

static PyObject *device_set_site(PyObject *object, PyObject *arguments) {
  const char *text = NULL;
  even_device_comm *comm = even_ext_device_open((even_ext_device *)object);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "z:set_site", &text)) {
    return NULL;
  }
  even_device_comm_set_site(comm, text);
  Py_RETURN_NONE;
}

static PyObject *device_flight(PyObject *object, PyObject *arguments) {
  even_flight_call calls[EVEN_FLIGHT_CALLS];
  int rank = 0;
  even_device_comm *comm = even_ext_device_open((even_ext_device *)object);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "i:flight", &rank)) {
    return NULL;
  }
  return even_ext_flight_list(calls, even_device_comm_flight(comm, rank, calls, EVEN_FLIGHT_CALLS));
}

static PyObject *device_record(PyObject *object, PyObject *arguments) {
  even_ext_device *self = (even_ext_device *)object;
  PyObject *ring = NULL;
  const char *name = NULL;
  even_telemetry *telemetry = NULL;
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "Os:record", &ring, &name)) {
    return NULL;
  }
  PyObject *handle = even_ext_ring_handle(ring, &telemetry);
  even_status status = PyErr_Occurred() != NULL ? EVEN_OK : even_device_comm_record(comm, telemetry, name);
  if (PyErr_Occurred() != NULL || status != EVEN_OK) {
    Py_XDECREF(handle);
    return status == EVEN_OK ? NULL : even_ext_raise(status);
  }
  PyObject *before = self->ring;
  self->ring = handle;
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

static PyObject *device_shrink(PyObject *object, PyObject *arguments) {
  even_ext_device *self = (even_ext_device *)object;
  PyObject *sequence = NULL;
  int aborts = 0;
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "O|p:shrink", &sequence, &aborts)) {
    return NULL;
  }
  Py_ssize_t count = PySequence_Size(sequence);
  size_t *given = count < 0 ? NULL : even_ext_to_counts(sequence, (int)count);
  int *excluded = NULL;
  if (given == NULL) {
    return NULL;
  }
  even_status status = EVEN_NEW_ARRAY(&excluded, (size_t)count);
  for (Py_ssize_t i = 0; status == EVEN_OK && i < count; i++) {
    excluded[i] = given[i] > INT_MAX ? INT_MAX : (int)given[i];
  }
  even_free(given);
  even_device_comm *rest = NULL;
  if (status == EVEN_OK) {
    self->calls++;
    Py_BEGIN_ALLOW_THREADS;
    status = even_device_comm_shrink(comm, excluded, (int)count, aborts != 0, &rest);
    Py_END_ALLOW_THREADS;
    self->calls--;
  }
  even_free(excluded);
  PyObject *result = status == EVEN_OK ? wrapped(rest) : even_ext_raise(status);
  free_when_unused(self);
  return result;
}

static PyObject *device_grow_id(PyObject *object, PyObject *unused) {
  even_device_comm_id id;
  even_device_comm *comm = even_ext_device_open((even_ext_device *)object);
  (void)unused;
  if (comm == NULL) {
    return NULL;
  }
  even_status status = even_device_comm_grow_id(comm, &id);
  return status == EVEN_OK ? PyBytes_FromStringAndSize((const char *)id.bytes, sizeof id.bytes)
                           : even_ext_raise(status);
}

static PyObject *device_grow(PyObject *object, PyObject *arguments) {
  even_ext_device *self = (even_ext_device *)object;
  PyObject *given = Py_None;
  int ranks = 0;
  even_device_comm_id id;
  even_device_comm *all = NULL;
  even_device_comm *comm = even_ext_device_open(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "i|O:grow", &ranks, &given) ||
      (given != Py_None && !to_id(given, &id))) {
    return NULL;
  }
  even_status status = EVEN_OK;
  self->calls++;
  Py_BEGIN_ALLOW_THREADS;
  status = even_device_comm_grow(comm, ranks, given == Py_None ? NULL : &id, &all);
  Py_END_ALLOW_THREADS;
  self->calls--;
  PyObject *result = status == EVEN_OK ? wrapped(all) : even_ext_raise(status);
  free_when_unused(self);
  return result;
}

static PyObject *device_rank(PyObject *object, void *closure) {
  even_device_comm *comm = even_ext_device_open((even_ext_device *)object);
  (void)closure;
  return comm == NULL ? NULL : PyLong_FromLong(even_device_comm_rank(comm));
}
static PyObject *device_ranks(PyObject *object, void *closure) {
  even_device_comm *comm = even_ext_device_open((even_ext_device *)object);
  (void)closure;
  return comm == NULL ? NULL : PyLong_FromLong(even_device_comm_ranks(comm));
}
static PyObject *device_ended(PyObject *object, void *closure) {
  even_ext_device *self = (even_ext_device *)object;
  (void)closure;
  return PyBool_FromLong(self->comm != NULL && even_device_comm_has_ended(self->comm));
}
static PyObject *device_closed(PyObject *object, void *closure) {
  (void)closure;
  return PyBool_FromLong(((even_ext_device *)object)->closed);
}

#define WITH_NAMES(function) (PyCFunction)(void (*)(void))(function)

static PyMethodDef device_methods[] = {
    {"version", device_version, METH_VARARGS | METH_STATIC,
     "version(library=None) -> int: NCCL's version (22703 is 2.27.3); EvenstepError where it or the driver is absent"},
    {"make_id", device_make_id, METH_VARARGS | METH_STATIC, "make_id(library=None) -> bytes: a new group's identity"},
    {"join", WITH_NAMES(device_join), METH_VARARGS | METH_KEYWORDS | METH_STATIC,
     "join(...) -> DeviceComm: as a new rank of a group that grows; arguments as DeviceComm's"},
    {"all_reduce", even_ext_device_all_reduce, METH_VARARGS,
     "all_reduce(input, output, count, dtype, op, factor, stream)"},
    {"reduce", even_ext_device_reduce, METH_VARARGS, "reduce(input, output, count, dtype, op, factor, root, stream)"},
    {"reduce_scatter", even_ext_device_reduce_scatter, METH_VARARGS,
     "reduce_scatter(input, output, counts, dtype, op, factor, stream)"},
    {"all_gather", even_ext_device_all_gather, METH_VARARGS, "all_gather(input, output, bytes, stream)"},
    {"broadcast", even_ext_device_broadcast, METH_VARARGS, "broadcast(data, bytes, root, stream)"},
    {"all_to_all", even_ext_device_all_to_all, METH_VARARGS,
     "all_to_all(inputs, input_bytes, outputs, output_bytes, stream): addresses and bytes for, and from, each rank"},
    {"send", even_ext_device_send, METH_VARARGS, "send(data, bytes, peer, stream)"},
    {"receive", even_ext_device_receive, METH_VARARGS, "receive(data, bytes, peer, stream)"},
    {"barrier", even_ext_device_barrier, METH_VARARGS,
     "barrier(stream): the stream goes on when all ranks' have come here"},
    {"group_begin", device_group_begin, METH_NOARGS, "Calls up to group_end, of this thread, are one operation."},
    {"group_end", device_group_end, METH_NOARGS, "Ends what group_begin began."},
    {"poll", device_poll, METH_NOARGS, "Raises what has failed on the GPU or the network since."},
    {"abort", device_abort, METH_NOARGS, "Ends what this rank has on the streams, and every call under way."},
    {"set_timeout", device_set_timeout, METH_VARARGS, "set_timeout(seconds): of what is under way and of later calls"},
    {"set_call_timeout", device_set_call_timeout, METH_VARARGS,
     "set_call_timeout(seconds): of later calls alone, in its place; 0: none of their own"},
    {"meet", WITH_NAMES(device_meet), METH_VARARGS | METH_KEYWORDS,
     "meet(gather, numbers=None): presents the ranks of a communicator made by shrink, grow or join to one another"},
    {"go_beside", device_go_beside, METH_O,
     "go_beside(comm): a Comm of the same ranks, over which those of other hosts hear why this one ends; None: none"},
    {"set_site", device_set_site, METH_VARARGS,
     "set_site(text): where the calls that follow are made; None: not known"},
    {"flight", device_flight, METH_VARARGS,
     "flight(rank): its last collectives, oldest first: (number, call, site, state, began_ns, ended_ns)"},
    {"record", device_record, METH_VARARGS,
     "record(telemetry, name): counts the calls that follow there, and writes a record of each where they are wanted"},
    {"shrink", device_shrink, METH_VARARGS, "shrink(excluded, abort=False) -> DeviceComm of the other ranks"},
    {"grow_id", device_grow_id, METH_NOARGS, "grow_id() -> bytes for the ranks that will join"},
    {"grow", device_grow, METH_VARARGS, "grow(ranks, id=None) -> DeviceComm; id on the rank that made it"},
    {"close", device_close, METH_NOARGS, "Lets what is on the streams end, and frees the communicator."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef device_attributes[] = {
    {"rank", device_rank, NULL, "this rank's number", NULL},
    {"ranks", device_ranks, NULL, "how many ranks the group has", NULL},
    {"ended", device_ended, NULL, "whether it has ended, for whatever reason: poll() says why", NULL},
    {"closed", device_closed, NULL, "whether close() was called", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot device_slots[] = {
    {Py_tp_new, (void *)device_new},
    {Py_tp_dealloc, (void *)device_dealloc},
    {Py_tp_methods, device_methods},
    {Py_tp_getset, device_attributes},
    {Py_tp_doc,
     "DeviceComm(id, rank, ranks, device, shares_device=False, blocking=False, timeout_seconds=1800.0, "
     "library=None, gather=None, numbers=None, leave_abort=False)\n\nA rank's place in a group of GPUs. Opening it "
     "returns when all ranks have come."},
    {0, NULL}};

static PyType_Spec device_spec = {.name = "evenstep._core.DeviceComm",
                                  .basicsize = sizeof(even_ext_device),
                                  .flags = Py_TPFLAGS_DEFAULT,
                                  .slots = device_slots};

int even_ext_add_device_comm(PyObject *module) {
  device_type = even_ext_add_type(module, "DeviceComm", &device_spec);
  Py_XINCREF(device_type); /* one for this file */
  return device_type == NULL ? -1 : 0;
}
