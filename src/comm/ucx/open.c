/* Opening a group over a transport: the ranks say who they are and where, connect, and meet in a first call. */
#include "comm/ucx/group.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "os/host.h"
#include "os/thread.h"

#include <stdio.h>
#include <string.h>

#define LEAST_POLLS 2u
#define VERSION_BYTES 96

/* What a rank tells the others of itself before anything is connected. */
typedef struct introduction {
  uint64_t address_bytes;
  int32_t number;
  int32_t process;
  char host[EVEN_UCX_HOST_BYTES];
  char version[VERSION_BYTES];
  even_board_place board;
} introduction;

static even_status check_open(const even_comm_params *params) {
  if (params->ranks < 1 || params->ranks > EVEN_COMM_MAX_RANKS || params->rank < 0 || params->rank >= params->ranks) {
    return even_fail(EVEN_ERR_ARGUMENT, "rank %d of a group of %d ranks: 1 … %d ranks are possible", params->rank,
                     params->ranks, EVEN_COMM_MAX_RANKS);
  }
  return EVEN_OK;
}

/* The ranks' addresses, each in `largest` bytes. A rank that cannot begin comes all the same, with an empty address. */
static even_status connect_all(even_ucx_group *group, const even_comm_network *network, const void *address,
                               size_t bytes, size_t largest) {
  unsigned char *own = NULL;
  unsigned char *all = NULL;
  even_status begun = group->transport->begin == NULL ? EVEN_OK : group->transport->begin(group);
  const even_error why = *even_error_last();
  even_status status = even_alloc(1, largest, (void **)&own);
  if (status == EVEN_OK) {
    memcpy(own, address, bytes);
    status = even_alloc((size_t)group->ranks, largest, (void **)&all);
  }
  if (status == EVEN_OK) {
    const even_error aside = even_error_aside();
    status = even_error_told(network->gather(network->context, own, largest, all), &aside);
  }
  if (begun != EVEN_OK) {
    status = even_error_restore(&why);
  } else if (status == EVEN_OK) {
    status = group->transport->connect(group, all, largest);
  }
  even_free(own);
  even_free(all);
  return status;
}

/* What another rank says of itself. */
static even_status learn_peer(const even_ucx_group *group, int rank, const introduction *said,
                              const introduction *own) {
  even_ucx_peer *peer = &group->peers[rank];
  peer->number = said->number;
  peer->process = said->process;
  memcpy(peer->host, said->host, sizeof peer->host);
  peer->host[sizeof peer->host - 1] = '\0';
  peer->mark = even_host_mark(said->board.host, sizeof said->board.host);
  if (said->address_bytes == 0 && rank != group->rank) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "rank %d on host %s cannot use %s: its own error says why", peer->number,
                    peer->host, group->transport->library);
    return even_error_place(peer->number, NULL);
  }
  if (memcmp(said->version, own->version, sizeof own->version) != 0 && own->address_bytes > 0) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "rank %d on host %s has %.*s, rank %d %.*s", peer->number, peer->host,
                    VERSION_BYTES - 1, said->version, own->number, VERSION_BYTES - 1, own->version);
    (void)even_error_place(peer->number, NULL);
    return even_error_fix("give all ranks the same Evenstep, and the same library of %s", group->transport->library);
  }
  return EVEN_OK;
}

/* The ranks of a host keep their record on the board of the first of them. Without one nothing is kept, and each is
 * alone on its host as far as the others know. */
static void share_board(even_ucx_group *group, const introduction *all) {
  const even_error kept = *even_error_last();
  for (int rank = 0; rank < group->ranks; rank++) {
    int first = 0;
    while (first < rank && strncmp(all[first].board.host, all[rank].board.host, EVEN_BOARD_HOST_BYTES) != 0) {
      first++;
    }
    group->peers[rank].host_number = all[rank].board.host[0] == '\0' ? rank : first;
  }
  int first = group->peers[group->rank].host_number;
  if (first != group->rank && group->board.memory.address != NULL) {
    (void)!even_board_move(&group->board, &all[first].board);
  }
  if (group->board.memory.address != NULL) {
    if (even_board_enter(&group->board) == EVEN_OK) {
      even_board_keep_flight(&group->board, &group->flight);
    } else {
      even_board_close(&group->board);
    }
  }
  (void)even_error_restore(&kept);
}

static even_status introduce(even_ucx_group *group, const even_comm_network *network, size_t address_bytes,
                             const char *version, size_t *largest) {
  introduction own = {.address_bytes = address_bytes,
                      .number = network->number < 0 ? group->rank : network->number,
                      .process = (int32_t)group->process};
  introduction *all = NULL;
  even_host_names names;
  EVEN_TRY(even_host_names_read(&names));
  (void)snprintf(own.host, sizeof own.host, "%.*s", EVEN_UCX_HOST_BYTES - 1, names.host);
  (void)snprintf(own.version, sizeof own.version, "Evenstep's protocol %u%s%.*s", EVEN_COMM_VERSION,
                 version[0] == '\0' ? "" : ", ", VERSION_BYTES - 32, version);
  const even_error kept = *even_error_last();
  if (even_board_create(group->rank, group->ranks, &group->board, &own.board) != EVEN_OK) {
    (void)even_error_restore(&kept);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&all, (size_t)group->ranks));
  const even_error aside = even_error_aside();
  even_status status = even_error_told(network->gather(network->context, &own, sizeof own, all), &aside);
  *largest = 0;
  for (int rank = 0; status == EVEN_OK && rank < group->ranks; rank++) {
    *largest = all[rank].address_bytes > *largest ? all[rank].address_bytes : *largest;
    status = learn_peer(group, rank, &all[rank], &own);
  }
  if (status == EVEN_OK) {
    share_board(group, all);
  }
  even_free(all);
  return status;
}

