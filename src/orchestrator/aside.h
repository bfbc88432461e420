/* Places whose ranks end one attempt after the other: the next ones do without them, for a growing time (`evenstep run
 * --set-aside`). Between two attempts even_agent_run then returns, and is called again with the devices that take part;
 * what a job of one host is lies here meanwhile. Counted by place (the host, and the number in the list of devices that
 * it has for the job), for several ranks may share one device, and numbers of ranks change. Pure, but for `past`. */
#ifndef EVEN_ORCHESTRATOR_ASIDE_H
#define EVEN_ORCHESTRATOR_ASIDE_H

#include "orchestrator/aside_rests.h"
#include "orchestrator/elastic.h"

enum { EVEN_ASIDE_ATTEMPTS = 2, EVEN_ASIDE_LONGEST_SECONDS = 3600 };

typedef struct even_aside {
  even_aside_place items[EVEN_ASIDE_MOST];
  size_t count;
  even_aside_place last; /* of the rank that failed first in the attempt before, */
  int failed;            /* and in how many in a row; 0: nobody's */
  bool changed;          /* other places than before take part from now on */
  even_elastic_past past;
} even_aside;

/* Frees what lies there of a job that does not go on. */
void even_aside_close(even_aside *aside);
/* Whether the place is set aside. */
bool even_aside_has(const even_aside *aside, const char *host, size_t place);
/* The place of one of the host's ranks, `rank` counted there, of those that take part. */
size_t even_aside_place_of(const even_aside *aside, const char *host, size_t rank);
/* An attempt of so many ranks has failed, and another one follows, in which `least` of them must be left. The host's
 * `rank` failed first, and it may be its place's fault; -1: it is nobody's, and who failed before has not done so in a
 * row. *out: the place, where it is set aside now; else NULL. */
void even_aside_failed(even_aside *aside, const char *host, int rank, const char *device, size_t ranks, size_t least,
                       uint64_t now_ns, const even_aside_place **out);
/* The first whose time is over takes part again: that place; NULL: there is none. Until there is none, again. `now_ns`
 * UINT64_MAX: whatever its time. */
const even_aside_place *even_aside_return(even_aside *aside, uint64_t now_ns);
/* Whether any rests. */
bool even_aside_any(const even_aside *aside);
/* For another agent of this host: its clock is the same. `aside` NULL: none ever does. */
void even_aside_leave(const even_aside *aside, even_aside_rests *out);
void even_aside_take(const even_aside_rests *from, even_aside *out);

#endif
