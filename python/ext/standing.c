/* Which ranks of other hosts stand still, as the job's agent tells this process: for all groups that it opens between
 * hosts. */
#include "comm.h"

#include "base/fail.h"
#include "comm/peers.h"
#include "fault/standing.h"

#include <stdlib.h>

static uint64_t standing_ns(void *context, uint32_t host, uint32_t process, uint64_t now_ns) {
  return even_standing_ns(context, host, process, now_ns);
}

/* Whoever is started by a rank inherits the variable, and seldom the descriptor: what it holds there is looked at. */
void even_ext_ask_standing(void) {
  static even_standing *memory; /* with the GIL held; as long as the process, for groups may be open at its end */
  const char *text = getenv("EVENSTEP_STANDING_FD");
  char *end = NULL;
  if (memory != NULL || text == NULL || text[0] == '\0') {
    return;
  }
  long fd = strtol(text, &end, 10);
  const even_error kept = *even_error_last();
  if (*end == '\0' && fd > 2 && fd <= INT_MAX && even_standing_open((int)fd, &memory) == EVEN_OK) {
    even_peers_ask_standing(standing_ns, memory);
  }
  (void)even_error_restore(&kept);
}
