/* The engine over UCX: opening and closing a group, and the table of its calls. */
#include "comm/ucx/group.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "os/host.h"
#include "os/thread.h"

#include <stdio.h>
#include <string.h>

/* A poll asks the kernel (0.5 to 1 µs over TCP). */
#define MOST_POLLS 100u
#define LEAST_POLLS 2u
/* How long one who leaves stays for others to leave, too. */
#define GOODBYE_NS ((uint64_t)100 * 1000000u)
#define ARENA_ALIGNMENT ((size_t)64)

static const even_comm_engine ucx_engine;
static void close_group(even_comm *comm);

/* What a rank tells the others of itself before anything is connected. */
typedef struct introduction {
  uint64_t address_bytes;
  int32_t number;
  int32_t process;
  char host[EVEN_UCX_HOST_BYTES];
} introduction;

static even_status fail_ucx(const even_ucx_group *group, const char *what, signed char status) {
  return even_fail(EVEN_ERR_SYSTEM, "UCX %s: %s", what, group->api->status_string(status));
}

/* ---- opening ---- */

static even_status check_open(const even_comm_params *params, const even_comm_network *network) {
  if (params->size != sizeof *params || network->size != sizeof *network) {
    return even_fail(EVEN_ERR_ARGUMENT, "the parameters' sizes are %zu and %zu, this library's are %zu and %zu",
                     params->size, network->size, sizeof *params, sizeof *network);
  }
  if (params->ranks < 1 || params->ranks > EVEN_COMM_MAX_RANKS || params->rank < 0 || params->rank >= params->ranks) {
    return even_fail(EVEN_ERR_ARGUMENT, "rank %d of a group of %d ranks: 1 … %d ranks are possible", params->rank,
                     params->ranks, EVEN_COMM_MAX_RANKS);
  }
  return EVEN_OK;
}

static even_status configure(const even_ucx_group *group, const char *interfaces, void **config) {
  signed char status = group->api->config_read(NULL, NULL, config);
  if (status != 0) {
    return fail_ucx(group, "cannot read its settings (UCX_… variables)", status);
  }
  /* Dead hosts, which cut no connection, are noticed by a connection's keep-alive. */
  (void)group->api->config_modify(*config, "KEEPALIVE_INTERVAL", "1s");
  if (interfaces != NULL) {
    status = group->api->config_modify(*config, "NET_DEVICES", interfaces);
  }
  return status == 0 ? EVEN_OK : fail_ucx(group, "refuses the network interfaces", status);
}

static even_status start_ucx(even_ucx_group *group, const char *interfaces) {
  const even_ucx_init init = {.mask = EVEN_UCX_INIT_FEATURES,
                              .features = EVEN_UCX_FEATURE_TAGS | EVEN_UCX_FEATURE_WAKEUP};
  const even_ucx_worker_init worker = {.mask = EVEN_UCX_WORKER_THREADS, .threads = EVEN_UCX_THREADS_SERIALIZED};
  void *config = NULL;
  even_status result = configure(group, interfaces, &config);
  if (result == EVEN_OK) {
    signed char status = group->api->init(1, EVEN_UCX_OLDEST_MINOR, &init, config, &group->context);
    result = status == 0 ? EVEN_OK : fail_ucx(group, "cannot start", status);
  }
  if (config != NULL) {
    group->api->config_release(config);
  }
  EVEN_TRY(result);
  signed char status = group->api->worker_create(group->context, &worker, &group->worker);
  if (status != 0) {
    (void)fail_ucx(group, "finds no way to move data", status);
    return even_error_fix(
        "see which network interfaces it may use (UCX_NET_DEVICES, UCX_TLS; `ucx_info -d` lists them)");
  }
  status = group->api->worker_descriptor(group->worker, &group->descriptor);
  return status == 0 ? EVEN_OK : fail_ucx(group, "cannot be waited for", status);
}

static void on_endpoint_error(void *argument, void *endpoint, signed char status) {
  even_ucx_peer *peer = argument;
  (void)endpoint;
  peer->failed = peer->failed == 0 ? status : peer->failed;
}

