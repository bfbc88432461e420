/* The engine of several hosts: opening and closing a group made of others, and the table of its calls. */
#include "comm/hosts/group.h"
#include "comm/called.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "base/params.h"
#include "os/thread.h"

#include <stdio.h>
#include <string.h>

/* Enough for a link to be full meanwhile, and little beside what is moved. */
#define PIECE_BYTES ((size_t)32 << 20)

static const even_comm_engine hosts_engine;

static even_status check_place(const even_comm_hosts *params) {
  int hosts = 0;
  int locals = 0;
  int local = 0;
  if (params->ranks < 1 || params->rank < 0 || params->rank >= params->ranks || params->host_of == NULL ||
      params->inside == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "rank %d of a group of %d ranks on several hosts, or its hosts are missing",
                     params->rank, params->ranks);
  }
  for (int rank = 0; rank < params->ranks; rank++) {
    if (params->host_of[rank] < 0 || params->host_of[rank] > hosts) {
      return even_fail(EVEN_ERR_ARGUMENT,
                       "rank %d is on host %d: hosts are numbered from 0 in the order of their first "
                       "ranks",
                       rank, params->host_of[rank]);
    }
    hosts += params->host_of[rank] == hosts;
    if (params->host_of[rank] == params->host_of[params->rank]) {
      local += rank < params->rank;
      locals++;
    }
  }
  const even_comm_base *inside = even_comm_base_of(params->inside);
  if (inside->ranks != locals || inside->rank != local) {
    return even_fail(EVEN_ERR_ARGUMENT, "rank %d is rank %d of %d on its host, but %d of %d in that host's group",
                     params->rank, local, locals, inside->rank, inside->ranks);
  }
  if (params->everyone != NULL &&
      (even_comm_ranks(params->everyone) != params->ranks || even_comm_rank(params->everyone) != params->rank)) {
    return even_fail(EVEN_ERR_ARGUMENT, "the group of everyone has other ranks than the group itself");
  }
  return EVEN_OK;
}

/* It would be left and closed twice. */
static even_status check_parts(const even_hosts_group *group) {
  const even_comm *part = NULL;
  for (int at = 0; (part = even_hosts_part(group, &at)) != NULL; at++) {
    const even_comm *other = NULL;
    for (int behind = at + 1; (other = even_hosts_part(group, &behind)) != NULL; behind++) {
      if (other == part) {
        return even_fail(EVEN_ERR_ARGUMENT, "one group, of the engine \"%s\", is given twice as a part of rank %d's",
                         even_comm_engine_name(part), group->rank);
      }
    }
  }
  return EVEN_OK;
}

/* Fills in members and first. */
static void place_ranks(even_hosts_group *group, const int *host_of) {
  int at = 0;
  group->own_host = host_of[group->rank];
  group->in_order = true;
  for (int host = 0; at < group->ranks; host++) {
    group->first[host] = at;
    for (int rank = 0; rank < group->ranks; rank++) {
      if (host_of[rank] == host) {
        group->in_order = group->in_order && rank == at;
        group->members[at++] = rank;
      }
    }
    group->hosts = host + 1;
  }
  group->first[group->hosts] = at;
  group->locals = group->first[group->own_host + 1] - group->first[group->own_host];
}

static void free_group(even_hosts_group *group) {
  even_free(group->members);
  even_free(group->first);
  even_free(group->speakers);
  even_free(group->counts);
  even_free(group->sizes);
  even_free(group->nothing);
  even_free(group->pointers);
  even_free(group->parts);
  even_free(group->places);
  even_free(group->scratch);
  even_free(group);
}

static even_status make_room(even_hosts_group *group) {
  size_t ranks = (size_t)group->ranks;
  EVEN_TRY(EVEN_NEW_ARRAY(&group->members, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->first, ranks + 1));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->speakers, ranks * EVEN_COMM_LANES));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->counts, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->sizes, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->nothing, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->parts, ranks * EVEN_COMM_LANES));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->places, ranks * EVEN_COMM_LANES));
  return EVEN_NEW_ARRAY(&group->pointers, 2 * ranks);
}

