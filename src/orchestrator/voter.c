/* The thread of a member: libraft on one side, connections on the other, the rules of leading in between. */
#include "orchestrator/voter.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/members.h"
#include "orchestrator/raft_memory.h"
#include "orchestrator/voter_links.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "os/thread.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TURN_MS = 25, HEARTBEAT_MS = 150, ELECTION_MS = 1000, ENTRY_BYTES = 16 };

static const uint64_t CALL_NS = 500000000u;
static const uint64_t CHANGE_NS = 500000000u;
static const uint64_t HEARD_NS = 2000000000u; /* as long as an election may take to begin */

struct even_voter {
  pthread_t thread;
  atomic_bool stop;
  pthread_mutex_t lock; /* of what follows, up to the thread's own */
  even_voter_view view;
  int announced;
  even_voter_member *wanted;
  size_t wanted_count; /* 0: nobody has said */
  /* the thread's */
  even_loop loop;
  even_voter_links links;
  even_raft_memory memory;
  struct raft raft;
  struct raft_fsm machine;
  bool raft_open;
  even_voter_member *members; /* those that were named at first: before the log says who there is */
  size_t count;
  uint64_t first;
  even_leadership applied; /* what the log says */
  uint64_t leader_ns;      /* when anything came from the leader last, or since when it is none */
  uint64_t quorum_ns;
  uint64_t heard_ns; /* when the log's leader was heard last */
  bool proposed;
  struct raft_apply apply;
  bool changing;
  struct raft_change change;
  bool yielding;
  struct raft_transfer transfer;
  uint64_t next_call_ns;
  uint64_t next_change_ns;
};

/* ---- the log ---- */

/* The newest that is known has changed: the others hear of it, and the new leader has its time to be seen. */
static void newer(even_voter *voter) {
  voter->leader_ns = even_clock_ns();
  voter->links.own.port = 0;
  even_voter_links_tell(&voter->links);
}

static int on_apply(struct raft_fsm *machine, const struct raft_buffer *buffer, void **result) {
  even_voter *voter = machine->data;
  *result = NULL;
  if (buffer->len != ENTRY_BYTES) {
    return RAFT_MALFORMED;
  }
  const even_leadership entry = {even_voter_read_number(buffer->base),
                                 even_voter_read_number((const unsigned char *)buffer->base + 8)};
  if (even_leadership_apply(&voter->applied, &entry) &&
      even_leadership_hear(&voter->links.own.newest, &voter->applied)) {
    newer(voter);
  }
  return 0;
}

static int on_snapshot(struct raft_fsm *machine, struct raft_buffer *buffers[], unsigned *count) {
  (void)machine;
  (void)buffers;
  (void)count;
  return RAFT_IOERR; /* never asked for: the threshold is beyond any log */
}

static int on_restore(struct raft_fsm *machine, struct raft_buffer *buffer) {
  (void)machine;
  (void)buffer;
  return RAFT_IOERR;
}

static void on_proposed(struct raft_apply *request, int status, void *result) {
  (void)status; /* the log says what has become of it */
  (void)result;
  ((even_voter *)request->data)->proposed = false;
}

static void propose(even_voter *voter, uint64_t leader) {
  struct raft_buffer buffer = {.base = raft_malloc(ENTRY_BYTES), .len = ENTRY_BYTES};
  if (buffer.base == NULL) {
    return; /* again in the next turn */
  }
  even_voter_write_number(buffer.base, voter->applied.generation + 1);
  even_voter_write_number((unsigned char *)buffer.base + 8, leader);
  voter->proposed = true;
  voter->apply.data = voter;
  if (raft_apply(&voter->raft, &voter->apply, &buffer, 1, on_proposed) != 0) {
    voter->proposed = false;
    raft_free(buffer.base);
  }
}

static void on_yielded(struct raft_transfer *request) {
  ((even_voter *)request->data)->yielding = false;
}

static void yield_to(even_voter *voter, uint64_t leader) {
  voter->transfer.data = voter;
  voter->yielding = raft_transfer(&voter->raft, &voter->transfer, leader, on_yielded) == 0;
}

/* ---- who there is ---- */

static void on_changed(struct raft_change *request, int status) {
  (void)status; /* what is still to be done is tried again */
  ((even_voter *)request->data)->changing = false;
}

static even_member_role role_of(const struct raft_server *server) {
  return server->role == RAFT_VOTER     ? EVEN_MEMBER_VOTER
         : server->role == RAFT_STANDBY ? EVEN_MEMBER_LISTENER
                                        : EVEN_MEMBER_SPARE;
}

static const char *address_of(const even_voter_member *members, size_t count, uint64_t id) {
  for (size_t i = 0; i < count; i++) {
    if (members[i].id == id) {
      return members[i].address;
    }
  }
  return "";
}