static even_status connect_peer(even_ucx_group *group, even_ucx_peer *peer, const void *address) {
  const even_ucx_endpoint_init init = {
      .mask = EVEN_UCX_ENDPOINT_ADDRESS | EVEN_UCX_ENDPOINT_ERROR_MODE | EVEN_UCX_ENDPOINT_ERROR_HANDLER,
      .address = address,
      .error_mode = EVEN_UCX_ERROR_MODE_PEER,
      .on_error = on_endpoint_error,
      .on_error_argument = peer};
  signed char status = group->api->endpoint_create(group->worker, &init, &peer->endpoint);
  if (status != 0) {
    peer->endpoint = NULL;
    (void)even_fail(EVEN_ERR_SYSTEM, "UCX cannot connect to rank %d on host %s: %s", peer->number, peer->host,
                    group->api->status_string(status));
    (void)even_error_place(peer->number, NULL);
    return even_error_fix(
        "see whether both hosts have a network interface in common that UCX may use "
        "(EVENSTEP_COMM_INTERFACE, UCX_NET_DEVICES)");
  }
  return EVEN_OK;
}

/* The ranks' addresses, each in `largest` bytes. */
static even_status connect_all(even_ucx_group *group, const even_comm_network *network, const void *address,
                               size_t bytes, size_t largest) {
  unsigned char *own = NULL;
  unsigned char *all = NULL;
  even_status status = even_alloc(1, largest, (void **)&own);
  if (status == EVEN_OK) {
    memcpy(own, address, bytes);
    status = even_alloc((size_t)group->ranks, largest, (void **)&all);
  }
  if (status == EVEN_OK) {
    status = network->gather(network->context, own, largest, all);
  }
  for (int rank = 0; status == EVEN_OK && rank < group->ranks; rank++) {
    status = connect_peer(group, &group->peers[rank], all + (size_t)rank * largest);
  }
  even_free(own);
  even_free(all);
  return status;
}

static even_status introduce(even_ucx_group *group, const even_comm_network *network, size_t address_bytes,
                             size_t *largest) {
  introduction own = {.address_bytes = address_bytes,
                      .number = network->number < 0 ? group->rank : network->number,
                      .process = (int32_t)group->process};
  introduction *all = NULL;
  even_host_names names;
  EVEN_TRY(even_host_names_read(&names));
  (void)snprintf(own.host, sizeof own.host, "%.*s", EVEN_UCX_HOST_BYTES - 1, names.host);
  EVEN_TRY(EVEN_NEW_ARRAY(&all, (size_t)group->ranks));
  even_status status = network->gather(network->context, &own, sizeof own, all);
  *largest = 0;
  for (int rank = 0; status == EVEN_OK && rank < group->ranks; rank++) {
    even_ucx_peer *peer = &group->peers[rank];
    peer->number = all[rank].number;
    peer->process = all[rank].process;
    memcpy(peer->host, all[rank].host, sizeof peer->host);
    peer->host[sizeof peer->host - 1] = '\0';
    *largest = all[rank].address_bytes > *largest ? all[rank].address_bytes : *largest;
    if (all[rank].address_bytes == 0 && rank != group->rank) {
      status = even_fail(EVEN_ERR_UNSUPPORTED, "rank %d on host %s cannot use UCX: its own error says why",
                         peer->number, peer->host);
      (void)even_error_place(peer->number, NULL);
    }
  }
  even_free(all);
  return status;
}

/* A rank whose UCX did not start comes all the same, without an address: the others would wait for it. */
static even_status find_others(even_ucx_group *group, const even_comm_network *network, even_status started) {
  void *address = NULL;
  size_t bytes = 0;
  size_t largest = 0;
  if (started == EVEN_OK) {
    signed char failed = group->api->worker_address(group->worker, &address, &bytes);
    started = failed == 0 ? EVEN_OK : fail_ucx(group, "has no address", failed);
  }
  const even_error why = *even_error_last();
  even_status status = introduce(group, network, bytes, &largest);
  if (started != EVEN_OK) {
    status = even_error_restore(&why);
  } else if (status == EVEN_OK) {
    status = connect_all(group, network, address, bytes, largest);
  }
  if (address != NULL) {
    group->api->worker_release_address(group->worker, address);
  }
  return status;
}

