/* The board of a group over the network: memory that its ranks of one host share, in which each says who it is and
 * which calls it makes. Like a segment of shared memory, and found like one, but it moves no data. */
#ifndef EVEN_COMM_BOARD_H
#define EVEN_COMM_BOARD_H

#include "comm/flight.h"
#include "comm/peers.h"
#include "os/shared_memory.h"

#include <stdbool.h>

#define EVEN_BOARD_HOST_BYTES 96

typedef struct even_board {
  even_shared_memory memory;   /* address NULL: there is none, and nothing is known */
  even_comm_control *controls; /* one a rank; process 0: of another host, or it could not open the board */
  even_flight_record *records;
  size_t stride;
  int rank;
  int ranks;
  uint32_t process; /* this one */
} even_board;

/* Where another rank of this host finds a board: in which process, under which descriptor. */
typedef struct even_board_place {
  int32_t process;
  int32_t fd;
  char host[EVEN_BOARD_HOST_BYTES]; /* even_host_identity; "": not known */
} even_board_place;

/* A new board, and where it is. */
even_status even_board_create(int rank, int ranks, even_board *out, even_board_place *place) EVEN_MUST_USE;
/* In place of `board`, which is given up, that of another rank of this host. */
even_status even_board_move(even_board *board, const even_board_place *place) EVEN_MUST_USE;
/* Says who this rank is. */
even_status even_board_enter(even_board *board) EVEN_MUST_USE;
void even_board_close(even_board *board);
/* The ranks of a host meet on the board of the first of them: the first of places[ranks] (`stride` bytes apart) with
 * this rank's host. Each enters it, and says which processes will. Where the first has ended, and its board with it,
 * the rank keeps its own, which shows who is gone; where it cannot be opened nothing is known, and the board is closed.
 */
void even_board_share(even_board *board, const even_board_place *places, size_t stride);

/* Whether the rank is on this board: a process of this host, whose calls and state can be seen. */
bool even_board_has(const even_board *board, int rank);
/* As even_peers_look_at; EVEN_PEER_LIVES for a rank that is not on the board. */
even_peer_state even_board_look(const even_board *board, int rank, uint64_t grace, uint64_t now_ns);
/* The same, also of a rank that is expected and has not come yet (even_board_share). */
even_peer_state even_board_look_near(const even_board *board, int rank, uint64_t grace, uint64_t now_ns);
/* Whether the rank is of this host, come or not; its process. */
bool even_board_is_near(const even_board *board, int rank);
uint32_t even_board_process(const even_board *board, int rank);
/* Waits until all ranks of this host have come or are gone, `limit_ns` at the longest: a board goes with the rank that
 * made it, and what was told there with the board. */
void even_board_await(const even_board *board, uint64_t limit_ns);
/* This rank has left the group; whether `rank` has. */
void even_board_leave(const even_board *board);
bool even_board_has_left(const even_board *board, int rank);
/* For how long the rank has been seen standing still; 0: it goes on. */
uint64_t even_board_standing_ns(const even_board *board, int rank, uint64_t now_ns);
/* The group ends, for this reason: for all ranks on the board, unless it has ended before. */
void even_board_end(const even_board *board, const even_error *why);
/* Whether it has, and why. */
bool even_board_has_ended(const even_board *board, even_error *why);
/* Lets the calls be written there. */
void even_board_keep_flight(const even_board *board, even_flight_writer *flight);

#endif
