/* _core.Comm: a rank's place in a group. collectives.c has its collectives, messages.c its messages, comm_call.c what
 * is done around each. */
#include "comm.h"
#include "objects.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "comm/called.h"
#include "comm/waits.h"
#include "os/shared_memory.h"

#include <evenstep/telemetry.h>
#include <stdio.h>

void even_ext_comm_close_group(even_comm *comm) {
  Py_BEGIN_ALLOW_THREADS;
  even_comm_close(comm);
  Py_END_ALLOW_THREADS;
}

/* The group's memory may go only when nobody can look at it: no call, no message, no capsule, no view of the arena. */
void even_ext_comm_free_when_unused(even_ext_comm *self) {
  if (self->closed && self->calls == 0 && self->messages == 0 && self->handles == 0 && self->view == NULL &&
      self->comm != NULL) {
    even_comm *comm = self->comm;
    self->comm = NULL; /* first: another thread may come here meanwhile */
    even_ext_comm_close_group(comm);
  }
}

int even_ext_to_over(PyObject *object, void *out) {
  if (object != Py_None && !PyCapsule_IsValid(object, EVEN_EXT_OVER)) {
    PyErr_SetString(PyExc_TypeError, "over is what Generation.over gives");
    return 0;
  }
  PyObject **target = out;
  *target = object == Py_None ? NULL : object;
  return 1;
}

void even_ext_comm_ask_over(PyObject *over, even_comm_params *params) {
  if (over != NULL) {
    const even_ext_over *asked = PyCapsule_GetPointer(over, EVEN_EXT_OVER);
    params->over = asked->call;
    params->over_context = asked->context;
  }
}

static PyObject *comm_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"fd", "rank", "ranks", "arena_bytes", "timeout_seconds", "spin", "over", NULL};
  even_comm_params params = {.size = sizeof params, .timeout_seconds = 1800.0, .spin = -1};
  int fd = -1;
  Py_ssize_t arena_bytes = 0;
  PyObject *over = NULL;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "iii|ndiO&:Comm", keywords, &fd, &params.rank, &params.ranks,
                                   &arena_bytes, &params.timeout_seconds, &params.spin, even_ext_to_over, &over)) {
    return NULL;
  }
  if (arena_bytes < 0) {
    return PyErr_Format(PyExc_ValueError, "arena_bytes is %zd; it cannot be negative", arena_bytes);
  }
  even_ext_comm *self = (even_ext_comm *)even_ext_object_new(type);
  if (self == NULL) {
    return NULL;
  }
  even_ext_comm_patience patience;
  params.arena_bytes = self->arena_bytes = (size_t)arena_bytes;
  even_ext_comm_ask_over(over, &params);
  Py_XINCREF(over);
  self->over = over;
  even_status status = even_ext_comm_patience_read(&patience);
  Py_BEGIN_ALLOW_THREADS;
  status = status == EVEN_OK ? even_comm_open(&params, fd, &self->comm) : status;
  Py_END_ALLOW_THREADS;
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
    Py_DECREF((PyObject *)self);
    return NULL;
  }
  even_ext_comm_prepare(self->comm, &patience);
  return (PyObject *)self;
}

static void comm_dealloc(PyObject *object) {
  even_ext_comm *self = (even_ext_comm *)object;
  even_ext_comm_close_group(self->comm);
  Py_CLEAR(self->over);
  Py_CLEAR(self->view);
  Py_CLEAR(self->ring);
  even_ext_object_free(object);
}

/* The group, or NULL with an exception when it is closed. */
even_comm *even_ext_comm_open_group(even_ext_comm *self) {
  if (self->closed) {
    (void)even_ext_raise(even_fail(EVEN_ERR_STATE, "the group is closed"));
    return NULL;
  }
  return self->comm;
}

static PyObject *comm_revoke(PyObject *object, PyObject *unused) {
  even_ext_comm *self = (even_ext_comm *)object;
  even_comm *comm = even_ext_comm_open_group(self);
  (void)unused;
  if (comm == NULL) {
    return NULL;
  }
  self->calls++; /* another thread may close it meanwhile */
  Py_BEGIN_ALLOW_THREADS;
  even_comm_revoke(comm);
  Py_END_ALLOW_THREADS;
  self->calls--;
  even_ext_comm_free_when_unused(self);
  Py_RETURN_NONE;
}

