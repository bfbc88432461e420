/* How the objects of the extension begin and end, and how their types come into the module: all are heap types of the
 * limited API, whose slots have to be asked for. */
#ifndef EVEN_EXT_OBJECTS_H
#define EVEN_EXT_OBJECTS_H

#include "ext.h"

/* A new object, all zeros behind its head; NULL with an exception. */
static inline PyObject *even_ext_object_new(PyTypeObject *type) {
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  return allocate(type, 0);
}

/* The last thing in tp_dealloc: frees the object, and gives back its reference to its type. */
static inline void even_ext_object_free(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF((PyObject *)type);
}

/* Makes the type and puts it into the module, whose reference is returned (borrowed); NULL with an exception. */
static inline PyObject *even_ext_add_type(PyObject *module, const char *name, PyType_Spec *spec) {
  PyObject *type = PyType_FromSpec(spec);
  if (type != NULL && PyModule_AddObject(module, name, type) != 0) {
    Py_DECREF(type);
    return NULL;
  }
  return type;
}

#endif
