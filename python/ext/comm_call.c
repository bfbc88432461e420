/* Around each call of _core.Comm: where in Python it was made, whom a stall is told, how long a group is patient. */
#include "comm.h"

#include "base/fail.h"
#include "comm/waits.h"

#include <evenstep/telemetry.h>
#include <stdlib.h>

/* This thread is inside a call from Python that has let the GIL go. */
static _Thread_local bool from_python;
/* Where another thread asked for the call; NULL: this one makes it for itself. */
static _Thread_local PyObject *asked_for_at;

/* The user's place, of sites.py. Only a thread that came from Python may take the GIL back: nobody who holds the GIL
 * waits for it. */
static bool ask_site(void *context, char *text, size_t bytes) {
  (void)context;
  if (!from_python) {
    return false;
  }
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *sites = PyImport_ImportModule("evenstep.sites");
  PyObject *place = NULL;
  if (sites != NULL) {
    place = asked_for_at == NULL ? PyObject_CallMethod(sites, "find", NULL)
                                 : PyObject_CallMethod(sites, "words_of", "(O)", asked_for_at);
  }
  PyObject *utf8 = place != NULL && PyUnicode_Check(place) ? PyUnicode_AsUTF8String(place) : NULL;
  bool known = utf8 != NULL;
  if (known) {
    (void)snprintf(text, bytes, "%s", PyBytes_AsString(utf8));
  }
  PyErr_Clear();
  Py_XDECREF(utf8);
  Py_XDECREF(place);
  Py_XDECREF(sites);
  PyGILState_Release(state);
  return known;
}

/* Whether another thread of Python's may call that has not yet (callers.py); yes where it cannot be asked. */
static bool ask_others(void *context) {
  (void)context;
  if (!from_python) {
    return true;
  }
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *callers = PyImport_ImportModule("evenstep.callers");
  PyObject *answer = callers == NULL ? NULL : PyObject_CallMethod(callers, "others_may_call", NULL);
  bool none = answer == Py_False;
  PyErr_Clear();
  Py_XDECREF(answer);
  Py_XDECREF(callers);
  PyGILState_Release(state);
  return !none;
}

/* What a rank's words go to beside its output: its ring, where `evenstep run` gave it one. */
static void tell_telemetry(const char *words) {
  even_event_record record = {.event = EVEN_EVENT_STALL, .at_ns = even_clock_ns()};
  even_event_record_words(&record, words);
  if (even_ext_ring() != NULL) {
    even_telemetry_event(even_ext_ring(), &record);
    return;
  }
  const char *fd = getenv("EVENSTEP_TELEMETRY_FD");
  const char *rank = getenv("RANK");
  even_telemetry *telemetry = NULL;
  if (fd == NULL || rank == NULL ||
      even_telemetry_open((int)strtol(fd, NULL, 10), (int)strtol(rank, NULL, 10), &telemetry) != EVEN_OK) {
    return;
  }
  even_telemetry_event(telemetry, &record);
  even_telemetry_close(telemetry);
}

/* Without the GIL, on any thread that makes collectives. */
void even_ext_tell_stall(void *context, const char *words) {
  (void)context;
  (void)fprintf(stderr, "evenstep: a collective stands still: %s\n", words);
  tell_telemetry(words);
}

/* A number of seconds from the environment, `otherwise` where there is none. */
static even_status read_seconds(const char *name, double otherwise, double *seconds) {
  const char *text = getenv(name);
  char *end = NULL;
  *seconds = text == NULL || text[0] == '\0' ? otherwise : strtod(text, &end);
  if (end != NULL && (*end != '\0' || !(*seconds >= 0))) {
    (void)even_fail(EVEN_ERR_ARGUMENT, "%s is '%.40s', no number of seconds", name, text);
    return even_error_fix("give seconds, like 0.5, or inf");
  }
  return EVEN_OK;
}

even_status even_ext_comm_patience_read(even_ext_comm_patience *out) {
  EVEN_TRY(read_seconds("EVENSTEP_STOP_GRACE", 0, &out->stop_seconds)); /* 0: the engine's own */
  return read_seconds("EVENSTEP_STALL_SECONDS", 60, &out->stall_seconds);
}

void even_ext_comm_prepare(even_comm *comm, const even_ext_comm_patience *patience) {
  even_comm_set_stop_grace(comm, patience->stop_seconds);
  even_comm_ask_site(comm, ask_site, NULL);
  even_waits_ask_others(ask_others, NULL);
  even_comm_on_stall(comm, patience->stall_seconds, even_ext_tell_stall, NULL);
}

void even_ext_comes_from_python(bool comes) {
  from_python = comes;
}

void even_ext_comes_from(PyObject *place) {
  from_python = place != NULL;
  asked_for_at = place;
}

void even_ext_comm_begin(even_ext_comm *self) {
  self->calls++;
  from_python = true;
}

PyObject *even_ext_comm_done(even_ext_comm *self, even_status status) {
  from_python = false;
  if (status != EVEN_OK) {
    (void)even_ext_raise(status); /* before a call of another thread's ends in another error */
  }
  self->calls--;
  even_ext_comm_free_when_unused(self);
  if (status != EVEN_OK) {
    return NULL;
  }
  Py_RETURN_NONE;
}
