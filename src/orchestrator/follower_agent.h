/* An agent that serves a leader, as its own files see it: what it says (follower_say.c), what it hears
 * (follower_hear.c), its part of an attempt (follower_attempt.c, follower_hold.c), its life (follower.c). */
#ifndef EVEN_ORCHESTRATOR_FOLLOWER_AGENT_H
#define EVEN_ORCHESTRATOR_FOLLOWER_AGENT_H

#include "orchestrator/bring_give.h"
#include "orchestrator/candidate.h"
#include "orchestrator/elastic.h"
#include "orchestrator/follower.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/legacy.h"
#include "orchestrator/outlast_part.h"
#include "orchestrator/remote_start.h"
#include "orchestrator/warm_part.h"

/* Hosts that wait to be let in have numbers behind the others. */
enum { EVEN_FOLLOWER_RECORDS = 512, EVEN_FOLLOWER_MOST_NUMBERS = EVEN_HOSTS_MOST + EVEN_GUESTS_MOST };

struct even_follower {
  even_link link;
  even_loop loop;
  even_candidate candidate;
  even_parcels *parcels; /* once the leader has taken this host */
  even_bring_take *brings;
  even_bring_give *gives;
  even_bring_kept kept;        /* of checkpoints that came */
  int host;                    /* its number among the job's, */
  int place;                   /* and the one with which it came first; 0: it has not yet */
  const char *invitation;      /* as it was written to this host */
  const even_join_wish *joins; /* a job that runs already; NULL: it was waited for */
  bool gone;
  bool closed;              /* by the other end, or the kernel there */
  bool ended;               /* the leader said so */
  bool refused;             /* and why: `why` */
  bool taken;               /* the leader has begun to look at this host: it waited for it; */
  bool *met;                /* the same, for the caller, at once; NULL: it does not ask */
  bool launched;            /* by a program that is none of the leader's, which looks for the leader itself */
  bool asked;               /* an attempt shall be started */
  int recalled;             /* the signal that shall end it before it was; 0: none */
  _Atomic uint64_t signals; /* where there is no legacy: as even_legacy_page.signals */
  even_error why;
  even_remote_start start;
  even_device_list own;   /* that take part, */
  even_device_list whole; /* of all these, where some were set aside (aside_hosts.h); else empty */
  even_warm_part next;    /* of the attempt that follows */
  even_device_list world; /* placeholders but for its own */
  even_agent_params params;
  even_job job;
  bool open;             /* the job is */
  bool running;          /* an attempt of it */
  bool settled;          /* nothing of the last one is left here, which was said */
  even_loop_watch watch; /* of `loop`, in the job's */
  int telemetry_fd;
  even_telemetry_reader *reader;
  even_link_calls calls;  /* of the links to its leaders */
  even_text facts;        /* as a leader was told them last, */
  even_text folder;       /* the working folder and */
  int wish;               /* the number of ranks that it asked for, 0: one a device, */
  even_text started;      /* and the attempt, as it said that (START) */
  even_text untold;       /* lines of ranks that are held (messages) */
  even_legacy *legacy;    /* of the agents of this host one after the other; NULL: there is no other */
  even_outlast_part part; /* what this one leaves, where its ranks outlast it; */
  json_t *left;           /* what the one before has left, NULL: nothing (follower_resume.c) */
  bool held;              /* the attempt outlasts its leader: what becomes of it the next one says */
  uint64_t wait_until_ns; /* until when the leader's next agent is waited for, held; 0: it is not */
  uint64_t heard_ns;      /* when a majority of the voters was heard last meanwhile, or that began; */
  uint64_t look_ns;       /* when it is looked for again */
  bool waited;            /* in vain */
  uint64_t led;           /* the generation of that leader */
  bool stopped;           /* meanwhile it has come to its end here, */
  bool gave_up;           /* or nobody led for too long */
  bool leads;             /* this host takes the leader's place */
  bool handed_over;       /* the attempt is that of the job that it leads (even_follower_hand_over) */
  json_t *checks;         /* what the next leader asks, once nothing of the attempt is left; NULL: nothing */
  json_t *pointed; /* of one that would join: where the leader is, as another host of the job says; NULL: nobody did */
  json_t *named;   /* the hosts that its user named, which may be asked; NULL: it was waited for */
  size_t asked_hosts;     /* so often one of them was asked again */
  uint64_t seek_since_ns; /* since when it looks for the leader; 0: the first that it asked was it */
  even_record records[EVEN_FOLLOWER_RECORDS];
};

/* ---- follower_say.c ---- */
/* Sends the JSON that `text` holds with the data, and frees it. */
void even_follower_tell(even_follower *follower, even_message_kind kind, even_text *text, const void *data,
                        size_t bytes);
void even_follower_say_error(even_follower *follower, even_message_kind kind, const even_error *error);
void even_follower_greet(even_follower *follower);
/* The leader is lost: the notice of this host, which it may not have heard, is to be told to the next one. */
void even_follower_untell_notice(even_follower *follower);
/* The lines that ranks have printed while they were held. */
void even_follower_say_untold(even_follower *follower);
/* Of an attempt that went on under another leader: all that the new one must know of this host's ranks. */
void even_follower_say_ranks(even_follower *follower);
/* What the ranks wrote since the last time; while the leader cannot keep up, it stays in their rings. */
void even_follower_forward_records(even_follower *follower);
/* Tells the leader what a job's ranks do; its tick is the caller's. */
even_agent_observer even_follower_observer(even_follower *follower);

