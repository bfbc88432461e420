/* evenstep._core: the module, its exception, its parts. */
#include "base/fail.h"
#include "data.h"
#include "ext.h"

#include <evenstep/version.h>

PyObject *even_ext_error = NULL;

static PyObject *new_reference(PyObject *object) {
  Py_INCREF(object);
  return object;
}

static int set_text(PyObject *exception, const char *name, const char *text) {
  PyObject *value =
      text[0] == '\0' ? new_reference(Py_None) : PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
  if (value == NULL) {
    return -1;
  }
  int failed = PyObject_SetAttrString(exception, name, value);
  Py_DECREF(value);
  return failed;
}

PyObject *even_ext_raise(even_status status) {
  const even_error *error = even_error_of(status);
  if (error->status == EVEN_ERR_MEMORY) {
    PyErr_SetString(PyExc_MemoryError, error->what);
    return NULL;
  }
  PyObject *message =
      error->fix[0] != '\0'
          ? PyUnicode_FromFormat("%s (%s)\n  fix: %s", error->what, even_status_name(error->status), error->fix)
          : PyUnicode_FromFormat("%s (%s)", error->what, even_status_name(error->status));
  if (message == NULL) {
    return NULL;
  }
  PyObject *exception = PyObject_CallFunctionObjArgs(even_ext_error, message, NULL);
  Py_DECREF(message);
  if (exception == NULL) {
    return NULL;
  }
  PyObject *rank = error->rank >= 0 ? PyLong_FromLong(error->rank) : new_reference(Py_None);
  if (rank == NULL || PyObject_SetAttrString(exception, "rank", rank) != 0 ||
      set_text(exception, "status", even_status_name(error->status)) != 0 ||
      set_text(exception, "fix", error->fix) != 0 || set_text(exception, "device", error->device) != 0) {
    Py_XDECREF(rank);
    Py_DECREF(exception);
    return NULL;
  }
  Py_DECREF(rank);
  PyErr_SetObject(even_ext_error, exception);
  Py_DECREF(exception);
  return NULL;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "Evenstep's engine, in C.", -1, NULL, NULL, NULL, NULL, NULL};

/* The attributes that every one of them has, also one that Python code made without them. */
static PyObject *make_error(void) {
  PyObject *attributes =
      Py_BuildValue("{ss,sO,sO,sO}", "status", "", "fix", Py_None, "rank", Py_None, "device", Py_None);
  PyObject *error = attributes == NULL
                        ? NULL
                        : PyErr_NewExceptionWithDoc(
                              "evenstep.EvenstepError",
                              "An error of Evenstep: what happened, where and why. `status` is its stable name "
                              "(\"\" where it has none), `fix` says what to do, `rank` and `device` are those it "
                              "is about; each may be None.",
                              PyExc_RuntimeError, attributes);
  Py_XDECREF(attributes);
  return error;
}

PyMODINIT_FUNC PyInit__core(void); /* CPython declares no prototype */

PyMODINIT_FUNC PyInit__core(void) {
  PyObject *module = PyModule_Create(&definition);
  if (module == NULL) {
    return NULL;
  }
  even_ext_error = make_error();
  if (even_ext_error == NULL || PyModule_AddObject(module, "EvenstepError", new_reference(even_ext_error)) != 0 ||
      PyModule_AddStringConstant(module, "version", even_version()) != 0 ||
      PyModule_AddStringConstant(module, "commit", even_commit()) != 0 || even_ext_add_comm(module) != 0 ||
      even_ext_add_data(module) != 0 || even_ext_add_device_comm(module) != 0 || even_ext_add_telemetry(module) != 0 ||
      even_ext_add_timeline(module) != 0 || even_ext_add_balancer(module) != 0 ||
      even_ext_add_checkpoint(module) != 0 || even_ext_add_sync(module) != 0 || even_ext_add_encode(module) != 0 ||
      even_ext_add_exact(module) != 0 || even_ext_add_norm(module) != 0 || even_ext_add_optim(module) != 0 ||
      even_ext_add_memory(module) != 0 || even_ext_add_stacks(module) != 0 || even_ext_add_generation(module) != 0) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