static PyObject *comm_set_timeout(PyObject *object, PyObject *arguments) {
  double seconds = 0;
  even_comm *comm = even_ext_comm_open_group((even_ext_comm *)object);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "d:set_timeout", &seconds)) {
    return NULL;
  }
  even_comm_set_timeout(comm, seconds);
  Py_RETURN_NONE;
}

static PyObject *comm_set_site(PyObject *object, PyObject *arguments) {
  const char *text = NULL;
  even_comm *comm = even_ext_comm_open_group((even_ext_comm *)object);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "z:set_site", &text)) {
    return NULL;
  }
  even_comm_set_site(comm, text);
  Py_RETURN_NONE;
}

PyObject *even_ext_ring_handle(PyObject *ring, even_telemetry **out) {
  PyObject *handle = PyObject_GetAttrString(ring, "handle");
  *out = handle == NULL || handle == Py_None ? NULL : PyCapsule_GetPointer(handle, "evenstep.telemetry");
  return handle;
}

static PyObject *comm_rest(PyObject *module, PyObject *rests) {
  (void)module;
  if (PyObject_IsTrue(rests) == 1) {
    even_waits_rest(NULL, 0);
  } else {
    even_waits_go_on();
  }
  Py_RETURN_NONE;
}

static PyObject *comm_waits_in_backward(PyObject *module, PyObject *frame) {
  (void)module;
  even_ext_wait_in_backward(frame);
  Py_RETURN_NONE;
}

static PyObject *comm_backward_over(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  even_ext_end_wait_in_backward();
  Py_RETURN_NONE;
}

static PyObject *comm_others_may_call(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  even_ext_get_ready_to_ask();
  even_ext_comes_from_python(true);
  bool may = even_ext_others_may_call(NULL) != EVEN_WAITS_OTHERS_NONE;
  even_ext_comes_from_python(false);
  return PyBool_FromLong(may);
}

static PyObject *comm_record(PyObject *object, PyObject *arguments) {
  even_ext_comm *self = (even_ext_comm *)object;
  PyObject *ring = NULL;
  const char *name = NULL;
  even_telemetry *telemetry = NULL;
  even_comm *comm = even_ext_comm_open_group(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "Os:record", &ring, &name)) {
    return NULL;
  }
  PyObject *handle = even_ext_ring_handle(ring, &telemetry);
  even_status status = PyErr_Occurred() != NULL ? EVEN_OK : even_comm_record(comm, telemetry, name);
  if (PyErr_Occurred() != NULL || status != EVEN_OK) {
    Py_XDECREF(handle);
    return status == EVEN_OK ? NULL : even_ext_raise(status);
  }
  Py_XDECREF(self->ring);
  self->ring = handle;
  Py_RETURN_NONE;
}

/* (number, call, site, state, began_ns, ended_ns) */
static PyObject *call_of_flight(const even_flight_call *call) {
  static const char *const states[] = {"", "begun", "done", "failed"};
  const char *state = (unsigned)call->state < sizeof states / sizeof states[0] ? states[call->state] : "";
  PyObject *site = PyUnicode_DecodeUTF8(call->site, (Py_ssize_t)strlen(call->site), "replace");
  if (site == NULL) {
    return NULL;
  }
  return Py_BuildValue("KsNsKK", (unsigned long long)call->number, call->call, site, state,
                       (unsigned long long)call->began_ns, (unsigned long long)call->ended_ns);
}

PyObject *even_ext_flight_list(const even_flight_call *calls, size_t count) {
  PyObject *list = PyList_New((Py_ssize_t)count);
  for (size_t i = 0; list != NULL && i < count; i++) {
    PyObject *entry = call_of_flight(&calls[i]);
    if (entry == NULL || PyList_SetItem(list, (Py_ssize_t)i, entry) != 0) {
      Py_CLEAR(list);
    }
  }
  return list;
}

static PyObject *comm_flight(PyObject *object, PyObject *arguments) {
  even_flight_call calls[EVEN_FLIGHT_CALLS];
  int rank = 0;
  even_comm *comm = even_ext_comm_open_group((even_ext_comm *)object);
  if (comm == NULL || !PyArg_ParseTuple(arguments, "i:flight", &rank)) {
    return NULL;
  }
  return even_ext_flight_list(calls, even_comm_flight(comm, rank, calls, EVEN_FLIGHT_CALLS));
}

