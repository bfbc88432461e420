/* The part of `evenstep chaos` on another host (chaos_hosts.h). It is a job without a history: the faults are those of
 * the host on which the command was typed. */
#include "base/alloc.h"
#include "base/fail.h"
#include "cli/chaos_hosts.h"
#include "cli/command.h"
#include "os/loop.h"
#include "os/pipe.h"
#include "os/signals.h"

#include <evenstep/version.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MOST_FAULTS = 4096, LOOK_MS = 50, LONGEST_LINE = 1024 };

even_status even_chaos_part_open(even_chaos_job *out) {
  *out = (even_chaos_job){.apart = true, .faults = MOST_FAULTS, .steps = 1};
  out->host.filler_fd = out->host.port_fd = -1;
  EVEN_TRY(EVEN_NEW_ARRAY(&out->plan, MOST_FAULTS));
  return EVEN_NEW_ARRAY(&out->done, MOST_FAULTS);
}

void even_chaos_part_close(even_chaos_job *job) {
  even_chaos_relent(job, true);
  even_chaos_rank_close(job);
  even_free(job->plan);
  even_free(job->done);
  *job = (even_chaos_job){.apart = true};
}

/* Whether the process is one of the job's ranks, and lives. What it was read of before is the one that is signalled. */
static bool find_process(const even_chaos_act *act, even_process_stat *out) {
  char run[EVEN_CHAOS_RUN_NAME];
  char rank[16];
  return even_process_stat_read(act->pid, out) == 0 && !even_process_stat_ended(out) &&
         even_chaos_variable_of(act->pid, "TORCHELASTIC_RUN_ID", run, sizeof run) && strcmp(run, act->run) == 0 &&
         even_chaos_variable_of(act->pid, "RANK", rank, sizeof rank);
}

static even_status kill_agent(even_chaos_job *job, pid_t rank) {
  even_process_stat facts;
  char words[64];
  pid_t agent = even_chaos_agent_over(rank);
  if (agent != 0 && even_process_stat_read(agent, &facts) == 0 &&
      even_process_signal_exactly(agent, facts.start_time, SIGKILL)) {
    (void)snprintf(words, sizeof words, "process %ld", (long)agent);
    even_chaos_tell(job, words);
  }
  return EVEN_OK;
}

static even_status inject(even_chaos_job *job, const even_chaos_act *act, even_chaos_answer *out) {
  even_process_stat facts;
  const size_t number = job->next;
  *out = (even_chaos_answer){.said = EVEN_CHAOS_SAID_LATER};
  if (number >= job->faults) {
    out->said = EVEN_CHAOS_SAID_NOT;
    (void)snprintf(out->words, sizeof out->words, "more than %zu faults have come there", job->faults);
    return EVEN_OK;
  }
  if (!find_process(act, &facts)) {
    return EVEN_OK;
  }
  job->plan[number] = (even_chaos_fault){.kind = act->kind, .rank = act->rank, .dice = act->dice};
  job->done[number] = (even_chaos_done){.rank = act->rank};
  job->victim = act->rank;
  job->victim_pid = facts.pid;
  job->hold_ns = job->usual_ns = (uint64_t)(act->seconds * 1e9);
  if (act->kind == EVEN_CHAOS_KILL || act->kind == EVEN_CHAOS_STOP || act->kind == EVEN_CHAOS_MEMORY) {
    even_chaos_remember(job, &facts); /* for a second one later */
  }
  EVEN_TRY(act->kind == EVEN_CHAOS_AGENT ? kill_agent(job, facts.pid) : even_chaos_inject_to(job, &facts));
  if (job->next > number) {
    out->said = job->done[number].impossible ? EVEN_CHAOS_SAID_NOT : EVEN_CHAOS_SAID_DONE;
    out->number = (int)number;
    (void)snprintf(out->words, sizeof out->words, "%s", job->done[number].words);
  }
  return EVEN_OK;
}

static void look(even_chaos_job *job, const even_chaos_act *act, even_chaos_answer *out) {
  even_chaos_rank *faults = &job->rank;
  *out = (even_chaos_answer){.said = EVEN_CHAOS_SAID_OVER};
  if ((size_t)act->number >= job->next) {
    return;
  }
  const even_chaos_done *done = &job->done[act->number];
  if (act->verb == EVEN_CHAOS_FEED && faults->starved.until_ns != 0 && faults->starved_fault == done) {
    faults->starved.until_ns = 1;
  }
  even_chaos_relent(job, false);
  bool lacks = faults->starved.until_ns != 0 && faults->starved_fault == done;
  bool claims = faults->twin.pid != 0 && faults->twin_fault == done;
  if (lacks || claims) {
    out->said = EVEN_CHAOS_SAID_OPEN;
    return;
  }
  out->lack = (int)done->lack;
  out->broken = done->broken;
  (void)snprintf(out->words, sizeof out->words, "%s", done->words);
}

