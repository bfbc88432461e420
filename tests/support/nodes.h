/* A host's NUMA nodes, made up: /sys/devices/system/node as a test writes it, and mbind(2) as it answers. */
#ifndef EVEN_TESTS_SUPPORT_NODES_H
#define EVEN_TESTS_SUPPORT_NODES_H

#include <stddef.h>

#define NODES_MOST_CALLS 256

/* One call of mbind that was made. */
typedef struct nodes_call {
  unsigned char *address;
  size_t bytes;
  int mode;
  int node; /* the only one of its mask; -1: it has none, or several */
  unsigned flags;
} nodes_call;

/* From now on `folder` (support/folder.h) is where /sys/devices/system/node is looked for. */
void nodes_lie_in(const char *folder);
/* From now on mbind does nothing, is noted, and fails with error_number where that is not 0; get_mempolicy says `mode`.
 */
void nodes_answer(int error_number, int mode);
/* How often mbind was called since nodes_answer, and its calls. */
size_t nodes_calls(const nodes_call **out);

#endif
