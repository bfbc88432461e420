/* What the leader of several hosts leaves to the one that takes its place (docs/hosts.md): all that it needs to begin
 * the job again, as one JSON text that each agent keeps, and this agent's place among the voters. */
#ifndef EVEN_ORCHESTRATOR_ESTATE_H
#define EVEN_ORCHESTRATOR_ESTATE_H

#include "orchestrator/aside.h"
#include "orchestrator/job.h"
#include "orchestrator/voter.h"

#include <jansson.h>

typedef struct even_estate {
  even_voter *voter; /* this member, which leads from `generation` on */
  uint64_t self;
  int voter_port; /* where this member listens */
  uint64_t generation;
  char key_digits[2 * EVEN_TLS_KEY_BYTES + 1];
  json_t *content;
  uint64_t left_ns;        /* when this host got that */
  even_follower *holds;    /* ranks of an attempt that goes on under this leader (hold.h); NULL: a new one begins */
  even_host_notice notice; /* of this host, which it had as another one led; its ranks have it, where it holds them */
  struct even_host_memory *memory; /* what this host has of the job's checkpoints; NULL: none, or somebody took it */
} even_estate;

/* A host of the attempt that ran when this was left. */
typedef struct even_estate_host {
  const char *name;
  uint64_t member; /* 0: it was none */
  size_t first;    /* of its ranks */
  size_t count;
  size_t first_spare; /* of processes that wait there to take a place, as far as it has such */
  size_t spares;
  bool came;               /* by itself: nobody can start its agent */
  const json_t *devices;   /* their names */
  const json_t *cpu_quota; /* their parts of a core, 0: none; NULL: nobody has any */
} even_estate_host;

/* For the host `to`: the leader's. */
even_status even_estate_write(const even_job *job, even_text *out) EVEN_MUST_USE;
/* EVEN_ERR_INPUT where it is not whole. */
even_status even_estate_read(const char *json, size_t bytes, json_t **out) EVEN_MUST_USE;
/* Ends this member, too. NULL is allowed. */
void even_estate_free(even_estate *estate);

/* A line for the user in leader.log of the run folder, as far as there is one: the old leader's terminal is gone, and
 * where a new one writes, somebody may look. `content` NULL: nothing was left yet, and no folder is known. */
void even_estate_note(const json_t *content, const char *words);
/* The same where the folder alone is known. */
void even_estate_note_in(const char *run_folder, const char *words);

/* A text of it, NULL where it says none. */
const char *even_estate_text(const even_estate *estate, const char *name);
/* The hosts that were left, this one first: their names, "b:2,c", as --hosts takes them. Where their attempt goes on,
 * the lost leader's is the last. */
even_status even_estate_hosts(const even_estate *estate, even_text *out) EVEN_MUST_USE;
/* The host that only votes; NULL: none. */
const char *even_estate_witness(const even_estate *estate);
/* The host of that name; false: there was none. */
bool even_estate_find(const even_estate *estate, const char *name, even_estate_host *out);
/* Which places were set aside, each until its time is over; reckoned from when it was left, by this host's clock. */
void even_estate_aside(const even_estate *estate, even_aside *out);
/* The name of this host. */
const char *even_estate_own_name(const even_estate *estate);
/* The part of a core that a host's rank of that number (from 0 on each host) had; NAN: none. */
double even_estate_quota(const even_estate *estate, const char *name, size_t number);
/* At which port all hosts of the job answer those that join; 0: none may. */
int even_estate_join_port(const even_estate *estate);
/* The name of the leader that is lost. */
const char *even_estate_predecessor(const even_estate *estate);
/* The words of a list, NULL-terminated; they are the estate's, the array is the caller's (even_free). */
even_status even_estate_words(const even_estate *estate, const char *name, char ***out, size_t *count) EVEN_MUST_USE;
/* Its leader has left the job to another one, between two attempts (hand_over.h): no restart is used up. */
bool even_estate_is_handed(const even_estate *estate);
/* Its attempt goes on, and is not ended first. */
bool even_estate_goes_on(const even_estate *estate);
/* What `job`, whose ranks run, must know as their leader. */
even_status even_estate_continue(const even_estate *estate, even_job *job) EVEN_MUST_USE;
/* The ranks that it holds are ended: a new attempt begins. */
void even_estate_let_go(even_estate *estate);
/* Makes `job` the same one, at its next attempt. */
even_status even_estate_take(const even_estate *estate, even_job *job) EVEN_MUST_USE;

#endif
