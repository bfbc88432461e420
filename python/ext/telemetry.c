/* _core.Telemetry and TelemetryReader: the rings from Python, and the clock that all spans use. */
#include "ext.h"
#include "objects.h"

#include <evenstep/telemetry.h>
#include <evenstep/types.h>
#include <math.h>

#include "os/clock.h"

typedef struct writer_object {
  PyObject_HEAD even_telemetry *telemetry;
} writer_object;

typedef struct reader_object {
  PyObject_HEAD even_telemetry_reader *reader;
} reader_object;

/* The last one that was made, and kept: groups record their calls in it until the process ends. */
static writer_object *ring_of_rank;

even_telemetry *even_ext_ring(void) {
  return ring_of_rank == NULL ? NULL : ring_of_rank->telemetry;
}

/* 0, or -1 with the exception. */
static int open_writer(writer_object *self, int fd, int rank) {
  even_status status = even_telemetry_open(fd, rank, &self->telemetry);
  if (status != EVEN_OK) {
    (void)even_ext_raise(status);
    return -1;
  }
  if (self->telemetry != NULL) {
    Py_INCREF((PyObject *)self);
    ring_of_rank = self;
  }
  return 0;
}

static PyObject *writer_open(PyObject *self, PyObject *arguments) {
  int fd = -1;
  int rank = 0;
  if (!PyArg_ParseTuple(arguments, "ii:open", &fd, &rank)) {
    return NULL;
  }
  if (((writer_object *)self)->telemetry != NULL) {
    PyErr_SetString(PyExc_ValueError, "this ring is open");
    return NULL;
  }
  if (open_writer((writer_object *)self, fd, rank) != 0) {
    return NULL;
  }
  Py_RETURN_NONE;
}

static PyObject *writer_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"fd", "rank", NULL};
  int fd = -1;
  int rank = 0;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "ii:Telemetry", keywords, &fd, &rank)) {
    return NULL;
  }
  writer_object *self = (writer_object *)even_ext_object_new(type);
  if (self == NULL) {
    return NULL;
  }
  if (fd >= 0 && open_writer(self, fd, rank) != 0) {
    Py_DECREF((PyObject *)self);
    return NULL;
  }
  return (PyObject *)self;
}

static void writer_dealloc(PyObject *self) {
  even_telemetry_close(((writer_object *)self)->telemetry);
  even_ext_object_free(self);
}

static PyObject *writer_span(PyObject *self, PyObject *arguments) {
  unsigned long long start = 0;
  unsigned long long duration = 0;
  unsigned long long bytes = 0;
  unsigned int span = 0;
  unsigned int step = 0;
  if (!PyArg_ParseTuple(arguments, "IIKK|K:span", &span, &step, &start, &duration, &bytes)) {
    return NULL;
  }
  if (span >= EVEN_SPAN_COUNT) {
    return PyErr_Format(PyExc_ValueError, "%u is no kind of span (0 to %d)", span, EVEN_SPAN_COUNT - 1);
  }
  const even_span_record record = {
      .step = step, .span = span, .start_ns = start, .duration_ns = duration, .bytes = bytes};
  even_telemetry_span(((writer_object *)self)->telemetry, &record);
  Py_RETURN_NONE;
}

static PyObject *writer_step(PyObject *self, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"step",    "epoch", "end_ns", "duration_ns",       "busy_ns",
                             "samples", "batch", "loss",   "predicted_seconds", NULL};
  unsigned long long end = 0;
  unsigned long long duration = 0;
  unsigned long long busy = 0;
  even_step_record record = {.loss = NAN, .predicted_seconds = NAN};
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "IIKKKII|ff:step", keywords, &record.step, &record.epoch, &end,
                                   &duration, &busy, &record.samples, &record.batch, &record.loss,
                                   &record.predicted_seconds)) {
    return NULL;
  }
  record.end_ns = end;
  record.duration_ns = duration;
  record.busy_ns = busy;
  even_telemetry_step(((writer_object *)self)->telemetry, &record);
  Py_RETURN_NONE;
}

