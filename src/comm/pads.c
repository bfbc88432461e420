/* What the processes of a host write for one another of their waits, in memory that their groups share. */
#include "comm/group.h"
#include "comm/waits.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

#define RELAXED memory_order_relaxed
#define WORDS (sizeof(even_process_words) / sizeof(uint64_t))
#define FRESH_NS (2 * EVEN_WAITS_SETTLED_NS)

_Static_assert(sizeof(even_process_words) % sizeof(uint64_t) == 0, "copied by words");

void even_waits_write(even_wait_pad *pad, const even_process_words *of) {
  uint64_t words[WORDS];
  memcpy(words, of, sizeof words);
  uint64_t version = atomic_load_explicit(&pad->version, RELAXED) | 1u;
  atomic_store_explicit(&pad->version, version, RELAXED);
  atomic_thread_fence(memory_order_release);
  for (size_t i = 0; i < WORDS; i++) {
    atomic_store_explicit(&pad->words[i], words[i], RELAXED);
  }
  atomic_store_explicit(&pad->version, version + 1, memory_order_release);
}

bool even_waits_read(even_wait_pad *pad, even_process_words *out) {
  uint64_t words[WORDS];
  uint64_t version = atomic_load_explicit(&pad->version, memory_order_acquire);
  if (version == 0 || (version & 1u) != 0) {
    return false;
  }
  for (size_t i = 0; i < WORDS; i++) {
    words[i] = atomic_load_explicit(&pad->words[i], RELAXED);
  }
  atomic_thread_fence(memory_order_acquire);
  if (atomic_load_explicit(&pad->version, RELAXED) != version) {
    return false;
  }
  memcpy(out, words, sizeof *out);
  out->waits = out->waits < EVEN_WAITS ? out->waits : EVEN_WAITS; /* whatever the memory holds */
  for (uint32_t i = 0; i < out->waits; i++) {
    even_wait_words *wait = &out->wait[i];
    even_circle_bound_wait(&wait->needs);
    wait->doing[sizeof wait->doing - 1] = wait->group[sizeof wait->group - 1] = wait->site[sizeof wait->site - 1] = 0;
  }
  return true;
}

/* ---- what was found ---- */

void even_waits_write_found(even_wait_pad *pad, uint64_t process, uint64_t change, const even_circle_found *found) {
  if (atomic_exchange(&pad->held, 1u) != 0) {
    return;
  }
  if (pad->found_process != process || atomic_load(&pad->found_change) < change) {
    pad->found_process = process;
    pad->members = found->members;
    even_comm_end_words_write(&pad->found, &found->why);
    atomic_store(&pad->found_change, change);
  }
  atomic_store(&pad->held, 0);
}

bool even_waits_read_found(even_wait_pad *pad, uint64_t process, uint64_t number, even_circle_found *out) {
  if (atomic_load(&pad->found_change) < number || atomic_exchange(&pad->held, 1u) != 0) {
    return false;
  }
  bool found = pad->found_process == process && atomic_load(&pad->found_change) >= number;
  if (found) {
    out->members = pad->members;
    even_circle_bound_members(&out->members); /* whatever the memory holds */
    even_comm_end_words_read(&pad->found, &out->why);
  }
  atomic_store(&pad->held, 0);
  return found;
}

/* ---- reading ---- */

void even_waits_describe_wait(const even_wait_words *wait, int rank, const char *host, size_t site_bytes,
                              uint64_t now_ns, char *text, size_t bytes) {
  char where[EVEN_WAITS_HOST_BYTES + 16] = "";
  size_t length = strlen(wait->site);
  size_t cut = length > site_bytes ? length - site_bytes : 0; /* the end of a path says more than its beginning */
  double seconds = now_ns > wait->since_ns ? (double)(now_ns - wait->since_ns) * 1e-9 : 0;
  if (host != NULL) {
    (void)snprintf(where, sizeof where, " (host %.*s)", EVEN_WAITS_HOST_BYTES - 1, host);
  }
  (void)snprintf(text, bytes, "rank %d%s is in %s of %s%s%s%s for %.1f s", rank, where, wait->doing, wait->group,
                 length > 0 ? " at " : "", cut > 0 ? "…" : "", wait->site + cut, seconds);
}

void even_waits_describe(const even_comm *comm, int rank, char *text, size_t bytes) {
  even_process_words words;
  uint64_t now = even_clock_ns();
  text[0] = '\0';
  if (comm->pads == NULL || rank == comm->rank || !even_waits_read(even_comm_pad_of(comm, rank), &words) ||
      words.waits == 0 || words.process == atomic_load(&even_comm_pad_of(comm, comm->rank)->process)) {
    return;
  }
  if (words.wait[0].seen_ns + FRESH_NS > now) {
    (void)snprintf(text, bytes, "; ");
    even_waits_describe_wait(&words.wait[0], even_comm_number(comm, rank), NULL, sizeof words.wait[0].site, now,
                             text + 2, bytes - 2);
  }
}
