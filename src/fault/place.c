/* The words: cudaGetErrorString, hipGetErrorString, Level Zero and SYCL as torch passes them on, cuBLAS, cuDNN, NCCL,
 * strerror. */
#include "fault/place.h"

#include <string.h>

/* `words` ends with NULL. */
static bool says_any(even_span_text exception, const char *const *words) {
  for (; exception.start != NULL && *words != NULL; words++) {
    if (memmem(exception.start, exception.length, *words, strlen(*words)) != NULL) {
      return true;
    }
  }
  return false;
}

even_place_blame even_traceback_blames_place(const even_traceback *traceback) {
  static const char *const broken[] = {"uncorrectable ECC error",
                                       "uncorrectable NVLink",
                                       "over nvlink or a hardware error",
                                       "hardware stack error",
                                       "no CUDA-capable device",
                                       "no ROCm-capable device",
                                       "GPU is lost",
                                       "fallen off the bus",
                                       "CUDA error: unknown error",
                                       "HIP error: unknown error",
                                       "ERROR_DEVICE_LOST",
                                       "ERROR_DEVICE_NOT_AVAILABLE",
                                       "ERROR_DEVICE_REQUIRES_RESET",
                                       NULL};
  /* A script's own services may be busy, too. */
  static const char *const of_anything[] = {"busy or unavailable", "system not yet initialized", NULL};
  static const char *const of_a_device[] = {"CUDA", "cuda", "HIP", "ROCm", NULL};
  static const char *const suspect[] = {"an illegal memory access was encountered",
                                        "an illegal instruction was encountered",
                                        "unspecified launch failure",
                                        "the launch timed out and was terminated",
                                        "misaligned address",
                                        "invalid program counter",
                                        "operation not supported on global/shared address space",
                                        "MPS server",
                                        "_STATUS_EXECUTION_FAILED",
                                        "_STATUS_INTERNAL_ERROR",
                                        "_STATUS_MAPPING_ERROR",
                                        "_STATUS_NOT_INITIALIZED",
                                        "unhandled cuda error",
                                        "unhandled hip error",
                                        "ncclUnhandledCudaError",
                                        "is killed by signal: ", /* a worker of torch's DataLoader */
                                        "Input/output error",
                                        "Remote I/O error",
                                        "Stale file handle",
                                        "Structure needs cleaning",
                                        "Transport endpoint is not connected",
                                        NULL};
  if (even_traceback_blames(traceback) != EVEN_BLAME_OWN) {
    return EVEN_PLACE_SPARED;
  }
  bool lost = says_any(traceback->exception, of_anything) && says_any(traceback->exception, of_a_device);
  return lost || says_any(traceback->exception, broken) ? EVEN_PLACE_BROKEN
         : says_any(traceback->exception, suspect)      ? EVEN_PLACE_SUSPECT
                                                        : EVEN_PLACE_SPARED;
}
