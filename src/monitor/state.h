/* The run as the records tell it: the last steps of each rank, the course of the whole run at a bounded resolution,
 * and the last events. Filled from the rings while the run lives, or from run.db afterwards. One thread at a time. */
#ifndef EVEN_MONITOR_STATE_H
#define EVEN_MONITOR_STATE_H

#include "device/cuda/watch.h"
#include "device/usage.h"
#include "monitor/measure.h"

#include <stdint.h>
#include <sys/types.h>

enum {
  EVEN_STATE_WINDOW = 64,   /* steps kept of each rank; means are over half of them at most, so that ranks may be
                               told of one after the other */
  EVEN_STATE_POINTS = 2048, /* of the course: neighbours are merged when a run has more steps */
  EVEN_STATE_EVENTS = 256,  /* kept: the last */
  EVEN_STATE_STRAGGLERS = 64,
  EVEN_STATE_MOST_RANKS = 4096
};

/* Events beyond those that ranks write (even_event): the agent's. */
enum {
  EVEN_EVENT_ATTEMPT = 100,
  EVEN_EVENT_RANK_STARTED = 101,
  EVEN_EVENT_RANK_ENDED = 102,
  EVEN_EVENT_LOST = 103,
  EVEN_EVENT_HANG = 104,            /* value 1: the rank hangs; 0: it goes on after all */
  EVEN_EVENT_SPIKE = 105,           /* value 1: the loss has jumped; 0: it is back */
  EVEN_EVENT_GPU = 106,             /* value 1: the rank's GPU is held down, 0: no more, -1: another fault of it */
  EVEN_EVENT_STRAGGLER = 107,       /* value: the percentage of its usual time that the rank takes; 0: no more */
  EVEN_EVENT_STRAGGLER_ENDED = 108, /* the rank is ended because it holds the others up */
  EVEN_EVENT_LINK = 109 /* value: the percentage of its usual time that a transfer over a link takes; 0: no more */
};

/* X(name, event, of one, of several): what goes wrong while all ranks live (monitor/faults.h) */
#define EVEN_FAULT_LIST(X)                                                                                            \
  X(HANG, EVEN_EVENT_HANG, "hang", "hangs")                                                                           \
  X(NONFINITE, EVEN_EVENT_NONFINITE, "time of numbers that were not finite", "times of numbers that were not finite") \
  X(PARAMETERS, EVEN_EVENT_PARAMETERS, "time that parameters differed", "times that parameters differed")             \
  X(SPIKE, EVEN_EVENT_SPIKE, "jump of the loss", "jumps of the loss")                                                 \
  X(GPU, EVEN_EVENT_GPU, "fault of a GPU", "faults of GPUs")                                                          \
  X(LINK, EVEN_EVENT_LINK, "slow link", "slow links")                                                                 \
  X(STRAGGLER, EVEN_EVENT_STRAGGLER, "straggler", "stragglers")

enum {
#define EVEN_FAULT_ENUM(name, event, one, many) EVEN_FAULT_##name,
  EVEN_FAULT_LIST(EVEN_FAULT_ENUM)
#undef EVEN_FAULT_ENUM
      EVEN_FAULT_COUNT
};

typedef struct even_state_fault {
  uint64_t count; /* how often */
  int lasting;    /* how many of them do */
  uint32_t first_step;
  int rank; /* of the last, as the two that follow; -1: the run */
  uint32_t step;
  char words[192];
  char lasting_words[192]; /* of the last that lasts */
} even_state_fault;

typedef struct even_state_event {
  uint64_t number; /* from 1, never reused */
  int attempt;
  int rank; /* -1: the run */
  uint32_t step;
  uint64_t at_ns;
  int event;
  int64_t value;
  double scalar; /* of that event, in place of value */
  char words[192];
} even_state_event;

/* A rank that was slower than usual for a while (monitor/stragglers.h). */
typedef struct even_state_straggler {
  int attempt;
  int rank;
  char host[64];
  char device[32];
  char cause[16]; /* even_straggler_name */
  double factor;  /* so many times as long its steps took */
  uint32_t begin_step;
  uint64_t begin_ns;
  bool over;
  uint32_t end_step; /* the last slow one, and its end */
  uint64_t end_ns;
  char why[128]; /* ", stopped by its CPU quota 75% of the time"; may be empty */
} even_state_straggler;