/* A rank whose transport did not start comes all the same, without an address: the others would wait for it. */
static even_status find_others(even_ucx_group *group, const even_comm_network *network, even_status started) {
  void *address = NULL;
  const char *version = "";
  size_t bytes = 0;
  size_t largest = 0;
  if (started == EVEN_OK) {
    started = group->transport->address(group, &address, &bytes, &version);
  }
  const even_error why = *even_error_last();
  even_status status = introduce(group, network, bytes, version, &largest);
  if (started != EVEN_OK) {
    return even_error_restore(&why);
  }
  return status == EVEN_OK ? connect_all(group, network, address, bytes, largest) : status;
}

static even_status make_room(even_ucx_group *group, const even_comm_params *params) {
  size_t ranks = (size_t)params->ranks;
  size_t arena = 0;
  if (!even_align_size(params->arena_bytes, EVEN_UCX_ARENA_ALIGNMENT, &arena) ||
      !even_add_size(arena, EVEN_UCX_ARENA_ALIGNMENT, &arena)) {
    return even_fail(EVEN_ERR_OVERFLOW, "an arena of %zu bytes is larger than memory can be", params->arena_bytes);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&group->notices, 2 * ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->transfers, EVEN_UCX_TRANSFERS * ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->lengths, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->sources, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->waits, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->asked, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->fit.ends, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->fit.times, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->fit.cuts, ranks + 1));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->outgoing, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&group->arrived, ranks));
  return params->arena_bytes == 0 ? EVEN_OK : even_alloc(1, arena, &group->arena);
}

/* All that this rank needs beside the others. */
static even_status prepare(even_ucx_group *group, const even_comm_params *params, const even_comm_network *network) {
  EVEN_TRY(make_room(group, params));
  return group->transport->start(group, network);
}

static even_status join(even_ucx_group *group) {
  even_status status = EVEN_OK;
  EVEN_TRY(even_ucx_call_begin(group, EVEN_CALL_OPEN, 0, 0, 0, 0, NULL));
  for (unsigned i = 0; i < group->transport->greetings && status == EVEN_OK; i++) {
    status = even_ucx_call_meet(group, 0, NULL);
  }
  return even_ucx_call_end(group, status);
}

/* The watcher's: what others say is heard, and they are answered, also while this rank is in no call. */
static void look(void *context) {
  even_ucx_group *group = context;
  if (pthread_mutex_trylock(&group->lock) == 0) { /* else somebody waits, and hears */
    (void)even_ucx_move(group);
    even_ucx_end_over(group);
    even_ucx_pass_on(group);
    (void)pthread_mutex_unlock(&group->lock);
  }
}

even_status even_ucx_open(const even_comm_params *params, const even_comm_network *network,
                          const even_transport *transport, even_comm **out) {
  even_ucx_group *group = NULL;
  *out = NULL;
  EVEN_TRY(check_open(params));
  EVEN_TRY(EVEN_NEW(&group));
  group->engine = strcmp(transport->engine, even_ucx_mpi_engine.name) == 0 ? &even_ucx_mpi_engine : &even_ucx_engine;
  group->transport = transport;
  group->kernels = even_kernels_best();
  group->rank = params->rank;
  group->ranks = params->ranks;
  group->arena_bytes = params->arena_bytes;
  group->over = params->over;
  group->over_context = params->over_context;
  group->process = even_own_process();
  group->process_mark = even_process_mark();
  group->passed = even_waits_found(UINT64_MAX, NULL); /* of earlier ones its ranks hear elsewhere */
  uint32_t most = params->spin < 0 ? transport->most_polls : even_comm_polls_of(params->spin);
  even_ucx_start_ways(group);
  even_ucx_start_move_ways(group);
  group->patience = (even_comm_patience){.polls = most, .least = most < LEAST_POLLS ? most : LEAST_POLLS, .most = most};
  atomic_store(&group->timeout_ns, even_comm_limit_ns(params->timeout_seconds));
  group->engine->set_stop_grace((even_comm *)(void *)group, 0);
  group->board.memory.fd = -1;
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
    group->engine->close((even_comm *)(void *)group);
    return status;
  }
  group->watch = (even_watch){.look = look, .context = group};
  even_watcher_add(&group->watch);
  if (!atomic_load(&group->watch.runs)) { /* the others must not take its silence for a stop */
    (void)pthread_mutex_lock(&group->lock);
    even_ucx_report(group, false);
    (void)pthread_mutex_unlock(&group->lock);
  }
  *out = (even_comm *)(void *)group;
  return EVEN_OK;
}
