/* An agent is killed. The leader's: the job is started again from here, another host takes its place, or, with
 * --restart-agent, the ranks train on, and the process that chaos has started starts another one that goes on with
 * them. Another host's: so does the process that started it there, or the host is lost. */
#include "base/fail.h"
#include "cli/chaos_hosts.h"
#include "os/clock.h"
#include "os/file.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tenths of a second are usual, where others were killed shortly before a minute; beyond this nobody comes. */
#define COMES_NS ((uint64_t)120 * 1000000000u)
#define CALM_NS ((uint64_t)5 * 1000000000u)
/* What the process that starts agents says (cli/job_restart.c), and what the next agent does. */
static const char trains_on[] = "and its ranks train on";
static const char goes_on[] = "the agent before was killed: ";

enum { LARGEST_FACTS = 1 << 16 };

static void add_words(even_chaos_done *done, const char *words) {
  size_t length = strlen(done->words);
  (void)snprintf(done->words + length, sizeof done->words - length, "%s", words);
}

/* Whether all ranks are there, and no other fault may still be at one: then no attempt is to end with this agent. */
static bool is_calm(const even_chaos_job *job) {
  even_process_stat facts;
  for (int rank = 0; rank < job->ranks; rank++) {
    if (!even_chaos_find_rank(job, rank, &facts)) {
      return false;
    }
  }
  return job->ended_ns == 0 || even_clock_ns() - job->ended_ns > CALM_NS;
}

static bool kill_here(const even_chaos_job *job, const even_chaos_process *agent, int host, char *words, size_t bytes) {
  (void)snprintf(words, bytes, host == 0 ? "process %ld" : "process %ld, of host %s", (long)agent->pid,
                 host == 0 ? "" : even_chaos_host_called(job, host));
  return even_process_signal_exactly(agent->pid, agent->start_time, SIGKILL);
}

/* One that another one follows. Whether it was. `agent`: not of a host of the user's own that is another one. */
static bool kill_followed(even_chaos_job *job, const even_chaos_process *agent, int host) {
  char words[128];
  size_t fault = job->next;
  const size_t victims = job->members.count;
  bool calm = is_calm(job);
  if (host > 0) { /* nobody sees to its host's ranks, but for the next one: they may be gone as soon as it is */
    even_chaos_add_ranks_on(job, host);
  }
  if (!(host > 0 && job->hosts != NULL ? even_chaos_kill_agent_there(job, host, words, sizeof words)
                                       : kill_here(job, agent, host, words, sizeof words))) {
    job->members.count = victims;
    return false;
  }
  job->victim = host > 0 ? -1 : job->victim;
  even_chaos_tell(job, words);
  job->successor = (even_chaos_agent){
      .of = &job->done[fault], .host = host, .killed = host == 0 ? agent->pid : job->successor.killed, .calm = calm};
  return true;
}

static void kill_one_of_many(even_chaos_job *job) {
  const even_chaos_process now = even_chaos_owner_of(even_text_string(&job->folder), job->successor.killed);
  if (now.pid != 0) { /* else the next one is not there yet */
    (void)kill_followed(job, &now, 0);
  }
}

/* ---- those of other hosts ---- */

/* By its second word, as guardians and the processes that start agents have it. */
static bool is_called_agent(pid_t pid) {
  char path[64];
  even_text words = EVEN_TEXT_EMPTY;
  (void)snprintf(path, sizeof path, "/proc/%ld/cmdline", (long)pid);
  if (even_file_read(path, LARGEST_FACTS, &words) != EVEN_OK) {
    even_error_clear();
  }
  size_t second = words.length == 0 ? 0 : strlen(words.data) + 1;
  bool called = second < words.length && strcmp(words.data + second, "agent") == 0;
  even_text_free(&words);
  return called;
}

/* The agent that this process has started and that lives; guardians lead sessions of their own. 0: none. */
static pid_t started_by(pid_t starter) {
  char path[64];
  even_text list = EVEN_TEXT_EMPTY;
  even_process_stat own;
  even_process_stat its;
  pid_t found = 0;
  (void)snprintf(path, sizeof path, "/proc/%ld/task/%ld/children", (long)starter, (long)starter);
  if (even_process_stat_read(starter, &own) != 0 || even_file_read(path, LARGEST_FACTS, &list) != EVEN_OK) {
    even_error_clear();
  }
  char *end = NULL;
  for (const char *at = even_text_string(&list); found == 0; at = end) {
    pid_t pid = (pid_t)strtol(at, &end, 10);
    if (end == at) {
      break;
    }
    bool lives = even_process_stat_read(pid, &its) == 0 && !even_process_stat_ended(&its);
    found = lives && its.session == own.session && is_called_agent(pid) ? pid : 0;
  }
  even_text_free(&list);
  return found;
}

pid_t even_chaos_agent_over(pid_t rank) {
  pid_t parent = even_chaos_parent_of(rank);
  if (parent <= 1 || !is_called_agent(parent)) {
    return 0;
  }
  pid_t started = started_by(parent);
  return started != 0 ? started : parent;
}

