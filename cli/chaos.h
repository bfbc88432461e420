/* evenstep chaos: a job that is run and disturbed, the faults themselves, what became of the others, the comparison at
 * the end. */
#ifndef EVEN_CLI_CHAOS_H
#define EVEN_CLI_CHAOS_H

#include "base/json_writer.h"
#include "base/text.h"
#include "fault/chaos.h"
#include "monitor/survival.h"
#include "os/busy.h"
#include "os/dialogue.h"
#include "os/process.h"
#include "os/process_stat.h"
#include "os/shared_memory.h"

/* How long what can be ended lasts, in words: after a number or a name. */
#define EVEN_CHAOS_HELD "for up to %.3g s"

/* Who saw to it that a job went on whose agent was killed. */
typedef enum even_chaos_tended {
  EVEN_CHAOS_NOT_TENDED,   /* not known, or of another kind */
  EVEN_CHAOS_OUTLASTED,    /* Evenstep: its ranks trained on, and another agent went on with them */
  EVEN_CHAOS_BEGUN_ANEW,   /* Evenstep: another agent began a new attempt */
  EVEN_CHAOS_REPLACED,     /* Evenstep: another host leads */
  EVEN_CHAOS_HOST_LOST,    /* Evenstep: the ranks of its host ended with it, and the job goes on as when that is lost */
  EVEN_CHAOS_RESUMED_BY_US /* chaos: the first process was killed, and the job started again */
} even_chaos_tended;

/* What lack of memory did to the rank that it came to. */
typedef enum even_chaos_lack { EVEN_CHAOS_LACK_UNKNOWN, EVEN_CHAOS_LACK_HURT, EVEN_CHAOS_LACK_BORNE } even_chaos_lack;

/* What became of a fault. */
typedef struct even_chaos_done {
  bool injected;
  bool impossible;     /* here; words say why */
  bool broken;         /* what must follow did not, as words say */
  uint64_t at_ns;      /* CLOCK_MONOTONIC */
  uint64_t noticed_ns; /* when the agent told of it, or another rank had ended; 0: that was not seen */
  uint64_t gone_ns;    /* of a killed agent: when the last of its ranks was no more; else 0 */
  long step;           /* the training's last one then */
  int rank;            /* to which it came; -1: to none */
  size_t heard;        /* of the agent's words, before it */
  char words[224];     /* to whom, where; why it was not */
  bool outlasted;      /* of a killed agent: by its ranks, which are not to begin again for it */
  even_chaos_tended tended;
  even_chaos_lack lack;
  const char *unnoticed; /* why noticed_ns is 0, of a kind that others notice; NULL: it is not, or is no such kind */
  /* ---- of the attempt that began after it, by the history (chaos_again.c); -1: none did ---- */
  int64_t again_from; /* its first step; the first one of all is 0 */
  int64_t made_again; /* steps that had been made before */
  int64_t held;       /* of the newest whole checkpoint then: that many steps were in it */
  /* ---- with --recovery, of the others (monitor/survival.h) ---- */
  bool judged;
  bool trained; /* it came to a rank that trained beside others */
  even_survival_outcome outcome;
  uint64_t again_ns, stepped_ns, joined_ns;
  char why[192]; /* they did not go on, as the agent said */
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
  int64_t
      *clocks; /* ns by which the agent's clock of the day is off, then those of all places, of other hosts' agents */
} even_chaos_host;

/* The rank to which the last fault came that takes one: how its process was started. */
typedef struct even_chaos_lost {
  int rank;
  even_chaos_process of;
  even_text line, variables; /* "": none */
} even_chaos_lost;