/* One rank's part of a point. */
typedef struct even_point_rank {
  uint32_t steps;
  uint64_t samples;
  uint64_t busy_ns;
  uint64_t duration_ns;
} even_point_rank;

/* `stride` neighbouring steps of the course. */
typedef struct even_point {
  bool used;
  int attempt;
  uint32_t step; /* the last in it */
  uint64_t end_ns;
  uint32_t losses;
  double loss_sum;
  double predicted_sum;
  uint32_t predicted;
  uint64_t batch_sum;
  uint32_t batches;
  uint32_t given; /* losses that the script gave, and their sum: known before and after the steps themselves */
  double given_sum;
} even_point;

/* A rank's calls of groups: sums at two looks, about a second apart. */
typedef struct even_state_calls {
  uint64_t at_ns; /* 0: never looked */
  uint64_t before_ns;
  even_call_totals now;
  even_call_totals before;
} even_state_calls;

typedef struct even_state_rank {
  char device[64]; /* of another host: "cpu:0 on there" */
  char host[64];   /* while it lives */
  bool elsewhere;  /* on another host: its process number means nothing here */
  char model[128];
  double cores;
  double quota;
  pid_t pid;      /* 0: not running */
  pid_t last_pid; /* of the process that ran last in the attempt, ended or not; 0: none did */
  bool untold;    /* last_pid ran when its agent was killed, and the next one has not said what became of it */
  char cause[192];
  uint64_t steps; /* seen, all attempts */
  uint64_t samples;
  uint64_t busy_ns;
  uint64_t wait_ns;
  uint64_t span_ns[EVEN_SPAN_COUNT];
  uint64_t span_bytes[EVEN_SPAN_COUNT];
  even_step_record window[EVEN_STATE_WINDOW]; /* a ring: the step s lies at s % EVEN_STATE_WINDOW */
  long last_step;                             /* of attempt last_attempt - 1; last_attempt 0: none yet */
  uint32_t last_attempt;
  uint32_t gone_attempt;                      /* attempt + 1 in which it was told that it has ended; 0: never */
  uint32_t window_attempt[EVEN_STATE_WINDOW]; /* attempt + 1 of it, 0: empty */
  uint32_t span_step[EVEN_STATE_WINDOW];      /* step + 1 whose spans lie there, 0: none */
  uint64_t span_window[EVEN_STATE_WINDOW][EVEN_SPAN_COUNT];
  uint64_t communication_window[EVEN_STATE_WINDOW]; /* bytes */
  even_rank_usage usage;
  even_rank_usage usage_before;
  even_rank_usage usage_first; /* of the process that runs, or ran last */
  even_rank_usage usage_told;  /* of one elsewhere, what its agent said; at_ns 0: taken, or nothing */
  even_state_calls calls;
  even_gpu_sample gpu; /* the last; at_ns 0: none */
  bool gpu_slow;       /* its clock is held down, and that was told */
} even_state_rank;

