/* What Raft promises of its members' logs (Ongaro and Ousterhout, figure 3), looked at from outside after whatever
 * happens to one of them: one leader in each term; where two logs have an entry of one place and term, they are alike
 * up to it; and of what is committed all have the same. The last for what was committed by an entry of the term in
 * which that happened: libraft counts copies of earlier ones, which nobody believes (leadership.h). */
#ifndef EVEN_TESTS_ORCHESTRATOR_RAFT_GUARANTEES_H
#define EVEN_TESTS_ORCHESTRATOR_RAFT_GUARANTEES_H

#include "orchestrator/voter_log.h"

/* Nothing was seen yet. */
void raft_guarantees_begin(void);
/* NULL: member number `i` (from 0 on, below 8) is as it must be; else what is wrong. */
const char *raft_guarantees_see(size_t i, const even_voter_log *log);
/* To the test's output, to the end of the line. */
void raft_guarantees_describe(const even_voter_log *log);

#endif
