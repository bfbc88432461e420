/* MPI as a group's transport. Each group has a communicator of its own; a tag of 64 bits becomes one of MPI's, whose
 * limit may be as low as 32767: what has the same tag is matched in the order in which it was sent, and is received in
 * that order. */
#include "base/alloc.h"
#include "base/fail.h"
#include "comm/mpi/process.h"
#include "comm/mpi/requests.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

/* MPI cannot wake a sleeper: naps grow with the wait. */
#define SHORTEST_NAP_NS ((uint64_t)20 * 1000u)
#define LONGEST_NAP_NS ((uint64_t)1000 * 1000u)

/* MPI's tags. */
#define NOTICE_TAG 0
#define HEADER_TAG 1
#define FIRST_TAG 2 /* of calls; those of messages follow */
#define STEPS 1024

/* Who a rank is in MPI_COMM_WORLD. */
typedef struct address {
  int32_t rank;
  int32_t ranks; /* 0: MPI could not be started there */
  int32_t tag;   /* rank 0's tells groups apart that are opened at the same time */
} address;

typedef struct mpi_link {
  const even_mpi_process *process; /* NULL: not started yet */
  const char *library;             /* while the group is opened */
  even_mpi_handle comm;
  bool connected;
  bool moved; /* something has come to its end since `progress` was last asked */
  even_mpi_requests requests;
  int tags; /* of calls, and as many of messages */
  address own;
  char error[256]; /* MPI's words for the last one */
  even_ucx_group *group;
  struct mpi_link *next; /* of those that MPI may still use */
} mpi_link;

#define FAILED ((signed char)-1)

static _Atomic unsigned opened; /* groups so far */
/* Of groups that ended while MPI moved something of theirs, which it cannot be kept from. */
static pthread_mutex_t keeping = PTHREAD_MUTEX_INITIALIZER;
static mpi_link *kept;

static mpi_link *link_of(const even_ucx_group *group) {
  return group->link;
}

static void *error_request(mpi_link *link, int code) {
  even_mpi_words(code, link->error, sizeof link->error);
  return (void *)(intptr_t)FAILED;
}

/* ---- opening ---- */

/* MPI itself is started once it is known that all ranks can: it waits for them. */
static even_status start(even_ucx_group *group, const even_comm_network *network) {
  const even_mpi *mpi = NULL;
  mpi_link *link = NULL;
  EVEN_TRY(even_mpi_library_get(network->library, &mpi));
  EVEN_TRY(EVEN_NEW(&link));
  group->link = link;
  link->group = group;
  link->library = network->library;
  /* for what a collective has under way, and to hear of the end */
  return even_mpi_requests_reserve(&link->requests, (size_t)group->ranks * (EVEN_UCX_TRANSFERS + 2) + 2);
}

static even_status own_address(even_ucx_group *group, void **out, size_t *bytes, const char **version) {
  const even_mpi *mpi = NULL;
  *out = &link_of(group)->own;
  *bytes = sizeof(address);
  EVEN_TRY(even_mpi_library_get(NULL, &mpi));
  *version = mpi->version;
  return EVEN_OK;
}

static even_status begin(even_ucx_group *group) {
  mpi_link *link = link_of(group);
  EVEN_TRY(even_mpi_start(link->library, &link->process));
  link->tags = (link->process->largest_tag - FIRST_TAG + 1) / 2;
  group->message_numbers = (uint64_t)link->tags;
  link->own = (address){.rank = link->process->rank,
                        .ranks = link->process->ranks,
                        .tag = (int32_t)(atomic_fetch_add(&opened, 1u) % 32768u)};
  return EVEN_OK;
}

static address address_at(const void *addresses, size_t stride, int rank) {
  address at;
  memcpy(&at, (const unsigned char *)addresses + (size_t)rank * stride, sizeof at);
  return at;
}

static even_status refuse_worlds(const even_ucx_group *group, int rank, address at) {
  const even_mpi_process *process = link_of(group)->process;
  (void)even_fail(EVEN_ERR_UNSUPPORTED,
                  "the ranks are not in one MPI job: to %s rank %d is process %d of %d, and rank %d process %d of %d",
                  process->mpi->version, group->peers[group->rank].number, process->rank, process->ranks,
                  group->peers[rank].number, at.rank, at.ranks);
  return even_error_fix(
      "start the ranks with the mpirun that belongs to this library, or name that mpirun's library "
      "(EVENSTEP_MPI_LIBRARY)");
}

