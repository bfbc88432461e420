/* A step under way on this rank, which its pieces, their gradients and the ranks' meetings share. */
#ifndef EVEN_OPTIM_WORK_H
#define EVEN_OPTIM_WORK_H

#include "optim/states.h"

typedef struct even_optim_work {
  even_optim *optim;
  const even_optim_job *job;
  even_optim_round round; /* in which pieces change */
  even_optim_round sums;  /* before it, where there is a norm: in which squares are added up, and parts first */
  size_t piece;           /* the one that this rank is at */
  double squares;         /* of it so far */
  char *kept;             /* where the next part of what is kept lies, or goes */
} even_optim_work;

/* Elements of one parameter that lie in one piece. */
typedef struct even_optim_range {
  size_t parameter;
  size_t first, count;
} even_optim_range;

/* What is done to each of a piece's ranges. */
typedef void even_optim_range_call(even_optim_work *of, even_optim_range where);
/* Calls `each` for those with a gradient; gives their elements. */
size_t even_optim_each_range(even_optim_work *of, size_t piece, even_optim_range_call *each);

/* Changes a piece, which this rank has taken; gives its elements. */
size_t even_optim_do_piece(even_optim_work *of, size_t piece);
/* What ranks that have ended may have torn of it. */
void even_optim_put_piece_back(even_optim_work *of, size_t piece);
/* This rank's values of a piece that another one did. */
void even_optim_take_piece(even_optim_work *of, size_t piece);

/* So many elements at a time, where something is formed of them that is used at once. */
#define EVEN_OPTIM_BLOCK ((size_t)2048)

/* How many elements of a range even_optim_gradient gives at once. */
size_t even_optim_gradient_most(const even_optim_work *of);
/* The whole gradient of a range of at most so many, in its own type, until the next call. */
const void *even_optim_gradient(const even_optim_work *of, even_optim_range where);
/* Squares of a piece, which this rank has taken in `sums`; where there are parts, their sums are this rank's from then
 * on. Gives 0: it changes no element. */
size_t even_optim_square_piece(even_optim_work *of, size_t piece);
/* The norm, once all ranks have all squares. */
double even_optim_norm(const even_optim_work *of);
/* Where the inputs lie so that their parts can be found. EVEN_ERR_ARGUMENT. */
even_status even_optim_check_parts(const even_optim *optim, const even_optim_job *job) EVEN_MUST_USE;

#endif
