/* Reductions: our types and operations in NCCL's words, weights as PreMulSum. */
#include "comm/nccl/device_comm.h"

#include "base/checked.h"
#include "comm/nccl/scalar.h"

/* A reduction as NCCL takes it. */
typedef struct reduction {
  int type;
  int op;
} reduction;

static even_status type_of(even_dtype dtype, int version, int *out) {
  switch (dtype) {
    case EVEN_F32:
      *out = EVEN_NCCL_FLOAT32;
      return EVEN_OK;
    case EVEN_F64:
      *out = EVEN_NCCL_FLOAT64;
      return EVEN_OK;
    case EVEN_F16:
      *out = EVEN_NCCL_FLOAT16;
      return EVEN_OK;
    case EVEN_BF16:
      *out = EVEN_NCCL_BFLOAT16;
      return EVEN_OK;
    case EVEN_I8:
      *out = EVEN_NCCL_INT8;
      return EVEN_OK;
    case EVEN_U8:
    case EVEN_BOOL:
      *out = EVEN_NCCL_UINT8;
      return EVEN_OK;
    case EVEN_I32:
      *out = EVEN_NCCL_INT32;
      return EVEN_OK;
    case EVEN_U32:
      *out = EVEN_NCCL_UINT32;
      return EVEN_OK;
    case EVEN_U64:
      *out = EVEN_NCCL_UINT64;
      return EVEN_OK;
    case EVEN_I64:
      *out = EVEN_NCCL_INT64;
      return EVEN_OK;
    case EVEN_I16:
    case EVEN_U16:
      (void)even_fail(EVEN_ERR_UNSUPPORTED, "NCCL does not reduce 16-bit integers");
      return even_error_fix("convert to 32 bits, or reduce on the host");
    case EVEN_F8E4M3:
    case EVEN_F8E5M2:
      *out = dtype == EVEN_F8E4M3 ? EVEN_NCCL_FLOAT8_E4M3 : EVEN_NCCL_FLOAT8_E5M2;
      if (version < EVEN_NCCL_FLOAT8_VERSION) {
        (void)even_fail(EVEN_ERR_UNSUPPORTED, "NCCL %d.%d does not reduce floats of 8 bits", version / 10000,
                        version / 100 % 100);
        return even_error_fix("install NCCL 2.24 or newer, or convert to 16 bits");
      }
      return EVEN_OK; /* on GPUs before sm90 NCCL itself refuses, and says why */
  }
  return even_fail(EVEN_ERR_ARGUMENT, "%d is no element type", (int)dtype);
}

/* What a weight may be folded into, as in torch. */
static bool takes_factor(even_dtype dtype) {
  return dtype == EVEN_F32 || dtype == EVEN_F64 || dtype == EVEN_F16 || dtype == EVEN_BF16;
}

/* SUM and PRODUCT of bool are OR and AND: of 0 and 1, the larger and the smaller. */
static even_status op_of(even_dtype dtype, even_reduce_op op, int *out) {
  bool is_bool = dtype == EVEN_BOOL;
  switch (op) {
    case EVEN_SUM:
      *out = is_bool ? EVEN_NCCL_MAX : EVEN_NCCL_SUM;
      return EVEN_OK;
    case EVEN_AVG:
      if (is_bool) {
        return even_fail(EVEN_ERR_ARGUMENT, "AVG is for numbers, not for bool");
      }
      *out = EVEN_NCCL_AVG;
      return EVEN_OK;
    case EVEN_PRODUCT:
      *out = is_bool ? EVEN_NCCL_MIN : EVEN_NCCL_PROD;
      return EVEN_OK;
    case EVEN_MIN:
      *out = EVEN_NCCL_MIN;
      return EVEN_OK;
    case EVEN_MAX:
      *out = EVEN_NCCL_MAX;
      return EVEN_OK;
    case EVEN_BAND:
    case EVEN_BOR:
    case EVEN_BXOR:
      (void)even_fail(EVEN_ERR_UNSUPPORTED, "NCCL has no bitwise reductions");
      return even_error_fix("reduce on the host");
  }
  return even_fail(EVEN_ERR_ARGUMENT, "%d is no reduce operation", (int)op);
}

