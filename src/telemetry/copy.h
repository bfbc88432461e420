/* Rings that are copies of those of another host. How far the other ring was taken lies beside the records, in the same
 * memory: whoever goes on with this one after its copier was killed asks for what comes behind, and nothing is missing.
 * A batch that was being copied is there twice. */
#ifndef EVEN_TELEMETRY_COPY_H
#define EVEN_TELEMETRY_COPY_H

#include <evenstep/telemetry.h>

/* All that was written there before this place (even_telemetry_reader_place) is in this ring; 0: of another ring, from
 * now on, nothing. NULL is allowed. */
void even_telemetry_copied(even_telemetry *ring, uint64_t place);
/* 0: nothing was copied, or `ring` is NULL. */
uint64_t even_telemetry_source(const even_telemetry *ring);

#endif