static void make(even_voter *voter, const even_member_change *change, const char *address) {
  int failed = 0;
  voter->change.data = voter;
  voter->changing = true;
  if (change->kind == EVEN_MEMBER_ADD) {
    failed = raft_add(&voter->raft, &voter->change, change->id, address, on_changed);
  } else if (change->kind == EVEN_MEMBER_REMOVE) {
    failed = raft_remove(&voter->raft, &voter->change, change->id, on_changed);
  } else {
    failed = raft_assign(&voter->raft, &voter->change, change->id,
                         change->role == EVEN_MEMBER_VOTER ? RAFT_VOTER : RAFT_STANDBY, on_changed);
  }
  voter->changing = failed == 0;
}

/* Towards what the agent wants; one that could not be done is tried again in a moment. */
static void change_members(even_voter *voter, uint64_t now) {
  even_member_place places[EVEN_VOTER_MOST + 1];
  uint64_t ids[EVEN_VOTER_MOST];
  char address[EVEN_VOTER_ADDRESS];
  size_t count = 0;
  const struct raft_configuration *all = &voter->raft.configuration;
  if (voter->changing || now < voter->next_change_ns || all->n > EVEN_VOTER_MOST) {
    return;
  }
  for (unsigned i = 0; i < all->n; i++) {
    places[i] = (even_member_place){.id = all->servers[i].id, .role = role_of(&all->servers[i])};
  }
  (void)pthread_mutex_lock(&voter->lock);
  count = voter->wanted_count;
  for (size_t i = 0; i < count; i++) {
    ids[i] = voter->wanted[i].id;
  }
  even_member_change change = {.kind = EVEN_MEMBER_KEEP};
  if (count > 0) {
    change = even_members_next(places, all->n, ids, count, voter->links.own.id);
    (void)snprintf(address, sizeof address, "%s", address_of(voter->wanted, count, change.id));
  }
  (void)pthread_mutex_unlock(&voter->lock);
  if (change.kind != EVEN_MEMBER_KEEP) {
    voter->next_change_ns = now + CHANGE_NS / 10;
    make(voter, &change, address);
    if (!voter->changing) {
      voter->next_change_ns = now + CHANGE_NS;
    }
  }
}

/* ---- what comes ---- */

static void on_word(void *context, const even_voter_word *word) {
  even_voter *voter = context;
  even_voter_word *own = &voter->links.own;
  if (even_leadership_hear(&own->newest, &word->newest)) {
    newer(voter);
  }
  if (word->newest.generation == own->newest.generation && word->id == word->newest.leader && word->port > 0) {
    own->port = word->port;
  }
}

static even_status on_raft(void *context, uint64_t from, const unsigned char *bytes, size_t count) {
  even_voter *voter = context;
  char name[24];
  raft_id leader = 0;
  const char *address = NULL;
  (void)snprintf(name, sizeof name, "%llu", (unsigned long long)from);
  EVEN_TRY(even_raft_memory_receive(&voter->memory, from, name, bytes, count));
  raft_leader(&voter->raft, &leader, &address);
  if (leader == from) {
    voter->heard_ns = even_clock_ns();
  }
  return EVEN_OK;
}

static bool send_raft(void *context, uint64_t member, const void *bytes, size_t count) {
  return even_voter_links_send(&((even_voter *)context)->links, member, bytes, count);
}

/* ---- its turns ---- */

static const struct raft_server *server_of(const even_voter *voter, uint64_t id) {
  for (unsigned i = 0; i < voter->raft.configuration.n; i++) {
    if (voter->raft.configuration.servers[i].id == id) {
      return &voter->raft.configuration.servers[i];
    }
  }
  return NULL;
}

static void call_others(even_voter *voter, uint64_t now) {
  uint64_t self = voter->links.own.id;
  const struct raft_configuration *all = &voter->raft.configuration;
  if (now < voter->next_call_ns) {
    return;
  }
  voter->next_call_ns = now + CALL_NS;
  const struct raft_server *own = server_of(voter, self);
  for (unsigned i = 0; i < all->n; i++) {
    bool votes = all->servers[i].role == RAFT_VOTER || (own != NULL && own->role == RAFT_VOTER);
    if (all->servers[i].id < self && votes) {
      even_voter_links_call(&voter->links, all->servers[i].id, all->servers[i].address);
    }
  }
  for (size_t i = 0; own == NULL && i < voter->count; i++) { /* it joins, or was left out: others tell who leads */
    if (voter->members[i].id < self) {
      even_voter_links_call(&voter->links, voter->members[i].id, voter->members[i].address);
    }
  }
}

