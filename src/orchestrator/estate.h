/* What the leader of several hosts leaves to the one that takes its place (docs/hosts.md): all that it needs to begin
 * the job again, as one JSON text that each agent keeps, and this agent's place among the voters. */
#ifndef EVEN_ORCHESTRATOR_ESTATE_H
#define EVEN_ORCHESTRATOR_ESTATE_H

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
} even_estate;

/* For the host `to`: the leader's. */
even_status even_estate_write(const even_job *job, even_text *out) EVEN_MUST_USE;
/* EVEN_ERR_INPUT where it is not whole. */
even_status even_estate_read(const char *json, size_t bytes, json_t **out) EVEN_MUST_USE;
/* Ends this member, too. NULL is allowed. */
void even_estate_free(even_estate *estate);

/* A text of it, NULL where it says none. */
const char *even_estate_text(const even_estate *estate, const char *name);
/* The members that were left, this one first: their names, "b:2,c", as --hosts takes them. */
even_status even_estate_hosts(const even_estate *estate, even_text *out) EVEN_MUST_USE;
/* The host that only votes; NULL: none. */
const char *even_estate_witness(const even_estate *estate);
/* The member of that name, 0: none. */
uint64_t even_estate_member(const even_estate *estate, const char *name);
/* The words of a list, NULL-terminated; they are the estate's, the array is the caller's (even_free). */
even_status even_estate_words(const even_estate *estate, const char *name, char ***out, size_t *count) EVEN_MUST_USE;
/* Makes `job` the same one, at its next attempt. */
even_status even_estate_take(const even_estate *estate, even_job *job) EVEN_MUST_USE;

#endif