static even_status make_room(even_ucx_group *group, const even_comm_params *params) {
  size_t ranks = (size_t)params->ranks;
  size_t arena = 0;
  if (!even_align_size(params->arena_bytes, ARENA_ALIGNMENT, &arena) ||
      !even_add_size(arena, ARENA_ALIGNMENT, &arena)) {
    return even_fail(EVEN_ERR_OVERFLOW, "an arena of %zu bytes is larger than memory can be", params->arena_bytes);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&group->notices, 2 * ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->transfers, EVEN_UCX_TRANSFERS * ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->lengths, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->sources, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->outgoing, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->arrived, ranks));
  return params->arena_bytes == 0 ? EVEN_OK : even_alloc(1, arena, &group->arena);
}

/* All that this rank needs beside the others. */
static even_status prepare(even_ucx_group *group, const even_comm_params *params, const even_comm_network *network) {
  EVEN_TRY(even_ucx_api_get(network->library, &group->api));
  EVEN_TRY(make_room(group, params));
  return start_ucx(group, network->interfaces);
}

static even_status join(even_ucx_group *group) {
  EVEN_TRY(even_ucx_call_begin(group, EVEN_CALL_OPEN, 0, 0, 0, 0, NULL));
  return even_ucx_call_end(group, even_ucx_call_meet(group, 0, NULL));
}

even_status even_comm_open_ucx(const even_comm_params *params, const even_comm_network *network, even_comm **out) {
  even_ucx_group *group = NULL;
  *out = NULL;
  EVEN_TRY(check_open(params, network));
  EVEN_TRY(EVEN_NEW(&group));
  group->engine = &ucx_engine;
  group->kernels = even_kernels_best();
  group->rank = params->rank;
  group->ranks = params->ranks;
  group->arena_bytes = params->arena_bytes;
  group->process = even_own_process();
  group->process_mark = even_process_mark();
  uint32_t most = params->spin < 0 ? MOST_POLLS : (uint32_t)params->spin;
  group->patience = (even_comm_patience){.polls = most, .least = most < LEAST_POLLS ? most : LEAST_POLLS, .most = most};
  atomic_store(&group->timeout_ns, even_comm_limit_ns(params->timeout_seconds));
  atomic_flag_clear(&group->busy);
  (void)pthread_mutex_init(&group->lock, NULL);
  even_status status = EVEN_NEW_ARRAY(&group->peers, (size_t)params->ranks);
  if (status == EVEN_OK) {
    status = find_others(group, network, prepare(group, params, network));
  }
  if (status == EVEN_OK) {
    status = even_ucx_messages_open(group);
  }
  if (status == EVEN_OK) {
    status = join(group);
  }
  if (status != EVEN_OK) {
    close_group((even_comm *)(void *)group);
    return status;
  }
  *out = (even_comm *)(void *)group;
  return EVEN_OK;
}

/* ---- closing ---- */

/* A child that inherited the group by fork must not touch UCX, nor the lock. */
static bool is_inherited(const even_ucx_group *group) {
  return group->process != even_own_process();
}

static void leave_group(even_comm *comm) {
  even_ucx_group *group = even_ucx_of(comm);
  /* Not in a child that inherited the group by fork. */
  if (group->has_left || group->messages == NULL || is_inherited(group)) {
    return;
  }
  (void)pthread_mutex_lock(&group->lock);
  group->has_left = true;
  (void)pthread_mutex_unlock(&group->lock);
  even_ucx_messages_stop(group);
  (void)pthread_mutex_lock(&group->lock);
  even_ucx_say_goodbye(group, GOODBYE_NS);
  (void)pthread_mutex_unlock(&group->lock);
}

