/* Ranks that ran out of memory, over the attempts of a job: how many samples each may have from then on. Kept by host
 * and device, for numbers of ranks change with the hosts. Pure. */
#ifndef EVEN_ORCHESTRATOR_SHORTAGES_H
#define EVEN_ORCHESTRATOR_SHORTAGES_H

#include "base/text.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EVEN_SHORTAGES_MOST = 64, EVEN_SHORTAGES_PLACE = 96 };

typedef struct even_shortage {
  char place[EVEN_SHORTAGES_PLACE]; /* "host device", cut to fit */
  uint32_t most;                    /* samples of a step, 0: not known in samples, */
  uint32_t batch;                   /* in which all ranks together had so many (>= most) */
  uint32_t part;                    /* of what it would begin with: 1/part, where `most` is 0 */
} even_shortage;

typedef struct even_shortages {
  even_shortage items[EVEN_SHORTAGES_MOST];
  size_t count;
} even_shortages;

/* The rank on that device ran out of memory; in its last step it had so many samples of the `batch` that all ranks had
 * (0: it had made none). Half of that is what it may have from now on, and always less than before. *out: that, or NULL
 * where it can be no less: it had one, or there are too many such ranks. */
void even_shortages_note(even_shortages *list, const char *host, const char *device, uint32_t samples, uint32_t batch,
                         const even_shortage **out);
/* Adds "3:12/64" (at most 12 samples of a step with 64), or "3:/2" (half of what it would begin with), and a comma
 * before it where the text is not empty; nothing of a rank that never ran out. */
void even_shortages_add(const even_shortages *list, const char *host, const char *device, size_t rank, even_text *out);

#endif
