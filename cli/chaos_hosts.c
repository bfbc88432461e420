/* Hosts of the user's own under `evenstep chaos`: where the job's ranks are, and what the parts there are asked. */
#include "cli/chaos_hosts.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "cli/job_setup.h"
#include "os/clock.h"
#include "os/signals.h"

#include <evenstep/version.h>
#include <stdio.h>
#include <string.h>

/* So long an answer may take over a slow way; and the end of a part, which lets go of what it holds. */
enum { ANSWER_MS = 20000, END_MS = 10000 };
/* Of even_state_rank.device, which has " on " before it, and "cuda:15" or the like before that. */
enum { LONGEST_NAME = 48 };
/* Of a twin there, beside the undisturbed run's time and what it is given there itself. */
#define LATE_NS ((uint64_t)150 * 1000000000u)
/* So often a part is asked what became of something. */
#define ASK_NS ((uint64_t)200 * 1000000u)
/* How the history names a device of another host (monitor/monitor.c). */
static const char is_on[] = " on ";
static const char ready[] = "ready ";

/* ---- which there are ---- */

even_status even_chaos_hosts_read(const even_job_options *options, int ranks, even_chaos_hosts *out) {
  even_host_wish *wishes = NULL;
  size_t count = 0;
  bool known = true;
  *out = (even_chaos_hosts){.of = NULL};
  even_status status = even_job_read_hosts(options->hosts, ranks, &wishes, &count);
  if (status == EVEN_OK && count < 2) {
    status = even_fail(EVEN_ERR_USAGE, "chaos: --hosts %.100s is one host", options->hosts);
    (void)even_error_fix("leave --hosts out, or name others behind this one");
  }
  if (status == EVEN_OK) {
    status = EVEN_NEW_ARRAY(&out->of, count - 1);
  }
  for (size_t i = 0; i < count && status == EVEN_OK; i++) {
    if (strlen(wishes[i].name) > LONGEST_NAME) {
      status = even_fail(EVEN_ERR_USAGE, "chaos: host %s: the history keeps %d signs of a name", wishes[i].name,
                         (int)LONGEST_NAME);
      (void)even_error_fix("give it a shorter one in ~/.ssh/config");
      break;
    }
    known = known && wishes[i].ranks > 0;
    out->ranks += wishes[i].ranks;
    if (i > 0) {
      (void)snprintf(out->of[i - 1].name, sizeof out->of[i - 1].name, "%s", wishes[i].name);
      out->count++;
    }
  }
  out->ranks = known ? out->ranks : 0;
  even_free(wishes);
  return status;
}

/* ---- their parts ---- */

static even_status start(const even_job_way *way, even_chaos_place *place) {
  const char *words[EVEN_JOB_SHELL_WORDS + 5];
  size_t count = 0;
  for (; way->words[count] != NULL; count++) {
    words[count] = way->words[count];
  }
  words[count++] = place->name;
  words[count++] = even_text_string(&way->program);
  words[count++] = "chaos";
  words[count++] = "--part";
  words[count] = NULL;
  place->why[0] = '\0';
  EVEN_TRY(even_dialogue_start_typed((char *const *)(uintptr_t)words, &place->part));
  place->open = true;
  return EVEN_OK;
}

static even_status await_ready(even_chaos_place *place, int64_t patience_ms) {
  const char *line = NULL;
  char complaint[256];
  even_status status = even_dialogue_hear(&place->part, patience_ms, &line);
  if (status == EVEN_OK && line != NULL && strncmp(line, ready, sizeof ready - 1) == 0) {
    if (strcmp(line + sizeof ready - 1, even_version()) == 0) {
      return EVEN_OK;
    }
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "chaos: host %s has evenstep %.32s, and this one %s", place->name,
                    line + sizeof ready - 1, even_version());
    return even_error_fix("install the same on all hosts");
  }
  if (status == EVEN_OK) {
    even_dialogue_complaint(&place->part, complaint, sizeof complaint);
    (void)even_fail(EVEN_ERR_PEER_LOST, "chaos: host %s: %s", place->name,
                    complaint[0] != '\0' ? complaint : "evenstep chaos could not be started there");
  } else {
    (void)even_error_prefix("chaos: host %s", place->name);
  }
  return even_error_fix("it has to be reached as by `evenstep run --hosts`, and to have this version of evenstep");
}

