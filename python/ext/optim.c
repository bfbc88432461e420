/* _core.Optim: states of optimizers that the ranks of one host share. Parameters cross as addresses; what meets the
 * others releases the GIL. */
#include "comm.h"
#include "ext.h"
#include "objects.h"

#include <evenstep/optim.h>

#include "base/alloc.h"

typedef struct optim_object {
  PyObject_HEAD even_optim *optim; /* NULL where it could not be opened */
  PyObject *comm_handle;           /* a capsule: the group lives as long as it; NULL: alone, or closed */
  PyObject *view;                  /* weak reference to the memory's view while that lives: it keeps this object */
  even_optim_input *inputs;        /* of a step, one a parameter */
  size_t parameter_count;
  int ranks;
  int closed;
  int busy; /* a thread is inside a call */
} optim_object;

static int to_parameters(optim_object *self, PyObject *sequence, even_optim_parameter **out) {
  PyObject *list = PySequence_List(sequence);
  if (list == NULL) {
    return -1;
  }
  self->parameter_count = (size_t)PyList_Size(list);
  even_status status = EVEN_NEW_ARRAY(out, self->parameter_count);
  status = status == EVEN_OK ? EVEN_NEW_ARRAY(&self->inputs, self->parameter_count) : status;
  int failed = status != EVEN_OK;
  if (failed) {
    (void)even_ext_raise(status);
  }
  for (size_t i = 0; !failed && i < self->parameter_count; i++) {
    Py_ssize_t elements = 0;
    int dtype = 0;
    int states = 0;
    PyObject *item = PyList_GetItem(list, (Py_ssize_t)i); /* borrowed */
    failed = !PyTuple_Check(item) || !PyArg_ParseTuple(item, "nii", &elements, &dtype, &states) || elements < 0;
    if (failed && PyErr_Occurred() == NULL) {
      PyErr_Format(PyExc_ValueError, "parameter %zu is not (elements, dtype, states)", i);
    }
    (*out)[i] = (even_optim_parameter){.count = (size_t)elements, .dtype = (even_dtype)dtype, .states = states};
  }
  Py_DECREF(list);
  return failed ? -1 : 0;
}

/* A group's capsule, which keeps it, and the group; NULL and no error for None. */
static PyObject *to_group(PyObject *comm, even_comm **out) {
  *out = NULL;
  if (comm == Py_None) {
    return NULL;
  }
  PyObject *handle = PyObject_GetAttrString(comm, "handle");
  *out = handle == NULL ? NULL : PyCapsule_GetPointer(handle, "evenstep.comm");
  if (*out == NULL) {
    Py_CLEAR(handle);
  }
  return handle;
}

static int open_states(optim_object *self, PyObject *comm, const even_optim_params *params) {
  even_comm *group = NULL;
  self->comm_handle = to_group(comm, &group);
  if (PyErr_Occurred() != NULL) {
    return -1;
  }
  self->ranks = group == NULL ? 1 : even_comm_ranks(group);
  even_status status = EVEN_OK;
  Py_BEGIN_ALLOW_THREADS;
  status = even_optim_open(params, group, &self->optim);
  Py_END_ALLOW_THREADS;
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
    return -1;
  }
  return 0;
}

static PyObject *optim_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"parameters", "comm", "survives", NULL};
  PyObject *sequence = NULL;
  PyObject *comm = Py_None;
  int survives = 0;
  even_optim_params params = {.size = sizeof params};
  even_optim_parameter *parameters = NULL;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "O|Op:Optim", keywords, &sequence, &comm, &survives)) {
    return NULL;
  }
  optim_object *self = (optim_object *)even_ext_object_new(type);
  if (self == NULL) {
    return NULL;
  }
  params.survives = survives != 0;
  int failed = to_parameters(self, sequence, &parameters);
  if (failed == 0) {
    params.parameters = parameters;
    params.parameter_count = self->parameter_count;
    failed = open_states(self, comm, &params);
  }
  even_free(parameters);
  if (failed != 0) {
    Py_DECREF((PyObject *)self);
    return NULL;
  }
  return (PyObject *)self;
}

static void optim_dealloc(PyObject *object) {
  optim_object *self = (optim_object *)object;
  even_optim_close(self->optim);
  even_free(self->inputs);
  Py_CLEAR(self->comm_handle);
  even_ext_object_free(object);
}

/* ---- the memory: a view that keeps this object as long as it lives ---- */

static PyObject *view_died(PyObject *object, PyObject *reference) {
  (void)reference;
  Py_CLEAR(((optim_object *)object)->view); /* and with it what kept this object */
  Py_RETURN_NONE;
}
static PyMethodDef view_died_method = {"view_died", view_died, METH_O, NULL};

