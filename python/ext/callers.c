/* What is asked of Python in the middle of a call: where it was made, and whether another thread may make one. All of
 * it by functions written in C: the interpreter runs handlers of signals on the first thread between any two steps of
 * Python's own, and what they raise would be lost here, and what they call would find the group busy. (A hook of
 * sys.addaudithook that is written in Python is run all the same.) */
#include "comm.h"

#include <stdio.h>

/* This thread is inside a call from Python that has let the GIL go. */
static _Thread_local bool from_python;
/* Where another thread asked for the call; NULL: this one makes it for itself. */
static _Thread_local PyObject *asked_for_at;

void even_ext_comes_from_python(bool comes) {
  from_python = comes;
}

void even_ext_comes_from(PyObject *place) {
  from_python = place != NULL;
  asked_for_at = place;
}

/* ---- without a step of Python's ---- */

/* All of these return a new reference, or NULL, with no exception set. */
static PyObject *attribute(PyObject *object, const char *name) {
  PyObject *value = object == NULL ? NULL : PyObject_GetAttrString(object, name);
  PyErr_Clear();
  return value;
}

static PyObject *item(PyObject *dict, const char *name) {
  PyObject *value = dict != NULL && PyDict_Check(dict) ? PyDict_GetItemString(dict, name) : NULL;
  Py_XINCREF(value);
  return value;
}

/* One that is there: nothing is imported. */
static PyObject *attribute_of_module(const char *module, const char *name) {
  PyObject *found = item(PySys_GetObject("modules"), module);
  PyObject *value = attribute(found, name);
  Py_XDECREF(found);
  return value;
}

static PyObject *call(PyObject *function) {
  PyObject *value = function == NULL ? NULL : PyObject_CallObject(function, NULL);
  PyErr_Clear();
  return value;
}

static PyObject *call_of_module(const char *module, const char *name) {
  PyObject *function = attribute_of_module(module, name);
  PyObject *value = call(function);
  Py_XDECREF(function);
  return value;
}

/* Until Python 3.11 whoever makes an object may collect garbage, and so run its finalizers. Whether it was stopped. */
static bool stop_collector(void) {
  PyObject *enabled = call_of_module("gc", "isenabled");
  bool stops = enabled == Py_True;
  Py_XDECREF(enabled);
  if (stops) {
    Py_XDECREF(call_of_module("gc", "disable"));
  }
  return stops;
}

static void let_collector_go_on(bool stopped) {
  if (stopped) {
    Py_XDECREF(call_of_module("gc", "enable"));
  }
}

/* ---- frames ---- */

/* In place of `frame`, which it gives back. */
static PyObject *outer(PyObject *frame) {
  PyObject *back = attribute(frame, "f_back");
  Py_DECREF(frame);
  if (back == Py_None) {
    Py_DECREF(back);
    back = NULL;
  }
  return back;
}

static PyObject *module_name(PyObject *frame) {
  PyObject *globals = attribute(frame, "f_globals");
  PyObject *name = item(globals, "__name__");
  Py_XDECREF(globals);
  if (name != NULL && !PyUnicode_Check(name)) {
    Py_DECREF(name);
    name = NULL;
  }
  return name;
}

static bool is(PyObject *name, const char *words) {
  return name != NULL && PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, words) == 0;
}

typedef struct function_name {
  const char *module;
  const char *name; /* NULL: any */
} function_name;

static bool is_one_of(PyObject *frame, const function_name *functions, size_t count) {
  PyObject *module = module_name(frame);
  PyObject *code = attribute(frame, "f_code");
  PyObject *name = attribute(code, "co_name");
  bool found = false;
  for (size_t i = 0; i < count && !found; i++) {
    found = is(module, functions[i].module) && (functions[i].name == NULL || is(name, functions[i].name));
  }
  Py_XDECREF(name);
  Py_XDECREF(code);
  Py_XDECREF(module);
  return found;
}

#define IS_ONE_OF(frame, functions) is_one_of((frame), (functions), sizeof(functions) / sizeof *(functions))

/* ---- where a call was made ---- */

/* Whether the frame is none of the user's (sites.py). */
static bool is_beneath(PyObject *frame, PyObject *beneath, PyObject *dot) {
  PyObject *name = module_name(frame);
  PyObject *parts = name == NULL ? NULL : PyUnicode_Partition(name, dot);
  bool found = parts != NULL && PySequence_Contains(beneath, PyTuple_GetItem(parts, 0)) == 1;
  PyErr_Clear();
  Py_XDECREF(parts);
  Py_XDECREF(name);
  return found;
}

