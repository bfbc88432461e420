/* How many descriptors (open files, pipes) this process may hold at a time. */
#ifndef EVEN_OS_DESCRIPTORS_H
#define EVEN_OS_DESCRIPTORS_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stdint.h>

/* Raises the soft limit where `needed` and `spare` descriptors do not fit beside those that are open; where the hard
 * limit, which only root may raise, is too low for the spare ones, as far as it goes, and *tight is true. *before: the
 * soft limit that was, which children should have again (programs that call select(2) break with descriptors above
 * 1023); 0: nothing was changed. EVEN_ERR_SYSTEM where the hard limit is too low for the needed ones. */
even_status even_descriptors_raise(uint64_t needed, uint64_t spare, uint64_t *before, bool *tight) EVEN_MUST_USE;
/* Sets the soft limit; what is open stays open. False, with errno, where it cannot be. Allowed between fork and exec.
 */
bool even_descriptors_limit(uint64_t soft);

/* Before anything else is opened: a standard stream (0, 1, 2) that whoever started this process has closed becomes one
 * of /dev/null that cannot be used either, so that nothing else has its number and is read or written in its stead.
 * What cannot be opened stays closed. */
void even_descriptors_fill_standard(void);

#endif
