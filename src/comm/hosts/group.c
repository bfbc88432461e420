/* The engine of several hosts: opening and closing a group made of others, and the table of its calls. */
#include "comm/hosts/group.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "os/thread.h"

#include <stdio.h>
#include <string.h>

static const even_comm_engine hosts_engine;

static even_status check_place(const even_comm_hosts *params) {
  int hosts = 0;
  int locals = 0;
  int local = 0;
  bool leads = true;
  if (params->size != sizeof *params) {
    return even_fail(EVEN_ERR_ARGUMENT, "even_comm_hosts.size is %zu, this library's is %zu", params->size,
                     sizeof *params);
  }
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
      leads = leads && rank >= params->rank;
      local += rank < params->rank;
      locals++;
    }
  }
  const even_comm_base *inside = even_comm_base_of(params->inside);
  if (inside->ranks != locals || inside->rank != local) {
    return even_fail(EVEN_ERR_ARGUMENT, "rank %d is rank %d of %d on its host, but %d of %d in that host's group",
                     params->rank, local, locals, inside->rank, inside->ranks);
  }
  if (leads != (params->between != NULL) ||
      (leads && (even_comm_ranks(params->between) != hosts ||
                 even_comm_rank(params->between) != params->host_of[params->rank]))) {
    return even_fail(EVEN_ERR_ARGUMENT,
                     "the group between hosts is of the first rank of each of %d hosts, in order; "
                     "rank %d %s it",
                     hosts, params->rank, leads ? "should have" : "should not have");
  }
  if (params->everyone != NULL &&
      (even_comm_ranks(params->everyone) != params->ranks || even_comm_rank(params->everyone) != params->rank)) {
    return even_fail(EVEN_ERR_ARGUMENT, "the group of everyone has other ranks than the group itself");
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
  even_free(group->counts);
  even_free(group->sizes);
  even_free(group->nothing);
  even_free(group->pointers);
  even_free(group->scratch);
  even_free(group);
}

static even_status make_room(even_hosts_group *group) {
  size_t ranks = (size_t)group->ranks;
  EVEN_TRY(EVEN_NEW_ARRAY(&group->members, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->first, ranks + 1));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->counts, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->sizes, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->nothing, ranks));
  return EVEN_NEW_ARRAY(&group->pointers, 2 * ranks);
}

/* While a leader waits for other hosts, its own may have given up. */
static bool inside_has_ended(void *context) {
  const even_hosts_group *group = context;
  return even_comm_engine_of(group->inside)->has_ended(group->inside);
}

even_status even_comm_open_hosts(const even_comm_hosts *params, double timeout_seconds, even_comm **out) {
  even_hosts_group *group = NULL;
  *out = NULL;
  EVEN_TRY(check_place(params));
  EVEN_TRY(EVEN_NEW(&group));
  group->engine = &hosts_engine;
  group->process_mark = even_process_mark();
  group->kernels = even_kernels_best();
  group->rank = params->rank;
  group->ranks = params->ranks;
  group->arena_bytes = even_comm_arena_bytes(params->inside);
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
  group->between = params->between;
  group->everyone = params->everyone;
  if (group->between != NULL && even_comm_engine_of(group->between)->watch != NULL) {
    even_comm_engine_of(group->between)->watch(group->between, inside_has_ended, group);
  }
  *out = (even_comm *)(void *)group;
  return EVEN_OK;
}

/* ---- the rest of the table ---- */

static even_status all_to_all(even_comm *comm, const even_comm_exchange *job) {
  even_hosts_group *group = even_hosts_of(comm);
  EVEN_TRY(even_hosts_begin(group, "all_to_all"));
  if (group->everyone == NULL) {
    atomic_flag_clear_explicit(&group->busy, memory_order_release);
    return even_fail(EVEN_ERR_UNSUPPORTED, "all_to_all in a group whose ranks are connected only host by host");
  }
  even_comm_set_timeout(group->everyone, (double)atomic_load(&group->timeout_ns) * 1e-9);
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
  even_hosts_group *group = even_hosts_of(comm);
  even_comm *const parts[] = {group->inside, group->between, group->everyone};
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
    if (parts[i] != NULL) {
      even_comm_engine_of(parts[i])->end(parts[i], why);
    }
  }
}

static void revoke_group(even_comm *comm) {
  const even_error why = {.status = EVEN_ERR_REVOKED, .rank = -1, .what = "the group was revoked"};
  end_group(comm, &why);
}

static bool has_ended(const even_comm *comm) {
  const even_hosts_group *group = (const even_hosts_group *)(const void *)comm;
  return group->ended || even_comm_engine_of(group->inside)->has_ended(group->inside);
}

static void set_timeout(even_comm *comm, double seconds) {
  even_hosts_group *group = even_hosts_of(comm);
  atomic_store(&group->timeout_ns, even_comm_limit_ns(seconds));
  if (group->everyone != NULL) {
    even_comm_set_timeout(group->everyone, seconds);
  }
}

static void set_stop_grace(even_comm *comm, double seconds) {
  even_comm_set_stop_grace(even_hosts_of(comm)->inside, seconds);
}

static void set_site(even_comm *comm, const char *text) {
  even_comm_set_site(even_hosts_of(comm)->inside, text);
}

static void ask_site(even_comm *comm, even_comm_site_call *call, void *context) {
  even_comm_ask_site(even_hosts_of(comm)->inside, call, context);
}

static void on_stall(even_comm *comm, double seconds, even_comm_stall_call *call, void *context) {
  even_comm_on_stall(even_hosts_of(comm)->inside, seconds, call, context);
}

static uint64_t wait_ns(const even_comm *comm) {
  const even_hosts_group *group = (const even_hosts_group *)(const void *)comm;
  uint64_t between = group->between == NULL ? 0 : even_comm_wait_ns(group->between);
  uint64_t everyone = group->everyone == NULL ? 0 : even_comm_wait_ns(group->everyone);
  return even_comm_wait_ns(group->inside) + between + everyone;
}

static void describe(const even_comm *comm, char *text, size_t bytes) {
  const even_hosts_group *group = (const even_hosts_group *)(const void *)comm;
  char inside[512];
  char between[512] = "this host's leader speaks to them";
  even_comm_describe(group->inside, inside, sizeof inside);
  if (group->between != NULL) {
    even_comm_describe(group->between, between, sizeof between);
  }
  (void)snprintf(text, bytes, "%d hosts; inside this one: %s; between them: %s", group->hosts, inside, between);
}

static void leave_group(even_comm *comm) {
  even_hosts_group *group = even_hosts_of(comm);
  if (!group->has_left) {
    group->has_left = true;
    even_comm_leave(group->inside);
    if (group->between != NULL) {
      even_comm_leave(group->between);
    }
    if (group->everyone != NULL) {
      even_comm_leave(group->everyone);
    }
  }
}

static void close_group(even_comm *comm) {
  even_hosts_group *group = even_hosts_of(comm);
  leave_group(comm);
  even_comm_close(group->inside);
  even_comm_close(group->between);
  even_comm_close(group->everyone);
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
    .end = end_group,
    .has_ended = has_ended,
    .set_timeout = set_timeout,
    .set_stop_grace = set_stop_grace,
    .set_site = set_site,
    .ask_site = ask_site,
    .on_stall = on_stall,
    .wait_ns = wait_ns,
    .describe = describe,
    .leave = leave_group,
    .close = close_group,
};