/* Not "%S" of the line: an int that is written looks for signals, too. */
static PyObject *words_of(PyObject *path, PyObject *line, PyObject *name) {
  long number = line == NULL || !PyLong_Check(line) ? -1 : PyLong_AsLong(line);
  if (number < 0 || path == NULL || !PyUnicode_Check(path) || name == NULL || !PyUnicode_Check(name)) {
    return NULL;
  }
  return PyUnicode_FromFormat("%U:%ld in %U", path, number, name);
}

/* "train.py:31 in step" of the user's frame; NULL: there is none. */
static PyObject *words_of_frame(void) {
  PyObject *beneath = attribute_of_module("evenstep.sites", "_BENEATH");
  PyObject *dot = PyUnicode_FromString(".");
  PyObject *frame = (PyObject *)PyEval_GetFrame();
  PyObject *words = NULL;
  Py_XINCREF(frame);
  while (frame != NULL && beneath != NULL && dot != NULL && is_beneath(frame, beneath, dot)) {
    frame = outer(frame);
  }
  if (frame != NULL && beneath != NULL && dot != NULL) {
    PyObject *code = attribute(frame, "f_code");
    PyObject *path = attribute(code, "co_filename");
    PyObject *name = attribute(code, "co_name");
    PyObject *line = attribute(frame, "f_lineno");
    words = words_of(path, line, name);
    Py_XDECREF(line);
    Py_XDECREF(name);
    Py_XDECREF(path);
    Py_XDECREF(code);
  }
  Py_XDECREF(frame);
  Py_XDECREF(dot);
  Py_XDECREF(beneath);
  return words;
}

/* Of a Place of sites.py. */
static PyObject *words_of_place(PyObject *place) {
  if (place == NULL || !PyTuple_Check(place) || PyTuple_Size(place) != 3) {
    return NULL;
  }
  return words_of(PyTuple_GetItem(place, 0), PyTuple_GetItem(place, 1), PyTuple_GetItem(place, 2));
}

static PyObject *words_of_site(void) {
  if (asked_for_at != NULL) {
    return words_of_place(asked_for_at);
  }
  PyObject *words = words_of_frame();
  if (words == NULL) {
    PyObject *submitted = attribute_of_module("evenstep.sites", "_submitted");
    PyObject *place = attribute(submitted, "place");
    words = words_of_place(place);
    Py_XDECREF(place);
    Py_XDECREF(submitted);
  }
  return words;
}

/* Only a thread that came from Python may take the GIL back: nobody who holds the GIL waits for it. */
bool even_ext_ask_site(void *context, char *text, size_t bytes) {
  (void)context;
  if (!from_python) {
    return false;
  }
  PyGILState_STATE state = PyGILState_Ensure();
  bool stopped = stop_collector();
  PyObject *words = words_of_site();
  PyObject *utf8 = words == NULL ? NULL : PyUnicode_AsUTF8String(words);
  bool known = utf8 != NULL;
  if (known) {
    (void)snprintf(text, bytes, "%s", PyBytes_AsString(utf8));
  }
  PyErr_Clear();
  Py_XDECREF(utf8);
  Py_XDECREF(words);
  let_collector_go_on(stopped);
  PyGILState_Release(state);
  return known;
}

/* ---- who else may call ---- */

/* Where a thread is while it waits: what it is goes by who called that. */
static const function_name waits[] = {{"threading", NULL}, {"queue", NULL}, {"selectors", NULL}, {"_weakrefset", NULL}};
static const function_name idle[] = {
    {"concurrent.futures.thread", "_worker"}, /* what it works at is called from there */
    {"evenstep.backend_work", "_work"},       /* the engine knows whether it is idle */
    {"evenstep.checkpoint_background", "_serve"},
    {"evenstep.group_end", "_serve"},
    {"multiprocessing.queues", "_feed"},
    {"torch.utils.data._utils.pin_memory", "_pin_memory_loop"},
    {"torch.utils.data._utils.pin_memory", "do_one_step"},
    {"tqdm._monitor", "run"},
};
/* Autograd's own threads call hooks meanwhile, and have no frame of Python's before they do. */
static const function_name backward[] = {{"torch.autograd.graph", "_engine_run_backward"},
                                         {"torch.autograd", "backward"}};

static bool never_calls(PyObject *frame) {
  Py_INCREF(frame);
  while (frame != NULL && IS_ONE_OF(frame, waits)) {
    frame = outer(frame);
  }
  bool never = frame != NULL && IS_ONE_OF(frame, idle);
  Py_XDECREF(frame);
  return never;
}

