/* Ranks of device communicators that know one another: each a rank of a group on the host's memory (ranks.h) as well,
 * over which they meet, with a made-up GPU and a stream of its own. */
#ifndef EVEN_TEST_DEVICE_MEMBERS_H
#define EVEN_TEST_DEVICE_MEMBERS_H

#include "comm/ranks.h"

#include <evenstep/device_comm.h>

typedef struct device_member {
  even_comm *host; /* the group on the host's memory */
  even_device_comm *comm;
  void *stream;
  int rank, ranks;
  even_device_comm_id id;
  pid_t processes[RANKS_MOST];
} device_member;

/* The parameters of such a rank; `at` has its host group. */
even_device_comm_params device_member_params(device_member *at);
/* Opens all but the communicator: the ranks agree on an id, and where their processes are. */
int device_member_meet(even_comm *host, device_member *out);
/* Opens it all. 0, or 1 and a complaint. */
int device_member_begin(even_comm *host, device_member *out);
/* Waits for the stream, closes; the status of the close. */
even_status device_member_end(device_member *at);
/* Removes the file in which the made-up NCCL's ranks met, where a rank was killed and could not. */
void device_member_forget(const device_member *at);

/* A sum of `count` floats on the stream; the memory is static. */
even_status device_member_sum(device_member *at, size_t count);
/* Returns when `rank` is known to have begun collective `number`. */
void device_member_await(const device_member *at, int rank, uint64_t number);
/* Waits until the stream is done, or was let go, and then until the communicator has ended; its status. */
even_status device_member_failure(device_member *at);

#endif
