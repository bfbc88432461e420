/* The fixed tree over the blocks of a batch. */
#include "sync/tree.h"

#include "base/checked.h"

bool even_tree_are_halves(even_tree_node left, even_tree_node right, size_t blocks) {
  size_t half = left.end - left.first;
  bool whole = (half & (half - 1)) == 0 && left.first % half == 0;
  return whole && (left.first / half) % 2 == 0 && right.end == even_least_size(left.end + half, blocks);
}

size_t even_tree_cut(size_t first, size_t end, size_t blocks, even_tree_node *nodes) {
  size_t count = 0;
  while (first < end) {
    size_t size = 1;
    while (size < blocks && first % (2 * size) == 0 && even_least_size(first + 2 * size, blocks) <= end) {
      size *= 2;
    }
    nodes[count] = (even_tree_node){first, even_least_size(first + size, blocks)};
    first = nodes[count++].end;
  }
  return count;
}

void even_tree_plan(even_tree_node *nodes, size_t count, size_t blocks, size_t *stack, even_tree_addition *additions) {
  size_t depth = 0;
  size_t made = 0;
  for (size_t i = 0; i < count; i++) {
    stack[depth++] = i;
    while (depth > 1 && even_tree_are_halves(nodes[stack[depth - 2]], nodes[stack[depth - 1]], blocks)) {
      size_t to = stack[depth - 2];
      size_t from = stack[--depth];
      nodes[to].end = nodes[from].end;
      additions[made++] = (even_tree_addition){to, from};
    }
  }
}
