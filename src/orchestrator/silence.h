/* Which ranks hang: from what each is at, since when, and how long that takes it. Numbers in, numbers out; no clock, no
 * process. */
#ifndef EVEN_ORCHESTRATOR_SILENCE_H
#define EVEN_ORCHESTRATOR_SILENCE_H

#include <evenstep/telemetry.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EVEN_SILENCE_KEPT = 128 }; /* durations of each activity */

/* How long a rank may be silent in an activity that it has ended before: `least_ns`, or so often the p99 of how long
 * that took it; and in one of which nothing is known (all before its first step, the script's own code, what it is at
 * for the first time): so often `least_ns`. */
enum { EVEN_SILENCE_TIMES_P99 = 10, EVEN_SILENCE_TIMES_UNKNOWN = 10 };

typedef struct even_silence_durations {
  float seconds[EVEN_SILENCE_KEPT]; /* the last ones, in no order */
  uint64_t count;                   /* of all */
} even_silence_durations;

/* One rank in one attempt. Zeroed, then even_silence_begin. */
typedef struct even_silence {
  uint32_t count; /* of its activities */
  uint64_t calls; /* collectives and messages that it has made */
  even_activity activity;
  bool spoke;        /* it said what it is at, in this attempt */
  bool stepped;      /* and made a step, */
  bool ended_before; /* and was at this before */
  uint64_t since_ns; /* of the activity, */
  uint64_t quiet_ns; /* and when it was last seen to go on in it */
  even_silence_durations ended[EVEN_ACTIVITY_COUNT];
} even_silence;

void even_silence_begin(even_silence *silence, const even_rank_activity *now, uint64_t calls, uint64_t now_ns);
/* What the ring says now; whether it goes on since the last look. Look often: of an activity that
 * begins and ends between two looks no duration is kept, so that the p99 is of the longer ones. */
bool even_silence_look(even_silence *silence, const even_rank_activity *now, uint64_t calls, uint64_t now_ns);
/* A sign of life that is none of the ring's (a line of output): it counts where nothing is known of how long the
 * activity takes. */
void even_silence_sign(even_silence *silence, uint64_t now_ns);
/* So much of the time did not pass for the ranks: whoever looks was held up itself. */
void even_silence_shift(even_silence *silence, uint64_t ns);
/* Whether it is known how long its activity takes: it has made a step, and ended the activity before. */
bool even_silence_known(const even_silence *silence);
/* p99 of the activity's durations that are kept, by nearest rank; 0 where there are none. */
double even_silence_p99(const even_silence *silence);
/* How long it may be silent. */
uint64_t even_silence_limit_ns(const even_silence *silence, uint64_t least_ns);

/* What is known of a rank when somebody has been silent for too long. */
typedef struct even_silence_rank {
  bool alive;
  bool held;          /* somebody stopped it, or debugs it: told elsewhere, and waited for */
  bool late;          /* silent for longer than it may */
  bool in_collective; /* and it waits for others there */
} even_silence_rank;

/* hangs[r]: rank r hangs. One that waits in a collective does not, the one it waits for does; where all that live wait
 * in collectives, and all for too long, they wait for one another: all hang. Returns how many. */
size_t even_silence_decide(const even_silence_rank *ranks, size_t count, bool *hangs);

#endif
