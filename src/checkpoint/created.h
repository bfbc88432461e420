/* When a checkpoint was made, such that later ones of a folder always sort behind earlier ones. */
#ifndef EVEN_CHECKPOINT_CREATED_H
#define EVEN_CHECKPOINT_CREATED_H

#include <evenstep/status.h>
#include <stdint.h>

#define EVEN_CREATED_BYTES 96 /* room for 2026-01-31T23:59:59.123456Z, and for years of any size */

/* The wall clock in ns since 1970, or, where a checkpoint in `parent` says to be as new or newer (a clock that jumped
 * back), a microsecond behind the newest there. */
even_status even_checkpoint_now(const char *parent, uint64_t *out) EVEN_MUST_USE;
/* As it stands in a manifest: UTC, ISO 8601 with microseconds, sorts by time. */
void even_created_text(uint64_t created_ns, char text[EVEN_CREATED_BYTES]);

#endif
