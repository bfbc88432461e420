/* Edit distance over short names, no allocation. */
#include "base/nearest.h"

#include "base/checked.h"

#include <string.h>

enum { LONGEST = 63 };

static size_t distance(const char *a, size_t a_length, const char *b, size_t b_length) {
  size_t rows[3][LONGEST + 1];
  size_t *two_up = rows[0];
  size_t *up = rows[1];
  size_t *row = rows[2];
  for (size_t j = 0; j <= b_length; j++) {
    up[j] = j;
    two_up[j] = j;
  }
  for (size_t i = 1; i <= a_length; i++) {
    row[0] = i;
    for (size_t j = 1; j <= b_length; j++) {
      size_t change = up[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = even_least_size(change, even_least_size(up[j], row[j - 1]) + 1);
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = even_least_size(row[j], two_up[j - 2] + 1);
      }
    }
    size_t *spare = two_up;
    two_up = up;
    up = row;
    row = spare;
  }
  return up[b_length];
}

const char *even_nearest(const char *word, const char *const *candidates, size_t count) {
  size_t length = strlen(word);
  const char *best = NULL;
  size_t best_distance = length / 3 < 2 ? 3 : length / 3 + 1;
  if (length > LONGEST) {
    return NULL;
  }
  for (size_t i = 0; i < count; i++) {
    size_t candidate_length = strlen(candidates[i]);
    if (candidate_length > LONGEST) {
      continue;
    }
    size_t d = distance(word, length, candidates[i], candidate_length);
    if (d < best_distance && d < candidate_length) {
      best_distance = d;
      best = candidates[i];
    }
  }
  return best;
}
