/* What the extension's files about groups share. */
#ifndef EVEN_EXT_COMM_H
#define EVEN_EXT_COMM_H

#include "ext.h"

#include <evenstep/flight.h>
#include <stdbool.h>

/* _core.Comm */
typedef struct even_ext_comm {
  PyObject_HEAD even_comm *comm; /* NULL once freed */
  PyObject *view;                /* weak reference to the arena's view while that lives */
  Py_ssize_t handles;            /* capsules out */
  Py_ssize_t calls;              /* threads inside a call */
  Py_ssize_t messages;           /* _core.Request objects */
  size_t arena_bytes;
  int closed;
} even_ext_comm;

/* Whether this thread is inside a call from Python: set around a call into a group for which the GIL is let go. */
extern _Thread_local int even_ext_from_python;

/* The group, or NULL with an exception when it is closed. */
even_comm *even_ext_comm_open_group(even_ext_comm *self);
/* Frees the group that is closed when nothing looks at it any more. */
void even_ext_comm_free_when_unused(even_ext_comm *self);

/* PyArg converter ("O&"): a size_t. */
static inline int even_ext_to_size(PyObject *object, void *out) {
  size_t value = PyLong_AsSize_t(object);
  if (value == (size_t)-1 && PyErr_Occurred() != NULL) {
    return 0;
  }
  memcpy(out, &value, sizeof value);
  return 1;
}

/* A sequence of `ranks` numbers, or addresses, into a new array (even_free); NULL with an exception. */
size_t *even_ext_to_counts(PyObject *object, int ranks);
void **even_ext_to_parts(PyObject *object, int ranks);

/* messages.c */
PyObject *even_ext_comm_send(PyObject *object, PyObject *arguments);
PyObject *even_ext_comm_receive(PyObject *object, PyObject *arguments);
int even_ext_add_request(PyObject *module);

/* hosts.c */
PyObject *even_ext_comm_open_ucx(PyObject *type, PyObject *arguments, PyObject *names);
PyObject *even_ext_comm_open_hosts(PyObject *type, PyObject *arguments, PyObject *names);
PyObject *even_ext_ucx_version(PyObject *module, PyObject *arguments);

/* reduce.c */
PyObject *even_ext_comm_all_reduce_data(PyObject *object, PyObject *arguments);
int even_ext_add_reduce(PyObject *module, PyObject *type_of_comm);

#endif
