/* The engine declares for itself what it uses of UCX; here every word of that is compared with UCX's own headers. */
#include "comm/ucx/api.h"

#include <stddef.h>
#include <ucp/api/ucp.h>

#define SAME(condition) _Static_assert(condition, #condition)
#define SAME_PLACE(mine, member, theirs, other) SAME(offsetof(mine, member) == offsetof(theirs, other))

SAME(EVEN_UCX_UNDER_WAY == UCS_INPROGRESS);
SAME(EVEN_UCX_BUSY == UCS_ERR_BUSY);
SAME(EVEN_UCX_CANCELLED == UCS_ERR_CANCELED);
SAME(EVEN_UCX_LAST_ERROR == UCS_ERR_LAST);
SAME(sizeof(ucs_status_t) == sizeof(signed char));

SAME(EVEN_UCX_INIT_FEATURES == UCP_PARAM_FIELD_FEATURES);
SAME(EVEN_UCX_FEATURE_TAGS == UCP_FEATURE_TAG);
SAME(EVEN_UCX_FEATURE_WAKEUP == UCP_FEATURE_WAKEUP);
SAME_PLACE(even_ucx_init, mask, ucp_params_t, field_mask);
SAME_PLACE(even_ucx_init, features, ucp_params_t, features);
SAME(sizeof(even_ucx_init) >= sizeof(ucp_params_t));

SAME(EVEN_UCX_WORKER_THREADS == UCP_WORKER_PARAM_FIELD_THREAD_MODE);
SAME(EVEN_UCX_THREADS_SERIALIZED == UCS_THREAD_MODE_SERIALIZED);
SAME_PLACE(even_ucx_worker_init, mask, ucp_worker_params_t, field_mask);
SAME_PLACE(even_ucx_worker_init, threads, ucp_worker_params_t, thread_mode);
SAME(sizeof(even_ucx_worker_init) >= sizeof(ucp_worker_params_t));

SAME(EVEN_UCX_ENDPOINT_ADDRESS == UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
SAME(EVEN_UCX_ENDPOINT_ERROR_MODE == UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
SAME(EVEN_UCX_ENDPOINT_ERROR_HANDLER == UCP_EP_PARAM_FIELD_ERR_HANDLER);
SAME(EVEN_UCX_ERROR_MODE_PEER == UCP_ERR_HANDLING_MODE_PEER);
SAME_PLACE(even_ucx_endpoint_init, mask, ucp_ep_params_t, field_mask);
SAME_PLACE(even_ucx_endpoint_init, address, ucp_ep_params_t, address);
SAME_PLACE(even_ucx_endpoint_init, error_mode, ucp_ep_params_t, err_mode);
SAME_PLACE(even_ucx_endpoint_init, on_error, ucp_ep_params_t, err_handler.cb);
SAME_PLACE(even_ucx_endpoint_init, on_error_argument, ucp_ep_params_t, err_handler.arg);
SAME(sizeof(even_ucx_endpoint_init) >= sizeof(ucp_ep_params_t));

SAME(EVEN_UCX_CALL_FLAGS == UCP_OP_ATTR_FIELD_FLAGS);
SAME(EVEN_UCX_CLOSE_AT_ONCE == UCP_EP_CLOSE_FLAG_FORCE);
SAME_PLACE(even_ucx_call, mask, ucp_request_param_t, op_attr_mask);
SAME_PLACE(even_ucx_call, flags, ucp_request_param_t, flags);
SAME(sizeof(even_ucx_call) >= sizeof(ucp_request_param_t));

int main(void) {
  return 0; /* it has been compiled */
}
