/* A job under `evenstep chaos`: started, watched through its history, disturbed when it is time, started again where
 * its agent was killed. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "cli/chaos_hosts.h"
#include "os/clock.h"
#include "os/folder.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WORDS = 4096, LOOK_MS = 50, WATCH_MS = 5 };
/* So long the processes of a killed agent may take to end, which its guardian sees to. */
#define LAST_ONES_NS ((uint64_t)30 * 1000000000u)

static even_status start(even_chaos_job *job) {
  const char *words[MOST_WORDS];
  size_t count = 0;
  if (job->word_count + job->more_count + 8 > MOST_WORDS) {
    return even_fail(EVEN_ERR_USAGE, "chaos: %zu words are more than it passes on", job->word_count);
  }
  for (; count < job->script; count++) {
    words[count] = job->words[count];
  }
  for (size_t i = 0; i < job->more_count; i++) {
    words[count++] = job->more[i];
  }
  words[count++] = "--name";
  words[count++] = job->name;
  if (job->starts > 0) {
    words[count++] = "--resume";
    words[count++] = "auto";
  }
  for (size_t i = job->script; i < job->word_count; i++) {
    words[count++] = job->words[i];
  }
  words[count] = NULL;
  (void)setenv("EVENSTEP_RESTART_PAUSE", "0", 0); /* its faults come as often as was asked for */
  if (job->succeeds) {
    (void)setenv("EVENSTEP_RESTART_AGENT", "0", 1); /* whom it kills is to be replaced by another host */
  }
  job->started_ns = even_clock_ns();
  EVEN_TRY(even_dialogue_start((char *const *)(uintptr_t)words, &job->agent));
  job->open = true;
  job->agent_killed = false;
  job->run[0] = '\0'; /* another one */
  job->starts++;
  return EVEN_OK;
}

static bool is_due(const even_chaos_job *job, size_t fault) {
  return fault < job->faults && (double)even_chaos_last_step(job) + 1 >= job->plan[fault].when * (double)job->steps;
}

void even_chaos_postpone(even_chaos_job *job, const char *why) {
  (void)snprintf(job->done[job->next].words, sizeof job->done[job->next].words, "%s", why);
  for (size_t i = job->next; is_due(job, i + 1); i++) { /* nothing points to those that have not come */
    even_chaos_fault fault = job->plan[i];
    even_chaos_done done = job->done[i];
    job->plan[i] = job->plan[i + 1];
    job->done[i] = job->done[i + 1];
    job->plan[i + 1] = fault;
    job->done[i + 1] = done;
  }
}

static even_status look(even_chaos_job *job) {
  even_chaos_watch_look(job);
  bool watching = job->watch.of != NULL; /* often; at all else as ever, but nothing is injected */
  if (watching && even_clock_ns() - job->watch.looked_ns < (uint64_t)LOOK_MS * 1000000u) {
    return EVEN_OK;
  }
  job->watch.looked_ns = even_clock_ns();
  even_chaos_read_history(job);
  even_chaos_members_look(job);
  even_chaos_agent_look(job);
  even_chaos_leader_look(job);
  even_chaos_checkpoints_look(job);
  even_chaos_relent(job, false);
  EVEN_TRY(even_chaos_host_look(job));
  bool stands = watching || job->agent_killed || job->leader_cut != NULL;
  return !stands && job->history != NULL && is_due(job, job->next) ? even_chaos_inject(job) : EVEN_OK;
}

static void take_outcome(even_chaos_job *job, const char *line) {
  json_t *outcome = NULL;
  if (line[0] != '{') {
    return;
  }
  if (even_json_parse("the agent's last line", line, strlen(line), &outcome) != EVEN_OK) {
    even_error_clear(); /* a script's own line */
    return;
  }
  const json_t *code = json_object_get(outcome, "exit_code");
  if (json_is_integer(code)) {
    job->exit_code = (int)json_integer_value(code);
  }
  json_decref(outcome);
}

static even_status follow(even_chaos_job *job, uint64_t began_ns) {
  for (;;) {
    const char *line = NULL;
    int64_t timeout_ms = job->watch.of != NULL ? WATCH_MS : LOOK_MS;
    even_status status = job->succeeded ? even_chaos_hear_leader(job, timeout_ms, &line)
                                        : even_dialogue_hear(&job->agent, timeout_ms, &line);
    if (status == EVEN_OK && line == NULL) {
      return EVEN_OK;
    }
    if (status == EVEN_OK) {
      take_outcome(job, line);
      continue;
    }
    if (status != EVEN_ERR_TIMEOUT) {
      return status;
    }
    EVEN_TRY(look(job));
    if (even_clock_ns() - began_ns > job->patience_ns) {
      (void)even_fail(EVEN_ERR_TIMEOUT, "%s hangs: it was at step %ld, and did not end within %.0f s", job->name,
                      even_chaos_last_step(job), (double)job->patience_ns * 1e-9);
      return even_error_fix("its folder %s is kept: logs/ and run.db show where it stands",
                            even_text_string(&job->folder));
    }
  }
}

