/* A leader that `evenstep chaos` has killed, or cut off, and the host that takes its place: found by the run's folder,
 * heard by the log that it keeps there, for it is no child of this process. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "cli/chaos.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/stream.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

/* A few seconds are usual (docs/hosts.md); beyond this nobody comes. */
#define COMES_NS ((uint64_t)60 * 1000000000u)
#define ENDS_NS ((uint64_t)30 * 1000000000u)
#define LOOK_NS ((uint64_t)20 * 1000000u)
enum { LARGEST_LOG = 64 << 20, LARGEST_FILE = 1 << 16 };
/* What the leader says once the others vote; */
static const char votes[] = "another one takes its place (3 of 3 vote)";
/* when it is cut off; and, where nobody took its place meanwhile, when it is not any more. */
static const char cut_off[] = "cut off from the majority of the hosts";
static const char *const goes_on[] = {"the majority of the hosts is heard again",
                                      "the ranks here were held meanwhile, and go on"};
/* One that was cut off for some seconds and does not say so has not noticed it, or goes on without a word. */
#define SAYS_NS ((uint64_t)60 * 1000000000u)
/* What one says at its end whose place another one has. */
static const char *const superseded[] = {" leads this job since generation ", "the job has ended on other hosts"};

bool even_chaos_is_voted_for(const even_chaos_job *job) {
  return job->agent.complaint.length > 0 && strstr(job->agent.complaint.data, votes) != NULL;
}

int even_chaos_ranks_led(const even_chaos_job *job) {
  bool fewer = (job->succeeded && !job->recovers) || job->sets_aside;
  int known = fewer && job->history != NULL ? even_history_state(job->history)->ranks : 0;
  return known > 0 && known < job->ranks ? known : job->ranks;
}

even_chaos_process even_chaos_owner_of(const char *folder, pid_t killed) {
  even_chaos_process found = {.pid = 0};
  even_process_stat facts;
  even_text path = EVEN_TEXT_EMPTY;
  even_text content = EVEN_TEXT_EMPTY;
  json_t *said = NULL;
  even_text_format(&path, "%s/agent.json", folder);
  if (even_text_status(&path) == EVEN_OK &&
      even_file_read(even_text_string(&path), LARGEST_FILE, &content) == EVEN_OK &&
      even_json_parse("agent.json", even_text_string(&content), content.length, &said) == EVEN_OK) {
    pid_t pid = (pid_t)json_integer_value(json_object_get(said, "pid"));
    if (pid > 1 && pid != killed && even_process_stat_read(pid, &facts) == 0 && facts.state != 'Z') {
      found = (even_chaos_process){.pid = pid, .start_time = facts.start_time};
    }
  }
  even_error_clear(); /* it is not there, or is being written */
  json_decref(said);
  even_text_free(&content);
  even_text_free(&path);
  return found;
}

/* Who leads in place of the one that was killed, or cut off; one that does while that one lives has a folder beside
 * its. */
static void find_leader(even_chaos_job *job, pid_t killed) {
  const bool cut = job->leader_cut != NULL;
  const pid_t before = cut ? job->led_before : killed;
  even_text beside = EVEN_TEXT_EMPTY;
  if (job->leader.pid != 0) {
    return;
  }
  even_text_format(&beside, "%s.1", even_text_string(&job->folder));
  if (cut && even_text_status(&beside) == EVEN_OK) {
    job->leader = even_chaos_owner_of(even_text_string(&beside), before);
  }
  if (job->leader.pid != 0) {
    even_text_free(&job->led_folder);
    job->led_folder = beside;
  } else {
    even_text_free(&beside);
    job->leader = even_chaos_owner_of(even_text_string(&job->folder), before);
  }
  job->led_ns = even_clock_ns();
}

even_status even_chaos_await_leader(even_chaos_job *job, pid_t killed) {
  even_chaos_done *done = &job->done[job->next - 1];
  uint64_t began = even_clock_ns();
  for (;;) {
    find_leader(job, killed);
    if (job->leader.pid != 0) {
      break;
    }
    if (even_clock_ns() - began > COMES_NS) {
      return even_fail(EVEN_ERR_TIMEOUT, "%s hangs: its leader (process %ld) was %s, and none took its place in %.0f s",
                       job->name, (long)killed, job->leader_cut != NULL ? "cut off" : "killed",
                       (double)COMES_NS * 1e-9);
    }
    even_clock_sleep_ns(LOOK_NS);
  }
  done->noticed_ns = done->noticed_ns == 0 ? job->led_ns : done->noticed_ns;
  done->tended = job->leader_cut == NULL ? EVEN_CHAOS_REPLACED : EVEN_CHAOS_NOT_TENDED; /* no agent was killed */
  job->exit_code = -1;
  job->succeeded = true;
  job->agent_killed = false;
  job->agent.complaint = (even_text)EVEN_TEXT_EMPTY;
  job->agent.process.pid = job->leader.pid;
  job->started_ns = done->at_ns;
  size_t length = strlen(done->words);
  (void)snprintf(done->words + length, sizeof done->words - length, "; process %ld led after %.2f s",
                 (long)job->leader.pid, (double)(job->led_ns - done->at_ns) * 1e-9);
  job->leader_cut = NULL;
  return EVEN_OK;
}