/* Ranks that MPI did not start together are each alone in a world of their own. */
static even_status check_world(const even_ucx_group *group, const void *addresses, size_t stride, int *world_ranks) {
  const even_mpi_process *process = link_of(group)->process;
  for (int rank = 0; rank < group->ranks; rank++) {
    address at = address_at(addresses, stride, rank);
    world_ranks[rank] = at.rank;
    if (at.ranks == 0) {
      (void)even_fail(EVEN_ERR_UNSUPPORTED, "rank %d on host %s could not start MPI: its own error says why",
                      group->peers[rank].number, group->peers[rank].host);
      return even_error_place(group->peers[rank].number, NULL);
    }
    if (at.ranks != process->ranks || (rank != group->rank && at.rank == process->rank)) {
      return refuse_worlds(group, rank, at);
    }
  }
  return EVEN_OK;
}

static even_status connect_all(even_ucx_group *group, const void *addresses, size_t stride) {
  mpi_link *link = link_of(group);
  const even_mpi *mpi = link->process->mpi;
  int *world_ranks = NULL;
  EVEN_TRY(EVEN_NEW_ARRAY(&world_ranks, (size_t)group->ranks));
  even_status status = check_world(group, addresses, stride, world_ranks);
  if (status == EVEN_OK) {
    even_mpi_enter();
    int code =
        mpi->calls->comm_create(mpi, world_ranks, group->ranks, address_at(addresses, stride, 0).tag, &link->comm);
    even_mpi_leave();
    status = code == 0 ? EVEN_OK : even_mpi_fail("cannot make a communicator of the group's ranks", code);
  }
  even_free(world_ranks);
  EVEN_TRY(status);
  for (int rank = 0; rank < group->ranks; rank++) {
    group->peers[rank].endpoint = &group->peers[rank];
  }
  link->connected = true;
  even_mpi_group_add(group);
  return EVEN_OK;
}

/* ---- moving ---- */

static int mpi_tag(const mpi_link *link, uint64_t tag) {
  uint64_t rest = tag & (((uint64_t)1 << EVEN_UCX_RANK_SHIFT) - 1);
  uint64_t tags = (uint64_t)link->tags;
  uint64_t step = rest % ((uint64_t)1 << EVEN_UCX_STEP_BITS);
  switch ((even_ucx_kind)(tag >> EVEN_UCX_KIND_SHIFT)) {
    case EVEN_UCX_NOTICE:
      return NOTICE_TAG;
    case EVEN_UCX_HEADER:
      return HEADER_TAG;
    case EVEN_UCX_PAYLOAD:
      return (int)(FIRST_TAG + tags + rest % tags);
    case EVEN_UCX_CALL:
      break;
  }
  return (int)(FIRST_TAG + ((rest >> EVEN_UCX_STEP_BITS) * STEPS + step) % tags);
}

static even_mpi_request *take_request(mpi_link *link, size_t bytes) {
  even_mpi_request *request = even_mpi_requests_take(&link->requests, bytes);
  if (request == NULL) {
    (void)snprintf(link->error, sizeof link->error, "no memory for a transfer");
  }
  return request;
}

static void release(even_ucx_group *group, void *handle) {
  if (group->link != NULL) {
    even_mpi_requests_give_back(&link_of(group)->requests, handle);
  }
}

static signed char status_of(even_ucx_group *group, void *handle) {
  mpi_link *link = link_of(group);
  even_mpi_request *request = handle;
  if (link == NULL) {
    return EVEN_UCX_CANCELLED;
  }
  const even_mpi *mpi = link->process->mpi;
  even_mpi_enter();
  int code = 0;
  int done = 1;
  while (code == 0 && done != 0 && request->done < request->count) {
    code = mpi->calls->test(mpi, &request->pieces[request->done], &done);
    request->done += code == 0 && done != 0;
  }
  even_mpi_leave();
  if (code != 0) {
    return even_ucx_error_of(error_request(link, code));
  }
  link->moved = link->moved || request->done == request->count;
  return request->done == request->count ? 0 : EVEN_UCX_UNDER_WAY;
}

static void cancel(even_ucx_group *group, void *handle) {
  mpi_link *link = link_of(group);
  even_mpi_request *request = handle;
  if (link == NULL || !request->receives) {
    return;
  }
  even_mpi_enter();
  for (size_t i = request->done; i < request->count; i++) {
    (void)link->process->mpi->calls->cancel(link->process->mpi, &request->pieces[i]);
  }
  even_mpi_leave();
}

/* Of a transfer whose n-th piece could not begin: the pieces before it are under way. */
static void *give_up(even_ucx_group *group, even_mpi_request *request, size_t begun, int code) {
  void *error = error_request(link_of(group), code);
  if (begun == 0) {
    release(group, request);
  }
  return error; /* the others stay open, and the memory with them */
}

