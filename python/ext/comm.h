/* What the extension's files about groups share. */
#ifndef EVEN_EXT_COMM_H
#define EVEN_EXT_COMM_H

#include "data.h"
#include "ext.h"

#include "comm/waits.h"

#include <evenstep/comm_costs.h>
#include <evenstep/flight.h>
#include <stdbool.h>

/* _core.Comm */
typedef struct even_ext_comm {
  PyObject_HEAD even_comm *comm; /* NULL once freed */
  PyObject *view;                /* weak reference to the arena's view while that lives */
  Py_ssize_t handles;            /* capsules out */
  Py_ssize_t calls;              /* threads inside a call */
  Py_ssize_t messages;           /* _core.Request objects */
  size_t arena_bytes;
  PyObject *ring; /* what its calls are recorded in: a Telemetry's handle */
  PyObject *over; /* NULL, or what the group asks whether it is over: a capsule; of a group made of others, these */
  int closed;
} even_ext_comm;

/* The group, or NULL with an exception when it is closed. */
even_comm *even_ext_comm_open_group(even_ext_comm *self);
/* What the environment says of waiting. */
typedef struct even_ext_comm_patience {
  double stop_seconds;  /* EVENSTEP_STOP_GRACE */
  double stall_seconds; /* EVENSTEP_STALL_SECONDS */
} even_ext_comm_patience;

even_status even_ext_comm_patience_read(even_ext_comm_patience *out);
/* What every group of a Comm object is told: this patience, whom to ask where a call was made, whom to tell of a stall.
 */
void even_ext_comm_prepare(even_comm *comm, const even_ext_comm_patience *patience);
/* Tells of a stall: into the rank's output and its ring. Without the GIL, any thread. */
void even_ext_tell_stall(void *context, const char *words);
/* Calls of a flight record as a list of tuples; NULL with an exception. */
PyObject *even_ext_flight_list(const even_flight_call *calls, size_t count);
/* What keeps a Telemetry object's writer, which *out is (NULL: it writes nowhere); NULL with an exception. */
PyObject *even_ext_ring_handle(PyObject *ring, even_telemetry **out);
/* even_comm_close, which may wait for others, without the GIL. */
void even_ext_comm_close_group(even_comm *comm);
/* Frees the group that is closed when nothing looks at it any more. The GIL may be let go meanwhile: who calls it keeps
 * the object. */
void even_ext_comm_free_when_unused(even_ext_comm *self);

/* PyArg converter ("O&"): None, or the capsule of Generation.over, into a PyObject * (borrowed). */
int even_ext_to_over(PyObject *object, void *out);
/* What of it the group is told. */
void even_ext_comm_ask_over(PyObject *over, even_comm_params *params);
/* Lets groups between hosts hear which ranks of others stand still (standing.c). With the GIL held. */
void even_ext_ask_standing(void);

/* callers.c */
/* Imports what the two ask. With the GIL held. */
void even_ext_get_ready_to_ask(void);
/* As even_comm_site_call: where in Python this thread's call was made. Without the GIL. */
bool even_ext_ask_site(void *context, char *text, size_t bytes);
/* As even_waits_others_call: whether a thread of Python's may call that has not yet; yes where it cannot be told.
 * Without the GIL. */
even_waits_others even_ext_others_may_call(void *context);
/* This thread waits in C++ at the end of its backward, which was called in `frame`: it makes no calls until the wait is
 * over, which another thread says before it is, or that is no longer its innermost frame. With the GIL held. */
void even_ext_wait_in_backward(PyObject *frame);
void even_ext_end_wait_in_backward(void);
/* Whether this thread is inside a call from Python, and may be asked where. */
void even_ext_comes_from_python(bool comes);
/* The same of a call that another thread asked for, at `place` (of sites.py); NULL: it is over. */
void even_ext_comes_from(PyObject *place);

/* Around each call of the group: it is counted, and where it was made in Python is asked for if it fails. Ends with
 * None, or NULL with an exception. */
