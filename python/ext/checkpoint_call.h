/* The tensors and metadata of one file of a checkpoint, from Python's objects. */
#ifndef EVEN_EXT_CHECKPOINT_CALL_H
#define EVEN_EXT_CHECKPOINT_CALL_H

#include "ext.h"

#include <evenstep/checkpoint.h>

typedef struct even_ext_file_call {
  PyObject *tensors;  /* tuple: keeps the names alive; or bytes */
  PyObject *metadata; /* tuple of pairs or NULL */
  PyObject *fetch;    /* callable or NULL; the caller's */
  even_checkpoint_tensor *items;
  int64_t *shapes; /* of all tensors, one after the other */
  even_checkpoint_pair *pairs;
  PyThreadState **released; /* where the thread keeps its state while it has no GIL */
} even_ext_file_call;

/* Reads tensors (name, dtype, shape, address, bytes; or bytes, which are the whole file then), metadata (pairs, or
 * None) and fetch (callable, or None) into *call and *file, which points into it. 0, or -1 with an exception set; end
 * it in both cases. */
int even_ext_file_begin(even_ext_file_call *call, const char *name, PyObject *tensors, PyObject *metadata,
                        PyObject *fetch, even_checkpoint_file *file);
void even_ext_file_end(even_ext_file_call *call);

/* (bytes, linked, shared) */
PyObject *even_ext_saved(const even_checkpoint_saved *saved);

/* A converter of PyArg_Parse: as PyUnicode_FSConverter, and None is NULL. */
int even_ext_path_or_none(PyObject *path, void *out);

#endif
