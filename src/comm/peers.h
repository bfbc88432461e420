/* How the processes of a host's ranks are, from /proc: by the control block in which each has said who it is. */
#ifndef EVEN_COMM_PEERS_H
#define EVEN_COMM_PEERS_H

#include "comm/segment.h"

/* How often one who waits looks how those are that it waits for. */
#define EVEN_COMM_LOOK_NS ((uint64_t)20 * 1000000u)
#define EVEN_COMM_STOP_GRACE_SECONDS 0.15
/* Longer without a look than this, the looker may have been stopped itself, with the whole job. */
#define EVEN_COMM_LONG_LOOK_NS (5 * EVEN_COMM_LOOK_NS + EVEN_COMM_LOOK_NS / 2)

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

/* Who knows of processes of other hosts, which nobody here sees in /proc: for how long the process, of the host with
 * this mark (even_host_mark), had been seen standing still there when that was last told; 0: it goes on, or nothing is
 * known. It returns at once. Any thread. */
typedef uint64_t even_peers_standing_call(void *context, uint32_t host, uint32_t process, uint64_t now_ns);
/* Asks it for all groups of this process from now on; NULL: nobody any more. */
void even_peers_ask_standing(even_peers_standing_call *call, void *context);
/* Its answer; 0 where there is nobody to ask. */
uint64_t even_peers_standing_ns(uint32_t host, uint32_t process, uint64_t now_ns);

/* For at least so long a rank of another host that nobody sees may leave questions unanswered, of all groups of this
 * process from now on, whatever their graces say; 0, as at first: for no longer than these say. Any thread. */
void even_peers_bear_silence(uint64_t least_ns);
uint64_t even_peers_borne_silence_ns(void);

#endif