/* The ranks of the host keep their record on the board that its leader makes. Without one nothing is kept. */
static even_status share_board(even_hosts_group *group) {
  even_board_place place = {.fd = -1};
  bool made = true;
  group->board = (even_board){
      .memory = {.fd = -1}, .rank = group->rank, .ranks = group->ranks, .process = (uint32_t)even_own_process()};
  const even_error kept = *even_error_last();
  if (group->members[group->first[group->own_host]] == group->rank) {
    made = even_board_create(group->rank, group->ranks, &group->board, &place) == EVEN_OK;
  }
  if (group->locals > 1) {
    EVEN_TRY(even_comm_broadcast(group->inside, &place, sizeof place, 0));
    if (group->board.memory.address == NULL) {
      made = place.fd >= 0 && even_board_move(&group->board, &place) == EVEN_OK;
    }
  }
  if (made && even_board_enter(&group->board) == EVEN_OK) {
    even_board_keep_flight(&group->board, &group->flight);
  }
  even_status status = group->locals > 1 ? even_comm_barrier(group->inside) : EVEN_OK; /* all are on it */
  if (status == EVEN_OK) {
    (void)even_error_restore(&kept);
  }
  return status;
}

static void place(even_comm *comm, even_wait_place *out) {
  even_hosts_group *group = even_hosts_of(comm);
  *out = (even_wait_place){.group = group, .rank = group->rank, .ranks = group->ranks, .flight = &group->flight};
}

/* The parts name ranks as this group does, and leave the record to it. */
static void join_parts(even_hosts_group *group) {
  const int *own_host = &group->members[group->first[group->own_host]];
  even_comm_whole whole = {.board = &group->board,
                           .rank = group->rank,
                           .ranks = group->ranks,
                           .numbers = own_host,
                           .look = even_hosts_look,
                           .context = group,
                           .call = &group->call};
  place((even_comm *)(void *)group, &whole.place);
  even_comm_engine_of(group->inside)->join(group->inside, &whole);
  whole.members = own_host; /* who carries a lane speaks there for its host */
  whole.member_count = group->locals;
  for (int lane = 0; lane < group->lanes; lane++) {
    whole.numbers = &group->speakers[lane * group->hosts];
    if (group->lane[lane] != NULL) {
      even_comm_engine_of(group->lane[lane])->join(group->lane[lane], &whole);
    }
  }
  if (group->everyone != NULL) {
    whole.numbers = NULL;
    whole.members = &group->rank;
    whole.member_count = 1;
    even_comm_engine_of(group->everyone)->join(group->everyone, &whole);
  }
}

even_status even_comm_open_hosts(const even_comm_hosts *params, double timeout_seconds, even_comm **out) {
  even_hosts_group *group = NULL;
  even_comm_hosts own;
  *out = NULL;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_comm_hosts, &own, params));
  params = &own;
  EVEN_TRY(check_place(params));
  EVEN_TRY(EVEN_NEW(&group));
  group->engine = &hosts_engine;
  group->process_mark = even_process_mark();
  group->kernels = even_kernels_best();
  group->rank = params->rank;
  group->ranks = params->ranks;
  group->piece_bytes = PIECE_BYTES;
  group->arena_bytes = even_comm_arena_bytes(params->inside);
  group->over = even_comm_base_of(params->inside)->over;
  group->over_context = even_comm_base_of(params->inside)->over_context;
  group->process_mark = even_process_mark();
  atomic_store(&group->timeout_ns, even_comm_limit_ns(timeout_seconds));
  atomic_flag_clear(&group->busy);
  even_status status = make_room(group);
  if (status != EVEN_OK) {
    free_group(group);
    return status;
  }
  place_ranks(group, params->host_of);
  group->inside = params->inside;
  group->everyone = params->everyone;
  status = even_hosts_take_lanes(group, params);
  status = status == EVEN_OK ? check_parts(group) : status;
  if (status != EVEN_OK) {
    free_group(group);
    return status;
  }
  even_hosts_start_ways(group);
  status = share_board(group);
  if (status != EVEN_OK) {
    even_hosts_end_ways(group);
    even_board_close(&group->board);
    free_group(group);
    return status;
  }
  (void)pthread_mutex_init(&group->ending, NULL);
  join_parts(group);
  const even_comm_call opening = {.kind = EVEN_CALL_OPEN};
  even_flight_begin(&group->flight, &opening, ++group->call_count);
  even_flight_end(&group->flight, EVEN_OK);
  group->watch = (even_watch){.look = even_hosts_look, .context = group};
  even_watcher_add(&group->watch);
  *out = (even_comm *)(void *)group;
  return EVEN_OK;
}