even_status even_chaos_part_act(even_chaos_job *job, const even_chaos_act *act, even_chaos_answer *out) {
  even_process_stat facts;
  switch (act->verb) {
    case EVEN_CHAOS_DO:
      return inject(job, act, out);
    case EVEN_CHAOS_LIVES:
      *out = (even_chaos_answer){.said = find_process(act, &facts) ? EVEN_CHAOS_SAID_YES : EVEN_CHAOS_SAID_NO};
      return EVEN_OK;
    case EVEN_CHAOS_LOOK:
    case EVEN_CHAOS_FEED:
      look(job, act, out);
      return EVEN_OK;
    case EVEN_CHAOS_VERBS:
      break;
  }
  return even_fail(EVEN_ERR_ARGUMENT, "there is no act of the number %d", (int)act->verb);
}

/* ---- the command ---- */

typedef struct part {
  even_chaos_job job;
  even_loop loop;
  even_loop_watch input, signal;
  even_signals signals;
  even_text heard;
  bool over; /* nobody asks any more */
} part;

static void input_ready(void *context, int fd) {
  part *own = context;
  char buffer[LONGEST_LINE];
  size_t got = 0;
  even_pipe_state state = even_pipe_read(fd, buffer, sizeof buffer, &got);
  if (state == EVEN_PIPE_DATA) {
    even_text_append(&own->heard, buffer, got);
  }
  own->over = own->over || state == EVEN_PIPE_ENDED;
}

static void signal_ready(void *context, int fd) {
  part *own = context;
  (void)fd;
  int number = even_signals_next(&own->signals);
  own->over = own->over || number == SIGINT || number == SIGTERM || number == SIGHUP;
}

/* What goes wrong here is the answer: who asked says what became of the fault. */
static even_status answer(part *own, const char *line) {
  even_text text = EVEN_TEXT_EMPTY;
  even_chaos_act act;
  even_chaos_answer found = {.said = EVEN_CHAOS_SAID_NOT};
  even_status status = even_chaos_act_read(line, &act);
  status = status == EVEN_OK ? even_chaos_part_act(&own->job, &act, &found) : status;
  if (status != EVEN_OK) {
    found = (even_chaos_answer){.said = EVEN_CHAOS_SAID_NOT};
    (void)snprintf(found.words, sizeof found.words, "%.200s", even_error_last()->what);
    even_error_clear();
  }
  for (char *at = found.words; *at != '\0'; at++) { /* what others have said may have ends of lines */
    *at = *at == '\n' || *at == '\r' ? ' ' : *at;
  }
  even_chaos_answer_write(&found, &text);
  status = even_text_status(&text);
  own->over = own->over || printf("%s\n", even_text_string(&text)) < 0 || fflush(stdout) != 0;
  even_text_free(&text);
  return status;
}

/* All whole lines. */
static even_status take_lines(part *own) {
  for (;;) {
    char *end = own->heard.length == 0 ? NULL : memchr(own->heard.data, '\n', own->heard.length);
    if (end == NULL) {
      return own->heard.length > LONGEST_LINE ? even_fail(EVEN_ERR_INPUT, "a line without an end")
                                              : even_text_status(&own->heard);
    }
    *end = '\0';
    EVEN_TRY(answer(own, own->heard.data));
    size_t taken = (size_t)(end - own->heard.data) + 1;
    own->heard.length -= taken;
    memmove(own->heard.data, own->heard.data + taken, own->heard.length + 1);
  }
}

static even_status serve(part *own) {
  EVEN_TRY(even_chaos_part_open(&own->job));
  EVEN_TRY(even_loop_open(&own->loop));
  EVEN_TRY(even_loop_add(&own->loop, &own->input, STDIN_FILENO, input_ready, own));
  EVEN_TRY(even_loop_add(&own->loop, &own->signal, own->signals.fd, signal_ready, own));
  own->over = printf("ready %s\n", even_version()) < 0 || fflush(stdout) != 0;
  while (!own->over) {
    EVEN_TRY(even_loop_turn(&own->loop, LOOK_MS));
    EVEN_TRY(take_lines(own));
    even_chaos_relent(&own->job, false);
  }
  return EVEN_OK;
}

int even_chaos_serve(void) {
  static part own;
  own = (part){.loop = {.fd = -1}, .input = {.fd = -1}, .signal = {.fd = -1}};
  even_status status = even_signals_open(&own.signals);
  if (status == EVEN_OK) {
    status = serve(&own);
    int code = status == EVEN_OK ? 0 : even_cli_fail_of(status);
    even_chaos_part_close(&own.job);
    even_loop_close(&own.loop);
    even_text_free(&own.heard);
    even_signals_close(&own.signals);
    return code;
  }
  return even_cli_fail_of(status);
}
