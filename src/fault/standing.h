/* Which ranks of a job stand still (were stopped), in memory that an agent and the ranks of its host share. A rank sees
 * those of its own host in /proc; of those of other hosts their agents say so, and this one's writes it here. Never
 * more than was seen: how long a process had stood when its own agent last looked. What nobody has said again for a
 * while counts no more: then nothing is known. */
#ifndef EVEN_FAULT_STANDING_H
#define EVEN_FAULT_STANDING_H

#include <evenstep/status.h>
#include <stdint.h>

typedef struct even_standing even_standing;

/* What was told counts for so long; whoever tells does so more often. */
#define EVEN_STANDING_FRESH_NS ((uint64_t)600 * 1000000u)

/* A new segment, in which nobody stands, with a place for each rank. *fd is the caller's, close-on-exec. */
even_status even_standing_create(int ranks, int *fd) EVEN_MUST_USE;
/* Maps the segment; the caller keeps `fd`. EVEN_ERR_INPUT: it is none of these. */
even_status even_standing_open(int fd, even_standing **out) EVEN_MUST_USE;
/* NULL is let be. */
void even_standing_close(even_standing *standing);

/* The agent, one thread of it: the process of that rank, on the host with this mark (even_host_mark), had stood still
 * for stood_ns when its agent looked; 0: it goes on, or is gone. `now_ns` of even_clock_ns. */
void even_standing_tell(even_standing *standing, int rank, uint32_t host, uint32_t process, uint64_t stood_ns,
                        uint64_t now_ns);
/* Nobody stands. */
void even_standing_begin(even_standing *standing);

/* Ranks, any thread: for how long that process had been seen standing still when that was last told; 0: it goes on, or
 * nothing is known. */
uint64_t even_standing_ns(const even_standing *standing, uint32_t host, uint32_t process, uint64_t now_ns);

#endif
