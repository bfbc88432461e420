/* Which communicator this thread has a group of calls open of: NCCL's groups belong to the thread. */
#ifndef EVEN_COMM_NCCL_GROUPED_H
#define EVEN_COMM_NCCL_GROUPED_H

#include <evenstep/device_comm.h>
#include <stdbool.h>

/* Whether the calling thread has a group of this one open. A thread that has ended leaves its number to others, and its
 * groups to none. */
bool even_device_in_group(const even_device_comm *comm);
/* Whether any thread has. Any thread. */
bool even_device_has_group(const even_device_comm *comm);

/* Nobody will ask for this one again: aborts it, and closes it at once, or, where another thread has a group of it
 * open, at that group's end, which comes with the thread's at the latest. Neither what it goes beside nor what it is
 * recorded in is looked at once this returns. */
void even_device_forget(even_device_comm *comm);

#endif
