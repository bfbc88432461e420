/* Who the ranks are, whether they live, and which CPUs they may use, from /proc. */
#include "base/fail.h"
#include "base/text.h"
#include "comm/group.h"
#include "os/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct process_facts {
  uint32_t process;
  char state;
  uint64_t start_time;
} process_facts;

/* proc(5): pid (name) state ppid … with the start time as field 22; the name may hold anything, so read from its end.
 */
static bool parse_stat(const char *text, process_facts *out) {
  const char *at = strrchr(text, ')');
  if (at == NULL || at[1] != ' ' || at[2] == '\0') {
    return false;
  }
  out->process = (uint32_t)strtoul(text, NULL, 10);
  out->state = at[2];
  at += 2;
  for (int field = 3; field < 22; field++) {
    at = strchr(at, ' ');
    if (at == NULL) {
      return false;
    }
    at++;
  }
  out->start_time = strtoull(at, NULL, 10);
  return out->process != 0;
}

static even_status read_stat(const char *path, process_facts *out) {
  even_text text = EVEN_TEXT_EMPTY;
  even_status status = even_file_read(path, 8192, &text);
  if (status == EVEN_OK && !parse_stat(even_text_string(&text), out)) {
    status = even_fail(EVEN_ERR_INPUT, "%s is not as proc(5) says", path);
  }
  even_text_free(&text);
  return status;
}

/* "Cpus_allowed:\t3,ffffffff": groups of 32 bits, the highest first. */
static void parse_cpus(const char *text, uint64_t *words) {
  const char *line = strstr(text, "\nCpus_allowed:");
  memset(words, 0, EVEN_COMM_CPU_WORDS * sizeof *words);
  if (line == NULL) {
    return;
  }
  line += strlen("\nCpus_allowed:");
  size_t length = strcspn(line, "\n");
  size_t bit = 0;
  for (size_t i = length; i > 0 && bit < (size_t)EVEN_COMM_CPU_WORDS * 64; i--) {
    const char digit[2] = {line[i - 1], '\0'};
    char *end = NULL;
    uint64_t value = strtoull(digit, &end, 16);
    if (end == digit) {
      continue; /* a comma or a blank */
    }
    words[bit / 64] |= value << (bit % 64);
    bit += 4;
  }
}

even_status even_peers_introduce(even_comm *comm) {
  even_comm_control *own = &comm->controls[comm->rank];
  process_facts facts = {0};
  even_text text = EVEN_TEXT_EMPTY;
  EVEN_TRY(read_stat("/proc/self/stat", &facts));
  uint32_t nobody = 0;
  if (!atomic_compare_exchange_strong(&own->process, &nobody, facts.process)) {
    (void)even_fail(EVEN_ERR_IN_USE, "rank %d of the group is taken by process %u", comm->rank, nobody);
    return even_error_fix("give every process a rank of its own");
  }
  atomic_store(&own->start_time, facts.start_time);
  even_status status = even_file_read("/proc/thread-self/status", 65536, &text);
  if (status == EVEN_OK) {
    parse_cpus(even_text_string(&text), own->cpus);
  }
  even_text_free(&text);
  return status;
}

bool even_peers_alive(const even_comm *comm, int rank) {
  even_comm_control *peer = &comm->controls[rank];
  uint32_t process = atomic_load(&peer->process);
  if (atomic_load(&peer->left) != 0) {
    return false;
  }
  if (process == 0 || process == atomic_load(&comm->controls[comm->rank].process)) {
    return true;
  }
  char path[48];
  process_facts facts = {0};
  (void)snprintf(path, sizeof path, "/proc/%u/stat", process);
  even_status status = read_stat(path, &facts);
  if (status != EVEN_OK) {
    int reason = even_error_last()->system_error;
    return reason != ENOENT && reason != ESRCH;
  }
  uint64_t start_time = atomic_load(&peer->start_time);
  return (start_time == 0 || facts.start_time == start_time) && facts.state != 'Z' && facts.state != 'X';
}

bool even_peers_have_cpus(const even_comm *comm) {
  int cpus = 0;
  for (int word = 0; word < EVEN_COMM_CPU_WORDS; word++) {
    uint64_t any = 0;
    for (int rank = 0; rank < comm->ranks; rank++) {
      any |= comm->controls[rank].cpus[word];
    }
    cpus += __builtin_popcountll(any);
  }
  return cpus >= comm->ranks;
}
