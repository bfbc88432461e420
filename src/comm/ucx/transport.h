/* What moves bytes between the ranks of a group over the network: UCX, or MPI. The engine above it does the rest (calls
 * that announce themselves, sums in rank order, messages, ends that all hear of), the same for each. */
#ifndef EVEN_COMM_UCX_TRANSPORT_H
#define EVEN_COMM_UCX_TRANSPORT_H

#include <evenstep/comm.h>
#include <stdint.h>

typedef struct even_ucx_group even_ucx_group;

/* What send and receive return: NULL (done), a request, or an error, a number from -1 to -100 in a request's place. */
#define EVEN_UCX_UNDER_WAY 1
#define EVEN_UCX_CANCELLED (-16)
#define EVEN_UCX_LAST_ERROR (-100)

static inline int even_ucx_is_error(const void *request) {
  return (uintptr_t)request >= (uintptr_t)(intptr_t)EVEN_UCX_LAST_ERROR;
}
static inline signed char even_ucx_error_of(const void *request) {
  return (signed char)(intptr_t)request;
}

/* Once a group is open its calls come one at a time (with the group's lock), from any thread of the process. */
typedef struct even_transport {
  const char *engine;  /* even_comm_engine_name */
  const char *library; /* in error texts */
  uint32_t most_polls; /* before a wait sleeps */
  /* Whether what is under way to or from a peer ends when the peer is cut off. Where it does not, memory of a failed
   * call may be read or written until the process ends, and a call that comes to its end after the group's has failed.
   */
  bool takes_back;
  /* So many times all greet all when a group opens: once, that all have come; more often where the transport itself
   * still has words on their way then. */
  unsigned greetings;

  /* ---- opening ---- */
  /* Starts this rank's part: group->link, also where it fails half way. */
  even_status (*start)(even_ucx_group *group, const even_comm_network *network);
  /* What the others need to reach this rank; it stays until `connect` or `stop`. *version: of the library, where it has
   * to be the same on all ranks; else it is not touched. */
  even_status (*address)(even_ucx_group *group, void **address, size_t *bytes, const char **version);
  /* NULL, or what waits for all ranks: called when all have said that they have started; writes the address. */
  even_status (*begin)(even_ucx_group *group);
  /* All ranks' addresses, each in `stride` bytes: sets every peer's endpoint (any value but NULL). */
  even_status (*connect)(even_ucx_group *group, const void *addresses, size_t stride);

  /* ---- moving ---- */
  void *(*send)(even_ucx_group *group, void *endpoint, const void *data, size_t bytes, uint64_t tag);
  /* What comes with `tag` in the bits of `mask`: all of them, which name the sender, or those of the kind. */
  void *(*receive)(even_ucx_group *group, void *data, size_t bytes, uint64_t tag, uint64_t mask);
  signed char (*status)(even_ucx_group *group, void *request); /* 0, an error, EVEN_UCX_UNDER_WAY */
  void (*cancel)(even_ucx_group *group, void *request);        /* a send may go on all the same */
  void (*release)(even_ucx_group *group, void *request);
  /* Does what can be done now; whether something was. */
  bool (*progress)(even_ucx_group *group);
  /* Whether to sleep: nothing came meanwhile. `sleep` follows, without the group's lock: until something comes, `wake`
   * is called, or the time is over. `idle` counts the sleeps and polls of one wait before it. */
  bool (*arm)(even_ucx_group *group);
  void (*sleep)(even_ucx_group *group, uint64_t limit_ns, uint32_t idle);
  void (*wake)(even_ucx_group *group);
  /* Nothing wakes `sleep`, which is short: any number of threads may be in it, and none has to be woken for another. */
  bool naps;
  const char *(*status_text)(even_ucx_group *group, signed char status);

  /* ---- the end ---- */
  /* Closes the connection to a peer at once; NULL, an error or a request. */
  void *(*cut)(even_ucx_group *group, void *endpoint);
  /* Gives back all it has, the link too; no request is looked at afterwards. Whether the group's memory is no longer
   * used by it: where not, it keeps that memory reachable, and the group must not free it. */
  bool (*stop)(even_ucx_group *group);
  void (*describe)(const even_ucx_group *group, char *text, size_t bytes);
} even_transport;

#endif
