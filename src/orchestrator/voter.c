/* The thread of a member: the log on one side, connections on the other, the rules of leading in between. */
#include "orchestrator/voter.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/voter_thread.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "os/socket.h"
#include "os/thread.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TURN_MS = 25 };

/* ---- what comes ---- */

/* The newest that is known has changed: the others hear of it, and the new leader has its time to be seen. */
static void newer(even_voter *voter) {
  voter->leader_ns = even_clock_boot_ns();
  voter->links.own.port = 0;
  even_voter_links_tell(&voter->links);
}

static void on_log(void *context) {
  even_voter *voter = context;
  if (even_leadership_hear(&voter->links.own.newest, &voter->log.says.sure)) {
    newer(voter);
  }
}

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

static uint64_t term_now(void *context) {
  return ((even_voter *)context)->log.raft.current_term;
}

static even_status on_raft(void *context, uint64_t from, const unsigned char *bytes, size_t count) {
  even_voter *voter = context;
  char name[24];
  (void)snprintf(name, sizeof name, "%llu", (unsigned long long)from);
  EVEN_TRY(even_raft_memory_receive(&voter->log.memory, from, name, bytes, count));
  if (even_voter_log_leader(&voter->log) == from) {
    voter->heard_ns = even_clock_boot_ns();
  }
  return EVEN_OK;
}

static bool send_raft(void *context, uint64_t member, const void *bytes, size_t count) {
  return even_voter_links_send(&((even_voter *)context)->links, member, bytes, count);
}

static bool where_it_leads(void *context, char address[EVEN_VOTER_ADDRESS], int *port) {
  even_voter *voter = context;
  (void)pthread_mutex_lock(&voter->lock);
  memcpy(address, voter->view.address, EVEN_VOTER_ADDRESS);
  *port = voter->view.port;
  (void)pthread_mutex_unlock(&voter->lock);
  return *port > 0 && address[0] != '\0';
}

/* ---- its turns ---- */

/* Where it listens: as its agent said it last, else as the log says. Under the lock. */
static void address_of(const even_voter *voter, uint64_t id, char out[EVEN_VOTER_ADDRESS]) {
  const struct raft_server *server = even_voter_log_server(&voter->log, id);
  (void)snprintf(out, EVEN_VOTER_ADDRESS, "%.63s", server == NULL ? "" : server->address);
  even_member_list_find(&voter->known, id, out);
  even_member_list_find(&voter->wanted, id, out);
}

static void where_it_listens(void *context, uint64_t id, char address[EVEN_VOTER_ADDRESS]) {
  even_voter *voter = context;
  char now[EVEN_VOTER_ADDRESS];
  (void)pthread_mutex_lock(&voter->lock);
  address_of(voter, id, now);
  (void)pthread_mutex_unlock(&voter->lock);
  if (now[0] != '\0') {
    memcpy(address, now, sizeof now);
  }
}

/* But for this one, those with lower numbers than `below`. */
static void call_each(even_voter *voter, const uint64_t *ids, size_t count, uint64_t below) {
  for (size_t i = 0; i < count; i++) {
    char address[EVEN_VOTER_ADDRESS] = "";
    if (ids[i] != voter->links.own.id && ids[i] < below) {
      where_it_listens(voter, ids[i], address);
      even_voter_links_call(&voter->links, ids[i], address);
    }
  }
}

/* All that it knows of, this one and some twice among them. */
static size_t name_all(even_voter *voter, uint64_t ids[2 * EVEN_VOTER_MOST]) {
  const struct raft_configuration *all = &voter->log.raft.configuration;
  size_t count = 0;
  for (unsigned i = 0; i < all->n && count < EVEN_VOTER_MOST; i++) {
    ids[count++] = all->servers[i].id;
  }
  (void)pthread_mutex_lock(&voter->lock);
  for (size_t i = 0; i < voter->known.count; i++) {
    ids[count++] = voter->known.items[i].id;
  }
  (void)pthread_mutex_unlock(&voter->lock);
  return count;
}

