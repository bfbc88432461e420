/* What the members of a new generation agree on before they go on. Pure: numbers in, numbers out, the same on all.
 *
 * A step of training is one meeting of all ranks that commits it, the last before the optimizer applies it; a rank that
 * comes out of that meeting knows that all had come to it, whole gradients in hand. So where one survivor has come out,
 * the step stands, and those that were still inside come out too (two-phase commit, whose coordinator is any survivor:
 * Skeen, Nonblocking commit protocols, 1981; the dead have no vote). Where none has, no one has applied it: the pass is
 * void, and made again. Between steps ranks meet in calls (a barrier, an evaluation), of which the same is true; but a
 * call that needs what each rank gives fails on all.
 *
 * A process joins where all members stand between two steps, with the state of one of them; so it stands there, too.
 * They go on when all have met, itself among them: until then none has begun the next pass, and nothing is void.
 *
 * tests/fault/test_agree.c explores every interleaving of these with deaths. */
#ifndef EVEN_FAULT_AGREE_H
#define EVEN_FAULT_AGREE_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Where a rank stands. Each number only ever grows but for `passes`, which begin anew with each committed step. */
typedef struct even_position {
  uint64_t committed; /* steps whose meeting it has come out of */
  uint64_t passes;    /* void passes of the step after these that it has come to the end of */
  uint64_t calls;     /* other meetings that it has come out of */
  bool stands;        /* between two steps: it has begun nothing after these */
  bool asks;          /* in a meeting after these to which whoever is lost would have given something */
} even_position;

typedef struct even_agreement {
  /* Steps that stand. Who has one less is in the meeting of the last, and comes out of it. */
  uint64_t committed;
  /* So many first passes of the step after these are void on every member, whether begun or not. */
  uint64_t voids;
  /* Other meetings that are over. Who has one less is in the last, and gets what it gave from the giver. */
  uint64_t calls;
  size_t giver; /* index of a member that has come out of the last call */
  /* The meeting after these fails on every member, in it or not yet: what somebody asks for there is in no one's hands.
   * So it is over, too: each counts it among its calls from now on. */
  bool fails;
} even_agreement;

/* The agreement of members at these positions. EVEN_ERR_ARGUMENT: there are none; EVEN_ERR_MISMATCH: they are further
 * apart than ranks that make the same calls can be, so none may go on. */
even_status even_agree(const even_position *positions, size_t count, even_agreement *out) EVEN_MUST_USE;

#endif
