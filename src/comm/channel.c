/* Rings with one writer and one reader. All that is written comes in units of a header's size, so that a header never
 * lies across the ring's end. */
#include "comm/channel.h"

#include "base/checked.h"
#include "comm/writing.h"
#include "os/futex.h"

#define UNIT sizeof(even_message_header)
/* Moved before the other side hears of it: it takes one piece while the next is written. */
#define PIECE ((size_t)64 * 1024)

static size_t padded(size_t bytes) {
  return (bytes + UNIT - 1) / UNIT * UNIT;
}

static unsigned char *ring_of(even_comm_channel *channel) {
  return (unsigned char *)(channel + 1);
}

void even_message_bell_ring(even_comm *comm, int rank) {
  even_comm_control *control = &comm->controls[rank];
  /* One order of all stores and loads (seq_cst, as of the other side's position below): either the sleeper is seen
   * here, or it sees what was stored before. */
  if (atomic_load(&control->message_sleepers) != 0) {
    (void)atomic_fetch_add(&control->message_bell, 1u);
    even_futex_wake_all(&control->message_bell);
  }
}

/* What can be moved in one piece from position `at` on, of `bytes`, where `room` units' bytes are free or filled. */
static size_t piece_at(size_t ring, uint64_t at, size_t room, size_t bytes) {
  size_t before_end = ring - (size_t)(at & (ring - 1));
  return even_least_size(even_least_size(even_least_size(room, before_end), PIECE), bytes);
}

size_t even_channel_write(even_comm *comm, int to, const void *data, size_t bytes) {
  even_comm_channel *channel = even_comm_channel_of(comm, comm->rank, to);
  size_t ring = comm->layout.ring_bytes;
  uint64_t written = atomic_load_explicit(&channel->written, memory_order_relaxed);
  size_t done = 0;
  bool past_caches = even_writing_goes_past(comm);
  while (done < bytes) {
    size_t room = ring - (size_t)(written - atomic_load(&channel->read));
    size_t piece = piece_at(ring, written, room, bytes - done);
    if (piece == 0) {
      break;
    }
    even_writing_copy(ring_of(channel) + (written & (ring - 1)), (const unsigned char *)data + done, piece,
                      past_caches);
    done += piece;
    written += padded(piece);
    atomic_store(&channel->written, written);
    even_message_bell_ring(comm, to);
  }
  return done;
}

size_t even_channel_read(even_comm *comm, int from, void *data, size_t bytes) {
  even_comm_channel *channel = even_comm_channel_of(comm, from, comm->rank);
  size_t ring = comm->layout.ring_bytes;
  uint64_t taken = atomic_load_explicit(&channel->read, memory_order_relaxed);
  size_t done = 0;
  while (done < bytes) {
    size_t filled = (size_t)(atomic_load(&channel->written) - taken);
    size_t piece = piece_at(ring, taken, filled, bytes - done);
    if (piece == 0) {
      break;
    }
    even_copy_from_core((unsigned char *)data + done, ring_of(channel) + (taken & (ring - 1)), piece);
    done += piece;
    taken += padded(piece);
    atomic_store(&channel->read, taken);
    even_message_bell_ring(comm, from);
  }
  return done;
}
