/* What the extension's files about communicators of GPUs share. */
#ifndef EVEN_EXT_DEVICE_COMM_H
#define EVEN_EXT_DEVICE_COMM_H

#include "comm.h"

#include <evenstep/device_comm.h>

/* _core.DeviceComm */
typedef struct even_ext_device {
  PyObject_HEAD even_device_comm *comm; /* NULL once freed */
  Py_ssize_t calls;                     /* threads inside a call, and groups of calls that are open */
  Py_ssize_t groups;                    /* these alone: of one thread */
  int closed;
  PyObject *beside; /* keeps the group that goes beside */
  PyObject *ring;   /* and what calls are recorded in */
} even_ext_device;

/* The communicator, or NULL with an exception when it is closed. */
even_device_comm *even_ext_device_open(even_ext_device *self);
/* Around each call without the GIL. It ends with None, or NULL with an exception. */
void even_ext_device_begin(even_ext_device *self);
PyObject *even_ext_device_done(even_ext_device *self, even_status status);

/* Runs `call` so, and returns. */
#define EVEN_EXT_DEVICE_RUN(self, call)               \
  do {                                                \
    even_status run_status_ = EVEN_OK;                \
    even_ext_device_begin(self);                      \
    Py_BEGIN_ALLOW_THREADS;                           \
    run_status_ = (call);                             \
    Py_END_ALLOW_THREADS;                             \
    return even_ext_device_done((self), run_status_); \
  } while (0)

/* device_collectives.c */
PyObject *even_ext_device_all_reduce(PyObject *object, PyObject *arguments);
PyObject *even_ext_device_reduce(PyObject *object, PyObject *arguments);
PyObject *even_ext_device_reduce_scatter(PyObject *object, PyObject *arguments);
PyObject *even_ext_device_all_gather(PyObject *object, PyObject *arguments);
PyObject *even_ext_device_broadcast(PyObject *object, PyObject *arguments);
PyObject *even_ext_device_all_to_all(PyObject *object, PyObject *arguments);
PyObject *even_ext_device_send(PyObject *object, PyObject *arguments);
PyObject *even_ext_device_receive(PyObject *object, PyObject *arguments);
PyObject *even_ext_device_barrier(PyObject *object, PyObject *arguments);

#endif
