/* Faults of one rank: it gets no memory, a gradient of its is NaN, a second process claims to be it. */
#include "base/fail.h"
#include "cli/chaos.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/memory_limit.h"
#include "os/pipe.h"
#include "os/shared_memory.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* So long a second process of the script may take to come to es.prepare, beside the whole undisturbed run's time. */
#define TWIN_NS ((uint64_t)120 * 1000000000u)
enum { LARGEST_ENVIRONMENT = 1 << 22, MOST_STRINGS = 8192, MOST_SAID = 1 << 16 };

/* ---- memory ---- */

even_status even_chaos_starve(even_chaos_job *job, const even_process_stat *rank) {
  even_chaos_rank *faults = &job->rank;
  char words[96];
  if (faults->starved.until_ns != 0 || !even_chaos_may_lack(job)) {
    return EVEN_OK;
  }
  even_status status = even_memory_limit_set(rank->pid, 0, &faults->limit_before);
  if (status == EVEN_ERR_NOT_FOUND) { /* it has just ended */
    even_error_clear();
    return EVEN_OK;
  }
  EVEN_TRY(status);
  faults->starved = (even_chaos_process){
      .pid = rank->pid, .start_time = rank->start_time, .until_ns = even_clock_ns() + job->hold_ns};
  faults->starved_fault = &job->done[job->next];
  (void)snprintf(words, sizeof words, "rank %d (process %ld) gets no more memory, " EVEN_CHAOS_HELD, job->victim,
                 (long)rank->pid, (double)job->hold_ns * 1e-9);
  even_chaos_tell(job, words);
  return EVEN_OK;
}

/* Whether it has ended for it. One that needs none is not hurt, nor is one that does without, which cannot be told. */
static void judge_lack(even_chaos_job *job, bool ended) {
  even_chaos_done *done = job->rank.starved_fault;
  size_t length = strlen(done->words);
  if (ended) {
    even_chaos_read_history(job);
  }
  bool over = ended && even_chaos_last_step(job) + 1 >= job->steps; /* all is done */
  if (job->ended_ns > done->at_ns) {
    (void)snprintf(done->words + length, sizeof done->words - length, "; another fault came meanwhile");
    return;
  }
  done->lack = ended && !over ? EVEN_CHAOS_LACK_HURT : EVEN_CHAOS_LACK_BORNE;
  (void)snprintf(done->words + length, sizeof done->words - length, "; it %s",
                 done->lack == EVEN_CHAOS_LACK_HURT ? "ended for it" : "needed none, or did without");
}

static void feed(even_chaos_job *job) {
  even_chaos_rank *faults = &job->rank;
  even_process_stat now;
  judge_lack(job, !even_chaos_lives(&faults->starved));
  if (even_process_stat_read(faults->starved.pid, &now) == 0 && now.start_time == faults->starved.start_time &&
      even_memory_limit_restore(faults->starved.pid, faults->limit_before) != EVEN_OK) {
    even_error_clear(); /* it ends meanwhile */
  }
  faults->starved.until_ns = 0;
}

/* ---- NaN ---- */

/* A rank's byte, which python/evenstep/chaos.py looks at in backward. */
enum { NEVER_ASKED, ASKED, DONE };

static even_shared_memory gradients;

static bool has_kind(const even_chaos_job *job, even_chaos_kind kind) {
  for (size_t i = 0; i < job->faults; i++) {
    if (job->plan[i].kind == kind) {
      return true;
    }
  }
  return false;
}

even_status even_chaos_rank_open(even_chaos_job *job, int ranks) {
  if (!has_kind(job, EVEN_CHAOS_NAN)) {
    return EVEN_OK;
  }
  EVEN_TRY(even_shared_memory_create("evenstep-chaos-nan", (size_t)ranks, &gradients));
  job->rank.gradients = gradients.address;
  even_chaos_tell_children("EVENSTEP_CHAOS_NAN", gradients.fd);
  return EVEN_OK;
}

void even_chaos_rank_close(even_chaos_job *job) {
  if (job->rank.gradients != NULL) {
    (void)unsetenv("EVENSTEP_CHAOS_NAN");
    even_shared_memory_close(&gradients);
    job->rank.gradients = NULL;
  }
  even_text_free(&job->rank.said);
  even_text_free(&job->rank.lost.line);
  even_text_free(&job->rank.lost.variables);
}

