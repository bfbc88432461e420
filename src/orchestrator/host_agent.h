/* The agents of a job's hosts, as the leader's own files see them. */
#ifndef EVEN_ORCHESTRATOR_HOST_AGENT_H
#define EVEN_ORCHESTRATOR_HOST_AGENT_H

#include "base/json_writer.h"
#include "orchestrator/host_notice.h"
#include "orchestrator/hosts.h"
#include "orchestrator/link.h"
#include "orchestrator/parcel.h"
#include "os/guardian.h"
#include "os/process.h"
#include "os/signals.h"

#include <evenstep/telemetry.h>
#include <jansson.h>

struct even_job;

/* A host's part in the next attempt, while a host is drained (drain_move.c). */
typedef struct even_host_next {
  bool asked;
  bool placed;              /* `devices` are there */
  bool settled;             /* and its processes wait, or there are none */
  size_t count;             /* of its ranks */
  even_device_list devices; /* theirs, one each */
} even_host_next;

typedef struct even_host_agent {
  struct even_hosts *hosts;
  size_t index; /* among the job's hosts */
  int place;    /* the number that what started its agent has told that, and it greets with; 0: none has */
  char name[EVEN_HOSTS_NAME];
  int wish;
  bool witness;       /* it only votes */
  even_process shell; /* ssh, and through it the agent; pid -1: none */
  int input;          /* its standard input, held open as long as it shall live; -1: none */
  even_loop_watch watches[2];
  even_text said;  /* the last of what the shell printed */
  even_link *link; /* NULL: it has not greeted yet, or is lost */
  bool fits;       /* it is here, and has all that the script needs */
  char node[128];  /* what the host calls itself */
  even_device_list devices;
  even_device_list whole; /* with those whose places are set aside (aside_hosts.h); empty: none ever was */
  size_t *used;           /* the numbers in it of its devices: */
  size_t used_count;
  size_t first; /* of its ranks */
  size_t count;
  size_t
      first_spare; /* of processes that wait there to take a place (--spares), numbered behind the ranks of all hosts */
  size_t spares;
  bool lost;
  char lost_words[320];     /* why */
  bool busy;                /* it has a part in the attempt that has not settled */
  uint64_t writes_ns;       /* when it last said that it writes a checkpoint, and no more of that is left; 0: never */
  bool late;                /* which it got while that ran (returns.h) */
  uint64_t waiting_ns;      /* when it last said that all of its ranks wait in collectives; 0: they do not */
  bool follows;             /* it is told of generations (boards.h) */
  bool comes_back;          /* it was started again while the attempt runs, and has no part in it yet */
  unsigned tries;           /* to that end, which have failed */
  uint64_t back_ns;         /* until when it is waited for; while it is lost: when it is started again */
  uint64_t member;          /* its number among the voters' group, 0: it is none of it (yet) */
  int voter_port;           /* where it listens for the others of the group */
  bool joins;               /* it becomes a member now */
  unsigned overdue;         /* times in a row that it was given up with one that did not come to its end there */
  struct even_bring *bring; /* of the checkpoint that it is to have (bring.h); NULL: none */
  even_text resume;         /* where that lies there; empty: where it does here */
  even_text differs;        /* what the command names, and is another one there or nothing: to be told */
  bool returns;             /* it was started again, and shall be the member that it was: `member`; */
  bool asked;               /* it has not said whether it is */
  uint64_t confirms;        /* the number of what it is yet to answer (even_succession_confirm); 0: of nothing */
  bool cannot_vote;         /* it was to be a member, and said why not: not again before it is started again */
  uint64_t called_ns;       /* when it was started again last, for lack of a majority; 0: it was not */
  char identity[160];       /* even_host_identity there */
  bool came;                /* it joined the job while it ran, by itself: it is not started again (elastic.h) */
  bool grows;               /* and shall take part in the attempt that runs (growth.h) */
  bool leaves;              /* it shall have no part in the next attempt */
  even_host_notice notice;  /* that it must end soon, which came while no ranks ran */
  bool away;                /* for it could not be reached: where the others are too few it is started again */
  size_t lacked;            /* it had so many ranks before, and has not come to this agent, or was lost again; else 0 */
  bool fallen;              /* lost while nobody led: it has no part in the next attempt, whatever comes of it */
  bool holds;               /* ranks of an attempt that outlasted its leader: */
  json_t *runs;             /* what its agent says of it; NULL: nothing yet */
  bool renewed;             /* another agent has come in a killed one's place, and has not said it yet */
  bool parted;              /* it was told so, and its agent has ended */
  int missed;               /* attempts in a row that could not begin for want of it */
  uint64_t asked_ns;        /* of one that comes to join: when it was asked what its host has */
  size_t places;            /* for ranks, by its GPUs or cores; 0: not known */
  even_host_next next;
} even_host_agent;

