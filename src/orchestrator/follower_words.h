/* What an agent that serves another one says of its ranks, as messages' JSON. */
#ifndef EVEN_ORCHESTRATOR_FOLLOWER_WORDS_H
#define EVEN_ORCHESTRATOR_FOLLOWER_WORDS_H

#include "orchestrator/job.h"

/* A rank has ended: how, and the last of each stream of its output, one behind the other. */
void even_follower_words_end(const even_job *job, const even_job_rank *rank, even_text *json, even_text *tails);
/* As if a rank had been started, and ended by that signal. */
void even_follower_words_recalled(int rank, int signal, even_text *json);
/* The attempt that goes on here without a leader, under whom it ran (`led`): what it is, how many signals were passed
 * on in it, the newest generations, oldest first, and what the host has (JSON, as FACTS). */
void even_follower_words_attempt(const even_job *job, uint64_t led, uint64_t signals, const char *facts,
                                 even_text *json);
/* Nothing of the attempt is left: who of its ranks the kernel killed for lack of memory. */
void even_follower_words_settled(even_job *job, even_text *json);

#endif
