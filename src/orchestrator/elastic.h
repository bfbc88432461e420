/* The hosts of a job change while it runs: one is drained, one joins, one that is lost is left out (docs/hosts.md).
 *
 * What shall change is noted at the hosts, and rank 0 asked to end (drain.c): all save their state after the step under
 * way. Between two attempts nothing of the job runs anywhere: then hosts go and come, and even_agent_run returns, for
 * all that is counted by ranks (telemetry, history, shares) is the caller's. Called again, it goes on with that job.
 * Hosts that join while the others train are another matter (growth.h), until the attempt is over. */
#ifndef EVEN_ORCHESTRATOR_ELASTIC_H
#define EVEN_ORCHESTRATOR_ELASTIC_H

#include "orchestrator/control.h"
#include "orchestrator/drain_move.h"
#include "orchestrator/drain_queue.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

enum { EVEN_GUESTS_MOST = 16 };

/* What a job is, besides its hosts. */
typedef struct even_elastic_past {
  bool kept;
  char id[33];
  int attempt; /* the next */
  int planned;
  even_restarts restarts;
  int era;
  int64_t turn;
  bool shares;
  bool trained;
  even_shortages shortages;
  even_host_notice notice; /* of this host, which nobody was told yet */
  even_text resume;
  even_text foreign;
  even_text lineage;
  even_text began;
} even_elastic_past;

/* A host that was left out, and is looked for while the others train. */
typedef struct even_elastic_left {
  char name[EVEN_HOSTS_NAME];
  size_t ranks;
  bool in; /* it has a part again */
  unsigned tries;
  uint64_t next_ns;  /* when its agent is started again, */
  uint64_t until_ns; /* and, once it was, until when it is waited for */
} even_elastic_left;

typedef struct even_elastic {
  even_host_agent *guests[EVEN_GUESTS_MOST]; /* hosts that have come to join, NULL: none */
  even_control control;
  uint64_t until_ns; /* by then a host that had notice is gone; 0: there is none */
  uint64_t told_ns;  /* when the ranks were asked; 0: the user was told that they take their time */
  even_elastic_past past;
  even_move move;
  even_drain_queue queue;
  even_elastic_left left[EVEN_GUESTS_MOST];
  size_t left_count;
  bool grown;             /* hosts have come into an attempt that runs: ranks are numbered anew after it */
  struct even_warm *warm; /* this host's processes of the attempt that follows; NULL: none */
} even_elastic;

/* Of hosts that are open; also where hosts never change. */
even_status even_elastic_open(even_hosts *hosts) EVEN_MUST_USE;
void even_elastic_close(even_hosts *hosts);

/* ---- while an attempt runs ---- */
/* The job is open: commands are heard from now on. */
void even_elastic_begin(even_job *job);
/* The command `drain` for that host: begins with it, or keeps it until the one that is being drained is out. */
even_status even_elastic_drain(even_job *job, const char *name, const json_t *command) EVEN_MUST_USE;
/* Asks the ranks to save their state and end, where something shall change and they were not asked yet. */
void even_elastic_ask(even_job *job);
/* The same, and looks after the time; about ten times a second. */
void even_elastic_tick(even_job *job);
/* A host has notice that it must end soon, or one that has joined is asked to leave (Ctrl-C there): the others go on
 * without it, or, where they cannot, all save their state and end. While no ranks run it is kept, and also while the
 * job is not there yet (NULL): its leader gathers hosts, or looks for a checkpoint: */
void even_elastic_notice(even_job *job, even_host_agent *agent, const even_notice *notice);
/* before the next attempt is made up, the host leaves, if the others can go on without it; */
void even_elastic_heed_between(even_job *job);
/* else it counts as soon as ranks run, from when it came, or, where its time is over by then, from now on. Of an agent
 * that is lost it is forgotten with that: the next one there has none. */
void even_elastic_heed(even_job *job);
/* While the job waits for ranks: asks whether this machine's end is announced; a host with notice leaves at once, and
 * is waited for as one that is lost, once its time is over. EVEN_ERR_INTERRUPTED: this host has notice, and the job
 * ends (`draining`). EVEN_ERR_PEER_LOST: nobody else can come. */
even_status even_elastic_heed_waiting(even_job *job) EVEN_MUST_USE;
/* Whether a host may leave, its ranks with it. */
even_status even_elastic_may_go(const even_job *job, const even_host_agent *agent) EVEN_MUST_USE;
/* A host could not do its part: one that has joined is no reason to end the job, which restarts without it. */
bool even_elastic_failed(even_host_agent *agent, const char *why);
/* Before the ranks of an attempt start. */
void even_elastic_forget(even_job *job);
/* Whether the ranks have ended, their state saved, for the hosts to change. */
bool even_elastic_has_saved(const even_job *job);

/* ---- between two attempts ---- */
/* Lets hosts go and come. *changed: they are others now, and the job must be opened anew. With too few ranks it waits
 * for more. EVEN_ERR_PEER_LOST, EVEN_ERR_TIMEOUT: the job cannot go on without those that are lost. */
even_status even_elastic_settle(even_job *job, bool *changed) EVEN_MUST_USE;
/* Before an attempt: whether hosts have not come to this agent, which was started in a killed one's place (`lacked`).
 * They are left out, and this is told; the hosts change before anything else. */
bool even_elastic_begins_without(even_job *job);
/* Whether a host that was started has not come, and does not: all, where the `error` says that the time is over; why,
 * in words. */
