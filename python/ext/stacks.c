/* _core.stacks_open: this rank's stacks, told to the agent when it asks; _core.hold_end_signal; _core.threads_rest. */
#include "ext.h"

#include <unistd.h>

#include "os/end_signal.h"
#include "os/process_threads.h"
#include "telemetry/stacks.h"

static const double MOST_SECONDS = 1e6;

static PyObject *stacks_open(PyObject *module, PyObject *unused) {
  static even_stacks *opened; /* kept until the process ends; a child of a fork opens its own */
  static int numbers[2];
  static pid_t process;
  (void)module;
  (void)unused;
  if (opened == NULL || process != getpid()) {
    even_stacks *stacks = NULL;
    even_status status = even_stacks_open(&numbers[0], &numbers[1], &stacks);
    if (status != EVEN_OK) {
      return even_ext_raise(status);
    }
    opened = stacks;
    process = getpid();
  }
  return Py_BuildValue("ii", numbers[0], numbers[1]);
}

static PyObject *hold_end_signal(PyObject *module, PyObject *arguments) {
  int always = 0;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "p:hold_end_signal", &always)) {
    return NULL;
  }
  even_status status = even_end_signal_hold(always != 0);
  return even_ext_done(status);
}

static PyObject *threads_rest(PyObject *module, PyObject *arguments) {
  const char *name = NULL;
  double seconds = 0;
  double busy = 0;
  bool rest = false;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "sdd:threads_rest", &name, &seconds, &busy)) {
    return NULL;
  }
  seconds = seconds > 0 ? (seconds < MOST_SECONDS ? seconds : MOST_SECONDS) : 0;
  Py_BEGIN_ALLOW_THREADS;
  rest = even_process_threads_rest(name, (uint64_t)(seconds * 1e9), busy);
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(rest);
}

static PyMethodDef functions[] = {
    {"hold_end_signal", hold_end_signal, METH_VARARGS,
     "hold_end_signal(always): SIGTERM ends this process only where its parent sends it, or it does itself; a handler "
     "that is set stays, unless always"},
    {"stacks_open", stacks_open, METH_NOARGS,
     "stacks_open() -> (signal, fd): from now on the agent can ask for this process's C stacks, and for what a handler "
     "of `signal` writes to `fd` (faulthandler.register)"},
    {"threads_rest", threads_rest, METH_VARARGS,
     "threads_rest(name, seconds, busy) -> bool: waits, without the GIL, until no thread of this process with this "
     "name "
     "runs or is ready to; whether that was seen within so many seconds, and before they used `busy` seconds of CPU "
     "time"},
    {NULL, NULL, 0, NULL}};

int even_ext_add_stacks(PyObject *module) {
  return PyModule_AddFunctions(module, functions);
}