/* A connection of somebody who has not said who it is. */
typedef struct even_host_stranger {
  even_link *link; /* NULL: this place is free */
  uint64_t since_ns;
} even_host_stranger;

/* Signals that are forwarded in an attempt, each with its number in it: who goes on in a killed agent's place is said
 * again what that one has not passed on, of the last few. */
enum { EVEN_HOSTS_SIGNALS = 32 };
typedef struct even_hosts_signals {
  uint64_t said;
  int last[EVEN_HOSTS_SIGNALS]; /* that of number n in [n % …]; 0: another leader has said it */
} even_hosts_signals;

struct even_hosts {
  even_hosts_params params; /* its pointers are the caller's */
  even_host_agent *agents;  /* [0] is this host, of which only the names and numbers count */
  size_t count;
  size_t room; /* of the list: hosts join while an attempt runs, and nobody moves then */
  even_loop loop;
  int listener; /* -1: none */
  int port;
  int join_port; /* at which the members answer hosts that join, too, where it is free there; 0: none may join */
  even_loop_watch listener_watch;
  uint64_t listen_ns; /* while it is not watched: when it shall be again */
  unsigned char key[EVEN_TLS_KEY_BYTES];
  char key_digits[2 * EVEN_TLS_KEY_BYTES + 1];
  even_host_stranger *strangers;
  size_t places;         /* for them */
  even_parcels *parcels; /* between this host and the others, and between two of these */
  even_link *gone;       /* closed, to be freed once no call of the loop can be at work in them */
  json_t *facts;         /* this host's */
  json_t *data;          /* paths that the command names and that are here; NULL: of another leader */
  bool begun;            /* all that it began with have come, and fit */
  struct sigaction pipe_before;
  even_text announced;      /* what stands in the file in which agents find this one; "": there is none */
  bool without_key;         /* somebody came who does not have the key */
  struct even_voter *voter; /* this host's, succession.c; NULL: nobody takes this one's place */
  uint64_t self;            /* its number in the group */
  int voter_port;
  int voter_listener;           /* which is the voter's */
  uint64_t brought;             /* checkpoints, to any host */
  struct even_copies *copies;   /* of checkpoints, on other hosts (copies.h); NULL: nothing of them yet */
  struct even_bring_back *back; /* while one is looked for on other hosts (bring_back.h); else NULL */
  uint64_t left_out_ns;         /* when the log was to be told last who is lost, while the others go on */
  uint64_t generation;          /* in which this one leads */
  uint64_t next_member;         /* number of an agent that joins */
  even_text members_folder;     /* in which the members keep their logs */
  uint64_t voting_ns;           /* since when the group may agree */
  bool apart_told;              /* that it does not */
  bool settled_told;            /* that this one can be lost */
  bool alone;                   /* the user says that those that are missing are lost for good */
  bool hands_over;              /* this host is drained, and another one shall lead (hand_over.h) */
  uint64_t members_said;        /* number of what the agents are told of the members: each says it again */
  bool handed;                  /* and what is left to it is left between two attempts */
  uint64_t lapsed_ns;           /* since when this one is known to be the leader, and not to act; 0: it acts */
  uint64_t held_ns;             /* when its guardian let the ranks go on last, as far as was told */
  bool cut_off;                 /* from the majority, which was told */
  bool guards;                  /* `guardian` is that of ranks that the agent before has left: until their job has it */
  even_guardian guardian;
  bool adopts;        /* the first attempt is one that runs (adopt.h) */
  bool gathering;     /* whoever comes is waited for, and nobody missed */
  even_error failure; /* what ends the opening; EVEN_OK: nothing */
  even_hosts_signals signals;
  struct even_elastic *elastic;
  struct even_job *job;      /* while it runs */
  even_loop_watch job_watch; /* of `loop`, in the job's */
  even_telemetry **rings;    /* a rank each, into which records of other hosts' ranks go; NULL: none */
};