/* Those with lower numbers, of those with which it is to be connected: others tell who leads. One with which nobody is
 * connected calls all of these, and when their hosts have refused, all others, to know what theirs say: not before, for
 * each connection stays. And those that are missing, which may know of none of these. */
static void call_others(even_voter *voter, uint64_t now) {
  uint64_t ids[2 * EVEN_VOTER_MOST];
  uint64_t near[2 * EVEN_VOTER_MOST];
  size_t nears = 0;
  if (now < voter->next_call_ns && !voter->links.closed) {
    return;
  }
  voter->links.closed = false;
  voter->next_call_ns = now + voter->times.call_ns;
  bool alone = voter->links.alone_ns != 0 && now > voter->links.alone_ns + voter->times.gone_ns;
  size_t count = name_all(voter, ids);
  for (size_t i = 0; i < count; i++) {
    if (even_voter_log_connects(&voter->log, ids[i])) {
      near[nears++] = ids[i];
    }
  }
  call_each(voter, near, nears, alone ? UINT64_MAX : voter->links.own.id);
  if (alone && even_voter_links_deserted(&voter->links, near, nears) != 0) {
    call_each(voter, ids, count, UINT64_MAX);
  }
  even_voter_links_call_missing(&voter->links);
}

/* The one that leads the job, or shall at first. */
static uint64_t leader_of(const even_voter *voter) {
  const even_leadership *newest = &voter->links.own.newest;
  return newest->generation == 0 ? voter->first : newest->leader;
}

/* What a majority of voters has answered, of a leader that leads the log, too, and knows all that is in it. */
static void renew_lease(even_voter *voter, bool leads, uint64_t now) {
  uint64_t times[EVEN_VOTER_MOST];
  size_t count = 0;
  even_voter_log *log = &voter->log;
  const struct raft_configuration *all = &log->raft.configuration;
  if (!leads || log->says.sure_term != log->raft.current_term || leader_of(voter) != log->raft.id ||
      all->n > EVEN_VOTER_MOST) {
    return;
  }
  bool ask = now >= voter->next_ask_ns;
  voter->next_ask_ns = ask ? now + voter->times.ask_ns : voter->next_ask_ns;
  for (unsigned i = 0; i < all->n; i++) {
    even_voter_link *link = even_voter_links_find(&voter->links, all->servers[i].id);
    if (link != NULL && ask) {
      even_voter_links_ask(link, now);
    }
    if (all->servers[i].role == RAFT_VOTER) {
      bool answered = link != NULL && link->answered_term == log->raft.current_term;
      times[count++] = all->servers[i].id == log->raft.id ? now : answered ? link->answered_ns : 0;
    }
  }
  uint64_t answered = even_leadership_answered(times, count);
  if (answered > voter->lease_ns) {
    (void)pthread_mutex_lock(&voter->lock);
    voter->lease_ns = answered;
    (void)pthread_mutex_unlock(&voter->lock);
  }
}

static void see(even_voter *voter, uint64_t now, even_leadership_view *out) {
  const even_voter_word *own = &voter->links.own;
  bool leads = even_voter_log_leads(&voter->log);
  renew_lease(voter, leads, now);
  uint64_t whom = leader_of(voter);
  const even_voter_link *link = even_voter_links_find(&voter->links, whom);
  if (link != NULL) {
    voter->leader_ns = now - (even_clock_ns() - link->link.heard_ns); /* links reckon without the machine's sleep */
  }
  *out =
      (even_leadership_view){.times = voter->times,
                             .newest = own->newest,
                             .applied = voter->log.says.sure.generation,
                             .self = own->id,
                             .first = voter->first,
                             .raft_leads = leads,
                             .raft_own = voter->log.says.sure_term == voter->log.raft.current_term,
                             .leader_linked = link != NULL,
                             .leader_awaited = even_voter_links_awaits(&voter->links, whom, now, voter->times.call_ns),
                             .leader_ns = voter->leader_ns < now ? voter->leader_ns : now,
                             .lease_ns = voter->lease_ns,
                             .proposed = voter->log.proposed,
                             .now_ns = now};
  (void)pthread_mutex_lock(&voter->lock);
  out->ends = voter->ends;
  out->hands = voter->hands;
  out->witness = voter->witness || voter->waits || voter->hands; /* what it has given away it does not take back */
  (void)pthread_mutex_unlock(&voter->lock);
}

