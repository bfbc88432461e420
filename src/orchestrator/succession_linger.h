/* How long a leader that has ended its job stays for those that may not have heard of it. */
#ifndef EVEN_ORCHESTRATOR_SUCCESSION_LINGER_H
#define EVEN_ORCHESTRATOR_SUCCESSION_LINGER_H

#include "orchestrator/voter.h"

/* By what is seen now; 0: for nobody. One that is missing waits for a majority since then, whoever else was missing
 * before; who has not confirmed yet that it got the word, at most since `begun_ns`, when it was first looked for. */
uint64_t even_succession_linger_until(const even_voter_view *view, uint64_t begun_ns, uint64_t patience_ns);

#endif