static void stop_ucx(even_ucx_group *group) {
  size_t notices = group->notices == NULL ? 0 : 2 * (size_t)group->ranks;
  group->deaf = true;
  if (group->worker != NULL) {
    even_ucx_transfer hearing = {.request = group->incoming_request, .peer = group->rank};
    even_ucx_abandon(group, &hearing, 1);
    even_ucx_abandon(group, group->notices, notices);
    even_ucx_messages_free(group);
    for (int rank = 0; rank < group->ranks; rank++) {
      even_ucx_cut(group, rank);
    }
    group->api->worker_destroy(group->worker);
  }
  if (group->context != NULL) {
    group->api->cleanup(group->context);
  }
}

static void close_group(even_comm *comm) {
  even_ucx_group *group = even_ucx_of(comm);
  leave_group(comm);
  if (!is_inherited(group)) {
    stop_ucx(group);
  }
  (void)pthread_mutex_destroy(&group->lock);
  even_free(group->peers);
  even_free(group->notices);
  even_free(group->transfers);
  even_free(group->lengths);
  even_free(group->sources);
  even_free(group->outgoing);
  even_free(group->arrived);
  even_free(group->staging);
  even_free(group->arena);
  even_free(group);
}

/* ---- the rest of the table ---- */

static bool has_messages(const even_comm *comm) {
  (void)comm;
  return true;
}

static void *arena(even_comm *comm) {
  uintptr_t at = (uintptr_t)even_ucx_of(comm)->arena;
  return (void *)((at + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT);
}

static void set_timeout(even_comm *comm, double seconds) {
  atomic_store(&even_ucx_of(comm)->timeout_ns, even_comm_limit_ns(seconds));
}

static uint64_t wait_ns(const even_comm *comm) {
  const even_ucx_group *group = (const even_ucx_group *)(const void *)comm;
  return atomic_load_explicit(&group->wait_ns, memory_order_relaxed);
}

static void end_group(even_comm *comm, const even_error *why) {
  even_ucx_group *group = even_ucx_of(comm);
  (void)pthread_mutex_lock(&group->lock);
  if (!group->has_left) {
    (void)even_error_restore(why);
    even_ucx_end(group);
  }
  (void)pthread_mutex_unlock(&group->lock);
}

static bool has_ended(const even_comm *comm) {
  const even_ucx_group *group = (const even_ucx_group *)(const void *)comm;
  return atomic_load(&group->ended);
}

static void watch(even_comm *comm, bool (*ended)(void *), void *context) {
  even_ucx_group *group = even_ucx_of(comm);
  (void)pthread_mutex_lock(&group->lock);
  group->watched = ended;
  group->watched_context = context;
  (void)pthread_mutex_unlock(&group->lock);
}

static void describe(const even_comm *comm, char *text, size_t bytes) {
  const even_ucx_group *group = (const even_ucx_group *)(const void *)comm;
  (void)snprintf(
      text, bytes,
      "UCX, %d ranks, %s: up to %zu bytes with the words that announce the call; more from each rank to each "
      "other directly, reduced by the part's owner",
      group->ranks, group->kernels->name, EVEN_UCX_SMALL_BYTES);
}

static void revoke_group(even_comm *comm) {
  const even_error why = {.status = EVEN_ERR_REVOKED, .rank = -1, .what = "the group was revoked"};
  end_group(comm, &why);
}

static const even_comm_engine ucx_engine = {
    .name = "ucx",
    .all_reduce = even_ucx_all_reduce,
    .reduce_scatter = even_ucx_reduce_scatter,
    .all_gather = even_ucx_all_gather,
    .broadcast = even_ucx_broadcast,
    .all_to_all = even_ucx_all_to_all,
    .barrier = even_ucx_barrier,
    .has_messages = has_messages,
    .send_begin = even_ucx_send_begin,
    .receive_begin = even_ucx_receive_begin,
    .request_done = even_ucx_request_done,
    .request_wait = even_ucx_request_wait,
    .request_free = even_ucx_request_free,
    .arena = arena,
    .revoke = revoke_group,
    .end = end_group,
    .has_ended = has_ended,
    .watch = watch,
    .set_timeout = set_timeout,
    .wait_ns = wait_ns,
    .describe = describe,
    .leave = leave_group,
    .close = close_group,
};