/* ---- hosts_begin.c ---- */
/* The list of hosts that are begun with: those of the user, or those that an agent before this one had. */
even_status even_hosts_list(even_hosts *hosts) EVEN_MUST_USE;
/* The agents were started, or have come to who takes a leader's place: waits for them, as even_hosts_await. In such a
 * place, and in that of an agent that was killed, those that do not come, or are lost again, are marked (`lacked`)
 * where the job may do without. */
even_status even_hosts_await_first(even_hosts *hosts) EVEN_MUST_USE;

/* ---- hosts_open.c ---- */
/* Waits until all agents fit that were launched and are not lost: one that fitted may be lost meanwhile. */
even_status even_hosts_await(even_hosts *hosts) EVEN_MUST_USE;
/* Between the hosts that there are now. */
even_status even_hosts_open_parcels(even_hosts *hosts) EVEN_MUST_USE;
/* Asks an agent what its host has. */
even_status even_hosts_ask_facts(even_host_agent *agent) EVEN_MUST_USE;
/* EVEN_ERR_UNSUPPORTED: who greets so, from there, has another version. */
even_status even_hosts_check_version(const even_hosts *hosts, const json_t *greeting, const char *name) EVEN_MUST_USE;
/* Tells the other end why it is not taken. */
void even_hosts_refuse(even_link *link, const even_error *error);
/* Who has a connection is known now. */
void even_hosts_leave_strangers(even_hosts *hosts, const even_link *link);
/* What an agent says that it has; it fits then. */
even_status even_hosts_take_facts(even_host_agent *agent, const json_t *facts) EVEN_MUST_USE;
/* Whether a host has what the script needs, and its devices, which are the agent's then. */
even_status even_hosts_examine(even_host_agent *agent, const json_t *facts) EVEN_MUST_USE;
/* Signs of life, ends of connections. */
void even_hosts_tick(even_hosts *hosts);
/* Closes a link, and frees it with the next tick. */
void even_hosts_bury(even_hosts *hosts, even_link *link);

/* ---- hosts_own.c ---- */
/* The one that the user gave, or the leader before had, or a new one. */
even_status even_hosts_make_key(even_hosts *hosts) EVEN_MUST_USE;
/* Listens; at the port at which the leader before did, where there was one and that is free here. */
even_status even_hosts_listen(even_hosts *hosts) EVEN_MUST_USE;

/* ---- hosts_launched.c: agents that another program has started ---- */
/* Writes the file in which they find this one; nothing where there is a shell. */
even_status even_hosts_announce(even_hosts *hosts) EVEN_MUST_USE;
/* Removes it, where it is there still and its own. */
void even_hosts_unannounce(even_hosts *hosts);
/* The same once nobody is waited for any more who may have been started again. */
void even_hosts_announce_tick(even_hosts *hosts);
/* The index of the agent that greets with this number: who was started by another program has the one that it was given
 * there, whoever has left the job since. -1: none. */
json_int_t even_hosts_index_of(const even_hosts *hosts, json_int_t place);
/* A host that has come is called what it calls itself. */
void even_hosts_name_agent(even_host_agent *agent);
/* An agent that is lost may come again, if anything starts it, and finds this one then; else EVEN_ERR_PEER_LOST. */
even_status even_hosts_await_again(even_host_agent *agent) EVEN_MUST_USE;
/* It did not come. */
void even_hosts_missing(even_host_agent *agent, even_status status, const char *how);

