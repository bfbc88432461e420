/* The fixed tree over the blocks of a batch: which of its nodes lie in a range, and in which order they are added up.
 * Pure: numbers in, numbers out. */
#ifndef EVEN_SYNC_TREE_H
#define EVEN_SYNC_TREE_H

#include <stdbool.h>
#include <stddef.h>

/* Blocks first … end - 1. A node of the tree over n blocks: first is a multiple of a power of two, which end - first
 * is, or less where end is n. */
typedef struct even_tree_node {
  size_t first;
  size_t end;
} even_tree_node;

/* nodes[to] += nodes[from], the left one first. */
typedef struct even_tree_addition {
  size_t to;
  size_t from;
} even_tree_addition;

/* No range of blocks has more nodes: two a level. */
enum { EVEN_TREE_MOST = 2 * 8 * sizeof(size_t) };

/* Whether the two, of which `right` begins where `left` ends, are the halves of a node of the tree over `blocks`. */
bool even_tree_are_halves(even_tree_node left, even_tree_node right, size_t blocks);
/* The fewest nodes that make up [first, end), from left to right, into nodes[EVEN_TREE_MOST]; returns how many. */
size_t even_tree_cut(size_t first, size_t end, size_t blocks, even_tree_node *nodes);
/* How `count` >= 1 nodes that make up the whole tree, from left to right, are added up into the first: count - 1
 * additions. Changes `nodes`; `stack` has room for `count` numbers. */
void even_tree_plan(even_tree_node *nodes, size_t count, size_t blocks, size_t *stack, even_tree_addition *additions);

#endif
