/* The segment: a header, then a place for each rank, which the agent alone writes. */
#include "fault/standing.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/shared_memory.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#define MAGIC 0x6e646e6174736576u
#define VERSION 1u
enum { MOST_RANKS = 4096 };

typedef struct header {
  uint64_t magic;
  uint32_t version;
  uint32_t ranks;
  _Atomic uint32_t standing; /* how many do: mostly nobody, and then nothing more is read */
} header;

typedef struct place {
  _Atomic uint64_t who;      /* its host's mark << 32 | its process; 0: it goes on */
  _Atomic uint64_t stood_ns; /* when it was seen */
  _Atomic uint64_t told_ns;  /* when that was told; 0 while the place is written */
} place;

struct even_standing {
  even_shared_memory memory;
  header *header;
  place *places;
};

static size_t bytes_of(uint32_t ranks) {
  return sizeof(header) + ranks * sizeof(place);
}

static void place_parts(even_standing *standing) {
  unsigned char *base = standing->memory.address;
  standing->header = standing->memory.address;
  standing->places = (place *)(void *)(base + sizeof(header));
}

even_status even_standing_create(int ranks, int *fd) {
  even_shared_memory memory;
  *fd = -1;
  if (ranks < 1 || ranks > MOST_RANKS) {
    return even_fail(EVEN_ERR_ARGUMENT, "how %d ranks stand", ranks);
  }
  EVEN_TRY(even_shared_memory_create("evenstep-standing", bytes_of((uint32_t)ranks), &memory)); /* all zero */
  header *head = memory.address;
  head->magic = MAGIC;
  head->version = VERSION;
  head->ranks = (uint32_t)ranks;
  *fd = memory.fd;
  memory.fd = -1;
  even_shared_memory_close(&memory);
  return EVEN_OK;
}

even_status even_standing_open(int fd, even_standing **out) {
  even_standing *standing = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&standing));
  even_status status = even_shared_memory_duplicate(fd, &standing->memory);
  if (status != EVEN_OK) {
    even_free(standing);
    return status;
  }
  const header *head = standing->memory.address;
  size_t there = standing->memory.bytes;
  if (there < sizeof *head || head->magic != MAGIC || head->version != VERSION || head->ranks < 1 ||
      head->ranks > MOST_RANKS || there < bytes_of(head->ranks)) {
    even_standing_close(standing);
    return even_fail(EVEN_ERR_INPUT, "descriptor %d does not hold who stands, in this version", fd);
  }
  place_parts(standing);
  *out = standing;
  return EVEN_OK;
}

void even_standing_close(even_standing *standing) {
  if (standing != NULL) {
    even_shared_memory_close(&standing->memory);
    even_free(standing);
  }
}

static uint64_t name_of(uint32_t host, uint32_t process) {
  return (uint64_t)host << 32 | process;
}

void even_standing_tell(even_standing *standing, int rank, uint32_t host, uint32_t process, uint64_t stood_ns,
                        uint64_t now_ns) {
  if (rank < 0 || (uint32_t)rank >= standing->header->ranks) {
    return;
  }
  place *its = &standing->places[rank];
  bool stood = atomic_load(&its->who) != 0;
  bool stands = stood_ns != 0 && process != 0;
  atomic_store(&its->told_ns, 0u);
  atomic_store(&its->who, stands ? name_of(host, process) : 0);
  atomic_store(&its->stood_ns, stands ? stood_ns : 0);
  atomic_store(&its->told_ns, stands ? now_ns : 0);
  if (stands != stood) {
    (void)atomic_fetch_add(&standing->header->standing, stands ? 1u : UINT32_MAX);
  }
}

void even_standing_begin(even_standing *standing) {
  for (uint32_t rank = 0; rank < standing->header->ranks; rank++) {
    even_standing_tell(standing, (int)rank, 0, 0, 0, 0);
  }
}

/* Of a place that is written meanwhile nothing is known, at this look. */
static uint64_t read_place(const place *its, uint64_t who, uint64_t now_ns) {
  uint64_t told_ns = atomic_load(&its->told_ns);
  if (told_ns == 0 || atomic_load(&its->who) != who) {
    return 0;
  }
  uint64_t stood_ns = atomic_load(&its->stood_ns);
  bool fresh = (int64_t)(now_ns - told_ns) < (int64_t)EVEN_STANDING_FRESH_NS;
  return fresh && atomic_load(&its->told_ns) == told_ns ? stood_ns : 0;
}

uint64_t even_standing_ns(const even_standing *standing, uint32_t host, uint32_t process, uint64_t now_ns) {
  uint64_t longest_ns = 0;
  if (process == 0 || atomic_load(&standing->header->standing) == 0) {
    return 0;
  }
  for (uint32_t rank = 0; rank < standing->header->ranks; rank++) {
    uint64_t stood_ns = read_place(&standing->places[rank], name_of(host, process), now_ns);
    longest_ns = stood_ns > longest_ns ? stood_ns : longest_ns;
  }
  return longest_ns;
}