/* ---- host_shell.c ---- */
/* Where the leader is, and the key, one line. index 0: for no host in particular. */
even_status even_hosts_invitation(const even_hosts *hosts, size_t index, bool with_key, even_text *out) EVEN_MUST_USE;
/* Starts the agent of a host. */
even_status even_host_agent_launch(even_host_agent *agent) EVEN_MUST_USE;
/* Ends its shell and its link; it can be launched again. */
void even_host_agent_drop(even_host_agent *agent);
/* Whether its shell has; all that it said is read then. */
bool even_host_agent_shell_ended(even_host_agent *agent);
/* The last line that its shell printed, "" for none. */
void even_host_agent_last_words(const even_host_agent *agent, char *out, size_t bytes);
/* Gives the last error a fix: what to try, by what the shell said last (where it is ssh). */
void even_host_agent_say_way(const even_host_agent *agent, const char *said);

/* ---- hosts_facts.c ---- */
/* This host's, into hosts->facts. */
even_status even_hosts_read_own_facts(even_hosts *hosts) EVEN_MUST_USE;

/* ---- host_facts.c: what a host has of what the script needs ---- */
typedef struct even_host_needs {
  const char *folder;
  const char *script;          /* NULL: none */
  const char *python;          /* NULL: no Python */
  const json_t *data;          /* paths that the command names (host_data.c); NULL: none is looked at */
  const char *profile_trouble; /* what is wrong with the profile of its devices; "" or NULL: nothing */
} even_host_needs;

/* As JSON; what cannot be found out is said in it. */
even_status even_host_facts_read(const even_host_needs *needs, const even_device_list *devices,
                                 even_text *out) EVEN_MUST_USE;
/* EVEN_ERR_MISMATCH with every difference that fits into its words. */
even_status even_host_facts_compare(const json_t *ours, const json_t *theirs, const char *name,
                                    const char *folder) EVEN_MUST_USE;
/* The devices that the facts name. */
even_status even_host_facts_devices(const json_t *facts, even_device_list *out) EVEN_MUST_USE;
/* As they name them. */
void even_host_facts_add_devices(even_json *json, const even_device_list *devices);
/* How many ranks this host has a GPU for each, or, where these have none, a core; `own`: the devices of its ranks. */
size_t even_host_places(const even_device_list *own);

/* ---- host_data.c: files and folders that the command names ---- */
/* EVENSTEP_CHECK_DATA: what differs is told (the default), is an error, or is not looked for. EVEN_ERR_USAGE. */
typedef enum even_data_check { EVEN_DATA_TELL, EVEN_DATA_STRICT, EVEN_DATA_OFF } even_data_check;
even_status even_host_data_check(even_data_check *out) EVEN_MUST_USE;
/* Those of the words that are paths here, or have one behind a "="; a new array. EVENSTEP_CHECK_DATA=off: none. */
even_status even_host_data_find(const char *folder, const char *const *words, size_t count, json_t **out) EVEN_MUST_USE;
/* "data": what each of the paths is here. */
void even_host_data_add(even_json *json, const char *folder, const json_t *paths);
/* EVEN_ERR_MISMATCH with the differences; `whole`: also of what is in files, by their size and a checksum. `theirs`
 * NULL: that host was not asked. */
even_status even_host_data_compare(const json_t *ours, const json_t *theirs, const char *name,
                                   bool whole) EVEN_MUST_USE;

/* Tells what of it differs on the host, once. */
void even_host_data_tell(even_host_agent *agent);

/* ---- remote.c: the job's side ---- */
/* An agent has passed on so many of the signals that were forwarded. */
void even_hosts_note_signals(even_hosts *hosts, uint64_t passed);
/* Forwards again those that it has not. */
even_status even_hosts_say_signals(const even_host_agent *agent, uint64_t passed) EVEN_MUST_USE;
/* A message of a host while the job runs. */
even_status even_hosts_job_message(even_host_agent *agent, const even_message *message) EVEN_MUST_USE;
/* Its connection has ended. */
void even_hosts_job_lost(even_host_agent *agent);

#endif
