/* Ranks of device communicators that know one another. */
#include "comm/device_members.h"

#include "comm/fake_gpu.h"
#include "os/clock.h"

#include <string.h>
#include <unistd.h>

#define MOST_FLOATS 1000

static even_status gather(void *context, const void *mine, size_t bytes, void *all) {
  even_comm *host = context;
  size_t counts[RANKS_MOST];
  for (int rank = 0; rank < even_comm_ranks(host); rank++) {
    counts[rank] = bytes;
  }
  return even_comm_all_gather(host, mine, all, counts, EVEN_U8);
}

even_device_comm_params device_member_params(device_member *at) {
  return (even_device_comm_params){.size = sizeof(even_device_comm_params),
                                   .rank = at->rank,
                                   .ranks = at->ranks,
                                   .device = at->rank,
                                   .timeout_seconds = 120,
                                   .gather = gather,
                                   .context = at->host};
}

int device_member_meet(even_comm *host, device_member *out) {
  pid_t own = getpid();
  *out = (device_member){.host = host, .rank = even_comm_rank(host), .ranks = even_comm_ranks(host)};
  if (out->rank == 0) {
    RANKS_EXPECT(host, even_device_comm_make_id(NULL, &out->id) == EVEN_OK);
  }
  RANKS_EXPECT(host, even_comm_broadcast(host, &out->id, sizeof out->id, 0) == EVEN_OK);
  RANKS_EXPECT(host, gather(host, &own, sizeof own, out->processes) == EVEN_OK);
  out->stream = fake_gpu_stream(out->rank);
  return 0;
}

int device_member_begin(even_comm *host, device_member *out) {
  if (device_member_meet(host, out) != 0) {
    return 1;
  }
  even_device_comm_params params = device_member_params(out);
  RANKS_EXPECT(host, even_device_comm_open(&params, &out->id, &out->comm) == EVEN_OK);
  return 0;
}

even_status device_member_end(device_member *at) {
  fake_gpu_wait(at->stream, at->rank);
  even_status status = even_device_comm_close(at->comm);
  fake_gpu_stream_free(at->stream);
  return status;
}

void device_member_forget(const device_member *at) {
  (void)unlink((const char *)at->id.bytes);
}

even_status device_member_sum(device_member *at, size_t count) {
  static float data[RANKS_MOST][MOST_FLOATS]; /* ranks may be threads */
  return even_device_comm_all_reduce(at->comm, data[at->rank], data[at->rank], count, EVEN_F32, EVEN_SUM, NULL,
                                     at->stream);
}

void device_member_await(const device_member *at, int rank, uint64_t number) {
  even_flight_call call = {0};
  while (even_device_comm_flight(at->comm, rank, &call, 1) != 1 || call.number < number) {
    even_clock_sleep_ns(200000);
  }
}

even_status device_member_failure(device_member *at) {
  fake_gpu_wait(at->stream, at->rank);
  while (!even_device_comm_has_ended(at->comm)) {
    even_clock_sleep_ns(200000);
  }
  return even_device_comm_poll(at->comm);
}