bool even_elastic_is_absent(even_host_agent *agent, const even_error *error, char *why, size_t bytes);
/* Whether such an error of an attempt that could not begin may be mended without the hosts that are lost. */
bool even_elastic_may_leave_out(const even_job *job, even_status status);
/* Whether another attempt follows one that could not begin for this error: without the hosts that are lost, or once
 * they are there again. One that keeps too many in a row from beginning is left out. */
bool even_elastic_tries_again(even_job *job, even_status status);
/* The port of the attempt that begins, where its processes were told one, and nobody has taken it since:
 * job->master_port is it then. */
bool even_elastic_port(even_job *job);
/* Keeps what the job is for the next even_agent_run, and takes it there. */
void even_elastic_keep(even_job *job);
bool even_elastic_take(even_job *job);

/* ---- elastic_wait.c: too few ranks ---- */
/* So many must be left: --min-ranks; without, one, or all of the hosts that are waited for. */
size_t even_elastic_least(const even_job *job);
/* Those of hosts that stay, and of those that are about to be let in. */
size_t even_elastic_next_ranks(const even_job *job);
/* Whether an attempt that is about to begin would have fewer. */
bool even_elastic_lacks(const even_job *job);
/* A host has no part in the next attempt, and this is told; where the others are too few it is waited for. */
void even_elastic_leave_out(even_job *job, even_host_agent *agent, const char *why);
/* Whether hosts that are lost may be left out, by --min-ranks or unasked. */
bool even_elastic_leaves_out(const even_job *job);
/* Whether there may be more ranks, and the user lets the job wait for them. */
bool even_elastic_may_wait(const even_job *job);
/* For so many seconds; INFINITY: for as long as it takes. */
double even_elastic_patience(const even_job *job);
/* Waits until they are enough: starts agents of lost hosts again and again, and hears hosts that join. A host with
 * notice leaves meanwhile. EVEN_ERR_PEER_LOST: the time is over, nobody else can come, or another host leads.
 * EVEN_ERR_INTERRUPTED: the thread's question, or this host has notice (`draining`). */
even_status even_elastic_await_ranks(even_job *job) EVEN_MUST_USE;
/* EVEN_ERR_PEER_LOST, in words; 0 s: nothing was waited for. */
even_status even_elastic_too_few(const even_job *job, double waited_seconds);

/* ---- elastic_back.c: hosts that were left out are looked for ---- */
/* One of that name, which had so many ranks. */
void even_elastic_seek(even_hosts *hosts, const char *name, size_t ranks);
/* It goes out of the list of hosts: by ssh it is started again from time to time, not before it would have been while
 * ranks were waited for. */
bool even_elastic_look_for(even_hosts *hosts, const even_host_agent *agent);
/* Says which there are. */
void even_elastic_tell_sought(even_job *job);
/* Starts them, and asks the ranks to save their state when one is there; while an attempt runs whose ranks step in
 * es.prepare: others save nothing. */
void even_elastic_look_back(even_job *job);
/* One of them is in the list again. */
void even_elastic_is_back(even_hosts *hosts, const even_host_agent *agent);

/* ---- guests.c: hosts that come to join ---- */
even_host_agent *even_guests_find(const even_hosts *hosts, const even_link *link);
/* A greeting that says that it joins. An error ends the connection; its reason was told there. */
even_status even_guests_greet(even_hosts *hosts, even_link *link, const json_t *greeting) EVEN_MUST_USE;
even_status even_guests_take(even_host_agent *guest, const even_message *message) EVEN_MUST_USE;
/* Its connection has ended. */
void even_guests_ended(even_host_agent *guest, even_link *link);
void even_guests_tick(even_hosts *hosts);
/* Ranks of hosts that wait to be let in, and of those that take a drained host's, once that one is about to go. */
size_t even_guests_ranks(const even_hosts *hosts);
/* Starts the agent of a host that is none of the job's yet, as those of --hosts: it is to have so many ranks. */
even_status even_guests_launch(even_hosts *hosts, const char *name, size_t ranks) EVEN_MUST_USE;
/* Ends one that was started so. Outside of the loop's calls. */
void even_guests_forget(even_host_agent *guest);
/* One of them by its name; NULL: there is none. */
even_host_agent *even_guests_named(const even_hosts *hosts, const char *name);
/* One that greets by that number; NULL: none that is waited for. */
even_host_agent *even_guests_launched(const even_hosts *hosts, json_int_t index);
/* It greets. An error ends the connection. */
even_status even_guests_welcome(even_host_agent *guest, even_link *link, const json_t *greeting) EVEN_MUST_USE;
/* Ends those that were started so, and are not in the job. Outside of the loop's calls. */
void even_guests_dismiss(even_hosts *hosts);

/* ---- elastic_hosts.c: the list of hosts ---- */
/* How long the list of so many is: with what may be added while an attempt runs. */
size_t even_elastic_room(const even_hosts *hosts, size_t count);
/* Takes a guest to the end of the list, before a witness, where it is from then on; NULL: there is no room. Outside of
 * the loop's calls.
 */
even_host_agent *even_elastic_take_in(even_hosts *hosts, even_host_agent *guest);
/* Whether it has a part in the next attempt, or may have: one that came by itself and is lost does not come again. */
bool even_elastic_stays(const even_host_agent *agent);
/* Ranks of hosts that stay, this one's among them. */
size_t even_elastic_ranks(const even_job *job);
/* Tells an agent of the end, and waits for it; another one can be launched in its place. The loop turns meanwhile. */
void even_elastic_say_goodbye(even_host_agent *agent);
/* Tells agents that leave of the end, and takes them out of the list; takes the guests into it. Outside of the loop's
 * calls. */
even_status even_elastic_rearrange(even_job *job) EVEN_MUST_USE;

#endif
