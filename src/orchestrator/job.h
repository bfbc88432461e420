/* A running job, as the agent's own files see it. */
#ifndef EVEN_ORCHESTRATOR_JOB_H
#define EVEN_ORCHESTRATOR_JOB_H

#include "fault/cause.h"
#include "fault/generation.h"
#include "orchestrator/agent.h"
#include "orchestrator/host_notice.h"
#include "orchestrator/progress.h"
#include "orchestrator/rank_output.h"
#include "orchestrator/restarts.h"
#include "orchestrator/shortages.h"
#include "orchestrator/slowdown.h"
#include "os/guardian.h"
#include "os/loop.h"
#include "os/oom.h"
#include "os/port.h"
#include "os/process.h"
#include "os/signals.h"

typedef struct even_job_rank {
  pid_t pid;             /* 0 before it started */
  uint64_t start_time;   /* of that process, as os/process_stat.h has it; 0: not known */
  bool alive;            /* started and not reaped */
  bool output_open;      /* `output` has tails to free */
  bool stopped_by_agent; /* our signal reached it while it ran */
  bool started_early;    /* while the attempt before ran (warm.h): it ends with this agent */
  bool was_stopped;      /* by somebody, once, */
  bool stands;           /* and was not let go on, as far as was seen */
  int stopped_by;        /* that signal, while it stands */
  uint64_t stopped_ns;   /* since when, as far as this agent saw */
  uint64_t stood;        /* 1 + the generation in which it was last seen to be stopped, or let go on */
  uint64_t awaited_ns;   /* since when others are known to wait for it while it stands; 0: they do not */
  uint64_t missed_ns;    /* the same, before all have come together */
  bool stood_still;      /* it still stood when another rank failed */
  bool hung;             /* and shall be ended for it: even_hangs_words says how */
  bool elsewhere;        /* on another host, whose agent watches it */
  bool out_of_memory;    /* by the word of that agent */
  const char *lost;      /* it ended with its host: why; NULL: it did not */
  bool missed;           /* whether the others go on without it is to be decided */
  char hung_words[160];  /* of a rank elsewhere: as even_hangs_words */
  bool unending;         /* it was killed, and lives yet: that was told */
  bool slow;             /* and is ended for it: slow_words say why */
  char slow_words[192];
  even_fault_leave awaited; /* ended with code 0 while others wait for it where it never was */
  even_process_end end;
  even_rank_output output;
} even_job_rank;

/* How far the ending of an attempt has gone. It SETTLES when a rank failed only because another went away: that one,
 * which may be slow to end, shall end by itself, so that why it did is seen. */
typedef enum even_job_stage {
  EVEN_JOB_RUNS,
  EVEN_JOB_SETTLES,
  EVEN_JOB_ASKED,
  EVEN_JOB_TERMINATED,
  EVEN_JOB_KILLED
} even_job_stage;

typedef struct even_follower even_follower;
typedef struct even_job_unwritten even_job_unwritten;

enum { EVEN_JOB_ADDRESS = 64, EVEN_JOB_INTERFACE = 32 };

/* Ranks that wait in collectives for longer than they may (waiting.h). */
typedef struct even_job_waiting {
  bool own; /* all of this host, */
  bool all; /* and of all hosts, as far as was said last */
  uint64_t said_ns;
  uint64_t heard_ns; /* when the leader last said so of all; 0: it did not, or took it back */
} even_job_waiting;

/* Who waits in torch's init_process_group (openings.h). */
typedef struct even_job_openings {
  int64_t time;         /* for which time ranks do; 0: none does */
  size_t waiting;       /* how many */
  int64_t heard_time;   /* the same of all hosts, as the leader has said, */
  size_t heard_waiting; /* how many, */
  uint64_t heard_ns;    /* and when; 0: never */
  uint64_t said_ns;     /* when the leader last looked whether there is anything to be said */
} even_job_openings;

