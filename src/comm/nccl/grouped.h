/* Which communicator this thread has a group of calls open of: NCCL's groups belong to the thread. */
#ifndef EVEN_COMM_NCCL_GROUPED_H
#define EVEN_COMM_NCCL_GROUPED_H

#include <evenstep/device_comm.h>
#include <stdbool.h>

/* Whether the calling thread has a group of this one open. A thread that has ended leaves its number to others, and its
 * groups to none. */
bool even_device_in_group(const even_device_comm *comm);

#endif
