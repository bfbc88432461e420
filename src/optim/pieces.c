/* Pieces of a step: those of a rank lie side by side, the next step's where the last one's lay. */
#include "optim/pieces.h"

#include "base/checked.h"
#include "base/fail.h"

even_status even_optim_pieces_count(const even_optim_params *params, size_t *out) {
  size_t all = 0;
  for (size_t i = 0; i < params->parameter_count; i++) {
    if (!even_add_size(all, params->parameters[i].count, &all)) {
      return even_fail(EVEN_ERR_OVERFLOW, "the parameters together have more elements than memory can hold");
    }
  }
  *out = all / EVEN_OPTIM_PIECE + (all % EVEN_OPTIM_PIECE != 0);
  return EVEN_OK;
}

void even_optim_pieces_place(const even_optim_params *params, even_optim_piece *out) {
  size_t until = 0; /* elements before the next piece begins */
  for (size_t i = 0; i < params->parameter_count; i++) {
    size_t count = params->parameters[i].count;
    size_t at = until;
    for (; at < count; at += EVEN_OPTIM_PIECE) {
      *out++ = (even_optim_piece){.parameter = i, .first = at};
    }
    until = at - count;
  }
}

/* A word: in which step, whether it is done, and the rank. */
#define RANK_BITS 16
#define NUMBER_SHIFT (RANK_BITS + 1)
#define DONE ((uint64_t)1 << RANK_BITS)
#define WORD(number, rank) ((number) << NUMBER_SHIFT | (uint64_t)(rank))

static size_t first_of(const even_optim_round *round, int rank) {
  size_t ranks = (size_t)round->ranks;
  size_t own = (size_t)rank;
  return round->pieces / ranks * own + even_least_size(round->pieces % ranks, own);
}

void even_optim_round_begin(even_optim_round *round) {
  round->of = round->rank;
  round->next = first_of(round, round->rank);
}

static bool claim(even_optim_round *round, size_t piece) {
  _Atomic uint64_t *word = &round->words[piece];
  uint64_t was = atomic_load_explicit(word, memory_order_relaxed);
  /* What the piece is done to is published by the barrier, not by this word. */
  return was >> NUMBER_SHIFT < round->number &&
         atomic_compare_exchange_strong_explicit(word, &was, WORD(round->number, round->rank), memory_order_relaxed,
                                                 memory_order_relaxed);
}

/* On to the next rank's pieces; false when all were looked at. */
static bool turn_to_next(even_optim_round *round) {
  round->of = round->of + 1 == round->ranks ? 0 : round->of + 1;
  round->next = first_of(round, round->of + 1);
  return round->of != round->rank;
}

bool even_optim_round_take(even_optim_round *round, size_t *piece) {
  for (;;) {
    if (round->of == round->rank) {
      while (round->next < first_of(round, round->rank + 1)) {
        *piece = round->next++;
        if (claim(round, *piece)) {
          return true;
        }
      }
    } else {
      while (round->next > first_of(round, round->of)) {
        *piece = --round->next;
        if (claim(round, *piece)) {
          return true;
        }
      }
    }
    if (!turn_to_next(round)) {
      return false;
    }
  }
}

bool even_optim_round_is_own(const even_optim_round *round, size_t piece) {
  uint64_t word = atomic_load_explicit(&round->words[piece], memory_order_relaxed);
  return (word & ~DONE) == WORD(round->number, round->rank);
}

int even_optim_round_who(const even_optim_round *round, size_t piece) {
  return (int)(atomic_load_explicit(&round->words[piece], memory_order_relaxed) & (DONE - 1));
}

void even_optim_round_done(const even_optim_round *round, size_t piece) {
  atomic_store_explicit(&round->words[piece], WORD(round->number, round->rank) | DONE, memory_order_release);
}

int even_optim_round_holder(const even_optim_round *round, size_t piece) {
  uint64_t word = atomic_load_explicit(&round->words[piece], memory_order_acquire);
  bool is_due = word >> NUMBER_SHIFT == round->number && (word & DONE) == 0;
  return is_due ? (int)(word & (DONE - 1)) : -1;
}

bool even_optim_round_take_over(const even_optim_round *round, size_t piece, int holder) {
  uint64_t was = WORD(round->number, holder);
  return atomic_compare_exchange_strong_explicit(&round->words[piece], &was, WORD(round->number, round->rank),
                                                 memory_order_acquire, memory_order_relaxed);
}

uint64_t even_optim_round_name(const even_optim_round *round, size_t piece) {
  return round->number * round->pieces + piece;
}
