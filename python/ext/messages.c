/* _core.Request: messages between two ranks, from Python. */
#include "comm.h"
#include "objects.h"

#include "base/fail.h"
#include "comm/called.h"

/* One that has begun. It holds the group, whose memory it needs to the end. */
typedef struct request_object {
  PyObject_HEAD even_comm_request *request;
  even_ext_comm *owner;
} request_object;

static PyObject *request_type; /* made once, with the module */

/* It may be half moved, to or from one that does not answer. */
static void free_without_gil(even_comm_request *request) {
  Py_BEGIN_ALLOW_THREADS;
  even_comm_request_free(request);
  Py_END_ALLOW_THREADS;
}

static PyObject *new_request(even_ext_comm *owner, even_comm_request *request) {
  request_object *self = (request_object *)even_ext_object_new((PyTypeObject *)request_type);
  if (self == NULL) {
    free_without_gil(request);
    return NULL;
  }
  self->request = request;
  self->owner = owner;
  Py_INCREF((PyObject *)owner);
  owner->messages++;
  return (PyObject *)self;
}

static void request_dealloc(PyObject *object) {
  request_object *self = (request_object *)object;
  if (self->owner != NULL) {
    free_without_gil(self->request);
    self->owner->messages--;
    even_ext_comm_free_when_unused(self->owner);
    Py_DECREF((PyObject *)self->owner);
  }
  even_ext_object_free(object);
}

/* Without the GIL: another thread may hold the group's lock while it ends the group, or this one finds that a peer is
 * lost and tells the others. */
static PyObject *request_done(PyObject *object, PyObject *unused) {
  bool done = false;
  (void)unused;
  Py_BEGIN_ALLOW_THREADS;
  done = even_comm_request_done(((request_object *)object)->request);
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(done);
}

static PyObject *request_wait(PyObject *object, PyObject *arguments) {
  double seconds = 0;
  int peer = -1;
  even_status status = EVEN_OK;
  if (!PyArg_ParseTuple(arguments, "|d:wait", &seconds)) {
    return NULL;
  }
  even_comm_request *request = ((request_object *)object)->request;
  even_ext_comes_from_python(true); /* it may be asked where it waits */
  Py_BEGIN_ALLOW_THREADS;
  status = even_comm_request_wait(request, seconds, &peer);
  Py_END_ALLOW_THREADS;
  even_ext_comes_from_python(false);
  return status == EVEN_OK ? PyLong_FromLong(peer) : even_ext_raise(status);
}

static PyMethodDef request_methods[] = {
    {"done", request_done, METH_NOARGS, "Whether it has ended, well or not."},
    {"wait", request_wait, METH_VARARGS, "wait(seconds=0) -> the rank at the other end, or the error it ended with"},
    {NULL, NULL, 0, NULL}};
static PyType_Slot request_slots[] = {{Py_tp_dealloc, (void *)request_dealloc},
                                      {Py_tp_methods, request_methods},
                                      {Py_tp_doc, "A message that has begun. Keep its data until it is done."},
                                      {0, NULL}};
static PyType_Spec request_spec = {.name = "evenstep._core.Request",
                                   .basicsize = sizeof(request_object),
                                   .flags = Py_TPFLAGS_DEFAULT,
                                   .slots = request_slots};

static int to_tag(PyObject *object, void *out) {
  if (even_ext_to_size(object, out)) {
    return 1;
  }
  if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
    PyErr_Format(PyExc_ValueError, "tag %S: a message's tag is a number of 64 bits, 0 or more", object);
  }
  return 0;
}

static PyObject *begin_message(PyObject *object, PyObject *arguments, bool sends) {
  even_ext_comm *self = (even_ext_comm *)object;
  void *data = NULL;
  size_t bytes = 0;
  size_t tag = 0;
  int peer = 0;
  even_comm_called called = {0};
  even_comm_request *request = NULL;
  even_comm *comm = even_ext_comm_open_group(self);
  if (comm == NULL || !PyArg_ParseTuple(arguments, sends ? "O&O&iO&|O&z:send" : "O&O&iO&|O&:receive",
                                        even_ext_to_address, &data, even_ext_to_size, &bytes, &peer, to_tag, &tag,
                                        even_ext_to_elements, &called.elements, &called.site)) {
    return NULL;
  }
  even_status status = EVEN_OK;
  self->calls++;
  Py_BEGIN_ALLOW_THREADS;
  even_comm_call_as(&called);
  status = sends ? even_comm_send_begin(comm, data, bytes, peer, tag, &request)
                 : even_comm_receive_begin(comm, data, bytes, peer, tag, &request);
  even_comm_call_as(NULL); /* where it was refused before the engine took it */
  Py_END_ALLOW_THREADS;
  PyObject *result = status == EVEN_OK ? new_request(self, request) : even_ext_raise(status);
  self->calls--;
  even_ext_comm_free_when_unused(self);
  return result;
}

PyObject *even_ext_comm_send(PyObject *object, PyObject *arguments) {
  return begin_message(object, arguments, true);
}
PyObject *even_ext_comm_receive(PyObject *object, PyObject *arguments) {
  return begin_message(object, arguments, false);
}

int even_ext_add_request(PyObject *module) {
  request_type = even_ext_add_type(module, "Request", &request_spec);
  Py_XINCREF(request_type); /* one for this file */
  return request_type == NULL ? -1 : 0;
}
