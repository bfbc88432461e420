/* How the processes of a host's ranks are, from /proc: by the control block in which each has said who it is. */
#ifndef EVEN_COMM_PEERS_H
#define EVEN_COMM_PEERS_H

#include "comm/segment.h"

/* How often one who waits looks how those are that it waits for. */
#define EVEN_COMM_LOOK_NS ((uint64_t)20 * 1000000u)
#define EVEN_COMM_STOP_GRACE_SECONDS 0.15

typedef enum even_peer_state {
  EVEN_PEER_LIVES,
  EVEN_PEER_GONE,  /* its process has ended (a zombie has), or it has closed the group */
  EVEN_PEER_STANDS /* stopped (SIGSTOP, SIGTSTP) for longer than this rank's grace */
} even_peer_state;

/* Writes who this process is, and which CPUs the calling thread may use, into the control block of its rank. */
even_status even_peers_enter(even_comm_control *own, int rank) EVEN_MUST_USE;
/* How the rank of this control block is, for one who bears a stop for `grace` ns; EVEN_PEER_LIVES where it cannot be
 * told, and where another rank has just looked (it does what follows, or nothing does). `now_ns` of even_clock_ns. */
even_peer_state even_peers_look_at(even_comm_control *peer, uint32_t own_process, uint64_t grace, uint64_t now_ns);

#endif