static void see(even_voter *voter, uint64_t now, even_leadership_view *out) {
  const even_voter_word *own = &voter->links.own;
  raft_id log_leader = 0;
  const char *address = NULL;
  bool leads = raft_state(&voter->raft) == RAFT_LEADER;
  raft_leader(&voter->raft, &log_leader, &address);
  bool quorum = leads || (log_leader != 0 && log_leader != own->id && now - voter->heard_ns < HEARD_NS);
  if (quorum) {
    voter->quorum_ns = now;
  }
  uint64_t whom = own->newest.generation == 0 ? voter->first : own->newest.leader;
  const even_voter_link *link = even_voter_links_find(&voter->links, whom);
  if (link != NULL) {
    voter->leader_ns = link->link.heard_ns;
  }
  *out = (even_leadership_view){.newest = own->newest,
                                .applied = voter->applied.generation,
                                .self = own->id,
                                .first = voter->first,
                                .raft_leads = leads,
                                .quorum = quorum,
                                .quorum_ns = voter->quorum_ns,
                                .leader_linked = link != NULL,
                                .leader_ns = voter->leader_ns < now ? voter->leader_ns : now,
                                .proposed = voter->proposed,
                                .now_ns = now};
}

static void act(even_voter *voter, const even_leadership_view *view) {
  switch (even_leadership_next(view)) {
    case EVEN_LEADERSHIP_FIRST:
      propose(voter, voter->first);
      break;
    case EVEN_LEADERSHIP_SUCCEED:
      propose(voter, view->self);
      break;
    case EVEN_LEADERSHIP_YIELD:
      if (!voter->yielding) {
        yield_to(voter, view->newest.leader);
      }
      break;
    case EVEN_LEADERSHIP_REST:
      break;
  }
  if (view->raft_leads && view->newest.leader == view->self && view->applied == view->newest.generation) {
    change_members(voter, view->now_ns);
  }
}

static void publish(even_voter *voter, const even_leadership_view *view) {
  even_voter_word *own = &voter->links.own;
  even_voter_view *out = &voter->view;
  const struct raft_server *server = server_of(voter, view->newest.leader);
  bool leads = view->newest.generation > 0 && view->newest.leader == view->self;
  (void)pthread_mutex_lock(&voter->lock);
  uint64_t announced = leads ? (uint64_t)voter->announced : own->port;
  *out = (even_voter_view){.newest = view->newest,
                           .port = (int)announced,
                           .acts = even_leadership_acts(view),
                           .quorum = view->quorum,
                           .linked = leads || view->leader_linked};
  (void)snprintf(out->address, sizeof out->address, "%s",
                 server != NULL ? server->address : address_of(voter->members, voter->count, view->newest.leader));
  for (unsigned i = 0; i < voter->raft.configuration.n; i++) {
    out->voters += voter->raft.configuration.servers[i].role == RAFT_VOTER ? 1 : 0;
  }
  char *colon = strrchr(out->address, ':');
  if (colon != NULL) {
    *colon = '\0';
  }
  (void)pthread_mutex_unlock(&voter->lock);
  if (announced != own->port) {
    own->port = announced;
    even_voter_links_tell(&voter->links);
  }
}

static void *live(void *argument) {
  even_voter *voter = argument;
  while (!atomic_load(&voter->stop)) {
    even_leadership_view view;
    if (even_loop_turn(&voter->loop, TURN_MS) != EVEN_OK) {
      even_error_clear(); /* what it lacks (memory) may come back */
    }
    uint64_t now = even_clock_ns();
    even_voter_links_tick(&voter->links, now);
    even_raft_memory_turn(&voter->memory, now);
    see(voter, now, &view);
    act(voter, &view);
    call_others(voter, now);
    publish(voter, &view);
  }
  return NULL;
}

/* ---- opening ---- */

static even_status raft_failed(const even_voter *voter, const char *what, int failed) {
  (void)voter;
  return even_fail(failed == RAFT_NOMEM ? EVEN_ERR_MEMORY : EVEN_ERR_SYSTEM, "the voters' log: %s: %s", what,
                   raft_strerror(failed));
}

static int bootstrap(even_voter *voter) {
  struct raft_configuration all;
  unsigned voters = even_leadership_voters((unsigned)voter->count);
  int failed = 0;
  raft_configuration_init(&all);
  for (size_t i = 0; failed == 0 && i < voter->count; i++) {
    failed = raft_configuration_add(&all, voter->members[i].id, voter->members[i].address,
                                    i < voters ? RAFT_VOTER : RAFT_STANDBY);
  }
  failed = failed == 0 ? raft_bootstrap(&voter->raft, &all) : failed;
  raft_configuration_close(&all);
  return failed;
}