static void change_members(even_voter *voter, uint64_t now) {
  even_voter_member wanted[EVEN_VOTER_MOST];
  (void)pthread_mutex_lock(&voter->lock);
  size_t count = voter->wanted.count;
  if (count > 0) {
    memcpy(wanted, voter->wanted.items, count * sizeof *wanted);
  }
  (void)pthread_mutex_unlock(&voter->lock); /* what follows writes to a disk */
  even_voter_log_change(&voter->log, wanted, count, now);
}

/* Among those to whom the job is handed over; SIZE_MAX: it is none. */
static size_t place_of(even_voter *voter, uint64_t id) {
  size_t place = SIZE_MAX;
  (void)pthread_mutex_lock(&voter->lock);
  for (size_t i = voter->heir_count; i-- > 0;) {
    place = voter->heirs[i] == id ? i : place;
  }
  (void)pthread_mutex_unlock(&voter->lock);
  return place;
}

/* The next voter that is there: in a circle, so that each has its turn; or of heirs the first. 0: none is. */
static uint64_t next_voter(even_voter *voter, bool heirs) {
  uint64_t next = 0;
  size_t least = SIZE_MAX;
  const struct raft_configuration *all = &voter->log.raft.configuration;
  unsigned own = 0;
  for (; own < all->n && all->servers[own].id != voter->links.own.id; own++) {
  }
  for (unsigned i = 1; i < all->n; i++) {
    const struct raft_server *server = &all->servers[(own + i) % all->n];
    if (server->role != RAFT_VOTER || even_voter_links_find(&voter->links, server->id) == NULL) {
      continue;
    }
    size_t place = heirs ? place_of(voter, server->id) : 0;
    next = place < least ? server->id : next;
    least = place < least ? place : least;
  }
  return next;
}

static void act(even_voter *voter, const even_leadership_view *view) {
  uint64_t next = 0;
  switch (even_leadership_next(view)) {
    case EVEN_LEADERSHIP_CONFIRM:
      even_voter_log_propose(&voter->log, 0);
      break;
    case EVEN_LEADERSHIP_FIRST:
      even_voter_log_propose(&voter->log, voter->first);
      break;
    case EVEN_LEADERSHIP_SUCCEED:
      even_voter_log_propose(&voter->log, view->self);
      break;
    case EVEN_LEADERSHIP_HAND:
      next = next_voter(voter, true);
      if (next != 0) {
        even_voter_log_propose(&voter->log, next);
      }
      break;
    case EVEN_LEADERSHIP_END:
      even_voter_log_propose(&voter->log, EVEN_LEADERSHIP_NOBODY);
      break;
    case EVEN_LEADERSHIP_YIELD:
      even_voter_log_yield(&voter->log, leader_of(voter));
      break;
    case EVEN_LEADERSHIP_PASS:
      next = next_voter(voter, false);
      if (next != 0) {
        even_voter_log_yield(&voter->log, next);
      }
      break;
    case EVEN_LEADERSHIP_REST:
      break;
  }
  if (view->raft_leads && view->raft_own && view->newest.leader == view->self &&
      view->applied == view->newest.generation) {
    change_members(voter, view->now_ns);
  }
}

/* Under the lock: of those that shall be members so many are there; `voters`: of those of them that vote. */
static unsigned count_there(even_voter *voter, bool voters) {
  unsigned count = 0;
  for (size_t i = 0; i < voter->wanted.count; i++) {
    uint64_t id = voter->wanted.items[i].id;
    bool there = id == voter->links.own.id || even_voter_links_find(&voter->links, id) != NULL;
    count += there && (!voters || even_voter_log_votes(&voter->log, id)) ? 1 : 0;
  }
  return count;
}