/* ---- the rest of the table ---- */

static even_status all_to_all(even_comm *comm, const even_comm_exchange *job) {
  even_hosts_group *group = even_hosts_of(comm);
  if (group->everyone == NULL) {
    return even_fail(EVEN_ERR_UNSUPPORTED, "all_to_all in a group whose ranks are connected only host by host");
  }
  EVEN_TRY(even_hosts_begin(group, EVEN_CALL_ALL_TO_ALL, EVEN_U8, 0, 0, 0));
  even_comm_set_timeout(group->everyone, (double)atomic_load(&group->timeout_ns) * 1e-9);
  even_called_again(&group->call); /* so that all ranks find out together that one means another gather */
  return even_hosts_end(group, even_comm_engine_of(group->everyone)->all_to_all(group->everyone, job));
}

static bool has_messages(const even_comm *comm) {
  const even_hosts_group *group = (const even_hosts_group *)(const void *)comm;
  return group->everyone != NULL && even_comm_has_messages(group->everyone);
}

static even_status send_begin(even_comm *comm, const void *data, size_t bytes, int peer, uint64_t tag,
                              even_comm_request **out) {
  even_comm *everyone = even_hosts_of(comm)->everyone;
  return even_comm_engine_of(everyone)->send_begin(everyone, data, bytes, peer, tag, out);
}

static even_status receive_begin(even_comm *comm, void *data, size_t bytes, int peer, uint64_t tag,
                                 even_comm_request **out) {
  even_comm *everyone = even_hosts_of(comm)->everyone;
  return even_comm_engine_of(everyone)->receive_begin(everyone, data, bytes, peer, tag, out);
}

static void *arena(even_comm *comm) {
  return even_comm_arena(even_hosts_of(comm)->inside);
}

static void end_group(even_comm *comm, const even_error *why) {
  even_hosts_tell(even_hosts_of(comm), why);
}

static void revoke_group(even_comm *comm) {
  const even_error why = {.status = EVEN_ERR_REVOKED, .rank = -1, .what = "the group was revoked"};
  end_group(comm, &why);
}

static bool has_ended(const even_comm *comm) {
  const even_hosts_group *group = (const even_hosts_group *)(const void *)comm;
  return group->ended || even_comm_engine_of(group->inside)->has_ended(group->inside);
}

static void why_ended(const even_comm *comm, even_error *out) {
  even_hosts_group *group = even_hosts_of((even_comm *)(uintptr_t)comm);
  (void)pthread_mutex_lock(&group->ending);
  bool ended = group->ended;
  *out = group->end;
  (void)pthread_mutex_unlock(&group->ending);
  if (!ended) { /* a part has, and nobody has looked since */
    even_comm_engine_of(group->inside)->why(group->inside, out);
  }
}

static void set_timeout(even_comm *comm, double seconds) {
  even_hosts_group *group = even_hosts_of(comm);
  atomic_store(&group->timeout_ns, even_comm_limit_ns(seconds));
  if (group->everyone != NULL) {
    even_comm_set_timeout(group->everyone, seconds);
  }
}