typedef struct even_job {
  const even_agent_params *params;
  uint64_t descriptors_before; /* the soft limit on open files that the agent raised; 0: it did not */
  char id[EVEN_JOB_ID + 1];
  char host[64];
  even_text run_folder; /* absolute */
  even_loop loop;
  even_signals signals;
  even_loop_watch signal_watch;
  even_guardian guardian;
  even_guardian unreplaced; /* while `unguarded`: what the one that has ended was told, and whether it held the ranks */
  bool unguarded;
  uint64_t unguarded_ns; /* when it was tried last to start another one by the clock; 0: there was one since */
  pid_t guarded_command; /* session that the guardian was told of, and not yet that it is no more; 0: none */
  even_slowdown slow;
  even_oom_watch oom; /* of the attempt */
  even_progress progress;
  even_job_waiting waiting;
  even_job_openings openings;
  int main_rank;                      /* as the observer was told, 0 when an attempt begins */
  bool did_without;                   /* in this attempt others went on without a rank */
  struct even_hangs *hangs;           /* NULL: nobody looks for them */
  struct even_stragglers *stragglers; /* NULL: nobody is ended for being slow */
  struct even_usages *usages;         /* NULL: nobody elsewhere asks how the ranks are */
  /* The ranks of this host; all of them in a job of one host, in which `groups` is 1. */
  size_t first;
  size_t local;
  size_t first_spare; /* of this host's, which are numbered behind the ranks of all hosts */
  size_t spares;
  int group;
  int number; /* of this host, under the leader that there is: `group`, but for an attempt that outlasted another one */
  int groups;
  int most_groups; /* hosts that there may ever be in an attempt: some may join while it runs */
  int era;         /* how often another host has taken the leader's place */
  char master_address[EVEN_JOB_ADDRESS];
  int master_port;
  even_port_held port_held;           /* until rank 0 has bound it, and for as long as the attempt lasts */
  char interface[EVEN_JOB_INTERFACE]; /* over which hosts reach one another, "" where not known */
  struct even_hosts *hosts;           /* of the agent that leads several hosts; NULL: this is no such */
  struct even_follower *follower;     /* of an agent that serves another one; NULL: this is no such */
  struct even_warm **warm;      /* processes of the next attempt, their owner's (warm.h); NULL: there are never any */
  struct even_parcels *parcels; /* between the agents of the hosts (parcel.h); NULL: there is one alone */
  even_job_rank *ranks;
  size_t count;
  size_t *order; /* ranks in the order in which they ended */
  size_t ended;
  size_t alive;
  int attempt;
  int planned;                  /* attempts among them that began because the hosts changed, and count for no failure */
  int port;                     /* of the attempt's store */
  struct even_outlast *outlast; /* NULL: ranks end with this agent (outlast.h) */
  even_restarts restarts;       /* which attempts count among --max-restarts */
  uint64_t began_ns;            /* the attempt */
  uint64_t pause_ns;            /* before the next one (pace.h) */
  even_text resume;             /* the checkpoint this attempt began from; empty: none */
  int64_t resume_step;          /* its step; -1: it does not say */
  int64_t turn;             /* of the attempt among all that went on with the training: what it writes is the newer */
  bool shares;              /* ranks were seen to step with a global batch, in any attempt (even_progress_shares) */
  bool trained;             /* ranks met in es.prepare, in any attempt: there may be checkpoints */
  even_shortages shortages; /* what ranks may have that ran out of memory; */
  bool smaller;             /* one of the attempt may have less in the next */
  /* Of checkpoints that do not say who wrote them, those made later are the job's: when the newest that lay there at
   * its start was made. Empty: all are */
  even_text foreign;
  even_text lineage; /* with --resume auto: of the checkpoint that the job began from, */
  even_text began;   /* and when that was made; empty: it began anew */
  even_text fetched; /* with --resume URL: where that was put; empty: nowhere yet */
  even_job_stage stage;
  uint64_t deadline_ns;          /* of the stage */
  uint64_t killed_ns;            /* since when it is EVEN_JOB_KILLED */
  int *snapshots;                /* of each rank of the attempt: the memory of its checkpoints, -1: none */
  even_job_unwritten *unwritten; /* checkpoints of ranks that have ended, in their order; NULL: there are none */
  even_generation *generation;   /* NULL: a lost rank ends the attempt */
  int generation_fd;             /* the ranks inherit it; -1: none */
  struct even_boards *boards;    /* of several hosts; NULL: the others have none */
  struct even_gifts *gifts;      /* the state of training on its way between them; NULL: none goes */
  /* Of several hosts: who stands still on which (standing.h) */
  struct even_job_standing *standing;
  bool late;             /* this host came while the attempt ran: its ranks' places are to be filled */
  uint64_t undecided_ns; /* ranks have until then to say whether they can go on; 0: none is asked */
  uint64_t suspected;    /* 1 + the steps made when a rank was lost by an error that may be the script's; 0: none */
  uint64_t lost_ns;      /* since when a host is missed, until it is decided; 0: none is */
  bool *lost;            /* a rank each: the others went on without it */
  struct even_job_place *places; /* a rank each, of replace.c; NULL: nobody takes a place */
  bool awaits_joiner;            /* somebody can join at the end of a step: look often */
  bool too_few_told;
  bool flights_told;      /* of the attempt */
  even_text flights;      /* taken, and not written yet */
  even_text flight_lines; /* the same, to be said: each with its NUL */
  int draining;           /* the signal that gave notice that it must end soon, or EVEN_DRAIN_ANNOUNCED; 0: none */
  uint64_t drain_until_ns;
  even_host_notice own_notice; /* of an agent that serves a leader, this host's: the leader was told (`draining`), or
                                  whoever leads next will be */
  bool shuts_down;             /* SIGTERM to this agent was taken for that, or said nothing new: once */
  struct even_announcer *announcer; /* NULL: nobody is asked whether this machine ends soon, or nobody was yet */
  even_loop asking;                 /* the announcer's, in the job's loop: it is turned by itself where that is not */
  even_loop_watch asking_watch;
  bool unannounced;   /* nobody can be: that was told */
  bool changing;      /* the ranks were asked to save their state and end, for the hosts to change (elastic.h) */
  bool reopens;       /* it is closed for another one to go on with it */
  size_t saved;       /* ranks that ended for either, their state saved */
  int interrupted;    /* the signal by which the user ended the job, 0 */
  int interrupts;     /* how often Ctrl-C was pressed */
  int end_signals;    /* how often any signal asked for the end */
  bool adopted;       /* its ranks run already, under a leader that is lost (adopt.h), or a killed agent (outlast.h) */
  bool hurries;       /* this thread has a greater weight than others */
  even_error failure; /* first error of the agent itself inside a callback; EVEN_OK: none */
  uint64_t next_tick_ns;
} even_job;