static bool hears_majority(even_voter *voter, const even_leadership_view *view, bool leads_job) {
  uint64_t leader = even_voter_log_leader(&voter->log);
  bool heard = view->raft_leads ||
               (leader != 0 && leader != view->self && view->now_ns - voter->heard_ns < voter->times.heard_ns);
  return heard && (!leads_job || view->now_ns < view->lease_ns + voter->times.heard_ns);
}

static void publish(even_voter *voter, const even_leadership_view *view) {
  even_voter_word *own = &voter->links.own;
  even_voter_view *out = &voter->view;
  bool leads = view->newest.generation > 0 && view->newest.leader == view->self;
  bool quorum = hears_majority(voter, view, leads);
  uint64_t claim_ns = voter->log.claim_ns; /* 0: the one before, which has no ranks any more, named it (hand over) */
  const even_voter_missing *missing = even_voter_links_missing(&voter->links);
  uint64_t ids[2 * EVEN_VOTER_MOST];
  bool alone = voter->links.alone_ns != 0;
  uint64_t deserted_ns = alone ? even_voter_links_deserted(&voter->links, ids, name_all(voter, ids)) : 0;
  (void)pthread_mutex_lock(&voter->lock);
  uint64_t announced = leads ? (uint64_t)voter->announced : own->port;
  *out = (even_voter_view){
      .newest = view->newest,
      .port = (int)announced,
      .quorum = quorum,
      .linked = leads || view->leader_linked,
      .starts_ns = leads && view->newest.generation > 1 && claim_ns != 0 ? claim_ns + voter->times.wait_ns : 0,
      .exact = leads && view->raft_leads && view->raft_own && quorum &&
               even_voter_log_has_only(&voter->log, voter->wanted.items, voter->wanted.count),
      .settled = leads && view->raft_leads && quorum && count_there(voter, false) == voter->wanted.count &&
                 even_voter_log_is(&voter->log, voter->wanted.items, voter->wanted.count),
      .staying = leads && view->raft_leads && quorum ? count_there(voter, true) : 0,
      .voters = even_voter_log_voters(&voter->log),
      .deserted_ns = deserted_ns,
      .missing_ns = missing == NULL ? 0 : missing->since_ns,
      .missing_closed = missing != NULL && missing->closed,
      .untold = even_leadership_ended(&view->newest) && !even_voter_links_delivered(&voter->links)};
  memcpy(out->missing, missing == NULL ? "" : missing->address, missing == NULL ? 1 : sizeof out->missing);
  address_of(voter, view->newest.leader, out->address);
  out->address[strcspn(out->address, ":")] = '\0';
  (void)pthread_mutex_unlock(&voter->lock);
  if (announced != own->port) {
    own->port = announced;
    even_voter_links_tell(&voter->links);
  }
}

/* One that has ended its job has nobody after it. */
static void tell_guardian(even_voter *voter, const even_leadership_view *seen) {
  even_leadership_view view = *seen;
  even_status status = EVEN_OK;
  bool leads = view.newest.generation > 0 && view.newest.leader == view.self;
  voter->led = leads ? view.newest.generation : voter->led;
  (void)pthread_mutex_lock(&voter->lock);
  view.lease_ns = voter->lease_ns;
  if (voter->guardian != NULL && even_leadership_acts(&view)) {
    status = even_guardian_limit(voter->guardian, view.lease_ns + voter->times.guard_ns,
                                 view.lease_ns + voter->times.kill_ns);
  } else if (voter->guardian != NULL && even_leadership_ended(&view.newest) &&
             view.newest.generation == voter->led + 1) {
    status = even_guardian_limit(voter->guardian, 0, UINT64_MAX);
  }
  (void)pthread_mutex_unlock(&voter->lock);
  if (status != EVEN_OK) {
    even_error_clear(); /* it is gone: another one is started, and told */
  }
}

/* What it could not keep the others must not have heard, nor may they count with it: until a new leader is there, if
 * it was one, and then it may be again what it was. */