static void set_stop_grace(even_comm *comm, double seconds) {
  const even_hosts_group *group = even_hosts_of(comm);
  even_comm *part = NULL;
  for (int at = 0; (part = even_hosts_part(group, &at)) != NULL; at++) {
    even_comm_set_stop_grace(part, seconds);
  }
}

static size_t flight(const even_comm *comm, int rank, even_flight_call *out, size_t limit) {
  return even_flight_calls(&((const even_hosts_group *)(const void *)comm)->flight, rank, out, limit);
}

static void set_site(even_comm *comm, const char *text) {
  even_flight_set_site(&even_hosts_of(comm)->flight, text);
}

static void ask_site(even_comm *comm, even_comm_site_call *call, void *context) {
  even_hosts_group *group = even_hosts_of(comm);
  even_flight_ask_site(&group->flight, call, context);
  if (group->everyone != NULL) {
    even_comm_ask_site(group->everyone, call, context); /* of its messages */
  }
}

/* What a part says of its own wait, and what the whole group is in. */
static void tell_stall(void *context, const char *words) {
  even_hosts_group *group = context;
  char call[128];
  char reached[EVEN_FLIGHT_REACHED];
  char all[1024];
  if (atomic_exchange(&group->stall_told, group->call_count) == group->call_count) {
    return; /* another part, on another thread, has said it */
  }
  even_call_describe(&group->call, call, sizeof call);
  even_flight_reached(&group->flight, reached, sizeof reached);
  (void)snprintf(all, sizeof all, "%.400s, a step of %s%s", words, call, reached);
  group->stall_call(group->stall_context, all);
}

static void on_stall(even_comm *comm, double seconds, even_comm_stall_call *call, void *context) {
  even_hosts_group *group = even_hosts_of(comm);
  group->stall_call = call;
  group->stall_context = context;
  even_comm_stall_call *told = call == NULL ? NULL : tell_stall;
  even_comm *part = NULL;
  for (int at = 0; (part = even_hosts_part(group, &at)) != NULL; at++) {
    even_comm_on_stall(part, seconds, told, group);
  }
}

/* The lanes are what goes between hosts of each reduction. */
static even_status tell_legs(even_comm *comm, even_telemetry *telemetry) {
  const even_hosts_group *group = even_hosts_of(comm);
  for (int lane = 0; lane < group->lanes; lane++) {
    even_comm *carried = group->lane[lane];
    if (carried != NULL && even_comm_engine_of(carried)->tell_legs != NULL) {
      EVEN_TRY(even_comm_engine_of(carried)->tell_legs(carried, telemetry));
    }
  }
  return EVEN_OK;
}

static even_comm *part_of(const even_comm *comm, int *at) {
  return even_hosts_part((const even_hosts_group *)(const void *)comm, at);
}

static uint64_t wait_ns(const even_comm *comm) {
  const even_hosts_group *group = (const even_hosts_group *)(const void *)comm;
  uint64_t waited = atomic_load(&group->awaited_ns) - atomic_load(&group->hidden_ns);
  const even_comm *part = NULL;
  for (int at = 0; (part = even_hosts_part(group, &at)) != NULL; at++) {
    waited += even_comm_wait_ns(part);
  }
  return waited;
}

static void describe(const even_comm *comm, char *text, size_t bytes) {
  const even_hosts_group *group = (const even_hosts_group *)(const void *)comm;
  char inside[2048];
  char between[1024] = "this host's leader speaks to them";
  even_comm_describe(group->inside, inside, sizeof inside);
  if (group->between != NULL) {
    even_comm_describe(group->between, between, sizeof between);
  }
  (void)snprintf(text, bytes, "%d hosts, %d lane%s between them; inside this one: %s; between them: %s", group->hosts,
                 group->lanes, group->lanes == 1 ? "" : "s", inside, between);
  if (group->rank == 0) {
    for (int call = 0; call < EVEN_HOSTS_CALLS; call++) {
      even_ways_describe(&group->ways[call], text, bytes);
    }
  }
}

