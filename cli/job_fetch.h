/* Brings a job's checkpoint from another place, before its ranks go on from it. */
#ifndef EVEN_CLI_JOB_FETCH_H
#define EVEN_CLI_JOB_FETCH_H

#include "cli/job.h"
#include "orchestrator/agent.h"

typedef struct even_job_fetcher {
  const char *python;                            /* --python; NULL: the one that is found */
  const char *url;                               /* where the job uploads; NULL: nowhere */
  void (*tell)(void *context, const char *text); /* what it does, a line at a time */
  void *context;
} even_job_fetcher;

/* So long a place may be asked, and nothing come of it: 120 s, or EVENSTEP_FETCH_TIMEOUT (`inf`: for ever).
 * EVEN_ERR_USAGE.
 */
even_status even_job_fetch_limit(double *seconds) EVEN_MUST_USE;

/* What the agent calls (even_agent_elsewhere); `fetcher` must last as long. */
even_agent_elsewhere even_job_elsewhere(even_job_fetcher *fetcher);

#endif
