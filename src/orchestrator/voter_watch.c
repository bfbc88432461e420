/* The stamp of a turn, and its limit. */
#include "orchestrator/voter_watch.h"

#include "orchestrator/link.h"
#include "os/socket.h"

void even_voter_watch_note(even_voter_watch *watch, uint64_t now_ns) {
  atomic_store(&watch->turn_ns, now_ns);
}

/* Longer than it takes to hear that another one has closed its connections, and than usual turns. */
static const uint64_t LEAST_APART_NS = 250000000u;

bool even_voter_watch_stands(const even_voter_watch *watch, unsigned after, uint64_t now_ns) {
  const uint64_t of_hosts = (uint64_t)even_socket_silence() * 1000000u;
  const uint64_t of_agents = even_link_silence_ns();
  const uint64_t limit = of_agents > 3 * of_hosts ? of_agents - of_hosts : 2 * of_hosts;
  const uint64_t apart = of_hosts / 16 > LEAST_APART_NS ? of_hosts / 16 : LEAST_APART_NS;
  const uint64_t turn = atomic_load(&watch->turn_ns);
  return turn != 0 && now_ns > turn && now_ns - turn > limit - after * apart;
}