/* All ranks' choices are rank 0's; asked behind the last, each follows inside its host what was asked for. */
static void *choice(even_comm *comm, int number, size_t *bytes) {
  even_hosts_group *group = even_hosts_of(comm);
  if (number < EVEN_HOSTS_CALLS) {
    *bytes = sizeof group->ways[0].choice;
    return &group->ways[number].choice;
  }
  *bytes = sizeof group->inner_way;
  if (number > EVEN_HOSTS_CALLS) {
    even_hosts_follow_inside(group);
    return NULL;
  }
  return group->inner_way;
}

/* The leaders' part has a choice, too; rank 0 leads the first host. */
static even_status follow(even_comm *comm, const even_comm_following *by, size_t *lacking) {
  even_hosts_group *group = even_hosts_of(comm);
  even_comm *between = group->between;
  even_comm_following outer = *by;
  even_status status = EVEN_OK;
  bool inner = even_hosts_ask_inside(group, by->way);
  outer.way = by->way != NULL && (inner || even_ways_named(group->ways, by->way) >= 0) ? NULL : by->way;
  if (between != NULL && even_comm_engine_of(between)->follow != NULL) {
    status = even_comm_engine_of(between)->follow(between, &outer, lacking);
  }
  for (int call = 0; call < EVEN_HOSTS_CALLS && status == EVEN_OK; call++) {
    even_ways *ways = &group->ways[call];
    even_ways_follow(ways, by->costs, by->shape, by->engine);
    even_ways_force(ways, by->way == NULL ? -1 : even_ways_named(ways, by->way));
  }
  return status;
}

static void leave_group(even_comm *comm) {
  even_hosts_group *group = even_hosts_of(comm);
  if (!group->has_left) {
    even_watcher_remove(&group->watch);
    group->has_left = true;
    even_hosts_leave_parts(group);
  }
}

static void close_group(even_comm *comm) {
  even_hosts_group *group = even_hosts_of(comm);
  leave_group(comm);
  for (int lane = 0; lane < group->lanes; lane++) {
    even_carrier_close(&group->carriers[lane]);
    even_comm_close(group->lane[lane]);
  }
  even_comm_close(group->inside);
  even_comm_close(group->everyone);
  even_hosts_end_ways(group);
  if (group->process_mark == even_process_mark()) { /* in a child another thread may hold it */
    (void)pthread_mutex_destroy(&group->ending);
  }
  even_board_close(&group->board);
  free_group(group);
}

static const even_comm_engine hosts_engine = {
    .name = "hosts",
    .all_reduce = even_hosts_all_reduce,
    .reduce_scatter = even_hosts_reduce_scatter,
    .all_gather = even_hosts_all_gather,
    .broadcast = even_hosts_broadcast,
    .all_to_all = all_to_all,
    .barrier = even_hosts_barrier,
    .has_messages = has_messages,
    .send_begin = send_begin,
    .receive_begin = receive_begin,
    .arena = arena,
    .revoke = revoke_group,
    .refused = even_hosts_refused,
    .end = end_group,
    .has_ended = has_ended,
    .why = why_ended,
    .set_timeout = set_timeout,
    .set_stop_grace = set_stop_grace,
    .flight = flight,
    .set_site = set_site,
    .ask_site = ask_site,
    .place = place,
    .on_stall = on_stall,
    .follow = follow,
    .choice = choice,
    .tell_legs = tell_legs,
    .part = part_of,
    .wait_ns = wait_ns,
    .describe = describe,
    .leave = leave_group,
    .close = close_group,
};

const even_hosts_group *even_hosts_within(const even_comm *comm) {
  return even_comm_engine_of(comm) == &hosts_engine ? (const even_hosts_group *)(const void *)comm : NULL;
}
