/* A host's side of giving checkpoints back to its leader, which has lost its own, or is another one than before: says
 * which whole ones of the job it has (on its disk in the folders that the leader names, and what came to its memory),
 * and sends the one that the leader wants. What it sends stays here.
 *
 * SEEK, as JSON: {"serial", "folders": [...], "after", "job", "lineage", "until", "any", "copy"}: which have you that
 * are newer than the order "after", and are of that job, or of that training (lineage) and no newer than the order
 * "until" ("" says nothing of any of them), or anybody's (any)? Is anything left in the folder "copy", whole or not?
 * FOUND answers: {"serial", "found": [{"folder", "order", "sum", "memory", "mark"}, ...], "left"}: EVEN_BRING_BACK_MOST
 * at most. The mark is the same where hosts see the same folder, and "" where that cannot be told.
 * SEEK: {"serial", "send": FOLDER, "sum"}: send that one. It comes as parcels (EVEN_BRING_BACK_PARCEL), the manifest
 * first; where it does not, FOUND says why: {"serial", "status", "what", "fix"}.
 * SEEK: {"serial", "had": [...]}, before the manifest is acknowledged: of what is being sent the leader has these files
 * already, by their numbers from 1 on. */
#ifndef EVEN_ORCHESTRATOR_BRING_GIVE_H
#define EVEN_ORCHESTRATOR_BRING_GIVE_H

#include "orchestrator/bring.h"

/* So many of a host's the leader hears of: those of the greatest orders in each of its folders. */
enum { EVEN_BRING_BACK_MOST = 32 };

typedef struct even_bring_give even_bring_give;

/* `kept`, the caller's, says what came to this host's memory; `tell` frees the text. */
even_status even_bring_give_open(even_parcels *parcels, const even_bring_kept *kept,
                                 void (*tell)(void *context, even_text *text), void *context,
                                 even_bring_give **out) EVEN_MUST_USE;
/* The leader asks (SEEK). EVEN_ERR_INPUT: for nothing that can be understood. */
even_status even_bring_give_hear(even_bring_give *give, const json_t *content) EVEN_MUST_USE;
/* Before the parcels are closed; not in a call of theirs. NULL is allowed. */
void even_bring_give_close(even_bring_give *give);

#endif