static PyObject *writer_event(PyObject *self, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"event", "step", "value", "words", "at_ns", NULL};
  unsigned long long at = 0;
  long long value = 0;
  const char *words = "";
  even_event_record record = {.event = 0};
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "II|LsK:event", keywords, &record.event, &record.step, &value,
                                   &words, &at)) {
    return NULL;
  }
  if (record.event < EVEN_EVENT_SHARES || record.event > EVEN_EVENT_LAST || record.event == EVEN_EVENT_SCALAR) {
    return PyErr_Format(PyExc_ValueError, "%u is no kind of event (%d to %d)", record.event, EVEN_EVENT_SHARES,
                        EVEN_EVENT_LAST);
  }
  record.value = value;
  record.at_ns = at == 0 ? even_clock_ns() : at;
  even_event_record_words(&record, words);
  even_telemetry_event(((writer_object *)self)->telemetry, &record);
  Py_RETURN_NONE;
}

/* What another library has made, on the row of what moves gradients. */
static PyObject *writer_all_reduce(PyObject *self, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"group", "number", "ranks", "member", "dtype", "start_ns", "duration_ns", "bytes", NULL};
  unsigned long long start = 0;
  unsigned long long duration = 0;
  unsigned long long bytes = 0;
  int ranks = 0;
  int member = 0;
  int dtype = 0;
  even_call_record record = {.call = EVEN_RECORDED_ALL_REDUCE, .op = EVEN_SUM, .row = EVEN_ROW_ENGINE, .peer = -1};
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "IIiiiKKK:all_reduce", keywords, &record.group, &record.number,
                                   &ranks, &member, &dtype, &start, &duration, &bytes)) {
    return NULL;
  }
  record.ranks = (uint16_t)ranks;
  record.member = (uint16_t)member;
  record.dtype = dtype < 0 ? EVEN_CALL_NONE : (uint8_t)dtype;
  record.start_ns = start;
  record.duration_ns = duration;
  record.bytes = bytes;
  even_telemetry_call(((writer_object *)self)->telemetry, &record);
  Py_RETURN_NONE;
}

static PyObject *writer_wants_calls(PyObject *self, void *closure) {
  (void)closure;
  return PyBool_FromLong(even_telemetry_wants_calls(((writer_object *)self)->telemetry));
}

static PyObject *writer_scalar(PyObject *self, PyObject *arguments) {
  const char *name = NULL;
  even_event_record record = {.event = EVEN_EVENT_SCALAR};
  if (!PyArg_ParseTuple(arguments, "sId:scalar", &name, &record.step, &record.number)) {
    return NULL;
  }
  if (strlen(name) >= sizeof record.words) {
    return PyErr_Format(PyExc_ValueError, "a name of %zu bytes (at most %d)", strlen(name), EVEN_EVENT_WORDS_BYTES - 1);
  }
  record.at_ns = even_clock_ns();
  even_event_record_words(&record, name);
  even_telemetry_event(((writer_object *)self)->telemetry, &record);
  Py_RETURN_NONE;
}

static PyObject *writer_enter(PyObject *self, PyObject *argument) {
  long activity = PyLong_AsLong(argument);
  if (activity == -1 && PyErr_Occurred() != NULL) {
    return NULL;
  }
  if (activity < 0 || activity >= EVEN_ACTIVITY_COUNT) {
    return PyErr_Format(PyExc_ValueError, "%ld is no activity (0 to %d)", activity, EVEN_ACTIVITY_COUNT - 1);
  }
  even_telemetry_enter(((writer_object *)self)->telemetry, (even_activity)activity);
  Py_RETURN_NONE;
}

/* The capsule keeps the writer alive: its context is a reference to it. */
static void capsule_end(PyObject *capsule) {
  Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule));
}

static PyObject *writer_handle(PyObject *self, void *closure) {
  (void)closure;
  if (((writer_object *)self)->telemetry == NULL) {
    Py_RETURN_NONE;
  }
  PyObject *capsule = PyCapsule_New(((writer_object *)self)->telemetry, "evenstep.telemetry", capsule_end);
  if (capsule != NULL) {
    if (PyCapsule_SetContext(capsule, self) != 0) {
      Py_DECREF(capsule);
      return NULL;
    }
    Py_INCREF(self);
  }
  return capsule;
}

static int writer_pause(PyObject *self, PyObject *value, void *closure) {
  (void)closure;
  int paused = value == NULL ? -1 : PyObject_IsTrue(value);
  if (value == NULL) {
    PyErr_SetString(PyExc_AttributeError, "paused cannot be deleted");
  }
  if (paused < 0) {
    return -1;
  }
  even_telemetry_pause(((writer_object *)self)->telemetry, paused != 0);
  return 0;
}

static PyObject *writer_asks_end(PyObject *self, void *closure) {
  (void)closure;
  return PyBool_FromLong(even_telemetry_asks_end(((writer_object *)self)->telemetry));
}

