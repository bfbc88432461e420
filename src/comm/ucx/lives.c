/* How those are that a rank waits for over UCX: a rank of its own host it can see, of others it hears from ranks of
 * their hosts, or somebody tells it (even_peers_ask_standing). And the stall inspector, which asks them all. */
#include "comm/ucx/group.h"

#include "os/clock.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* How often another host is asked; the ranks of larger groups ask less often, so that those who answer can. */
#define ASK_NS ((uint64_t)40 * 1000000u)
#define ASKING_RANKS 32u
/* What another host said of its rank counts for so long. */
#define FRESH_NS ((uint64_t)200 * 1000000u)
/* For so many graces a rank that no other can see may be silent, or so many times its slowest answer, or for as long as
 * the job says (even_peers_bear_silence); and longer while data are under way to it or from it, behind which its answer
 * may come. */
#define SILENT_GRACES 60u
#define SILENT_ANSWERS 16u
#define BYTE_NS 250u /* 4 MB/s */
/* How long the stall inspector waits for answers. */
#define ANSWERS_NS ((uint64_t)200 * 1000000u)

/* A rank of the host of `peer` that can be asked how that one is; -1: it is alone there. */
static int neighbour_of(const even_ucx_group *group, int peer) {
  for (int rank = 0; rank < group->ranks; rank++) {
    const even_ucx_peer *other = &group->peers[rank];
    if (rank != peer && other->host_number == group->peers[peer].host_number && other->failed == 0 && !other->left &&
        other->standing_ns == 0) {
      return rank;
    }
  }
  return -1;
}

static bool is_near(const even_ucx_group *group, int rank) {
  return even_board_has(&group->board, rank);
}

/* Whether only the rank itself can say how it is, as far as is known. */
static bool is_alone(const even_ucx_group *group, int rank, uint64_t now_ns) {
  const even_ucx_peer *peer = &group->peers[rank];
  return neighbour_of(group, rank) < 0 || peer->told_ns == 0 || now_ns - peer->told_ns >= FRESH_NS;
}

static void ask_hosts(even_ucx_group *group, const bool *waits, uint64_t now_ns) {
  for (int rank = 0; rank < group->ranks; rank++) {
    int neighbour = waits[rank] && !is_near(group, rank) ? neighbour_of(group, rank) : -1;
    bool first = neighbour >= 0;
    for (int before = 0; first && before < rank; before++) { /* one question a host */
      first = !(waits[before] && group->peers[before].host_number == group->peers[rank].host_number);
    }
    if (first) {
      even_ucx_ask(group, neighbour, true);
    }
    bool alone = waits[rank] && !is_near(group, rank) && is_alone(group, rank, now_ns);
    /* It may be in another call of the larger group; or nobody but itself can say how it is: one question then, until
     * it answers. */
    if (waits[rank] && (group->whole.ranks != 0 || (alone && group->peers[rank].asked_ns == 0))) {
      even_ucx_ask(group, rank, false);
    }
  }
}

/* For how long a rank of another host may leave a question unanswered; UINT64_MAX: for ever. */
static uint64_t silence_limit(const even_ucx_peer *peer, uint64_t grace) {
  uint64_t limit = peer->slowest_ns * SILENT_ANSWERS;
  if (grace > UINT64_MAX / 64 || peer->unwatched) {
    return UINT64_MAX;
  }
  limit = limit < grace * SILENT_GRACES ? grace * SILENT_GRACES : limit;
  limit = limit < even_peers_borne_silence_ns() ? even_peers_borne_silence_ns() : limit;
  return peer->under_way < UINT64_MAX / 2 / BYTE_NS ? limit + peer->under_way * BYTE_NS : UINT64_MAX;
}

/* For how long it has left one unanswered. */
static uint64_t silence(const even_ucx_peer *peer, uint64_t now_ns) {
  return peer->asked_ns != 0 && now_ns > peer->asked_ns ? now_ns - peer->asked_ns : 0;
}

/* A rank of another host that does not answer, where no other rank can say how it is. */
static bool is_silent(const even_ucx_group *group, int rank, uint64_t grace, uint64_t now_ns) {
  const even_ucx_peer *peer = &group->peers[rank];
  return silence(peer, now_ns) >= silence_limit(peer, grace) && is_alone(group, rank, now_ns);
}

/* Whoever did not look for long was stopped itself, and has not heard what came meanwhile. */
static void forgive_silence(even_ucx_group *group, const even_ucx_looks *looks, uint64_t grace, uint64_t now_ns) {
  for (int rank = 0; rank < group->ranks; rank++) {
    even_ucx_peer *peer = &group->peers[rank];
    if (peer->asked_ns != 0 && now_ns - looks->looked_ns >= silence_limit(peer, grace) / 4) {
      peer->asked_ns = now_ns;
    }
  }
}

/* By what its agent saw there: that it stood for the whole grace, not how long that word was on its way. And this rank
 * has waited for as long: where both were stopped, with the whole job, the other may go on a moment after it. */
static bool is_told_to_stand(const even_ucx_peer *peer, const even_ucx_looks *looks, uint64_t grace, uint64_t now_ns) {
  return even_peers_standing_ns(peer->mark, (uint32_t)peer->process, now_ns) >= grace &&
         now_ns - looks->since_ns >= grace;
}

