/* What is recorded of a group's calls, and where: around the engines' functions, once for all engines. Nothing but a
 * comparison where nobody asked for it. */
#ifndef EVEN_COMM_RECORDING_H
#define EVEN_COMM_RECORDING_H

#include <evenstep/comm.h>
#include <evenstep/telemetry.h>
#include <stdatomic.h>

/* Of a group; even_comm_record makes it, even_comm_close ends it. */
typedef struct even_recording {
  even_telemetry *telemetry;
  uint32_t group;  /* the mark of its name */
  uint32_t number; /* of the last collective; on the thread of the collectives */
  _Atomic uint32_t messages;
} even_recording;

/* A message under way: a part of every engine's request. */
typedef struct even_recorded_message {
  _Atomic(even_recording *) by; /* NULL: not recorded, or done */
  even_call_record record;
} even_recorded_message;

/* Makes or changes what is recorded of a group, whatever its engine; telemetry NULL: ends it. */
even_status even_recording_begin_as(even_recording **recording, even_telemetry *telemetry, const char *engine,
                                    int ranks, const char *name) EVEN_MUST_USE;
/* Begins to record the collective that the other members of *call describe, where the group is recorded, and a range of
 * its name, where somebody asked for ranges (os/ranges.h). */
void even_recording_begin(even_comm *comm, even_call_record *call);
/* The collective ended with `status`, which is returned. */
even_status even_recording_end(even_comm *comm, even_call_record *call, even_status status);

/* Begins to record a message that the engine has begun. */
void even_recording_message(even_comm *comm, even_comm_request *request, even_call_record call);
bool even_recording_has_message(even_comm_request *request);
/* Somebody has waited for it since `since_ns` (0: nobody did), and it is done, with `status` and the rank at the other
 * end. Later calls do nothing. */
void even_recording_message_done(even_comm_request *request, even_status status, int peer, uint64_t since_ns);

#endif