void even_chaos_spoil(even_chaos_job *job, const even_process_stat *rank) {
  even_chaos_rank *faults = &job->rank;
  char words[64];
  if (!faults->asked) {
    faults->asked = true;
    faults->asked_rank = job->victim;
    faults->asked_of = (even_chaos_process){.pid = rank->pid, .start_time = rank->start_time};
    __atomic_store_n(&faults->gradients[job->victim], ASKED, __ATOMIC_RELEASE);
    return;
  }
  job->victim = faults->asked_rank;
  unsigned char *byte = &faults->gradients[job->victim];
  if (__atomic_load_n(byte, __ATOMIC_ACQUIRE) == DONE) {
    faults->asked = false;
    (void)snprintf(words, sizeof words, "a gradient of rank %d was NaN in one backward", job->victim);
    even_chaos_tell(job, words);
  } else if (job->recovers &&
             !even_chaos_lives(&faults->asked_of)) { /* nobody may come to its place: another is asked */
    __atomic_store_n(byte, NEVER_ASKED, __ATOMIC_RELEASE);
    faults->asked = false;
  }
}

/* ---- a rank twice ---- */

/* NUL-terminated strings one after the other; without those that name descriptors, which are the rank's own. */
static void take_strings(char *data, size_t length, bool variables, char **out) {
  size_t count = 0;
  for (size_t at = 0; at < length && count < MOST_STRINGS; at += strlen(data + at) + 1) {
    const char *sign = strchr(data + at, '=');
    bool descriptor = variables && sign != NULL && sign - (data + at) > 3 && memcmp(sign - 3, "_FD", 3) == 0;
    if (!descriptor) {
      out[count++] = data + at;
    }
  }
  out[count] = NULL;
}

static even_status read_strings(pid_t pid, const char *what, even_text *out) {
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%ld/%s", (long)pid, what);
  return even_file_read(path, LARGEST_ENVIRONMENT, out);
}

/* With --namespaces it is started in the network of the one that it claims to be, or that has started it. */
static even_status start_process(const even_chaos_job *job, pid_t near, even_text *line, even_text *variables,
                                 even_process *out) {
  static char *words[MOST_STRINGS + 3];
  static char *environment[MOST_STRINGS + 1];
  char enter[48];
  size_t own = 0;
  if (job->network != NULL) {
    (void)snprintf(enter, sizeof enter, "--net=/proc/%ld/ns/net", (long)near);
    words[own++] = "nsenter";
    words[own++] = enter;
  }
  take_strings(line->data, line->length, false, words + own);
  take_strings(variables->data, variables->length, true, environment);
  const even_process_params params = {.arguments = words, .environment = environment};
  return even_process_start(&params, out);
}

void even_chaos_remember(even_chaos_job *job, const even_process_stat *rank) {
  even_chaos_lost *lost = &job->rank.lost;
  even_chaos_forget(job);
  lost->rank = job->victim;
  lost->of = (even_chaos_process){.pid = rank->pid, .start_time = rank->start_time};
  if (read_strings(rank->pid, "cmdline", &lost->line) != EVEN_OK ||
      read_strings(rank->pid, "environ", &lost->variables) != EVEN_OK) {
    even_error_clear(); /* it has just ended */
    even_chaos_forget(job);
  }
}

void even_chaos_forget(even_chaos_job *job) {
  even_text_clear(&job->rank.lost.line);
  even_text_clear(&job->rank.lost.variables);
}

/* A second process begins to be a rank that lives, or (`lost`) one that has ended, whose place others may have. */
static even_status begin_twin(even_chaos_job *job, const even_process_stat *rank, bool lost) {
  even_chaos_rank *faults = &job->rank;
  even_text line = EVEN_TEXT_EMPTY;
  even_text variables = EVEN_TEXT_EMPTY;
  char words[160];
  even_status status = EVEN_OK;
  if (!lost) {
    status = read_strings(rank->pid, "cmdline", &line);
    status = status == EVEN_OK ? read_strings(rank->pid, "environ", &variables) : status;
  }
  even_text *of[2] = {lost ? &faults->lost.line : &line, lost ? &faults->lost.variables : &variables};
  bool known = status == EVEN_OK && of[0]->length > 0 && of[1]->length > 0;
  even_error_clear(); /* else it has just ended */
  status = known ? start_process(job, rank->pid, of[0], of[1], &faults->twin) : EVEN_OK;
  if (known && status == EVEN_OK) {
    even_text_clear(&faults->said);
    faults->claims_lost = lost;
    job->victim = lost ? faults->lost.rank : job->victim;
    faults->claimed = lost ? faults->lost.of : (even_chaos_process){.pid = rank->pid, .start_time = rank->start_time};
    faults->twin_fault = &job->done[job->next];
    faults->twin_until_ns = even_clock_ns() + TWIN_NS + job->usual_ns;
    (void)snprintf(words, sizeof words, "process %ld claims to be rank %d, which %s process %ld%s",
                   (long)faults->twin.pid, job->victim, lost ? "was" : "is", (long)faults->claimed.pid,
                   lost ? " and has ended" : "");
    even_chaos_tell(job, words);
  }
  even_text_free(&line);
  even_text_free(&variables);
  return status;
}

