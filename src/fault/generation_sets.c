#include "fault/generation_sets.h"

#include "fault/generation_memory.h"
#include "os/clock.h"

/* One that is being made, or whose agent was killed while it made it, is not there yet. */
static uint32_t later(uint32_t newest, uint32_t number, uint32_t all) {
  return number > newest && number <= all ? number : newest;
}

uint32_t even_generation_number_of(const even_generation *generation, const int *ranks, size_t count) {
  uint32_t all = even_generation_number(generation);
  uint32_t newest = later(0, atomic_load(&generation->header->same), all);
  for (size_t i = 0; i < count; i++) {
    if (even_generation_is_rank(generation, ranks[i])) {
      newest = later(newest, atomic_load(&generation->blocks[ranks[i]].changed), all);
    }
  }
  return newest;
}

void even_generation_meet_at(even_generation *generation, int rank, uint32_t number, uint32_t port) {
  if (even_generation_is_rank(generation, rank)) {
    atomic_store(&generation->blocks[rank].place, (uint64_t)number << 32 | port);
    even_generation_ring(generation);
  }
}

uint32_t even_generation_port_at(even_generation *generation, int rank, uint32_t number, uint32_t seen,
                                 uint64_t timeout_ns) {
  uint64_t until = even_clock_ns() + timeout_ns;
  if (!even_generation_is_rank(generation, rank)) {
    return 0;
  }
  for (;;) {
    uint32_t bell = atomic_load(&generation->header->bell);
    uint64_t place = atomic_load(&generation->blocks[rank].place);
    if (place >> 32 == number && (uint32_t)place != 0) {
      return (uint32_t)place;
    }
    uint64_t now = even_clock_ns();
    if (even_generation_number(generation) != seen || even_generation_refused(generation) || now >= until) {
      return 0;
    }
    even_futex_wait(&generation->header->bell, bell, until - now);
  }
}

void even_generation_train_apart(even_generation *generation) {
  atomic_store(&generation->header->apart, 1u);
}

bool even_generation_is_apart(const even_generation *generation) {
  return atomic_load(&generation->header->apart) != 0;
}

void even_generation_leave(even_generation *generation, int rank) {
  if (even_generation_is_rank(generation, rank)) {
    atomic_store(&generation->blocks[rank].left, 1u);
  }
}

bool even_generation_left(const even_generation *generation, int rank) {
  return even_generation_is_rank(generation, rank) && atomic_load(&generation->blocks[rank].left) != 0;
}