static PyObject *reader_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"fd", NULL};
  int fd = -1;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "i:TelemetryReader", keywords, &fd)) {
    return NULL;
  }
  reader_object *self = (reader_object *)even_ext_object_new(type);
  if (self == NULL) {
    return NULL;
  }
  even_status status = even_telemetry_reader_open(fd, &self->reader);
  if (status != EVEN_OK) {
    Py_DECREF((PyObject *)self);
    return even_ext_raise(status);
  }
  return (PyObject *)self;
}

static void reader_dealloc(PyObject *self) {
  even_telemetry_reader_close(((reader_object *)self)->reader);
  even_ext_object_free(self);
}

static const char *const call_names[EVEN_RECORDED_COUNT] = {
#define CALL_NAME(name, number, text) [number] = text,
    EVEN_CALL_LIST(CALL_NAME)
#undef CALL_NAME
};

static PyObject *call_as_tuple(int rank, const even_call_record *call) {
  return Py_BuildValue("sisIIIiiiiiIKKKKN", "call", rank, call_names[call->call], call->step, call->group, call->number,
                       (int)call->ranks, (int)call->dtype, (int)call->op, (int)call->peer, (int)call->row,
                       (unsigned int)call->tag, (unsigned long long)call->start_ns,
                       (unsigned long long)call->duration_ns, (unsigned long long)call->wait_ns,
                       (unsigned long long)call->bytes, PyBool_FromLong(call->failed));
}

static PyObject *record_as_tuple(const even_record *record) {
  const even_span_record *span = &record->as.span;
  const even_step_record *step = &record->as.step;
  const even_event_record *event = &record->as.event;
  const even_leg_record *leg = &record->as.leg;
  int rank = (int)record->rank;
  switch (record->kind) {
    case EVEN_RECORD_CALL:
      return call_as_tuple(rank, &record->as.call);
    case EVEN_RECORD_LEG:
      return Py_BuildValue("siIIKIKK", "leg", rank, leg->own, leg->peer, (unsigned long long)leg->at_ns, leg->transfers,
                           (unsigned long long)leg->bytes, (unsigned long long)leg->ns);
    case EVEN_RECORD_SPAN:
      return Py_BuildValue("siIIKKK", "span", rank, span->span, span->step, (unsigned long long)span->start_ns,
                           (unsigned long long)span->duration_ns, (unsigned long long)span->bytes);
    case EVEN_RECORD_STEP:
      return Py_BuildValue("siIIKKKIIdd", "step", rank, step->step, step->epoch, (unsigned long long)step->end_ns,
                           (unsigned long long)step->duration_ns, (unsigned long long)step->busy_ns, step->samples,
                           step->batch, (double)step->loss, (double)step->predicted_seconds);
    default: {
      bool scalar = event->event == EVEN_EVENT_SCALAR;
      PyObject *value = scalar ? PyFloat_FromDouble(event->number) : PyLong_FromLongLong(event->value);
      PyObject *words = PyUnicode_DecodeUTF8(event->words, (Py_ssize_t)strlen(event->words), "replace");
      if (words == NULL || value == NULL) {
        Py_XDECREF(words);
        Py_XDECREF(value);
        return NULL;
      }
      return Py_BuildValue("siIIKNN", "event", rank, event->event, event->step, (unsigned long long)event->at_ns, value,
                           words);
    }
  }
}

static PyObject *reader_drain(PyObject *self, PyObject *unused) {
  enum { AT_ONCE = 64 };
  even_record records[AT_ONCE];
  uint64_t lost = 0;
  size_t count = 0;
  (void)unused;
  PyObject *list = PyList_New(0);
  if (list == NULL) {
    return NULL;
  }
  do {
    count = even_telemetry_reader_drain(((reader_object *)self)->reader, records, AT_ONCE, &lost);
    for (size_t i = 0; i < count; i++) {
      PyObject *tuple = record_as_tuple(&records[i]);
      if (tuple == NULL || PyList_Append(list, tuple) != 0) {
        Py_XDECREF(tuple);
        Py_DECREF(list);
        return NULL;
      }
      Py_DECREF(tuple);
    }
  } while (count == AT_ONCE);
  return Py_BuildValue("NK", list, (unsigned long long)lost);
}

static PyObject *reader_want_calls(PyObject *self, PyObject *wanted) {
  int truth = PyObject_IsTrue(wanted);
  if (truth < 0) {
    return NULL;
  }
  even_telemetry_reader_want_calls(((reader_object *)self)->reader, truth != 0);
  Py_RETURN_NONE;
}