/* Checks what was given, before anything is begun. */
static even_status reduction_of(const even_device_comm *comm, even_dtype dtype, even_reduce_op op, const double *factor,
                                reduction *out) {
  EVEN_TRY(type_of(dtype, comm->nccl->version, &out->type));
  EVEN_TRY(op_of(dtype, op, &out->op));
  if (factor != NULL && (op != EVEN_SUM || !takes_factor(dtype))) {
    return even_fail(EVEN_ERR_ARGUMENT, "a factor goes with SUM of a floating type of 16 bits and more only");
  }
  return EVEN_OK;
}

/* Makes the operation that multiplies first; kept until the call or its group ends. */
static even_status fold_factor(even_device_comm *comm, const even_device_call *call, even_dtype dtype,
                               const double *factor, reduction *in) {
  if (factor == NULL) {
    return EVEN_OK;
  }
  even_device_scalar scalar;
  even_device_scalar_write(dtype, *factor, &scalar);
  EVEN_TRY(even_device_reserve_op(comm));
  EVEN_TRY(even_device_result(comm, call,
                              comm->nccl->op_make(&in->op, &scalar, in->type, EVEN_NCCL_SCALAR_HOST, comm->handle)));
  even_device_keep_op(comm, in->op);
  return EVEN_OK;
}

static even_status check_sizes(size_t count, even_dtype dtype) {
  size_t bytes = 0;
  if (!even_multiply_size(count, even_dtype_bytes(dtype), &bytes)) {
    return even_fail(EVEN_ERR_OVERFLOW, "%zu elements of %zu bytes are more than memory can hold", count,
                     even_dtype_bytes(dtype));
  }
  return EVEN_OK;
}

even_status even_device_comm_all_reduce(even_device_comm *comm, const void *input, void *output, size_t count,
                                        even_dtype dtype, even_reduce_op op, const double *factor, void *stream) {
  const even_device_call call = {.name = "all_reduce",
                                 .count = count,
                                 .kind = EVEN_CALL_ALL_REDUCE,
                                 .recorded = EVEN_RECORDED_ALL_REDUCE,
                                 .dtype = dtype,
                                 .op = op,
                                 .peer = -1,
                                 .bytes = count * even_dtype_bytes(dtype),
                                 .stream = stream};
  reduction how = {0};
  EVEN_TRY(reduction_of(comm, dtype, op, factor, &how));
  EVEN_TRY(check_sizes(count, dtype));
  EVEN_TRY(even_device_check_data(input, count));
  EVEN_TRY(even_device_check_data(output, count));
  EVEN_TRY(even_device_enter(comm, &call));
  even_status status = count == 0 ? EVEN_OK : fold_factor(comm, &call, dtype, factor, &how);
  if (status == EVEN_OK && count > 0) {
    int result = comm->nccl->all_reduce(input, output, count, how.type, how.op, comm->handle, stream);
    status = even_device_result(comm, &call, result);
  }
  return even_device_leave(comm, status);
}

even_status even_device_comm_reduce(even_device_comm *comm, const void *input, void *output, size_t count,
                                    even_dtype dtype, even_reduce_op op, const double *factor, int root, void *stream) {
  const even_device_call call = {.name = "reduce",
                                 .count = count,
                                 .kind = EVEN_CALL_REDUCE,
                                 .recorded = EVEN_RECORDED_REDUCE,
                                 .dtype = dtype,
                                 .op = op,
                                 .peer = root,
                                 .bytes = count * even_dtype_bytes(dtype),
                                 .stream = stream};
  reduction how = {0};
  EVEN_TRY(reduction_of(comm, dtype, op, factor, &how));
  EVEN_TRY(check_sizes(count, dtype));
  EVEN_TRY(even_device_check_rank(comm, root, "root"));
  EVEN_TRY(even_device_check_data(input, count));
  EVEN_TRY(even_device_check_data(output, comm->rank == root ? count : 0));
  EVEN_TRY(even_device_enter(comm, &call));
  even_status status = count == 0 ? EVEN_OK : fold_factor(comm, &call, dtype, factor, &how);
  if (status == EVEN_OK && count > 0) {
    int result = comm->nccl->reduce(input, output, count, how.type, how.op, root, comm->handle, stream);
    status = even_device_result(comm, &call, result);
  }
  return even_device_leave(comm, status);
}