/* ---- follower_seek.c ---- */
/* Of one that would join: whether the host that it is connected with is not the leader, or gone. */
bool even_follower_must_seek(const even_follower *follower);
/* Goes where it was pointed to, or asks the next of the hosts, for as long as another one may take to lead (longer with
 * a longer silence of the hosts, as these say): it is connected with one, or its user has ended it. EVEN_ERR_PEER_LOST:
 * none knows. */
even_status even_follower_seek(even_follower *follower) EVEN_MUST_USE;

/* ---- follower_hear.c ---- */
/* What the leader says (a call of the link). */
even_status even_follower_hear(void *context, even_link *link, const even_message *message) EVEN_MUST_USE;
/* How many of the signals that are forwarded in this attempt were passed on here, also by agents before this one. */
_Atomic uint64_t *even_follower_signals(even_follower *follower);
/* The leader asks what this host has. */
even_status even_follower_check(even_follower *follower, const json_t *content) EVEN_MUST_USE;
/* Of this host's devices those that the attempt is to have (START). */
even_status even_follower_use_devices(even_follower *follower) EVEN_MUST_USE;
even_status even_follower_open_parcels(even_follower *follower) EVEN_MUST_USE;
void even_follower_close_parcels(even_follower *follower);
/* What there is to say of the attempt that follows; several times a second. */
void even_follower_say_places(even_follower *follower);
/* The interface over which the leader is reached. */
void even_follower_interface(const even_follower *follower, char out[EVEN_JOB_INTERFACE]);

/* ---- follower_attempt.c ---- */
/* The one that was asked for, to its end, or until this host leads it (then it is `running` still). */
even_status even_follower_run_attempt(even_follower *follower) EVEN_MUST_USE;
/* The job of ranks that run already (follower_resume.c). */
even_status even_follower_open_left(even_follower *follower) EVEN_MUST_USE;
/* Nothing of the attempt is left here. */
void even_follower_say_settled(even_follower *follower);
/* What the next leader has asked is answered, once nothing of the attempt is left. */
even_status even_follower_answer_late(even_follower *follower) EVEN_MUST_USE;
/* Nobody can say what shall become of this host's ranks. */
void even_follower_end_ranks(even_follower *follower);
/* Its leader is gone, or must be obeyed no more. */
bool even_follower_is_leaderless(even_follower *follower);
/* Nothing of its ranks is left. */
void even_follower_close_job(even_follower *follower);

/* ---- follower_hold.c: with --recovery, ranks outlast their leader ---- */
/* Whether the attempt may go on under another leader, as far as is known here. */
bool even_follower_may_hold(const even_follower *follower);
/* The leader is lost: looks for the next one while the ranks wait. `held` with a link to that one; or it is this one;
 * or the ranks are ended. */
even_status even_follower_outlast(even_follower *follower) EVEN_MUST_USE;
/* The next leader goes on with the attempt (ADOPT), in which this host has this number from now on. */
even_status even_follower_adopted(even_follower *follower, const json_t *content) EVEN_MUST_USE;
/* ---- follower_wait.c: ranks outlast the agent of their leader, and train on ---- */
/* Whether another agent may come where the leader's is gone. */
bool even_follower_may_wait(const even_follower *follower);
/* In each turn meanwhile: looks for it; `gone`, and `waited`, where there is none, or another host may lead of which
 * nothing is heard here. */
even_status even_follower_wait(even_follower *follower) EVEN_MUST_USE;

/* ---- follower_resume.c: ranks outlast this agent itself ---- */
/* What ranks can outlast it with; NULL: they end with it. */
even_legacy *even_follower_kept_legacy(const even_follower *follower);
/* What those of this attempt do; NULL: as above, or they are not to. */
even_legacy *even_follower_legacy(const even_follower *follower);
/* An attempt is about to begin, or goes on: leaves what the next agent needs. */
even_status even_follower_leave(even_follower *follower) EVEN_MUST_USE;
/* Another checkpoint has come, or is about to (a call of even_bring_kept): it is left, too. */
void even_follower_kept_changed(void *context);
/* There is another connection to the leader; */
void even_follower_keep_link(even_follower *follower);
/* the leader knows this host by it; */
void even_follower_known(even_follower *follower);
/* it has ended: where this agent lives, the leader is to hear of that at once. */
void even_follower_unlink(even_follower *follower);
/* In place of the invitation: with the ranks that the agent before has left, which are held. The attempt is `asked`
 * for, and is gone on with (even_follower_run_attempt). An error: they are to be ended. */
even_status even_follower_resume(even_follower *follower) EVEN_MUST_USE;
void even_follower_forget_left(even_follower *follower);

/* The next leader begins anew: once the ranks have ended, it is told what it asks. */
void even_follower_yield(even_follower *follower, const json_t *asks);

#endif