static PyObject *reader_totals(PyObject *self, PyObject *arguments) {
  even_call_totals totals;
  int rank = 0;
  if (!PyArg_ParseTuple(arguments, "i:totals", &rank)) {
    return NULL;
  }
  even_telemetry_reader_totals(((reader_object *)self)->reader, rank, &totals);
  return Py_BuildValue("(KKKKKKK)", (unsigned long long)totals.collectives, (unsigned long long)totals.bytes,
                       (unsigned long long)totals.bus_bytes, (unsigned long long)totals.ns,
                       (unsigned long long)totals.wait_ns, (unsigned long long)totals.messages,
                       (unsigned long long)totals.message_bytes);
}

static PyObject *clock_ns(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  return PyLong_FromUnsignedLongLong(even_clock_ns());
}

static PyObject *telemetry_segment(PyObject *module, PyObject *arguments) {
  int ranks = 0;
  Py_ssize_t records = 0;
  int fd = -1;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "i|n:telemetry_segment", &ranks, &records)) {
    return NULL;
  }
  if (records < 0) {
    PyErr_SetString(PyExc_ValueError, "records must not be negative");
    return NULL;
  }
  even_status status = even_telemetry_create_segment(ranks, (size_t)records, &fd);
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  return PyLong_FromLong(fd);
}

