/* _core.CallQueue: calls of a group that one thread makes in the order in which others ask for them. An all-reduce is
 * waited for, taken out and made without the GIL: the thread asks for it once a call, when that has ended. Had it asked
 * before, too, whoever put the call would hand it over in the midst of a backward. */
#include "comm.h"
#include "objects.h"

#include "base/alloc.h"
#include "comm/waits.h"
#include "os/futex.h"

#include <pthread.h>

#define WAIT_NS 3600000000000u /* then it looks again */

/* The objects are the queue's until it is taken out. */
typedef struct queued {
  struct queued *next;
  PyObject *token;
  PyObject *place;
  even_ext_queued call; /* without a comm: nothing to call here, the token says it all */
} queued;

typedef struct queue_object {
  PyObject_HEAD pthread_mutex_t lock; /* of the list */
  queued *first;
  queued *last;
  _Atomic uint32_t puts;
  _Atomic uint32_t sleeps; /* 1: somebody waits for the next put */
} queue_object;

static PyObject *queue_type;

static PyObject *queue_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {NULL};
  if (!PyArg_ParseTupleAndKeywords(arguments, names, ":CallQueue", keywords)) {
    return NULL;
  }
  queue_object *self = (queue_object *)even_ext_object_new(type);
  if (self != NULL) {
    (void)pthread_mutex_init(&self->lock, NULL); /* of this kind it cannot fail */
  }
  return (PyObject *)self;
}

/* With the GIL held. */
static void forget(queued *one) {
  if (one->call.comm != NULL) {
    even_ext_data_close(&one->call.data);
    Py_DECREF((PyObject *)one->call.comm);
  }
  Py_DECREF(one->token);
  Py_DECREF(one->place);
  even_free(one);
}

static void queue_dealloc(PyObject *object) {
  queue_object *self = (queue_object *)object;
  for (queued *one = self->first; one != NULL; one = self->first) {
    self->first = one->next;
    if (one->call.comm != NULL) {
      one->call.comm->calls--;
      even_ext_comm_free_when_unused(one->call.comm);
    }
    forget(one);
  }
  even_ext_object_free(object);
}

static void append(queue_object *self, queued *one) {
  (void)pthread_mutex_lock(&self->lock);
  if (self->last == NULL) {
    self->first = one;
  } else {
    self->last->next = one;
  }
  self->last = one;
  (void)pthread_mutex_unlock(&self->lock);
  self->puts++;
  if (self->sleeps != 0) {
    even_futex_wake_all(&self->puts);
  }
}

static queued *take(queue_object *self) {
  (void)pthread_mutex_lock(&self->lock);
  queued *one = self->first;
  if (one != NULL) {
    self->first = one->next;
    self->last = self->first == NULL ? NULL : self->last;
  }
  (void)pthread_mutex_unlock(&self->lock);
  return one;
}

/* Without the GIL. */
static queued *wait_and_take(queue_object *self) {
  for (;;) {
    uint32_t seen = self->puts;
    queued *one = take(self);
    if (one != NULL) {
      return one;
    }
    even_waits_rest(&self->puts, seen);
    self->sleeps = 1;
    even_futex_wait(&self->puts, seen, WAIT_NS);
    self->sleeps = 0;
    even_waits_go_on();
  }
}

static int put(queue_object *self, PyObject *token, PyObject *place, const even_ext_queued *call) {
  queued *one = NULL;
  even_status status = EVEN_NEW(&one);
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
    return -1;
  }
  one->token = token;
  one->place = place;
  one->call = *call;
  Py_INCREF(token);
  Py_INCREF(place);
  if (call->comm != NULL) {
    Py_INCREF((PyObject *)call->comm);
    call->comm->calls++; /* its memory stays until the call is over */
  }
  append(self, one);
  return 0;
}

int even_ext_queue_put(PyObject *queue, PyObject *token, PyObject *place, const even_ext_queued *call) {
  if ((PyObject *)Py_TYPE(queue) != queue_type) {
    PyErr_SetString(PyExc_TypeError, "that is no CallQueue");
    return -1;
  }
  return put((queue_object *)queue, token, place, call);
}

static PyObject *queue_put(PyObject *object, PyObject *token) {
  const even_ext_queued none = {0};
  if (put((queue_object *)object, token, Py_None, &none) != 0) {
    return NULL;
  }
  Py_RETURN_NONE;
}

/* The exception that is set, as an object; None where there is none. */
static PyObject *take_exception(void) {
  PyObject *type = NULL;
  PyObject *value = NULL;
  PyObject *trace = NULL;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  if (value == NULL) {
    value = Py_None;
    Py_INCREF(value);
  }
  return value;
}

static PyObject *queue_next(PyObject *object, PyObject *unused) {
  queue_object *self = (queue_object *)object;
  queued *one = NULL;
  even_status status = EVEN_OK;
  (void)unused;
  Py_BEGIN_ALLOW_THREADS;
  one = wait_and_take(self);
  if (one->call.comm != NULL) {
    const even_ext_data *data = &one->call.data;
    even_ext_comes_from(one->place);
    status = even_comm_all_reduce(one->call.comm->comm, data->address, data->count * (size_t)data->reals,
                                  (even_dtype)data->dtype, (even_reduce_op)one->call.op);
  }
  Py_END_ALLOW_THREADS;
  if (one->call.comm != NULL) {
    even_ext_comes_from(NULL);
    Py_XDECREF(even_ext_comm_done(one->call.comm, status));
  }
  PyObject *error = take_exception();
  PyObject *pair = PyTuple_Pack(2, one->token, error);
  Py_DECREF(error);
  forget(one);
  return pair;
}

static PyMethodDef queue_methods[] = {
    {"put", queue_put, METH_O, "put(token): next() gives it as it is"},
    {"next", queue_next, METH_NOARGS, "next() -> (token, the error of its call or None), for one thread; waits"},
    {NULL, NULL, 0, NULL}};
static PyType_Slot queue_slots[] = {{Py_tp_new, (void *)queue_new},
                                    {Py_tp_dealloc, (void *)queue_dealloc},
                                    {Py_tp_methods, queue_methods},
                                    {Py_tp_doc, "Calls that one thread makes, in the order in which they were put."},
                                    {0, NULL}};
static PyType_Spec queue_spec = {.name = "evenstep._core.CallQueue",
                                 .basicsize = sizeof(queue_object),
                                 .flags = Py_TPFLAGS_DEFAULT,
                                 .slots = queue_slots};

int even_ext_add_call_queue(PyObject *module) {
  queue_type = even_ext_add_type(module, "CallQueue", &queue_spec);
  Py_XINCREF(queue_type); /* one for this file */
  return queue_type == NULL ? -1 : 0;
}