static even_status open_raft(even_voter *voter, const even_voter_params *params) {
  voter->machine =
      (struct raft_fsm){.version = 1, .data = voter, .apply = on_apply, .snapshot = on_snapshot, .restore = on_restore};
  even_raft_memory_open(&voter->memory, voter, send_raft);
  int failed = raft_init(&voter->raft, &voter->memory.io, &voter->machine, params->self,
                         address_of(voter->members, voter->count, params->self));
  if (failed != 0) {
    return raft_failed(voter, "it cannot be opened", failed);
  }
  voter->raft_open = true;
  raft_set_heartbeat_timeout(&voter->raft, HEARTBEAT_MS);
  raft_set_election_timeout(&voter->raft, ELECTION_MS);
  raft_set_snapshot_threshold(&voter->raft, UINT32_MAX);
  raft_set_pre_vote(&voter->raft, true);
  failed = params->joins ? 0 : bootstrap(voter);
  failed = failed == 0 ? raft_start(&voter->raft) : failed;
  return failed == 0 ? EVEN_OK : raft_failed(voter, "it cannot be begun", failed);
}

static even_status open_all(even_voter *voter, const even_voter_params *params) {
  voter->links = (even_voter_links){.loop = &voter->loop,
                                    .listener = params->listener,
                                    .watch = {.fd = -1},
                                    .own = {.id = params->self},
                                    .context = voter,
                                    .word = on_word,
                                    .raft = on_raft};
  memcpy(voter->links.key, params->key, sizeof voter->links.key);
  voter->first = params->first;
  voter->leader_ns = voter->quorum_ns = even_clock_ns();
  EVEN_TRY(EVEN_NEW_ARRAY(&voter->members, params->count));
  memcpy(voter->members, params->members, params->count * sizeof *params->members);
  voter->count = params->count;
  EVEN_TRY(even_loop_open(&voter->loop));
  EVEN_TRY(even_voter_links_open(&voter->links));
  EVEN_TRY(open_raft(voter, params));
  return even_thread_start(live, voter, &voter->thread);
}

static void free_all(even_voter *voter) {
  if (voter->raft_open) {
    raft_close(&voter->raft, NULL);
  }
  even_voter_links_close(&voter->links);
  even_loop_close(&voter->loop);
  (void)pthread_mutex_destroy(&voter->lock);
  even_free(voter->members);
  even_free(voter->wanted);
  even_free(voter);
}

even_status even_voter_open(const even_voter_params *params, even_voter **out) {
  even_voter *voter = NULL;
  *out = NULL;
  if (params->size != sizeof *params || params->count == 0 || params->count > EVEN_VOTER_MOST || params->self == 0) {
    even_pipe_close(params->listener);
    return even_fail(EVEN_ERR_ARGUMENT, "a group of %zu members", params->count);
  }
  even_status made = EVEN_NEW(&voter);
  if (made != EVEN_OK) {
    even_pipe_close(params->listener);
    return made;
  }
  voter->loop.fd = -1;
  atomic_init(&voter->stop, false);
  (void)pthread_mutex_init(&voter->lock, NULL);
  even_status status = open_all(voter, params);
  if (status != EVEN_OK) {
    const even_error kept = *even_error_last();
    voter->links.listener = params->listener;
    free_all(voter);
    return even_error_restore(&kept);
  }
  *out = voter;
  return EVEN_OK;
}

void even_voter_close(even_voter *voter) {
  if (voter == NULL) {
    return;
  }
  atomic_store(&voter->stop, true);
  even_thread_join(voter->thread);
  free_all(voter);
}

const char *even_voter_library(void) {
  return "libraft " EVEN_RAFT_VERSION;
}

/* ---- from other threads ---- */

void even_voter_look(even_voter *voter, even_voter_view *out) {
  (void)pthread_mutex_lock(&voter->lock);
  *out = voter->view;
  (void)pthread_mutex_unlock(&voter->lock);
}

void even_voter_announce(even_voter *voter, int port) {
  (void)pthread_mutex_lock(&voter->lock);
  voter->announced = port;
  (void)pthread_mutex_unlock(&voter->lock);
}

even_status even_voter_want(even_voter *voter, const even_voter_member *members, size_t count) {
  even_voter_member *copy = NULL;
  if (count == 0 || count > EVEN_VOTER_MOST) {
    return even_fail(EVEN_ERR_ARGUMENT, "a group of %zu members", count);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&copy, count));
  memcpy(copy, members, count * sizeof *members);
  (void)pthread_mutex_lock(&voter->lock);
  even_voter_member *before = voter->wanted;
  voter->wanted = copy;
  voter->wanted_count = count;
  (void)pthread_mutex_unlock(&voter->lock);
  even_free(before);
  return EVEN_OK;
}
