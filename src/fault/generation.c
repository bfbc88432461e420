/* The segment: a header, then one block a rank. Words that grow, and one bell for all who sleep. */
#include "fault/generation.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/shared_memory.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#define MAGIC 0x6e65676e65766565u
#define VERSION 1u
enum { MOST_RANKS = 4096, UNSAID = 0, ABLE = 1, UNABLE = 2 };

typedef struct header {
  uint64_t magic;
  uint32_t version;
  uint32_t ranks;
  _Alignas(64) _Atomic uint32_t number; /* the newest generation */
  _Atomic uint32_t bell;                /* the futex: rung after each change of what follows, too */
  _Atomic uint32_t refused;
  _Atomic uint64_t place; /* generation << 32 | port of its meeting */
} header;

typedef struct block {
  _Alignas(64) _Atomic uint32_t lost_in; /* the first generation without it; 0: it is in all */
  _Atomic uint32_t able;                 /* written after `why` */
  char why[EVEN_GENERATION_WORDS];
} block;

struct even_generation {
  even_shared_memory memory;
  header *header;
  block *blocks;
};

static size_t bytes_of(uint32_t ranks) {
  return sizeof(header) + ranks * sizeof(block);
}

even_status even_generation_create(int ranks, int *fd) {
  even_shared_memory memory;
  *fd = -1;
  if (ranks < 1 || ranks > MOST_RANKS) {
    return even_fail(EVEN_ERR_ARGUMENT, "generations of %d ranks", ranks);
  }
  EVEN_TRY(even_shared_memory_create("evenstep-generation", bytes_of((uint32_t)ranks), &memory));
  header *head = memory.address;
  head->magic = MAGIC;
  head->version = VERSION;
  head->ranks = (uint32_t)ranks;
  *fd = memory.fd;
  memory.fd = -1;
  even_shared_memory_close(&memory);
  return EVEN_OK;
}

even_status even_generation_open(int fd, even_generation **out) {
  even_generation *generation = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&generation));
  even_status status = even_shared_memory_duplicate(fd, &generation->memory);
  if (status != EVEN_OK) {
    even_free(generation);
    return status;
  }
  const header *head = generation->memory.address;
  size_t there = generation->memory.bytes;
  if (there < sizeof *head || head->magic != MAGIC || head->version != VERSION || head->ranks < 1 ||
      head->ranks > MOST_RANKS || there < bytes_of(head->ranks)) {
    even_generation_close(generation);
    return even_fail(EVEN_ERR_INPUT, "descriptor %d holds no generations of this version", fd);
  }
  generation->header = generation->memory.address;
  generation->blocks = (block *)(void *)((unsigned char *)generation->memory.address + sizeof(header));
  *out = generation;
  return EVEN_OK;
}

void even_generation_close(even_generation *generation) {
  if (generation != NULL) {
    even_shared_memory_close(&generation->memory);
    even_free(generation);
  }
}

int even_generation_ranks(const even_generation *generation) {
  return (int)generation->header->ranks;
}

uint32_t even_generation_number(const even_generation *generation) {
  return atomic_load(&generation->header->number);
}

bool even_generation_has(const even_generation *generation, int rank, uint32_t number) {
  if (rank < 0 || (uint32_t)rank >= generation->header->ranks) {
    return false;
  }
  uint32_t lost_in = atomic_load(&generation->blocks[rank].lost_in);
  return lost_in == 0 || lost_in > number;
}

static void ring(even_generation *generation) {
  atomic_fetch_add(&generation->header->bell, 1u);
  even_futex_wake_all(&generation->header->bell);
}

bool even_generation_refused(const even_generation *generation) {
  return atomic_load(&generation->header->refused) != 0;
}

uint32_t even_generation_wait(even_generation *generation, uint32_t after, uint64_t timeout_ns) {
  uint64_t until = even_clock_ns() + timeout_ns;
  for (;;) {
    uint32_t bell = atomic_load(&generation->header->bell);
    uint32_t number = even_generation_number(generation);
    uint64_t now = even_clock_ns();
    if (number > after || even_generation_refused(generation) || now >= until) {
      return number;
    }
    even_futex_wait(&generation->header->bell, bell, until - now);
  }
}

void even_generation_say(even_generation *generation, int rank, const char *why) {
  if (rank < 0 || (uint32_t)rank >= generation->header->ranks) {
    return;
  }
  block *own = &generation->blocks[rank];
  size_t length = strnlen(why, EVEN_GENERATION_WORDS - 1);
  atomic_store(&own->able, UNSAID);
  memcpy(own->why, why, length);
  own->why[length] = '\0';
  atomic_store(&own->able, why[0] == '\0' ? ABLE : UNABLE);
}

void even_generation_meet(even_generation *generation, uint32_t number, uint32_t port) {
  atomic_store(&generation->header->place, (uint64_t)number << 32 | port);
  ring(generation);
}

uint32_t even_generation_port(even_generation *generation, uint32_t number, uint64_t timeout_ns) {
  uint64_t until = even_clock_ns() + timeout_ns;
  for (;;) {
    uint32_t bell = atomic_load(&generation->header->bell);
    uint64_t place = atomic_load(&generation->header->place);
    uint64_t now = even_clock_ns();
    if (place >> 32 == number) {
      return (uint32_t)place;
    }
    if (even_generation_number(generation) != number || even_generation_refused(generation) || now >= until) {
      return 0;
    }
    even_futex_wait(&generation->header->bell, bell, until - now);
  }
}

void even_generation_begin(even_generation *generation) {
  for (uint32_t rank = 0; rank < generation->header->ranks; rank++) {
    atomic_store(&generation->blocks[rank].lost_in, 0u);
    atomic_store(&generation->blocks[rank].able, UNSAID);
  }
  atomic_store(&generation->header->number, 0u);
  atomic_store(&generation->header->place, 0u);
  atomic_store(&generation->header->refused, 0u);
}

bool even_generation_able(const even_generation *generation, const bool *lost, int *rank,
                          char why[EVEN_GENERATION_WORDS]) {
  for (uint32_t each = 0; each < generation->header->ranks; each++) {
    const block *its = &generation->blocks[each];
    uint32_t able = atomic_load(&its->able);
    if (lost[each] || able == ABLE) {
      continue;
    }
    *rank = (int)each;
    const char *words = able == UNSAID ? "it is not training yet" : its->why;
    size_t length = strnlen(words, EVEN_GENERATION_WORDS - 1); /* the rank's words: not to be trusted to end */
    memcpy(why, words, length);
    why[length] = '\0';
    return false;
  }
  return true;
}

uint32_t even_generation_lose(even_generation *generation, const bool *lost) {
  uint32_t number = even_generation_number(generation) + 1;
  for (uint32_t rank = 0; rank < generation->header->ranks; rank++) {
    if (lost[rank] && atomic_load(&generation->blocks[rank].lost_in) == 0) {
      atomic_store(&generation->blocks[rank].lost_in, number);
    }
  }
  atomic_store(&generation->header->number, number);
  ring(generation);
  return number;
}

void even_generation_refuse(even_generation *generation) {
  atomic_store(&generation->header->refused, 1u);
  ring(generation);
}
