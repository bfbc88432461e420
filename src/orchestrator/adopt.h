/* A host that takes a leader's place goes on with the ranks that outlasted it (--recovery; docs/hosts.md). Its agent
 * has served that leader: the job that it kept (hold.h), with ranks that run, becomes the leader's. The hosts that came
 * say what they know; those that did not, the old leader's among them, are lost, and the others go on without their
 * ranks as after any loss. Ranks keep their numbers until the job begins anew. */
#ifndef EVEN_ORCHESTRATOR_ADOPT_H
#define EVEN_ORCHESTRATOR_ADOPT_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

/* Whether the attempt may go on: ranks of it wait on this host, and on all that came. All generations that any of them
 * knows are known here then. */
bool even_adopt_may(even_hosts *hosts);
/* Each host has the ranks that it had, those that are lost too. */
even_status even_adopt_hosts(even_hosts *hosts) EVEN_MUST_USE;
/* Whether the next attempt is one that runs. */
bool even_adopt_due(const even_hosts *hosts);
/* Where its ranks write their telemetry, the caller's from now on; -1: nowhere. */
int even_adopt_telemetry(even_hosts *hosts);
/* In place of even_job_open: the job that was kept, which even_job_close frees, also after a failure. */
even_status even_adopt_open(const even_agent_params *params, even_job **out) EVEN_MUST_USE;
/* In place of the start of its ranks: the other hosts hear who leads, and who is lost is missed. */
even_status even_adopt_ranks(even_job *job) EVEN_MUST_USE;

#endif
