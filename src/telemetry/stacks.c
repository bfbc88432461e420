/* The page: asked for by a number that grows, told by the same number; words in between. */
#include "telemetry/stacks.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/futex.h"
#include "os/shared_memory.h"
#include "os/thread.h"
#include "os/thread_stacks.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static const char LABEL[] = "evenstep-stacks";
static const uint64_t MAGIC = UINT64_C(0x314b434154534555); /* "UESTACK1", little-endian */

enum { WORDS_BYTES = 96 * 1024, TEXT_BYTES = 256 * 1024 };

/* How long threads may take to answer; how long the thread sleeps before it looks again. */
static const uint64_t answers_ns = 1000000000u;
static const uint64_t nap_ns = UINT64_C(3600000000000);

typedef struct stacks_page {
  uint64_t magic;
  _Atomic uint32_t asked;
  _Atomic uint32_t told;
  _Atomic uint32_t length; /* of text, NUL apart */
  uint32_t unused;
  char text[TEXT_BYTES];
} stacks_page;

struct even_stacks {
  even_shared_memory page;
  even_shared_memory words; /* what the interpreter writes of its own */
  int signal;
  _Atomic bool ends;
  pthread_t thread;
};

static void write_down(even_stacks *stacks) {
  stacks_page *page = stacks->page.address;
  char *words = stacks->words.address;
  memset(words, 0, stacks->words.bytes);
  even_shared_memory_rewind(&stacks->words);
  even_signal_raise_here(stacks->signal);
  size_t length = strnlen(words, WORDS_BYTES);
  memcpy(page->text, words, length);
  static const char title[] = "\nC stacks:\n";
  memcpy(page->text + length, title, sizeof title);
  length += sizeof title - 1;
  even_thread_stacks_write(page->text, TEXT_BYTES, &length, answers_ns);
  atomic_store(&page->length, (uint32_t)length);
}

static void *serve(void *argument) {
  even_stacks *stacks = argument;
  stacks_page *page = stacks->page.address;
  while (!atomic_load(&stacks->ends)) {
    uint32_t asked = atomic_load(&page->asked);
    if (asked == atomic_load(&page->told)) {
      even_futex_wait(&page->asked, asked, nap_ns);
      continue;
    }
    write_down(stacks);
    atomic_store(&page->told, asked);
  }
  return NULL;
}

/* One a process, however often it is opened. */
static even_status reserve(int *number) {
  static _Atomic int reserved;
  *number = atomic_load(&reserved);
  if (*number == 0) {
    EVEN_TRY(even_signal_reserve(number));
    atomic_store(&reserved, *number);
  }
  return EVEN_OK;
}

static even_status open_all(even_stacks *stacks) {
  EVEN_TRY(even_thread_stacks_open());
  EVEN_TRY(reserve(&stacks->signal));
  EVEN_TRY(even_shared_memory_create("evenstep-words", WORDS_BYTES, &stacks->words));
  EVEN_TRY(even_shared_memory_create(LABEL, sizeof(stacks_page), &stacks->page));
  ((stacks_page *)stacks->page.address)->magic = MAGIC;
  return even_thread_start(serve, stacks, &stacks->thread);
}

even_status even_stacks_open(int *signal, int *fd, even_stacks **out) {
  even_stacks *stacks = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&stacks));
  stacks->page = stacks->words = (even_shared_memory){.fd = -1};
  even_status status = open_all(stacks);
  if (status != EVEN_OK) {
    even_shared_memory_close(&stacks->page);
    even_shared_memory_close(&stacks->words);
    even_free(stacks);
    return status;
  }
  *signal = stacks->signal;
  *fd = stacks->words.fd;
  *out = stacks;
  return EVEN_OK;
}

void even_stacks_close(even_stacks *stacks) {
  if (stacks == NULL) {
    return;
  }
  stacks_page *page = stacks->page.address;
  atomic_store(&stacks->ends, true);
  (void)atomic_fetch_add(&page->asked, 1u); /* what it sleeps on must change */
  even_futex_wake_all(&page->asked);
  even_thread_join(stacks->thread);
  even_shared_memory_close(&stacks->page);
  even_shared_memory_close(&stacks->words);
  even_free(stacks);
}

/* ---- the agent's side ---- */

static bool take_page(void *context, int fd, uint64_t identity) {
  even_stacks_request *request = context;
  even_shared_memory memory;
  (void)identity;
  if (even_shared_memory_duplicate(fd, &memory) != EVEN_OK) {
    return true;
  }
  if (memory.bytes < sizeof(stacks_page) || ((stacks_page *)memory.address)->magic != MAGIC) {
    even_shared_memory_close(&memory);
    return true;
  }
  request->page = memory.address;
  request->bytes = memory.bytes;
  memory.address = NULL; /* stays mapped without its descriptor */
  even_shared_memory_close(&memory);
  return false;
}

even_status even_stacks_ask(pid_t pid, even_stacks_request *out) {
  *out = (even_stacks_request){.page = NULL};
  EVEN_TRY(even_shared_memory_each(pid, LABEL, take_page, out));
  if (out->page == NULL) {
    return even_fail(EVEN_ERR_NOT_FOUND, "process %ld tells no stacks: it has not imported evenstep yet", (long)pid);
  }
  stacks_page *page = out->page;
  out->number = atomic_fetch_add(&page->asked, 1u) + 1u;
  even_futex_wake_all(&page->asked);
  return EVEN_OK;
}

bool even_stacks_told(const even_stacks_request *request) {
  return request->page != NULL && atomic_load(&((stacks_page *)request->page)->told) == request->number;
}

void even_stacks_take(even_stacks_request *request, even_text *out) {
  if (request->page == NULL) {
    return;
  }
  stacks_page *page = request->page;
  uint32_t length = even_stacks_told(request) ? atomic_load(&page->length) : 0;
  for (uint32_t i = 0; i < length && i < TEXT_BYTES && page->text[i] != '\0'; i++) {
    char at = page->text[i];
    even_text_append(out, at == '\n' || (at >= ' ' && at <= '~') ? &at : "?", 1);
  }
  even_shared_memory memory = {.fd = -1, .address = request->page, .bytes = request->bytes};
  even_shared_memory_close(&memory);
  *request = (even_stacks_request){.page = NULL};
}
