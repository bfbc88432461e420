/* Whether staged data are written into the caches or past them: learnt from what either cost. */
#ifndef EVEN_COMM_WRITING_H
#define EVEN_COMM_WRITING_H

#include "comm/group.h"

/* Before a stage of a staged collective: whether to write past the caches in it. `full`: the stage moves as much as any
 * other of its call, and so may be measured. Ranks may differ in the answer; they may not in `full`. */
bool even_writing_begin(even_comm *comm, bool full);
/* After the synchronisation that ends it; `bytes` say how large the stage was. */
void even_writing_end(even_comm *comm, size_t bytes);

/* How data are written that are not measured. */
static inline bool even_writing_goes_past(const even_comm *comm) {
  return comm->writing.forced == EVEN_WRITING_MEASURED ? comm->writing.past_caches
                                                       : comm->writing.forced == EVEN_WRITING_PAST;
}
/* "written through the caches (61 ns for 1 KB; past them 83)" */
void even_writing_describe(const even_comm *comm, char *text, size_t bytes);

/* A copy between memory and staging. */
void even_writing_copy(void *target, const void *source, size_t bytes, bool past_caches);

#endif
