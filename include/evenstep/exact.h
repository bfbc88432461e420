/* Gradients summed so that their bits depend on the blocks of the batch alone, not on which rank computed which.
 *
 * The global batch is cut into n blocks; block b's gradient counts with its weight w_b (its samples, say). What is
 * formed is (sum_b w_b g_b) / (sum_b w_b), the sum along one fixed binary tree: a node of level l has the blocks [i
 * 2^l, min((i + 1) 2^l, n)) and is its left half plus its right half (pairwise summation: Higham, "The Accuracy of
 * Floating Point Summation", 1993, section 3). A rank has a range of blocks and adds up what whole nodes lie in it, at
 * most 2 log2(n) of them; these alone travel, and each rank adds up one part of the elements along the rest of the
 * tree.
 *
 * Every operation is rounded once, on every instruction set: the product w_b g_b, each addition, the division. fp16 and
 * bf16 gradients are summed in fp32 and rounded once more at the end. Which of several NaNs results is not fixed. */
#ifndef EVENSTEP_EXACT_H
#define EVENSTEP_EXACT_H

#include <evenstep/comm.h>
#include <evenstep/sync.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct even_exact even_exact;

typedef struct even_exact_params {
  size_t size;                           /* sizeof(even_exact_params) */
  const even_sync_parameter *parameters; /* F32, F64, F16, BF16; `late` is not looked at */
  size_t parameter_count;
  size_t part_bytes; /* how much of the sums a rank works on at a time; 0: 256 KiB. The same on all ranks */
} even_exact_params;

/* Of one round, the same on all ranks but for the times. */
typedef struct even_exact_report {
  double weight; /* sum_b w_b, along the tree */
  double loss;   /* sum_b w_b loss_b / weight, along the tree; NaN where weight is 0 */
  uint64_t communication_ns;
  uint64_t peer_wait_ns; /* of it, waiting for peers to arrive */
  uint64_t bytes;        /* that this rank sent to others */
} even_exact_report;

/* Threads: one caller's, one call after the other. No pointer may be NULL but where it says so. */

/* `comm` NULL: this process alone has all blocks. Else the group, which can all_to_all, must outlive it, and is used
 * inside finish alone. Errors: EVEN_ERR_ARGUMENT, EVEN_ERR_MEMORY. */
EVEN_PUBLIC even_status even_exact_open(const even_exact_params *params, even_comm *comm,
                                        even_exact **out) EVEN_MUST_USE;
/* NULL is allowed. */
EVEN_PUBLIC void even_exact_close(even_exact *exact);

/* Opens a round, and ends one that was left: rank r has the counts[r] blocks (0 allowed) that come after those of the
 * ranks before it. The same counts on all ranks. EVEN_ERR_ARGUMENT (no block at all), EVEN_ERR_MEMORY. */
EVEN_PUBLIC even_status even_exact_begin(even_exact *exact, const size_t *counts) EVEN_MUST_USE;
/* This rank's next block: gradients[i] has the elements of parameter i, NULL: none, which counts as zeros. They may
 * change when it has returned. weight finite and >= 0; with 0 the block adds zeros, whatever its numbers are.
 * EVEN_ERR_ARGUMENT, EVEN_ERR_MEMORY, EVEN_ERR_STATE (no round, or all of this rank's blocks are there). */
EVEN_PUBLIC even_status even_exact_add(even_exact *exact, double weight, double loss,
                                       const void *const *gradients) EVEN_MUST_USE;
/* Closes the round; collective. targets[i] = parameter i's elements of the result, where used[i] (parameter_count
 * bytes) is 1: some block had a gradient for it; elsewhere the target stays as it is, and everywhere where the weights
 * add up to 0. `report` may be NULL. EVEN_ERR_STATE where blocks are missing (the group is revoked: peers wait), and
 * those of the collectives. */
EVEN_PUBLIC even_status even_exact_finish(even_exact *exact, void *const *targets, uint8_t *used,
                                          even_exact_report *report) EVEN_MUST_USE;

#ifdef __cplusplus
}
#endif
#endif
