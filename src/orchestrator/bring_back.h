/* The leader's side of having checkpoints brought back: a job whose copies lie on other hosts (copies.h) goes on from
 * the newest whole one on any host that is here, also where this host's disk or memory has lost its own, where another
 * host leads now, and where another agent goes on with the job. bring_give.h has what is said. */
#ifndef EVEN_ORCHESTRATOR_BRING_BACK_H
#define EVEN_ORCHESTRATOR_BRING_BACK_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

typedef struct even_bring_back even_bring_back;

/* Which are wanted. No text is NULL. */
typedef struct even_bring_back_wish {
  const char *after; /* newer than this order (info.order) of what is here; "": nothing whole is */
  const char *here;  /* that one: files of it that are the same are not sent. NULL: none */
  const char *job;   /* that this job wrote ("": none), */
  const char *lineage;
  const char *until; /* or that is of this training ("": of none), and no newer than this order ("": however new) */
  bool any;          /* or anybody's */
  bool trained;      /* there may be some: where nothing is here, what a lost host may have is missed */
} even_bring_back_wish;

/* Asks the hosts that are here, and brings the newest: *path (even_free) is where it lies here, in this host's memory
 * where it was in a host's, else in the job's folder of checkpoints; every checksum was compared. One that cannot be
 * brought is told, and the next best is taken. *path NULL: none is newer, or none could be brought (told, where
 * something is here). Waits for an answer for a minute, for what is on its way to a host now for as long as it moves,
 * and for a host that has all of it for five minutes; others are heard meanwhile. Where nothing is here, and nothing
 * could be brought, each lost host to whose disk a copy was sent (even_copies_of) is waited for, as where its agent is
 * started again for an attempt (even_hosts_await); where none can be started, it is not.
 * Errors, where nothing is here: EVEN_ERR_NOT_FOUND: there is one, and it could not be brought; EVEN_ERR_CORRUPT: all
 * that there are are damaged; EVEN_ERR_PEER_LOST: a host that may have one is lost, or does not answer, or not come to
 * the end of what it gets, meanwhile. EVEN_ERR_PEER_LOST also where another host leads by now
 * (even_succession_is_superseded): whatever is here, this one asks no more. EVEN_ERR_INTERRUPTED (the thread's
 * question), EVEN_ERR_MEMORY. */
even_status even_bring_back_newest(even_job *job, const even_bring_back_wish *wish, char **path) EVEN_MUST_USE;
/* Of these: what hosts say is heard until it is closed; each that is here, and has not answered, is asked. */
even_status even_bring_back_open(even_job *job, const even_bring_back_wish *wish, even_bring_back **out) EVEN_MUST_USE;
even_status even_bring_back_ask(even_bring_back *back) EVEN_MUST_USE;
void even_bring_back_close(even_bring_back *back);
/* What a host says (FOUND). */
even_status even_bring_back_hear(even_host_agent *agent, const json_t *content) EVEN_MUST_USE;
/* Whether that host's word is waited for. */
bool even_bring_back_awaits(const even_host_agent *agent);

/* ---- bring_back_refuse.c ---- */
/* EVEN_ERR_NOT_FOUND: the job is not begun anew, for that host has a checkpoint of it, `folder` there. `why`: it could
 * not be brought, with a leading separator, or "". */
even_status even_bring_back_refuse_anew(const even_job *job, const char *host, const char *folder, const char *why);
/* The same of one in that host's memory: of that nothing is left to be copied once the job has ended. */
even_status even_bring_back_refuse_memory(const even_job *job, const char *host, const char *folder, const char *why);
/* EVEN_ERR_CORRUPT: all that hosts have are damaged, this one among them. */
even_status even_bring_back_refuse_damaged(const char *host, const char *folder, const char *why);

#endif