struct even_checkpoint_info;
/* Whether a restart may go on from a checkpoint: the job's own, or what its training had before. */
bool even_job_owns(const even_job *job, const struct even_checkpoint_info *info);
/* Starts all ranks and returns when all have ended. An error is the agent's own; the ranks are gone then, too. */
even_status even_job_run_attempt(even_job *job) EVEN_MUST_USE;
/* The run folder, and that of its logs. */
even_status even_job_make_folders(even_job *job) EVEN_MUST_USE;
/* All that a job needs before its first attempt; even_job_close frees it, also after a failure. */
even_status even_job_open(even_job *job) EVEN_MUST_USE;
void even_job_close(even_job *job);
/* Before a process starts in a rank's place, or another one. */
void even_job_reset_rank(even_job *job, size_t rank);
/* A rank has ended: what follows from it for the attempt. */
void even_job_rank_ended(even_job *job, even_job_rank *rank, const even_process_end *end);
/* What follows from the end of a rank, which is known. */
void even_job_act_on_end(even_job *job, even_job_rank *rank);
/* The ranks of a host have ended with it, those that lived: why. */
void even_job_host_ended(even_job *job, size_t host, const char *why);
/* A rank has ended, not well, and the others do not go on: the attempt ends. */
void even_job_rank_failed(even_job *job, size_t rank);
/* Somebody stopped a rank, by this signal. */
void even_job_rank_stopped(even_job *job, even_job_rank *rank, int signal);
/* Notice that a host must end soon: by a signal, or announced. */
typedef struct even_notice {
  int signal;
  double seconds;   /* that are left; 0: those of --notice */
  const char *what; /* announced how, in words; "" of a signal */
} even_notice;

