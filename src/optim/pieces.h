/* The pieces of a step, and which rank does which: a word of shared memory for each says who has it in which step. */
#ifndef EVEN_OPTIM_PIECES_H
#define EVEN_OPTIM_PIECES_H

#include <evenstep/optim.h>
#include <stdatomic.h>

/* Large enough that to ask for one is nothing beside doing it (10 us), small enough that ranks end together. */
#define EVEN_OPTIM_PIECE ((size_t)16384)

/* Where it begins; it has EVEN_OPTIM_PIECE elements from there on, of as many parameters as it takes (the last one has
 * fewer). */
typedef struct even_optim_piece {
  size_t parameter;
  size_t first;
} even_optim_piece;

/* How many there are, and where each begins (`out`: room for so many). Parameters whose numbers all together are no
 * size: EVEN_ERR_OVERFLOW. */
even_status even_optim_pieces_count(const even_optim_params *params, size_t *out) EVEN_MUST_USE;
void even_optim_pieces_place(const even_optim_params *params, even_optim_piece *out);

/* Who takes which, in a step: `number` grows from step to step, and is the same on all ranks. */
typedef struct even_optim_round {
  _Atomic uint64_t *words; /* one a piece, zeros before the first step; shared */
  size_t pieces;
  uint64_t number;
  int rank, ranks;
  /* from here on its own: */
  int of; /* whose pieces it takes: first its own, from the first on, then those of the others, from the last on */
  size_t next;
} even_optim_round;

void even_optim_round_begin(even_optim_round *round);
/* Takes the next piece that nobody has; false where there is none. */
bool even_optim_round_take(even_optim_round *round, size_t *piece);
/* Whether this rank took it in this round. */
bool even_optim_round_is_own(const even_optim_round *round, size_t piece);
/* Who took it in this round, in which all were taken. */
int even_optim_round_who(const even_optim_round *round, size_t piece);
/* It has done the piece, as who asks for its holder sees. */
void even_optim_round_done(const even_optim_round *round, size_t piece);
/* Who has it in this round, and has not done it yet; -1: nobody. */
int even_optim_round_holder(const even_optim_round *round, size_t piece);
/* Takes it from its holder, who has ended; false where somebody else was sooner. */
bool even_optim_round_take_over(const even_optim_round *round, size_t piece, int holder);
/* What names this piece in this round. */
uint64_t even_optim_round_name(const even_optim_round *round, size_t piece);

#endif
