/* evenstep._core.CheckpointSnapshot. */
#include "checkpoint_call.h"
#include "objects.h"

#include <stdlib.h>

typedef struct snapshot_object {
  PyObject ob_base;
  even_checkpoint_snapshot *snapshot; /* NULL once closed */
  int busy;                           /* a call of another thread is inside, without the GIL */
} snapshot_object;

typedef struct take_call {
  even_ext_file_call *calls;
  even_checkpoint_file *files;
  Py_ssize_t count;
} take_call;

static PyObject *snapshot_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"fd", NULL};
  int fd = -1;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|i:CheckpointSnapshot", names, &fd)) {
    return NULL;
  }
  snapshot_object *self = (snapshot_object *)even_ext_object_new(type);
  if (self == NULL) {
    return NULL;
  }
  even_status status = even_checkpoint_snapshot_open(fd, &self->snapshot);
  if (status != EVEN_OK) {
    Py_DECREF(self);
    return even_ext_raise(status);
  }
  return (PyObject *)self;
}

static void snapshot_dealloc(PyObject *object) {
  snapshot_object *self = (snapshot_object *)object;
  even_checkpoint_snapshot_close(self->snapshot);
  even_ext_object_free(object);
}

static int usable(const snapshot_object *self) {
  if (self->busy) {
    PyErr_SetString(PyExc_RuntimeError, "this CheckpointSnapshot is in use by another thread");
    return 0;
  }
  return 1;
}

static int begin_files(take_call *call, PyObject *files, PyThreadState **released) {
  call->calls = calloc((size_t)call->count + 1, sizeof *call->calls);
  call->files = calloc((size_t)call->count + 1, sizeof *call->files);
  if (call->calls == NULL || call->files == NULL) {
    (void)PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < call->count; i++) {
    const char *name = NULL;
    PyObject *tensors = NULL;
    PyObject *metadata = NULL;
    PyObject *fetch = NULL;
    PyObject *file = PyTuple_GetItem(files, i);
    if (!PyTuple_Check(file) || !PyArg_ParseTuple(file, "sOOO;a file is (name, tensors, metadata, fetch)", &name,
                                                  &tensors, &metadata, &fetch)) {
      if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "a file is a tuple (name, tensors, metadata, fetch)");
      }
      return -1;
    }
    call->calls[i].released = released;
    if (even_ext_file_begin(&call->calls[i], name, tensors, metadata, fetch, &call->files[i]) != 0) {
      return -1;
    }
  }
  return 0;
}

static void end_files(take_call *call) {
  for (Py_ssize_t i = 0; call->calls != NULL && i < call->count; i++) {
    even_ext_file_end(&call->calls[i]);
  }
  free(call->calls);
  free(call->files);
}

static PyObject *run_take(snapshot_object *self, const even_checkpoint_params *params, PyObject *files,
                          const char *state) {
  PyThreadState *released = NULL;
  take_call call = {.count = PyTuple_Size(files)};
  PyObject *result = NULL;
  if (begin_files(&call, files, &released) == 0 && usable(self)) {
    self->busy = 1;
    released = PyEval_SaveThread();
    even_status status = even_checkpoint_snapshot_take(self->snapshot, params, call.files, (size_t)call.count, state);
    PyEval_RestoreThread(released);
    self->busy = 0;
    if (!PyErr_Occurred()) { /* raised by fetch */
      result = even_ext_done(status);
    }
  }
  end_files(&call);
  return result;
}

static PyObject *snapshot_take(PyObject *object, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"folder",   "files",      "state_json", "replace",   "expected_bytes",
                          "previous", "run_folder", "job",        "sign_seen", NULL};
  PyObject *folder = NULL;
  PyObject *previous = NULL;
  PyObject *run_folder = NULL;
  const char *job = NULL;
  PyObject *sequence = NULL;
  const char *state = NULL;
  int replace = 0;
  int sign_seen = 0;
  unsigned long long expected_bytes = 0;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O&Os|pKO&O&zp:take", names, PyUnicode_FSConverter, &folder,
                                   &sequence, &state, &replace, &expected_bytes, even_ext_path_or_none, &previous,
                                   even_ext_path_or_none, &run_folder, &job, &sign_seen)) {
    return NULL;
  }
  even_checkpoint_params params = {.size = sizeof params,
                                   .folder = PyBytes_AsString(folder),
                                   .replace = replace != 0,
                                   .expected_bytes = expected_bytes,
                                   .previous = previous == NULL ? NULL : PyBytes_AsString(previous),
                                   .run_folder = run_folder == NULL ? NULL : PyBytes_AsString(run_folder),
                                   .job = job,
                                   .sign_seen = sign_seen != 0};
  PyObject *files = PySequence_Tuple(sequence);
  PyObject *result = files == NULL ? NULL : run_take((snapshot_object *)object, &params, files, state);
  Py_XDECREF(files);
  Py_DECREF(folder);
  Py_XDECREF(previous);
  Py_XDECREF(run_folder);
  return result;
}

static PyObject *snapshot_write(PyObject *object, PyObject *unused) {
  snapshot_object *self = (snapshot_object *)object;
  even_status status = EVEN_OK;
  (void)unused;
  if (!usable(self)) {
    return NULL;
  }
  self->busy = 1;
  Py_BEGIN_ALLOW_THREADS;
  status = even_checkpoint_snapshot_write(self->snapshot);
  Py_END_ALLOW_THREADS;
  self->busy = 0;
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  even_checkpoint_saved saved;
  even_checkpoint_snapshot_saved(self->snapshot, &saved);
  return even_ext_saved(&saved);
}

static PyMethodDef snapshot_methods[] = {
    {"take", (PyCFunction)(void (*)(void))snapshot_take, METH_VARARGS | METH_KEYWORDS,
     "take(folder, files, state_json, replace=False, expected_bytes=0, previous=None)\n\nCopies a checkpoint to "
     "memory; a "
     "file is (name, tensors, metadata, fetch) as for CheckpointWriter.add."},
    {"write", snapshot_write, METH_NOARGS,
     "write() -> (bytes, linked, shared)\n\nWrites what was taken to the disk; any thread. As "
     "CheckpointWriter.commit."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot snapshot_slots[] = {{Py_tp_new, snapshot_new},
                                       {Py_tp_dealloc, snapshot_dealloc},
                                       {Py_tp_methods, snapshot_methods},
                                       {Py_tp_doc,
                                        "CheckpointSnapshot(fd=-1)\n\nMemory for one checkpoint at a time; fd: a "
                                        "memory file of the agent's, which writes what "
                                        "this process took and did not live to write."},
                                       {0, NULL}};

static PyType_Spec snapshot_spec = {.name = "evenstep._core.CheckpointSnapshot",
                                    .basicsize = sizeof(snapshot_object),
                                    .flags = Py_TPFLAGS_DEFAULT,
                                    .slots = snapshot_slots};

int even_ext_add_checkpoint_snapshot(PyObject *module) {
  if (even_ext_add_type(module, "CheckpointSnapshot", &snapshot_spec) == NULL) {
    return -1;
  }
  return 0;
}
