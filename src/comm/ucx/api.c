/* Opening UCX. */
#include "comm/ucx/api.h"

#include "base/fail.h"
#include "os/library.h"

#include <evenstep/comm.h>
#include <pthread.h>
#include <stdio.h>

#define DEFAULT_LIBRARY "libucp.so.0"

static const even_library_wanted symbols[] = {
#define SYMBOL(member, name) {name, offsetof(even_ucx_api, member), false}
    SYMBOL(get_version, "ucp_get_version"),
    SYMBOL(status_string, "ucs_status_string"),
    SYMBOL(config_read, "ucp_config_read"),
    SYMBOL(config_modify, "ucp_config_modify"),
    SYMBOL(config_release, "ucp_config_release"),
    SYMBOL(init, "ucp_init_version"),
    SYMBOL(cleanup, "ucp_cleanup"),
    SYMBOL(worker_create, "ucp_worker_create"),
    SYMBOL(worker_destroy, "ucp_worker_destroy"),
    SYMBOL(worker_address, "ucp_worker_get_address"),
    SYMBOL(worker_release_address, "ucp_worker_release_address"),
    SYMBOL(worker_descriptor, "ucp_worker_get_efd"),
    SYMBOL(worker_arm, "ucp_worker_arm"),
    SYMBOL(worker_signal, "ucp_worker_signal"),
    SYMBOL(worker_progress, "ucp_worker_progress"),
    SYMBOL(endpoint_create, "ucp_ep_create"),
    SYMBOL(endpoint_close, "ucp_ep_close_nbx"),
    SYMBOL(tag_send, "ucp_tag_send_nbx"),
    SYMBOL(tag_receive, "ucp_tag_recv_nbx"),
    SYMBOL(request_status, "ucp_request_check_status"),
    SYMBOL(request_cancel, "ucp_request_cancel"),
    SYMBOL(request_free, "ucp_request_free"),
#undef SYMBOL
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static even_ucx_api api;
static even_library opened;
static char version[32];

static even_status take_symbols(const even_library *library, const char *name, even_ucx_api *out) {
  const char *absent = even_library_take(library, symbols, sizeof symbols / sizeof symbols[0], out);
  if (absent == NULL) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_UNSUPPORTED, "the UCX library %s has no %s", name, absent);
  return even_error_fix("install UCX 1.%d or newer (Debian: libucx0; PyPI: pip install 'evenstep[ucx]')",
                        EVEN_UCX_OLDEST_MINOR);
}

static even_status open_once(const char *name) {
  even_library library;
  even_ucx_api found = {0};
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  if (even_library_open(name, &library) != EVEN_OK) {
    return even_error_fix("apt-get install libucx0, or pip install 'evenstep[ucx]'");
  }
  even_status status = take_symbols(&library, name, &found);
  if (status == EVEN_OK && found.get_version != NULL) {
    found.get_version(&major, &minor, &release);
    if (major != 1 || minor < EVEN_UCX_OLDEST_MINOR) {
      status = even_fail(EVEN_ERR_UNSUPPORTED, "UCX is version %u.%u.%u; 1.%d and later versions 1 can be used", major,
                         minor, release, EVEN_UCX_OLDEST_MINOR);
    }
  }
  if (status != EVEN_OK) {
    even_library_close(&library);
    return status;
  }
  (void)snprintf(version, sizeof version, "%u.%u.%u", major, minor, release);
  api = found;
  opened = library;
  return EVEN_OK;
}

even_status even_comm_ucx_version(const char *library, char *text, size_t bytes) {
  const even_ucx_api *found = NULL;
  EVEN_TRY(even_ucx_api_get(library, &found));
  (void)snprintf(text, bytes, "%s", version);
  return EVEN_OK;
}

even_status even_ucx_api_get(const char *library, const even_ucx_api **out) {
  (void)pthread_mutex_lock(&lock);
  even_status status = opened.handle != NULL ? EVEN_OK : open_once(library == NULL ? DEFAULT_LIBRARY : library);
  *out = status == EVEN_OK ? &api : NULL;
  (void)pthread_mutex_unlock(&lock);
  return status;
}
