/* Why a rank ended: from what the kernel said and what it printed last, to one line and an excerpt. Pure. */
#ifndef EVEN_FAULT_CAUSE_H
#define EVEN_FAULT_CAUSE_H

#include "base/text.h"
#include "fault/place.h"

#include <stdbool.h>
#include <stdint.h>

/* An end with code 0 that was none for the others. */
typedef enum even_fault_leave {
  EVEN_LEAVE_NONE,
  EVEN_LEAVE_BEFORE_JOINING, /* others wait for it in es.prepare, where it never was, */
  EVEN_LEAVE_BEFORE_OPENING, /* or in torch's init_process_group */
  EVEN_LEAVE_EARLY           /* others failed in a step that it did not take part in */
} even_fault_leave;

typedef struct even_fault_facts {
  int rank;
  const char *device; /* "cpu:0" */
  const char *host;
  long pid;
  bool stopped_by_agent; /* it was running when the agent ended it */
  bool stood_still;      /* somebody had stopped it (SIGSTOP), and it still stood when another rank failed */
  const char *lost;      /* why nothing is heard of its host any more; NULL: it is */
  const char *hung;      /* why the agent ended it for hanging ("no progress for 31 s in data"); NULL: it did not */
  const char *slow;      /* why the agent ended it for holding the others up; NULL: it did not */
  bool out_of_memory;    /* the kernel's out-of-memory killer chose it or a process below it */
  int signal;            /* that ended it, 0: it exited */
  int code;              /* with which it exited */
  even_fault_leave leave;
  bool steps_known;
  uint64_t steps; /* made before it ended, since the start of training */
  uint64_t peak_memory_bytes;
  uint32_t samples;  /* of its last step, 0: it made none, */
  uint32_t batch;    /* in which all ranks had so many */
  const char *error; /* its last output to stderr, any bytes */
  size_t error_length;
  const char *output; /* to stdout */
  size_t output_length;
} even_fault_facts;

/* The cause as one line, "rank 1 (cpu:1 on host, process 77) …", and the lines of its output that show it ("" when it
 * ended well). Errors: EVEN_ERR_MEMORY. */
even_status even_fault_explain(const even_fault_facts *facts, even_text *cause, even_text *excerpt) EVEN_MUST_USE;

/* Whether it ended for lack of memory: the kernel's out-of-memory killer chose it, or its own error says so. */
bool even_fault_is_of_memory(const even_fault_facts *facts);

/* Whether its last output says that it failed, or may have failed, only because another rank went away. */
bool even_fault_is_secondary(const even_fault_facts *facts);

/* What the error that ended it says of its place; of one that a signal, or its host's loss, ended: nothing. */
even_place_blame even_fault_blames_place(const even_fault_facts *facts);

/* Whether what the culprit of these ends failed of may be the fault of its place (a device, a core, its memory): a
 * signal that does not ask to end, a hang, an error that says so of its device; and no other rank failed of
 * its own. Not what others may do as well: an error of the script's, lack of memory, an end with code 0, a host that is
 * lost, a stop; not what another rank brought about. `culprit` == count: false. */
bool even_fault_is_of_place(const even_fault_facts *ends, size_t count, size_t culprit);

/* Which of the ranks failed first of its own accord: others fail, seconds later or even earlier, only because it went
 * away. That may be one that ended with code 0, but too early, where another one's failure is certainly for lack of it:
 * the caller then sets its `leave`. `ends` in the order in which they were seen. Returns `count` when none failed. */
size_t even_fault_culprit(const even_fault_facts *ends, size_t count);

#endif
