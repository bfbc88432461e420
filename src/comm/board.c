/* Boards: made by one rank of a host, found by the others through /proc. */
#include "comm/board.h"

#include "base/fail.h"
#include "os/clock.h"
#include "os/host.h"
#include "os/thread.h"

#include <string.h>

#define AWAIT_NAP_NS ((uint64_t)1000000u)

static void place_parts(even_board *board, const even_comm_layout *layout) {
  unsigned char *memory = board->memory.address;
  board->controls = (even_comm_control *)(void *)(memory + layout->controls);
  board->records = (even_flight_record *)(void *)(memory + layout->flights);
  board->stride = layout->flight_stride;
}

even_status even_board_create(int rank, int ranks, even_board *out, even_board_place *place) {
  const even_comm_params params = {.size = sizeof params, .ranks = ranks, .arena_bytes = EVEN_COMM_RECORD_ONLY};
  even_comm_layout layout;
  *out = (even_board){.memory = {.fd = -1}, .rank = rank, .ranks = ranks, .process = (uint32_t)even_own_process()};
  *place = (even_board_place){.fd = -1};
  EVEN_TRY(even_comm_layout_of_record(ranks, &layout));
  EVEN_TRY(even_shared_memory_create("evenstep-group", layout.total, &out->memory));
  even_comm_header_write(out->memory.address, &params, &layout);
  place_parts(out, &layout);
  place->process = (int32_t)out->process;
  place->fd = out->memory.fd;
  even_host_identity(place->host, sizeof place->host);
  return EVEN_OK;
}

even_status even_board_move(even_board *board, const even_board_place *place) {
  const even_comm_params params = {
      .size = sizeof params, .rank = board->rank, .ranks = board->ranks, .arena_bytes = EVEN_COMM_RECORD_ONLY};
  even_shared_memory memory;
  even_comm_layout layout;
  EVEN_TRY(even_comm_layout_of_record(board->ranks, &layout));
  EVEN_TRY(even_shared_memory_open_peer(place->process, place->fd, &memory));
  even_status status = even_comm_header_check(memory.address, memory.bytes, &params, &layout);
  if (status != EVEN_OK) {
    even_shared_memory_close(&memory);
    return status;
  }
  even_shared_memory_close(&board->memory);
  board->memory = memory;
  place_parts(board, &layout);
  return EVEN_OK;
}

even_status even_board_enter(even_board *board) {
  return even_peers_enter(&board->controls[board->rank], board->rank);
}

void even_board_close(even_board *board) {
  even_shared_memory_close(&board->memory);
  board->controls = NULL;
  board->records = NULL;
}

static const even_board_place *place_of(const even_board_place *places, size_t stride, int rank) {
  return (const even_board_place *)(const void *)((const unsigned char *)places + (size_t)rank * stride);
}

static bool is_same_host(const even_board_place *a, const even_board_place *b) {
  return a->host[0] != '\0' && strncmp(a->host, b->host, sizeof a->host) == 0;
}

static void expect_near(even_board *board, const even_board_place *places, size_t stride) {
  const even_board_place *own = place_of(places, stride, board->rank);
  for (int rank = 0; rank < board->ranks; rank++) {
    const even_board_place *other = place_of(places, stride, rank);
    if (rank == board->rank || is_same_host(own, other)) {
      atomic_store(&board->controls[rank].expected, (uint32_t)other->process);
    }
  }
}

static even_status meet(even_board *board, const even_board_place *places, size_t stride) {
  const even_board_place *own = place_of(places, stride, board->rank);
  int first = 0;
  while (first < board->rank && !is_same_host(own, place_of(places, stride, first))) {
    first++;
  }
  even_status status = first == board->rank ? EVEN_OK : even_board_move(board, place_of(places, stride, first));
  expect_near(board, places, stride);
  if (status != EVEN_OK && even_board_look_near(board, first, UINT64_MAX, even_clock_ns()) != EVEN_PEER_GONE) {
    return status;
  }
  return even_board_enter(board); /* its own, where the first has gone with the board: it shows who is gone */
}

void even_board_share(even_board *board, const even_board_place *places, size_t stride) {
  const even_error kept = *even_error_last();
  if (board->memory.address != NULL && meet(board, places, stride) != EVEN_OK) {
    even_board_close(board);
  }
  (void)even_error_restore(&kept);
}

bool even_board_has(const even_board *board, int rank) {
  return board->controls != NULL && atomic_load(&board->controls[rank].process) != 0;
}

even_peer_state even_board_look(const even_board *board, int rank, uint64_t grace, uint64_t now_ns) {
  return even_board_has(board, rank) ? even_peers_look_at(&board->controls[rank], board->process, grace, now_ns)
                                     : EVEN_PEER_LIVES;
}

uint32_t even_board_process(const even_board *board, int rank) {
  if (board->controls == NULL) {
    return 0;
  }
  uint32_t process = atomic_load(&board->controls[rank].process);
  return process != 0 ? process : atomic_load(&board->controls[rank].expected);
}

bool even_board_is_near(const even_board *board, int rank) {
  return even_board_process(board, rank) != 0;
}

even_peer_state even_board_look_near(const even_board *board, int rank, uint64_t grace, uint64_t now_ns) {
  return even_board_is_near(board, rank) ? even_peers_look_at(&board->controls[rank], board->process, grace, now_ns)
                                         : EVEN_PEER_LIVES;
}

static bool all_came(const even_board *board) {
  for (int rank = 0; rank < board->ranks; rank++) {
    if (!even_board_has(board, rank) &&
        even_board_look_near(board, rank, UINT64_MAX, even_clock_ns()) != EVEN_PEER_GONE &&
        even_board_is_near(board, rank)) {
      return false;
    }
  }
  return true;
}

void even_board_await(const even_board *board, uint64_t limit_ns) {
  uint64_t began = even_clock_ns();
  while (!all_came(board) && even_clock_ns() - began < limit_ns) {
    even_clock_sleep_ns(AWAIT_NAP_NS);
  }
}

void even_board_leave(const even_board *board) {
  if (board->controls != NULL) {
    atomic_store(&board->controls[board->rank].left, 1u);
  }
}

bool even_board_has_left(const even_board *board, int rank) {
  return board->controls != NULL && atomic_load(&board->controls[rank].left) != 0;
}

void even_board_end(const even_board *board, const even_error *why) {
  even_comm_header *header = board->memory.address;
  if (header != NULL && atomic_load(&header->state) == EVEN_GROUP_WHOLE &&
      atomic_exchange(&header->told.taken, 1u) == 0) {
    even_comm_end_words_write(&header->told, why);
    atomic_store(&header->state, EVEN_GROUP_TOLD);
  }
}

bool even_board_has_ended(const even_board *board, even_error *why) {
  const even_comm_header *header = board->memory.address;
  if (header == NULL || atomic_load(&header->state) != EVEN_GROUP_TOLD) {
    return false;
  }
  even_comm_end_words_read(&header->told, why);
  return true;
}

uint64_t even_board_standing_ns(const even_board *board, int rank, uint64_t now_ns) {
  uint64_t since = even_board_has(board, rank) ? atomic_load(&board->controls[rank].stands_since_ns) : 0;
  return since != 0 && now_ns > since ? now_ns - since : 0;
}

void even_board_keep_flight(const even_board *board, even_flight_writer *flight) {
  flight->records = board->records;
  flight->stride = board->stride;
  flight->rank = board->rank;
  flight->ranks = board->ranks;
}