static even_peer_state state_of(even_ucx_group *group, const even_ucx_looks *looks, int rank, uint64_t grace,
                                uint64_t now_ns) {
  const even_ucx_peer *peer = &group->peers[rank];
  if (is_near(group, rank)) {
    return even_board_look(&group->board, rank, grace, now_ns);
  }
  if (is_told_to_stand(peer, looks, grace, now_ns)) {
    return EVEN_PEER_STANDS;
  }
  if (peer->standing_ns >= grace && peer->told_ns != 0 && now_ns - peer->told_ns < FRESH_NS) {
    return EVEN_PEER_STANDS;
  }
  return peer->gone ? EVEN_PEER_GONE : EVEN_PEER_LIVES;
}

void even_ucx_look(even_ucx_group *group, even_ucx_looks *looks, const bool *waits, uint64_t now_ns) {
  uint64_t grace = atomic_load_explicit(&group->stop_grace_ns, memory_order_relaxed);
  unsigned ranks = (unsigned)group->ranks;
  uint64_t ask_ns = ranks > ASKING_RANKS ? ASK_NS * ranks / ASKING_RANKS : ASK_NS;
  forgive_silence(group, looks, grace, now_ns);
  if (now_ns - looks->looked_ns > EVEN_COMM_LONG_LOOK_NS) {
    looks->since_ns = now_ns;
  }
  looks->looked_ns = now_ns;
  if (now_ns - looks->asked_ns >= ask_ns) {
    looks->asked_ns = now_ns;
    ask_hosts(group, waits, now_ns);
  }
  for (int rank = 0; rank < group->ranks && !group->ended; rank++) {
    if (rank == group->rank || !waits[rank]) {
      continue;
    }
    even_peer_state state = state_of(group, looks, rank, grace, now_ns);
    group->peers[rank].gone = group->peers[rank].gone || state == EVEN_PEER_GONE;
    if (state == EVEN_PEER_STANDS) {
      even_ucx_end_stopped(group, rank);
    } else if (!is_near(group, rank) && is_silent(group, rank, grace, now_ns)) {
      even_ucx_end_silent(group, rank, silence(&group->peers[rank], now_ns));
    }
  }
}

/* ---- the stall inspector ---- */

void even_ucx_on_stall(even_comm *comm, double seconds, even_comm_stall_call *call, void *context) {
  bool off = !(seconds > 0) || isinf(seconds);
  even_ucx_of(comm)->stall = (even_stall_inspector){
      .limit_ns = off ? UINT64_MAX : even_comm_limit_ns(seconds), .call = call, .context = context};
}

static bool has_answered(const even_ucx_group *group, int rank) {
  const even_ucx_peer *peer = &group->peers[rank];
  return is_near(group, rank) || peer->answered_ns >= group->stall_asked_ns;
}

static bool all_have_answered(const even_ucx_group *group) {
  for (int rank = 0; rank < group->ranks; rank++) {
    const even_ucx_peer *peer = &group->peers[rank];
    if (rank != group->rank && peer->failed == 0 && !peer->left && !has_answered(group, rank)) {
      return false;
    }
  }
  return true;
}

static void ask_all(even_ucx_group *group, uint64_t now_ns) {
  group->stall_asked = group->call_count;
  group->stall_asked_ns = now_ns;
  for (int rank = 0; rank < group->ranks; rank++) {
    if (rank != group->rank && !is_near(group, rank)) {
      even_ucx_ask(group, rank, false);
    }
  }
}

static void describe(const even_ucx_group *group, const bool *waits, uint64_t waited_ns, char *words, size_t bytes) {
  char name[128] = "nobody";
  char call[128];
  char reached[EVEN_FLIGHT_REACHED];
  char more[32] = "";
  char silent[64] = "";
  int others = -1;
  int mute = -1;
  for (int rank = group->ranks - 1; rank >= 0; rank--) {
    if (waits[rank]) {
      others++;
      even_ucx_name(group, rank, name, sizeof name);
      mute = has_answered(group, rank) ? mute : rank;
    }
  }
  if (others > 0) {
    (void)snprintf(more, sizeof more, " and %d more", others);
  }
  if (mute >= 0) {
    (void)snprintf(silent, sizeof silent, "; rank %d does not answer", group->peers[mute].number);
  }
  even_call_describe(&group->call, call, sizeof call);
  even_flight_reached(&group->flight, reached, sizeof reached);
  (void)snprintf(words, bytes, "rank %d has waited %.3g s for %s%s in %s%s%s", group->peers[group->rank].number,
                 (double)waited_ns * 1e-9, name, more, call, silent, reached);
}

void even_ucx_stall_inspect(even_ucx_group *group, const bool *waits, uint64_t now_ns) {
  even_stall_inspector *stall = &group->stall;
  uint64_t waited_ns = now_ns - group->waits_since;
  if (stall->call == NULL || waited_ns < stall->limit_ns || stall->told == group->call_count) {
    return;
  }
  if (group->stall_asked != group->call_count) {
    ask_all(group, now_ns);
  }
  if (all_have_answered(group) || now_ns - group->stall_asked_ns >= ANSWERS_NS) {
    char words[768];
    stall->told = group->call_count;
    describe(group, waits, waited_ns, words, sizeof words);
    (void)pthread_mutex_unlock(&group->lock);
    stall->call(stall->context, words);
    (void)pthread_mutex_lock(&group->lock);
  }
}
