/* UCX as a group's transport. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/params.h"
#include "comm/ucx/api.h"
#include "comm/ucx/group.h"
#include "os/readable.h"

#include <stdio.h>

typedef struct ucx_link {
  const even_ucx_api *api;
  void *context;
  void *worker;
  void *address;
  int descriptor; /* readable when there is something to do */
} ucx_link;

static const even_ucx_call plainly = {0};

static ucx_link *link_of(const even_ucx_group *group) {
  return group->link;
}

static even_status fail_ucx(const ucx_link *link, const char *what, signed char status) {
  return even_fail(EVEN_ERR_SYSTEM, "UCX %s: %s", what, link->api->status_string(status));
}

/* ---- opening ---- */

static even_status configure(const ucx_link *link, const char *interfaces, void **config) {
  signed char status = link->api->config_read(NULL, NULL, config);
  if (status != 0) {
    return fail_ucx(link, "cannot read its settings (UCX_… variables)", status);
  }
  /* Dead hosts, which cut no connection, are noticed by a connection's keep-alive. */
  (void)link->api->config_modify(*config, "KEEPALIVE_INTERVAL", "1s");
  if (interfaces != NULL) {
    status = link->api->config_modify(*config, "NET_DEVICES", interfaces);
  }
  return status == 0 ? EVEN_OK : fail_ucx(link, "refuses the network interfaces", status);
}

static even_status start(even_ucx_group *group, const even_comm_network *network) {
  const even_ucx_init init = {.mask = EVEN_UCX_INIT_FEATURES,
                              .features = EVEN_UCX_FEATURE_TAGS | EVEN_UCX_FEATURE_WAKEUP};
  const even_ucx_worker_init worker = {.mask = EVEN_UCX_WORKER_THREADS, .threads = EVEN_UCX_THREADS_SERIALIZED};
  const even_ucx_api *api = NULL;
  ucx_link *link = NULL;
  void *config = NULL;
  EVEN_TRY(even_ucx_api_get(network->library, &api));
  EVEN_TRY(EVEN_NEW(&link));
  group->link = link;
  link->api = api;
  even_status result = configure(link, network->interfaces, &config);
  if (result == EVEN_OK) {
    signed char status = api->init(1, EVEN_UCX_OLDEST_MINOR, &init, config, &link->context);
    result = status == 0 ? EVEN_OK : fail_ucx(link, "cannot start", status);
  }
  if (config != NULL) {
    api->config_release(config);
  }
  EVEN_TRY(result);
  signed char status = api->worker_create(link->context, &worker, &link->worker);
  if (status != 0) {
    (void)fail_ucx(link, "finds no way to move data", status);
    return even_error_fix(
        "see which network interfaces it may use (UCX_NET_DEVICES, UCX_TLS; `ucx_info -d` lists them)");
  }
  status = api->worker_descriptor(link->worker, &link->descriptor);
  return status == 0 ? EVEN_OK : fail_ucx(link, "cannot be waited for", status);
}

static even_status address(even_ucx_group *group, void **out, size_t *bytes, const char **version) {
  ucx_link *link = link_of(group);
  (void)version; /* UCX's versions understand each other */
  signed char failed = link->api->worker_address(link->worker, &link->address, bytes);
  *out = link->address;
  return failed == 0 ? EVEN_OK : fail_ucx(link, "has no address", failed);
}

static void release_address(ucx_link *link) {
  if (link->address != NULL) {
    link->api->worker_release_address(link->worker, link->address);
    link->address = NULL;
  }
}

static void on_endpoint_error(void *argument, void *endpoint, signed char status) {
  even_ucx_peer *peer = argument;
  (void)endpoint;
  peer->failed = peer->failed == 0 ? status : peer->failed;
}

static even_status connect_peer(const ucx_link *link, even_ucx_peer *peer, const void *to) {
  const even_ucx_endpoint_init init = {
      .mask = EVEN_UCX_ENDPOINT_ADDRESS | EVEN_UCX_ENDPOINT_ERROR_MODE | EVEN_UCX_ENDPOINT_ERROR_HANDLER,
      .address = to,
      .error_mode = EVEN_UCX_ERROR_MODE_PEER,
      .on_error = on_endpoint_error,
      .on_error_argument = peer};
  signed char status = link->api->endpoint_create(link->worker, &init, &peer->endpoint);
  if (status != 0) {
    peer->endpoint = NULL;
    (void)even_fail(EVEN_ERR_SYSTEM, "UCX cannot connect to rank %d on host %s: %s", peer->number, peer->host,
                    link->api->status_string(status));
    (void)even_error_place(peer->number, NULL);
    return even_error_fix(
        "see whether both hosts have a network interface in common that UCX may use "
        "(EVENSTEP_COMM_INTERFACE, UCX_NET_DEVICES)");
  }
  return EVEN_OK;
}

