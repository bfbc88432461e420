/* What went wrong in a run while its ranks lived: hangs, numbers that are not finite, losses that jump, parameters that
 * differ, GPUs. By kind: how often, when first, what was said last, and whether it lasts. Pure. */
#ifndef EVEN_MONITOR_FAULTS_H
#define EVEN_MONITOR_FAULTS_H

#include "base/json_writer.h"
#include "base/text.h"
#include "monitor/state.h"

/* Takes an event that may be of a fault: a value above 0 begins one, 0 ends it, below 0 it is over when it is told. */
void even_faults_take(even_state_fault *faults, const even_state_event *event);
/* As its events are named. */
const char *even_faults_name(int kind);
/* A new attempt: what lasted does so no more. */
void even_faults_restart(even_state_fault *faults);
/* The words of a fault that lasts, NULL for none; of several kinds the first in the list. */
const char *even_faults_lasting(const even_state *state);
/* The words of a hang that lasts, NULL for none. */
const char *even_faults_hang(const even_state *state);
/* Which link is slow, NULL: none is. */
const char *even_faults_link(const even_state *state);
/* "2 hangs, the first at step 120; the last: …", a line each kind that there was, two blanks before it. */
void even_faults_lines(const even_state *state, even_text *out);
/* A member "faults": [{kind, count, first_step, lasts, rank, step, words}]. */
void even_faults_json(even_json *json, const even_state *state);

#endif
