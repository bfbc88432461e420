/* What a member's thread (voter.c) has, and shares with those that call the member (voter_calls.c). */
#ifndef EVEN_ORCHESTRATOR_VOTER_THREAD_H
#define EVEN_ORCHESTRATOR_VOTER_THREAD_H

#include "orchestrator/member_list.h"
#include "orchestrator/voter.h"
#include "orchestrator/voter_links.h"
#include "orchestrator/voter_log.h"
#include "orchestrator/voter_watch.h"

#include <pthread.h>
#include <stdatomic.h>

struct even_voter {
  pthread_t thread;
  even_leadership_times times;
  atomic_bool stop;
  even_voter_watch watch; /* of its agent's loop */
  pthread_mutex_t lock;   /* of what follows, up to the thread's own */
  even_voter_view view;
  uint64_t lease_ns; /* see even_leadership_answered; by even_clock_boot_ns, as all that is compared with it */
  int announced;
  bool ends;
  bool hands;
  uint64_t heirs[EVEN_VOTER_MOST]; /* to one of these rather than to others */
  size_t heir_count;
  bool waits;
  even_guardian *guardian;  /* NULL: none */
  bool gave_up;             /* since that was asked, */
  char why[EVEN_VOTER_WHY]; /* and why */
  even_member_list wanted;
  even_member_list known; /* where they listen, those that were named at first and later */
  /* the thread's */
  even_loop loop;
  even_voter_links links;
  even_voter_log log;
  uint64_t first;
  bool witness;
  uint64_t led;       /* the newest generation in which this member led, 0: none */
  uint64_t leader_ns; /* when anything came from the leader last, or since when it is none */
  uint64_t heard_ns;  /* when the log's leader was heard last */
  uint64_t next_call_ns;
  uint64_t next_ask_ns;
  uint64_t again_ns; /* when it tries to take part in the log again; 0: it does */
  bool stood;        /* it rested when it was looked at last, since its agent stands */
};

#endif