static void *send(even_ucx_group *group, void *endpoint, const void *data, size_t bytes, uint64_t tag) {
  mpi_link *link = link_of(group);
  const even_ucx_peer *peer = endpoint;
  even_mpi_request *request = link == NULL ? NULL : take_request(link, bytes);
  int code = 0;
  size_t i = 0;
  if (request == NULL) {
    return (void *)(intptr_t)FAILED;
  }
  request->receives = false;
  even_mpi_enter();
  for (; code == 0 && i < request->count; i++) {
    size_t begin = 0;
    int piece = even_mpi_piece(bytes, i, &begin);
    const unsigned char *from = data;
    code = link->process->mpi->calls->send(link->process->mpi, from == NULL ? NULL : from + begin, piece,
                                           (int)(peer - group->peers), mpi_tag(link, tag), link->comm,
                                           &request->pieces[i]);
  }
  even_mpi_leave();
  return code == 0 ? request : give_up(group, request, i - 1, code);
}

static void *receive(even_ucx_group *group, void *data, size_t bytes, uint64_t tag, uint64_t mask) {
  mpi_link *link = link_of(group);
  even_mpi_request *request = link == NULL ? NULL : take_request(link, bytes);
  int code = 0;
  size_t i = 0;
  if (request == NULL) {
    return (void *)(intptr_t)FAILED;
  }
  const even_mpi *mpi = link->process->mpi;
  int sender = (int)(tag >> EVEN_UCX_RANK_SHIFT & (EVEN_COMM_MAX_RANKS - 1));
  request->receives = true;
  even_mpi_enter();
  for (; code == 0 && i < request->count; i++) {
    size_t begin = 0;
    int piece = even_mpi_piece(bytes, i, &begin);
    code = mpi->calls->receive(mpi, (unsigned char *)data + begin, piece, mask == UINT64_MAX ? sender : mpi->any_source,
                               mpi_tag(link, tag), link->comm, &request->pieces[i]);
  }
  even_mpi_leave();
  return code == 0 ? request : give_up(group, request, i - 1, code);
}

/* MPI moves data when it is asked for the state of a request. */
static bool progress(even_ucx_group *group) {
  mpi_link *link = link_of(group);
  bool moved = link != NULL && link->moved;
  if (link != NULL) {
    link->moved = false;
  }
  return moved;
}

static bool arm(even_ucx_group *group) {
  (void)group;
  return true;
}

static void nap(even_ucx_group *group, uint64_t limit_ns, uint32_t idle) {
  uint32_t doublings = idle / 8 < 6 ? idle / 8 : 6;
  uint64_t ns = SHORTEST_NAP_NS << doublings;
  (void)group;
  ns = ns < LONGEST_NAP_NS ? ns : LONGEST_NAP_NS;
  even_clock_sleep_ns(ns < limit_ns ? ns : limit_ns);
}

static void wake(even_ucx_group *group) {
  (void)group; /* naps are short */
}

static const char *status_text(even_ucx_group *group, signed char status) {
  const mpi_link *link = link_of(group);
  return status == EVEN_UCX_CANCELLED || link == NULL ? "cut off" : link->error;
}

/* ---- the end ---- */

static void *cut(even_ucx_group *group, void *endpoint) {
  (void)group;
  (void)endpoint;
  return NULL;
}

static void free_link(mpi_link *link) {
  even_mpi_requests_free(&link->requests);
  even_free(link);
}

static void keep_link(mpi_link *link) {
  (void)pthread_mutex_lock(&keeping);
  link->next = kept;
  kept = link;
  (void)pthread_mutex_unlock(&keeping);
}

/* What may still be under way in a communicator is not to turn up in the next one: only an empty one is freed. */
static bool stop(even_ucx_group *group) {
  mpi_link *link = link_of(group);
  bool settled = link->requests.open == 0;
  if (link->connected) {
    even_mpi_group_remove(group);
  }
  if (link->connected && settled && group->drained) {
    even_mpi_enter();
    (void)link->process->mpi->calls->comm_free(link->process->mpi, &link->comm);
    even_mpi_leave();
  }
  if (group->ended && group->end.status != EVEN_ERR_STATE) { /* that is MPI's own end */
    even_mpi_has_failed();
  }
  group->link = NULL;
  if (settled) {
    free_link(link);
  } else {
    keep_link(link);
  }
  return settled;
}

static void describe(const even_ucx_group *group, char *text, size_t bytes) {
  const mpi_link *link = link_of(group);
  (void)snprintf(text, bytes, "MPI (%s%s)", link == NULL ? "at its end" : link->process->mpi->version,
                 link != NULL && link->process->serial ? ", one call at a time" : "");
}

const even_transport even_mpi_transport = {
    .engine = "mpi",
    .library = "MPI",
    .most_polls = 1000,
    .takes_back = false,
    .greetings = 1,
    .start = start,
    .address = own_address,
    .begin = begin,
    .connect = connect_all,
    .send = send,
    .receive = receive,
    .status = status_of,
    .cancel = cancel,
    .release = release,
    .progress = progress,
    .arm = arm,
    .sleep = nap,
    .wake = wake,
    .naps = true,
    .status_text = status_text,
    .cut = cut,
    .stop = stop,
    .describe = describe,
};