static PyObject *comm_close(PyObject *object, PyObject *unused) {
  even_ext_comm *self = (even_ext_comm *)object;
  (void)unused;
  if (!self->closed) {
    even_comm *comm = self->comm;
    bool revokes = self->calls > 0;
    self->closed = 1;
    self->calls++; /* its memory stays until it has left */
    Py_BEGIN_ALLOW_THREADS;
    if (revokes) {
      even_comm_revoke(comm);
    }
    even_comm_leave(comm);
    Py_END_ALLOW_THREADS;
    self->calls--;
    even_ext_comm_free_when_unused(self);
  }
  Py_RETURN_NONE;
}

/* ---- the arena: a view that keeps the group's memory as long as it lives ---- */

static PyObject *view_died(PyObject *object, PyObject *reference) {
  even_ext_comm *self = (even_ext_comm *)object;
  (void)reference;
  Py_CLEAR(self->view);
  even_ext_comm_free_when_unused(self);
  Py_RETURN_NONE;
}
static PyMethodDef view_died_method = {"view_died", view_died, METH_O, NULL};

static PyObject *comm_arena(PyObject *object, PyObject *unused) {
  even_ext_comm *self = (even_ext_comm *)object;
  even_comm *comm = even_ext_comm_open_group(self);
  (void)unused;
  if (comm == NULL) {
    return NULL;
  }
  if (self->view != NULL) {
    PyObject *alive = PyWeakref_GetObject(self->view); /* borrowed */
    if (alive != NULL && alive != Py_None) {
      Py_INCREF(alive);
      return alive;
    }
  }
  static char nothing[1];
  char *memory = even_comm_arena(comm);
  PyObject *view =
      PyMemoryView_FromMemory(memory == NULL ? nothing : memory, (Py_ssize_t)self->arena_bytes, PyBUF_WRITE);
  PyObject *callback = view == NULL ? NULL : PyCFunction_NewEx(&view_died_method, object, NULL);
  PyObject *reference = callback == NULL ? NULL : PyWeakref_NewRef(view, callback);
  Py_XDECREF(callback);
  if (reference == NULL) {
    Py_XDECREF(view);
    return NULL;
  }
  Py_XDECREF(self->view);
  self->view = reference;
  return view;
}

/* ---- the handle for other parts of the extension ---- */

static void handle_died(PyObject *capsule) {
  even_ext_comm *self = PyCapsule_GetContext(capsule);
  if (self != NULL) {
    self->handles--;
    even_ext_comm_free_when_unused(self);
    Py_DECREF((PyObject *)self);
  }
}

static PyObject *comm_handle(PyObject *object, void *closure) {
  even_ext_comm *self = (even_ext_comm *)object;
  even_comm *comm = even_ext_comm_open_group(self);
  (void)closure;
  if (comm == NULL) {
    return NULL;
  }
  PyObject *capsule = PyCapsule_New(comm, "evenstep.comm", handle_died);
  if (capsule == NULL || PyCapsule_SetContext(capsule, self) != 0) {
    Py_XDECREF(capsule);
    return NULL;
  }
  Py_INCREF(object);
  self->handles++;
  return capsule;
}

static PyObject *comm_rank(PyObject *object, void *closure) {
  even_comm *comm = even_ext_comm_open_group((even_ext_comm *)object);
  (void)closure;
  return comm == NULL ? NULL : PyLong_FromLong(even_comm_rank(comm));
}
static PyObject *comm_ranks(PyObject *object, void *closure) {
  even_comm *comm = even_ext_comm_open_group((even_ext_comm *)object);
  (void)closure;
  return comm == NULL ? NULL : PyLong_FromLong(even_comm_ranks(comm));
}
static PyObject *comm_wait_ns(PyObject *object, void *closure) {
  even_comm *comm = even_ext_comm_open_group((even_ext_comm *)object);
  (void)closure;
  return comm == NULL ? NULL : PyLong_FromUnsignedLongLong(even_comm_wait_ns(comm));
}
static PyObject *comm_description(PyObject *object, void *closure) {
  even_comm *comm = even_ext_comm_open_group((even_ext_comm *)object);
  char text[4096];
  (void)closure;
  if (comm == NULL) {
    return NULL;
  }
  even_comm_describe(comm, text, sizeof text);
  return PyUnicode_FromString(text);
}
static PyObject *comm_engine(PyObject *object, void *closure) {
  even_comm *comm = even_ext_comm_open_group((even_ext_comm *)object);
  (void)closure;
  return comm == NULL ? NULL : PyUnicode_FromString(even_comm_engine_name(comm));
}
static PyObject *comm_sends(PyObject *object, void *closure) {
  even_comm *comm = even_ext_comm_open_group((even_ext_comm *)object);
  (void)closure;
  return comm == NULL ? NULL : PyBool_FromLong(even_comm_has_messages(comm));
}
static PyObject *comm_closed(PyObject *object, void *closure) {
  (void)closure;
  return PyBool_FromLong(((even_ext_comm *)object)->closed);
}

