/* The part of UCX's C interface that the engine uses, opened at run time: libucp.so.0 of a distribution's package or of
 * the PyPI wheel. UCX keeps this interface from version 1.10 on: its structures say in a mask which of their members
 * count, and grow at their end. tests/comm/test_ucx_interface.c compares every word here with UCX's headers. */
#ifndef EVEN_COMM_UCX_API_H
#define EVEN_COMM_UCX_API_H

#include "comm/ucx/transport.h"

#include <evenstep/status.h>
#include <stddef.h>
#include <stdint.h>

#define EVEN_UCX_BUSY (-15)

#define EVEN_UCX_OLDEST_MINOR 10 /* of version 1 */

#define EVEN_UCX_INIT_FEATURES ((uint64_t)1 << 0)
#define EVEN_UCX_FEATURE_TAGS ((uint64_t)1 << 0)
#define EVEN_UCX_FEATURE_WAKEUP ((uint64_t)1 << 4)
/* Bits of a mask that nobody has set say that the members are not there: room for what later versions append. */
#define EVEN_UCX_ROOM uint64_t room[24]

typedef struct even_ucx_init {
  uint64_t mask;
  uint64_t features;
  EVEN_UCX_ROOM;
} even_ucx_init;

#define EVEN_UCX_WORKER_THREADS ((uint64_t)1 << 0)
#define EVEN_UCX_THREADS_SERIALIZED 1 /* several threads, one at a time */

typedef struct even_ucx_worker_init {
  uint64_t mask;
  int threads;
  EVEN_UCX_ROOM;
} even_ucx_worker_init;

#define EVEN_UCX_ENDPOINT_ADDRESS ((uint64_t)1 << 0)
#define EVEN_UCX_ENDPOINT_ERROR_MODE ((uint64_t)1 << 1)
#define EVEN_UCX_ENDPOINT_ERROR_HANDLER ((uint64_t)1 << 2)
#define EVEN_UCX_ERROR_MODE_PEER 1 /* what is under way to a dead peer ends with an error */

typedef struct even_ucx_endpoint_init {
  uint64_t mask;
  const void *address;
  int error_mode;
  void (*on_error)(void *argument, void *endpoint, signed char status);
  void *on_error_argument;
  EVEN_UCX_ROOM;
} even_ucx_endpoint_init;

#define EVEN_UCX_CALL_FLAGS 0x10u
#define EVEN_UCX_CLOSE_AT_ONCE 1u

/* How a call is to run; without a mask it moves bytes, and its end is asked for. */
typedef struct even_ucx_call {
  uint32_t mask;
  uint32_t flags;
  EVEN_UCX_ROOM;
} even_ucx_call;

typedef struct even_ucx_api {
  void (*get_version)(unsigned *major, unsigned *minor, unsigned *release);
  const char *(*status_string)(signed char status);
  signed char (*config_read)(const char *prefix, const char *file, void **config);
  signed char (*config_modify)(void *config, const char *name, const char *value);
  void (*config_release)(void *config);
  signed char (*init)(unsigned major, unsigned minor, const even_ucx_init *init, const void *config, void **context);
  void (*cleanup)(void *context);
  signed char (*worker_create)(void *context, const even_ucx_worker_init *init, void **worker);
  void (*worker_destroy)(void *worker);
  signed char (*worker_address)(void *worker, void **address, size_t *bytes);
  void (*worker_release_address)(void *worker, void *address);
  signed char (*worker_descriptor)(void *worker, int *fd);
  signed char (*worker_arm)(void *worker);
  signed char (*worker_signal)(void *worker);
  unsigned (*worker_progress)(void *worker);
  signed char (*endpoint_create)(void *worker, const even_ucx_endpoint_init *init, void **endpoint);
  void *(*endpoint_close)(void *endpoint, const even_ucx_call *call);
  /* These return what a transport's calls do; a request is to be freed. */
  void *(*tag_send)(void *endpoint, const void *data, size_t bytes, uint64_t tag, const even_ucx_call *call);
  void *(*tag_receive)(void *worker, void *data, size_t bytes, uint64_t tag, uint64_t tag_mask,
                       const even_ucx_call *call);
  signed char (*request_status)(void *request);
  void (*request_cancel)(void *worker, void *request);
  void (*request_free)(void *request);
} even_ucx_api;

/* Opens the library (NULL: "libucp.so.0") once for the process and never closes it: it has threads and signal handlers
 * of its own. EVEN_ERR_NOT_FOUND with the way to get it, EVEN_ERR_UNSUPPORTED for a version before 1.10. */
even_status even_ucx_api_get(const char *library, const even_ucx_api **out) EVEN_MUST_USE;

#endif
