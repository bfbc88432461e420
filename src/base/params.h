/* Parameter structs that grow: their first member is their size, by which a caller with older or newer headers is told.
 */
#ifndef EVEN_BASE_PARAMS_H
#define EVEN_BASE_PARAMS_H

#include <evenstep/status.h>
#include <stddef.h>

/* Their bytes in version 0.1, which stay as they are when the structs grow. */
enum {
  EVEN_LEAST_even_balancer_params = 72,
  EVEN_LEAST_even_comm_choosing = 40,
  EVEN_LEAST_even_comm_hosts = 64,
  EVEN_LEAST_even_comm_network = 48,
  EVEN_LEAST_even_comm_params = 56,
  EVEN_LEAST_even_device_comm_params = 72,
  EVEN_LEAST_even_exact_params = 32,
  EVEN_LEAST_even_norm_backward = 64,
  EVEN_LEAST_even_norm_layout = 40,
  EVEN_LEAST_even_norm_values = 64,
  EVEN_LEAST_even_optim_job = 48,
  EVEN_LEAST_even_optim_params = 32,
  EVEN_LEAST_even_sync_course = 56,
  EVEN_LEAST_even_sync_params = 104
};

/* *own = *given, whose `size` is the caller's. Members that the caller's headers did not have yet are zero, which
 * stands for what was done before there were any; those that this library does not have must be zero.
 * EVEN_ERR_ARGUMENT names the struct. */
#define EVEN_TAKE_PARAMS(type, own, given) even_params_take(#type, (own), sizeof(type), EVEN_LEAST_##type, (given))

even_status even_params_take(const char *name, void *own, size_t bytes, size_t least, const void *given);

/* Structs have no padding at their ends, of which nobody could tell whether a caller's is zero: those that would have
 * it have `reserved` there, for members to come. EVEN_ERR_ARGUMENT where it is not zero in *own, which was taken. */
#define EVEN_CHECK_RESERVED(type, own) even_params_check_reserved(#type, &(own)->reserved, sizeof(own)->reserved)

even_status even_params_check_reserved(const char *name, const void *reserved, size_t bytes);

#endif