typedef struct even_state {
  char *run_name;
  char *command;
  char *policy;
  int ranks;
  int room; /* ranks that there ever were: that many have their place */
  even_state_rank *rank;
  int attempt;
  uint64_t started_ns;      /* monotonic */
  uint64_t started_wall_ns; /* since 1970 */
  uint64_t ended_ns;        /* 0: it runs */
  int exit_code;
  long total; /* steps, -1: not known */
  long epoch;
  long last_step; /* -1: none */
  uint64_t last_end_ns;
  uint64_t attempt_steps; /* of rank 0 in this attempt */
  uint64_t lost_records;
  uint64_t checkpoints;
  uint32_t shares_changed_at; /* step */
  int on_fixed;               /* the models' split was measured slower: 1 equal shares run, 2 the profile's; 0: no */
  uint32_t on_fixed_at;       /* since this step */
  char on_fixed_words[40];    /* what was measured */
  char compression_words[96]; /* "compression bf16: 50% fewer bytes"; empty: none */
  char memory_words[192];     /* which ranks' shares memory limits now; empty: none */
  char lost_words[192];       /* which ranks were lost, and who goes on; empty: none */
  char batch_words[224];      /* what became of an adapted global batch last; empty: none is */
  char left_out_words[192];   /* which ranks have no samples, and why; empty: none */
  char straggler_words[192];  /* which rank was ended for being slow last, and why; empty: none was */
  uint64_t stall_at_ns;       /* the last stall that a rank told of; 0: none */
  int stall_rank;
  char stall_words[192];
  even_state_fault faults[EVEN_FAULT_COUNT];
  bool loss_given;   /* by the script: the loss that backward began from does not count any more */
  double given_loss; /* the last */
  /* the course */
  uint32_t first_step;
  uint32_t stride;     /* a power of two */
  size_t point_count;  /* points 0 … point_count - 1 may be used */
  uint64_t generation; /* grows when old points change: a client then fetches all anew */
  even_point *points;
  even_point_rank *point_ranks;     /* [point * room + rank] */
  even_state_event *events;         /* a ring of EVEN_STATE_EVENTS */
  uint64_t event_count;             /* ever */
  even_state_straggler *stragglers; /* a ring of EVEN_STATE_STRAGGLERS */
  uint64_t straggler_count;         /* ever */
  even_measure_rank *measure_ranks;
} even_state;

/* `policy`, `command` and `run_name` are copied, NULL is "". */
even_status even_state_open(int ranks, const char *run_name, const char *command, const char *policy,
                            even_state **out) EVEN_MUST_USE;
void even_state_close(even_state *state);
/* From the next attempt on there are so many ranks, more or fewer. */
even_status even_state_ranks(even_state *state, int ranks) EVEN_MUST_USE;
void even_state_rank_facts(even_state *state, int rank, const char *device, const char *model, double cores,
                           double quota);

void even_state_attempt(even_state *state, int attempt, uint64_t at_ns);
void even_state_span(even_state *state, int rank, const even_span_record *record);
void even_state_step(even_state *state, int rank, const even_step_record *record);
/* The steps last - steps + 1 … last of a rank at once, with the sums of their numbers and the means of loss and
 * predicted_seconds (NAN: not known). They count, and are in the course, but not in the window. */
typedef struct even_state_steps {
  uint32_t last;
  uint32_t steps;
  uint32_t epoch;
  uint64_t end_ns;
  uint64_t duration_ns;
  uint64_t busy_ns;
  uint64_t samples;
  uint64_t batch;
  double loss;
  double predicted_seconds;
} even_state_steps;
void even_state_merged(even_state *state, int rank, const even_state_steps *steps);
/* Whether the rank has ended in this attempt, while others may go on without it. */
bool even_state_gone(const even_state *state, int rank);
/* The first that has not; 0 where all have. What ranks say of the whole training is this one's word. */
int even_state_first(const even_state *state);
/* true: it was kept; false: a repetition of what another rank said already */
bool even_state_event_add(even_state *state, const even_state_event *event);
/* One that is told of again, by attempt, rank and begin_step, takes the place of what was told. */
void even_state_straggler_add(even_state *state, const even_state_straggler *told);
/* One of those kept, 0 the oldest; NULL: there are no more. */
const even_state_straggler *even_state_straggler_at(const even_state *state, size_t number);
void even_state_usage(even_state *state, int rank, const even_rank_usage *usage);
void even_state_calls_seen(even_state *state, int rank, uint64_t at_ns, const even_call_totals *totals);
/* Whether a rank told of a stall, and since then neither a step nor a collective of its has ended. */
bool even_state_stalls(const even_state *state);

/* Means over the last steps; `now_ns` on the same clock as the records. out->rank is the state's own memory. */
void even_state_measure(even_state *state, uint64_t now_ns, even_measure *out);
/* What kept a rank from its work between two looks. */
void even_measure_pressure(const even_rank_usage *before, const even_rank_usage *now, even_measure_rank *out);
const char *even_state_event_name(int event);
int even_state_event_number(const char *name); /* 0: none */
int even_state_span_number(const char *name);  /* as in run.db; -1: none; NULL is none */

#endif