static even_status connect_all(even_ucx_group *group, const void *addresses, size_t stride) {
  for (int rank = 0; rank < group->ranks; rank++) {
    const unsigned char *to = (const unsigned char *)addresses + (size_t)rank * stride;
    EVEN_TRY(connect_peer(link_of(group), &group->peers[rank], to));
  }
  release_address(link_of(group));
  return EVEN_OK;
}

/* ---- moving ---- */

static void *send(even_ucx_group *group, void *endpoint, const void *data, size_t bytes, uint64_t tag) {
  return link_of(group)->api->tag_send(endpoint, data, bytes, tag, &plainly);
}

static void *receive(even_ucx_group *group, void *data, size_t bytes, uint64_t tag, uint64_t mask) {
  const ucx_link *link = link_of(group);
  return link->api->tag_receive(link->worker, data, bytes, tag, mask, &plainly);
}

static signed char status_of(even_ucx_group *group, void *request) {
  return link_of(group)->api->request_status(request);
}

static void cancel(even_ucx_group *group, void *request) {
  link_of(group)->api->request_cancel(link_of(group)->worker, request);
}

static void release(even_ucx_group *group, void *request) {
  link_of(group)->api->request_free(request);
}

static bool progress(even_ucx_group *group) {
  return link_of(group)->api->worker_progress(link_of(group)->worker) != 0;
}

static bool arm(even_ucx_group *group) {
  return link_of(group)->api->worker_arm(link_of(group)->worker) == 0;
}

static void sleep_until_readable(even_ucx_group *group, uint64_t limit_ns, uint32_t idle) {
  (void)idle;
  even_readable_wait(link_of(group)->descriptor, limit_ns);
}

static void wake(even_ucx_group *group) {
  (void)link_of(group)->api->worker_signal(link_of(group)->worker);
}

static const char *status_text(even_ucx_group *group, signed char status) {
  return link_of(group)->api->status_string(status);
}

/* ---- the end ---- */

static void *cut(even_ucx_group *group, void *endpoint) {
  static const even_ucx_call at_once = {.mask = EVEN_UCX_CALL_FLAGS, .flags = EVEN_UCX_CLOSE_AT_ONCE};
  return link_of(group)->api->endpoint_close(endpoint, &at_once);
}

static bool stop(even_ucx_group *group) {
  ucx_link *link = link_of(group);
  if (link->worker != NULL) {
    release_address(link);
    link->api->worker_destroy(link->worker);
  }
  if (link->context != NULL) {
    link->api->cleanup(link->context);
  }
  even_free(link);
  group->link = NULL;
  return true;
}

static void describe(const even_ucx_group *group, char *text, size_t bytes) {
  (void)group;
  (void)snprintf(text, bytes, "UCX");
}

/* When the first greeting has come, the other end's answer to this one's request to connect may still wait behind it;
 * when the second has, that has come, and an acknowledgement may wait; when the third has, nothing does. An endpoint
 * that is cut while one of these words waits ends the process in UCX 1.13 and older, by an assertion that later
 * versions do without (openucx/ucx, pull request 8175). */
#define GREETINGS 3

/* Polls ask the kernel (0.5 to 1 µs over TCP). */
static const even_transport ucx_transport = {
    .engine = "ucx",
    .library = "UCX",
    .most_polls = 100,
    .takes_back = true,
    .greetings = GREETINGS,
    .start = start,
    .address = address,
    .connect = connect_all,
    .send = send,
    .receive = receive,
    .status = status_of,
    .cancel = cancel,
    .release = release,
    .progress = progress,
    .arm = arm,
    .sleep = sleep_until_readable,
    .wake = wake,
    .status_text = status_text,
    .cut = cut,
    .stop = stop,
    .describe = describe,
};

even_status even_comm_open_ucx(const even_comm_params *params, const even_comm_network *network, even_comm **out) {
  even_comm_params own;
  even_comm_network over;
  *out = NULL;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_comm_params, &own, params));
  EVEN_TRY(EVEN_TAKE_PARAMS(even_comm_network, &over, network));
  EVEN_TRY(EVEN_CHECK_RESERVED(even_comm_network, &over));
  if (over.gather == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "even_comm_network has no gather, by which the ranks find one another");
  }
  return even_ucx_open(&own, &over, &ucx_transport, out);
}