even_status even_chaos_hosts_open(const even_job_options *options, even_chaos_hosts *hosts) {
  even_job_way way = {.shell = NULL};
  double patience = 0;
  even_status status = even_job_patience(&patience);
  status = status == EVEN_OK ? even_job_find_way(options, &way) : status;
  if (status == EVEN_OK) {
    status = even_signals_pipe_ignore(&hosts->pipe_before);
    hosts->pipes_ignored = status == EVEN_OK;
  }
  for (size_t i = 0; i < hosts->count && status == EVEN_OK; i++) {
    status = start(&way, &hosts->of[i]);
  }
  for (size_t i = 0; i < hosts->count && status == EVEN_OK; i++) {
    status = await_ready(&hosts->of[i], (int64_t)(patience * 1e3));
  }
  even_job_way_free(&way);
  return status;
}

void even_chaos_hosts_end(even_chaos_hosts *hosts) {
  const char *line = NULL;
  for (size_t i = hosts->count; i > 0; i--) {
    if (hosts->of[i - 1].open) {
      even_dialogue_finish(&hosts->of[i - 1].part);
    }
  }
  for (size_t i = hosts->count; i > 0; i--) {
    even_chaos_place *place = &hosts->of[i - 1];
    while (place->open && even_dialogue_hear(&place->part, END_MS, &line) == EVEN_OK && line != NULL) {
    }
    if (place->open) {
      even_dialogue_end(&place->part);
      place->open = false;
    }
  }
  if (hosts->pipes_ignored) {
    even_signals_pipe_restore(&hosts->pipe_before);
    hosts->pipes_ignored = false;
  }
  even_error_clear(); /* one that was lost has let go by itself */
}

void even_chaos_hosts_close(even_chaos_hosts *hosts) {
  even_chaos_hosts_end(hosts);
  even_free(hosts->of);
  *hosts = (even_chaos_hosts){.of = NULL};
}

/* A part that does not answer is done with: it ends with its connection. */
static void lose(even_chaos_place *place) {
  char complaint[128];
  even_dialogue_complaint(&place->part, complaint, sizeof complaint);
  (void)snprintf(place->why, sizeof place->why, "its part of chaos is lost: %.100s",
                 complaint[0] != '\0'                   ? complaint
                 : even_error_last()->status != EVEN_OK ? even_error_last()->what
                                                        : "it has ended");
  even_dialogue_end(&place->part);
  place->open = false;
  even_error_clear();
}

/* Whether it has answered. */
static bool ask(even_chaos_place *place, const even_chaos_act *act, even_chaos_answer *out) {
  even_text text = EVEN_TEXT_EMPTY;
  const char *line = NULL;
  if (!place->open) {
    return false;
  }
  even_error_clear();
  even_chaos_act_write(act, &text);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    status = even_dialogue_say(&place->part, even_text_string(&text));
  }
  if (status == EVEN_OK) {
    status = even_dialogue_hear(&place->part, ANSWER_MS, &line);
  }
  even_text_free(&text);
  if (status == EVEN_OK && line != NULL) {
    status = even_chaos_answer_read(line, out);
  }
  if (status != EVEN_OK || line == NULL) {
    lose(place);
    return false;
  }
  return true;
}

/* ---- where ranks are ---- */

int even_chaos_host_of(const even_chaos_job *job, int rank) {
  if (job->hosts == NULL || job->history == NULL) {
    return 0;
  }
  const even_state *state = even_history_state(job->history);
  const char *name = rank < state->ranks ? strstr(state->rank[rank].device, is_on) : NULL;
  for (size_t i = 0; name != NULL && i < job->hosts->count; i++) {
    if (strcmp(name + sizeof is_on - 1, job->hosts->of[i].name) == 0) {
      return (int)i + 1;
    }
  }
  return 0;
}

bool even_chaos_rank_is_on(const even_chaos_job *job, int rank, int host) {
  const even_state *state = even_history_state(job->history);
  return job->hosts != NULL ? even_chaos_host_of(job, rank) == host
                            : even_chaos_is_on(job, state->rank[rank].pid, host);
}

const char *even_chaos_host_called(const even_chaos_job *job, int host) {
  return job->hosts != NULL ? job->hosts->of[host - 1].name : even_chaos_host_name(host);
}