even_status even_chaos_start_twin(even_chaos_job *job, const even_process_stat *rank) {
  const even_chaos_rank *faults = &job->rank;
  if (faults->twin.pid != 0 || job->cut_until_ns != 0) {
    return EVEN_OK; /* one at a time; and what is cut off cannot be asked */
  }
  bool lost = (job->plan[job->next].dice >> 20 & 1u) != 0 && faults->lost.line.length > 0 &&
              !even_chaos_lives(&faults->lost.of);
  return begin_twin(job, rank, lost);
}

/* What it says is read, so that nothing holds it up; of its errors the last part is kept. */
static void listen(even_chaos_rank *faults) {
  char buffer[4096];
  size_t got = 0;
  while (even_pipe_read(faults->twin.output, buffer, sizeof buffer, &got) == EVEN_PIPE_DATA) {
  }
  while (even_pipe_read(faults->twin.error, buffer, sizeof buffer, &got) == EVEN_PIPE_DATA) {
    if (faults->said.length > MOST_SAID) {
      even_text_clear(&faults->said);
    }
    even_text_append(&faults->said, buffer, got);
  }
}

/* By our own word, or because its port is taken, which a second rank 0 finds first. */
static bool was_refused(const char *said) {
  return strstr(said, "EVEN_ERR_IN_USE") != NULL || strstr(said, "EADDRINUSE") != NULL;
}

/* Whoever ends without a refusal beside a rank that lives has had a part in the job. */
static void tell_end(even_chaos_rank *faults, bool by_itself, bool killed) {
  even_chaos_done *done = faults->twin_fault;
  size_t length = strlen(done->words);
  size_t room = sizeof done->words - length;
  const char *said = even_text_string(&faults->said);
  if (by_itself && was_refused(said)) {
    (void)snprintf(done->words + length, room, ", and was refused");
  } else if (killed) { /* it carries the job's mark: the agent ends it with the attempt */
    (void)snprintf(done->words + length, room, ", and was ended before it had come to es.prepare");
  } else if (by_itself && !faults->claims_lost && !even_chaos_lives(&faults->claimed)) {
    (void)snprintf(done->words + length, room, ", and ended when that one had");
  } else if (by_itself) {
    size_t end = strlen(said);
    while (end > 0 && said[end - 1] == '\n') {
      end--;
    }
    size_t begin = end;
    while (begin > 0 && said[begin - 1] != '\n') {
      begin--;
    }
    (void)snprintf(done->words + length, room, ", and was not refused, but ended: %.*s", (int)(end - begin),
                   said + begin);
    done->broken = true;
  } else {
    (void)snprintf(done->words + length, room, ", and was not refused");
    done->broken = true;
  }
}

static void look_after_twin(even_chaos_rank *faults, bool all) {
  bool late = even_clock_ns() >= faults->twin_until_ns;
  listen(faults);
  bool ended = even_process_has_ended(faults->twin.pid);
  if (!ended && !late && !all) {
    return;
  }
  listen(faults);
  if (ended || late) {
    int by = ended ? even_process_end_signal(faults->twin.pid) : 0;
    tell_end(faults, ended, by == SIGKILL || by == SIGTERM);
  } else {
    char *words = faults->twin_fault->words;
    size_t length = strlen(words);
    (void)snprintf(words + length, sizeof faults->twin_fault->words - length,
                   ", and had not started when the job ended");
  }
  if (!ended) {
    (void)even_process_signal_group(faults->twin.pid, SIGKILL);
    even_process_wait(faults->twin.pid);
  }
  even_pipe_close(faults->twin.output);
  even_pipe_close(faults->twin.error);
  faults->twin.pid = 0;
}

/* ---- at each look ---- */

void even_chaos_rank_relent(even_chaos_job *job, bool all) {
  even_chaos_rank *faults = &job->rank;
  if (faults->starved.until_ns != 0 && (all || even_clock_ns() >= faults->starved.until_ns ||
                                        !even_chaos_lives(&faults->starved) || even_chaos_must_relent(job))) {
    feed(job);
  }
  if (faults->twin.pid != 0) {
    look_after_twin(faults, all);
  }
}
