/* A host's part in the attempt that follows, as its agent has it while another attempt runs: the devices for it, and
 * the processes that are started beforehand (warm.h). */
#ifndef EVEN_ORCHESTRATOR_WARM_PART_H
#define EVEN_ORCHESTRATOR_WARM_PART_H

#include "orchestrator/remote_start.h"
#include "orchestrator/warm.h"

struct even_legacy;

typedef struct even_warm_part {
  even_device_list own; /* of the ranks that it is to have; none: nothing is known of that */
  even_warm *warm;      /* NULL: no process was started */
  bool waits;           /* that its processes wait is not told yet */
  json_int_t number;    /* of the draining, which each answer repeats */
} even_warm_part;

/* The leader says what it is to be, or that it is none (PLACES). *answer: what it is to hear of that (PLACED).
 * EVEN_ERR_INPUT: that cannot be read. `interface`: the one over which hosts reach one another; `descriptors`: as of
 * even_process_params; `legacy`: that of an attempt whose ranks outlast their agent, which are marked by it. */
even_status even_warm_part_hear(even_warm_part *part, even_loop *loop, const char *interface, uint64_t descriptors,
                                const struct even_legacy *legacy, const json_t *content,
                                even_text *answer) EVEN_MUST_USE;
/* Whether there is something to say by now; once. */
bool even_warm_part_says(even_warm_part *part, even_text *answer);
/* An attempt of so many ranks begins: `own` are their devices then, where they were chosen for it. */
void even_warm_part_begins(even_warm_part *part, size_t count, even_device_list *own);
void even_warm_part_close(even_warm_part *part);

#endif
