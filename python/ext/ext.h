/* What the files of the extension share. Limited API 3.9: one abi3 module. */
#ifndef EVEN_EXT_H
#define EVEN_EXT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <evenstep/status.h>
#include <evenstep/telemetry.h>

#ifndef PyBUF_WRITE
#define PyBUF_WRITE \
  0x200 /* the headers of the limited API leave it out before 3.11; PyMemoryView_FromMemory needs it */
#endif

/* evenstep.EvenstepError, with attributes status (str), fix (str or None), rank (int or None), device (str or None). */
extern PyObject *even_ext_error;

/* Raises `status` as EvenstepError, with the words of the calling thread's last error where it is of this status, else
 * those of the table; returns NULL. MemoryError for EVEN_ERR_MEMORY. */
PyObject *even_ext_raise(even_status status);

/* What a call ends with that gives nothing: None, or NULL with the status raised. */
static inline PyObject *even_ext_done(even_status status) {
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  Py_RETURN_NONE;
}

/* PyArg converter ("O&"): an integer address, as of tensor.data_ptr(), into a void * or const void *. */
static inline int even_ext_to_address(PyObject *object, void *out) {
  unsigned long long value = PyLong_AsUnsignedLongLong(object);
  if (value == (unsigned long long)-1 && PyErr_Occurred() != NULL) {
    return 0;
  }
  const void *address = (const void *)(uintptr_t)value;
  memcpy(out, &address, sizeof address);
  return 1;
}

/* What a capsule named EVEN_EXT_OVER points to: whom a group asks whether it is over. */
#define EVEN_EXT_OVER "evenstep.over"
typedef struct even_ext_over {
  bool (*call)(void *context);
  void *context;
} even_ext_over;

/* The ring of this rank, once a Telemetry was made that writes one; else NULL. It is there until the process ends. */
even_telemetry *even_ext_ring(void);

/* Each adds its types and functions to the module; 0, or -1 with an exception set. */
int even_ext_add_comm(PyObject *module);
int even_ext_add_device_comm(PyObject *module);
int even_ext_add_sync(PyObject *module);
int even_ext_add_encode(PyObject *module);
int even_ext_add_exact(PyObject *module);
int even_ext_add_norm(PyObject *module);
int even_ext_add_optim(PyObject *module);
int even_ext_add_generation(PyObject *module);
int even_ext_add_telemetry(PyObject *module);
int even_ext_add_timeline(PyObject *module);
int even_ext_add_balancer(PyObject *module); /* and _core.balance */
int even_ext_add_balance(PyObject *module);
int even_ext_add_memory(PyObject *module);
int even_ext_add_stacks(PyObject *module);
int even_ext_add_checkpoint(PyObject *module); /* and _core.CheckpointSnapshot */
int even_ext_add_checkpoint_snapshot(PyObject *module);
int even_ext_add_checkpoint_reading(PyObject *module);

#endif