/* ---- a leader that is cut off ---- */

static bool has_said(const even_chaos_job *job, const char *words) {
  const even_text *said = &job->agent.complaint;
  size_t heard = job->leader_cut->heard;
  return said->length > heard && strstr(said->data + heard, words) != NULL;
}

static void break_promise(even_chaos_job *job, const char *why) {
  even_chaos_done *done = job->leader_cut;
  size_t length = strlen(done->words);
  (void)snprintf(done->words + length, sizeof done->words - length, "; %s", why);
  done->broken = true;
}

void even_chaos_leader_look(even_chaos_job *job) {
  if (job->leader_cut == NULL) {
    return;
  }
  uint64_t now = even_clock_ns();
  job->leader_linked_ns = job->cut_until_ns != 0 ? 0 : job->leader_linked_ns == 0 ? now : job->leader_linked_ns;
  find_leader(job, job->agent.process.pid);
  if (job->leader.pid != 0) {
    return; /* it ends when it hears of that one */
  }
  bool on = has_said(job, goes_on[0]) || has_said(job, goes_on[1]);
  if (on) {
    size_t length = strlen(job->leader_cut->words);
    (void)snprintf(job->leader_cut->words + length, sizeof job->leader_cut->words - length,
                   "; it leads again, before another one did");
    job->leader_cut = NULL;
  } else if (job->leader_linked_ns != 0 && now - job->leader_linked_ns > SAYS_NS) {
    break_promise(job, has_said(job, cut_off) ? "it neither went on nor ended" : "it did not say that it was cut off");
    job->leader_cut = NULL;
  }
}

bool even_chaos_is_superseded(even_chaos_job *job) {
  if (job->leader_cut == NULL) {
    return false;
  }
  find_leader(job, job->agent.process.pid);
  if (has_said(job, superseded[0]) || has_said(job, superseded[1])) {
    return true;
  }
  if (job->leader.pid != 0) {
    break_promise(job, "it ended otherwise than by hearing of the next one");
  }
  return job->leader.pid != 0;
}

/* What it has said since then, behind what it had. */
static void listen(even_chaos_job *job) {
  char buffer[16384];
  even_text path = EVEN_TEXT_EMPTY;
  even_input log = {.fd = -1};
  even_text *heard = &job->agent.complaint;
  even_text_format(&path, "%s/logs/leader.log", even_text_string(&job->folder));
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_input_open(even_text_string(&path), &log);
  }
  const uint64_t end = log.fd >= 0 && log.bytes < LARGEST_LOG ? log.bytes : 0;
  while (status == EVEN_OK && heard->length < end) {
    size_t left = (size_t)end - heard->length;
    size_t bytes = left < sizeof buffer ? left : sizeof buffer;
    status = even_input_read_at(&log, heard->length, buffer, bytes);
    if (status == EVEN_OK) {
      even_text_append(heard, buffer, bytes);
      status = even_text_status(heard);
    }
  }
  even_input_close(&log);
  even_error_clear(); /* it has said nothing yet */
  even_text_free(&path);
}

/* The next whole line of that; NULL: none yet. */
static const char *next_line(even_chaos_job *job) {
  const even_text *heard = &job->agent.complaint;
  const char *from = heard->length > job->leader_taken ? heard->data + job->leader_taken : NULL;
  const char *end = from == NULL ? NULL : memchr(from, '\n', heard->length - job->leader_taken);
  if (end == NULL) {
    return NULL;
  }
  even_text_clear(&job->leader_line);
  even_text_append(&job->leader_line, from, (size_t)(end - from));
  job->leader_taken += (size_t)(end - from) + 1;
  return even_text_string(&job->leader_line);
}

even_status even_chaos_hear_leader(even_chaos_job *job, int64_t timeout_ms, const char **line) {
  *line = next_line(job);
  if (*line != NULL) {
    return EVEN_OK;
  }
  bool lives = even_chaos_lives(&job->leader); /* before its last words are looked for */
  listen(job);
  *line = next_line(job);
  if (*line != NULL) {
    return EVEN_OK;
  }
  if (!lives) {
    const even_text *heard = &job->agent.complaint;
    size_t last = heard->length < sizeof job->complaint ? heard->length : sizeof job->complaint - 1;
    (void)snprintf(job->complaint, sizeof job->complaint, "%s", even_text_string(heard) + heard->length - last);
    return EVEN_OK;
  }
  even_clock_sleep_ns((uint64_t)timeout_ms * 1000000u);
  return EVEN_ERR_TIMEOUT;
}

void even_chaos_end_leader(even_chaos_job *job) {
  static const int signals[] = {SIGTERM, SIGKILL};
  for (size_t i = 0; i < sizeof signals / sizeof signals[0] && job->succeeded; i++) {
    uint64_t until = even_clock_ns() + ENDS_NS;
    (void)even_process_signal_exactly(job->leader.pid, job->leader.start_time, signals[i]);
    while (even_chaos_lives(&job->leader) && even_clock_ns() < until) {
      even_clock_sleep_ns(LOOK_NS);
    }
  }
  if (job->succeeded) {
    even_text_free(&job->agent.complaint);
  }
  even_text_free(&job->leader_line);
  job->succeeded = false;
}