static PyObject *optim_memory(PyObject *object, PyObject *unused) {
  optim_object *self = (optim_object *)object;
  (void)unused;
  if (self->view != NULL) {
    PyObject *alive = PyWeakref_GetObject(self->view); /* borrowed */
    if (alive != NULL && alive != Py_None) {
      Py_INCREF(alive);
      return alive;
    }
  }
  PyObject *view =
      PyMemoryView_FromMemory(even_optim_memory(self->optim), (Py_ssize_t)even_optim_bytes(self->optim), PyBUF_WRITE);
  PyObject *callback = view == NULL ? NULL : PyCFunction_NewEx(&view_died_method, object, NULL);
  PyObject *reference = callback == NULL ? NULL : PyWeakref_NewRef(view, callback);
  Py_XDECREF(callback);
  if (reference == NULL) {
    Py_XDECREF(view);
    return NULL;
  }
  Py_XDECREF(self->view);
  self->view = reference;
  return view;
}

static PyObject *optim_offset(PyObject *object, PyObject *arguments) {
  optim_object *self = (optim_object *)object;
  Py_ssize_t parameter = 0;
  int state = 0;
  if (!PyArg_ParseTuple(arguments, "ni:offset", &parameter, &state)) {
    return NULL;
  }
  const char *place = parameter < 0 ? NULL : even_optim_state(self->optim, (size_t)parameter, state);
  if (place == NULL) {
    return PyErr_Format(PyExc_IndexError, "parameter %zd has no state %d", parameter, state);
  }
  return PyLong_FromSize_t((size_t)(place - (const char *)even_optim_memory(self->optim)));
}

/* ---- a step ---- */

/* A sequence of as many numbers as there are parameters, each through `set`. */
static int fill(optim_object *self, PyObject *sequence, const char *what,
                int (*set)(even_optim_input *input, unsigned long long value)) {
  PyObject *list = PySequence_List(sequence);
  int failed = list == NULL;
  if (!failed && (size_t)PyList_Size(list) != self->parameter_count) {
    PyErr_Format(PyExc_ValueError, "%zd %s for %zu parameters", PyList_Size(list), what, self->parameter_count);
    failed = 1;
  }
  for (size_t i = 0; !failed && i < self->parameter_count; i++) {
    unsigned long long value = PyLong_AsUnsignedLongLong(PyList_GetItem(list, (Py_ssize_t)i));
    failed = value == (unsigned long long)-1 && PyErr_Occurred() != NULL;
    if (!failed && set(&self->inputs[i], value) != 0) {
      PyErr_Format(PyExc_ValueError, "%s of parameter %zu: %llu", what, i, value);
      failed = 1;
    }
  }
  Py_XDECREF(list);
  return failed ? -1 : 0;
}

static int set_values(even_optim_input *input, unsigned long long value) {
  input->values = (void *)(uintptr_t)value;
  return 0;
}
static int set_gradient(even_optim_input *input, unsigned long long value) {
  input->gradient = (const void *)(uintptr_t)value;
  return 0;
}
static int set_rule(even_optim_input *input, unsigned long long value) {
  input->rule = (uint32_t)value;
  return value > UINT32_MAX;
}
static int set_step(even_optim_input *input, unsigned long long value) {
  input->step = value;
  return 0;
}

/* Free with even_free. */
static even_optim_rule *to_rules(PyObject *sequence, size_t *count) {
  PyObject *list = PySequence_List(sequence);
  even_optim_rule *rules = NULL;
  if (list == NULL) {
    return NULL;
  }
  *count = (size_t)PyList_Size(list);
  even_status status = EVEN_NEW_ARRAY(&rules, *count);
  int failed = status != EVEN_OK;
  if (failed) {
    (void)even_ext_raise(status);
  }
  for (size_t i = 0; !failed && i < *count; i++) {
    even_optim_rule *rule = &rules[i];
    int method = 0;
    int amsgrad = 0;
    int nesterov = 0;
    int maximize = 0;
    PyObject *item = PyList_GetItem(list, (Py_ssize_t)i); /* borrowed */
    failed = !PyTuple_Check(item) || !PyArg_ParseTuple(item, "idddddddppp", &method, &rule->lr, &rule->weight_decay,
                                                       &rule->momentum, &rule->dampening, &rule->beta1, &rule->beta2,
                                                       &rule->eps, &amsgrad, &nesterov, &maximize);
    if (failed && PyErr_Occurred() == NULL) {
      PyErr_Format(PyExc_ValueError, "rule %zu is no tuple", i);
    }
    rule->method = (even_optim_method)method;
    rule->amsgrad = amsgrad != 0;
    rule->nesterov = nesterov != 0;
    rule->maximize = maximize != 0;
  }
  Py_DECREF(list);
  if (failed) {
    even_free(rules);
    rules = NULL;
  }
  return rules;
}

/* What is called while a step waits, and what that raised first: also what a signal did that came meanwhile. */
typedef struct waiting {
  PyObject *call;
  PyObject *type;
  PyObject *value;
  PyObject *traceback;
} waiting;

static void call_waits(void *context) {
  waiting *waits = context;
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *result = PyObject_CallObject(waits->call, NULL);
  if (result == NULL && waits->type == NULL) {
    PyErr_Fetch(&waits->type, &waits->value, &waits->traceback);
  }
  PyErr_Clear();
  Py_XDECREF(result);
  PyGILState_Release(state);
}

