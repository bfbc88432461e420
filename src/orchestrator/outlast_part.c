/* Shared memory with words and numbers, and sockets that nobody reads. */
#include "orchestrator/outlast_part.h"

#include "base/fail.h"
#include "orchestrator/outlast.h"
#include "os/pipe.h"

#include <string.h>

#define MAGIC 0x747261706e657665u

typedef struct part_page {
  uint64_t magic;
  uint64_t ranks;
  uint64_t bytes;    /* of the words behind the places, with their NUL */
  uint64_t links;    /* how many connections there were: the last is kept under (links - 1) % EVEN_OUTLAST_LINKS */
  uint64_t places[]; /* a rank each */
} part_page;

static part_page *page_of(const even_outlast_part *part) {
  return part->memory.address;
}

static char *words_of(part_page *page) {
  return (char *)(page->places + page->ranks);
}

void even_outlast_part_open(even_outlast_part *out) {
  *out = (even_outlast_part){.memory = {.fd = -1}};
  for (size_t i = 0; i < EVEN_OUTLAST_LINKS; i++) {
    out->links[i] = -1;
  }
}

void even_outlast_part_close(even_outlast_part *part) {
  even_shared_memory_close(&part->memory);
  for (size_t i = 0; i < EVEN_OUTLAST_LINKS; i++) {
    even_pipe_close(part->links[i]);
  }
  even_outlast_part_open(part);
}

even_status even_outlast_part_leave(even_outlast_part *part, even_custody *custody, const even_text *words,
                                    size_t ranks) {
  even_shared_memory memory = {.fd = -1};
  size_t bytes = words->length + 1;
  EVEN_TRY(even_text_status(words));
  EVEN_TRY(even_shared_memory_create("evenstep-part", sizeof(part_page) + ranks * sizeof(uint64_t) + bytes, &memory));
  part_page *page = memory.address;
  *page = (part_page){
      .magic = MAGIC, .ranks = ranks, .bytes = bytes, .links = page_of(part) == NULL ? 0 : page_of(part)->links};
  memcpy(words_of(page), even_text_string(words), bytes);
  if (page_of(part) != NULL && page_of(part)->ranks == ranks) {
    memcpy(page->places, page_of(part)->places, ranks * sizeof(uint64_t));
  }
  even_status status = even_custody_keep(custody, EVEN_OUTLAST_PART, 0, memory.fd);
  if (status != EVEN_OK) {
    even_shared_memory_close(&memory);
    return status;
  }
  even_shared_memory_close(&part->memory);
  part->memory = memory;
  return EVEN_OK;
}

static bool is_whole(const even_outlast_part *part) {
  const part_page *page = page_of(part);
  size_t bytes = part->memory.bytes;
  if (bytes < sizeof *page || page->magic != MAGIC || page->ranks > bytes / sizeof(uint64_t) || page->bytes == 0 ||
      page->bytes > bytes || sizeof *page + page->ranks * sizeof(uint64_t) + page->bytes > bytes) {
    return false;
  }
  return words_of(page_of(part))[page->bytes - 1] == '\0';
}

even_status even_outlast_part_take(even_outlast_part *part, even_custody *custody, const char **words) {
  for (uint32_t i = 0; i < EVEN_OUTLAST_LINKS; i++) {
    part->links[i] = even_custody_claim(custody, EVEN_OUTLAST_LINK, i);
  }
  int fd = even_custody_claim(custody, EVEN_OUTLAST_PART, 0);
  if (fd < 0) {
    return even_fail(EVEN_ERR_STATE, "the agent before has left ranks that run, and not what their leader had said");
  }
  EVEN_TRY(even_shared_memory_adopt(fd, &part->memory));
  if (!is_whole(part)) {
    return even_fail(EVEN_ERR_STATE, "what the agent before has left of its leader's words is not whole");
  }
  *words = words_of(page_of(part));
  return EVEN_OK;
}

void even_outlast_part_note(even_outlast_part *part, const even_telemetry_reader *reader) {
  part_page *page = page_of(part);
  for (uint64_t i = 0; page != NULL && reader != NULL && i < page->ranks; i++) {
    page->places[i] = even_telemetry_reader_place(reader, (int)i);
  }
}

void even_outlast_part_go_on(const even_outlast_part *part, even_telemetry_reader *reader) {
  const part_page *page = page_of(part);
  for (uint64_t i = 0; page != NULL && reader != NULL && i < page->ranks; i++) {
    even_telemetry_reader_go_on(reader, (int)i, page->places[i]);
  }
}

even_status even_outlast_part_link(even_outlast_part *part, even_custody *custody, int fd) {
  part_page *page = page_of(part);
  if (page == NULL) {
    return EVEN_OK; /* nothing of this host is kept */
  }
  uint32_t number = (uint32_t)(page->links % EVEN_OUTLAST_LINKS);
  EVEN_TRY(even_custody_keep(custody, EVEN_OUTLAST_LINK, number, fd));
  page->links++;
  even_pipe_close(part->links[number]);
  part->links[number] = -1;
  return EVEN_OK;
}

static even_status drop_all_but(even_outlast_part *part, even_custody *custody, uint32_t number) {
  for (uint32_t i = 0; i < EVEN_OUTLAST_LINKS; i++) {
    if (i != number) {
      even_pipe_close(part->links[i]);
      part->links[i] = -1;
      EVEN_TRY(even_custody_drop(custody, EVEN_OUTLAST_LINK, i));
    }
  }
  return EVEN_OK;
}

even_status even_outlast_part_known(even_outlast_part *part, even_custody *custody) {
  const part_page *page = page_of(part);
  return page == NULL || page->links == 0
             ? EVEN_OK
             : drop_all_but(part, custody, (uint32_t)((page->links - 1) % EVEN_OUTLAST_LINKS));
}

even_status even_outlast_part_unlink(even_outlast_part *part, even_custody *custody) {
  return page_of(part) == NULL ? EVEN_OK : drop_all_but(part, custody, EVEN_OUTLAST_LINKS);
}