/* What all ranks of the job have in their environment, from one of this host; as it was where none lives here now. */
static bool take_run(even_chaos_job *job) {
  const even_state *state = even_history_state(job->history);
  even_process_stat facts;
  for (int rank = 0; rank < state->ranks; rank++) {
    char run[EVEN_CHAOS_RUN_NAME];
    if (even_chaos_host_of(job, rank) == 0 && even_chaos_find_rank(job, rank, &facts) &&
        even_chaos_variable_of(facts.pid, "TORCHELASTIC_RUN_ID", run, sizeof run)) {
      (void)snprintf(job->run, sizeof job->run, "%s", run);
      break;
    }
  }
  return job->run[0] != '\0';
}

bool even_chaos_lives_there(const even_chaos_job *job, int host, pid_t pid) {
  even_chaos_act act = {.verb = EVEN_CHAOS_LIVES, .pid = pid};
  even_chaos_answer answer;
  (void)snprintf(act.run, sizeof act.run, "%s", job->run);
  return act.run[0] != '\0' && ask(&job->hosts->of[host - 1], &act, &answer) && answer.said == EVEN_CHAOS_SAID_YES;
}

/* ---- faults ---- */

/* Whether it was answered; EVEN_CHAOS_SAID_LATER also where nobody can say yet whose processes are the job's. */
static bool ask_for(even_chaos_job *job, int host, even_chaos_kind kind, int rank, pid_t pid, even_chaos_answer *out) {
  even_chaos_act act = {
      .verb = EVEN_CHAOS_DO, .kind = kind, .rank = rank, .pid = pid, .dice = job->plan[job->next].dice};
  *out = (even_chaos_answer){.said = EVEN_CHAOS_SAID_LATER};
  if (!take_run(job)) {
    return true;
  }
  (void)snprintf(act.run, sizeof act.run, "%s", job->run);
  act.seconds = (double)(kind == EVEN_CHAOS_TWIN ? job->usual_ns : job->hold_ns) * 1e-9;
  return ask(&job->hosts->of[host - 1], &act, out);
}

static even_chaos_going *going_of(even_chaos_job *job, even_chaos_kind kind) {
  return &job->hosts->going[kind == EVEN_CHAOS_TWIN];
}

static bool goes_on(even_chaos_kind kind) {
  return kind == EVEN_CHAOS_TWIN || kind == EVEN_CHAOS_MEMORY;
}

/* "host there: rank 1 (process 44)" */
static void name_host(const even_chaos_place *place, const char *words, char *out, size_t bytes) {
  (void)snprintf(out, bytes, "host %.60s: %.140s", place->name, words);
}

even_status even_chaos_inject_there(even_chaos_job *job, const even_process_stat *rank) {
  const even_chaos_kind kind = job->plan[job->next].kind;
  const int host = even_chaos_host_of(job, job->victim);
  const even_chaos_place *place = &job->hosts->of[host - 1];
  even_chaos_done *done = &job->done[job->next];
  even_chaos_answer answer;
  char words[EVEN_CHAOS_WORDS];
  if ((goes_on(kind) && going_of(job, kind)->of != NULL) || (kind == EVEN_CHAOS_MEMORY && !even_chaos_may_lack(job))) {
    return EVEN_OK; /* one at a time */
  }
  const uint64_t before = even_clock_ns();
  if (!ask_for(job, host, kind, job->victim, rank->pid, &answer)) {
    name_host(place, place->why, words, sizeof words);
    even_chaos_tell_not(job, words);
    return EVEN_OK;
  }
  name_host(place, answer.words, words, sizeof words);
  if (answer.said == EVEN_CHAOS_SAID_NOT) {
    even_chaos_tell_not(job, words);
  } else if (answer.said == EVEN_CHAOS_SAID_DONE) {
    even_chaos_tell(job, words);
    if (kind == EVEN_CHAOS_KILL || kind == EVEN_CHAOS_STOP) {
      done->at_ns = before;
    }
    if (goes_on(kind)) {
      const uint64_t lasts_ns = kind == EVEN_CHAOS_TWIN ? job->usual_ns + LATE_NS : job->hold_ns;
      *going_of(job, kind) = (even_chaos_going){.of = done,
                                                .kind = kind,
                                                .host = host,
                                                .number = answer.number,
                                                .rank = job->victim,
                                                .pid = rank->pid,
                                                .until_ns = even_clock_ns() + lasts_ns};
    }
  }
  return EVEN_OK;
}