/* Of a host of --namespaces; pid 0: none. */
static even_chaos_process agent_of(const even_chaos_job *job, int host) {
  const even_state *state = even_history_state(job->history);
  even_process_stat facts;
  for (int rank = 0; rank < state->ranks; rank++) {
    pid_t agent = even_chaos_find_rank(job, rank, &facts) && even_chaos_is_on(job, facts.pid, host)
                      ? even_chaos_agent_over(facts.pid)
                      : 0;
    if (agent != 0 && even_process_stat_read(agent, &facts) == 0) {
      return (even_chaos_process){.pid = agent, .start_time = facts.start_time};
    }
  }
  return (even_chaos_process){.pid = 0};
}

static void kill_elsewhere(even_chaos_job *job, int host) {
  const even_chaos_process now = job->hosts != NULL ? (even_chaos_process){.pid = 0} : agent_of(job, host);
  if (job->hosts != NULL ? !kill_followed(job, &now, host) : now.pid == 0) {
    even_chaos_postpone(job, "no rank of that host lived any more");
  } else if (job->hosts == NULL) {
    (void)kill_followed(job, &now, host);
  }
}

/* Any of them; where another one takes the leader's place, that one's. */
static int choose_host(const even_chaos_job *job) {
  if (job->hosts != NULL) {
    const size_t first = job->votes ? 1 : 0; /* whoever took the leader's place could not be seen from here */
    return (int)(first + (size_t)(job->plan[job->next].dice >> 8) % (job->hosts->count + 1 - first));
  }
  bool any = job->network != NULL && !job->succeeds;
  return any ? (int)((job->plan[job->next].dice >> 8) % (uint64_t)job->network->hosts) : 0;
}

/* ---- all ---- */

void even_chaos_kill_agent(even_chaos_job *job) {
  char words[96];
  int host = choose_host(job);
  if (job->successor.of != NULL) {
    return; /* what follows the one before is not seen yet */
  }
  if (host > 0) {
    kill_elsewhere(job, host);
    return;
  }
  if (job->outlasts) {
    kill_one_of_many(job);
    return;
  }
  if (job->succeeded) {
    even_chaos_tell_not(job, "two hosts are left, and neither would take the other one's place");
    return;
  }
  if (job->succeeds && !even_chaos_is_voted_for(job)) {
    return; /* the others may not know yet that they are to */
  }
  (void)snprintf(words, sizeof words, "process %ld; %s", (long)job->agent.process.pid,
                 job->succeeds ? "another host takes its place" : "started again with --resume auto");
  job->agent_killed = even_process_signal(job->agent.process.pid, SIGKILL);
  if (job->agent_killed) {
    job->done[job->next].tended = job->succeeds ? EVEN_CHAOS_NOT_TENDED : EVEN_CHAOS_RESUMED_BY_US;
    even_chaos_tell(job, words);
  }
}

static const char *said_since(const even_chaos_job *job, const char *words) {
  const even_text *said = &job->agent.complaint;
  size_t heard = job->successor.of->heard;
  return said->length > heard ? strstr(said->data + heard, words) : NULL;
}

/* What is said once it is known whether another one goes on, and once it is known that it does. */
static void name_words(const even_chaos_job *job, char follows[2][224]) {
  const even_chaos_agent *agent = &job->successor;
  const char *host = agent->host == 0 ? "" : even_chaos_host_called(job, agent->host);
  if (agent->host == 0) {
    (void)snprintf(follows[0], sizeof follows[0], "%s", goes_on);
    (void)snprintf(follows[1], sizeof follows[1], "%s", trains_on);
  } else {
    (void)snprintf(follows[0], sizeof follows[0], "host %s is lost: ", host);
    (void)snprintf(follows[1], sizeof follows[1], "host %s: its agent was killed, and another one goes on", host);
  }
}

static void tell_follower(even_chaos_job *job, uint64_t now, bool train) {
  char words[128];
  even_chaos_done *done = job->successor.of;
  const char *ended = job->successor.host == 0
                          ? "; its ranks ended with it, and another one began after %.2f s"
                          : "; its ranks ended with it, and its host was lost for that after %.2f s";
  done->noticed_ns = now;
  (void)snprintf(words, sizeof words, train ? "; another one went on with its ranks after %.2f s" : ended,
                 (double)(now - done->at_ns) * 1e-9);
  add_words(done, words);
  done->outlasted = train && job->successor.calm;
  done->tended = train ? EVEN_CHAOS_OUTLASTED : job->successor.host == 0 ? EVEN_CHAOS_BEGUN_ANEW : EVEN_CHAOS_HOST_LOST;
  job->successor.of = NULL;
}

void even_chaos_agent_look(even_chaos_job *job) {
  char words[96];
  char follows[2][224];
  even_chaos_done *done = job->successor.of;
  if (done == NULL) {
    return;
  }
  uint64_t now = even_clock_ns();
  name_words(job, follows);
  bool train = said_since(job, follows[1]) != NULL;
  if (said_since(job, follows[0]) != NULL || (train && job->successor.host > 0)) {
    tell_follower(job, now, train);
  } else if (now - done->at_ns > COMES_NS) {
    done->broken = true;
    (void)snprintf(words, sizeof words, "; none came in its place in %.0f s", (double)COMES_NS * 1e-9);
    add_words(done, words);
    job->successor.of = NULL;
  }
}
