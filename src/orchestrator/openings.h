/* Ranks that wait in torch's init_process_group of all ranks, and those for which they wait: as their rings say, and,
 * to an agent that serves a leader, as that says of all hosts. The leader says it again every second while it is so,
 * and nothing of it stays valid without: no change of leaders leaves anything behind. */
#ifndef EVEN_ORCHESTRATOR_OPENINGS_H
#define EVEN_ORCHESTRATOR_OPENINGS_H

#include "base/text.h"
#include "orchestrator/job.h"

#include <jansson.h>

/* An attempt begins. */
void even_job_openings_begin(even_job *job);
/* Reads what the ranks have said: sets job->openings.time and .waiting, by which those below go. */
void even_job_openings_look(even_job *job);
/* Whether it waits there. One that somebody stopped waits for nobody. */
bool even_job_opens(const even_job *job, size_t rank);
/* Whether others wait there, and it, a member, has not come. */
bool even_job_opening_misses(const even_job *job, size_t rank);
/* Of the agent that leads several hosts: tells the others, once a second. */
void even_job_openings_tick(even_job *job);

/* ---- what is in the message OPENING, as JSON ---- */

/* What is to be said now, which counts as said then; false: nothing. */
bool even_job_openings_write(even_job *job, uint64_t now_ns, even_text *out);
/* Takes it. EVEN_ERR_INPUT: nothing that a leader says. */
even_status even_job_openings_take(even_job *job, const json_t *content, uint64_t now_ns) EVEN_MUST_USE;

#endif
