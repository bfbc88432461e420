/* What `evenstep chaos` was told, what it has done, and how that is reported. */
#ifndef EVEN_CLI_CHAOS_COMMAND_H
#define EVEN_CLI_CHAOS_COMMAND_H

#include "cli/chaos_hosts.h"
#include "cli/job.h"

enum { EVEN_CHAOS_MOST_WORDS = 4096, EVEN_CHAOS_OPTION_ROOM = EVEN_JOB_OPTION_ROOM + 13 };

typedef struct even_chaos_command {
  even_job_options job;
  int64_t seed; /* -1: chosen */
  int64_t count;
  const char *kinds;
  double tolerance;
  double hold;         /* --hold, seconds */
  const char *against; /* --against; NULL: an undisturbed run of its own */
  bool namespaces;     /* --namespaces: several hosts, */
  int64_t hosts;       /* --hosts: so many; 0: not given, or a list of the user's own, which is job.hosts then */
  bool part;           /* --part: this is the part on another host */
  bool replace_leader; /* --replace-leader: another host takes a killed one's place */
  bool restart_agent;  /* --restart-agent: the agent alone is killed, and another goes on with its ranks */
  bool json;
  /* ---- */
  even_chaos_network network;
  even_chaos_hosts own; /* of none: one host, or those of --namespaces */
  uint32_t kinds_set;
  bool without_cuts;  /* they were asked for, and are not in the set: the job is one host's */
  char names[2][160]; /* of the runs: undisturbed, disturbed */
  char restarts[24];
  char least[24];
  char memory_steps[24]; /* numbers of a job's options as words */
  char memory_copies[24];
  char most[24];
  char copies[24];
  const char *more[12]; /* words of the disturbed run alone */
  size_t more_count;
  bool recovers; /* --recovery shrink or replace */
  long spares;
  even_text program;
  const char *words[EVEN_CHAOS_MOST_WORDS];
  size_t word_count;
  size_t script;
  even_chaos_fault *plan;
  even_chaos_done *done;
  double seconds[2];
  even_chaos_verdict verdict;
  char broken[768]; /* why the promise was not kept; "": it was */
} even_chaos_command;

/* ---- options (chaos_options.c) ---- */

/* Of a job's options those that mean something here, our own, and without help those that are refused, into
 * table[EVEN_CHAOS_OPTION_ROOM]; how many there are. */
size_t even_chaos_declare(even_chaos_command *on, even_option *table);
/* EVEN_ERR_USAGE: one was given under which what is promised could not be looked at, or without what it is of; says
 * why. Takes --hosts for a number, or for a list. */
even_status even_chaos_check_options(even_chaos_command *on) EVEN_MUST_USE;
/* Whether the job is of hosts of the user's own. */
bool even_chaos_has_own_hosts(const even_chaos_command *on);
/* Into on->words what both runs are started with; `words`: the script and its arguments. */
even_status even_chaos_make_words(even_chaos_command *on, size_t count, char **words) EVEN_MUST_USE;

/* While it is at work, unless JSON was asked for. */
void even_chaos_say(const even_chaos_command *on, const char *format, ...) EVEN_PRINTF(2, 3);
/* At the end: every fault, what became of it, whether the promise was kept; in words or as JSON. `steps`: of the
 * training. */
even_status even_chaos_report(const even_chaos_command *on, long steps) EVEN_MUST_USE;

#endif
