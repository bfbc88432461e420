/* The agent is killed: the job is started again from here, another host takes its place, or, with --restart-agent, the
 * ranks train on, and the process that chaos has started starts another one that goes on with them. */
#include "cli/chaos.h"
#include "os/clock.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

/* Tenths of a second are usual, where others were killed shortly before a minute; beyond this nobody comes. */
#define COMES_NS ((uint64_t)120 * 1000000000u)
#define CALM_NS ((uint64_t)5 * 1000000000u)
/* What the process that starts agents says (cli/job_restart.c), and what the next agent does. */
static const char trains_on[] = "and its ranks train on";
static const char goes_on[] = "the agent before was killed: ";

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

static void kill_one_of_many(even_chaos_job *job) {
  char words[96];
  even_chaos_agent *agent = &job->successor;
  const even_chaos_process now = even_chaos_owner_of(even_text_string(&job->folder), agent->killed);
  if (agent->of != NULL || now.pid == 0) {
    return; /* the next one is not there yet */
  }
  size_t fault = job->next;
  agent->calm = is_calm(job);
  (void)snprintf(words, sizeof words, "process %ld", (long)now.pid);
  if (even_process_signal_exactly(now.pid, now.start_time, SIGKILL)) {
    even_chaos_tell(job, words);
    agent->of = &job->done[fault];
    agent->killed = now.pid;
  }
}

void even_chaos_kill_agent(even_chaos_job *job) {
  char words[96];
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

void even_chaos_agent_look(even_chaos_job *job) {
  char words[96];
  even_chaos_done *done = job->successor.of;
  if (done == NULL) {
    return;
  }
  uint64_t now = even_clock_ns();
  if (said_since(job, goes_on) != NULL) {
    bool train = said_since(job, trains_on) != NULL;
    done->noticed_ns = now;
    (void)snprintf(words, sizeof words,
                   train ? "; another one went on with its ranks after %.2f s"
                         : "; its ranks ended with it, and another one began after %.2f s",
                   (double)(now - done->at_ns) * 1e-9);
    add_words(done, words);
    done->outlasted = train && job->successor.calm;
    done->tended = train ? EVEN_CHAOS_OUTLASTED : EVEN_CHAOS_BEGUN_ANEW;
    job->successor.of = NULL;
  } else if (now - done->at_ns > COMES_NS) {
    done->broken = true;
    (void)snprintf(words, sizeof words, "; none came in its place in %.0f s", (double)COMES_NS * 1e-9);
    add_words(done, words);
    job->successor.of = NULL;
  }
}