static PyObject *optim_step(PyObject *object, PyObject *arguments) {
  optim_object *self = (optim_object *)object;
  PyObject *rule_list = NULL;
  PyObject *values = NULL;
  PyObject *gradients = NULL;
  PyObject *rule_of = NULL;
  PyObject *steps = NULL;
  PyObject *parts = Py_None;
  waiting waits = {.call = Py_None};
  even_optim_job job = {.size = sizeof job};
  even_optim_report report = {0};
  if (self->closed || self->busy) {
    PyErr_SetString(even_ext_error, self->closed ? "the optimizer's states are closed"
                                                 : "another thread is inside a step of this optimizer");
    return NULL;
  }
  if (!PyArg_ParseTuple(arguments, "OOOOO|OdO:step", &rule_list, &values, &gradients, &rule_of, &steps, &parts,
                        &job.max_norm, &waits.call)) {
    return NULL;
  }
  if (waits.call != Py_None) { /* the caller's arguments keep it */
    job.waits = call_waits;
    job.waits_context = &waits;
  }
  PyObject *handle = to_group(parts, &job.parts);
  even_optim_rule *rules = PyErr_Occurred() != NULL ? NULL : to_rules(rule_list, &job.rule_count);
  if (rules == NULL) {
    Py_XDECREF(handle);
    return NULL;
  }
  job.rules = rules;
  job.inputs = self->inputs;
  self->busy = 1; /* the sequences may run code of others */
  int failed = fill(self, values, "values", set_values) != 0 || fill(self, gradients, "gradients", set_gradient) != 0 ||
               fill(self, rule_of, "rules", set_rule) != 0 || fill(self, steps, "steps", set_step) != 0;
  even_status status = EVEN_OK;
  if (!failed) {
    even_ext_comes_from_python(true);
    Py_BEGIN_ALLOW_THREADS;
    status = even_optim_step(self->optim, &job, &report);
    Py_END_ALLOW_THREADS;
    even_ext_comes_from_python(false);
  }
  self->busy = 0;
  even_free(rules);
  Py_XDECREF(handle);
  if (failed) {
    return NULL;
  }
  if (waits.type != NULL) { /* the step is made, or has failed: a signal goes before either */
    PyErr_Restore(waits.type, waits.value, waits.traceback);
    return NULL;
  }
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  return Py_BuildValue("(KKKKKd)", (unsigned long long)report.elements, (unsigned long long)report.all,
                       (unsigned long long)report.update_ns, (unsigned long long)report.wait_ns,
                       (unsigned long long)report.copy_ns, report.norm);
}

static PyObject *optim_close(PyObject *object, PyObject *unused) {
  optim_object *self = (optim_object *)object;
  (void)unused;
  if (self->busy) {
    PyErr_SetString(even_ext_error, "a thread is inside a step of this optimizer");
    return NULL;
  }
  self->closed = 1;
  Py_CLEAR(self->comm_handle);
  Py_RETURN_NONE;
}

static PyObject *optim_bytes(PyObject *object, void *closure) {
  (void)closure;
  return PyLong_FromSize_t(even_optim_bytes(((optim_object *)object)->optim));
}
static PyObject *optim_ranks(PyObject *object, void *closure) {
  (void)closure;
  return PyLong_FromLong(((optim_object *)object)->ranks);
}

static PyMethodDef methods[] = {
    {"memory", optim_memory, METH_NOARGS,
     "All of it, writable. It stays as long as this view, also after close (slices do not count)."},
    {"offset", optim_offset, METH_VARARGS, "offset(parameter, state): where in the memory its numbers begin, in bytes"},
    {"step", optim_step, METH_VARARGS,
     "step(rules, values, gradients, rule_of, steps, parts=None, max_norm=0.0, waits=None): one step; collective where "
     "there is a group. Returns (elements, all, update_ns, wait_ns, copy_ns, norm)"},
    {"close", optim_close, METH_NOARGS, "leaves the group; the memory goes with its view"},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef properties[] = {{"bytes", optim_bytes, NULL, "of memory, once a host", NULL},
                                   {"ranks", optim_ranks, NULL, "that share it", NULL},
                                   {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, (void *)optim_new},
                              {Py_tp_dealloc, (void *)optim_dealloc},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, properties},
                              {Py_tp_doc, "States of optimizers that ranks share (include/evenstep/optim.h)."},
                              {0, NULL}};
static PyType_Spec spec = {"evenstep._core.Optim", sizeof(optim_object), 0, Py_TPFLAGS_DEFAULT, slots};

int even_ext_add_optim(PyObject *module) {
  if (even_ext_add_type(module, "Optim", &spec) == NULL) {
    return -1;
  }
  return PyModule_AddIntConstant(module, "OPTIM_SGD", EVEN_OPTIM_SGD) != 0 ||
                 PyModule_AddIntConstant(module, "OPTIM_ADAM", EVEN_OPTIM_ADAM) != 0 ||
                 PyModule_AddIntConstant(module, "OPTIM_ADAMW", EVEN_OPTIM_ADAMW) != 0
             ? -1
             : 0;
}