static bool runs_backward(PyObject *frame) {
  bool runs = false;
  Py_INCREF(frame);
  while (frame != NULL && !runs) {
    runs = IS_ONE_OF(frame, backward);
    frame = outer(frame);
  }
  Py_XDECREF(frame);
  return runs;
}

/* ---- the end of a backward (reducer_waits.py) ---- */

/* A thread that waits there rests on this word. */
static _Atomic uint32_t ends_over;
/* The frame that called its backward; NULL: none waits. With the GIL held. */
static PyObject *ends_in;

void even_ext_wait_in_backward(PyObject *frame) {
  PyObject *before = ends_in;
  Py_INCREF(frame);
  ends_in = frame;
  Py_XDECREF(before);
  even_waits_rest(&ends_over, atomic_load(&ends_over));
}

void even_ext_end_wait_in_backward(void) {
  PyObject *before = ends_in;
  atomic_fetch_add(&ends_over, 1u);
  ends_in = NULL;
  Py_XDECREF(before);
}

/* ---- who else may call, by the frames of all threads ---- */

/* Whether what a thread waits for (callers.py) is over: it goes on in a moment. */
static bool one_goes_on(PyObject *waiting) {
  PyObject *asked = PyDict_Values(waiting);
  bool goes_on = asked == NULL;
  for (Py_ssize_t i = 0; !goes_on && i < PyList_Size(asked); i++) {
    PyObject *done = call(PyList_GetItem(asked, i));
    goes_on = done != Py_False;
    Py_XDECREF(done);
  }
  PyErr_Clear();
  Py_XDECREF(asked);
  return goes_on;
}

/* torch.distributed.rpc's threads call what others ask them to. */
static bool rpc_runs(void) {
  PyObject *asked = attribute_of_module("torch._C._distributed_rpc", "_is_current_rpc_agent_set");
  PyObject *runs = call(asked);
  bool may = asked != NULL && runs != Py_False;
  Py_XDECREF(runs);
  Py_XDECREF(asked);
  return may;
}

/* Of all threads with a frame of Python's but this one, the first, and those that wait for another's call. The one that
 * is at the end of its backward has gone on where its innermost frame is another one. */
static bool one_may_call(PyObject *waiting, PyObject *first) {
  PyObject *frames = call(PySys_GetObject("_current_frames"));
  PyObject *thread = NULL;
  PyObject *frame = NULL;
  Py_ssize_t at = 0;
  bool ends = even_waits_rested_on(&ends_over);
  bool ended = false;
  bool may = frames == NULL || !PyDict_Check(frames);
  while (!may && PyDict_Next(frames, &at, &thread, &frame) != 0) {
    bool known = PyLong_AsUnsignedLong(thread) == PyThread_get_thread_ident() ||
                 PyObject_RichCompareBool(thread, first, Py_EQ) == 1 || PyDict_Contains(waiting, thread) == 1;
    if (ends && frame == ends_in) {
      ended = true;
    } else {
      may = runs_backward(frame) || (!known && !never_calls(frame));
    }
  }
  PyErr_Clear();
  Py_XDECREF(frames);
  return may || ended != ends;
}

even_waits_others even_ext_others_may_call(void *context) {
  (void)context;
  if (!from_python) {
    return EVEN_WAITS_OTHERS_UNKNOWN;
  }
  PyGILState_STATE state = PyGILState_Ensure();
  bool stopped = stop_collector();
  PyObject *waiting = attribute_of_module("evenstep.callers", "_waiting");
  PyObject *first = attribute_of_module("evenstep.callers", "_first");
  bool may = waiting == NULL || !PyDict_Check(waiting) || first == NULL || one_goes_on(waiting) || rpc_runs() ||
             one_may_call(waiting, first);
  Py_XDECREF(first);
  Py_XDECREF(waiting);
  let_collector_go_on(stopped);
  PyGILState_Release(state);
  return may ? EVEN_WAITS_OTHERS_MAY : EVEN_WAITS_OTHERS_NONE;
}

void even_ext_get_ready_to_ask(void) {
  static const char *const modules[] = {"evenstep.sites", "evenstep.callers"};
  for (size_t i = 0; i < sizeof modules / sizeof *modules; i++) {
    Py_XDECREF(PyImport_ImportModule(modules[i]));
    PyErr_Clear(); /* without them nothing is known */
  }
}
