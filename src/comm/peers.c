/* Who the ranks are, whether they live, and which CPUs they may use, from /proc. */
#include "comm/peers.h"
#include "base/fail.h"
#include "base/text.h"
#include "comm/group.h"
#include "os/file.h"
#include "os/process_stat.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

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

static even_status read_cpus(uint64_t *words) {
  even_text text = EVEN_TEXT_EMPTY;
  even_status status = even_file_read("/proc/thread-self/status", 65536, &text);
  if (status == EVEN_OK) {
    parse_cpus(even_text_string(&text), words);
  }
  even_text_free(&text);
  return status;
}

even_status even_peers_enter(even_comm_control *own, int rank) {
  even_process_stat facts;
  uint64_t cpus[EVEN_COMM_CPU_WORDS];
  EVEN_TRY(read_cpus(cpus)); /* the rank is taken last: nothing gives it back */
  int failed = even_process_stat_read(0, &facts);
  if (failed != 0) {
    return even_fail_errno(failed, "/proc/self/stat cannot be read");
  }
  uint32_t nobody = 0;
  if (!atomic_compare_exchange_strong(&own->process, &nobody, (uint32_t)facts.pid)) {
    (void)even_fail(EVEN_ERR_IN_USE, "rank %d of the group is taken by process %u", rank, nobody);
    return even_error_fix("give every process a rank of its own, and every group a segment of its own");
  }
  atomic_store(&own->start_time, facts.start_time);
  memcpy(own->cpus, cpus, sizeof cpus);
  return EVEN_OK;
}

even_status even_peers_introduce(even_comm *comm) {
  return even_peers_enter(&comm->controls[comm->rank], comm->rank);
}

/* For whoever did not look for long: the other, which was stopped with it, goes on in so much time. Whoever stops all
 * ranks, one after the other, lets them go on one after the other, too. */
#define ONE_AFTER_THE_OTHER (3 * EVEN_COMM_LOOK_NS)

/* Whether the one that is seen stopped at `now_ns` has stood still for longer than the grace. */
static bool stands_too_long(uint64_t grace, even_comm_control *peer, uint64_t cpu_ns, uint64_t now_ns,
                            uint64_t looked_ns) {
  uint64_t since = atomic_load(&peer->stands_since_ns);
  if (since == 0 || atomic_load(&peer->stands_at_cpu_ns) != cpu_ns) {
    atomic_store(&peer->stands_at_cpu_ns, cpu_ns);
    atomic_store(&peer->stands_since_ns, now_ns);
    return false;
  }
  if (now_ns - looked_ns > EVEN_COMM_LONG_LOOK_NS && now_ns - since + ONE_AFTER_THE_OTHER > grace) {
    since = now_ns + ONE_AFTER_THE_OTHER - grace;
    since = grace < ONE_AFTER_THE_OTHER || since > now_ns ? now_ns : since;
    atomic_store(&peer->stands_since_ns, since);
  }
  return now_ns - since >= grace;
}

/* The same by what another's look has just found: that one may wait for messages alone, or have more patience. */
static bool stood_too_long(uint64_t grace, even_comm_control *peer, uint64_t now_ns, uint64_t looked_ns) {
  uint64_t since = atomic_load(&peer->stands_since_ns);
  return since != 0 && (int64_t)(now_ns - looked_ns) <= (int64_t)EVEN_COMM_LONG_LOOK_NS && now_ns > since &&
         now_ns - since >= grace;
}

/* Whether the look is this rank's to take: several wait for the same peer, and one look in a while is enough. */
static bool takes_look(even_comm_control *peer, uint64_t now_ns, uint64_t *looked_ns) {
  *looked_ns = atomic_load(&peer->looked_ns);
  return (int64_t)(now_ns - *looked_ns) >= (int64_t)(EVEN_COMM_LOOK_NS / 4 * 3) &&
         atomic_compare_exchange_strong(&peer->looked_ns, looked_ns, now_ns);
}

/* Set once, before groups are opened. */
static _Atomic(even_peers_standing_call *) standing_call;
static _Atomic(void *) standing_context;

void even_peers_ask_standing(even_peers_standing_call *call, void *context) {
  atomic_store(&standing_context, context);
  atomic_store(&standing_call, call);
}

uint64_t even_peers_standing_ns(uint32_t host, uint32_t process, uint64_t now_ns) {
  even_peers_standing_call *call = atomic_load(&standing_call);
  return call == NULL ? 0 : call(atomic_load(&standing_context), host, process, now_ns);
}

static _Atomic uint64_t borne_silence_ns;

void even_peers_bear_silence(uint64_t least_ns) {
  atomic_store(&borne_silence_ns, least_ns);
}

uint64_t even_peers_borne_silence_ns(void) {
  return atomic_load_explicit(&borne_silence_ns, memory_order_relaxed);
}

static uint32_t process_of(even_comm_control *peer) {
  uint32_t process = atomic_load(&peer->process);
  return process != 0 ? process : atomic_load(&peer->expected);
}

uint32_t even_peers_process(const even_comm *comm, int rank) {
  return process_of(&comm->controls[rank]);
}

even_peer_state even_peers_look_at(even_comm_control *peer, uint32_t own_process, uint64_t grace, uint64_t now_ns) {
  uint32_t process = process_of(peer);
  uint64_t looked_ns = 0;
  if (atomic_load(&peer->left) != 0) {
    return EVEN_PEER_GONE;
  }
  if (process == 0 || process == own_process) {
    return EVEN_PEER_LIVES;
  }
  if (!takes_look(peer, now_ns, &looked_ns)) {
    return stood_too_long(grace, peer, now_ns, looked_ns) ? EVEN_PEER_STANDS : EVEN_PEER_LIVES;
  }
  even_process_stat facts;
  int failed = even_process_stat_read((pid_t)process, &facts);
  uint64_t start_time = atomic_load(&peer->start_time);
  bool gone = failed != 0 ? failed == ENOENT || failed == ESRCH
                          : (start_time != 0 && facts.start_time != start_time) || even_process_stat_ended(&facts);
  if (gone) {
    atomic_store(&peer->looked_ns, 0); /* whoever else waits for it sees so at its own next look */
    return EVEN_PEER_GONE;
  }
  if (failed == 0 && facts.state == 'T') { /* 't' is a debugger's */
    uint64_t cpu_ns = (uint64_t)(facts.cpu_seconds * 1e9);
    return stands_too_long(grace, peer, cpu_ns, now_ns, looked_ns) ? EVEN_PEER_STANDS : EVEN_PEER_LIVES;
  }
  atomic_store(&peer->stands_since_ns, 0);
  return EVEN_PEER_LIVES;
}

even_peer_state even_peers_look(const even_comm *comm, int rank, uint64_t now_ns) {
  uint64_t grace = atomic_load_explicit(&comm->stop_grace_ns, memory_order_relaxed);
  return even_peers_look_at(&comm->controls[rank], atomic_load(&comm->controls[comm->rank].process), grace, now_ns);
}

bool even_peers_end_group(even_comm *comm, int rank, even_peer_state state) {
  if (state == EVEN_PEER_LIVES) {
    return false;
  }
  even_group_end(comm, (state == EVEN_PEER_GONE ? EVEN_GROUP_LOST : EVEN_GROUP_STOPPED) | (uint32_t)rank);
  return true;
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