/* What faults of one rank hold (chaos_rank.c). */
typedef struct even_chaos_rank {
  even_chaos_process starved; /* gets no more memory */
  even_chaos_done *starved_fault;
  uint64_t limit_before;
  unsigned char *gradients; /* a byte a rank, shared with it: whether one is to be NaN, and whether it was */
  bool asked;               /* the fault under way has asked this one for it */
  int asked_rank;
  even_chaos_process asked_of;
  even_process twin;          /* pid 0: none */
  even_chaos_process claimed; /* whose place it takes */
  bool claims_lost;           /* which has ended */
  even_chaos_lost lost;
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

/* The process in a rank's place. */
typedef struct even_chaos_member {
  pid_t pid;
  uint64_t before_ns; /* the end of the last step that was made in this place before it was seen */
} even_chaos_member;

typedef struct even_chaos_victim {
  size_t fault;
  pid_t pid;
} even_chaos_victim;

/* All places (chaos_recovery.c), and the processes to which faults came. */
typedef struct even_chaos_members {
  even_chaos_member *of;
  even_chaos_victim *victims;
  size_t count;  /* of victims */
  size_t judged; /* so many of them */
} even_chaos_members;

/* A checkpoint of the disturbed run, as it was seen in its folder (chaos_checkpoints.c). */
typedef struct even_chaos_checkpoint {
  char name[40];
  int64_t steps;    /* that are in it */
  uint64_t seen_ns; /* it was there by then */
  bool damaged;     /* by a fault */
} even_chaos_checkpoint;

typedef struct even_chaos_checkpoints {
  even_chaos_checkpoint *of;
  size_t count;
} even_chaos_checkpoints;

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

/* An agent that was killed and that another one is to follow, without chaos: whether its ranks outlast it
 * (chaos_agent.c). */
typedef struct even_chaos_agent {
  even_chaos_done *of; /* NULL: none is awaited */
  int host;            /* of it; 0: that leads */
  pid_t killed;        /* the last one of that */
  bool calm;           /* all ranks lived, and nothing else had come to one lately */
} even_chaos_agent;

/* Hosts of the user's own (chaos_hosts.h). */
typedef struct even_chaos_hosts even_chaos_hosts;

/* A job of this program, in a process of its own, and what is done to it. Zeroed but for the first part. */
typedef struct even_chaos_job {
  const char *const *words; /* of `evenstep run`, from the program on, without the run's name; NULL-terminated */
  size_t word_count;
  size_t script; /* where the script stands in them: options go before it */
  const char *name;
  const char *runs_folder;
  even_chaos_fault *plan; /* the order of what is still to come may change */
  even_chaos_done *done;  /* one a fault */
  size_t faults;
  int ranks;               /* of it; with faults alone */
  int places;              /* and of processes that wait to take a rank's place */
  const char *const *more; /* further words of `evenstep run` */
  size_t more_count;
  bool recovers;                     /* with --recovery, */
  bool replaces;                     /* of that kind */
  long steps;                        /* of the whole training; 0: not known, with no faults */
  uint64_t usual_ns;                 /* that it takes undisturbed */
  uint64_t patience_ns;              /* longer than this it hangs */
  uint64_t hold_ns;                  /* so long what can be ended lasts: stops, neighbours, lack */
  const even_chaos_network *network; /* NULL: one host, or */
  even_chaos_hosts *hosts;           /* hosts of the user's own; NULL: none */
  bool votes;                        /* with a witness: a killed leader's place is taken where chaos does not see it */
  bool apart;                        /* no job: its part on another host (chaos_part.c), without a history */
  bool succeeds;                     /* another host takes a killed leader's place, once */
  bool outlasts;                     /* with --restart-agent: another agent goes on with a killed one's ranks */
  bool sets_aside;                   /* with --set-aside: attempts may have fewer ranks */
  /* ---- its own ---- */
  even_text folder;
  even_dialogue agent;
  bool open; /* the agent's process runs */
  bool agent_killed;
  even_history *history;
  size_t next; /* fault */
  int victim;  /* the rank to which it comes, */
  pid_t victim_pid;
  even_chaos_members members;
  even_chaos_checkpoints checkpoints;
  int64_t last_step;               /* of the attempts that were judged; -1: none was made */
  uint64_t started_ns;             /* when this agent was, or the one before it was killed */
  char wrong[EVEN_SURVIVAL_WORDS]; /* what should never be, from its history; "": nothing */
  uint64_t ended_ns;               /* when the last fault that ends an attempt came; 0: none yet */
  even_chaos_process stopped;      /* a rank, let go later */
  pid_t busy[EVEN_BUSY_MOST];
  size_t busy_count;
  uint64_t busy_until_ns;
  even_chaos_host host;
  even_chaos_rank rank;
  even_chaos_watch watch;
  even_chaos_agent successor;
  uint64_t cut_until_ns; /* 0: the hosts are linked */
  int cut_host;
  even_chaos_done
      *leader_cut;           /* the leader's own link is, or was, and what comes of it is not seen yet; NULL: not so */
  uint64_t leader_linked_ns; /* and since when it is up again; 0: it is not */
  bool succeeded;            /* one has (chaos_leader.c): it is the agent from now on, and no child of this process; */
  even_chaos_process leader;
  uint64_t led_ns;       /* when it was found */
  pid_t led_before;      /* the one whose link was cut */
  even_text led_folder;  /* its history: not in the job's where the first leader lives still; "": those */
  size_t leader_taken;   /* so much of its words was handed out, */
  even_text leader_line; /* and the last line of them */
  int starts;            /* of the agent */
  char run[64];          /* of hosts of the user's own: TORCHELASTIC_RUN_ID of the ranks; "": not known */
  int exit_code;
  char complaint[512]; /* the agent's last words, */
  char fix[512];       /* and what it said to do; "": nothing */
} even_chaos_job;

/* Runs the job to its end. Errors: those of starting it, EVEN_ERR_TIMEOUT where it hangs. How it ended is in exit_code
 * (-1: it told no end), complaint and fix. Close it also after a failure. */
even_status even_chaos_run(even_chaos_job *job) EVEN_MUST_USE;
void even_chaos_close(even_chaos_job *job);
/* Reads what came since, of the agent that was started last: what is not there yet is read at the next look. */
void even_chaos_read_history(even_chaos_job *job);
/* Where the history of the one that leads is. */
const char *even_chaos_led_folder(const even_chaos_job *job);
/* The last step that its history tells, -1: none yet. */
long even_chaos_last_step(const even_chaos_job *job);

/* Injects job->plan[job->next] and goes on to the next one, or leaves it for later where it cannot be yet (no rank
 * runs, there are no checkpoints). An error is one of this program's own. */
even_status even_chaos_inject(even_chaos_job *job) EVEN_MUST_USE;
/* The same at once, to that process of this host. */
even_status even_chaos_inject_to(even_chaos_job *job, const even_process_stat *rank) EVEN_MUST_USE;
/* Ends what is over: stops and neighbours; `all` of them. */
void even_chaos_relent(even_chaos_job *job, bool all);

/* ---- ranks (chaos_recovery.c) ---- */

/* Before the job's first start, and after its end. */
even_status even_chaos_members_open(even_chaos_job *job) EVEN_MUST_USE;
void even_chaos_members_close(even_chaos_job *job);
/* At each look, after the history was read. */
void even_chaos_members_look(even_chaos_job *job);
/* The rank, where its process lives. */
bool even_chaos_find_rank(const even_chaos_job *job, int rank, even_process_stat *out);
/* Whether the process in that place has made a step, as far as was seen. */
bool even_chaos_has_stepped(const even_chaos_job *job, int rank);
/* To whom the next fault comes: to the rank of the plan; with --recovery, where that one does not live (or, with
 * `trains`, has made no step in its process yet), to the next that does. */
bool even_chaos_find_victim(even_chaos_job *job, bool trains, even_process_stat *out);
/* Whether the job trains: those that are left live, and have made a step since the last fault that took a rank. */
bool even_chaos_trains(const even_chaos_job *job);
/* The next fault comes to this process. */
void even_chaos_add_victim(even_chaos_job *job, pid_t pid);
/* Once an agent has ended: what became of the others after its faults. */
even_status even_chaos_judge(even_chaos_job *job) EVEN_MUST_USE;

/* ---- another leader (chaos_leader.c) ---- */

/* Whose run that folder is; pid 0: nobody's, or the killed one's. */
even_chaos_process even_chaos_owner_of(const char *folder, pid_t killed);
/* Whether the leader has said that another one takes its place. */
bool even_chaos_is_voted_for(const even_chaos_job *job);
/* The fault before job->next has killed the leader, or cut it off; waits until another one leads. EVEN_ERR_TIMEOUT:
 * none does. */
even_status even_chaos_await_leader(even_chaos_job *job, pid_t killed) EVEN_MUST_USE;
/* At each look, where the leader's own link was cut: whether another one leads, or the first one goes on. */
void even_chaos_leader_look(even_chaos_job *job);
/* The agent ends: whether that is because it was cut off, and another one leads; the promise is broken where it is
 * for anything else. */
bool even_chaos_is_superseded(even_chaos_job *job);
/* As even_dialogue_hear, of that one. */
even_status even_chaos_hear_leader(even_chaos_job *job, int64_t timeout_ms, const char **line) EVEN_MUST_USE;
/* Ends it where it still runs. Also where there is none. */
void even_chaos_end_leader(even_chaos_job *job);
/* Of the ranks that there were, how many there are where all have begun anew without the lost host, or without places
 * that were set aside. */
int even_chaos_ranks_led(const even_chaos_job *job);

/* ---- what is told of them (chaos_outcome.c) ---- */

void even_chaos_outcome_json(const even_chaos_done *done, even_json *json);
/* "; the others made the next step after 0.05 s"; "" where there is nothing to be said. */
void even_chaos_outcome_words(const even_chaos_done *done, char *out, size_t bytes);
/* How many went on, and how soon. */
even_status even_chaos_outcome_sum(const even_chaos_done *done, size_t count, even_text *out) EVEN_MUST_USE;
/* Of killed agents, who saw to it that their jobs went on; of ranks without memory, how many it hurt. Whole lines. */
void even_chaos_tended_sum(const even_chaos_done *done, size_t count, even_text *out);

/* ---- what a restart costs (chaos_checkpoints.c, chaos_again.c) ---- */

/* Damages the newest checkpoint, and kills the rank. */
even_status even_chaos_damage(even_chaos_job *job, const even_process_stat *rank) EVEN_MUST_USE;
/* At each look: which checkpoints are there. */
void even_chaos_checkpoints_look(even_chaos_job *job);
void even_chaos_checkpoints_close(even_chaos_job *job);
/* The most steps in one that was whole by then; 0: none was. */
int64_t even_chaos_held_at(const even_chaos_job *job, uint64_t at_ns);
/* Once an agent has ended: how many steps were made again after each fault. None that a whole checkpoint held may be:
 * job->wrong. */
even_status even_chaos_judge_again(even_chaos_job *job) EVEN_MUST_USE;
/* How often attempts began again, and how many steps they made again. */
void even_chaos_again_sum(const even_chaos_done *done, size_t count, even_text *out);

/* ---- for the files of the faults ---- */

/* Whether the fault takes the attempt with it, as a rule. */
bool even_chaos_ends_attempt(even_chaos_kind kind);
/* The fault has happened, in so many words; or it cannot be here, and why. The next one is the next. */
void even_chaos_tell(even_chaos_job *job, const char *words);
void even_chaos_tell_not(even_chaos_job *job, const char *why);
/* It cannot be yet, and why: those that are due as well go first, so that it holds none of them up. */
void even_chaos_postpone(even_chaos_job *job, const char *why);
/* The value of a variable of the process's environment, cut to fit: whether there is one; as a port; 0: none. */
bool even_chaos_variable_of(pid_t pid, const char *name, char *out, size_t bytes);
int even_chaos_port_of(pid_t pid, const char *name);
/* An agent (chaos_agent.c). At each look: whether another one goes on with its ranks. */
void even_chaos_kill_agent(even_chaos_job *job);
void even_chaos_agent_look(even_chaos_job *job);
/* The parent of a rank, or, where ranks have outlasted one, what that has started; 0: nobody. */
pid_t even_chaos_agent_over(pid_t rank);
/* Faults of the host; `rank`: the victim. They leave job->next where they cannot be yet. */
even_status even_chaos_fill_disk(even_chaos_job *job) EVEN_MUST_USE;
even_status even_chaos_turn_clock(even_chaos_job *job) EVEN_MUST_USE;
even_status even_chaos_rob(even_chaos_job *job, const even_process_stat *rank) EVEN_MUST_USE;
/* Into the network of that process, where the job has several, and back (chaos_ports.c). Sockets made meanwhile are
 * there. */
even_status even_chaos_enter(const even_chaos_job *job, pid_t pid, int *before) EVEN_MUST_USE;
even_status even_chaos_leave(int before) EVEN_MUST_USE;
even_status even_chaos_send_garbage(even_chaos_job *job, const even_process_stat *rank) EVEN_MUST_USE;
/* Faults of one rank, likewise. */
even_status even_chaos_starve(even_chaos_job *job, const even_process_stat *rank) EVEN_MUST_USE;
void even_chaos_spoil(even_chaos_job *job, const even_process_stat *rank);
even_status even_chaos_start_twin(even_chaos_job *job, const even_process_stat *rank) EVEN_MUST_USE;
/* How the rank was started, for a second one later, when it is gone; and of no use any more. */
void even_chaos_remember(even_chaos_job *job, const even_process_stat *rank);
void even_chaos_forget(even_chaos_job *job);
/* The parent of a process; 0: it has ended. */
pid_t even_chaos_parent_of(pid_t pid);
/* A host of --namespaces, by its number: what it is called; whether that process is there; its ranks are victims of the
 * fault that comes now. */
const char *even_chaos_host_name(int host);
bool even_chaos_is_on(const even_chaos_job *job, pid_t pid, int host);
void even_chaos_add_ranks_on(even_chaos_job *job, int host);
/* A host's link to the others. */
even_status even_chaos_cut(even_chaos_job *job) EVEN_MUST_USE;
/* Of three hosts: whether the fault cuts the link of the one that leads first. */
bool even_chaos_cuts_leader(const even_chaos_fault *fault);
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
/* Nobody looks any longer, and why. */
void even_chaos_watch_end(even_chaos_job *job, const char *why);

/* How the newest checkpoints of two jobs differ. */
typedef struct even_chaos_verdict {
  char *paths[2];     /* the checkpoints; free with even_free */
  int64_t step[2];    /* that they were written at */
  size_t tensors;     /* compared, of the models */
  uint64_t different; /* numbers that differ */
  double largest;     /* relative norm of a tensor's difference; infinity where names, types or shapes differ */
  char where[256];    /* that tensor */
} even_chaos_verdict;

/* is_spoiled: whether a fault came to the disturbed job's checkpoint of that name. Where no later one was written, the
 * newest that it has left is compared with the undisturbed job's of the same name. */
even_status even_chaos_compare(const char *undisturbed, const char *disturbed,
                               bool (*is_spoiled)(const void *context, const char *name), const void *context,
                               even_chaos_verdict *out) EVEN_MUST_USE;

#endif