bool even_chaos_kill_agent_there(even_chaos_job *job, int host, char *words, size_t bytes) {
  const even_state *state = even_history_state(job->history);
  even_process_stat facts;
  even_chaos_answer answer;
  for (int rank = 0; rank < state->ranks; rank++) {
    if (even_chaos_host_of(job, rank) == host && even_chaos_find_rank(job, rank, &facts)) {
      bool killed =
          ask_for(job, host, EVEN_CHAOS_AGENT, rank, facts.pid, &answer) && answer.said == EVEN_CHAOS_SAID_DONE;
      (void)snprintf(words, bytes, "%.60s, of host %.30s", killed ? answer.words : "",
                     even_chaos_host_called(job, host));
      return killed;
    }
  }
  return false;
}

bool even_chaos_kill_victim(even_chaos_job *job, const even_process_stat *rank) {
  const int host = even_chaos_host_of(job, job->victim);
  even_chaos_answer answer;
  return host == 0 ? even_process_signal_exactly(rank->pid, rank->start_time, SIGKILL)
                   : ask_for(job, host, EVEN_CHAOS_KILL, job->victim, rank->pid, &answer) &&
                         answer.said == EVEN_CHAOS_SAID_DONE;
}

/* ---- at each look ---- */

bool even_chaos_has_twin(const even_chaos_job *job) {
  return job->rank.twin.pid != 0 || (job->hosts != NULL && job->hosts->going[1].of != NULL);
}

static void add_words(even_chaos_done *done, const char *words) {
  size_t length = strlen(done->words);
  (void)snprintf(done->words + length, sizeof done->words - length, "%s", words);
}

/* As of lack here (chaos_rank.c): who has ended with the training has not ended for it. */
static void take_end(even_chaos_job *job, const even_chaos_going *going, const even_chaos_answer *answer) {
  even_chaos_done *done = going->of;
  if (going->kind == EVEN_CHAOS_MEMORY && job->ended_ns > done->at_ns) {
    add_words(done, "; another fault came meanwhile");
    return;
  }
  const bool over = even_chaos_last_step(job) + 1 >= job->steps;
  if (going->kind == EVEN_CHAOS_MEMORY && over && answer->lack == EVEN_CHAOS_LACK_HURT) {
    done->lack = EVEN_CHAOS_LACK_BORNE;
    add_words(done, "; it needed none, or did without");
    return;
  }
  name_host(&job->hosts->of[going->host - 1], answer->words, done->words, sizeof done->words);
  done->lack = (even_chaos_lack)answer->lack;
  done->broken = answer->broken;
}

static void look_at(even_chaos_job *job, even_chaos_going *going, bool all) {
  even_process_stat facts;
  even_chaos_act act = {.verb = EVEN_CHAOS_LOOK, .number = going->number};
  even_chaos_answer answer;
  const uint64_t now = even_clock_ns();
  bool last = all || now >= going->until_ns;
  if (going->kind == EVEN_CHAOS_MEMORY) {
    bool lives = job->history != NULL && even_chaos_find_rank(job, going->rank, &facts) && facts.pid == going->pid;
    last = last || !lives || even_chaos_must_relent(job);
    act.verb = EVEN_CHAOS_FEED;
    if (!last) {
      return;
    }
  }
  if (!last && now - going->asked_ns < ASK_NS) {
    return;
  }
  going->asked_ns = now;
  if (!ask(&job->hosts->of[going->host - 1], &act, &answer)) {
    add_words(going->of, "; its host does not answer any more");
    going->of = NULL;
  } else if (answer.said != EVEN_CHAOS_SAID_OPEN) {
    take_end(job, going, &answer);
    going->of = NULL;
  } else if (last) { /* the part ends it */
    add_words(going->of, ", and had not started when the job ended");
    going->of = NULL;
  }
}

void even_chaos_hosts_relent(even_chaos_job *job, bool all) {
  if (job->hosts == NULL) {
    return;
  }
  if (job->history != NULL && job->run[0] == '\0') {
    (void)take_run(job); /* while ranks live here */
  }
  for (size_t i = 0; i < EVEN_CHAOS_MOST_GOING; i++) {
    if (job->hosts->going[i].of != NULL) {
      look_at(job, &job->hosts->going[i], all);
    }
  }
}