/* In the place of a signal; the kernel sends this one to nobody by itself. */
enum { EVEN_DRAIN_ANNOUNCED = SIGPWR, EVEN_NOTICE_WORDS = 192 };

/* With --notice, drain.c. Takes notice that the job must end soon (`whose`: "host there: ", "" for this one's): the
 * ranks are asked to save their state and end. False where it is none, or nobody can be asked. */
bool even_job_drain(even_job *job, const even_notice *notice, const char *whose);
/* The same while no ranks run: what there is is saved, and the job ends for that (`draining`). */
void even_job_drain_between(even_job *job, const even_notice *notice);
/* Whether it is one: other signals say something else. */
bool even_notice_is_one(const even_notice *notice);
/* "SIGTERM", or how it was announced; and by which option it counts. */
const char *even_notice_words(const even_notice *notice);
const char *even_notice_option(const even_notice *notice);
/* About ten times a second, with --notice-from: asks for this host, and takes what is announced as notice. Of a host
 * that serves a leader also while no ranks run: the leader is told. */
void even_job_drain_tick(even_job *job);
/* The same of the one that leads, while it waits for ranks, or pauses, and does not turn the job's loop: what is
 * announced is own_notice then. Reaps children, where one is the command that is asked. */
void even_job_drain_wait(even_job *job);
void even_job_drain_close(even_job *job);
/* Seconds that are left of own_notice; 0: those of --notice, which it did not name otherwise, or that are over. */
double even_job_notice_left(const even_job *job);
/* Whether the time for it is over. */
bool even_job_drain_late(even_job *job);
/* A rank has ended: one that did so for notice has ended well. */
void even_job_drain_ended(even_job *job, even_job_rank *rank);
/* Before the ranks of an attempt start. */
void even_job_drain_forget(even_job *job);
/* All ranks have ended well after notice: the job's exit code. */
int even_job_drain_code(even_job *job);
/* The next five of stands.c. It was stopped; it was let go on. */
void even_job_rank_stands(even_job *job, even_job_rank *rank);
void even_job_rank_continues(even_job *job, even_job_rank *rank);
/* Ends a rank by SIGKILL, and no other; `standing`: only if it still stands. */
void even_job_end_alone(even_job *job, size_t rank, bool standing);
/* Ranks hang and shall be ended for it: whether they were, alone, for the others can go on without them. */
bool even_job_ends_hung_alone(even_job *job);
/* In each turn: ends stopped ranks for which the others wait, or has all go on together. */
void even_job_stands_tick(even_job *job);
/* The same before all ranks have come together, where no call of the others' fails for one, with --recovery or without:
 * it is ended as if it had died, and the attempt with it. Every so often. */
void even_job_stands_at_start(even_job *job);
/* Ranks hang and shall be ended for it: they are, or the attempt is. */
void even_job_end_hung(even_job *job);
/* Ends this host's ranks by a signal, as their leader says; after some seconds, more sternly. */
void even_job_end_ranks(even_job *job, int number, bool groups);
/* Another signal for this host's ranks. */
void even_job_signal_ranks(even_job *job, int number, bool groups);
/* The facts of an ended rank, for src/fault. The texts belong to the job. */
even_fault_facts even_job_facts(const even_job *job, size_t rank);
/* Starts the guardian and what slows ranks down. */
even_status even_job_guard_open(even_job *job) EVEN_MUST_USE;
/* Ends it, whose work is done. */
void even_job_guard_close(even_job *job);
/* Where there is no guardian, as one that has ended could not be replaced: tries it again, and tells it all. */
void even_job_guard_again(even_job *job);
/* The same while ranks run, at once and then each 10 s; several times a second. */
void even_job_guard_tick(even_job *job);
/* Tells the guardian of a rank's process; one that is gone is replaced, or is looked for again. */
even_status even_job_guard_rank(even_job *job, pid_t pid) EVEN_MUST_USE;
/* Tells it of the session of the command that says whether this machine ends, or, `begins` false, that it is no more:
 * it ends with the agent, however that does. A guardian that stands still is not waited for: then it is told later that
 * the one before is no more, and of this one nothing; the kernel ends such a command alone. */
