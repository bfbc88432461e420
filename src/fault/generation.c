#include "fault/generation.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "fault/generation_memory.h"
#include "os/clock.h"

#include <string.h>

#define MAGIC 0x6e65676e65766565u
#define VERSION 8u
enum { MOST_RANKS = 4096, UNSAID = 0, ABLE = 1, UNABLE = 2, EARLY = 3, ADDRESS_WORDS = EVEN_GENERATION_ADDRESS / 8 };

static size_t bytes_of(uint32_t ranks) {
  return sizeof(even_generation_header) +
         ranks * (sizeof(even_generation_block) + EVEN_GENERATIONS_KEPT * sizeof(_Atomic uint8_t));
}

static void place_parts(even_generation *generation) {
  unsigned char *base = generation->memory.address;
  generation->header = generation->memory.address;
  generation->blocks = (even_generation_block *)(void *)(base + sizeof(even_generation_header));
  generation->members = (_Atomic uint8_t *)(void *)(base + sizeof(even_generation_header) +
                                                    generation->header->ranks * sizeof(even_generation_block));
}

even_status even_generation_create(int ranks, int *fd) {
  even_generation made = {.header = NULL};
  *fd = -1;
  if (ranks < 1 || ranks > MOST_RANKS) {
    return even_fail(EVEN_ERR_ARGUMENT, "generations of %d ranks", ranks);
  }
  EVEN_TRY(even_shared_memory_create("evenstep-generation", bytes_of((uint32_t)ranks), &made.memory));
  even_generation_header *head = made.memory.address;
  head->magic = MAGIC;
  head->version = VERSION;
  head->ranks = (uint32_t)ranks;
  place_parts(&made);
  even_generation_begin(&made, NULL);
  *fd = made.memory.fd;
  made.memory.fd = -1;
  even_shared_memory_close(&made.memory);
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
  const even_generation_header *head = generation->memory.address;
  size_t there = generation->memory.bytes;
  if (there < sizeof *head || head->magic != MAGIC || head->version != VERSION || head->ranks < 1 ||
      head->ranks > MOST_RANKS || there < bytes_of(head->ranks)) {
    even_generation_close(generation);
    return even_fail(EVEN_ERR_INPUT, "descriptor %d holds no generations of this version", fd);
  }
  place_parts(generation);
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
  return even_generation_is_rank(generation, rank) && atomic_load(&even_generation_row(generation, number)[rank]) != 0;
}

uint32_t even_generation_process(const even_generation *generation, int rank) {
  return even_generation_is_rank(generation, rank) ? atomic_load(&generation->blocks[rank].process) : 0;
}

