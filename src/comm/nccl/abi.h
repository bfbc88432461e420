/* What we use of NCCL's and the CUDA driver's interfaces: one table each, filled when the libraries are opened.
 *
 * Declared here from the published interface (NCCL user guide, "API"; CUDA driver API) instead of included: no header
 * has to be there to build, and one build serves every version. scripts/check_nccl_abi.py compares each number and
 * layout below with the nccl.h of an installed wheel. */
#ifndef EVEN_COMM_NCCL_ABI_H
#define EVEN_COMM_NCCL_ABI_H

#include "os/library.h"

#include <limits.h>
#include <stddef.h>

/* ncclResult_t */
enum {
  EVEN_NCCL_SUCCESS = 0,
  EVEN_NCCL_CUDA_ERROR = 1,
  EVEN_NCCL_SYSTEM_ERROR = 2,
  EVEN_NCCL_INTERNAL_ERROR = 3,
  EVEN_NCCL_INVALID_ARGUMENT = 4,
  EVEN_NCCL_INVALID_USAGE = 5,
  EVEN_NCCL_REMOTE_ERROR = 6,
  EVEN_NCCL_IN_PROGRESS = 7,
  EVEN_NCCL_TIMEOUT = 8
};

/* ncclDataType_t */
enum {
  EVEN_NCCL_INT8 = 0,
  EVEN_NCCL_UINT8 = 1,
  EVEN_NCCL_INT32 = 2,
  EVEN_NCCL_UINT32 = 3,
  EVEN_NCCL_INT64 = 4,
  EVEN_NCCL_UINT64 = 5,
  EVEN_NCCL_FLOAT16 = 6,
  EVEN_NCCL_FLOAT32 = 7,
  EVEN_NCCL_FLOAT64 = 8,
  EVEN_NCCL_BFLOAT16 = 9,
  EVEN_NCCL_FLOAT8_E4M3 = 10, /* from EVEN_NCCL_FLOAT8_VERSION on */
  EVEN_NCCL_FLOAT8_E5M2 = 11
};

/* ncclRedOp_t */
enum { EVEN_NCCL_SUM = 0, EVEN_NCCL_PROD = 1, EVEN_NCCL_MAX = 2, EVEN_NCCL_MIN = 3, EVEN_NCCL_AVG = 4 };

enum {
  EVEN_NCCL_SCALAR_HOST = 1, /* ncclScalarHostImmediate */
  EVEN_NCCL_SHRINK_DEFAULT = 0,
  EVEN_NCCL_SHRINK_ABORT = 1,
  EVEN_NCCL_UNSET = INT_MIN,        /* NCCL_CONFIG_UNDEF_INT */
  EVEN_NCCL_CONFIG_VERSION = 21700, /* that of the struct below: later members take NCCL's defaults */
  EVEN_NCCL_LEAST_VERSION = 21800,  /* the oldest that we open */
  EVEN_NCCL_FLOAT8_VERSION = 22400,
  EVEN_NCCL_SHARING_VERSION = 23000, /* NCCL_MULTI_RANK_GPU_ENABLE */
  EVEN_NCCL_ID_BYTES = 128
};
#define EVEN_NCCL_CONFIG_MAGIC 0xcafebeefU

typedef struct even_nccl_comm even_nccl_comm; /* struct ncclComm */

typedef struct even_nccl_id {
  char internal[EVEN_NCCL_ID_BYTES];
} even_nccl_id;

/* ncclConfig_t of NCCL 2.17: versions since only add members behind these */
typedef struct even_nccl_config {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cga_cluster_size;
  int least_ctas;
  int most_ctas;
  const char *net_name;
} even_nccl_config;

typedef struct even_nccl {
  even_library library;
  int version;
  int (*get_version)(int *version);
  int (*make_id)(even_nccl_id *out);
  int (*init)(even_nccl_comm **out, int ranks, even_nccl_id id, int rank, even_nccl_config *config);
  int (*finalize)(even_nccl_comm *comm);
  int (*destroy)(even_nccl_comm *comm);
  int (*abort)(even_nccl_comm *comm);
  int (*async_error)(even_nccl_comm *comm, int *out);
  const char *(*error_text)(int result);
  const char *(*last_error)(even_nccl_comm *comm);
  int (*op_make)(int *op, void *scalar, int type, int residence, even_nccl_comm *comm);
  int (*op_free)(int op, even_nccl_comm *comm);
  int (*all_reduce)(const void *input, void *output, size_t count, int type, int op, even_nccl_comm *comm,
                    void *stream);
  int (*reduce)(const void *input, void *output, size_t count, int type, int op, int root, even_nccl_comm *comm,
                void *stream);
  int (*reduce_scatter)(const void *input, void *output, size_t each, int type, int op, even_nccl_comm *comm,
                        void *stream);
  int (*all_gather)(const void *input, void *output, size_t each, int type, even_nccl_comm *comm, void *stream);
  int (*broadcast)(const void *input, void *output, size_t count, int type, int root, even_nccl_comm *comm,
                   void *stream);
  int (*send)(const void *data, size_t count, int type, int peer, even_nccl_comm *comm, void *stream);
  int (*receive)(void *data, size_t count, int type, int peer, even_nccl_comm *comm, void *stream);
  int (*group_begin)(void);
  int (*group_end)(void);
  /* NULL in versions that lack them */
  int (*shrink)(even_nccl_comm *comm, int *excluded, int count, even_nccl_comm **out, even_nccl_config *config,
                int flags);
  int (*grow_id)(even_nccl_comm *comm, even_nccl_id *out);
  int (*grow)(even_nccl_comm *comm, int ranks, const even_nccl_id *id, int rank, even_nccl_comm **out,
              even_nccl_config *config);
} even_nccl;

typedef struct even_cuda_driver {
  even_library library;
  int (*init)(unsigned int flags);
  int (*device_count)(int *out);
  int (*device_get)(int *out, int index);
  int (*context_retain)(void **out, int device);
  int (*context_release)(int device);
  int (*context_push)(void *context);
  int (*context_pop)(void **out);
  int (*memory_allocate)(unsigned long long *out, size_t bytes);
  int (*memory_free)(unsigned long long memory);
  int (*error_text)(int code, const char **out);
  int (*event_create)(void **out, unsigned int flags);
  int (*event_destroy)(void *event);
  int (*event_record)(void *event, void *stream);
  int (*event_query)(void *event);
  int (*event_elapsed)(float *milliseconds, void *from, void *to);
  int (*stream_captures)(void *stream, int *status);
  int (*capture_mode_exchange)(int *mode);
} even_cuda_driver;

enum { EVEN_CUDA_NOT_READY = 600, EVEN_CUDA_CAPTURE_RELAXED = 2 };

/* Opened once for each name and never closed: a library that runs may have threads. name: NULL as in
 * even_device_comm_library. EVEN_ERR_UNSUPPORTED says what is missing. Any thread. */
even_status even_nccl_open(const char *name, const even_nccl **out) EVEN_MUST_USE;
even_status even_cuda_driver_open(const even_cuda_driver **out) EVEN_MUST_USE;

#endif