void even_ext_comm_begin(even_ext_comm *self);
PyObject *even_ext_comm_done(even_ext_comm *self, even_status status);

/* PyArg converter ("O&"): which elements the bytes are (comm/called.h), an unsigned below 2^16. */
int even_ext_to_elements(PyObject *object, void *out);

/* PyArg converter ("O&"): a size_t. */
static inline int even_ext_to_size(PyObject *object, void *out) {
  size_t value = PyLong_AsSize_t(object);
  if (value == (size_t)-1 && PyErr_Occurred() != NULL) {
    return 0;
  }
  memcpy(out, &value, sizeof value);
  return 1;
}

/* collectives.c */
/* A sequence of `ranks` numbers, or addresses, into a new array (even_free); NULL with an exception. */
size_t *even_ext_to_counts(PyObject *object, int ranks);
void **even_ext_to_parts(PyObject *object, int ranks);
PyObject *even_ext_comm_all_reduce(PyObject *object, PyObject *arguments);
PyObject *even_ext_comm_reduce_scatter(PyObject *object, PyObject *arguments);
PyObject *even_ext_comm_all_gather(PyObject *object, PyObject *arguments);
/* norm.c */
PyObject *even_ext_comm_norm_statistics(PyObject *object, PyObject *arguments);
PyObject *even_ext_comm_norm_sums(PyObject *object, PyObject *arguments);
/* collectives.c */
PyObject *even_ext_comm_all_to_all(PyObject *object, PyObject *arguments);
PyObject *even_ext_comm_broadcast(PyObject *object, PyObject *arguments);
PyObject *even_ext_comm_barrier(PyObject *object, PyObject *unused);

/* messages.c */
PyObject *even_ext_comm_send(PyObject *object, PyObject *arguments);
PyObject *even_ext_comm_receive(PyObject *object, PyObject *arguments);
int even_ext_add_request(PyObject *module);

/* hosts.c */
/* A caller's function that gathers the ranks' records: the context of even_ext_gather, which takes the GIL. */
typedef struct even_ext_gathering {
  PyObject *call;
  int ranks;
} even_ext_gathering;
even_status even_ext_gather(void *context, const void *mine, size_t bytes, void *all);
PyObject *even_ext_comm_open_ucx(PyObject *type, PyObject *arguments, PyObject *names);
PyObject *even_ext_comm_open_mpi(PyObject *type, PyObject *arguments, PyObject *names);
PyObject *even_ext_comm_open_hosts(PyObject *type, PyObject *arguments, PyObject *names);
PyObject *even_ext_lane_rank(PyObject *module, PyObject *arguments);
PyObject *even_ext_ucx_version(PyObject *module, PyObject *arguments);
PyObject *even_ext_mpi_version(PyObject *module, PyObject *arguments);
PyObject *even_ext_mpi_place(PyObject *module, PyObject *arguments);

/* costs.c */
/* The table of a CommCosts, NULL for None; false with an exception for anything else. */
bool even_ext_take_costs(PyObject *object, even_comm_costs **out);
PyObject *even_ext_comm_choose(PyObject *object, PyObject *arguments, PyObject *names);
PyObject *even_ext_comm_measure(PyObject *object, PyObject *arguments);
int even_ext_add_costs(PyObject *module);

/* call_queue.c */
/* An all-reduce for _core.CallQueue. */
typedef struct even_ext_queued {
  even_ext_comm *comm;
  even_ext_data data; /* open */
  int op;
} even_ext_queued;
/* What next() of the queue makes, and gives the token then; place: where it was asked for, of sites.py. The queue holds
 * all of these until then, the data are its own. 0, or -1 with an exception; the data are the caller's, then. */
int even_ext_queue_put(PyObject *queue, PyObject *token, PyObject *place, const even_ext_queued *call);
int even_ext_add_call_queue(PyObject *module);

/* reduce.c */
PyObject *even_ext_comm_all_reduce_data(PyObject *object, PyObject *arguments);
int even_ext_add_reduce(PyObject *module, PyObject *type_of_comm);

#endif
