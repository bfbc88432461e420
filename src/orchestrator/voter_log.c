/* The log of who leads. */
#include "orchestrator/voter_log.h"

#include "base/fail.h"
#include "orchestrator/members.h"
#include "orchestrator/raft_rules.h"
#include "orchestrator/voter_links.h"
#include "os/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ENTRY_BYTES = 24 };

static const uint64_t CHANGE_NS = 500000000u;

/* ---- entries ---- */

static int on_apply(struct raft_fsm *machine, const struct raft_buffer *buffer, void **result) {
  even_voter_log *log = machine->data;
  const unsigned char *bytes = buffer->base;
  *result = NULL;
  if (buffer->len != ENTRY_BYTES) {
    return RAFT_MALFORMED;
  }
  const even_leadership_entry entry = {.says = {even_voter_read_number(bytes), even_voter_read_number(bytes + 8)},
                                       .term = even_voter_read_number(bytes + 16)};
  if (even_leadership_log_apply(&log->says, &entry, log->raft.current_term)) {
    log->changed(log->context);
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
  ((even_voter_log *)request->data)->proposed = false;
}

const even_error *even_voter_log_gave_up(const even_voter_log *log) {
  return even_raft_memory_gave_up(&log->memory);
}

/* Whether libraft may be asked for anything. */
static bool takes_part(const even_voter_log *log) {
  return even_voter_log_gave_up(log) == NULL;
}

void even_voter_log_propose(even_voter_log *log, uint64_t leader) {
  if (!takes_part(log)) {
    return;
  }
  struct raft_buffer buffer = {.base = raft_malloc(ENTRY_BYTES), .len = ENTRY_BYTES};
  unsigned char *bytes = buffer.base;
  if (bytes == NULL) {
    return; /* again in the next turn */
  }
  even_voter_write_number(bytes, leader == 0 ? 0 : log->says.sure.generation + 1);
  even_voter_write_number(bytes + 8, leader);
  even_voter_write_number(bytes + 16, log->raft.current_term);
  if (leader == log->raft.id) {
    log->claim_ns = log->led_ns;
  }
  log->proposed = true;
  log->apply.data = log;
  if (raft_apply(&log->raft, &log->apply, &buffer, 1, on_proposed) != 0) {
    log->proposed = false;
    raft_free(buffer.base);
  }
}

bool even_voter_log_leads(even_voter_log *log) {
  bool leads = takes_part(log) && raft_state(&log->raft) == RAFT_LEADER;
  if (leads && log->led_term != log->raft.current_term) {
    log->led_term = log->raft.current_term;
    log->led_ns = even_clock_boot_ns();
  }
  return leads;
}

uint64_t even_voter_log_leader(even_voter_log *log) {
  raft_id leader = 0;
  const char *address = NULL;
  if (takes_part(log)) {
    raft_leader(&log->raft, &leader, &address);
  }
  return leader;
}

static void on_yielded(struct raft_transfer *request) {
  ((even_voter_log *)request->data)->yielding = false;
}

void even_voter_log_yield(even_voter_log *log, uint64_t leader) {
  if (takes_part(log) && !log->yielding) {
    log->transfer.data = log;
    log->yielding = raft_transfer(&log->raft, &log->transfer, leader, on_yielded) == 0;
  }
}

/* ---- who there is ---- */

static void on_changed(struct raft_change *request, int status) {
  (void)status; /* what is still to be done is tried again */
  ((even_voter_log *)request->data)->changing = false;
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

/* Where libraft lacks memory in the midst of a change, it has freed the members that it put in place of those before,
 * or has an entry that it has written nowhere. */
static void see_unmade(even_voter_log *log, const struct raft_server *before, int failed) {
  if (log->raft.configuration.servers != before) {
    raft_configuration_init(&log->raft.configuration);
  }
  if (failed == RAFT_NOMEM) {
    (void)even_fail(EVEN_ERR_MEMORY, "libraft had no memory for a change of members");
    even_raft_memory_give_up(&log->memory);
  }
}

static void make(even_voter_log *log, const even_member_change *change, const char *address) {
  const struct raft_server *before = log->raft.configuration.servers;
  int failed = 0;
  log->change.data = log;
  log->changing = true;
  if (change->kind == EVEN_MEMBER_ADD) {
    failed = raft_add(&log->raft, &log->change, change->id, address, on_changed);
  } else if (change->kind == EVEN_MEMBER_REMOVE) {
    failed = raft_remove(&log->raft, &log->change, change->id, on_changed);
  } else {
    failed = raft_assign(&log->raft, &log->change, change->id,
                         change->role == EVEN_MEMBER_VOTER ? RAFT_VOTER : RAFT_STANDBY, on_changed);
  }
  log->changing = failed == 0;
  if (failed != 0) {
    see_unmade(log, before, failed);
  }
}

/* How many there are; 0: too many. */
static size_t list_places(const even_voter_log *log, even_member_place places[EVEN_VOTER_MOST]) {
  const struct raft_configuration *all = &log->raft.configuration;
  for (unsigned i = 0; all->n <= EVEN_VOTER_MOST && i < all->n; i++) {
    places[i] = (even_member_place){.id = all->servers[i].id, .role = role_of(&all->servers[i])};
  }
  return all->n <= EVEN_VOTER_MOST ? all->n : 0;
}

static bool next_change(const even_voter_log *log, const even_voter_member *wanted, size_t count,
                        even_member_change *out) {
  even_member_place places[EVEN_VOTER_MOST];
  uint64_t ids[EVEN_VOTER_MOST];
  size_t there = list_places(log, places);
  if (log->raft.configuration.n > EVEN_VOTER_MOST || count == 0) {
    return false;
  }
  for (size_t i = 0; i < count; i++) {
    ids[i] = wanted[i].id;
  }
  *out = even_members_next(places, there, ids, count, log->raft.id);
  return true;
}

void even_voter_log_change(even_voter_log *log, const even_voter_member *wanted, size_t count, uint64_t now_ns) {
  even_member_change change;
  if (!takes_part(log) || log->changing || now_ns < log->next_change_ns || !next_change(log, wanted, count, &change) ||
      change.kind == EVEN_MEMBER_KEEP) {
    return;
  }
  log->next_change_ns = now_ns + CHANGE_NS / 10;
  make(log, &change, address_of(wanted, count, change.id));
  if (!log->changing) {
    log->next_change_ns = now_ns + CHANGE_NS;
  }
}

bool even_voter_log_is(const even_voter_log *log, const even_voter_member *wanted, size_t count) {
  even_member_change change;
  return !log->changing && log->raft.configuration_uncommitted_index == 0 && next_change(log, wanted, count, &change) &&
         change.kind == EVEN_MEMBER_KEEP;
}

bool even_voter_log_has_only(const even_voter_log *log, const even_voter_member *wanted, size_t count) {
  even_member_change change;
  return !log->changing && log->raft.configuration_uncommitted_index == 0 && next_change(log, wanted, count, &change) &&
         change.kind != EVEN_MEMBER_REMOVE;
}

const struct raft_server *even_voter_log_server(const even_voter_log *log, uint64_t id) {
  for (unsigned i = 0; i < log->raft.configuration.n; i++) {
    if (log->raft.configuration.servers[i].id == id) {
      return &log->raft.configuration.servers[i];
    }
  }
  return NULL;
}

static bool votes(const struct raft_server *server) {
  return server != NULL && server->role == RAFT_VOTER;
}

bool even_voter_log_connects(const even_voter_log *log, uint64_t id) {
  const struct raft_server *own = even_voter_log_server(log, log->raft.id);
  const struct raft_server *other = even_voter_log_server(log, id);
  return own == NULL || (other != NULL && (votes(other) || votes(own)));
}

bool even_voter_log_votes(const even_voter_log *log, uint64_t id) {
  return votes(even_voter_log_server(log, id));
}

unsigned even_voter_log_voters(const even_voter_log *log) {
  unsigned voters = 0;
  for (unsigned i = 0; i < log->raft.configuration.n; i++) {
    voters += log->raft.configuration.servers[i].role == RAFT_VOTER ? 1 : 0;
  }
  return voters;
}

unsigned even_voter_log_after(const even_voter_log *log, uint64_t leader) {
  even_member_place places[EVEN_VOTER_MOST];
  return even_members_after(places, list_places(log, places), log->raft.id, leader);
}

/* ---- opening ---- */

even_status even_voter_log_store(const even_voter_params *params, even_raft_store *store, bool *known) {
  even_status status = even_raft_store_open(store, params->folder, params->self, known);
  if (params->returns && (status == EVEN_ERR_IN_USE || status == EVEN_ERR_CORRUPT || (status == EVEN_OK && !*known))) {
    if (status == EVEN_OK) {
      even_raft_store_close(store, false);
    }
    return even_fail(EVEN_ERR_NOT_FOUND, "member %llu has no log here that it could go on with",
                     (unsigned long long)params->self);
  }
  return status;
}

static even_status raft_failed(const char *what, int failed) {
  return even_fail(failed == RAFT_NOMEM ? EVEN_ERR_MEMORY : EVEN_ERR_SYSTEM, "the voters' log: %s: %s", what,
                   raft_strerror(failed));
}

static int bootstrap(even_voter_log *log, const even_voter_params *params) {
  struct raft_configuration all;
  unsigned voters = even_leadership_voters((unsigned)params->count);
  int failed = 0;
  raft_configuration_init(&all);
  for (size_t i = 0; failed == 0 && i < params->count; i++) {
    failed = raft_configuration_add(&all, params->members[i].id, params->members[i].address,
                                    i < voters ? RAFT_VOTER : RAFT_STANDBY);
  }
  failed = failed == 0 ? raft_bootstrap(&log->raft, &all) : failed;
  raft_configuration_close(&all);
  return failed;
}

static int init(even_voter_log *log, uint64_t self, const char *address, const even_leadership_times *times) {
  log->raft = (struct raft){.state = RAFT_UNAVAILABLE};
  int failed = raft_init(&log->raft, &log->memory.io, &log->machine, self, address);
  log->open = failed == 0;
  if (log->open) {
    raft_set_heartbeat_timeout(&log->raft, (unsigned)(times->heartbeat_ns / 1000000u));
    raft_set_election_timeout(&log->raft, (unsigned)(times->election_ns / 1000000u));
    raft_set_snapshot_threshold(&log->raft, UINT32_MAX);
    raft_set_pre_vote(&log->raft, true);
  }
  return failed;
}

/* One that votes alone leads at once, by the newest members that it has: these count. */
static int start(even_voter_log *log) {
  int failed = raft_start(&log->raft);
  return failed != 0 || raft_state(&log->raft) == RAFT_LEADER ? failed
                                                              : even_raft_rules_members(&log->raft, &log->memory.store);
}

even_status even_voter_log_open(even_voter_log *log, const even_voter_params *params,
                                const even_leadership_times *times, const even_raft_store *store, bool known,
                                bool (*send)(void *context, uint64_t member, const void *bytes, size_t count)) {
  log->machine =
      (struct raft_fsm){.version = 1, .data = log, .apply = on_apply, .snapshot = on_snapshot, .restore = on_restore};
  even_raft_memory_open(&log->memory, store, log->context, send);
  int failed = init(log, params->self, address_of(params->members, params->count, params->self), times);
  if (failed != 0) {
    return raft_failed("it cannot be opened", failed);
  }
  log->claim_ns = known ? even_clock_boot_ns() : 0; /* its earlier process may have proposed itself a moment ago */
  failed = params->joins || known ? 0 : bootstrap(log, params);
  failed = failed == 0 ? start(log) : failed;
  return failed == 0 ? EVEN_OK : raft_failed("it cannot be begun", failed);
}

static void close_raft(even_voter_log *log) {
  if (log->open) {
    raft_close(&log->raft, NULL);
    raft_configuration_init(&log->raft.configuration); /* it is freed */
  }
  log->open = false;
}

even_status even_voter_log_again(even_voter_log *log, const even_leadership_times *times) {
  const uint64_t self = log->memory.id;
  const even_error why = *even_voter_log_gave_up(log);
  const even_raft_store store = log->memory.store;
  close_raft(log);
  even_raft_memory_open(&log->memory, &store, log->context, log->memory.send);
  log->memory.id = self;
  log->says = (even_leadership_log){.sure_term = 0};
  log->proposed = log->changing = log->yielding = false;
  log->led_term = 0;
  log->claim_ns = even_clock_boot_ns();
  int failed = init(log, self, "", times);
  failed = failed == 0 ? start(log) : failed;
  if (failed == 0) {
    return EVEN_OK;
  }
  close_raft(log);
  log->memory.gave_up = true;
  log->memory.why = why;
  return raft_failed("it cannot be begun again", failed);
}

void even_voter_log_close(even_voter_log *log, bool forget) {
  close_raft(log);
  even_raft_memory_close(&log->memory, forget);
}