void even_generation_retell(even_generation *generation) {
  even_generation_ring(generation);
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

/* ---- ranks ---- */

/* words: maybe a rank's, which are not to be trusted to end. */
static void copy_words(const char *words, char into[EVEN_GENERATION_WORDS]) {
  size_t length = strnlen(words, EVEN_GENERATION_WORDS - 1);
  memcpy(into, words, length);
  into[length] = '\0';
}

void even_generation_say(even_generation *generation, int rank, const char *why) {
  if (!even_generation_is_rank(generation, rank)) {
    return;
  }
  even_generation_block *own = &generation->blocks[rank];
  atomic_store(&own->able, UNSAID);
  copy_words(why, own->why);
  atomic_store(&own->able, why[0] == '\0' ? ABLE : UNABLE);
}

void even_generation_say_early(even_generation *generation, int rank, uint64_t early) {
  if (even_generation_is_rank(generation, rank)) {
    even_generation_block *own = &generation->blocks[rank];
    if (early == 0) { /* the number stays: who has just read that it is EARLY finds one */
      atomic_store(&own->able, UNSAID);
    } else {
      atomic_store(&own->early, early);
      atomic_store(&own->able, EARLY);
    }
  }
}

void even_generation_place(even_generation *generation, uint32_t number, uint32_t port, const char *address) {
  even_generation_header *head = generation->header;
  uint64_t words[ADDRESS_WORDS] = {0};
  if (atomic_load(&head->place) >> 32 > number) {
    return;
  }
  memcpy(words, address, strnlen(address, EVEN_GENERATION_ADDRESS - 1));
  atomic_store(&head->place, 0u);
  for (size_t i = 0; i < ADDRESS_WORDS; i++) {
    atomic_store(&head->address[i], words[i]);
  }
  atomic_store(&head->place, (uint64_t)number << 32 | port);
  even_generation_ring(generation);
}

void even_generation_meet(even_generation *generation, uint32_t number, uint32_t port) {
  even_generation_place(generation, number, port, "");
}

/* Whether the place of that generation is known, and did not change while it was read. */
static bool read_place(const even_generation_header *head, uint32_t number, uint32_t *port,
                       char address[EVEN_GENERATION_ADDRESS]) {
  uint64_t words[ADDRESS_WORDS];
  uint64_t place = atomic_load(&head->place);
  if (place >> 32 != number || (uint32_t)place == 0) {
    return false;
  }
  for (size_t i = 0; i < ADDRESS_WORDS; i++) {
    words[i] = atomic_load(&head->address[i]);
  }
  memcpy(address, words, EVEN_GENERATION_ADDRESS);
  address[EVEN_GENERATION_ADDRESS - 1] = '\0';
  *port = (uint32_t)place;
  return atomic_load(&head->place) == place;
}

uint32_t even_generation_port(even_generation *generation, uint32_t number, uint64_t timeout_ns,
                              char address[EVEN_GENERATION_ADDRESS]) {
  uint64_t until = even_clock_ns() + timeout_ns;
  uint32_t port = 0;
  for (;;) {
    uint32_t bell = atomic_load(&generation->header->bell);
    if (read_place(generation->header, number, &port, address)) {
      return port;
    }
    uint64_t now = even_clock_ns();
    if (even_generation_number(generation) != number || even_generation_refused(generation) || now >= until) {
      address[0] = '\0';
      return 0;
    }
    even_futex_wait(&generation->header->bell, bell, until - now);
  }
}

even_generation_wish even_generation_wished(const even_generation *generation) {
  return (even_generation_wish)atomic_load(&generation->header->wish);
}

void even_generation_stand(even_generation *generation, int rank, uint32_t number) {
  if (even_generation_is_rank(generation, rank)) {
    atomic_store(&generation->blocks[rank].stands, (uint64_t)number + 1);
  }
}

void even_generation_doubt(even_generation *generation, int rank, uint32_t number) {
  if (even_generation_is_rank(generation, rank)) {
    atomic_store(&generation->blocks[rank].doubts, (uint64_t)number + 1);
  }
}

void even_generation_offer(even_generation *generation, int rank) {
  if (even_generation_is_rank(generation, rank)) {
    atomic_store(&generation->blocks[rank].offers, 1u);
  }
}

void even_generation_give(even_generation *generation, int rank, uint32_t number, int fd) {
  if (even_generation_is_rank(generation, rank)) {
    atomic_store(&generation->blocks[rank].gift, (uint64_t)number << 32 | ((uint32_t)fd + 1));
    even_generation_ring(generation);
  }
}

/* Whether the word names a descriptor, of that generation. */
static bool read_place_of_gift(uint64_t gift, uint32_t number, int *fd) {
  *fd = (int)((uint32_t)gift - 1);
  return (uint32_t)gift != 0 && gift >> 32 == number;
}

bool even_generation_gift(const even_generation *generation, int rank, uint32_t number, uint32_t *process, int *fd) {
  if (!even_generation_has(generation, rank, number) ||
      !read_place_of_gift(atomic_load(&generation->blocks[rank].gift), number, fd)) {
    return false;
  }
  *process = even_generation_process(generation, rank);
  return true;
}

bool even_generation_given(const even_generation *generation, uint32_t number, uint32_t *process, int *fd) {
  for (uint32_t rank = 0; rank < generation->header->ranks; rank++) {
    if (even_generation_gift(generation, (int)rank, number, process, fd)) {
      return true;
    }
  }
  uint64_t brought = atomic_load(&generation->header->brought);
  *process = atomic_load(&generation->header->bringer); /* written before, and another one after `brought` is 0 again */
  return read_place_of_gift(brought, number, fd) && atomic_load(&generation->header->brought) == brought;
}

bool even_generation_gives_away(const even_generation *generation, int rank, uint32_t number) {
  return even_generation_is_rank(generation, rank) &&
         atomic_load(&generation->blocks[rank].away) == (uint64_t)number + 1;
}

bool even_generation_ungiven(const even_generation *generation, uint32_t number, char why[EVEN_GENERATION_WORDS]) {
  const even_generation_header *head = generation->header;
  if (atomic_load(&head->ungiven) != (uint64_t)number + 1) {
    return false;
  }
  memcpy(why, head->why, EVEN_GENERATION_WORDS);
  why[EVEN_GENERATION_WORDS - 1] = '\0';
  return true;
}

void even_generation_take(even_generation *generation, int rank, uint32_t number) {
  if (even_generation_is_rank(generation, rank)) {
    atomic_store(&generation->blocks[rank].took, (uint64_t)number + 1);
  }
}

/* ---- the agent ---- */

static void forget(even_generation_block *its) {
  atomic_store(&its->able, UNSAID);
  atomic_store(&its->early, 0u);
  atomic_store(&its->process, 0u);
  atomic_store(&its->offers, 0u);
  atomic_store(&its->stands, 0u);
  atomic_store(&its->doubts, 0u);
  atomic_store(&its->gift, 0u);
  atomic_store(&its->away, 0u);
  atomic_store(&its->took, 0u);
  atomic_store(&its->place, 0u);
  atomic_store(&its->left, 0u);
}

void even_generation_begin(even_generation *generation, const bool *members) {
  for (uint32_t rank = 0; rank < generation->header->ranks; rank++) {
    forget(&generation->blocks[rank]);
    atomic_store(&generation->blocks[rank].changed, 0u);
    atomic_store(&even_generation_row(generation, 0)[rank], members == NULL || members[rank] ? 1 : 0);
  }
  atomic_store(&generation->header->number, 0u);
  atomic_store(&generation->header->apart, 0u);
  atomic_store(&generation->header->same, 0u);
  atomic_store(&generation->header->place, 0u);
  atomic_store(&generation->header->refused, 0u);
  atomic_store(&generation->header->wish, EVEN_WISH_NOTHING);
  atomic_store(&generation->header->brought, 0u);
  atomic_store(&generation->header->ungiven, 0u);
}

void even_generation_let_in(even_generation *generation) {
  atomic_store(&generation->header->takes_in, 1u);
}

bool even_generation_takes_in(const even_generation *generation) {
  return atomic_load(&generation->header->takes_in) != 0;
}

void even_generation_vacate(even_generation *generation, int rank) {
  if (even_generation_is_rank(generation, rank)) {
    forget(&generation->blocks[rank]);
  }
}

void even_generation_started(even_generation *generation, int rank, uint32_t process) {
  if (even_generation_is_rank(generation, rank)) {
    atomic_store(&generation->blocks[rank].process, process);
  }
}

/* The call before es.prepare in which it is, or was when it ended; 0: it was in none. Who trains has come to all of
 * them. */
static uint64_t early_call(const even_generation_block *its) {
  switch (atomic_load(&its->able)) {
    case ABLE:
      return UINT64_MAX;
    case EARLY:
      return atomic_load(&its->early);
    default:
      return 0;
  }
}

/* Of the lost members one without which others in a call before es.prepare cannot go on, which have come to
 * the call `furthest`; -1: none. */
static int awaited(const even_generation *generation, const bool *lost, uint64_t furthest, const char **why) {
  uint32_t number = even_generation_number(generation);
  bool main = true;
  for (uint32_t each = 0; each < generation->header->ranks; each++) {
    if (!even_generation_has(generation, (int)each, number)) {
      continue;
    }
    if (lost[each] && main) {
      *why = "it may alone have the values that all begin with, which es.prepare had not given to the others yet";
      return (int)each;
    }
    if (lost[each] && early_call(&generation->blocks[each]) < furthest) {
      *why = "it was in the script's own code before es.prepare, for which the others may wait in their call";
      return (int)each;
    }
    main = false;
  }
  return -1;
}

bool even_generation_able(const even_generation *generation, const bool *lost, int *rank,
                          char why[EVEN_GENERATION_WORDS]) {
  uint64_t furthest = 0; /* of the calls before es.prepare in which others wait */
  for (uint32_t each = 0; each < generation->header->ranks; each++) {
    const even_generation_block *its = &generation->blocks[each];
    uint32_t able = atomic_load(&its->able);
    uint64_t early = able == EARLY && !lost[each] ? atomic_load(&its->early) : 0;
    furthest = early > furthest ? early : furthest;
    if (lost[each] || able == ABLE || able == EARLY) {
      continue;
    }
    *rank = (int)each;
    copy_words(
        able == UNSAID ? "it is not training yet, and in no call of Evenstep's that could be made again" : its->why,
        why);
    return false;
  }
  const char *words = NULL;
  int needed = furthest > 0 ? awaited(generation, lost, furthest, &words) : -1;
  if (needed < 0) {
    return true;
  }
  *rank = needed;
  copy_words(words, why);
  return false;
}

/* Makes it the newest, when its members are written. */
static void turn_to(even_generation *generation, uint32_t number) {
  uint32_t before = even_generation_number(generation);
  bool same = true;
  for (uint32_t rank = 0; rank < generation->header->ranks; rank++) {
    bool was = even_generation_has(generation, (int)rank, before);
    if (even_generation_has(generation, (int)rank, number) != was) {
      atomic_store(&generation->blocks[rank].changed, number);
      same = false;
    }
  }
  if (same) {
    atomic_store(&generation->header->same, number);
  }
  atomic_store(&generation->header->number, number);
  even_generation_ring(generation);
}

/* The members of the newest, without `lost`, and with `joining`; either may be NULL. */
static uint32_t make(even_generation *generation, const bool *lost, const bool *joining) {
  uint32_t before = even_generation_number(generation);
  for (uint32_t rank = 0; rank < generation->header->ranks; rank++) {
    bool in = even_generation_has(generation, (int)rank, before) && !(lost != NULL && lost[rank]);
    in = in || (joining != NULL && joining[rank]);
    atomic_store(&even_generation_row(generation, before + 1)[rank], in ? 1 : 0);
  }
  turn_to(generation, before + 1);
  return before + 1;
}

uint32_t even_generation_lose(even_generation *generation, const bool *lost) {
  return make(generation, lost, NULL);
}

uint32_t even_generation_grow(even_generation *generation, const bool *joining) {
  even_generation_ask(generation, EVEN_WISH_NOTHING);
  return make(generation, NULL, joining);
}

bool even_generation_offers(const even_generation *generation, int rank) {
  return even_generation_is_rank(generation, rank) && atomic_load(&generation->blocks[rank].offers) != 0 &&
         !even_generation_has(generation, rank, even_generation_number(generation));
}

bool even_generation_stands(const even_generation *generation, int rank) {
  uint32_t number = even_generation_number(generation);
  return even_generation_has(generation, rank, number) &&
         atomic_load(&generation->blocks[rank].stands) == (uint64_t)number + 1;
}

bool even_generation_doubts(const even_generation *generation, int rank) {
  uint32_t number = even_generation_number(generation);
  return even_generation_has(generation, rank, number) &&
         atomic_load(&generation->blocks[rank].doubts) == (uint64_t)number + 1;
}

void even_generation_ask(even_generation *generation, even_generation_wish wish) {
  atomic_store(&generation->header->wish, (uint32_t)wish);
}

void even_generation_refuse(even_generation *generation) {
  atomic_store(&generation->header->refused, 1u);
  even_generation_ring(generation);
}

void even_generation_ask_away(even_generation *generation, int rank, uint32_t number) {
  if (even_generation_is_rank(generation, rank)) {
    atomic_store(&generation->blocks[rank].away, (uint64_t)number + 1);
  }
}

void even_generation_bring(even_generation *generation, uint32_t number, uint32_t process, int fd) {
  even_generation_header *head = generation->header;
  atomic_store(&head->brought, 0u);
  atomic_store(&head->bringer, process);
  atomic_store(&head->brought, (uint64_t)number << 32 | ((uint32_t)fd + 1));
  even_generation_ring(generation);
}

void even_generation_fail_bringing(even_generation *generation, uint32_t number, const char *why) {
  even_generation_header *head = generation->header;
  if (atomic_load(&head->ungiven) == (uint64_t)number + 1) {
    return; /* the first reason is it */
  }
  atomic_store(&head->ungiven, 0u);
  copy_words(why, head->why);
  atomic_store(&head->ungiven, (uint64_t)number + 1);
  even_generation_ring(generation);
}

bool even_generation_took(const even_generation *generation, int rank, uint32_t number) {
  return even_generation_is_rank(generation, rank) && atomic_load(&generation->blocks[rank].took) > number;
}

/* ---- agents of several hosts ---- */

void even_generation_hear(const even_generation *generation, int rank, even_generation_words *out) {
  *out = (even_generation_words){.said = false};
  if (!even_generation_is_rank(generation, rank)) {
    return;
  }
  const even_generation_block *its = &generation->blocks[rank];
  uint32_t able = atomic_load(&its->able);
  out->said = able == ABLE || able == UNABLE;
  out->early = able == EARLY ? atomic_load(&its->early) : 0;
  out->offers = atomic_load(&its->offers) != 0;
  out->stands = atomic_load(&its->stands);
  out->took = atomic_load(&its->took);
  out->doubts = atomic_load(&its->doubts);
  if (able == UNABLE) {
    copy_words(its->why, out->why);
  }
}

void even_generation_repeat(even_generation *generation, int rank, const even_generation_words *words) {
  if (!even_generation_is_rank(generation, rank)) {
    return;
  }
  even_generation_block *its = &generation->blocks[rank];
  if (words->said) {
    even_generation_say(generation, rank, words->why);
  } else {
    even_generation_say_early(generation, rank, words->early);
  }
  atomic_store(&its->offers, words->offers ? 1u : 0u);
  atomic_store(&its->stands, words->stands);
  atomic_store(&its->took, words->took);
  atomic_store(&its->doubts, words->doubts);
}

static void follow(even_generation *generation, uint32_t number, const bool *members) {
  for (uint32_t rank = 0; rank < generation->header->ranks; rank++) {
    atomic_store(&even_generation_row(generation, number)[rank], members[rank] ? 1 : 0);
  }
  turn_to(generation, number);
}

bool even_generation_follow(even_generation *generation, uint32_t number, const bool *members) {
  if (number != even_generation_number(generation) + 1) {
    return false;
  }
  follow(generation, number, members);
  return true;
}

bool even_generation_adopt(even_generation *generation, uint32_t number, const bool *members) {
  if (even_generation_number(generation) != 0) {
    return false;
  }
  follow(generation, number, members);
  return true;
}
