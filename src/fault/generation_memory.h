/* The memory of generations: a header, one block a rank, then who was in each of the last generations. Words that the
 * agent or one rank writes, and one bell for all who sleep. */
#ifndef EVEN_FAULT_GENERATION_MEMORY_H
#define EVEN_FAULT_GENERATION_MEMORY_H

#include "fault/generation.h"

#include "os/futex.h"
#include "os/shared_memory.h"

#include <stdatomic.h>
#include <stddef.h>

typedef struct even_generation_header {
  uint64_t magic;
  uint32_t version;
  uint32_t ranks;
  _Alignas(64) _Atomic uint32_t number; /* the newest generation */
  _Atomic uint32_t bell;                /* the futex: rung after each change of what follows, too */
  _Atomic uint32_t refused;
  _Atomic uint32_t wish;
  _Atomic uint32_t takes_in;
  _Atomic uint32_t apart;
  _Atomic uint32_t same;  /* the newest generation with the members of the one before: written before `number` */
  _Atomic uint64_t place; /* generation << 32 | port of its meeting; 0 while the address is written */
  _Atomic uint64_t address[EVEN_GENERATION_ADDRESS / 8];
  _Atomic uint32_t bringer; /* the process that holds what was brought: written before `brought` */
  _Atomic uint64_t brought; /* generation << 32 | 1 + descriptor */
  _Atomic uint64_t ungiven; /* 1 + the generation of which it is true; written after `why` */
  char why[EVEN_GENERATION_WORDS];
} even_generation_header;

typedef struct even_generation_block {
  _Alignas(64) _Atomic uint32_t able; /* written after `why` */
  _Atomic uint32_t process;
  _Atomic uint32_t offers;
  _Atomic uint64_t early;   /* 1 + the calls before the one in which it is EARLY; written before `able` */
  _Atomic uint64_t stands;  /* 1 + the generation in which it does; 0: it does not */
  _Atomic uint64_t doubts;  /* the same */
  _Atomic uint64_t gift;    /* generation << 32 | 1 + descriptor */
  _Atomic uint64_t away;    /* 1 + the generation in which it gives to other hosts */
  _Atomic uint64_t took;    /* 1 + the generation of which it took the state */
  _Atomic uint64_t place;   /* generation << 32 | port of the meeting that it keeps for a set */
  _Atomic uint32_t changed; /* the newest generation in which it came or went: written before `number` */
  _Atomic uint32_t left;    /* its process comes to its end by itself */
  char why[EVEN_GENERATION_WORDS];
} even_generation_block;

struct even_generation {
  even_shared_memory memory;
  even_generation_header *header;
  even_generation_block *blocks;
  _Atomic uint8_t *members; /* a row of all ranks for each of the generations kept: written before `number` */
};

static inline _Atomic uint8_t *even_generation_row(const even_generation *generation, uint32_t number) {
  return generation->members + (size_t)(number % EVEN_GENERATIONS_KEPT) * generation->header->ranks;
}

static inline bool even_generation_is_rank(const even_generation *generation, int rank) {
  return rank >= 0 && (uint32_t)rank < generation->header->ranks;
}

/* Wakes all who sleep. */
static inline void even_generation_ring(even_generation *generation) {
  atomic_fetch_add(&generation->header->bell, 1u);
  even_futex_wake_all(&generation->header->bell);
}

#endif
