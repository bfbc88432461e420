/* "Did you mean …": the nearest of several names. */
#ifndef EVEN_BASE_NEAREST_H
#define EVEN_BASE_NEAREST_H

#include <stddef.h>

/* The candidate with the smallest edit distance to `word`, or NULL where none is
 * near (more than a third of the word's letters, at least two, would change).
 * Levenshtein 1966, with the swap of neighbours (Damerau). Any thread. */
const char *even_nearest(const char *word, const char *const *candidates, size_t count);

#endif