void even_job_guard_command(even_job *job, pid_t session, bool begins);
/* A child that is no rank was reaped: where it is the guardian, another one is started; a neighbour is forgotten. */
void even_job_guard_ended(even_job *job, const even_process_end *end);
/* Whether this host's ranks stand not by somebody's signal, but by the guardian's: this agent stood still itself, or
 * may not act (succession.h). */
bool even_job_guardian_holds(const even_job *job);
/* Kills what the ranks of the attempt left running. */
void even_job_sweep(even_job *job);
/* Kills what another agent of the job still keeps on this host, which was cut off, and waits for a leader with its
 * ranks: this agent was started in its place. Before it has started any. Where host and era have other numbers by now
 * it finds none: by the job alone another host's on this machine would be meant, too. */
void even_job_sweep_another(const even_job *job);
/* Frees what run_attempt left for the facts. */
void even_job_forget_attempt(even_job *job);
/* Under --recovery shrink, shrink.c: the memory in which the ranks are told who goes on. Nothing without. */
even_status even_job_generations_open(even_job *job) EVEN_MUST_USE;
void even_job_generations_close(even_job *job);
/* The first of those that go on, and the word to the observer where it is another one than before. */
int even_job_main_rank(const even_job *job);
void even_job_tell_main_rank(even_job *job);
/* Before the ranks of an attempt start. */
even_status even_job_generations_begin(even_job *job) EVEN_MUST_USE;
/* The attempt is ended: who waits to go on fails at once. */
void even_job_generations_refuse(even_job *job);
/* After `rank` has ended, in an attempt that runs, by a signal, with its host, or by an error of its place: whether the
 * others go on without it, of which they, and the user, have been told then; or whether that will be decided soon, for
 * ranks of another host have not said yet. Where they cannot though it was asked for, the user is told why. */
bool even_job_goes_on_without(even_job *job, size_t rank);
/* Decides that, in each turn. */
void even_job_shrink_tick(even_job *job);
/* After a rank has ended well: ranks that are about to go on do not wait for it. */
void even_job_left_well(even_job *job);
/* What a rank of another host says comes with the next tick there, and one that has met the others may be about to say
 * it; one that says nothing for so long is not training yet. */
#define EVEN_JOB_HEARSAY_NS 2000000000u
/* Whether the others could go on without the members in `these`, which live; else why not. *later: they may, once some
 * have said so, within EVEN_JOB_HEARSAY_NS. */
bool even_job_can_do_without(even_job *job, const bool *these, even_text *why, bool *later);
/* Whether the others went on without it. */
bool even_job_lost(const even_job *job, size_t rank);
/* "rank 0", "ranks 0, 2 and 3": the members that live. */
void even_job_name_members(const even_job *job, even_text *out);
/* Under --recovery replace, or where hosts join while the others train, replace.c. Nothing without. */
/* Whether processes may join the members. */
bool even_job_takes_in(const even_job *job);
even_status even_job_replace_open(even_job *job) EVEN_MUST_USE;
void even_job_replace_close(even_job *job);
/* Before the ranks of an attempt start: who begins as a member, members[count]. */
void even_job_replace_begin(even_job *job, bool *members);
/* The same, behind what the ranks have: the places that are kept for hosts that may join. */
void even_job_replace_keep_free(even_job *job);
/* A host has come with so many of these: processes are to start there. */
void even_job_replace_give(even_job *job, size_t first, size_t count);
/* Whether the rank's process waits to join the others. */
bool even_job_is_outside(const even_job *job, size_t rank);
/* And has come to where it can. */
bool even_job_offers(const even_job *job, size_t rank);
/* Whether it has joined them, and not made a step since. */
bool even_job_is_new(even_job *job, size_t rank);
/* Whether it is a member that has the state of training: all but those that have joined and not met the others yet. */
bool even_job_has_state(even_job *job, size_t rank);
/* How many members live. */
size_t even_job_members(const even_job *job);
/* Before the members that live go on: asks them to wait where they are too few. */
void even_job_replace_ask(even_job *job);
/* The others go on without the rank: a process may take its place. */
void even_job_replace_lost(even_job *job, size_t rank);
/* The leader has become it while the attempt runs: whether the rank is a member. */
void even_job_replace_adopt(even_job *job, size_t rank, bool member);
/* The agent before was killed: what that one had noted of the place, and whether the newest generation has the rank. */
void even_job_replace_restore(even_job *job, size_t rank, const struct even_job_place *noted, bool member);
/* After a rank has ended: whether it was outside, and all is done. */
bool even_job_outside_ended(even_job *job, size_t rank);
/* Starts processes in places that are due, and lets them join. */
void even_job_replace_tick(even_job *job);
/* Whether a process in the place of that rank, once it is empty, could get the state of training. */
bool even_job_replace_could(const even_job *job, size_t rank);
/* Whether no place is free: whoever waits is to wait until a rank is lost. */
bool even_job_replace_is_full(const even_job *job);
/* How many processes could still take lost ranks' places. */
size_t even_job_replace_free(const even_job *job);
/* A process that was asked for on another host has started. */
void even_job_replace_started(even_job *job, size_t rank);
/* Of an agent that serves another: as that one says, another process takes the place of a rank of this host, which has
 * ended. EVEN_ERR_INPUT: it has not. */
