/* Around each call of _core.Comm: whom a stall is told, how long a group is patient. */
#include "comm.h"

#include "base/fail.h"
#include "comm/peers.h"
#include "comm/waits.h"

#include <evenstep/telemetry.h>
#include <math.h>
#include <stdlib.h>

static const double MOST_BORNE_SECONDS = 1e9;

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
  double borne = 0;
  EVEN_TRY(read_seconds("EVENSTEP_STOP_GRACE", 0, &out->stop_seconds)); /* 0: the engine's own */
  EVEN_TRY(read_seconds("EVENSTEP_UNSEEN_SECONDS", 0, &borne));
  even_peers_bear_silence(borne > 0 ? (uint64_t)(fmin(borne, MOST_BORNE_SECONDS) * 1e9) : 0);
  return read_seconds("EVENSTEP_STALL_SECONDS", 60, &out->stall_seconds);
}

void even_ext_comm_prepare(even_comm *comm, const even_ext_comm_patience *patience) {
  even_comm_set_stop_grace(comm, patience->stop_seconds);
  even_ext_get_ready_to_ask();
  even_comm_ask_site(comm, even_ext_ask_site, NULL);
  even_waits_ask_others(even_ext_others_may_call, NULL);
  even_comm_on_stall(comm, patience->stall_seconds, even_ext_tell_stall, NULL);
}

void even_ext_comm_begin(even_ext_comm *self) {
  self->calls++;
  even_ext_comes_from_python(true);
}

PyObject *even_ext_comm_done(even_ext_comm *self, even_status status) {
  even_ext_comes_from_python(false);
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