/* A reduce for every part, as one operation of NCCL. */
static even_status reduce_parts(even_device_comm *comm, const even_device_call *call, const char *input, void *output,
                                const size_t *counts, even_dtype dtype, const reduction *how, void *stream) {
  EVEN_TRY(even_device_group_open(comm, call));
  even_status status = EVEN_OK;
  for (int rank = 0; rank < comm->ranks && status == EVEN_OK; rank++) {
    if (counts[rank] > 0) {
      int result = comm->nccl->reduce(input, rank == comm->rank ? output : NULL, counts[rank], how->type, how->op, rank,
                                      comm->handle, stream);
      status = even_device_result(comm, call, result);
    }
    input += counts[rank] * even_dtype_bytes(dtype);
  }
  return even_device_group_shut(comm, call, status);
}

static even_status check_counts(const even_device_comm *comm, const size_t *counts, even_dtype dtype, size_t *total,
                                bool *equal) {
  *total = 0;
  *equal = true;
  if (counts == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "no counts for %d ranks", comm->ranks);
  }
  for (int rank = 0; rank < comm->ranks; rank++) {
    *equal = *equal && counts[rank] == counts[0];
    if (!even_add_size(*total, counts[rank], total)) {
      return even_fail(EVEN_ERR_OVERFLOW, "the ranks' counts add up to more than a size can hold");
    }
  }
  return check_sizes(*total, dtype);
}

even_status even_device_comm_reduce_scatter(even_device_comm *comm, const void *input, void *output,
                                            const size_t *counts, even_dtype dtype, even_reduce_op op,
                                            const double *factor, void *stream) {
  reduction how = {0};
  size_t total = 0;
  bool equal = true;
  EVEN_TRY(reduction_of(comm, dtype, op, factor, &how));
  EVEN_TRY(check_counts(comm, counts, dtype, &total, &equal));
  EVEN_TRY(even_device_check_data(input, total));
  EVEN_TRY(even_device_check_data(output, counts[comm->rank]));
  const even_device_call call = {.name = "reduce_scatter",
                                 .count = total,
                                 .kind = EVEN_CALL_REDUCE_SCATTER,
                                 .recorded = EVEN_RECORDED_REDUCE_SCATTER,
                                 .dtype = dtype,
                                 .op = op,
                                 .peer = -1,
                                 .counts = counts,
                                 .bytes = total * even_dtype_bytes(dtype),
                                 .stream = stream};
  EVEN_TRY(even_device_enter(comm, &call));
  even_status status = total == 0 ? EVEN_OK : fold_factor(comm, &call, dtype, factor, &how);
  if (status == EVEN_OK && total > 0) {
    status = equal ? even_device_result(
                         comm, &call,
                         comm->nccl->reduce_scatter(input, output, counts[0], how.type, how.op, comm->handle, stream))
                   : reduce_parts(comm, &call, input, output, counts, dtype, &how, stream);
  }
  return even_device_leave(comm, status);
}

even_status even_device_comm_barrier(even_device_comm *comm, void *stream) {
  const even_device_call call = {
      .name = "barrier", .kind = EVEN_CALL_BARRIER, .recorded = EVEN_RECORDED_BARRIER, .peer = -1, .stream = stream};
  void *word = (void *)(uintptr_t)comm->word;
  EVEN_TRY(even_device_enter(comm, &call));
  int result = comm->nccl->all_reduce(word, word, 1, EVEN_NCCL_FLOAT32, EVEN_NCCL_SUM, comm->handle, stream);
  return even_device_leave(comm, even_device_result(comm, &call, result));
}