static void end_agent(even_chaos_job *job) {
  if (job->open) {
    even_dialogue_complaint(&job->agent, job->complaint, sizeof job->complaint);
    even_dialogue_fix(&job->agent, job->fix, sizeof job->fix);
    even_dialogue_end(&job->agent);
    job->open = false;
  }
}

/* The ranks of a killed agent: none of them may live when the job goes on. */
static even_status await_last_ones(even_chaos_job *job) {
  uint64_t began = even_clock_ns();
  const even_state *state = even_history_state(job->history);
  for (int rank = 0; rank < state->ranks; rank++) {
    even_process_stat facts;
    pid_t pid = state->rank[rank].pid;
    const int host = even_chaos_host_of(job, rank);
    while (pid > 0 && (host > 0 ? even_chaos_lives_there(job, host, pid)
                                : even_process_stat_read(pid, &facts) == 0 && facts.state != 'Z')) {
      if (even_clock_ns() - began > LAST_ONES_NS) {
        return even_fail(EVEN_ERR_STATE, "rank %d (process %ld) outlived its killed agent by %.0f s", rank, (long)pid,
                         (double)LAST_ONES_NS * 1e-9);
      }
      even_clock_sleep_ns((uint64_t)LOOK_MS * 1000000u);
    }
  }
  return EVEN_OK;
}

static even_status go_on(even_chaos_job *job, pid_t killed) {
  if (!job->succeeds) {
    EVEN_TRY(await_last_ones(job));
    job->done[job->next - 1].gone_ns = even_clock_ns();
  }
  even_history_close(job->history);
  job->history = NULL;
  even_chaos_forget(job); /* its agent was another one */
  return job->succeeds ? even_chaos_await_leader(job, killed) : start(job);
}

even_status even_chaos_run(even_chaos_job *job) {
  uint64_t began = even_clock_ns();
  even_text_format(&job->folder, "%s/%s", job->runs_folder, job->name);
  EVEN_TRY(even_text_status(&job->folder));
  if (even_path_exists(even_text_string(&job->folder))) {
    (void)even_fail(EVEN_ERR_IN_USE, "%s exists: chaos runs two jobs of its own", even_text_string(&job->folder));
    return even_error_fix("give another --name, or remove that folder; --against RUN takes a run of before");
  }
  job->exit_code = -1;
  job->last_step = -1;
  for (size_t i = 0; i < job->faults; i++) {
    job->done[i].again_from = job->done[i].made_again = job->done[i].held = -1;
  }
  job->host.filler_fd = job->host.port_fd = -1;
  EVEN_TRY(even_chaos_members_open(job));
  EVEN_TRY(even_chaos_clock_open(job, job->places));
  EVEN_TRY(even_chaos_rank_open(job, job->places));
  EVEN_TRY(start(job));
  for (;;) {
    EVEN_TRY(follow(job, began));
    even_chaos_watch_look(job);
    even_chaos_agent_look(job);
    even_chaos_watch_end(job, "the job had ended before");
    EVEN_TRY(even_chaos_judge(job));
    EVEN_TRY(even_chaos_judge_again(job));
    pid_t killed = job->agent.process.pid;
    bool superseded = even_chaos_is_superseded(job);
    end_agent(job);
    if (!job->agent_killed && !superseded) {
      break;
    }
    EVEN_TRY(go_on(job, killed));
  }
  even_chaos_read_history(job);
  if (job->history == NULL && even_history_open(even_chaos_led_folder(job), &job->history) != EVEN_OK) {
    even_error_clear();
  }
  even_chaos_relent(job, true);
  return EVEN_OK;
}

void even_chaos_close(even_chaos_job *job) {
  end_agent(job);
  even_chaos_end_leader(job);
  even_chaos_relent(job, true);
  even_chaos_clock_close(job);
  even_chaos_rank_close(job);
  even_chaos_members_close(job);
  even_chaos_checkpoints_close(job);
  even_history_close(job->history);
  even_text_free(&job->folder);
  even_text_free(&job->led_folder);
}
