/* When a GPU's events were, on the host's clock: from what has passed on the GPU since one of them. That one's own time
 * is known from below, by every call: no event comes before the call that put it on its stream. Where a stream has
 * nothing to do, its events come some microseconds later. */
#include "comm/nccl/device_comm.h"

/* The driver tells what has passed as a float of milliseconds, which has microseconds for some ten seconds only. */
#define WINDOW_NS ((uint64_t)10000000000u)
/* By so much the clocks may have gone apart in a window: a hundred parts in a million. */
#define DRIFT_NS ((uint64_t)1000000u)

void even_device_times_begin(even_device_comm *comm, void *event, uint64_t now_ns) {
  comm->times = (even_device_times){.base = event, .base_ns = now_ns};
}

uint64_t even_device_times_passed(const even_device_comm *comm, void *from, void *to) {
  float milliseconds = 0;
  return comm->cuda->event_elapsed(&milliseconds, from, to) == 0 && milliseconds > 0
             ? (uint64_t)((double)milliseconds * 1e6)
             : 0;
}

uint64_t even_device_times_of(even_device_comm *comm, void *event, uint64_t put_ns) {
  even_device_times *times = &comm->times;
  if (times->base == NULL) {
    return put_ns;
  }
  uint64_t passed = even_device_times_passed(comm, times->base, event);
  if (times->base_ns + passed < put_ns) {
    times->base_ns = put_ns - passed;
  }
  return times->base_ns + passed;
}

bool even_device_times_are_old(const even_device_comm *comm, uint64_t now_ns) {
  return comm->times.base != NULL && now_ns - comm->times.base_ns > WINDOW_NS;
}

void even_device_times_renew(even_device_comm *comm, void *event, uint64_t at_ns, uint64_t put_ns) {
  uint64_t least = at_ns - DRIFT_NS;
  comm->times = (even_device_times){.base = event, .base_ns = least > put_ns ? least : put_ns};
}
