/* What `evenstep chaos` asks of its part on another host of the job, and what that answers: a line of words each. The
 * plan of the faults, and all that is judged, stays with the one that the user typed. Pure. */
#ifndef EVEN_CLI_CHAOS_ACT_H
#define EVEN_CLI_CHAOS_ACT_H

#include "base/text.h"
#include "fault/chaos.h"

#include <stdbool.h>
#include <sys/types.h>

enum { EVEN_CHAOS_RUN_NAME = 64, EVEN_CHAOS_WORDS = 224 };

typedef enum even_chaos_verb {
  EVEN_CHAOS_DO,    /* "do KIND RUN RANK PID SECONDS DICE": a fault, to that process of the job, or to its agent */
  EVEN_CHAOS_LIVES, /* "lives RUN PID": whether there is such a process of the job */
  EVEN_CHAOS_LOOK,  /* "look NUMBER": what has become of a fault that goes on for a while */
  EVEN_CHAOS_FEED,  /* "feed NUMBER": the same, and lack of memory is over */
  EVEN_CHAOS_VERBS
} even_chaos_verb;

typedef struct even_chaos_act {
  even_chaos_verb verb;
  even_chaos_kind kind;
  char run[EVEN_CHAOS_RUN_NAME]; /* TORCHELASTIC_RUN_ID of the job's ranks: nobody else's process is touched */
  int rank;
  pid_t pid;
  double seconds; /* how long what can be ended lasts; of a twin, the undisturbed run's time */
  uint64_t dice;
  int number; /* of the fault, as the answer to it said */
} even_chaos_act;

typedef enum even_chaos_said {
  EVEN_CHAOS_SAID_DONE,  /* "done NUMBER WORDS": it has happened */
  EVEN_CHAOS_SAID_LATER, /* "later": it cannot be yet, or there is no such process of the job */
  EVEN_CHAOS_SAID_NOT,   /* "not WORDS": it cannot be here, and why */
  EVEN_CHAOS_SAID_YES,   /* "yes", "no": whether it lives; */
  EVEN_CHAOS_SAID_NO,    /* */
  EVEN_CHAOS_SAID_OPEN,  /* "open": it goes on */
  EVEN_CHAOS_SAID_OVER,  /* "over LACK BROKEN WORDS": it does not, and all of its words */
  EVEN_CHAOS_SAYINGS
} even_chaos_said;

typedef struct even_chaos_answer {
  even_chaos_said said;
  int number;
  int lack; /* even_chaos_lack */
  bool broken;
  char words[EVEN_CHAOS_WORDS]; /* may be cut */
} even_chaos_answer;

/* Whether a fault of that kind can be done on a host that is not this one. */
bool even_chaos_is_done_there(even_chaos_kind kind);

/* Adds the line, without its end. */
void even_chaos_act_write(const even_chaos_act *act, even_text *out);
void even_chaos_answer_write(const even_chaos_answer *answer, even_text *out);
/* EVEN_ERR_INPUT: it is none. */
even_status even_chaos_act_read(const char *line, even_chaos_act *out) EVEN_MUST_USE;
even_status even_chaos_answer_read(const char *line, even_chaos_answer *out) EVEN_MUST_USE;

#endif