/* A sequence of `ranks` process numbers. */
static long *to_processes(PyObject *object, int ranks) {
  size_t *numbers = even_ext_to_counts(object, ranks);
  long *processes = NULL;
  even_status status = numbers == NULL ? EVEN_OK : EVEN_NEW_ARRAY(&processes, (size_t)ranks);
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
  }
  for (int rank = 0; processes != NULL && rank < ranks; rank++) {
    processes[rank] = (long)numbers[rank];
  }
  even_free(numbers);
  return processes;
}

/* Says where the memory lies that could not be had from the kernel by itself; 0, or -1 where warnings are errors. */
static int warn_of_file(int fd, const even_comm_params *params) {
  char folder[64];
  char megabytes[32];
  even_comm_layout layout;
  if (!even_shared_memory_is_file(fd, folder, sizeof folder) || even_comm_layout_of(params, &layout) != EVEN_OK) {
    return 0;
  }
  (void)snprintf(megabytes, sizeof megabytes, "%.1f", (double)layout.total * 1e-6);
  return PyErr_WarnFormat(
      PyExc_RuntimeWarning, 1,
      "the memory that the ranks share, %s MB, is a file in %s, for the kernel gives no memfd: all of it is "
      "taken at once, and where that is on a disk it is written there, which costs time. fix: allow "
      "memfd_create in the container's seccomp profile",
      megabytes, folder);
}

static PyObject *comm_create_segment(PyObject *object, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"ranks", "arena_bytes", "processes", NULL};
  even_comm_params params = {.size = sizeof params};
  PyObject *given = NULL;
  long *processes = NULL;
  int fd = -1;
  (void)object;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "i|O&O:create_segment", keywords, &params.ranks, even_ext_to_size,
                                   &params.arena_bytes, &given)) {
    return NULL;
  }
  if (given != NULL && given != Py_None && (processes = to_processes(given, params.ranks)) == NULL) {
    return NULL;
  }
  even_status status = even_comm_create_segment_for(&params, processes, &fd);
  even_free(processes);
  if (status == EVEN_OK && warn_of_file(fd, &params) != 0) {
    even_shared_memory_close(&(even_shared_memory){.fd = fd});
    return NULL;
  }
  return status != EVEN_OK ? even_ext_raise(status) : PyLong_FromLong(fd);
}

static PyObject *open_peer_fd(PyObject *module, PyObject *arguments) {
  int process = 0;
  int fd = -1;
  even_shared_memory memory;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "ii:open_peer_fd", &process, &fd)) {
    return NULL;
  }
  even_status status = even_shared_memory_open_peer(process, fd, &memory);
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  int own = memory.fd;
  memory.fd = -1; /* the caller's from here on */
  even_shared_memory_close(&memory);
  return PyLong_FromLong(own);
}

static PyObject *comm_simd(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  return PyUnicode_FromString(even_comm_simd());
}

