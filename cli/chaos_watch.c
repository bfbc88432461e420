/* How soon a fault is noticed: from then until the agent says so, or until a rank that was left alone has ended. */
#include "cli/chaos_hosts.h"
#include "os/clock.h"

#include <string.h>

#define LONGEST_WATCH_NS ((uint64_t)20 * 1000000000u)

/* What the agent tells of ranks that were killed or stand still, and of hosts (src/orchestrator). */
static const char *const tellings[] = {" has ended by ", " stands still: ", " is lost: ", " on without ",
                                       "cut off from the majority"};

bool even_chaos_lives(const even_chaos_process *process) {
  even_process_stat now;
  return even_process_stat_read(process->pid, &now) == 0 && now.start_time == process->start_time && now.state != 'Z' &&
         now.state != 'X';
}

static bool is_noticed_by_others(even_chaos_kind kind) {
  return kind == EVEN_CHAOS_KILL || kind == EVEN_CHAOS_STOP || kind == EVEN_CHAOS_CUT;
}

/* Whether any process of the job lives on the host that is cut, or, `there` false, on another: else an earlier cut has
 * taken what is on one side from the job, or whoever was started there since has not come. */
static bool has_process(const even_chaos_job *job, bool there) {
  const even_state *state = even_history_state(job->history);
  for (int rank = 0; rank < state->ranks; rank++) {
    even_process_stat now;
    if (even_chaos_find_rank(job, rank, &now) && even_chaos_is_on(job, now.pid, job->cut_host) == there) {
      return true;
    }
  }
  return false;
}

void even_chaos_watch_begin(even_chaos_job *job) {
  even_chaos_watch *watch = &job->watch;
  even_chaos_watch_end(job, "another fault came first");
  watch->count = 0;
  even_chaos_kind kind = job->plan[job->next].kind;
  if (job->apart || !is_noticed_by_others(kind)) {
    return;
  }
  const even_state *state = even_history_state(job->history);
  bool elsewhere = false;
  if (job->recovers && kind != EVEN_CHAOS_CUT && !even_chaos_has_stepped(job, job->victim)) {
    job->done[job->next].unnoticed = "it had made no step yet: nobody misses who has not joined";
    return;
  }
  if (kind == EVEN_CHAOS_CUT && !has_process(job, true)) {
    job->done[job->next].unnoticed = "its host was lost already: nobody misses who has not come back";
    return;
  }
  if (kind == EVEN_CHAOS_CUT && !has_process(job, false)) {
    job->done[job->next].unnoticed = "its host was the only one that an earlier cut had left: it has nobody to miss";
    return;
  }
  /* a cut is noticed by agents: ranks that end then end by them, or by the network's own word */
  for (int rank = 0; rank < state->ranks && watch->count < EVEN_CHAOS_WATCHED; rank++) {
    even_process_stat now;
    if (even_chaos_host_of(job, rank) > 0) { /* whose end the agent tells */
      elsewhere = elsewhere || (rank != job->victim && state->rank[rank].pid > 0);
      continue;
    }
    if (rank != job->victim && state->rank[rank].pid > 0 && even_process_stat_read(state->rank[rank].pid, &now) == 0 &&
        now.state != 'Z') {
      watch->others[watch->count++] = (even_chaos_process){.pid = now.pid, .start_time = now.start_time};
    }
  }
  if (job->plan[job->next].kind == EVEN_CHAOS_KILL && watch->count == 0 && !elsewhere) {
    job->done[job->next].unnoticed = "it was alone: its agent tells it with the restart";
    return;
  }
  watch->of = &job->done[job->next];
  watch->looked_ns = even_clock_ns();
  watch->heard = job->agent.complaint.length;
}

void even_chaos_watch_look(even_chaos_job *job) {
  even_chaos_watch *watch = &job->watch;
  if (watch->of == NULL) {
    return;
  }
  const even_text *said = &job->agent.complaint;
  const char *since = said->length > watch->heard ? said->data + watch->heard : "";
  bool noticed = false;
  bool ended = false;
  for (size_t i = 0; i < sizeof tellings / sizeof tellings[0]; i++) {
    noticed = noticed || strstr(since, tellings[i]) != NULL;
  }
  for (size_t i = 0; i < watch->count; i++) {
    ended = ended || !even_chaos_lives(&watch->others[i]);
  }
  if (ended && !noticed) {
    even_chaos_read_history(job);
    if (even_chaos_last_step(job) + 1 >= job->steps) { /* they have ended because all is done */
      even_chaos_watch_end(job, "the training had come to its end");
      return;
    }
  }
  noticed = noticed || ended;
  if (noticed) {
    watch->of->noticed_ns = even_clock_ns();
  }
  if (noticed || even_clock_ns() - watch->of->at_ns > LONGEST_WATCH_NS) {
    even_chaos_watch_end(job, "nobody had noticed it after 20 s");
  }
}

void even_chaos_watch_end(even_chaos_job *job, const char *why) {
  even_chaos_watch *watch = &job->watch;
  if (watch->of != NULL && watch->of->noticed_ns == 0) {
    watch->of->unnoticed = why;
  }
  watch->of = NULL;
}