even_status even_job_replace_fill(even_job *job, size_t rank) EVEN_MUST_USE;
/* The same: the rank is a member now. */
void even_job_replace_joined(even_job *job, size_t rank);
/* The same: whether places of this host may be filled again, though nobody is left in any. */
bool even_job_replace_waits(const even_job *job);
/* Whether a member stands between two steps, and waits for others. */
bool even_job_any_stands(const even_job *job);
/* Whether that rank does. */
bool even_job_stands(const even_job *job, size_t rank);
/* What ranks may have that ran out of memory, as EVENSTEP_MEMORY_CAPS; nothing where none did. Other hosts' agents pass
 * on what their leader says. */
void even_job_name_shortages(const even_job *job, even_text *out);
/* Starts the process of a rank: a member before the first generation, else one that is to join. */
even_status even_job_start_rank(even_job *job, size_t rank) EVEN_MUST_USE;
/* Tells the observer of one rank's end. */
void even_job_tell_end(even_job *job, size_t rank);
/* Reads what each rank was doing: once an attempt, before its ranks are ended. Writes nothing: nobody waits for a disk.
 */
void even_job_flights_take(even_job *job);
/* Writes that to logs/flight.json, and says it; takes it where that was not done. */
void even_job_flights_tell(even_job *job);
void even_job_flights_forget(even_job *job);
/* Before the first attempt. */
even_status even_job_snapshots_open(even_job *job) EVEN_MUST_USE;
/* Memory for the checkpoints of a rank that is about to start: its descriptor, -1 where there is none to be had. */
int even_job_snapshot_begin(even_job *job, size_t rank);
/* What a rank that has ended had taken is written from now on, in a thread, after what others had; another process may
 * have its place meanwhile. Where nothing was taken its memory is let go of. */
void even_job_snapshot_finish(even_job *job, size_t rank);
void even_job_snapshots_finish(even_job *job);
/* The same, of what an agent that was killed had not written, and has left under this number. */
void even_job_snapshot_take(even_job *job, size_t rank, unsigned turn, int fd);
/* In each turn: says what was written, and begins the next. */
void even_job_snapshots_turn(even_job *job);
/* Waits until all are written, or could not be; given up before, they are ended early. */
void even_job_snapshots_wait(even_job *job);
void even_job_snapshots_give_up(even_job *job);
/* Waits likewise. */
void even_job_snapshots_close(even_job *job);
/* Reads the signals that came (a callback of the loop). */
void even_job_signals_ready(void *context, int fd);
/* The user ends the job by `signal`: told once. */
void even_job_interrupted(even_job *job, int signal);
/* What was to be done between two attempts was interrupted: whether the job ends for that, and with which code; with
 * --notice SIGTERM is notice then, too. */
bool even_job_ended_between(even_job *job, int *exit_code);
/* A line of its own, cut off beyond so many bytes. */
enum { EVEN_JOB_NOTICE = 512 };
void even_job_notice(even_job *job, const char *format, ...) EVEN_PRINTF(2, 3);

#endif