static bool gives_up(even_voter *voter, uint64_t now) {
  const even_error *why = even_voter_log_gave_up(&voter->log);
  if (why == NULL) {
    return false;
  }
  if (voter->again_ns == 0) {
    (void)pthread_mutex_lock(&voter->lock);
    voter->gave_up = true;
    (void)snprintf(voter->why, sizeof voter->why, "%.*s", (int)sizeof voter->why - 1, why->what);
    (void)pthread_mutex_unlock(&voter->lock);
  } else if (now < voter->again_ns) {
    return true;
  } else if (even_voter_log_again(&voter->log, &voter->times) == EVEN_OK) {
    voter->again_ns = 0;
    return false;
  }
  even_error_clear();
  voter->again_ns = now + voter->times.wait_ns;
  return true;
}

/* Its agent could not lead, nor serve: it is as good as gone, where those that are heard can elect one of them. */
static bool stands(even_voter *voter) {
  const struct raft_configuration *all = &voter->log.raft.configuration;
  unsigned after = even_voter_log_after(&voter->log, leader_of(voter));
  unsigned others = 0;
  for (unsigned i = 0; i < all->n; i++) {
    others += all->servers[i].role == RAFT_VOTER && even_voter_links_find(&voter->links, all->servers[i].id) != NULL;
  }
  bool can = voter->stood || others > even_voter_log_voters(&voter->log) / 2;
  voter->stood = can && even_voter_watch_stands(&voter->watch, after, even_clock_boot_ns());
  return voter->stood;
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
    bool gave_up = gives_up(voter, even_clock_boot_ns());
    bool agent_stands = stands(voter);
    even_voter_links_rest(&voter->links, gave_up || agent_stands);
    if (agent_stands) {
      continue;
    }
    even_raft_memory_turn(&voter->log.memory, now);
    see(voter, even_clock_boot_ns(), &view);
    act(voter, &view);
    if (!gave_up) {
      call_others(voter, now);
    }
    publish(voter, &view);
    tell_guardian(voter, &view);
  }
  return NULL;
}

/* ---- opening ---- */

static even_status open_all(even_voter *voter, const even_voter_params *params) {
  even_raft_store store;
  bool known = false;
  voter->links = (even_voter_links){.loop = &voter->loop,
                                    .listener = params->listener,
                                    .watch = {.fd = -1},
                                    .own = {.id = params->self},
                                    .context = voter,
                                    .term = term_now,
                                    .word = on_word,
                                    .raft = on_raft,
                                    .where = where_it_listens,
                                    .leader = where_it_leads};
  memcpy(voter->links.key, params->key, sizeof voter->links.key);
  voter->times = even_leadership_times_of(params->silence_ms > 0 ? params->silence_ms : EVEN_SOCKET_SILENCE_MS);
  voter->log.context = voter;
  voter->log.changed = on_log;
  voter->log.memory.store.lock = -1;
  voter->first = params->first;
  voter->witness = params->witness;
  voter->waits = params->waits;
  voter->leader_ns = even_clock_boot_ns();
  EVEN_TRY(even_member_list_copy(params->members, params->count, &voter->known));
  EVEN_TRY(even_loop_open(&voter->loop));
  EVEN_TRY(even_voter_links_open(&voter->links));
  EVEN_TRY(even_voter_log_store(params, &store, &known));
  EVEN_TRY(even_voter_log_open(&voter->log, params, &voter->times, &store, known, send_raft));
  return even_thread_start(live, voter, &voter->thread);
}

static void free_all(even_voter *voter, bool forget) {
  even_voter_log_close(&voter->log, forget);
  even_voter_links_close(&voter->links);
  even_loop_close(&voter->loop);
  (void)pthread_mutex_destroy(&voter->lock);
  even_member_list_free(&voter->known);
  even_member_list_free(&voter->wanted);
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
    free_all(voter, false);
    return even_error_restore(&kept);
  }
  *out = voter;
  return EVEN_OK;
}

void even_voter_close(even_voter *voter, bool forget) {
  if (voter == NULL) {
    return;
  }
  atomic_store(&voter->stop, true);
  even_thread_join(voter->thread);
  free_all(voter, forget);
}

const char *even_voter_library(void) {
  return "libraft " EVEN_RAFT_VERSION;
}
