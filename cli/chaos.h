/* evenstep chaos, in three parts: a job that is run and disturbed, the faults themselves, the comparison at the end. */
#ifndef EVEN_CLI_CHAOS_H
#define EVEN_CLI_CHAOS_H

#include "base/text.h"
#include "fault/chaos.h"
#include "monitor/history.h"
#include "os/busy.h"
#include "os/dialogue.h"
#include "os/process.h"
#include "os/process_stat.h"
#include "os/shared_memory.h"

/* How long what can be ended lasts, in words: after a number or a name. */
#define EVEN_CHAOS_HELD "for up to %.3g s"

/* What became of a fault. */
typedef struct even_chaos_done {
  bool injected;
  bool impossible;     /* here; words say why */
  bool broken;         /* what must follow did not, as words say */
  uint64_t at_ns;      /* CLOCK_MONOTONIC */
  uint64_t noticed_ns; /* when the agent told of it, or another rank had ended; 0: that was not seen */
  uint64_t gone_ns;    /* of a killed agent: when the last of its ranks was no more; else 0 */
  long step;           /* the training's last one then */
  char words[192];     /* to whom, where; why it was not */
} even_chaos_done;

typedef struct even_chaos_process {
  pid_t pid;
  uint64_t start_time;
  uint64_t until_ns; /* when it is let go, or ended; 0: nothing is to be done */
} even_chaos_process;

/* What faults of the host hold (chaos_host.c). */
typedef struct even_chaos_host {
  even_text filler; /* the path of the file that fills the disk */
  int filler_fd;
  uint64_t full_until_ns; /* 0: there is none */
  int robbed_port;        /* the attempt under way meets there; the next one's port is to be taken; 0: none is */
  even_chaos_done *robbed;
  uint64_t robbed_until_ns;
  int stolen_port;
  int port_fd; /* with which it is held */
  uint64_t port_until_ns;
  int64_t *clocks; /* ns by which the agent's clock of the day is off, then those of ranks 0, 1, … */
} even_chaos_host;

/* What faults of one rank hold (chaos_rank.c). */
typedef struct even_chaos_rank {
  even_chaos_process starved; /* gets no more memory */
  uint64_t limit_before;
  unsigned char *gradients;   /* a byte a rank, shared with it: whether one is to be NaN, and whether it was */
  bool asked;                 /* the fault under way has asked for one */
  even_process twin;          /* pid 0: none */
  even_chaos_process claimed; /* whose place it takes */
  even_chaos_done *twin_fault;
  uint64_t twin_until_ns;
  even_text said; /* by the twin, of errors */
} even_chaos_rank;

enum { EVEN_CHAOS_WATCHED = 64 };

/* The fault of which it is watched when it is noticed (chaos_watch.c). */
typedef struct even_chaos_watch {
  even_chaos_done *of; /* NULL: none */
  size_t heard;        /* of the agent's words, before it */
  uint64_t looked_ns;  /* at all else, the last time */
  even_chaos_process others[EVEN_CHAOS_WATCHED];
  size_t count;
} even_chaos_watch;

enum { EVEN_CHAOS_HOSTS = 3 };

/* Two or three hosts of network namespaces (chaos_network.c). */
typedef struct even_chaos_network {
  int hosts;
  even_text names;                             /* of them: "here,there" */
  even_dialogue holders[EVEN_CHAOS_HOSTS + 1]; /* a process in each; of three hosts also in the router's */
  int held;                                    /* how many there are */
  char paths[EVEN_CHAOS_HOSTS + 1][32];        /* of the namespaces */
  even_shared_memory shell;                    /* a script that runs programs on the other hosts, as ssh does */
  bool has_shell;
  char shell_path[48];
  char enter[48]; /* for nsenter: this host */
} even_chaos_network;

/* A job of this program, in a process of its own, and what is done to it. Zeroed but for the first part. */
typedef struct even_chaos_job {
  const char *const *words; /* of `evenstep run`, from the program on, without the run's name; NULL-terminated */
  size_t word_count;
  size_t script; /* where the script stands in them: options go before it */
  const char *name;
  const char *runs_folder;
  const even_chaos_fault *plan;
  even_chaos_done *done; /* one a fault */
  size_t faults;
  int ranks;                         /* of it; with faults alone */
  long steps;                        /* of the whole training; 0: not known, with no faults */
  uint64_t usual_ns;                 /* that it takes undisturbed */
  uint64_t patience_ns;              /* longer than this it hangs */
  uint64_t hold_ns;                  /* so long what can be ended lasts: stops, neighbours, lack */
  const even_chaos_network *network; /* NULL: one host */
  /* ---- its own ---- */
  even_text folder;
  even_dialogue agent;
  bool open; /* the agent's process runs */
  bool agent_killed;
  even_history *history;
  size_t next;                /* fault */
  uint64_t ended_ns;          /* when the last fault that ends an attempt came; 0: none yet */
  even_chaos_process stopped; /* a rank, let go later */
  pid_t busy[EVEN_BUSY_MOST];
  size_t busy_count;
  uint64_t busy_until_ns;
  even_chaos_host host;
  even_chaos_rank rank;
  even_chaos_watch watch;
  uint64_t cut_until_ns; /* 0: the hosts are linked */
  int cut_host;
  int starts; /* of the agent */
  int exit_code;
  char complaint[512]; /* the agent's last words */
} even_chaos_job;

