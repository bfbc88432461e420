/* Copies that come back from the inside: which there are, and which is the newest (bring_back.c), and one that comes
 * (bring_back_one.c). */
#ifndef EVEN_ORCHESTRATOR_BRING_BACK_PARTS_H
#define EVEN_ORCHESTRATOR_BRING_BACK_PARTS_H

#include "base/text.h"
#include "orchestrator/bring_back.h"
#include "os/file.h"

/* For an answer, and between two files of one that comes. */
#define EVEN_BRING_PATIENCE_NS UINT64_C(60000000000)

/* One that a host has. */
typedef struct even_bring_found {
  size_t host;
  char *folder; /* there */
  char *order;
  uint64_t sum;
  bool memory; /* in its memory */
  char mark[EVEN_FILE_MARK];
  bool tried;   /* to be brought, */
  bool damaged; /* it came, and was */
} even_bring_found;

/* LACKS: what this agent, or one before it, has sent there, as far as it has, is not there any more. */
typedef enum even_bring_answer {
  EVEN_BRING_NOT_ASKED,
  EVEN_BRING_ASKED,
  EVEN_BRING_ANSWERED,
  EVEN_BRING_LACKS,
  EVEN_BRING_CANNOT
} even_bring_answer;

struct even_bring_back {
  even_job *job;
  const even_bring_back_wish *wish;
  uint64_t serial;            /* of what is asked for */
  even_bring_answer *answers; /* a host each */
  even_bring_found *items;
  size_t count;
  size_t from;           /* the host that sends one; 0: none does */
  uint64_t spared_bytes; /* of it, which were here already */
  size_t stuck;          /* a host to which one was on its way that did not come to its end; 0: none */
  double stuck_seconds;  /* which it had */
  bool whole;            /* it is here, */
  even_text place;       /* at this place; or: */
  bool failed;
  even_error why;
};

/* Hears others for a moment. EVEN_ERR_INTERRUPTED (the thread's question), EVEN_ERR_PEER_LOST: another host leads. */
even_status even_bring_back_turn(even_bring_back *back) EVEN_MUST_USE;
/* Whether that host can be asked. */
bool even_bring_back_reaches(const even_host_agent *agent);

/* ---- bring_back_one.c ---- */
/* Where the job's own lie, or would: the same path on every host. */
even_status even_bring_back_own_folder(const even_job *job, even_text *out) EVEN_MUST_USE;
/* The one that comes does not: the last error is why, or what its host says of it is. */
void even_bring_back_fail(even_bring_back *back);
void even_bring_back_fail_as_said(even_bring_back *back, const json_t *content);
/* Brings one, to memory where it lay in memory, and to the disk where memory does not hold it. EVEN_OK: it is `whole`,
 * or it has `failed`, as said in `why`. */
even_status even_bring_back_one(even_bring_back *back, const even_bring_found *one) EVEN_MUST_USE;

#endif
