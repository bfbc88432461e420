/* Which checkpoint an attempt goes on from: of the job's folder, of its host's memory, of another place. */
#ifndef EVEN_ORCHESTRATOR_RESUME_H
#define EVEN_ORCHESTRATOR_RESUME_H

#include "orchestrator/job.h"

/* Before the first attempt: what lies in the folder and is none of the job's. Errors: those of reading it. */
even_status even_job_find_foreign(even_job *job) EVEN_MUST_USE;
/* Into job->resume the checkpoint that the next attempt begins from; empty: there is none. `restart`: an attempt of
 * this job, or of its leader before, has ended. Every checksum of what is found was compared. Where this host has none,
 * or the job begins here, what was uploaded is asked for, too (agent.h), and brought into the job's folder where it is
 * newer. Where the user asked for one (--resume) a line says what a job begins from. Errors: EVEN_ERR_CORRUPT (all are
 * damaged, and the job shall not begin anew for that), EVEN_ERR_NOT_FOUND (none is left here, and another host has a
 * copy), those of reading, of fetching where nothing else is left to go
 * on from, EVEN_ERR_INTERRUPTED. */
even_status even_job_find_resume(even_job *job, bool restart) EVEN_MUST_USE;
/* What is said behind its path: " (in memory)", or nothing. */
const char *even_job_resume_place(const even_job *job);

#endif