/* Runs the job to its end. Errors: those of starting it, EVEN_ERR_TIMEOUT where it hangs. How it ended is in exit_code
 * and complaint. Close it also after a failure. */
even_status even_chaos_run(even_chaos_job *job) EVEN_MUST_USE;
void even_chaos_close(even_chaos_job *job);
/* The last step that its history tells, -1: none yet. */
long even_chaos_last_step(const even_chaos_job *job);

/* Injects job->plan[job->next] and goes on to the next one, or leaves it for later where it cannot be yet (no rank
 * runs, there are no checkpoints). An error is one of this program's own. */
even_status even_chaos_inject(even_chaos_job *job) EVEN_MUST_USE;
/* Ends what is over: stops and neighbours; `all` of them. */
void even_chaos_relent(even_chaos_job *job, bool all);

/* ---- for the files of the faults ---- */

/* Whether the fault takes the attempt with it, as a rule. */
bool even_chaos_ends_attempt(even_chaos_kind kind);
/* Whether the job trains: all ranks live, and those that make steps have made one since the last fault of those. */
bool even_chaos_trains(const even_chaos_job *job);
/* The fault has happened, in so many words; or it cannot be here, and why. The next one is the next. */
void even_chaos_tell(even_chaos_job *job, const char *words);
void even_chaos_tell_not(even_chaos_job *job, const char *why);
/* The value of a variable of the process's environment, as a port; 0: none. */
int even_chaos_port_of(pid_t pid, const char *name);
/* Faults of the host; `rank`: the victim. They leave job->next where they cannot be yet. */
even_status even_chaos_fill_disk(even_chaos_job *job) EVEN_MUST_USE;
even_status even_chaos_turn_clock(even_chaos_job *job) EVEN_MUST_USE;
void even_chaos_rob(even_chaos_job *job, const even_process_stat *rank);
/* Faults of one rank, likewise. */
even_status even_chaos_starve(even_chaos_job *job, const even_process_stat *rank) EVEN_MUST_USE;
void even_chaos_spoil(even_chaos_job *job);
even_status even_chaos_start_twin(even_chaos_job *job, const even_process_stat *rank) EVEN_MUST_USE;
/* A host's link to the others. */
even_status even_chaos_cut(even_chaos_job *job) EVEN_MUST_USE;
/* At each look: what goes on, and what is over; `all`: everything is. */
even_status even_chaos_host_look(even_chaos_job *job) EVEN_MUST_USE;
void even_chaos_host_relent(even_chaos_job *job, bool all);
void even_chaos_rank_relent(even_chaos_job *job, bool all);
void even_chaos_network_relent(even_chaos_job *job, bool all);
/* Before the job's first start, and after its end: the clock that its processes see. */
even_status even_chaos_clock_open(even_chaos_job *job, int ranks) EVEN_MUST_USE;
void even_chaos_clock_close(even_chaos_job *job);
/* The same: what ranks look at to learn that a gradient is to be NaN. */
even_status even_chaos_rank_open(even_chaos_job *job, int ranks) EVEN_MUST_USE;
void even_chaos_rank_close(even_chaos_job *job);
/* Processes that this one starts find the memory behind `fd` at the path in the variable. */
void even_chaos_tell_children(const char *name, int fd);
/* Makes 2 or 3 hosts, for all jobs of this process; close also after a failure. EVEN_ERR_PERMISSION: only root may. */
even_status even_chaos_network_open(even_chaos_network *network, int count) EVEN_MUST_USE;
void even_chaos_network_close(even_chaos_network *network);
/* Whether disk or memory may lack now: not towards the training's end, whose last checkpoint needs both. Tells so. */
bool even_chaos_may_lack(even_chaos_job *job);
/* Whether what lacks must be there again. */
bool even_chaos_must_relent(const even_chaos_job *job);

bool even_chaos_lives(const even_chaos_process *process);
/* job->plan[job->next] is just being injected: from now on it is looked when it is noticed. */
void even_chaos_watch_begin(even_chaos_job *job);
void even_chaos_watch_look(even_chaos_job *job);

/* How the newest checkpoints of two jobs differ. */
typedef struct even_chaos_verdict {
  char *paths[2];     /* the checkpoints; free with even_free */
  int64_t step[2];    /* that they were written at */
  size_t tensors;     /* compared, of the models */
  uint64_t different; /* numbers that differ */
  double largest;     /* relative norm of a tensor's difference; infinity where names, types or shapes differ */
  char where[256];    /* that tensor */
} even_chaos_verdict;

even_status even_chaos_compare(const char *undisturbed, const char *disturbed, even_chaos_verdict *out) EVEN_MUST_USE;

#endif