static PyMethodDef comm_methods[] = {
    {"create_segment", (PyCFunction)(void (*)(void))comm_create_segment, METH_VARARGS | METH_KEYWORDS | METH_STATIC,
     "create_segment(ranks, arena_bytes=0, processes=None) -> fd of a new group's memory, owned by the caller"},
    {"open_ucx", (PyCFunction)(void (*)(void))even_ext_comm_open_ucx, METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "open_ucx(gather, rank, ranks, ...) -> Comm over UCX; gather(record) returns all ranks' records, joined"},
    {"open_mpi", (PyCFunction)(void (*)(void))even_ext_comm_open_mpi, METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "open_mpi(gather, rank, ranks, ...) -> Comm over MPI; gather as in open_ucx, None: all of the MPI job, through "
     "MPI"},
    {"open_hosts", (PyCFunction)(void (*)(void))even_ext_comm_open_hosts, METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "open_hosts(rank, host_of, inside, between=None, everyone=None, timeout_seconds=1800.0, lanes=None) -> Comm made "
     "of those, which are closed from then on; lanes: further groups between the hosts, None where others carry them"},
    {"all_reduce", even_ext_comm_all_reduce, METH_VARARGS,
     "all_reduce(address, count, dtype, op): in place, on all ranks"},
    {"all_reduce_data", even_ext_comm_all_reduce_data, METH_VARARGS,
     "all_reduce_data(array, op): in place, on all ranks; any array or tensor whose memory can be seen"},
    {"reduce_scatter", even_ext_comm_reduce_scatter, METH_VARARGS,
     "reduce_scatter(input, output, counts, dtype, op, root=-1): counts[r] elements for rank r; root: its reduce"},
    {"all_gather", even_ext_comm_all_gather, METH_VARARGS,
     "all_gather(input, output, counts, dtype, elements=0): counts[r] elements from rank r"},
    {"norm_statistics", even_ext_comm_norm_statistics, METH_VARARGS,
     "norm_statistics(mark, place, count, mean, variance, dtype, channels, out, narrow): even_norm_statistics; 2 * "
     "channels of float64 at out, and of float32 at narrow (0: none); each rank's count, None where marks differ"},
    {"norm_sums", even_ext_comm_norm_sums, METH_VARARGS,
     "norm_sums(mark, place, weight, gradient, product, dtype, channels, out): even_norm_sums; each rank's weight, "
     "None "
     "where marks differ"},
    {"all_to_all", even_ext_comm_all_to_all, METH_VARARGS,
     "all_to_all(inputs, input_bytes, outputs, output_bytes, elements=0, call=0, root=0): addresses and bytes for, and "
     "from, each rank; call: a CALL_GATHER or CALL_SCATTER with that root"},
    {"broadcast", even_ext_comm_broadcast, METH_VARARGS,
     "broadcast(address, bytes, root, elements=0); elements, in all of these: a dtype's number and 1, or a number from "
     "ELEMENTS_OTHER on, the same on all ranks"},
    {"send", even_ext_comm_send, METH_VARARGS, "send(address, bytes, rank, tag, elements=0) -> Request"},
    {"receive", even_ext_comm_receive, METH_VARARGS,
     "receive(address, bytes, rank, tag, elements=0) -> Request; rank -1: from any"},
    {"barrier", even_ext_comm_barrier, METH_NOARGS, "Returns when all ranks have come."},
    {"revoke", comm_revoke, METH_NOARGS, "Ends every blocked and future call of the group, on all ranks."},
    {"set_timeout", comm_set_timeout, METH_VARARGS, "set_timeout(seconds): the limit of this rank's later calls"},
    {"set_site", comm_set_site, METH_VARARGS, "set_site(text): where the calls that follow are made; None: not known"},
    {"record", comm_record, METH_VARARGS,
     "record(telemetry, name): counts the calls that follow there, and writes a record of each where they are wanted"},
    {"flight", comm_flight, METH_VARARGS,
     "flight(rank): its last collectives, oldest first: (number, call, site, state, began_ns, ended_ns)"},
    {"arena", comm_arena, METH_NOARGS,
     "This rank's part of the arena, writable. The memory stays as long as this view (slices do not count)."},
    {"choose", (PyCFunction)(void (*)(void))even_ext_comm_choose, METH_VARARGS | METH_KEYWORDS,
     "choose(costs=None, shape=None, way=None, measure_seconds=0.0): collective; by rank 0's costs from now on"},
    {"measure", even_ext_comm_measure, METH_VARARGS,
     "measure(costs, shape, seconds): collective; what whole calls cost, into rank 0's costs"},
    {"close", comm_close, METH_NOARGS, "Leaves the group. The memory goes when nothing looks at it any more."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef comm_attributes[] = {
    {"rank", comm_rank, NULL, "this rank's number", NULL},
    {"ranks", comm_ranks, NULL, "how many ranks the group has", NULL},
    {"engine", comm_engine, NULL, "how data move: \"shm\", \"ucx\", \"mpi\", \"hosts\"", NULL},
    {"wait_ns", comm_wait_ns, NULL, "nanoseconds spent waiting for peers since the group was opened", NULL},
    {"description", comm_description, NULL, "how the group moves data now, in words", NULL},
    {"sends", comm_sends, NULL, "whether the group is small enough for messages", NULL},
    {"closed", comm_closed, NULL, "whether close() was called", NULL},
    {"handle", comm_handle, NULL, "capsule \"evenstep.comm\" with the even_comm *", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot comm_slots[] = {
    {Py_tp_new, (void *)comm_new},
    {Py_tp_dealloc, (void *)comm_dealloc},
    {Py_tp_methods, comm_methods},
    {Py_tp_getset, comm_attributes},
    {Py_tp_doc,
     "Comm(fd, rank, ranks, arena_bytes=0, timeout_seconds=1800.0, spin=-1)\n\nA rank's place in a group of "
     "processes of one host. Opening it returns when all ranks have come."},
    {0, NULL}};

static PyType_Spec comm_spec = {.name = "evenstep._core.Comm",
                                .basicsize = sizeof(even_ext_comm),
                                .flags = Py_TPFLAGS_DEFAULT,
                                .slots = comm_slots};

static PyMethodDef functions[] = {
    {"open_peer_fd", open_peer_fd, METH_VARARGS,
     "open_peer_fd(pid, fd) -> fd of the shared memory that process pid holds as fd, owned by the caller"},
    {"lane_rank", even_ext_lane_rank, METH_VARARGS,
     "lane_rank(lane, lanes, ranks) -> which of a host's ranks carries that lane between hosts"},
    {"ucx_version", even_ext_ucx_version, METH_VARARGS,
     "ucx_version(library=None) -> \"1.13.1\"; opens UCX. Raises where it is not here."},
    {"mpi_version", even_ext_mpi_version, METH_VARARGS,
     "mpi_version(library=None) -> \"Open MPI v5.0.8\"; opens the library and starts nothing. Raises where it is not "
     "here."},
    {"mpi_place", even_ext_mpi_place, METH_VARARGS,
     "mpi_place(library=None) -> (rank, ranks) of this process in its MPI job; starts MPI"},
    {"comm_rest", comm_rest, METH_O,
     "comm_rest(rests): this thread waits for another one's call, until it says otherwise."},
    {"comm_waits_in_backward", comm_waits_in_backward, METH_O,
     "comm_waits_in_backward(frame): this thread waits in C++ at the end of the backward that the frame has called."},
    {"comm_backward_over", comm_backward_over, METH_NOARGS,
     "comm_backward_over(): it goes on; said by another thread."},
    {"comm_others_may_call", comm_others_may_call, METH_NOARGS,
     "comm_others_may_call() -> whether another thread but the first may call that has not yet, as a rank that waits "
     "asks."},
    {"comm_simd", comm_simd, METH_NOARGS, "The name of the SIMD path of the reductions."},
    {NULL, NULL, 0, NULL}};

static int add_numbers(PyObject *module) {
  static const struct {
    const char *name;
    int number;
  } numbers[] = {
#define DTYPE_NUMBER(name, number, bytes) {"DTYPE_" #name, number},
      EVEN_DTYPE_LIST(DTYPE_NUMBER)
#undef DTYPE_NUMBER
          {"OP_SUM", EVEN_SUM},
      {"OP_AVG", EVEN_AVG},
      {"OP_PRODUCT", EVEN_PRODUCT},
      {"OP_MIN", EVEN_MIN},
      {"OP_MAX", EVEN_MAX},
      {"OP_BAND", EVEN_BAND},
      {"OP_BOR", EVEN_BOR},
      {"OP_BXOR", EVEN_BXOR},
      {"CALL_GATHER", EVEN_CALL_GATHER},
      {"CALL_SCATTER", EVEN_CALL_SCATTER},
      {"ELEMENTS_OTHER", EVEN_CALLED_OTHER},
  };
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
    if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].number) != 0) {
      return -1;
    }
  }
  return 0;
}

int even_ext_add_comm(PyObject *module) {
  PyObject *type = even_ext_add_type(module, "Comm", &comm_spec);
  if (type == NULL) {
    return -1;
  }
  if (even_ext_add_request(module) != 0 || even_ext_add_costs(module) != 0 || even_ext_add_reduce(module, type) != 0 ||
      even_ext_add_call_queue(module) != 0) {
    return -1;
  }
  return add_numbers(module) != 0 ? -1 : PyModule_AddFunctions(module, functions);
}
