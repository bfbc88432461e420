/* Whether /proc/locks can tell whose a lock is. */
#ifndef EVEN_TESTS_SUPPORT_LOCKS_H
#define EVEN_TESTS_SUPPORT_LOCKS_H

#include <stdbool.h>

/* Whether it shows a lock of this process on a folder in `parent` by the numbers that fstat(2) has: not on btrfs, some
 * of overlayfs, nor where there is no /proc/locks. Fails the test where it cannot be tried. */
bool locks_are_told(const char *parent);

#endif