static PyMethodDef writer_methods[] = {
    {"span", writer_span, METH_VARARGS, "span(kind, step, start_ns, duration_ns, bytes=0)"},
    {"step", (PyCFunction)(void (*)(void))writer_step, METH_VARARGS | METH_KEYWORDS,
     "step(step, epoch, end_ns, duration_ns, busy_ns, samples, batch, loss=nan, predicted_seconds=nan)"},
    {"event", (PyCFunction)(void (*)(void))writer_event, METH_VARARGS | METH_KEYWORDS,
     "event(event, step, value=0, words='', at_ns=now); what does not fit into SCALAR_NAME_BYTES is left out"},
    {"all_reduce", (PyCFunction)(void (*)(void))writer_all_reduce, METH_VARARGS | METH_KEYWORDS,
     "all_reduce(group, number, ranks, member, dtype, start_ns, duration_ns, bytes): of gradients, that another "
     "library "
     "has made; group: the mark of an EVENT_GROUP; dtype: DTYPE_…, or -1"},
    {"open", writer_open, METH_VARARGS, "open(fd, rank): a ring that was made with fd -1 writes there from now on"},
    {"enter", writer_enter, METH_O, "enter(activity): what this rank does from now on, one of AT_…"},
    {"scalar", writer_scalar, METH_VARARGS, "scalar(name, step, number); ValueError beyond SCALAR_NAME_BYTES"},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef writer_members[] = {
    {"handle", writer_handle, NULL, "capsule \"evenstep.telemetry\" for other parts of the engine; None without a ring",
     NULL},
    {"wants_calls", writer_wants_calls, NULL, "whether records of calls are wanted, and not only their sums", NULL},
    {"asks_end", writer_asks_end, NULL, "whether the ranks shall save their state after the step under way, and end",
     NULL},
    {"paused", NULL, writer_pause, "set it to write nothing for a while, the engine through the handle neither", NULL},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot writer_slots[] = {
    {Py_tp_new, (void *)writer_new},
    {Py_tp_dealloc, (void *)writer_dealloc},
    {Py_tp_methods, writer_methods},
    {Py_tp_getset, writer_members},
    {Py_tp_doc, "Telemetry(fd, rank): writes rank's ring in segment fd; with fd -1 every call does nothing."},
    {0, NULL}};
static PyType_Spec writer_spec = {"evenstep._core.Telemetry", sizeof(writer_object), 0, Py_TPFLAGS_DEFAULT,
                                  writer_slots};

static PyObject *reader_activity(PyObject *self, PyObject *argument) {
  even_rank_activity at;
  long rank = PyLong_AsLong(argument);
  if (rank == -1 && PyErr_Occurred() != NULL) {
    return NULL;
  }
  if (rank < 0 || rank >= even_telemetry_reader_ranks(((reader_object *)self)->reader)) {
    return PyErr_Format(PyExc_ValueError, "there is no ring of rank %ld", rank);
  }
  even_telemetry_reader_activity(((reader_object *)self)->reader, (int)rank, &at);
  return Py_BuildValue("iINN", (int)at.activity, at.count, PyBool_FromLong(at.stepped), PyBool_FromLong(at.ended));
}

static PyMethodDef reader_methods[] = {
    {"drain", reader_drain, METH_NOARGS, "drain() -> (records, lost): all new records as tuples (kind, rank, …)"},
    {"want_calls", reader_want_calls, METH_O, "want_calls(wanted): whether ranks write a record of each call"},
    {"activity", reader_activity, METH_O,
     "activity(rank) -> (activity, count, stepped, ended before) of its last enter()"},
    {"totals", reader_totals, METH_VARARGS,
     "totals(rank) -> (collectives, bytes, bus_bytes, ns, wait_ns, messages, message_bytes) of its calls"},
    {NULL, NULL, 0, NULL}};
static PyType_Slot reader_slots[] = {{Py_tp_new, (void *)reader_new},
                                     {Py_tp_dealloc, (void *)reader_dealloc},
                                     {Py_tp_methods, reader_methods},
                                     {Py_tp_doc, "TelemetryReader(fd): reads all rings of a segment."},
                                     {0, NULL}};
static PyType_Spec reader_spec = {"evenstep._core.TelemetryReader", sizeof(reader_object), 0, Py_TPFLAGS_DEFAULT,
                                  reader_slots};

static PyMethodDef functions[] = {
    {"clock_ns", clock_ns, METH_NOARGS, "The clock of all spans: CLOCK_MONOTONIC in nanoseconds."},
    {"telemetry_segment", telemetry_segment, METH_VARARGS,
     "telemetry_segment(ranks, records=0) -> fd of a new segment, owned by the caller"},
    {NULL, NULL, 0, NULL}};

int even_ext_add_telemetry(PyObject *module) {
  static const struct {
    const char *name;
    int number;
  } numbers[] = {
#define SPAN_NUMBER(name, number, text) {"SPAN_" #name, number},
      EVEN_SPAN_LIST(SPAN_NUMBER)
#undef SPAN_NUMBER
#define ACTIVITY_NUMBER(name, number, text) {"AT_" #name, number},
          EVEN_ACTIVITY_LIST(ACTIVITY_NUMBER)
#undef ACTIVITY_NUMBER
              {"EVENT_SHARES", EVEN_EVENT_SHARES},
      {"EVENT_CHECKPOINT", EVEN_EVENT_CHECKPOINT},
      {"EVENT_TOTAL_STEPS", EVEN_EVENT_TOTAL_STEPS},
      {"EVENT_EPOCH", EVEN_EVENT_EPOCH},
      {"EVENT_RESUME", EVEN_EVENT_RESUME},
      {"EVENT_MESSAGE", EVEN_EVENT_MESSAGE},
      {"EVENT_BALANCING", EVEN_EVENT_BALANCING},
      {"EVENT_COMPRESSION", EVEN_EVENT_COMPRESSION},
      {"EVENT_STALL", EVEN_EVENT_STALL},
      {"EVENT_JOINING", EVEN_EVENT_JOINING},
      {"EVENT_JOINED", EVEN_EVENT_JOINED},
      {"EVENT_SCALAR", EVEN_EVENT_SCALAR},
      {"EVENT_GROUP", EVEN_EVENT_GROUP},
      {"EVENT_MEMORY", EVEN_EVENT_MEMORY},
      {"EVENT_LEFT_OUT", EVEN_EVENT_LEFT_OUT},
      {"EVENT_GENERATION", EVEN_EVENT_GENERATION},
      {"EVENT_NONFINITE", EVEN_EVENT_NONFINITE},
      {"EVENT_PARAMETERS", EVEN_EVENT_PARAMETERS},
      {"EVENT_CHECKPOINTS_WAIT", EVEN_EVENT_CHECKPOINTS_WAIT},
      {"EVENT_SKIPPED", EVEN_EVENT_SKIPPED},
      {"EVENT_BATCH", EVEN_EVENT_BATCH},
      {"EVENT_OPENING", EVEN_EVENT_OPENING},
      {"EVENT_OPENED", EVEN_EVENT_OPENED},
      {"ROW_LATER", EVEN_ROW_LATER},
      {"SCALAR_NAME_BYTES", EVEN_EVENT_WORDS_BYTES - 1},
  };
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
    if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].number) != 0) {
      return -1;
    }
  }
  if (even_ext_add_type(module, "Telemetry", &writer_spec) == NULL ||
      even_ext_add_type(module, "TelemetryReader", &reader_spec) == NULL) {
    return -1;
  }
  return PyModule_AddFunctions(module, functions);
}
